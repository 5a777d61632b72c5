/// Direct communicators: their collectives are kernels of the library over peer memory.
#pragma once

#include "backend/cuda/cuda_event.hpp"
#include "backend/cuda/direct_memory.hpp"
#include "backend/cuda/direct_plan.hpp"
#include "backend/cuda/driver_access.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

namespace troupe::detail {

/// One rank. The devices of all ranks have access to each other's memory.
class direct_communicator final : public backend_communicator {
public:
  direct_communicator(const direct::plane& view, const direct_arena& own,
                      const direct_limits& limits, bool starts_early,
                      shared_driver_access driver) noexcept
      : view_(view), own_(own), limits_(limits), starts_early_(starts_early),
        driver_(std::move(driver)), launched_(own.words->ended.load()) {}

  /// Nothing has to be connected.
  caf::error connect(stream_view, connect_scope) noexcept override { return {}; }
  caf::error enqueue(std::span<const collective_call> calls, stream_view stream,
                     step_position where) noexcept override;
  /// The graph counts as one kernel.
  caf::error replay(graph_view graph, stream_view stream, backend_device& device,
                    std::uint32_t* reached) noexcept override;
  /// The kernels themselves tell of their end.
  caf::error mark_end(event_view event, stream_view stream,
                      backend_device& device) noexcept override;
  void compare_calls() noexcept override { compares_.store(true); }
  /// @errors errc::device_fault; errc::collective_mismatch, after `compare_calls`
  caf::error asynchronous_error() noexcept override;

  /// Tells the kernels, also those that start later, to end at once. A launch may wait for them:
  /// while a thread frees pinned memory, CUDA waits for the device, and lets nothing be launched on
  /// it.
  void on_closed() noexcept override { own_.words->aborted.store(1, std::memory_order_release); }

  const direct_arena& arena() const noexcept { return own_; }
  /// Returns whether every kernel and every graph that was launched has ended. Graphs of other code
  /// do not count.
  bool is_idle() const noexcept {
    return own_.words->ended.load(std::memory_order_acquire) == launched_.load();
  }

private:
  class launcher;

  const direct::plane view_;
  const direct_arena own_;
  const direct_limits limits_;
  const bool starts_early_; ///< the kernels, by `launch_early`
  const shared_driver_access driver_;
  std::atomic<bool> compares_{false};
  std::atomic<std::uint32_t> launched_; ///< kernels, as `direct_words::ended` counts them
  kernel_end last_;                     ///< of the last `enqueue` or `replay`
  direct_messages messages_;            ///< of the last one, as room for the next
};

/// Loads the kernels on the current device (`kernel_image::load`).
cudaError_t load_direct() noexcept;

/// Implements `backend::can_be_direct`.
bool can_be_direct(std::span<const int> ordinals) noexcept;

/// Builds a communicator of these ranks, all of one communicator. Several may be on one device.
/// @errors errc::invalid_argument; errc::not_supported: more than `direct::most_ranks`, or devices
///         without access to each other's memory; errc::out_of_memory
caf::expected<communicator_ranks>
build_direct_communicator(std::span<const local_rank> ranks, int device_count,
                          const std::shared_ptr<direct_memory>& memory,
                          const shared_driver_access& driver) noexcept;

/// Implements `backend::join_direct`.
/// @errors as `build_direct_communicator`
caf::expected<communicator_ranks> join_direct_communicator(
    const communicator_id& id, int rank, std::span<const direct_member> members, int device_count,
    const std::shared_ptr<direct_memory>& memory, const shared_driver_access& driver) noexcept;

/// Ends the ranks of a communicator that are in this process. Blocks until their kernels have
/// ended.
/// @thread a reaper; no thread may be in a call on it
caf::error end_direct_communicator(communicator_ranks ranks, direct_memory& memory) noexcept;

} // namespace troupe::detail
