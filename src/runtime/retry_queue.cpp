#include "runtime/retry_queue.hpp"

#include "operation/admission_lock.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <iterator>
#include <utility>

namespace troupe::detail {

namespace {
/// How long requests wait for others that have failed, and should come to the queue at once.
constexpr std::chrono::milliseconds patience{20};
} // namespace

void retry_queue::add(std::shared_ptr<retryable> x) {
  std::lock_guard lock{mutex_};
  waiting_.push_back({std::move(x)});
}

retry_queue::entries retry_queue::take() {
  entries result;
  {
    std::lock_guard lock{mutex_};
    result.swap(waiting_);
  }
  std::ranges::sort(result, {}, [](const entry& x) { return x.who->key(); });
  return result;
}

void retry_queue::refuse_all(const caf::error& why) {
  for (auto& x : take()) {
    if (x.attempt)
      x.attempt->answer(why);
    x.who->on_refused(why);
  }
}

bool retry_queue::is_empty() {
  std::lock_guard lock{mutex_};
  return waiting_.empty();
}

/// Under order_mutex_. Returns whether to wait for requests that are not in the queue yet.
bool retry_queue::is_patient(clock::time_point now) {
  if (!incomplete_since_)
    incomplete_since_ = now;
  return now < *incomplete_since_ + patience;
}

/// Makes the requests again that wait now. Adds to `refused` those that are refused.
bool retry_queue::make_waiting(entries& refused) {
  auto all = take();
  for (auto& x : all) {
    if (!x.attempt)
      x.attempt = x.who->next_attempt();
    if (x.attempt && x.attempt->completed()) // refused when it was made
      x.refusal = x.attempt->error();
  }
  std::erase_if(all, [](const entry& x) { return !x.attempt; });
  const auto made = std::ranges::stable_partition(all, [](const entry& x) { return !x.refusal; });
  std::ranges::move(made, std::back_inserter(refused));
  all.erase(made.begin(), made.end());

  std::vector<retry> attempts;
  for (auto& x : all)
    attempts.push_back({x.attempt});
  std::optional<std::size_t> expected;
  if (is_patient(clock::now()))
    expected = all.size() + refused.size(); // these have no answer yet
  if (!admissions_.admit_again(attempts, expected)) {
    std::lock_guard lock{mutex_};
    std::ranges::move(all, std::back_inserter(waiting_));
    return false;
  }
  incomplete_since_.reset();
  for (std::size_t i = 0; i < all.size(); ++i)
    if (auto& refusal = attempts[i].refusal) {
      all[i].refusal = refusal;
      refused.push_back(std::move(all[i]));
    } else {
      all[i].who->on_admitted(all[i].attempt);
    }
  return true;
}

bool retry_queue::make_again() {
  entries refused;
  bool complete = true;
  {
    std::lock_guard order{order_mutex_};
    bool is_open = false;
    {
      admission_lock lock;
      is_open = admissions_.retries(lock).open_losses(lock) != 0;
    }
    if (is_open || is_empty())
      incomplete_since_.reset(); // the next round has patience of its own
    if (is_open)
      return true;
    while (complete && !is_empty())
      complete = make_waiting(refused);
  }
  for (auto& x : refused) { // without the mutex: a requester may make its next request at once
    x.attempt->answer(x.refusal);
    x.who->on_refused(x.refusal);
  }
  return complete;
}

} // namespace troupe::detail
