/// What a pool has of one device's workers.
#pragma once

#include "worker/worker_link.hpp"

#include <memory>
#include <mutex>
#include <stop_token>
#include <utility>
#include <vector>

namespace troupe::detail {

/// The worker of a device and its spare. `Running` is a worker as its pool has it: its `link`, null
/// where there is none, and what has to be ended with it. @thread any
template <class Running> class worker_slot {
public:
  /// The worker, or its spare, which is that from then on; if both are lost, what `start` makes
  /// until its token wants it back, as `stop` does: also where a spare is what is being started.
  /// `end` gets those that are lost.
  /// @errors what `start` gives
  template <class Start, class End>
  caf::expected<std::shared_ptr<worker_link>> provide(Start start, End end,
                                                      const std::stop_token& stop) {
    if (auto link = take(end))
      return link;
    return until_stopped(stop, [&] { return provide_anew(start, end); });
  }
  /// The same for the spare. Meanwhile the device may need another worker: `end` takes its time.
  /// @errors errc::unavailable, too: the device is closed
  template <class Start, class End>
  caf::error provide_spare(Start start, End end, const std::stop_token& stop) {
    return until_stopped(stop, [&] { return provide_spare_anew(start, end); });
  }
  /// Nothing is started any more; `end` gets the worker, the spare, and those that are lost.
  template <class End> void release(End end) {
    {
      std::lock_guard lock{mutex_};
      closed_ = true;
    }
    stop_starting();
    std::lock_guard one_at_a_time{starting_};
    Running now;
    Running spare;
    std::vector<Running> lost;
    {
      std::lock_guard lock{mutex_};
      now = std::exchange(now_, {});
      spare = std::exchange(spare_, {});
      lost.swap(lost_);
    }
    may_start_again();
    end(std::move(now), std::move(spare), std::move(lost));
  }

  /// It was started elsewhere. Before anything else.
  void begin_with(Running first) { now_ = std::move(first); }
  std::shared_ptr<worker_link> current() const {
    std::lock_guard lock{mutex_};
    return now_.link;
  }
  std::shared_ptr<worker_link> spare() const {
    std::lock_guard lock{mutex_};
    return spare_.link;
  }

private:
  /// `f` starts something.
  template <class F> auto until_stopped(const std::stop_token& stop, F f) {
    auto result = [&] {
      const std::stop_callback on_stop{stop, [this] { stop_starting(); }};
      return f();
    }();
    if (stop.stop_requested())
      may_start_again();
    return result;
  }
  template <class Start, class End>
  caf::expected<std::shared_ptr<worker_link>> provide_anew(Start& start, End& end) {
    std::lock_guard one_at_a_time{starting_}; // perhaps a spare is on its way
    if (auto link = take(end))
      return link;
    auto started = start(stop_token());
    if (!started)
      return started.error();
    std::lock_guard lock{mutex_};
    closed_ = false;
    now_ = std::move(*started);
    return now_.link;
  }
  template <class Start, class End> caf::error provide_spare_anew(Start& start, End& end) {
    std::lock_guard one_at_a_time{starting_};
    std::vector<Running> lost;
    {
      std::lock_guard lock{mutex_};
      if (closed_)
        return make_error(errc::unavailable, "the device is closed");
      if (is_there(spare_))
        return {};
      put_aside(spare_);
      lost.swap(lost_);
    }
    end(std::move(lost));
    auto started = start(stop_token());
    if (!started)
      return started.error();
    std::lock_guard lock{mutex_};
    spare_ = std::move(*started);
    return {};
  }
  static bool is_there(const Running& x) { return x.link && !x.link->lost(); }
  void put_aside(Running& x) {
    if (x.link)
      lost_.push_back(std::exchange(x, {}));
  }
  template <class End> std::shared_ptr<worker_link> take(End& end) {
    std::vector<Running> lost;
    {
      std::lock_guard lock{mutex_};
      if (is_there(now_))
        return now_.link;
      put_aside(now_);
      if (is_there(spare_)) {
        now_ = std::exchange(spare_, {}); // at once: what is lost can wait
        return now_.link;
      }
      put_aside(spare_);
      lost.swap(lost_);
    }
    end(std::move(lost));
    return nullptr;
  }
  /// What is being started ends at once, and what would be until it `may_start_again`.
  void stop_starting() {
    std::stop_source stop;
    {
      std::lock_guard lock{mutex_};
      stop = stop_;
    }
    stop.request_stop();
  }
  void may_start_again() {
    std::lock_guard lock{mutex_};
    stop_ = std::stop_source{};
  }
  std::stop_token stop_token() const {
    std::lock_guard lock{mutex_};
    return stop_.get_token();
  }

  mutable std::mutex mutex_; ///< nothing is done under it that takes time
  Running now_;
  Running spare_;
  std::vector<Running> lost_; ///< to be ended when there is time
  std::stop_source stop_;     ///< of what is being started
  bool closed_ = false;       ///< the device has been, and is not in use again
  std::mutex starting_;       ///< one worker at a time; before `mutex_`
};

} // namespace troupe::detail
