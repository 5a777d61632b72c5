/// The seam between the library and what executes: CUDA and NCCL, or threads and host memory.
/// Everything above this interface runs unchanged on every backend.
#pragma once

#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>
#include <troupe/link_kind.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace troupe {

/// A stream of a backend: a `cudaStream_t`, or a queue of the host backend.
struct stream_view {
  void* native = nullptr;
  friend bool operator==(stream_view, stream_view) = default;
};

/// An event of a backend: a `cudaEvent_t`, or a flag of the host backend.
struct event_view {
  void* native = nullptr;
};

/// What a device is.
struct device_properties {
  std::string name = {};
  std::string pci_id = {};  ///< "0000:1b:00.0"; empty on the host backend
  int capability_major = 0; ///< compute capability; 0 on the host backend
  int capability_minor = 0;
  std::size_t total_bytes = 0;
};

struct memory_info {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
};

/// What one device has of another one.
struct peer_link {
  link_kind kind = link_kind::host;
  int links = 0;            ///< number of NVLinks; 0: none, or nobody can tell
  int performance_rank = 0; ///< CUDA's: the lower the faster; 0 is the fastest
  bool native_atomics = false;
};

/// Which memory lies at either end of a copy.
enum class copy_direction : std::uint8_t { host_to_device, device_to_host, device_to_device };

/// How far the work before an event has come, where another process writes it.
struct event_word {
  std::shared_ptr<const std::atomic<std::uint64_t>> word = {}; ///< null: there is none
  std::uint64_t value = 0; ///< of the word, or less, when the event is done
};

/// What `backend_device::copy_peer` copies.
struct peer_copy {
  void* target = nullptr;
  int target_device = -1;
  const void* source = nullptr;
  int source_device = -1;
  std::size_t size_bytes = 0;
};

/// Memory that a registered launch uses.
struct launch_memory {
  void* address = nullptr;
  std::size_t count = 0; ///< @units elements
  dtype type = dtype::uint8;
};

/// One device, driven by one thread: its lane.
/// @thread only the device's lane, after `bind`, unless a function says otherwise
/// @errors every function gives `errc::device_fault` once a sticky fault is seen, else
///         `errc::cuda_error` or what it names; nothing throws, nor do the functions that it gets
class backend_device {
public:
  virtual ~backend_device() = default;

  /// Binds the calling thread to the device and makes its context.
  /// @errors errc::device_failed
  [[nodiscard]] virtual caf::error bind() noexcept = 0;

  [[nodiscard]] virtual caf::expected<device_properties> properties() noexcept = 0;
  [[nodiscard]] virtual caf::expected<memory_info> memory() noexcept = 0;

  /// Makes the memory pool of a new generation.
  [[nodiscard]] virtual caf::error open_memory() noexcept = 0;
  /// Frees all memory that `allocate` gave since `open_memory`. No work is in flight.
  [[nodiscard]] virtual caf::error close_memory() noexcept = 0;

  /// Stream-ordered memory, at least 256-byte aligned; `size_bytes` > 0.
  /// @errors errc::out_of_memory: nothing changed
  [[nodiscard]] virtual caf::expected<void*> allocate(std::size_t size_bytes,
                                                      stream_view stream) noexcept = 0;
  [[nodiscard]] virtual caf::error deallocate(void* memory, stream_view stream) noexcept = 0;

  /// Memory that can become a window (`backend_communicator::register_window`), at least 4096-byte
  /// aligned; `size_bytes` > 0. Not in stream order: `deallocate` frees it at once, so that no work
  /// uses it any more, and no window is left in it.
  /// @errors errc::out_of_memory: nothing changed
  [[nodiscard]] virtual caf::expected<void*>
  allocate_symmetric(std::size_t size_bytes) noexcept = 0;

  /// Page-locked host memory, usable by every device.
  /// @thread any
  [[nodiscard]] virtual caf::expected<void*> allocate_pinned(std::size_t size_bytes) noexcept = 0;
  [[nodiscard]] virtual caf::error deallocate_pinned(void* memory) noexcept = 0;
  /// What frees such memory without the device, which need not be kept for it; null: there is no
  /// such way.
  virtual std::function<caf::error(void*)> pinned_deleter() noexcept { return nullptr; }

  [[nodiscard]] virtual caf::expected<stream_view> create_stream() noexcept = 0;
  [[nodiscard]] virtual caf::error destroy_stream(stream_view stream) noexcept = 0;
  [[nodiscard]] virtual caf::expected<event_view> create_event() noexcept = 0;
  [[nodiscard]] virtual caf::error destroy_event(event_view event) noexcept = 0;

  /// `stream` may be a user's own, also in `wait`.
  [[nodiscard]] virtual caf::error record(event_view event, stream_view stream) noexcept = 0;
  /// Makes `stream` wait for what was recorded in `event`, which may belong to another device.
  [[nodiscard]] virtual caf::error wait(stream_view stream, event_view event) noexcept = 0;
  /// True when the work before the recorded `event` is done.
  [[nodiscard]] virtual caf::expected<bool> query(event_view event) noexcept = 0;
  /// Blocks until `event` is done.
  [[nodiscard]] virtual caf::error synchronize(event_view event) noexcept = 0;

  /// Copies in stream order. Host memory must be pinned (`allocate_pinned`).
  [[nodiscard]] virtual caf::error copy(void* target, const void* source, std::size_t size_bytes,
                                        copy_direction direction, stream_view stream) noexcept = 0;
  /// Writes `pattern` `count` times in stream order.
  /// @shape pattern: 1, 2, 4 or 8 bytes; target: aligned to that size
  [[nodiscard]] virtual caf::error fill(void* target, std::span<const std::byte> pattern,
                                        std::size_t count, stream_view stream) noexcept = 0;
  /// Calls `function(argument)` in stream order on a thread of the backend; it must not block or
  /// call CUDA. CUDA does not call it once the context is in error.
  [[nodiscard]] virtual caf::error launch_host(stream_view stream, void (*function)(void*),
                                               void* argument) noexcept = 0;

  /// Clears what a call of CUDA has left as the calling thread's last error, which the next launch
  /// of a user would take for its own. Logs it, each kind once for a device.
  /// @shape  found: "before" or "after"; call: what ran, or is to run, on this thread; number: its
  ///         operation, or 0
  /// @errors errc::device_fault: the error cannot be cleared
  [[nodiscard]] virtual caf::error clear_last_error(std::string_view found, std::string_view call,
                                                    std::uint64_t number) noexcept {
    static_cast<void>(found);
    static_cast<void>(call);
    static_cast<void>(number);
    return {};
  }

  /// Whether this device can read and write the memory of device `peer` directly.
  [[nodiscard]] virtual caf::expected<bool> can_access_peer(int peer) noexcept = 0;
  /// Enables it for plain memory. A second time changes nothing.
  /// @errors errc::not_supported: it cannot
  [[nodiscard]] virtual caf::error enable_peer(int peer) noexcept = 0;
  /// Lets `peer` access the pool of this device, of this generation and of all later ones. A second
  /// time changes nothing.
  /// @errors errc::not_supported: `peer` cannot
  [[nodiscard]] virtual caf::error admit_peer(int peer) noexcept = 0;
  /// Copies in stream order from this device to another one, or back. What is not pool memory needs
  /// `enable_peer` here, what is also `admit_peer` there.
  /// @shape  target, source: in memory of the devices that are named, one of which is this one
  /// @errors errc::not_supported: the other one cannot be accessed
  [[nodiscard]] virtual caf::error copy_peer(void* target, int target_device, const void* source,
                                             int source_device, std::size_t size_bytes,
                                             stream_view stream) noexcept = 0;
  /// The same for several, in any order among each other. After an error any of them may be made;
  /// what is wrong with which one is told by `copy_peer`.
  [[nodiscard]] virtual caf::error copy_peers(std::span<const peer_copy> copies,
                                              stream_view stream) noexcept {
    for (auto& x : copies)
      if (auto error =
              copy_peer(x.target, x.target_device, x.source, x.source_device, x.size_bytes, stream))
        return error;
    return {};
  }
  /// Do those in one `copy_peers` take less of the caller's time than each by itself?
  virtual bool prefers_copy_peers() const noexcept { return false; }

  /// Makes host memory that the process has mapped pinned, as `allocate_pinned` gives it.
  /// @shape  whole pages
  /// @thread any
  [[nodiscard]] virtual caf::error register_pinned(void* memory, std::size_t size_bytes) noexcept {
    static_cast<void>(memory);
    static_cast<void>(size_bytes);
    return {};
  }
  /// The same, undone; no work uses it any more.
  /// @thread any
  [[nodiscard]] virtual caf::error unregister_pinned(void* memory) noexcept {
    static_cast<void>(memory);
    return {};
  }
  /// Makes `stream` wait until `*word`, in pinned memory, is at least `value`; another process may
  /// write it.
  /// @errors errc::not_supported
  [[nodiscard]] virtual caf::error wait_word(stream_view stream,
                                             const std::atomic<std::uint64_t>* word,
                                             std::uint64_t value) noexcept = 0;
  /// What was last recorded in `event`, for `wait_word` of other devices: it remains right when
  /// the event is recorded anew. Only remote devices have it.
  /// @thread any, while the event is not recorded
  virtual event_word word_of(event_view event) const noexcept {
    static_cast<void>(event);
    return {};
  }

  /// The device is about to be closed: `bind` does not wait any more for what may never come, and
  /// whoever is in it comes back soon, with an error.
  /// @thread any
  virtual void interrupt() noexcept {}

  /// True where the device's memory and streams are those of another process: no pointer to memory
  /// of this one, but to what `allocate_pinned` gave, means anything there, and no function.
  /// @thread any
  [[nodiscard]] virtual bool is_remote() const noexcept { return false; }
  /// A registered launch, made where a remote device is.
  /// @errors errc::launch_failed; errc::invalid_argument: nothing is registered there as `name`
  [[nodiscard]] virtual caf::error launch_registered(const std::string& name,
                                                     std::span<const launch_memory> reads,
                                                     std::span<const launch_memory> writes,
                                                     std::span<const std::byte> arguments,
                                                     stream_view stream) noexcept {
    static_cast<void>(name);
    static_cast<void>(reads);
    static_cast<void>(writes);
    static_cast<void>(arguments);
    static_cast<void>(stream);
    return make_error(errc::not_supported, "only for devices in other processes");
  }
  /// Sets what is called, on any thread, when a remote device is lost with its memory, its streams
  /// and its events: every function gives `errc::worker_lost` until `bind` brings it up again.
  /// Before any work.
  virtual void set_loss_signal(std::function<void(const caf::error&)> signal) noexcept {
    static_cast<void>(signal);
  }
  /// Why the remote device is lost; none while it is there.
  [[nodiscard]] virtual caf::error loss() const noexcept { return {}; }

  /// True if streams and events are CUDA's: a `stream_view` then is a `cudaStream_t`.
  /// @thread any
  [[nodiscard]] virtual bool runs_cuda() const noexcept = 0;

  /// True for a backend that calls the signal below when an event completes; a lane then need not
  /// poll.
  [[nodiscard]] virtual bool signals_completion() const noexcept = 0;
  /// Sets what is called, on any thread, when an event of this device completes. Before any work.
  virtual void set_completion_signal(std::function<void()> signal) noexcept = 0;
};

/// Names a communicator that is to be built; the same bytes go to all its ranks.
struct communicator_id {
  std::array<std::byte, 128> bytes{};
};

/// One rank that the calling process holds.
struct local_rank {
  int rank = 0;
  int device = 0; ///< ordinal
  /// It is not the device as it is now, but its spare (`backend::provide_spare`).
  bool spare = false;
};

/// How many elements a rank exchanges with each rank, and where they lie in its buffers.
/// @units elements
/// @shape one entry per rank
struct exchange_plan {
  std::vector<std::size_t> send_counts = {};
  std::vector<std::size_t> send_offsets = {};
  std::vector<std::size_t> recv_counts = {};
  std::vector<std::size_t> recv_offsets = {};
};

/// One rank's part in a collective or in a message between two ranks.
/// @shape `send` and `recv` in device memory, aligned to the type. `count` elements of `send`:
///        all_reduce, reduce, broadcast (root), all_gather, gather, send; n * count:
///        reduce_scatter, all_to_all, scatter (root). `count` elements of `recv`: all_reduce,
///        reduce (root), broadcast, reduce_scatter, scatter, recv; n * count: all_gather,
///        all_to_all, gather (root). Null where a rank has nothing to send or to receive. In place:
///        `send` = `recv` (all_reduce, reduce, broadcast); `send` = `recv` + rank * count elements
///        (all_gather, gather on the root); `recv` = `send` + rank * count elements
///        (reduce_scatter, scatter on the root); else they do not overlap.
struct collective_call {
  collective_kind what = collective_kind::all_reduce;
  const void* send = nullptr;
  void* recv = nullptr;
  std::size_t count = 0;
  dtype type = dtype::uint8;
  reduce_op op = reduce_op::sum;
  int peer = 0;                        ///< root, or the other side of a send or recv
  const void* factor = nullptr;        ///< this rank's, one element, for reduce_op::premul_sum
  const exchange_plan* plan = nullptr; ///< of all_to_all_v
  /// On all ranks or on none: an all_reduce, all_gather or reduce_scatter, alone in its `enqueue`,
  /// whose buffers lie in windows, on each rank in the same ones at the same place (or are in
  /// place). What takes its time is less; but once it has begun on a rank it ends only when it has
  /// begun on all of them, and no abort can end it.
  bool symmetric = false;
};

/// What a communicator's ranks are connected for.
enum class connect_scope : std::uint8_t {
  collectives, ///< collectives that are alone in their call; no gather, scatter or all-to-all
  everything
};

/// What is known of a device that can be lost alone, or of the spare that stands for it.
/// @thread any
class device_life {
public:
  virtual ~device_life() = default;
  /// It is lost.
  virtual bool lost() const noexcept = 0;
  /// Its process has ended, so that it is lost as soon as its owner hears of that.
  virtual bool has_ended() const noexcept = 0;
};

/// One rank of a communicator.
/// @thread only the device's lane, unless a function says otherwise
class backend_communicator {
public:
  virtual ~backend_communicator() = default;

  /// Makes the connections for `what` that are not there yet, by small operations on `stream`, with
  /// all ranks at the same time; may block until every rank has called it.
  [[nodiscard]] virtual caf::error connect(stream_view stream, connect_scope what) noexcept = 0;

  /// Enqueues `calls` as one group: they make progress together, so that sends and recvs of any
  /// pattern among the ranks cannot deadlock. What they point to, but device memory, is not used
  /// after the call. The ranks that take part in a collective have it in groups of the same order.
  /// @errors  errc::invalid_argument, not_supported (nothing enqueued); errc::nccl_error (the
  ///          communicator must be aborted)
  /// @source  NCCL user guide, "Collective Communication Functions", "Group Calls"
  [[nodiscard]] virtual caf::error enqueue(std::span<const collective_call> calls,
                                           stream_view stream) noexcept = 0;

  /// Makes the `size_bytes` of this rank's `memory` (of `allocate_symmetric`) a window. With all
  /// ranks, which register and deregister windows of the same sizes in the same order; no other
  /// work is on their devices. May block until every rank has called it.
  /// @errors errc::not_supported, and others: no rank makes a `symmetric` call any more
  /// @source NCCL user guide, "User Buffer Registration", "Window Registration"
  [[nodiscard]] virtual caf::error register_window(void* memory, std::size_t size_bytes,
                                                   stream_view stream) noexcept = 0;
  /// The same, undone; no rank's work uses the window any more. Blocks for no other rank.
  [[nodiscard]] virtual caf::error deregister_window(void* memory) noexcept = 0;

  /// Sets what is called, on any thread, perhaps at once, when the rank's device is lost, or the
  /// spare that it is of.
  /// @thread any
  virtual void on_loss(std::function<void()> f) noexcept { static_cast<void>(f); }

  /// Of the rank's device, or of the spare that it is of; null where none is lost alone.
  /// @thread any
  virtual std::shared_ptr<const device_life> life() const noexcept { return nullptr; }

  /// Hands the rank to the process that it is in, which makes all calls on it from now on; `what`
  /// says of whom, to whoever reads it there.
  /// @thread any
  /// @errors errc::not_supported: the rank is in this process; errc::worker_lost
  [[nodiscard]] virtual caf::error hand_over(std::span<const std::byte> what) noexcept {
    static_cast<void>(what);
    return make_error(errc::not_supported, "the rank is in this process");
  }

  /// An error that happened behind the calls' backs; none while all is well.
  [[nodiscard]] virtual caf::error asynchronous_error() noexcept = 0;
};

using communicator_ranks = std::vector<std::unique_ptr<backend_communicator>>;

/// Executes.
/// @thread any, unless a function says otherwise
class backend {
public:
  virtual ~backend() = default;

  [[nodiscard]] virtual std::string_view name() const noexcept = 0;

  /// Number of devices; their ordinals are 0 to n-1.
  [[nodiscard]] virtual int device_count() const noexcept = 0;

  /// One object per device at a time. Cheap: no context is made before `bind`.
  /// @errors errc::invalid_argument: no such ordinal; errc::unavailable: somebody else in this
  ///         process has it
  [[nodiscard]] virtual caf::expected<std::unique_ptr<backend_device>>
  open(int ordinal) noexcept = 0;

  /// Another object for a device that is open, with memory, streams and events of its own; driven
  /// by another thread. No two threads drive communicators of one device at the same time.
  /// @errors as `open`; errc::not_supported
  [[nodiscard]] virtual caf::expected<std::unique_ptr<backend_device>>
  open_beside(int ordinal) noexcept {
    static_cast<void>(ordinal);
    return make_error(errc::not_supported, "the backend opens a device once");
  }

  /// May its devices begin another life, or end, when somebody asks for that? False where another
  /// process drives them, too.
  [[nodiscard]] virtual bool allows_reset() const noexcept { return true; }

  /// What device `from` has of `to`, another one. May block for as long as it takes to find out.
  /// @thread never a lane
  /// @errors errc::invalid_argument: no such ordinals
  [[nodiscard]] virtual caf::expected<peer_link> link(int from, int to) noexcept = 0;

  [[nodiscard]] virtual caf::expected<communicator_id> make_communicator_id() noexcept = 0;

  /// Builds the ranks that this process holds of a communicator of `size` ranks; blocks until all
  /// ranks of all processes have come. The result has the order of `ranks`.
  /// @thread a builder; never a lane
  [[nodiscard]] virtual caf::expected<communicator_ranks>
  build(const communicator_id& id, int size, std::span<const local_rank> ranks) noexcept = 0;

  /// Nobody wants what meets by `id`: who waits for others in `build`, or `connect`s what was
  /// built, gives up with errc::unavailable as soon as it can. To be called in all processes that
  /// have ranks of it, and where the id was made. NCCL waits for a rank that never comes for good.
  virtual void call_off(const communicator_id& id) noexcept { static_cast<void>(id); }

  /// Ends a communicator in the middle of whatever it does, but `symmetric` calls, which are over;
  /// all its local ranks at once, and its windows. No thread is in a call on it. Blocks.
  /// @thread a reaper; never a lane
  [[nodiscard]] virtual caf::error abort(communicator_ranks ranks) noexcept = 0;

  /// Ends an idle communicator in good order, and its windows. Blocks.
  /// @thread a reaper; never a lane
  [[nodiscard]] virtual caf::error destroy(communicator_ranks ranks) noexcept = 0;

  /// Makes sure that another process is ready to have the device when the one that has it is lost;
  /// blocks until it is.
  /// @thread a builder; never a lane
  /// @errors errc::not_supported: devices of this backend have no spares; errc::unavailable
  [[nodiscard]] virtual caf::error provide_spare(int ordinal) noexcept {
    static_cast<void>(ordinal);
    return make_error(errc::not_supported, "only devices in worker processes have spares");
  }
  /// Is `rank` one of the device as it is now?
  virtual bool is_current(const backend_communicator& rank, int ordinal) const noexcept {
    static_cast<void>(rank);
    static_cast<void>(ordinal);
    return true;
  }

  /// Sends bytes to the process that has a device, and sets who hears, on any thread, what such
  /// processes send: in order, for whoever reads it there.
  /// @errors errc::not_supported: it is this process; errc::worker_lost
  [[nodiscard]] virtual caf::error tell(int ordinal, std::span<const std::byte> what) noexcept {
    static_cast<void>(ordinal);
    static_cast<void>(what);
    return make_error(errc::not_supported, "the device is in this process");
  }
  virtual void
  set_listener(std::function<void(int ordinal, std::span<const std::byte> what)> f) noexcept {
    static_cast<void>(f);
  }

  /// The device's lane is in a call for good: gives the device up, if it can be lost alone, so that
  /// the call returns. False: it cannot; only the end of this process ends the call.
  /// @param why what everybody hears who has work there
  virtual bool give_up(int ordinal, const caf::error& why) noexcept {
    static_cast<void>(ordinal);
    static_cast<void>(why);
    return false;
  }

  /// The work of this process with its devices is lost: after a sticky fault, or because a thread
  /// is stuck in a call for good. From now on no call goes to a driver, which might not return:
  /// what is still there is dropped, by destructors too, and every function gives
  /// `errc::device_fault`. Nothing where the backend has no driver.
  virtual void abandon(const caf::error& why) noexcept { static_cast<void>(why); }
};

/// What virtual device `from` has of `to`.
struct host_link {
  int from = 0;
  int to = 0;
  bool access = true; ///< can `from` access the memory of `to`?
  peer_link link = {.kind = link_kind::memory, .native_atomics = true};
};

/// Virtual devices in host memory.
struct host_backend_options {
  int devices = 8;
  std::size_t bytes_per_device = std::size_t{1} << 30; ///< of address space; touched only when used
  /// Those that are not as `host_link` has them by default: every device can access all others.
  std::vector<host_link> links = {};
  /// Where this process listens for ranks of its communicators that are in other processes: the
  /// numeric address of one of the machine's interfaces ("127.0.0.1"), on a port that is free.
  /// Empty: all ranks of a communicator of an id of this process are here.
  std::string listen_address = {};
};

std::shared_ptr<backend> make_host_backend(host_backend_options options = {});

/// Knobs of the CUDA backend.
struct cuda_backend_options {
  /// Freed memory is never given back, but when memory runs out.
  static constexpr std::chrono::milliseconds forever = std::chrono::milliseconds::max();

  /// How long a device keeps memory that was freed and that no allocation has needed since: to
  /// allocate it again is fast meanwhile. Then it goes back to the driver, within as long again,
  /// and other processes and libraries can have it. 0: at once. When an allocation finds no memory,
  /// all of it goes back, and the allocation is tried once more.
  std::chrono::milliseconds keep_freed{1000};
};

/// The GPUs of this machine. The CUDA runtime and NCCL are loaded at the first call.
/// @errors errc::not_supported: built without CUDA; errc::unavailable: no CUDA runtime, NCCL,
///         driver or GPU, with the reason; errc::invalid_argument: an option that is out of
///         range
caf::expected<std::shared_ptr<backend>> make_cuda_backend(const cuda_backend_options& options = {});

} // namespace troupe
