/// A user's own GPU work, ordered with all other work.
#pragma once

#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/launch_memory.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

struct CUstream_st;

namespace troupe {

/// The state of a library for a device in one process: handles, plans. See `register_library`.
/// @thread the one that issues the work of the device
class library_state {
public:
  virtual ~library_state() = default;

  /// Gives up what can be made again, since device memory has run out.
  virtual void trim() noexcept {}
};

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
  /// @errors errc::not_supported: in `library_launch::prepare` and in a `library_maker`, since no
  ///         operation waits there until `f` has run
  virtual caf::error run_on_host(std::function<void()> f) = 0;

  /// Returns what the library of this name keeps for the device; null: none is registered.
  virtual library_state* library(std::string_view name) const noexcept = 0;

  /// Returns device memory for the work of this call, aligned to 256 bytes. It is one area for each
  /// stream: the next call that works in the stream gets the same bytes.
  /// @units  size_bytes: bytes
  /// @errors errc::out_of_memory: nor was there any after each library had given up its plans
  virtual caf::expected<void*> workspace(std::size_t size_bytes) = 0;

  /// Returns a word in pinned memory, 0 at first, to which the work may write its verdict. If it is
  /// another number when the work is done, the request fails (`library_launch::judge`). Null for
  /// launches without `judge`.
  virtual std::int32_t* verdict() noexcept = 0;
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

/// How a `step` may repeat a launch.
enum class repetition : std::uint8_t {
  calls, ///< the function is called each time. Steps with such a launch run as their requests
  /// The function depends on nothing but its parameters, and enqueues work on the device alone. So
  /// that work may be recorded once, in a graph, and launched again without another call. It
  /// does not access memory itself. After `prepare`, a spare also records a library's `enqueue`, to
  /// load its kernels: with addresses of the same alignment, arguments after `clear_ignored`, and a
  /// workspace without memory. That graph is never launched.
  replays
};

/// Registers a launch by name, so that requests for it can travel between processes. Call it once
/// per process, at start.
/// @errors errc::invalid_argument: the name is taken or empty, or the function is empty
caf::error register_launch(std::string name, registered_launch function,
                           repetition repeats = repetition::calls);

/// Returns the launch of that name; empty if there is none.
registered_launch find_launch(const std::string& name);

/// A function of a library's launch: gets the memory of the request's handles, in their order.
using library_function = std::function<caf::error(
    launch_context&, std::span<const launch_memory> reads, std::span<const launch_memory> writes,
    std::span<const std::byte> arguments)>;

/// A registered launch of a library. Its errors keep their codes.
struct library_launch {
  const char* verb = "launch"; ///< in errors and records; of static lifetime
  /// As a registered launch: enqueues the work.
  library_function enqueue = {};
  /// Checks a request when it is made, on the requester's thread: if it fails, the request is
  /// refused. Empty: any request is right.
  std::function<caf::error(std::span<const launch_memory> reads,
                           std::span<const launch_memory> writes,
                           std::span<const std::byte> arguments)>
      check = {};
  /// Makes what `enqueue` needs, such as a plan. What it enqueues may use the workspace and no
  /// other memory. If it fails, the request counts as not run. Of addresses it may use the
  /// alignment alone. It is called before `enqueue`, but for a device in another process only once
  /// for the same arguments, types, counts and alignments: `enqueue` makes what is gone. Empty:
  /// nothing is needed.
  library_function prepare = {};
  /// Clears what `prepare` does not depend on, such as factors, in arguments that were checked.
  /// Launches that differ in nothing else are prepared once. Empty: it depends on all.
  std::function<void(std::span<std::byte> arguments)> clear_ignored = {};
  /// Returns the error for a verdict of the work, which is not 0 (`launch_context::verdict`).
  std::function<caf::error(std::int32_t)> judge = {};
  repetition repeats = repetition::calls; ///< of `enqueue`; not for launches with `judge`
};

/// Registers a launch of a library, in the same way.
/// @errors as for other launches
caf::error register_launch(std::string name, library_launch launch);

/// Makes what a library keeps for the device of `context`. What it enqueues is over before any
/// launch. For devices of the host backend it may return null.
using library_maker = std::function<caf::expected<std::unique_ptr<library_state>>(launch_context&)>;

/// Registers what a library keeps for each device. It is made on the device's lane, before the
/// device is ready, and again after each reset; in a worker process, when that opens the device. It
/// is dropped before the device's memory goes, but not if CUDA cannot be called any more. Call it
/// once per process, before the first device is opened.
/// @errors errc::invalid_argument: the name is taken or empty, or the function is empty
caf::error register_library(std::string name, library_maker make);

/// How a user's stream uses a buffer that it acquires, or another process a buffer that it claims.
enum class access_mode : std::uint8_t { read, write, read_write };
TROUPE_INSPECT_ENUM(access_mode)
std::string_view to_string(access_mode x) noexcept;

} // namespace troupe
