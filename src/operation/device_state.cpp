#include "operation/device_state.hpp"

#include "foundation/enum_name.hpp"
#include "foundation/never_destroyed.hpp"
#include "operation/buffer.hpp"
#include <troupe/detail/user_call.hpp>

#include <algorithm>
#include <map>
#include <utility>

namespace troupe {

std::string_view to_string(device_phase x) noexcept { return detail::enum_name(x); }

} // namespace troupe

namespace troupe::detail {

namespace {

struct device_registry {
  std::mutex mutex;
  std::map<std::pair<std::uint64_t, int>, std::weak_ptr<device_state>> devices;
};

device_registry& registry() { return never_destroyed<device_registry>(); }

} // namespace

std::shared_ptr<device_state> find_device(std::uint64_t node, int ordinal) {
  auto& all = registry();
  std::lock_guard lock{all.mutex};
  auto i = all.devices.find({node, ordinal});
  return i != all.devices.end() ? i->second.lock() : nullptr;
}

void register_device(const std::shared_ptr<device_state>& device) {
  auto& all = registry();
  std::lock_guard lock{all.mutex};
  std::erase_if(all.devices, [](const auto& x) { return x.second.expired(); });
  all.devices[{device->node(), device->ordinal()}] = device;
}

std::atomic<int> device_state::with_lost_work_{0};

device_state::~device_state() { set_lost_work(0, 0); }

void device_state::set_lost_work(std::uint64_t until, std::uint64_t over_until) noexcept {
  const int before = has_lost_work() ? 1 : 0;
  lost_until_ = until;
  lost_work_over_until_ = over_until;
  with_lost_work_.fetch_add((has_lost_work() ? 1 : 0) - before);
}

caf::error device_state::reason() const {
  std::lock_guard lock{mutex_};
  return last_reason_;
}

std::uint64_t device_state::watch(std::function<void(const device_changed&)> watcher) {
  std::lock_guard lock{mutex_};
  watcher({ordinal_, phase(), generation(), last_reason_, incarnation()});
  watchers_.emplace_back(++next_watcher_, std::move(watcher));
  return next_watcher_;
}

void device_state::unwatch(std::uint64_t id) noexcept {
  std::lock_guard lock{mutex_};
  std::erase_if(watchers_, [id](const auto& x) { return x.first == id; });
}

void device_state::end_loan() noexcept {
  if (loans_.fetch_sub(1) != 1)
    return;
  // Either this thread sees that the device is closed, or its lane sees that the loan has ended.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (live_incarnation() != 0)
    return;
  std::function<void()> wake;
  {
    std::lock_guard lock{released_mutex_};
    wake = wake_;
  }
  if (wake)
    wake();
}

bool device_state::is_lent() const noexcept {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return loans_.load() != 0;
}

void device_state::close(device_phase phase, const caf::error& why) {
  std::lock_guard lock{mutex_};
  live_generation_.store(0, std::memory_order_release);
  live_incarnation_.store(0, std::memory_order_release);
  change(phase, why);
}

void device_state::lose_process(const caf::error& why) {
  std::lock_guard lock{mutex_};
  live_incarnation_.store(0, std::memory_order_release);
  change(device_phase::resetting, why);
}

void device_state::publish() {
  std::lock_guard lock{mutex_};
  if (has_ended())
    return; // a device that has ended stays ended
  auto next = generation_.load() + 1;
  generation_.store(next, std::memory_order_release);
  live_generation_.store(next, std::memory_order_release);
  begin_incarnation();
}

void device_state::resume() {
  std::lock_guard lock{mutex_};
  if (!has_ended())
    begin_incarnation();
}

void device_state::leave_process() noexcept {
  std::lock_guard lock{mutex_};
  if (has_ended())
    return;
  live_incarnation_.store(0, std::memory_order_release);
  phase_.store(device_phase::resetting, std::memory_order_release);
}

void device_state::stay_in_process() noexcept {
  std::lock_guard lock{mutex_};
  if (has_ended())
    return;
  phase_.store(device_phase::ready, std::memory_order_release);
  live_incarnation_.store(incarnation_.load(), std::memory_order_release);
}

bool device_state::has_ended() const noexcept {
  return phase() == device_phase::failed || phase() == device_phase::shut_down;
}

void device_state::begin_incarnation() {
  auto next = incarnation_.load() + 1;
  incarnation_.store(next, std::memory_order_release);
  live_incarnation_.store(next, std::memory_order_release);
  change(device_phase::ready, {});
}

void device_state::report_failed_attempt(const caf::error& why) {
  std::lock_guard lock{mutex_};
  change(phase(), why);
}

void device_state::change(device_phase phase, const caf::error& why) {
  // A device that has ended stays ended.
  if (auto now = this->phase(); has_ended())
    if (phase != device_phase::shut_down || now == phase) {
      live_generation_.store(0, std::memory_order_release);
      live_incarnation_.store(0, std::memory_order_release);
      return;
    }
  phase_.store(phase, std::memory_order_release);
  last_reason_ = why;
  for (auto& [id, watcher] : watchers_)
    watcher({ordinal_, phase, generation(), why, incarnation()});
}

void device_state::release(released memory) noexcept {
  std::function<void()> wake;
  {
    std::lock_guard lock{released_mutex_};
    if (!lane_ended_) {
      released_.push_back(std::move(memory));
      memory.deleter = nullptr;
      has_released_.store(true, std::memory_order_release);
      wake = wake_;
    }
  }
  if (wake)
    wake();
  hand_back(std::move(memory));
}

void device_state::hand_back(released memory) const noexcept {
  if (!memory.deleter)
    return;
  if (!keeps_memory_.load())
    call_user_or_log("the deleter of memory of a device", [&] { memory.deleter(memory.address); });
  else // objects that the deleter holds may free memory too
    keep_forever(std::make_shared<std::function<void(void*)>>(std::move(memory.deleter)));
}

std::vector<device_state::released> device_state::take_released() noexcept {
  std::lock_guard lock{released_mutex_};
  has_released_.store(false, std::memory_order_relaxed);
  return std::exchange(released_, {});
}

void device_state::end_of_lane() noexcept {
  std::vector<released> rest;
  {
    std::lock_guard lock{released_mutex_};
    lane_ended_ = true;
    wake_ = nullptr;
    has_released_.store(false, std::memory_order_relaxed);
    rest.swap(released_);
  }
  for (auto& x : rest)
    hand_back(std::move(x));
}

void device_state::set_wake(std::function<void()> wake) {
  std::lock_guard lock{released_mutex_};
  wake_ = std::move(wake);
}

std::shared_ptr<buffer> device_state::make_buffer(void* address, std::size_t size_bytes,
                                                  std::function<void(void*)> deleter,
                                                  bool has_no_peers) {
  auto id = next_buffer_.fetch_add(1, std::memory_order_relaxed);
  return noted(std::make_shared<buffer>(shared_from_this(), id, generation(), address, size_bytes,
                                        std::move(deleter), has_no_peers));
}

std::shared_ptr<buffer> device_state::make_buffer(borrowed_memory memory) {
  auto id = next_buffer_.fetch_add(1, std::memory_order_relaxed);
  return noted(std::make_shared<buffer>(shared_from_this(), id, generation(), std::move(memory)));
}

std::shared_ptr<buffer> device_state::noted(std::shared_ptr<buffer> x) {
  std::lock_guard lock{buffers_mutex_};
  buffers_.emplace(x->id(), x);
  return x;
}

std::shared_ptr<buffer> device_state::find_buffer(std::uint64_t id) const {
  std::lock_guard lock{buffers_mutex_};
  auto i = buffers_.find(id);
  return i != buffers_.end() ? i->second.lock() : nullptr;
}

bool device_state::has_borrowed() const {
  std::vector<std::shared_ptr<buffer>> all; // destroyed without the lock
  std::lock_guard lock{buffers_mutex_};
  for (auto& [id, x] : buffers_)
    if (auto there = x.lock())
      all.push_back(std::move(there));
  return std::ranges::any_of(all, [](auto& x) { return x->is_borrowed() && !x->stale(); });
}

void device_state::forget_buffer(std::uint64_t id) noexcept {
  std::lock_guard lock{buffers_mutex_};
  buffers_.erase(id);
}

} // namespace troupe::detail
