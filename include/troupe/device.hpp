/// A device: the messages that its actor understands, and the same verbs as functions.
#pragma once

#include <troupe/collective.hpp>
#include <troupe/detail/type_ids.hpp>
#include <troupe/device_status.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/host_buffer.hpp>
#include <troupe/launch.hpp>
#include <troupe/pending.hpp>

#include <caf/actor.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
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

// -- messages; each is answered by what its comment names, or by an error

/// Memory on the device. Answered by `any_gpu_ref`.
/// @errors errc::out_of_memory: the device goes on as before; errc::invalid_argument: no such type
struct allocate {
  std::uint64_t count = 0; ///< @units elements
  dtype type = dtype::float32;
  bool zeroed = false;
  request_options options = {};
};

/// Host memory into device memory. Answered by an empty message.
/// @shape  as many bytes as the target has
/// @errors errc::out_of_range: more bytes; errc::shape_mismatch: fewer
struct upload {
  any_gpu_ref target = {};
  host_buffer source = {};
  request_options options = {};
};

/// Device memory as host memory. Answered by `host_buffer`.
/// @shape  the answer has as many bytes as the source
/// @errors errc::stale_ref; errc::indeterminate: a failed operation left the source half-written;
///         errc::skipped: a request that would have written it did not run; errc::out_of_memory: no
///         pinned memory to stage it in
struct download {
  any_gpu_ref source = {};
  request_options options = {};
};

/// Writes one element everywhere. Answered by an empty message.
/// @shape  element: the bytes of one element of the target's type
/// @errors errc::shape_mismatch: other than those
struct fill {
  any_gpu_ref target = {};
  std::vector<std::uint8_t> element = {};
  request_options options = {};
};

/// Between two buffers of the device. Answered by an empty message.
/// @shape  the same number of bytes, not overlapping
/// @errors errc::shape_mismatch: different sizes; errc::invalid_argument: they overlap
struct copy {
  any_gpu_ref target = {};
  any_gpu_ref source = {};
  request_options options = {};
};

/// Says that the bytes of `target` are right as they are, though a request that would have written
/// them did not run (errc::skipped): later requests read them. What a failed operation left
/// half-written stays so. Answered by an empty message.
/// @errors errc::indeterminate: some of it is half-written
struct accept {
  any_gpu_ref target = {};
  request_options options = {};
};

/// A registered launch (`register_launch`). Answered by an empty message when the GPU is done with
/// it. What the work both reads and writes is named in both lists; what it writes alone it must
/// write wholly.
/// @errors errc::invalid_argument: none is registered by this name; errc::launch_failed: it threw
///         or gave an error; the device goes on, `writes` are indeterminate
struct launch {
  std::string name = {};
  std::vector<std::uint8_t> arguments = {};
  std::vector<any_gpu_ref> reads = {};
  std::vector<any_gpu_ref> writes = {};
  request_options options = {};
};

/// A callable in place of a name; within the process only. Answered by an empty message.
/// @errors errc::launch_failed, as `launch`; errc::not_supported: the device is in another process
///         (in a worker, asked by its parent; a program there has it in its own)
struct launch_callable {
  launch_function function = {};
  std::vector<any_gpu_ref> reads = {};
  std::vector<any_gpu_ref> writes = {};
  request_options options = {};
};

/// Keeps memory of the device until `claim` asks for it, or for the grace time: for a token that is
/// on its way to another process. A claim takes the place of one offer, which then keeps nothing
/// any more; while anything else keeps the memory, its token serves further ones. Answered by
/// `gpu_token`.
/// @errors errc::stale_ref; errc::invalid_argument: no time, or not memory of this actor system;
///         errc::unavailable
struct offer {
  any_gpu_ref memory = {};
  std::chrono::nanoseconds grace = std::chrono::seconds{10};
};

/// The memory that `token` names, as a handle of this process. Answered by `any_gpu_ref`.
///
/// Where the memory is of this process it is as any other handle to it. Else the process that it is
/// of must have the same device: a worker and its parent have (`placement::worker_process`). It
/// lends the whole buffer once all that was admitted there before is over; until the last handle
/// here is gone, requests there that conflict with `mode` get `errc::buffer_acquired`, as do
/// requests here that write with `access_mode::read`. What is half-written there is so here, and
/// what fails here while it writes leaves the memory indeterminate there. A rank's call that is
/// refused because of a lease (errc::buffer_acquired) is not made, and the other ranks' calls of
/// the same collective wait for it: up to their deadlines, or the world's stall limit.
/// @errors errc::stale_ref: forged, of no process that has the device, or gone;
///         errc::buffer_acquired: somebody holds it; errc::indeterminate; errc::worker_lost: the
///         other process ended; errc::unavailable: the device is not ready; errc::overloaded;
///         errc::invalid_argument: memory of another device, or no such mode;
///         errc::deadline_exceeded
struct claim {
  gpu_token token = {};
  access_mode mode = access_mode::read;
  request_options options = {};
};

/// Answered by `device_stats`.
struct stats {
  request_options options = {};
};

/// The sender gets `device_changed`, now and at every change.
struct watch_generation {};

/// Ends the device's life and begins another: all its memory goes, every handle becomes stale,
/// worlds on it build anew. Answered by the new generation (`std::uint64_t`).
/// @errors errc::buffer_acquired: a user's stream or another process holds memory;
///         errc::unavailable: it is not ready; errc::not_supported: by a worker's program, whose
///         parent resets its device: nothing was done. errc::deadline_exceeded: it goes on. What
///         the backend says: the memory is gone, and the device `device_phase::failed` for good
struct reset {
  request_options options = {};
};

/// Ends the device for good. Answered by an empty message, at once. A worker's program cannot: its
/// device is its parent's.
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

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, watch_generation& x) {
  return detail::fields(f, x, "troupe::watch_generation");
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, shutdown& x) {
  return detail::fields(f, x, "troupe::shutdown");
}

// -- functions

/// What an actor system's devices are.
struct device_list {
  std::string backend = {}; ///< "cuda" or "host"
  std::string reason = {};  ///< why the host backend, where that was not asked for
  std::vector<int> ordinals = {};
};

/// All devices of the backend, which is made once: if that fails, all later calls fail so, too.
/// @errors errc::invalid_argument: the configuration is no `troupe::config`, or an option is wrong;
///         errc::unavailable, not_supported: the backend that was asked for is not there
caf::expected<device_list> list_devices(caf::actor_system& sys);

/// The ordinals alone; empty on error.
std::vector<int> all_devices(caf::actor_system& sys);

/// A device as functions: every call is admitted on the caller's thread and answered by a
/// `pending`. Copies mean the same device; one that was moved from must not be used. Its actor
/// system must outlive it.
/// @thread any, several at once; what blocks not where that is forbidden (errc::would_block)
/// @errors of every verb: errc::unavailable: the device failed or was shut down; errc::overloaded;
///         errc::stale_ref; errc::indeterminate: what it reads was left half-written;
///         errc::skipped: a request that would have written what it reads did not run;
///         errc::buffer_acquired; errc::deadline_exceeded; errc::cancelled;
///         errc::invalid_argument: a ref of another device, or of another actor system;
///         errc::device_reset, worker_lost, device_fault: what it was lost with
class device {
public:
  /// Brings the device up if it is not; blocks until it is ready. One that is being reset is not
  /// waited for: its requests wait.
  /// @errors errc::invalid_argument: no such ordinal; errc::deadline_exceeded; errc::device_failed
  ///         and what the backend says
  static caf::expected<device> open(caf::actor_system& sys, int ordinal,
                                    std::chrono::nanoseconds deadline = std::chrono::seconds{60});

  int ordinal() const noexcept;
  std::uint64_t generation() const noexcept;
  device_phase phase() const noexcept;

  /// The device's actor, for messages. It lives as long as a `device`, a world or a topology of the
  /// system does.
  caf::expected<caf::actor> actor() const;

  /// As the message `allocate`; blocks until the memory is there.
  /// @units  count: elements
  /// @errors errc::would_block, too, as all calls here that block: nothing was asked
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

  /// Pinned host memory: copies to and from it go directly. Blocks until it is there.
  /// @units  size_bytes: bytes
  /// @errors errc::out_of_memory; errc::would_block
  caf::expected<host_buffer> allocate_pinned(std::size_t size_bytes,
                                             request_options options = {}) const;

  /// As the message `upload`. `source`, a span, vector or array, stays the caller's: it must live,
  /// and not change, until the answer.
  template <element T>
  pending<void> upload(const gpu_ref<T>& target, std::type_identity_t<std::span<const T>> source,
                       request_options options = {}) const {
    return upload(target, std::as_bytes(source), options);
  }
  pending<void> upload(const any_gpu_ref& target, std::span<const std::byte> source,
                       request_options options = {}) const;
  /// `source` is kept alive: a temporary would be gone before it is read.
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

  /// As the message `download`; into `target`, which stays the caller's and must live until the
  /// answer.
  /// @shape  target: as many bytes as `source`
  /// @errors those of the message `download`, and errc::shape_mismatch or out_of_range: another
  ///         size. Nothing else tells that `target` was not written.
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
  /// Into a new vector of as many elements; blocks until it is there.
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

  /// As the message `fill`.
  template <element T>
  pending<void> fill(const gpu_ref<T>& target, std::type_identity_t<T> value,
                     request_options options = {}) const {
    std::vector<std::byte> bytes(sizeof(T));
    std::memcpy(bytes.data(), &value, sizeof(T));
    return fill(target, std::move(bytes), options);
  }
  pending<void> fill(const any_gpu_ref& target, std::vector<std::byte> one_element,
                     request_options options = {}) const;

  /// As the message `copy`.
  pending<void> copy(const any_gpu_ref& target, const any_gpu_ref& source,
                     request_options options = {}) const;

  /// As the message `accept`.
  pending<void> accept(const any_gpu_ref& target, request_options options = {}) const;

  /// As the message `launch`, with a callable.
  pending<void> launch(launch_function function, std::vector<any_gpu_ref> reads,
                       std::vector<any_gpu_ref> writes, request_options options = {}) const;
  /// As the message `launch`: of the name that it was registered by where the device lives.
  pending<void> launch(const std::string& name, std::vector<std::byte> arguments,
                       std::vector<any_gpu_ref> reads, std::vector<any_gpu_ref> writes,
                       request_options options = {}) const;

  /// Takes memory of the user's, which lies on this device, into its care: `deleter` is called when
  /// nothing uses it any more, on the lane, which must not block, or, once the device has ended, on
  /// the thread that drops the last handle. An exception that it throws is a line of the log. On
  /// CUDA it is not called after an error of `severity::process`: the memory goes with the process.
  /// @units  count: elements
  /// @errors errc::invalid_argument; errc::unavailable: the device is not ready;
  ///         errc::not_supported: it is in another process (`launch_callable`)
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

  /// Once answered, what the caller puts into `stream` comes after everything that the library did
  /// with the buffer, and the buffer is the caller's: requests that conflict get
  /// `errc::buffer_acquired` until `release`.
  /// @errors errc::not_supported: the host backend has no streams for users, nor has a worker
  /// process
  [[nodiscard]] pending<void> acquire(const any_gpu_ref& ref, access_mode mode, CUstream_st* stream,
                                      request_options options = {}) const;
  /// Gives the buffer back: what comes later waits for what is in `stream` now. Answered when that
  /// is done; taken back or late, the buffer has been given back all the same.
  /// @errors errc::invalid_argument: it was not acquired in this mode; errc::not_supported
  pending<void> release(const any_gpu_ref& ref, access_mode mode, CUstream_st* stream,
                        request_options options = {}) const;

  /// As the message `offer`.
  caf::expected<gpu_token> offer(const any_gpu_ref& memory,
                                 std::chrono::nanoseconds grace = std::chrono::seconds{10}) const;

  /// As the message `claim`; blocks until it is there.
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
  /// As the message `claim`.
  pending<any_gpu_ref> claim(const gpu_token& token, access_mode mode = access_mode::read,
                             request_options options = {}) const;

  pending<device_stats> stats(request_options options = {}) const;

  /// As the message `reset`.
  pending<std::uint64_t> reset(request_options options = {}) const;

  /// As the message `shutdown`.
  void shutdown() const;

private:
  friend struct detail::device_access;
  device(std::shared_ptr<detail::system_lease> lease, std::shared_ptr<detail::device_core> core)
      : lease_(std::move(lease)), core_(std::move(core)) {}

  std::shared_ptr<detail::system_lease> lease_;
  std::shared_ptr<detail::device_core> core_;
};

} // namespace troupe
