#include "actors/answer.hpp"
#include "actors/device_access.hpp"
#include "actors/messages.hpp"
#include "actors/system.hpp"
#include "foundation/never_destroyed.hpp"
#include <troupe/device.hpp>

#include <caf/all.hpp>

#include <condition_variable>
#include <mutex>
#include <numeric>

namespace troupe {

namespace detail {

caf::expected<caf::actor_system*> system_of(const std::vector<device>& devices,
                                            std::vector<int>& ordinals, std::string_view what) {
  if (devices.empty())
    return make_error(errc::invalid_argument,
                      "the list of devices of " + std::string{what} + " is empty");
  for (auto& x : devices)
    if (auto& why = device_access::core_of(x).why_none(); why)
      return why;
  auto& sys = device_access::system_of(devices.front());
  ordinals.clear();
  for (auto& x : devices) {
    if (&device_access::system_of(x) != &sys)
      return make_error(errc::invalid_argument, "the devices belong to different actor systems");
    ordinals.push_back(x.ordinal());
  }
  return &sys;
}

caf::error wait_until_ready(device_state& state, std::chrono::nanoseconds deadline) {
  struct view {
    std::mutex mutex;
    std::condition_variable condition;
    device_changed last;
  };
  auto seen = std::make_shared<view>();
  auto watch = state.watch([seen](const device_changed& change) {
    std::lock_guard lock{seen->mutex};
    seen->last = change;
    seen->condition.notify_all();
  });
  std::unique_lock lock{seen->mutex};
  seen->condition.wait_until(lock, from_now(deadline),
                             [&] { return seen->last.phase != device_phase::opening; });
  auto last = seen->last;
  lock.unlock();
  state.unwatch(watch);
  if (last.phase == device_phase::ready || last.phase == device_phase::resetting)
    return {};
  if (last.phase == device_phase::opening)
    return make_error({.code = errc::deadline_exceeded,
                       .detail = "the device is not ready yet" +
                                 (last.reason ? ": " + describe(last.reason) : std::string{}),
                       .device = last.device});
  return last.reason ? last.reason : make_error(errc::unavailable, "the device ended");
}

} // namespace detail

caf::expected<device_list> list_devices(caf::actor_system& sys) {
  auto core = detail::system_core::of(sys);
  if (!core)
    return core.error();
  auto owner = (*core)->runtime();
  if (!owner)
    return owner.error();
  device_list result{std::string{(*owner)->backend().name()}, (*core)->reason(), {}};
  result.ordinals.resize(static_cast<std::size_t>((*owner)->device_count()));
  std::iota(result.ordinals.begin(), result.ordinals.end(), 0);
  return result;
}

std::vector<int> all_devices(caf::actor_system& sys) {
  auto list = list_devices(sys);
  return list ? std::move(list->ordinals) : std::vector<int>{};
}

caf::expected<device> device::open(caf::actor_system& sys, int ordinal,
                                   std::chrono::nanoseconds deadline) {
  if (auto refused = detail::check_may_block(); refused)
    return refused;
  auto core = detail::system_core::of(sys);
  if (!core)
    return core.error();
  auto owner = (*core)->runtime();
  if (!owner)
    return owner.error();
  auto worker = (*owner)->lane_of(ordinal);
  if (!worker)
    return worker.error();
  auto lease = (*core)->lease(sys);
  if (!lease)
    return lease.error();
  if (auto error = detail::wait_until_ready((*worker)->state(), deadline); error)
    return error;
  return detail::device_access::make(*lease, std::move(*owner), std::move(*worker));
}

const detail::device_core& device::core() const noexcept {
  struct empty {
    detail::device_core core{
        make_error(errc::invalid_argument, "there is no device: this object is empty")};
  };
  return core_ ? *core_ : detail::never_destroyed<empty>().core;
}

int device::ordinal() const noexcept { return core().why_none() ? -1 : core().state().ordinal(); }

std::uint64_t device::generation() const noexcept {
  return core().why_none() ? 0 : core().state().generation();
}

std::uint64_t device::incarnation() const noexcept {
  return core().why_none() ? 0 : core().state().incarnation();
}

device_phase device::phase() const noexcept {
  return core().why_none() ? device_phase::failed : core().state().phase();
}

caf::expected<caf::actor> device::actor() const {
  if (auto refused = detail::check_may_block(); refused)
    return refused;
  if (auto& why = core().why_none(); why)
    return why;
  caf::scoped_actor self{lease_->system};
  return detail::ask<caf::actor>(self, lease_->root, std::chrono::seconds{10},
                                 detail::get_device_actor{ordinal()});
}

pending<any_gpu_ref> device::allocate(dtype type, std::size_t count, bool zeroed,
                                      request_options options) const {
  return answer(core().allocate(count, type, zeroed, options));
}

caf::expected<host_buffer> device::allocate_pinned(std::size_t size_bytes,
                                                   request_options options) const {
  if (auto refused = detail::check_may_block(); refused)
    return refused;
  return answer(core().allocate_pinned(size_bytes, options)).wait();
}

pending<void> device::upload(const any_gpu_ref& target, std::span<const std::byte> source,
                             request_options options) const {
  // An upload only reads the source.
  std::span<std::byte> memory{const_cast<std::byte*>(source.data()), source.size()};
  return answer(core().upload(target, std::make_shared<detail::host_range>(memory), options));
}

pending<void> device::upload(const any_gpu_ref& target, host_buffer source,
                             request_options options) const {
  return answer(
      core().upload(target, std::make_shared<detail::host_range>(std::move(source)), options));
}

pending<void> device::download(const any_gpu_ref& source, std::span<std::byte> target,
                               request_options options) const {
  return answer(core().download(source, std::make_shared<detail::host_range>(target), options));
}

pending<void> device::download(const any_gpu_ref& source, host_buffer target,
                               request_options options) const {
  return answer(
      core().download(source, std::make_shared<detail::host_range>(std::move(target)), options));
}

pending<void> device::fill(const any_gpu_ref& target, scalar element,
                           request_options options) const {
  return answer(core().fill(target, element, options));
}

pending<void> device::copy(const any_gpu_ref& target, const any_gpu_ref& source,
                           request_options options) const {
  return answer(core().copy(target, source, options));
}

pending<void> device::accept(const any_gpu_ref& target, request_options options) const {
  return answer(core().accept(target, options));
}

pending<void> device::launch(launch_function function, std::vector<any_gpu_ref> reads,
                             std::vector<any_gpu_ref> writes, request_options options) const {
  return answer(core().launch(std::move(function), reads, writes, options));
}

pending<void> device::launch(const std::string& name, std::vector<std::uint8_t> arguments,
                             std::vector<any_gpu_ref> reads, std::vector<any_gpu_ref> writes,
                             request_options options) const {
  return answer(core().launch(name, arguments, reads, writes, options));
}

caf::expected<any_gpu_ref> device::adopt(void* memory, std::size_t count, dtype type,
                                         std::function<void(void*)> deleter) const {
  return core().adopt(memory, count, type, std::move(deleter));
}

pending<void> device::acquire(const any_gpu_ref& ref, access_mode mode, CUstream_st* stream,
                              request_options options) const {
  return answer(core().acquire(ref, mode, stream, options));
}

pending<void> device::release(const any_gpu_ref& ref, access_mode mode, CUstream_st* stream,
                              request_options options) const {
  return answer(core().release(ref, mode, stream, options));
}

caf::expected<gpu_token> device::offer(const any_gpu_ref& memory,
                                       std::chrono::nanoseconds grace) const {
  return core().offer(memory, grace);
}

pending<any_gpu_ref> device::claim(const gpu_token& token, access_mode mode,
                                   request_options options) const {
  return answer(core().claim(token, mode, options));
}

pending<device_stats> device::stats(request_options options) const {
  return answer(core().stats(options));
}

pending<std::uint64_t> device::reset(request_options options) const {
  return answer(core().reset(options));
}

pending<std::uint64_t> device::hand_over(request_options options) const {
  return answer(core().hand_over(options));
}

void device::shutdown() const {
  core().shut_down(make_error(errc::unavailable, "the device was shut down"));
}

} // namespace troupe
