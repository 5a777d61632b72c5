/// Requests that wait to be handled in batches: dynamic batching.
#pragma once

#include <troupe/detail/completion.hpp>
#include <troupe/error.hpp>
#include <troupe/pending.hpp>
#include <troupe/task.hpp>
#include <troupe/timer.hpp>
#include <troupe/when.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

namespace troupe {

/// When a batch is due: `most` entries wait, or the first one has waited for `patience`.
struct batch_limits {
  std::size_t most = 32;
  std::chrono::nanoseconds patience = std::chrono::milliseconds{1};
};

/// A queue whose entries are taken in batches, oldest first. An entry whose deadline is over leaves
/// it another way. Each entry is in one place: in the queue, or where it was taken to. So it is
/// neither lost nor handled twice. The queue has to live until the tasks that it returns are over.
/// A `batch_server` has such a queue, and tasks that run its batches on devices.
///
///     troupe::task<> serve(replica r) { // as many as there are replicas
///       while (true) {
///         auto batch = co_await troupe::value_of(queue.take());
///         ...
///         if (!done && queue.give_back(std::move(batch))) // the replica was lost
///           continue; // another one takes it
///       }
///     }
///
/// @thread one at a time: the queue, and the tasks that use it, belong to one actor or one executor
template <class T> class batch_queue {
public:
  using clock = std::chrono::steady_clock;
  using time_point = clock::time_point;

  struct entry {
    T what;
    time_point arrived;
    time_point due; ///< the end of its deadline
  };
  using batch = std::vector<entry>;

  /// `limits.most`: 0 counts as 1.
  explicit batch_queue(batch_limits limits)
      : most_(std::max<std::size_t>(limits.most, 1)), patience_(limits.patience) {}
  batch_queue(const batch_queue&) = delete;
  batch_queue& operator=(const batch_queue&) = delete;
  ~batch_queue() { close(); }

  /// Adds an entry behind all others. Returns false, and drops it, if the queue is closed.
  [[nodiscard]] bool push(T what, std::chrono::nanoseconds deadline = detail::as_good_as_never) {
    if (closed_)
      return false;
    const auto now = clock::now();
    const auto due = sum(now, deadline);
    waiting_.push_back({std::move(what), now, due});
    if (waiting_.size() == 1 || waiting_.size() >= most_ || due < first_due_)
      wake();
    first_due_ = std::min(first_due_, due);
    return true;
  }

  /// Puts entries that were taken before all others; they keep their times. Returns false, and
  /// leaves them, if the queue is closed.
  [[nodiscard]] bool give_back(batch&& again) {
    if (closed_)
      return false;
    for (auto& x : again)
      first_due_ = std::min(first_due_, x.due);
    waiting_.insert(waiting_.begin(), std::move_iterator{again.begin()},
                    std::move_iterator{again.end()});
    again.clear();
    wake();
    return true;
  }

  /// Returns the next batch when it is due; it has at least one entry. The waits for it can be
  /// cancelled.
  /// @errors errc::unavailable: the queue is closed; errc::cancelled
  task<batch> take() {
    while (!closed_) {
      set_late_apart();
      const auto due = next_batch();
      if (due <= clock::now())
        co_return take_first();
      co_await value_of(changed_before(due));
    }
    co_return closed();
  }

  /// Returns the entries whose deadline is over, when there are any.
  /// @errors as `take`
  task<batch> take_late() {
    while (!closed_) {
      set_late_apart();
      if (!late_.empty())
        co_return std::exchange(late_, {});
      co_await value_of(changed_before(first_due_));
    }
    co_return closed();
  }

  /// Ends all waits, and returns what is left. Nothing can be added from then on.
  batch close() {
    closed_ = true;
    batch rest = std::exchange(late_, {});
    rest.insert(rest.end(), std::move_iterator{waiting_.begin()},
                std::move_iterator{waiting_.end()});
    waiting_.clear();
    wake();
    return rest;
  }

  /// Returns the number of entries.
  std::size_t size() const noexcept { return waiting_.size() + late_.size(); }

private:
  /// Without overflow.
  static time_point sum(time_point begin, std::chrono::nanoseconds time) {
    return time < time_point::max() - begin ? begin + time : time_point::max();
  }

  static caf::error closed() { return make_error(errc::unavailable, "the queue is closed"); }

  /// Returns when the next batch is due.
  time_point next_batch() const {
    if (waiting_.empty())
      return time_point::max();
    return waiting_.size() >= most_ ? time_point::min() : sum(waiting_.front().arrived, patience_);
  }

  batch take_first() {
    const auto end =
        waiting_.begin() + static_cast<std::ptrdiff_t>(std::min(most_, waiting_.size()));
    batch result{std::move_iterator{waiting_.begin()}, std::move_iterator{end}};
    waiting_.erase(waiting_.begin(), end);
    return result;
  }

  void set_late_apart() {
    const auto now = clock::now();
    if (now < first_due_)
      return;
    first_due_ = time_point::max();
    const auto late = std::stable_partition(waiting_.begin(), waiting_.end(), [&](const entry& x) {
      if (x.due > now)
        first_due_ = std::min(first_due_, x.due);
      return x.due > now;
    });
    if (late == waiting_.end())
      return;
    late_.insert(late_.end(), std::move_iterator{late}, std::move_iterator{waiting_.end()});
    waiting_.erase(late, waiting_.end());
    wake();
  }

  /// Waits until `wake` or `when`.
  task<> changed_before(time_point when) {
    const auto timer = after(when - clock::now());
    const auto woken = change_or(timer);
    if (const auto first = co_await value_of(woken); first == 1 && timer.error()) {
      wake(); // else `changed_` would keep its listener
      co_await end_with(timer.error());
    }
    timer.cancel();
  }

  pending<std::size_t> change_or(const pending<void>& timer) const {
    return when_any(std::vector<pending<void>>{{changed_, nullptr}, timer});
  }

  /// Lets the waiting tasks look again.
  void wake() { std::exchange(changed_, std::make_shared<detail::completion>())->answer({}); }

  const std::size_t most_;
  const std::chrono::nanoseconds patience_;
  std::deque<entry> waiting_;
  batch late_;                               ///< their deadlines are over
  time_point first_due_ = time_point::max(); ///< of `waiting_`, or earlier
  std::shared_ptr<detail::completion> changed_ = std::make_shared<detail::completion>();
  bool closed_ = false;
};

} // namespace troupe
