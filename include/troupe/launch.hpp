/// A user's own GPU work, ordered with all other work.
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

/// The context of a launch callable. Valid only during the call.
class launch_context {
public:
  virtual ~launch_context() = default;

  /// Returns the ordinal of the device, which is current on the calling thread.
  virtual int device() const noexcept = 0;

  /// Returns the stream for the work; null on the host backend.
  virtual CUstream_st* cuda_stream() const noexcept = 0;

  /// Calls `f` in stream order on a thread of the backend; `f` must not call CUDA. On the host
  /// backend, this is the way to compute. On CUDA, `f` is not called once the context is in error.
  ///
  /// If `f` throws, the launch fails with `errc::launch_failed`, and later functions of the same
  /// launch are not called. In a worker, a registered launch has already completed by then, so the
  /// exception ends the process: `errc::worker_lost`, with the exception's text.
  virtual caf::error run_on_host(std::function<void()> f) = 0;
};

/// A function that enqueues work on the context's stream and returns. It runs on the device's lane
/// and must not block. An exception or an error becomes `errc::launch_failed`.
///
/// CUDA loads a kernel at its first launch. That may wait for all work on the device, even for a
/// collective that waits for other devices' lanes. So load each kernel on each device beforehand
/// (launch it for no elements, or call `cudaFuncGetAttributes`), or set CUDA_MODULE_LOADING=EAGER
/// in the environment.
using launch_function = std::function<caf::error(launch_context&)>;

/// A registered launch: gets the refs of the request, in their order, and its arguments.
using registered_launch = std::function<caf::error(
    launch_context&, std::span<const any_gpu_ref> reads, std::span<const any_gpu_ref> writes,
    std::span<const std::byte> arguments)>;

/// Registers a launch by name, so that requests for it can travel between processes. Call it once
/// per process, at start.
/// @errors errc::invalid_argument: the name is taken or empty, or the function is empty
caf::error register_launch(std::string name, registered_launch function);

/// Returns the launch of that name; empty if there is none.
registered_launch find_launch(const std::string& name);

/// How a user's stream uses a buffer that it acquires, or another process a buffer that it claims.
enum class access_mode : std::uint8_t { read, write, read_write };
TROUPE_INSPECT_ENUM(access_mode)
std::string_view to_string(access_mode x) noexcept;

} // namespace troupe
