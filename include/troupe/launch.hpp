/// A user's own GPU work, in order with everything else.
#pragma once

#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

struct CUstream_st;

namespace troupe {

/// What a launch callable gets. Valid only during the call.
class launch_context {
public:
  virtual ~launch_context() = default;

  /// Ordinal of the device, which is current on the calling thread.
  virtual int device() const noexcept = 0;

  /// The stream that the work belongs into; null on the host backend.
  virtual CUstream_st* cuda_stream() const noexcept = 0;

  /// Calls `f` in stream order on a thread of the backend. It must not call CUDA. The way to
  /// compute on the host backend; on CUDA it is not called once the context is in error.
  ///
  /// What it throws becomes `errc::launch_failed` of the launch, and what the launch has it call
  /// after that is not called. In a worker, where a registered launch has gone on by then, it ends
  /// the process: `errc::worker_lost`, with its text.
  virtual caf::error run_on_host(std::function<void()> f) = 0;
};

/// Enqueues work on the context's stream and returns; runs on the device's lane, so it must not
/// block. An exception or an error becomes `errc::launch_failed`.
///
/// CUDA loads a kernel at its first launch, and that may wait for what is on the device, also for a
/// collective that waits for other devices' lanes: load it on each device before (a launch for no
/// elements, `cudaFuncGetAttributes`), or set CUDA_MODULE_LOADING=EAGER in the environment.
using launch_function = std::function<caf::error(launch_context&)>;

/// A registered launch: gets the refs of the request, in their order, and its arguments.
using registered_launch = std::function<caf::error(
    launch_context&, std::span<const any_gpu_ref> reads, std::span<const any_gpu_ref> writes,
    std::span<const std::byte> arguments)>;

/// Names a launch, so that requests for it can travel between processes. Once per process, at
/// start.
/// @errors errc::invalid_argument: the name is taken or empty, or there is no function
caf::error register_launch(std::string name, registered_launch function);

/// The launch of that name; empty if there is none.
registered_launch find_launch(const std::string& name);

/// How a user's stream uses a buffer that it acquires, or another process one that it claims.
enum class access_mode : std::uint8_t { read, write, read_write };
TROUPE_INSPECT_ENUM(access_mode)
std::string_view to_string(access_mode x) noexcept;

} // namespace troupe
