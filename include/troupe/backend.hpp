/// The interface between the library and a backend: CUDA and NCCL, or threads and host memory.
/// Everything above this interface runs unchanged on every backend.
#pragma once

#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>
#include <troupe/launch_memory.hpp>
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

/// An event behind work in a stream of foreign code.
struct user_event {
  event_view event = {};
  std::shared_ptr<void> owner = {}; ///< frees the event, on any thread
};

/// The properties of a device.
struct device_properties {
  std::string name = {};
  std::string pci_id = {};  ///< "0000:1b:00.0"; empty on the host backend
  int capability_major = 0; ///< compute capability; 0 on the host backend
  int capability_minor = 0;
  std::size_t total_bytes = 0;
  std::int64_t worker_pid = 0; ///< of a remote device in a process of this host; else 0
};

struct memory_info {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
};

/// The connection from one device to another one.
struct peer_link {
  link_kind kind = link_kind::host;
  int links = 0;            ///< number of NVLinks; 0: none, or unknown
  int performance_rank = 0; ///< as in CUDA: lower is faster; 0 is the fastest
  bool native_atomics = false;
};

/// The memory at either end of a copy.
enum class copy_direction : std::uint8_t { host_to_device, device_to_host, device_to_device };

/// The progress of the work before an event, as a word that another process writes.
struct event_word {
  std::shared_ptr<const std::atomic<std::uint64_t>> word = {}; ///< null: there is none
  std::uint64_t value = 0; ///< the event is done when the word is at least this
};

/// One copy for `backend_device::copy_peers`.
struct peer_copy {
  void* target = nullptr;
  int target_device = -1;
  const void* source = nullptr;
  int source_device = -1;
  std::size_t size_bytes = 0;
};

/// Work that was recorded (`backend_device::record_graph`).
struct graph_view {
  void* native = nullptr;
};

/// One device, driven by one thread: its lane.
/// @thread only the device's lane, after `bind`, unless a function says otherwise
/// @errors every function returns `errc::device_fault` once a sticky fault is seen, otherwise
///         `errc::cuda_error` or what it names. No function throws, nor does one that is passed in
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
  /// Frees all memory that `allocate` returned since `open_memory`. No work may be in flight.
  [[nodiscard]] virtual caf::error close_memory() noexcept = 0;

  /// Allocates memory in stream order, at least 256-byte aligned; `size_bytes` > 0.
  /// @errors errc::out_of_memory: nothing changed
  [[nodiscard]] virtual caf::expected<void*> allocate(std::size_t size_bytes,
                                                      stream_view stream) noexcept = 0;
  [[nodiscard]] virtual caf::error deallocate(void* memory, stream_view stream) noexcept = 0;

  /// Allocates page-locked host memory, usable by every device.
  /// @thread any
  [[nodiscard]] virtual caf::expected<void*> allocate_pinned(std::size_t size_bytes) noexcept = 0;
  [[nodiscard]] virtual caf::error deallocate_pinned(void* memory) noexcept = 0;
  /// Returns a function that frees such memory without the device, so that the device need not be
  /// kept for it; null: there is none.
  virtual std::function<caf::error(void*)> pinned_deleter() noexcept { return nullptr; }

  [[nodiscard]] virtual caf::expected<stream_view> create_stream() noexcept = 0;
  [[nodiscard]] virtual caf::error destroy_stream(stream_view stream) noexcept = 0;
  [[nodiscard]] virtual caf::expected<event_view> create_event() noexcept = 0;
  [[nodiscard]] virtual caf::error destroy_event(event_view event) noexcept = 0;

  /// Records `event` in `stream`.
  [[nodiscard]] virtual caf::error record(event_view event, stream_view stream) noexcept = 0;
  /// Returns an event behind the work that is in `user`, a stream of foreign code, now.
  /// @thread any
  /// @errors errc::not_supported: the device has no streams for foreign code
  [[nodiscard]] virtual caf::expected<user_event> record_user(stream_view user) noexcept {
    static_cast<void>(user);
    return make_error(errc::not_supported, "the device has no streams for users");
  }
  /// Makes `stream` wait for the work recorded in `event`, which may belong to another device. The
  /// stream may be one of foreign code.
  [[nodiscard]] virtual caf::error wait(stream_view stream, event_view event) noexcept = 0;
  /// Returns true when the work before the recorded `event` is done.
  [[nodiscard]] virtual caf::expected<bool> query(event_view event) noexcept = 0;
  /// Blocks until `event` is done.
  [[nodiscard]] virtual caf::error synchronize(event_view event) noexcept = 0;

  /// Copies in stream order. Host memory must be pinned (`allocate_pinned`).
  [[nodiscard]] virtual caf::error copy(void* target, const void* source, std::size_t size_bytes,
                                        copy_direction direction, stream_view stream) noexcept = 0;
  /// Writes `pattern` `count` times in stream order.
  /// @shape pattern: 1, 2, 4, 8 or 16 bytes; target: aligned to that size
  [[nodiscard]] virtual caf::error fill(void* target, std::span<const std::byte> pattern,
                                        std::size_t count, stream_view stream) noexcept = 0;
  /// Calls `function(argument)` in stream order on a thread of the backend; it must not block or
  /// call CUDA. CUDA does not call it once the context is in error.
  [[nodiscard]] virtual caf::error launch_host(stream_view stream, void (*function)(void*),
                                               void* argument) noexcept = 0;

  /// Returns whether `record_graph` can record work.
  /// @thread any
  [[nodiscard]] virtual bool records_graphs() const noexcept { return false; }
  /// Records what `enqueue` enqueues in `stream`, in place of its execution. The result can be
  /// launched again and again.
  /// @errors errc::not_supported: some of it cannot be recorded; those of `enqueue`. Nothing runs
  ///         after an error
  [[nodiscard]] virtual caf::expected<graph_view>
  record_graph(stream_view stream, const std::function<caf::error()>& enqueue) noexcept {
    static_cast<void>(stream);
    static_cast<void>(enqueue);
    return make_error(errc::not_supported, "the device records no graphs");
  }
  /// Launches a graph of this device in stream order.
  [[nodiscard]] virtual caf::error launch_graph(graph_view graph, stream_view stream) noexcept {
    static_cast<void>(graph);
    static_cast<void>(stream);
    return make_error(errc::not_supported, "the device records no graphs");
  }
  /// Drops a graph. Its launches may still run.
  /// @thread the lane, or any after the end of the lane
  [[nodiscard]] virtual caf::error drop_graph(graph_view graph) noexcept {
    static_cast<void>(graph);
    return {};
  }

  /// Clears the calling thread's last CUDA error, which the next launch of a user would take for
  /// its own. Logs it, each kind once per device.
  /// @shape  found: "before" or "after"; call: the work that ran, or will run, on this thread;
  ///         number: its operation, or 0
  /// @errors errc::device_fault: the error cannot be cleared
  [[nodiscard]] virtual caf::error clear_last_error(std::string_view found, std::string_view call,
                                                    std::uint64_t number) noexcept {
    static_cast<void>(found);
    static_cast<void>(call);
    static_cast<void>(number);
    return {};
  }

  /// Returns whether this device can read and write the memory of device `peer` directly.
  [[nodiscard]] virtual caf::expected<bool> can_access_peer(int peer) noexcept = 0;
  /// Enables access to memory of `peer` that is not in its pool. Calling it again changes nothing.
  /// @errors errc::not_supported: this device cannot access it
  [[nodiscard]] virtual caf::error enable_peer(int peer) noexcept = 0;
  /// Lets `peer` access the pool of this device, in this generation and all later ones. Calling it
  /// again changes nothing.
  /// @errors errc::not_supported: `peer` cannot access it
  [[nodiscard]] virtual caf::error admit_peer(int peer) noexcept = 0;
  /// Copies in stream order from this device to another one, or back. All memory of the other
  /// device needs `enable_peer` here; memory in its pool also needs `admit_peer` there.
  /// @shape  target, source: in memory of the devices that are named, one of which is this one
  /// @errors errc::not_supported: the other device cannot be accessed
  [[nodiscard]] virtual caf::error copy_peer(void* target, int target_device, const void* source,
                                             int source_device, std::size_t size_bytes,
                                             stream_view stream) noexcept = 0;
  /// The same for several copies, in any order among each other. After an error, any of them may
  /// have been made; `copy_peer` reports which one is wrong, and why.
  [[nodiscard]] virtual caf::error copy_peers(std::span<const peer_copy> copies,
                                              stream_view stream) noexcept {
    for (auto& x : copies)
      if (auto error =
              copy_peer(x.target, x.target_device, x.source, x.source_device, x.size_bytes, stream))
        return error;
    return {};
  }
  /// Returns whether one `copy_peers` takes less of the caller's time than separate copies.
  virtual bool prefers_copy_peers() const noexcept { return false; }

  /// Pins host memory that the process has mapped, so that it is as if from `allocate_pinned`.
  /// @shape  whole pages
  /// @thread any
  [[nodiscard]] virtual caf::error register_pinned(void* memory, std::size_t size_bytes) noexcept {
    static_cast<void>(memory);
    static_cast<void>(size_bytes);
    return {};
  }
  /// Undoes `register_pinned`. No work may use the memory any more.
  /// @thread any
  [[nodiscard]] virtual caf::error unregister_pinned(void* memory) noexcept {
    static_cast<void>(memory);
    return {};
  }
  /// Makes `stream` wait until `*word`, in pinned memory, is at least `value`. Another process may
  /// write the word.
  /// @errors errc::not_supported
  [[nodiscard]] virtual caf::error wait_word(stream_view stream,
                                             const std::atomic<std::uint64_t>* word,
                                             std::uint64_t value) noexcept = 0;
  /// Returns the word of the last record of `event`, for `wait_word` of other devices. It remains
  /// valid when the event is recorded again. Only remote devices have it.
  /// @thread any, while the event is not being recorded
  virtual event_word word_of(event_view event) const noexcept {
    static_cast<void>(event);
    return {};
  }

  /// Prepares for closing the device. From now on `bind` does not wait for anything that may never
  /// come, and a thread inside it returns soon, with an error.
  /// @thread any
  virtual void interrupt() noexcept {}

  /// Returns true if the device's memory and streams are in another process. No function of this
  /// process can be called there, and only pointers to memory of `allocate_pinned` are valid there.
  /// @thread any
  [[nodiscard]] virtual bool is_remote() const noexcept { return false; }
  /// Makes a registered launch in the process of a remote device.
  /// @errors errc::launch_failed; errc::invalid_argument: nothing is registered there as its name
  [[nodiscard]] virtual caf::error launch_registered(const registered_call& what,
                                                     stream_view stream) noexcept {
    static_cast<void>(what);
    static_cast<void>(stream);
    return make_error(errc::not_supported, "only for devices in other processes");
  }
  /// Prepares a library's launch (`library_launch::prepare`) in the process of a remote device.
  /// Nothing is enqueued.
  /// @errors as `launch_registered`; those of `library_launch::prepare`
  [[nodiscard]] virtual caf::error prepare_registered(const registered_call& what,
                                                      stream_view stream) noexcept {
    static_cast<void>(what);
    static_cast<void>(stream);
    return make_error(errc::not_supported, "only for devices in other processes");
  }
  /// Returns how often a workspace of libraries has got another address in the process of a remote
  /// device. Graphs that were recorded before may have the former one.
  virtual std::uint64_t workspace_changes() const noexcept { return 0; }
  /// Sets the function that is called, on any thread, when a remote device is lost with its memory,
  /// its streams and its events. From then on every function returns `errc::worker_lost`, until
  /// `bind` opens the device again; only `query` may know that an event was done. Call it before
  /// any work. The signal may come late, when `bind` has opened the device again: `loss` tells.
  virtual void set_loss_signal(std::function<void(const caf::error&)> signal) noexcept {
    static_cast<void>(signal);
  }
  /// Returns why the remote device is lost; none while it is there.
  /// @thread any
  [[nodiscard]] virtual caf::error loss() const noexcept { return {}; }
  /// Returns whether memory may be kept when the device is lost because of `loss` (`take_over`).
  /// @thread any
  [[nodiscard]] virtual bool may_keep_memory(const caf::error& loss) const noexcept {
    static_cast<void>(loss);
    return false;
  }
  /// Called while the device is lost. The result returns true when the work that had begun on the
  /// lost device is over. Until then it may read and write the memory of that device, and what it
  /// was given of other devices' memory.
  /// @thread of the result: any
  [[nodiscard]] virtual std::function<bool()> lost_work() const noexcept {
    return [] { return true; };
  }
  /// Keeps the memory that the device had before it was lost, at the same addresses. Called after
  /// `bind` has opened the device again, before `open_memory`. Without it, or if it fails,
  /// `open_memory` drops that memory.
  /// @errors errc::not_supported: it cannot be kept, or is not trusted; errc::worker_lost
  [[nodiscard]] virtual caf::error take_over() noexcept {
    return make_error(errc::not_supported, "the device does not keep its memory");
  }
  /// Makes the spare the process of the device. All work in its streams is done. Its streams and
  /// events are gone then. `bind` opens the device there, and `take_over` keeps its memory. The
  /// former process is ended when its ranks of communicators have ended.
  /// @errors nothing has changed. errc::unavailable: there is no spare; errc::worker_lost: the
  ///         device or the spare is lost; errc::not_supported
  [[nodiscard]] virtual caf::error move_to_spare() noexcept {
    return make_error(errc::not_supported, "only devices in worker processes have spares");
  }

  /// Returns true if streams and events are CUDA's: then a `stream_view` is a `cudaStream_t`.
  /// @thread any
  [[nodiscard]] virtual bool runs_cuda() const noexcept = 0;

  /// Returns true if the backend calls the signal below when an event completes, so that a lane
  /// need not poll.
  [[nodiscard]] virtual bool signals_completion() const noexcept = 0;
  /// Sets the function that is called, on any thread, when an event of this device completes. Call
  /// it before any work.
  virtual void set_completion_signal(std::function<void()> signal) noexcept = 0;
};

/// A piece of device memory that several processes can map, all at the same address. It exists as
/// long as a process has it mapped or holds a descriptor of it, whichever process made it.
struct memory_slab {
  /// No slab crosses a multiple of this. A backend reserves so many addresses at once. @units bytes
  static constexpr std::size_t window = std::size_t{1} << 40;

  int ordinal = 0; ///< the device that has the memory
  void* address = nullptr;
  std::size_t size_bytes = 0;
};

/// Identifies a communicator that is to be built. All its ranks get the same bytes.
struct communicator_id {
  std::array<std::byte, 128> bytes{};
};

/// One rank in the calling process.
struct local_rank {
  int rank = 0;
  int device = 0; ///< ordinal
  /// The rank is on the spare of the device (`backend::provide_spare`), not on the present device.
  bool spare = false;
};

/// One rank of a direct communicator whose ranks are in several processes.
struct direct_member {
  int device = 0; ///< ordinal
  /// Memory of the device by which the ranks exchange data, of `backend::direct_bytes`. All
  /// processes have mapped it, at the same address.
  void* memory = nullptr;
};

/// How many elements a rank exchanges with each rank, and their offsets in its buffers.
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
///        all_to_all, gather (root). Null if a rank has nothing to send or to receive. In place:
///        `send` = `recv` (all_reduce, reduce, broadcast); `send` = `recv` + rank * count elements
///        (all_gather, gather on the root); `recv` = `send` + rank * count elements
///        (reduce_scatter, scatter on the root); otherwise they do not overlap.
struct collective_call {
  collective_kind what = collective_kind::all_reduce;
  const void* send = nullptr;
  void* recv = nullptr;
  std::size_t count = 0;
  dtype type = dtype::uint8;
  reduce_op op = reduce_op::sum;
  int peer = 0;                        ///< root, or the rank at the other end of a send or recv
  const void* factor = nullptr;        ///< this rank's, one element, for reduce_op::premul_sum
  const exchange_plan* plan = nullptr; ///< for all_to_all_v
};

/// Where the calls of a rank stand in a recorded step.
struct step_position {
  std::uint32_t place = 0;          ///< ascending within the step, from 1; 0: they are in no step
  std::uint32_t* reached = nullptr; ///< in memory of `allocate_pinned`; null if `place` is 0
};

/// The operations for which a communicator's ranks are connected.
enum class connect_scope : std::uint8_t {
  collectives, ///< collectives alone in their call; no gather, scatter or all-to-all
  everything
};

/// The state of a device that can be lost alone, or of the spare that takes its place.
/// @thread any
class device_life {
public:
  virtual ~device_life() = default;
  /// Returns whether the device is lost.
  virtual bool lost() const noexcept = 0;
  /// Returns whether its process has ended. The device is lost as soon as its owner notices that.
  virtual bool has_ended() const noexcept = 0;
};

/// One rank of a communicator.
/// @thread only the device's lane, unless a function says otherwise
class backend_communicator {
public:
  virtual ~backend_communicator() = default;

  /// Makes the missing connections for `what`, by small operations on `stream`, with all ranks at
  /// the same time. May block until every rank has called it.
  [[nodiscard]] virtual caf::error connect(stream_view stream, connect_scope what) noexcept = 0;

  /// Enqueues `calls` as one group: they progress together, so sends and recvs of any pattern among
  /// the ranks cannot deadlock. After the call, only device memory that the calls point to is still
  /// used. Collectives have the same order in the groups of all their ranks. A backend may write
  /// the place in a step to `*where.reached` when the work has ended, also in launches of a graph
  /// that has recorded it.
  /// @errors  errc::invalid_argument, not_supported (nothing enqueued); errc::nccl_error (the
  ///          communicator must be aborted)
  /// @source  NCCL user guide, "Collective Communication Functions", "Group Calls"
  [[nodiscard]] virtual caf::error enqueue(std::span<const collective_call> calls,
                                           stream_view stream,
                                           step_position where = {}) noexcept = 0;

  /// Launches a graph of `device`, that of the rank, which has calls of this rank.
  /// @param reached that of the calls, to be set to 0 in stream order before they run; may be null
  [[nodiscard]] virtual caf::error replay(graph_view graph, stream_view stream,
                                          backend_device& device, std::uint32_t* reached) noexcept {
    static_cast<void>(reached);
    return device.launch_graph(graph, stream);
  }

  /// Makes `event` that of the end of the last `enqueue` or `replay`, after which nothing entered
  /// `stream`.
  virtual caf::error mark_end(event_view event, stream_view stream,
                              backend_device& device) noexcept {
    return device.record(event, stream);
  }

  /// Sets the function that is called, on any thread and possibly at once, when the device or spare
  /// of the rank is lost.
  /// @thread any
  virtual void on_loss(std::function<void()> f) noexcept { static_cast<void>(f); }

  /// Returns the state of the rank's device or spare; null if no device can be lost alone.
  /// @thread any
  virtual std::shared_ptr<const device_life> life() const noexcept { return nullptr; }

  /// Hands the rank over to the process that it is in, which makes all further calls on it. `what`
  /// tells the receiver in that process to which world and rank it belongs.
  /// @thread any
  /// @errors errc::not_supported: the rank is in this process; errc::worker_lost
  [[nodiscard]] virtual caf::error hand_over(std::span<const std::byte> what) noexcept {
    static_cast<void>(what);
    return make_error(errc::not_supported, "the rank is in this process");
  }

  /// Called before the rank is aborted or destroyed, when no operation on it can succeed any more:
  /// all that were not over have failed. A lane may still be in a call on the rank, which may
  /// wait for the rank's kernels. So a backend that can end its kernels does it here.
  /// @thread any
  virtual void on_closed() noexcept {}

  /// Called before the first `enqueue` of a rank whose calls come from a program that knows nothing
  /// of the other ranks' calls; on all ranks or on none. If the backend can, it then compares the
  /// calls, and ends those that do not match with errc::collective_mismatch.
  virtual void compare_calls() noexcept {}

  /// Returns an error that occurred asynchronously, outside any call; none if there is none.
  [[nodiscard]] virtual caf::error asynchronous_error() noexcept = 0;
};

using communicator_ranks = std::vector<std::unique_ptr<backend_communicator>>;

/// A word that a process shares with the process of a device.
struct shared_word {
  std::uint32_t number = 0; ///< names the word in both processes; never 0
  std::atomic<std::uint64_t>* value = nullptr;
};

/// Executes the work of devices and communicators.
/// @thread any, unless a function says otherwise
class backend {
public:
  virtual ~backend() = default;

  [[nodiscard]] virtual std::string_view name() const noexcept = 0;

  /// Returns the number of devices; their ordinals are 0 to n-1.
  [[nodiscard]] virtual int device_count() const noexcept = 0;

  /// Opens a device; only one object per device at a time. Cheap: no context is made before `bind`.
  /// @errors errc::invalid_argument: no such ordinal; errc::unavailable: the device is already open
  ///         in this process
  [[nodiscard]] virtual caf::expected<std::unique_ptr<backend_device>>
  open(int ordinal) noexcept = 0;

  /// Opens another object for a device that is open, with memory, streams and events of its own and
  /// driven by another thread. Different threads drive different communicators.
  /// @errors as `open`; errc::not_supported
  [[nodiscard]] virtual caf::expected<std::unique_ptr<backend_device>>
  open_beside(int ordinal) noexcept {
    static_cast<void>(ordinal);
    return make_error(errc::not_supported, "the backend opens a device once");
  }

  /// Returns whether devices can be reset or shut down on request. False if another process drives
  /// them, too.
  [[nodiscard]] virtual bool allows_reset() const noexcept { return true; }

  /// Returns the connection from device `from` to another device `to`. May block until it is known.
  /// @thread never a lane
  /// @errors errc::invalid_argument: no such ordinals
  [[nodiscard]] virtual caf::expected<peer_link> link(int from, int to) noexcept = 0;

  [[nodiscard]] virtual caf::expected<communicator_id> make_communicator_id() noexcept = 0;

  /// Checks that `build` of these ranks would find what it needs on their devices. `build` checks
  /// that itself for the ranks of this process. Where more processes build together, each is asked
  /// before any of them begins: a rank that fails inside may leave the others waiting for good.
  /// @thread as for `build`
  /// @errors as for `build`
  [[nodiscard]] virtual caf::error check_build(int size,
                                               std::span<const local_rank> ranks) noexcept {
    static_cast<void>(size);
    static_cast<void>(ranks);
    return {};
  }

  /// Checks memory of the user on a device that the library takes over, and lets the devices that
  /// can access the device's memory access it, whatever kind of allocation it is.
  /// @thread any
  /// @errors errc::invalid_argument: not all of the memory lies on the device
  [[nodiscard]] virtual caf::error admit_memory(int ordinal, void* memory,
                                                std::size_t size_bytes) noexcept {
    static_cast<void>(ordinal);
    static_cast<void>(memory);
    static_cast<void>(size_bytes);
    return {};
  }

  /// Returns whether other devices reach memory that `admit_memory` has admitted.
  [[nodiscard]] virtual bool shares_adopted_memory() const noexcept { return true; }

  /// Returns an owner of memory that the process of a device lends to this one. While it exists,
  /// the memory is used for nothing else, even if that process is lost. Null: other devices do not
  /// reach the memory.
  /// @thread any
  [[nodiscard]] virtual std::shared_ptr<const void>
  keep_for_peers(int ordinal, const void* memory, std::size_t size_bytes) noexcept {
    static_cast<void>(ordinal);
    static_cast<void>(memory);
    static_cast<void>(size_bytes);
    return nullptr;
  }

  /// Takes a word of memory that the process of a device shares with this one, and sets it to
  /// `value`. It is free again when the last copy of the result is gone. Null: no word is free, or
  /// the memory of that device is not kept beyond its process.
  /// @thread any
  [[nodiscard]] virtual std::shared_ptr<const shared_word> take_word(int ordinal,
                                                                     std::uint64_t value) noexcept {
    static_cast<void>(ordinal);
    static_cast<void>(value);
    return nullptr;
  }
  /// Returns the word of that number which the parent of this process has taken. Null: there is
  /// none.
  /// @thread any
  [[nodiscard]] virtual std::atomic<std::uint64_t>* find_word(std::uint32_t number) noexcept {
    static_cast<void>(number);
    return nullptr;
  }

  /// Returns the number of which addresses and sizes of slabs are multiples; 0: there are no slabs.
  [[nodiscard]] virtual std::size_t slab_granularity() const noexcept { return 0; }

  /// Makes a slab at an address that the caller chooses, and maps it. Waits for no work on the
  /// device. Returns a file descriptor of it, which the caller closes.
  /// @thread any
  /// @errors errc::out_of_memory; errc::unavailable: the address is in use in this process;
  ///         errc::invalid_argument: not a multiple of the granularity; errc::not_supported
  [[nodiscard]] virtual caf::expected<int> make_slab(const memory_slab& what) noexcept {
    static_cast<void>(what);
    return make_error(errc::not_supported, "the backend has no slabs");
  }

  /// Maps a slab that another process has made, for work of device `by`.
  /// @param descriptor of the slab; the caller still owns it
  /// @thread any
  /// @errors errc::unavailable: the address is in use in this process; errc::invalid_argument: the
  ///         descriptor is not of such a slab; errc::not_supported
  [[nodiscard]] virtual caf::error map_slab(const memory_slab& what, int descriptor,
                                            int by) noexcept {
    static_cast<void>(what);
    static_cast<void>(descriptor);
    static_cast<void>(by);
    return make_error(errc::not_supported, "the backend has no slabs");
  }

  /// Unmaps a slab that no work uses.
  /// @thread any
  /// @errors errc::invalid_argument: it is not mapped here
  [[nodiscard]] virtual caf::error unmap_slab(const memory_slab& what) noexcept {
    static_cast<void>(what);
    return make_error(errc::not_supported, "the backend has no slabs");
  }

  /// Builds those ranks of a communicator of `size` ranks that this process holds. Blocks until all
  /// ranks of all processes have arrived. The result is in the order of `ranks`.
  /// @thread a builder; never a lane
  [[nodiscard]] virtual caf::expected<communicator_ranks>
  build(const communicator_id& id, int size, std::span<const local_rank> ranks) noexcept = 0;

  /// Returns whether `build_direct` is possible for ranks on these devices.
  /// @shape ordinals: distinct, of existing devices
  [[nodiscard]] virtual bool can_be_direct(std::span<const int> ordinals) const noexcept {
    static_cast<void>(ordinals);
    return false;
  }

  /// Builds all ranks of a communicator whose collectives are kernels of the library over the
  /// memory of its devices ("direct"): all in this process, in the order of ranks. Each device
  /// needs `enable_peer` and `admit_peer` for all others. Waits for no work on the devices. An
  /// `abort` ends the kernels at once, also if other ranks never come.
  /// @thread a builder; never a lane
  /// @errors errc::not_supported: too many ranks, or devices without access to each other's memory
  [[nodiscard]] virtual caf::expected<communicator_ranks>
  build_direct(std::span<const local_rank> ranks) noexcept {
    static_cast<void>(ranks);
    return make_error(errc::not_supported, "the backend has no direct collectives");
  }

  /// Returns the size of the memory that each rank of a direct communicator needs whose ranks are
  /// in several processes; 0: such communicators are not possible.
  /// @units bytes
  [[nodiscard]] virtual std::size_t direct_bytes() const noexcept { return 0; }

  /// Returns an id for `join_direct`.
  [[nodiscard]] virtual caf::expected<communicator_id> make_direct_id() noexcept {
    return make_error(errc::not_supported, "the backend has no direct collectives");
  }

  /// Builds one rank of a direct communicator whose ranks are in several processes, as
  /// `build_direct` does. No call on any rank may come before all ranks have joined. Memory that
  /// the ranks' calls use is mapped in all processes.
  /// @shape members: by rank
  /// @thread a builder; never a lane
  /// @errors as `build_direct`
  [[nodiscard]] virtual caf::expected<communicator_ranks>
  join_direct(const communicator_id& id, int rank,
              std::span<const direct_member> members) noexcept {
    static_cast<void>(id);
    static_cast<void>(rank);
    static_cast<void>(members);
    return make_error(errc::not_supported, "the backend has no direct collectives");
  }

  /// Cancels the build under `id`. Threads that wait for other ranks in `build`, or that `connect`
  /// the result, return errc::unavailable as soon as they can. Call it in all processes that have
  /// ranks of it, and where the id was made. NCCL waits for good for a rank that never comes.
  virtual void call_off(const communicator_id& id) noexcept { static_cast<void>(id); }

  /// Ends a communicator during any operation, all its local ranks at once. No thread may be in a
  /// call on it. Blocks.
  /// @thread a reaper; never a lane
  [[nodiscard]] virtual caf::error abort(communicator_ranks ranks) noexcept = 0;

  /// Ends an idle communicator without an abort. Blocks.
  /// @thread a reaper; never a lane
  [[nodiscard]] virtual caf::error destroy(communicator_ranks ranks) noexcept = 0;

  /// Ensures that another process is ready to take over the device when the process that has it is
  /// lost. Blocks until it is ready.
  /// @thread a builder; never a lane
  /// @errors errc::not_supported: devices of this backend have no spares; errc::unavailable
  [[nodiscard]] virtual caf::error provide_spare(int ordinal) noexcept {
    static_cast<void>(ordinal);
    return make_error(errc::not_supported, "only devices in worker processes have spares");
  }
  /// Does the same, and ensures that the spare can take over the memory of the device
  /// (`backend_device::move_to_spare`).
  /// @thread a builder; never a lane
  /// @errors errc::not_supported: memory of this device cannot be in another process;
  ///         errc::unavailable
  [[nodiscard]] virtual caf::error prepare_move(int ordinal) noexcept {
    static_cast<void>(ordinal);
    return make_error(errc::not_supported, "only devices in worker processes have spares");
  }
  /// Returns whether `rank` is on the present device, and not on a lost one or on a spare.
  virtual bool is_current(const backend_communicator& rank, int ordinal) const noexcept {
    static_cast<void>(rank);
    static_cast<void>(ordinal);
    return true;
  }

  /// Sends bytes to the receiver in the process that has a device.
  /// @errors errc::not_supported: it is this process; errc::worker_lost
  [[nodiscard]] virtual caf::error tell(int ordinal, std::span<const std::byte> what) noexcept {
    static_cast<void>(ordinal);
    static_cast<void>(what);
    return make_error(errc::not_supported, "the device is in this process");
  }
  /// Sets the function that gets, on any thread and in order, the bytes that such processes send.
  virtual void
  set_listener(std::function<void(int ordinal, std::span<const std::byte> what)> f) noexcept {
    static_cast<void>(f);
  }

  /// Gives up a device that can be lost alone, because its lane is stuck in a call, which then
  /// returns. Returns false if it cannot: only the end of this process ends the call.
  /// @param why the error for all work on the device
  virtual bool give_up(int ordinal, const caf::error& why) noexcept {
    static_cast<void>(ordinal);
    static_cast<void>(why);
    return false;
  }

  /// Abandons the work of this process with its devices, after a sticky fault or because a thread
  /// is stuck in a call for good. From now on no call goes to a driver, since it might not return.
  /// Remaining resources are dropped, by destructors too, and every function returns
  /// `errc::device_fault`. Does nothing if the backend has no driver.
  virtual void abandon(const caf::error& why) noexcept { static_cast<void>(why); }
};

/// The connection from virtual device `from` to `to`.
struct host_link {
  int from = 0;
  int to = 0;
  bool access = true; ///< whether `from` can access the memory of `to`
  peer_link link = {.kind = link_kind::memory, .native_atomics = true};
};

/// Options of virtual devices in host memory.
struct host_backend_options {
  int devices = 8;
  std::size_t bytes_per_device = std::size_t{1} << 30; ///< address space; touched only when used
  /// Connections that differ from `host_link`'s defaults: every device can access all others.
  std::vector<host_link> links = {};
  /// Numeric address of one of the machine's interfaces ("127.0.0.1"). This process listens there,
  /// on a free port, for ranks of its communicators in other processes. Empty: if the id of a
  /// communicator is from this process, all its ranks are here.
  std::string listen_address = {};
};

std::shared_ptr<backend> make_host_backend(host_backend_options options = {});

/// Options of the CUDA backend.
struct cuda_backend_options {
  /// Freed memory is returned only when memory runs out.
  static constexpr std::chrono::milliseconds forever = std::chrono::milliseconds::max();

  /// How long a device keeps memory that was freed and that no allocation has needed since. During
  /// that time, allocation from it is fast. Then it returns to the driver, within the same time
  /// again, and other processes and libraries can use it. 0: at once. If an allocation finds no
  /// memory, all of it is returned, and the allocation is tried once more.
  std::chrono::milliseconds keep_freed{1000};
};

/// Makes the backend of this machine's GPUs. The first call loads the CUDA runtime and NCCL.
/// @errors errc::not_supported: built without CUDA; errc::unavailable: no CUDA runtime, NCCL,
///         driver or GPU, with the reason; errc::invalid_argument: an option that is out of range
caf::expected<std::shared_ptr<backend>> make_cuda_backend(const cuda_backend_options& options = {});

} // namespace troupe
