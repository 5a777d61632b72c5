/// Communicators with the faults of a plan.
#pragma once

#include "backend/faults/fault_gate.hpp"
#include "backend/faults/fault_injector.hpp"
#include <troupe/backend.hpp>
#include <troupe/testing/fault_plan.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <utility>

namespace troupe::detail {

/// One rank of a communicator with the faults of `injector`. Gates are on the streams of `devices`.
class faulty_communicator final : public backend_communicator {
public:
  faulty_communicator(std::unique_ptr<backend_communicator> inner,
                      std::shared_ptr<fault_injector> injector,
                      std::shared_ptr<open_devices> devices, const communicator_id& id,
                      const local_rank& rank);

  caf::error connect(stream_view stream, connect_scope what) noexcept override;
  caf::error enqueue(std::span<const collective_call> calls, stream_view stream) noexcept override;
  /// A gate blocks the calling thread, which waits here for the other ranks anyway.
  caf::error register_window(void* memory, std::size_t size_bytes,
                             stream_view stream) noexcept override;
  caf::error deregister_window(void* memory) noexcept override;
  void on_loss(std::function<void()> f) noexcept override;
  caf::error hand_over(std::span<const std::byte> what) noexcept override;
  std::shared_ptr<const device_life> life() const noexcept override;

  const backend_communicator& inner() const noexcept { return *inner_; }

  void on_closed() noexcept override;
  caf::error asynchronous_error() noexcept override;

  const communicator_id& id() const noexcept { return id_; }
  int device() const noexcept { return rank_.device; }
  std::unique_ptr<backend_communicator> release() noexcept { return std::move(inner_); }

private:
  open_device device_now() noexcept;
  template <class F> caf::error call(testing::verb v, stream_view stream, F f) noexcept;

  std::shared_ptr<fault_injector> injector_;
  std::shared_ptr<open_devices> devices_;
  communicator_id id_;
  local_rank rank_;
  std::unique_ptr<backend_communicator> inner_;
};

} // namespace troupe::detail
