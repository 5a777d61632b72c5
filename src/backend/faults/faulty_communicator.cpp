#include "backend/faults/faulty_communicator.hpp"

#include <mutex>

namespace troupe::detail {

using testing::fault;
using testing::verb;

faulty_communicator::faulty_communicator(std::unique_ptr<backend_communicator> inner,
                                         std::shared_ptr<fault_injector> injector,
                                         std::shared_ptr<open_devices> devices,
                                         const communicator_id& id, const local_rank& rank)
    : injector_(std::move(injector)), devices_(std::move(devices)), id_(id), rank_(rank),
      inner_(std::move(inner)) {}

open_device faulty_communicator::device_now() noexcept {
  std::lock_guard lock{devices_->mutex};
  const auto i = devices_->by_ordinal.find(rank_.device);
  return i != devices_->by_ordinal.end() ? i->second : open_device{};
}

template <class F> caf::error faulty_communicator::call(verb v, stream_view stream, F f) noexcept {
  const caller who{rank_.device, rank_.rank, &id_};
  if (auto what = injector_->next(v, who)) {
    if (auto err = suffer(*injector_, *what, v, who, device_now(), stream))
      return err;
    if (what->kind == fault::not_issued && v == verb::collective)
      return {};
  }
  return f();
}

caf::error faulty_communicator::connect(stream_view stream, connect_scope what) noexcept {
  return call(verb::connect, stream, [&] { return inner_->connect(stream, what); });
}

caf::error faulty_communicator::enqueue(std::span<const collective_call> calls,
                                        stream_view stream) noexcept {
  return call(verb::collective, stream, [&] { return inner_->enqueue(calls, stream); });
}

caf::error faulty_communicator::register_window(void* memory, std::size_t size_bytes,
                                                stream_view stream) noexcept {
  return call(verb::register_window, {},
              [&] { return inner_->register_window(memory, size_bytes, stream); });
}

caf::error faulty_communicator::deregister_window(void* memory) noexcept {
  return call(verb::deregister_window, {}, [&] { return inner_->deregister_window(memory); });
}

void faulty_communicator::on_loss(std::function<void()> f) noexcept {
  inner_->on_loss(std::move(f));
}

void faulty_communicator::on_closed() noexcept { inner_->on_closed(); }

caf::error faulty_communicator::hand_over(std::span<const std::byte> what) noexcept {
  return inner_->hand_over(what);
}

std::shared_ptr<const device_life> faulty_communicator::life() const noexcept {
  return inner_->life();
}

caf::error faulty_communicator::asynchronous_error() noexcept {
  return call(verb::asynchronous_error, {}, [this] { return inner_->asynchronous_error(); });
}

} // namespace troupe::detail
