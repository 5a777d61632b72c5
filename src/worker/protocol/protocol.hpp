/// Protocol between a parent and a worker: commands in the ring, in order, for the thread that
/// drives the device; requests through the socket if they block or concern no stream. Addresses are
/// the worker's.
#pragma once

#include "foundation/wire.hpp"
#include "worker/protocol/message_socket.hpp"
#include <troupe/backend.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace troupe::detail {

/// Commands in the ring, with their arguments and replies. Each may be answered by an error
/// instead. `record` and `stop` are sent without a reply.
enum class command : std::uint16_t {
  skip = 0,
  bind,   ///< reply: bound_device
  warm,   ///< binds, and prepares resources that take the driver long; for a spare
  memory, ///< reply: memory_info
  open_memory,
  close_memory,
  allocate,           ///< allocate_args; reply: address
  deallocate,         ///< deallocate_args
  create_stream,      ///< reply: stream_id
  destroy_stream,     ///< stream_id
  record,             ///< record_args
  wait_event,         ///< wait_event_args
  wait_word,          ///< wait_word_args
  copy,               ///< copy_args
  fill,               ///< fill_args
  launch,             ///< launch_request
  prepare_launch,     ///< launch_request; its stream may be 0
  enqueue,            ///< enqueue_args, then the calls
  enqueue_in_step,    ///< enqueue_in_step_args, then the calls
  record_graph,       ///< graph_args, then each command: its `command` and its body
  launch_graph,       ///< graph_args
  replay,             ///< replay_args
  asynchronous_error, ///< communicator_key
  can_access_peer,    ///< ordinal; reply: bool
  stop,               ///< the last command
};

std::string_view to_string(command x) noexcept;

/// Returns whether the work of such a command can be part of a graph.
bool is_recordable(command x) noexcept;

/// For commands without arguments.
struct no_arguments {};

/// Number of a stream of the worker's device; 0: none.
using stream_id = std::uint64_t;
/// Number of a communicator's rank in the worker.
using communicator_key = std::uint64_t;

/// A place in host memory that both processes have mapped.
struct shared_place {
  std::uint64_t segment = 0; ///< 0: there is none
  std::uint64_t offset = 0;
};

struct allocate_args {
  std::uint64_t size_bytes = 0;
  stream_id stream = 0;
};

struct deallocate_args {
  std::uint64_t address = 0;
  stream_id stream = 0;
};

struct record_args {
  std::uint64_t event = 0;
  std::uint64_t number = 0; ///< value of `link_area::done` once it is done
  stream_id stream = 0;
};

struct wait_event_args {
  std::uint64_t event = 0;
  stream_id stream = 0;
};

struct wait_word_args {
  shared_place word;
  std::uint64_t at_least = 0;
  stream_id stream = 0;
};

struct copy_args {
  copy_direction direction = copy_direction::device_to_device;
  std::uint64_t target = 0; ///< addresses in device memory
  std::uint64_t source = 0;
  shared_place host; ///< the host side of a copy from or to host memory
  std::uint64_t size_bytes = 0;
  stream_id stream = 0;
};

struct fill_args {
  std::uint64_t target = 0;
  std::uint64_t count = 0;
  std::uint64_t pattern_bytes = 0;
  std::byte pattern[16] = {};
  stream_id stream = 0;
};

struct enqueue_args {
  communicator_key communicator = 0;
  stream_id stream = 0;
  std::uint32_t calls = 0;
};

/// With the fields of a `step_position`.
struct enqueue_in_step_args {
  enqueue_args what;
  std::uint32_t place = 0;
  shared_place reached;
};

/// Number of a graph of the worker's device, which the parent chooses.
using graph_id = std::uint64_t;

struct graph_args {
  graph_id graph = 0;
  stream_id stream = 0;
};

struct replay_args {
  communicator_key communicator = 0;
  graph_args what;
  shared_place reached;
};

/// A call that was read, with the data that it points to: it must not move.
struct received_call {
  collective_call call;
  std::array<std::byte, 8> factor{};
  exchange_plan plan;
};
void wire_fields(wire_writer& to, const collective_call& x);
void wire_fields(wire_reader& from, received_call& to);

void wire_fields(auto& wire, message_of<device_properties> auto& x) {
  wire(x.name, x.pci_id, x.capability_major, x.capability_minor, x.total_bytes);
}

/// Reply of `command::bind`.
struct bound_device {
  device_properties properties;
  bool records_graphs = false; ///< as `backend_device::records_graphs`
};
void wire_fields(auto& wire, message_of<bound_device> auto& x) {
  wire(x.properties, x.records_graphs);
}

void wire_fields(auto& wire, message_of<launch_memory> auto& x) {
  wire(x.address, x.count, x.type);
  wire.require(is_dtype(x.type) && x.count <= SIZE_MAX / size_of(x.type));
}

/// Arguments of a registered launch.
struct launch_request {
  std::string name;
  std::vector<launch_memory> reads;
  std::vector<launch_memory> writes;
  std::vector<std::byte> arguments;
  stream_id stream = 0;
  std::vector<shared_place> verdict; ///< of its word, if it has one
};
void wire_fields(auto& wire, message_of<launch_request> auto& x) {
  wire(x.name, x.reads, x.writes, x.arguments, x.stream, x.verdict);
}

/// Requests through the socket, with their arguments and replies. Each may be answered by an error
/// instead.
enum class control : std::uint16_t {
  set_up = 1,           ///< worker_setup, the first message; reply: worker_description
  peer_link,            ///< two ordinals; reply: peer_link
  make_communicator_id, ///< reply: communicator_id
  check_build,          ///< build_args; reply: none, or why the build would fail
  build,                ///< build_args; reply: communicator_key
  make_direct_id,       ///< reply: communicator_id
  join_direct,          ///< join_args; reply: communicator_key
  close,                ///< communicator_key; reply: no operation on the rank can succeed any more
  abort,                ///< communicator_key
  destroy,              ///< communicator_key
  map,                  ///< map_args, with a descriptor: the memory is mapped and pinned
  unmap,                ///< segment number
  hand_over,            ///< communicator_key, then bytes for the program that drives it from now on
  tell,                 ///< bytes for the programs
  told,                 ///< from the worker, number 0, no reply: bytes from its programs
  call_off,             ///< communicator_id: cancels its build
  make_slab,            ///< slab_args; reply: none, with a descriptor of the slab
  unmap_slab,           ///< slab_args
  map_slab,             ///< slab_args, with a descriptor: memory that another worker has made
  drop_slab,            ///< slab_args: unmaps it when the work in all streams is over
  drop_graph,           ///< graph_id
  trim,      ///< reply: the `lent_range`s that its programs give back, since nothing is in them
  lend,      ///< from the worker: a `lent_range` without address, of which its programs need more
  take_back, ///< from the worker: a `lent_range` that its programs do not need any more
  demand_reply, ///< number of such a request of the worker, then an error and a `lent_range`
};

std::string_view to_string(control x) noexcept;

/// Values that the thread that drives a device marks in `work_progress`, beside commands.
enum class own_call : std::uint32_t {
  query = 1u << 16, ///< of events
  asked,            ///< for a request through the socket
};
/// Returns the name of a marked call; any number may be marked.
std::string call_name(std::uint32_t marked);

/// Upper limit for a plausible number of devices.
inline constexpr int most_worker_devices = 1024;

void wire_fields(auto& wire, message_of<peer_link> auto& x) {
  wire(x.kind, x.links, x.performance_rank, x.native_atomics);
  wire.require(x.kind <= link_kind::memory);
}

void wire_fields(auto& wire, message_of<host_link> auto& x) {
  wire(x.from, x.to, x.access, x.link);
}

/// Configuration of a worker.
struct worker_setup {
  std::string backend;
  std::int32_t device = 0;
  std::int64_t spin_ns = -1; ///< negative: depends on the number of cores
  host_backend_options host;
  cuda_backend_options cuda;
  bool lends = false; ///< the parent lends memory of slabs to programs, if the worker has slabs
};
void wire_fields(auto& wire, message_of<worker_setup> auto& x) {
  wire(x.backend, x.device, x.spin_ns, x.host.devices, x.host.bytes_per_device, x.host.links,
       x.host.listen_address, x.cuda.keep_freed, x.lends);
}

/// The worker's reply to `worker_setup`.
struct worker_description {
  std::int32_t devices = 0;
  std::int64_t spin_ns = 0;
  std::uint64_t slab_granularity = 0; ///< as `backend::slab_granularity`
  std::uint64_t direct_bytes = 0;     ///< as `backend::direct_bytes`
  /// For each device, one bit for each of the first 64 devices with which it can be direct.
  std::vector<std::uint64_t> reaches;
};
void wire_fields(auto& wire, message_of<worker_description> auto& x) {
  wire(x.devices, x.spin_ns, x.slab_granularity, x.direct_bytes, x.reaches);
}

struct build_args {
  communicator_id id;
  std::int32_t size = 0;
  std::int32_t rank = 0;
  std::int32_t device = 0;
};

void wire_fields(auto& wire, message_of<direct_member> auto& x) { wire(x.device, x.memory); }

/// Arguments of a rank that joins a direct communicator.
struct join_args {
  communicator_id id;
  std::int32_t rank = 0;
  std::vector<direct_member> members; ///< by rank
};
void wire_fields(auto& wire, message_of<join_args> auto& x) { wire(x.id, x.rank, x.members); }

/// A piece of device memory that the parent manages.
struct slab_args {
  std::uint64_t address = 0;
  std::uint64_t size_bytes = 0;
  std::int32_t device = 0; ///< ordinal
};

/// A range of device memory that the parent lends to the programs of a worker.
struct lent_range {
  std::uint64_t address = 0;
  std::uint64_t size_bytes = 0;
};

struct map_args {
  std::uint64_t segment = 0;
  std::uint64_t size_bytes = 0;
};

/// Header of each message on the socket.
struct control_head {
  std::uint64_t number = 0; ///< of the request, also in its reply
  control kind{};
};

/// Returns the answer to a request: its head, and an error or the bytes of the result.
wire_writer answer_to(const control_head& request, const caf::error& error,
                      std::span<const std::byte> result = {});

/// Largest size of a message on the socket.
inline constexpr std::size_t control_bytes = std::size_t{64} << 10;

/// Passes on each message, with its descriptor if any. Returns when the peer has ended or the
/// socket is interrupted.
/// @errors errors of `receive`: nothing useful can be received any more
caf::error receive_all(
    message_socket& from,
    const std::function<void(std::span<const std::byte>, std::optional<file_descriptor>)>& to);

} // namespace troupe::detail
