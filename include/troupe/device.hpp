/// A device: the messages that its actor understands, and the same verbs as functions.
#pragma once

#include <troupe/collective.hpp>
#include <troupe/detail/type_ids.hpp>
#include <troupe/device_status.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/host_buffer.hpp>
#include <troupe/launch.hpp>
#include <troupe/pending.hpp>
#include <troupe/scalar.hpp>

#include <caf/actor.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace troupe {

namespace detail {
class device_core;
struct system_lease;
struct device_access;
} // namespace detail

// -- messages. Each comment names the reply; on failure the reply is an error

/// Allocates memory on the device. Reply: `any_gpu_ref`.
/// @errors errc::out_of_memory: the device remains usable; errc::invalid_argument: no such type
struct allocate {
  std::uint64_t count = 0; ///< @units elements
  dtype type = dtype::float32;
  bool zeroed = false;
  request_options options = {};
};

/// Copies host memory into device memory: `upload{.target = x, .source = std::vector<float>{1,
/// 2}}`. Reply: an empty message.
/// @shape  source: as many bytes as the target
/// @errors errc::out_of_range: more bytes; errc::shape_mismatch: fewer
struct upload {
  any_gpu_ref target = {};
  host_buffer source = {};
  request_options options = {};
};

/// Copies device memory into host memory. Reply: `host_buffer`, whose `as<T>` has the elements.
/// @shape  reply: as many bytes as the source
/// @errors errc::stale_ref; errc::indeterminate: a failed operation may have written the source in
///         part; errc::skipped: a request that would have written the source did not run;
///         errc::out_of_memory: no pinned memory for staging
struct download {
  any_gpu_ref source = {};
  request_options options = {};
};

/// Writes one element to every place of the target: `fill{.target = x, .element = 1.0f}`. Reply: an
/// empty message.
/// @errors errc::shape_mismatch: the element is not of the target's type
struct fill {
  any_gpu_ref target = {};
  scalar element = {};
  request_options options = {};
};

/// Copies between two buffers of the device. Reply: an empty message.
/// @shape  the same number of bytes, not overlapping
/// @errors errc::shape_mismatch: different sizes; errc::invalid_argument: they overlap
struct copy {
  any_gpu_ref target = {};
  any_gpu_ref source = {};
  request_options options = {};
};

/// Declares that the bytes of `target` are valid, although a request that would have written them
/// did not run (errc::skipped). Later requests can read them. Does not change ranges that a failed
/// operation left indeterminate. Reply: an empty message.
/// @errors errc::indeterminate: part of the target is indeterminate
struct accept {
  any_gpu_ref target = {};
  request_options options = {};
};

/// Runs a registered launch (`register_launch`). Reply: an empty message, when the GPU has finished
/// it. Memory that the work reads and writes must be in both lists. The work must overwrite
/// completely what is in `writes` alone.
/// @errors errc::invalid_argument: no launch is registered under this name; errc::launch_failed:
///         it threw or returned an error; the device remains usable, `writes` are indeterminate
struct launch {
  std::string name = {};
  std::vector<std::uint8_t> arguments = {}; ///< for the launch (troupe/bytes.hpp)
  std::vector<any_gpu_ref> reads = {};
  std::vector<any_gpu_ref> writes = {};
  request_options options = {};
};

/// Runs a callable, not a registered launch; within the process only. Reply: an empty message.
/// @errors errc::launch_failed, as `launch`; errc::not_supported: the device is in another process
///         (a worker's device, for a request of its parent; not for one of the worker's program)
struct launch_callable {
  launch_function function = {};
  std::vector<any_gpu_ref> reads = {};
  std::vector<any_gpu_ref> writes = {};
  request_options options = {};
};

/// Keeps memory of the device alive until `claim` asks for it, or for the grace time, while a token
/// is on its way to another process. A claim ends one offer, which then keeps nothing alive any
/// more. While anything else keeps the memory alive, its token serves further claims. Reply:
/// `gpu_token`.
/// @errors errc::stale_ref; errc::invalid_argument: the grace time is not positive, or the memory
///         is of another actor system; errc::unavailable
struct offer {
  any_gpu_ref memory = {};
  std::chrono::nanoseconds grace = std::chrono::seconds{10};
};

/// Resolves `token` to a handle of this process. Reply: `any_gpu_ref`.
///
/// If the memory belongs to this process, the handle is like any other handle to it. Otherwise it
/// must belong to a process that has the same device, as a worker and its parent do
/// (`placement::worker_process`). That process lends the whole buffer when all requests admitted
/// there before are over. Until the last handle here is gone, requests there that conflict with
/// `mode` get `errc::buffer_acquired`, as do requests here that write with `access_mode::read`.
/// Ranges that are indeterminate there are indeterminate here. A request that fails here while it
/// writes leaves the memory indeterminate there. In a worker's program, a rank's call that a lease
/// refuses (errc::buffer_acquired) does not count as made. The other ranks' calls of the same
/// collective wait for it, up to their deadlines or the world's stall limit.
/// @errors errc::stale_ref: the token is forged, is of no process that has the device, or names
///         memory that is gone; errc::buffer_acquired: another user or process holds the memory;
///         errc::indeterminate; errc::worker_lost: the other process ended; errc::unavailable: the
///         device is not ready; errc::overloaded; errc::invalid_argument: memory of another device,
///         or no such mode; errc::deadline_exceeded
struct claim {
  gpu_token token = {};
  access_mode mode = access_mode::read;
  request_options options = {};
};

/// Requests the device's state. Reply: `device_stats`.
struct stats {
  request_options options = {};
};

/// Subscribes the sender to `device_changed`: it gets one now and one at every change.
struct watch_generation {};

/// Ends the device's generation and begins the next one. All its memory is freed, every handle
/// becomes stale, and worlds on it build new communicators. Reply: the new generation
/// (`std::uint64_t`).
/// @errors errc::buffer_acquired: a user's stream or another process holds memory;
///         errc::unavailable: the device is not ready; errc::not_supported: the requester is a
///         worker's program, whose parent resets its device. After these, nothing has changed.
///         errc::deadline_exceeded: the reset continues. After an error of the backend, the memory
///         is gone and the device remains `device_phase::failed`
struct reset {
  request_options options = {};
};

/// Moves a device in a worker process to its spare, with its memory, between two requests. No
/// request fails: new requests for the device wait until all earlier ones are done and the spare
/// has taken over. Handles stay valid; the incarnation grows, and the generation does not. A spare
/// is started if there is none. Worlds with the device go on with their standbys, or build new
/// communicators; their membership stays the same. It begins when no such world builds one. What
/// the process has of its own does not move: see docs/workers.md. Reply: the new incarnation
/// (`std::uint64_t`).
/// @errors errc::not_supported: the device is in this process, its memory is not kept outside its
///         worker (CUDA, other hosts), or the requester is a worker's program;
///         errc::buffer_acquired: memory of the device is lent to its worker's program, or memory
///         of that is claimed; errc::unavailable: the device is not ready, is handed over already,
///         or has no spare. After these, nothing has changed. errc::deadline_exceeded, cancelled:
///         the text says whether the handover continues. errc::worker_lost, device_reset: the
///         device was lost or reset meanwhile
struct hand_over {
  request_options options = {};
};

/// Ends the device for good. Reply: an empty message, at once. Ignored from a worker's program,
/// because the device belongs to its parent.
struct shutdown {};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, allocate& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::allocate", field("count", x.count), field("type", x.type),
                        field("zeroed", x.zeroed), field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, upload& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::upload", field("target", x.target),
                        field("source", x.source), field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, download& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::download", field("source", x.source),
                        field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, fill& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::fill", field("target", x.target),
                        field("element", x.element), field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, copy& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::copy", field("target", x.target), field("source", x.source),
                        field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, accept& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::accept", field("target", x.target),
                        field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, launch& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::launch", field("name", x.name),
                        field("arguments", x.arguments), field("reads", x.reads),
                        field("writes", x.writes), field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, offer& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::offer", field("memory", x.memory), field("grace", x.grace));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, claim& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::claim", field("token", x.token), field("mode", x.mode),
                        field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, stats& x) {
  return detail::fields(f, x, "troupe::stats", detail::field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, reset& x) {
  return detail::fields(f, x, "troupe::reset", detail::field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, hand_over& x) {
  return detail::fields(f, x, "troupe::hand_over", detail::field("options", x.options));
}

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, watch_generation& x) {
  return detail::fields(f, x, "troupe::watch_generation");
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, shutdown& x) {
  return detail::fields(f, x, "troupe::shutdown");
}

// -- functions

/// The devices of an actor system.
struct device_list {
  std::string backend = {}; ///< "cuda" or "host"
  std::string reason = {};  ///< why the host backend is used, if it was not requested
  std::vector<int> ordinals = {};
};

/// Returns all devices of the backend. The backend is made once: if that fails, all later calls
/// fail in the same way.
/// @errors errc::invalid_argument: the configuration is not a `troupe::config`, or an option is
///         wrong; errc::unavailable, not_supported: the requested backend is not available
caf::expected<device_list> list_devices(caf::actor_system& sys);

/// Returns only the ordinals; empty on error.
std::vector<int> all_devices(caf::actor_system& sys);

/// A device as a class: every call is admitted on the caller's thread and returns a `pending`.
/// Copies refer to the same device. The actor system must outlive the object. An empty object, made
/// by the default constructor or moved from, refuses every request (errc::invalid_argument); its
/// `ordinal` is -1, and its `phase` is `device_phase::failed`.
/// @thread any, several at once; blocking calls only where blocking is allowed (errc::would_block)
/// @errors of every verb: errc::unavailable: the device failed or was shut down; errc::overloaded;
///         errc::stale_ref; errc::indeterminate: a failed operation may have written in part what
///         the request reads; errc::skipped: a request that would have written it did not run;
///         errc::buffer_acquired; errc::deadline_exceeded; errc::cancelled;
///         errc::invalid_argument: a ref of another device, or of another actor system;
///         errc::device_reset, worker_lost, device_fault: the reason why the device was lost
class device {
public:
  /// Makes an empty object.
  device() noexcept = default;

  /// Opens the device if it is not open, and blocks until it is ready. Does not wait for a device
  /// that is being reset: its requests wait.
  /// @errors errc::invalid_argument: no such ordinal; errc::deadline_exceeded; errc::device_failed
  ///         and errors of the backend
  static caf::expected<device> open(caf::actor_system& sys, int ordinal,
                                    std::chrono::nanoseconds deadline = std::chrono::seconds{60});

  int ordinal() const noexcept;
  /// Counts the lives of its memory, from 1: memory of an earlier generation is gone.
  std::uint64_t generation() const noexcept;
  /// Counts how often the device became ready, from 1. Grows with each generation, and also when
  /// its worker process was lost and its memory was kept, or was handed over.
  std::uint64_t incarnation() const noexcept;
  device_phase phase() const noexcept;

  /// Returns the device's actor, for messages; blocks. The actor lives as long as a `device`, a
  /// world or a topology of the system.
  caf::expected<caf::actor> actor() const;

  /// Same as the message `allocate`; blocks until the memory is allocated.
  /// @units  count: elements
  /// @errors errc::would_block, too, as all blocking calls here: nothing was requested
  template <element T>
  caf::expected<gpu_ref<T>> allocate(std::size_t count, bool zeroed = false,
                                     request_options options = {}) const {
    if (auto refused = detail::check_may_block(); refused)
      return refused;
    auto ref = allocate(dtype_v<T>, count, zeroed, options).wait();
    if (!ref)
      return ref.error();
    return gpu_ref<T>::from(std::move(*ref));
  }
  pending<any_gpu_ref> allocate(dtype type, std::size_t count, bool zeroed = false,
                                request_options options = {}) const;

  /// Allocates pinned host memory: copies to and from it need no staging. Blocks until it is done.
  /// @units  size_bytes: bytes
  /// @errors errc::out_of_memory; errc::would_block
  caf::expected<host_buffer> allocate_pinned(std::size_t size_bytes,
                                             request_options options = {}) const;

  /// Same as the message `upload`. `source`, a span, vector or array, remains the caller's: it must
  /// live, and not change, until the request completes.
  template <element T>
  pending<void> upload(const gpu_ref<T>& target, std::type_identity_t<std::span<const T>> source,
                       request_options options = {}) const {
    return upload(target, std::as_bytes(source), options);
  }
  pending<void> upload(const any_gpu_ref& target, std::span<const std::byte> source,
                       request_options options = {}) const;
  /// Keeps `source` alive: a temporary would be gone before it is read.
  template <element T>
  pending<void> upload(const gpu_ref<T>& target, std::vector<T>&& source,
                       request_options options = {}) const {
    return upload(target, host_buffer{std::move(source)}, options);
  }
  template <element T, std::size_t n>
  pending<void> upload(const gpu_ref<T>& target, std::array<T, n>&& source,
                       request_options options = {}) const {
    return upload(target, std::vector<T>(source.begin(), source.end()), options);
  }
  pending<void> upload(const any_gpu_ref& target, std::vector<std::byte>&& source,
                       request_options options = {}) const {
    auto owner = std::make_shared<std::vector<std::byte>>(std::move(source));
    std::shared_ptr<std::byte> memory{owner, owner->data()};
    return upload(target, host_buffer{std::move(memory), owner->size(), false}, options);
  }
  pending<void> upload(const any_gpu_ref& target, host_buffer source,
                       request_options options = {}) const;

  /// Same as the message `download`, into `target`. It remains the caller's and must live until the
  /// request completes.
  /// @shape  target: as many bytes as `source`
  /// @errors those of the message `download`, and errc::shape_mismatch or out_of_range: another
  ///         size. Only the result says that `target` was not written
  template <element T>
  [[nodiscard]] pending<void> download(const gpu_ref<T>& source, std::span<T> target,
                                       request_options options = {}) const {
    return download(source, std::as_writable_bytes(target), options);
  }
  template <element T>
  [[nodiscard]] pending<void> download(const gpu_ref<T>& source, std::vector<T>& target,
                                       request_options options = {}) const {
    return download(source, std::span{target}, options);
  }
  template <element T, std::size_t n>
  [[nodiscard]] pending<void> download(const gpu_ref<T>& source, std::array<T, n>& target,
                                       request_options options = {}) const {
    return download(source, std::span<T>{target}, options);
  }
  [[nodiscard]] pending<void> download(const any_gpu_ref& source, std::span<std::byte> target,
                                       request_options options = {}) const;
  [[nodiscard]] pending<void> download(const any_gpu_ref& source, host_buffer target,
                                       request_options options = {}) const;
  /// Downloads into a new vector of as many elements; blocks until it is done.
  /// @errors those of the message `download`, and errc::would_block
  template <element T>
  caf::expected<std::vector<T>> download(const gpu_ref<T>& source,
                                         request_options options = {}) const {
    if (auto refused = detail::check_may_block(); refused)
      return refused;
    std::vector<T> target(source.count());
    if (auto done = download(source, std::span{target}, options).wait(); !done)
      return done.error();
    return target;
  }

  /// Same as the message `fill`.
  template <element T>
  pending<void> fill(const gpu_ref<T>& target, std::type_identity_t<T> value,
                     request_options options = {}) const {
    return fill(target.any(), scalar{value}, options);
  }
  pending<void> fill(const any_gpu_ref& target, scalar element, request_options options = {}) const;

  /// Same as the message `copy`.
  pending<void> copy(const any_gpu_ref& target, const any_gpu_ref& source,
                     request_options options = {}) const;

  /// Same as the message `accept`.
  pending<void> accept(const any_gpu_ref& target, request_options options = {}) const;

  /// Same as the message `launch_callable`.
  pending<void> launch(launch_function function, std::vector<any_gpu_ref> reads,
                       std::vector<any_gpu_ref> writes, request_options options = {}) const;
  /// Same as the message `launch`. `name` is the one under which the launch is registered in the
  /// process that has the device.
  pending<void> launch(const std::string& name, std::vector<std::uint8_t> arguments,
                       std::vector<any_gpu_ref> reads, std::vector<any_gpu_ref> writes,
                       request_options options = {}) const;

  /// Takes over memory of the caller that lies on this device: of `cudaMalloc`, of a memory pool,
  /// or mapped by the program. The devices that can access this device's memory can then access it,
  /// too. `deleter` is called when nothing uses the memory any more: on the lane, where it must not
  /// block, or, once the device has ended, on the thread that drops the last handle. An exception
  /// that it throws is logged. On CUDA it is not called after an error of `severity::process`: the
  /// memory is freed with the process.
  /// @units  count: elements
  /// @errors errc::invalid_argument: also if the memory does not lie on this device;
  ///         errc::unavailable: the device is not ready; errc::not_supported: the device is in
  ///         another process (`launch_callable`)
  template <element T>
  caf::expected<gpu_ref<T>> adopt(T* memory, std::size_t count,
                                  std::function<void(void*)> deleter) const {
    auto ref = adopt(memory, count, dtype_v<T>, std::move(deleter));
    if (!ref)
      return ref.error();
    return gpu_ref<T>::from(std::move(*ref));
  }
  caf::expected<any_gpu_ref> adopt(void* memory, std::size_t count, dtype type,
                                   std::function<void(void*)> deleter) const;

  /// Hands the buffer over to the caller's `stream`. After completion, work that the caller puts
  /// into `stream` comes after everything that the library did with the buffer. The buffer is then
  /// the caller's: conflicting requests get `errc::buffer_acquired` until `release`.
  /// @errors errc::not_supported: the host backend and worker processes have no streams for users
  [[nodiscard]] pending<void> acquire(const any_gpu_ref& ref, access_mode mode, CUstream_st* stream,
                                      request_options options = {}) const;
  /// Gives the buffer back: later requests on it, and no others, wait for the work that is in
  /// `stream` now. The stream may be destroyed when this function has returned. Completes when that
  /// work is done. If cancelled or late, it gives the buffer back all the same.
  /// @errors errc::invalid_argument: the buffer was not acquired in this mode; errc::not_supported;
  ///         errc::cuda_error: no event could be recorded in `stream`, such as in a host function,
  ///         and the buffer is still acquired. The same with errc::invalid_argument if `stream` is
  ///         being captured
  pending<void> release(const any_gpu_ref& ref, access_mode mode, CUstream_st* stream,
                        request_options options = {}) const;

  /// Same as the message `offer`.
  caf::expected<gpu_token> offer(const any_gpu_ref& memory,
                                 std::chrono::nanoseconds grace = std::chrono::seconds{10}) const;

  /// Same as the message `claim`; blocks until it is done.
  template <element T>
  caf::expected<gpu_ref<T>> claim(const gpu_token& token, access_mode mode = access_mode::read,
                                  request_options options = {}) const {
    if (auto refused = detail::check_may_block(); refused)
      return refused;
    auto ref = claim(token, mode, options).wait();
    if (!ref)
      return ref.error();
    return gpu_ref<T>::from(std::move(*ref));
  }
  /// Same as the message `claim`.
  pending<any_gpu_ref> claim(const gpu_token& token, access_mode mode = access_mode::read,
                             request_options options = {}) const;

  pending<device_stats> stats(request_options options = {}) const;

  /// Same as the message `reset`.
  pending<std::uint64_t> reset(request_options options = {}) const;

  /// Same as the message `hand_over`.
  pending<std::uint64_t> hand_over(request_options options = {}) const;

  /// Same as the message `shutdown`.
  void shutdown() const;

private:
  friend struct detail::device_access;
  const detail::device_core& core() const noexcept;
  device(std::shared_ptr<detail::system_lease> lease, std::shared_ptr<detail::device_core> core)
      : lease_(std::move(lease)), core_(std::move(core)) {}

  std::shared_ptr<detail::system_lease> lease_;
  std::shared_ptr<detail::device_core> core_;
};

} // namespace troupe
