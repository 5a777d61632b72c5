#include "operation/room.hpp"

namespace troupe::detail {

room_choice choose_room(room_policy wanted) noexcept {
  if (wanted == room_policy::refuse)
    return {false, queue_bound::first};
  return may_block() ? room_choice{true, queue_bound::first}
                     : room_choice{false, queue_bound::second};
}

room_signal& process_room = *new room_signal; // never destroyed: threads may outlive static objects

void room_signal::wake() noexcept {
  std::lock_guard lock{mutex_};
  ++count_;
  changed_.notify_all();
}

room_signal::watch::watch(room_signal& on) noexcept : on_(on) {
  std::lock_guard lock{on_.mutex_};
  on_.waiting_.fetch_add(1); // before the caller looks for room
  seen_ = on_.count_;
}

room_signal::watch::~watch() { on_.waiting_.fetch_sub(1); }

void room_signal::watch::wait(clock::time_point until) noexcept {
  constexpr std::chrono::milliseconds missed{1}; // longest delay after a missed notify
  std::unique_lock lock{on_.mutex_};
  on_.changed_.wait_until(lock, std::min(until, clock::now() + missed),
                          [this] { return on_.count_ != seen_; });
  seen_ = on_.count_;
}

caf::error too_late_for_room(const caf::error& full) {
  auto why = failure_of(full).value_or(failure{});
  why.code = errc::deadline_exceeded;
  why.detail = "the queue was full until its deadline: " + why.detail;
  return make_error(std::move(why));
}

} // namespace troupe::detail
