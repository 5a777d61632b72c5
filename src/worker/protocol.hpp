/// What a parent asks of a worker: by the ring, in order, for the thread that drives the device; by
/// the socket, for what blocks or concerns no stream. Addresses are the worker's.
#pragma once

#include "core/wire.hpp"
#include "worker/message_socket.hpp"
#include <troupe/backend.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace troupe::detail {

/// By the ring. Each is answered by what its comment names, or by an error; `record` by nothing.
enum class command : std::uint16_t {
  skip = 0,
  bind,               ///< device_properties
  warm,               ///< binds, and has ready what takes the driver's time: for a spare
  memory,             ///< memory_info
  open_memory,        ///<
  close_memory,       ///<
  allocate,           ///< allocate_args: address
  deallocate,         ///< deallocate_args
  allocate_symmetric, ///< size: address
  create_stream,      ///< stream_id
  destroy_stream,     ///< stream_id
  record,             ///< record_args
  wait_event,         ///< wait_event_args
  wait_word,          ///< wait_word_args
  copy,               ///< copy_args
  fill,               ///< fill_args
  launch,             ///< launch_request
  enqueue,            ///< enqueue_args, then the calls
  register_window,    ///< window_args
  deregister_window,  ///< window_args
  asynchronous_error, ///< communicator_key
  stop,               ///< nothing comes after it
};

std::string_view to_string(command x) noexcept;

/// Of commands that need none.
struct no_arguments {};

/// Number of a stream of the worker's device; 0: none.
using stream_id = std::uint64_t;
/// Number of a rank of a communicator in the worker.
using communicator_key = std::uint64_t;

/// Host memory that both processes have mapped.
struct shared_place {
  std::uint64_t segment = 0;
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
  std::uint64_t number = 0; ///< what `link_area::done` says when it is done
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
  shared_place host; ///< the other side of a copy from or to host memory
  std::uint64_t size_bytes = 0;
  stream_id stream = 0;
};

struct fill_args {
  std::uint64_t target = 0;
  std::uint64_t count = 0;
  std::uint64_t pattern_bytes = 0;
  std::byte pattern[8] = {};
  stream_id stream = 0;
};

struct enqueue_args {
  communicator_key communicator = 0;
  stream_id stream = 0;
  std::uint32_t calls = 0;
};

struct window_args {
  communicator_key communicator = 0;
  std::uint64_t address = 0;
  std::uint64_t size_bytes = 0;
  stream_id stream = 0;
};

void put(wire_writer& to, const collective_call& x);
/// A call with what it points to.
struct received_call {
  collective_call call;
  std::byte factor[8] = {};
  exchange_plan plan;
};
/// `to` stays where it is as long as the call is used.
bool get(wire_reader& from, received_call& to);

void put(wire_writer& to, const device_properties& x);
device_properties get_properties(wire_reader& from);

/// A registered launch.
struct launch_request {
  std::string name;
  std::vector<launch_memory> reads;
  std::vector<launch_memory> writes;
  std::vector<std::byte> arguments;
  stream_id stream = 0;
};
void put(wire_writer& to, const launch_request& x);
launch_request get_launch(wire_reader& from);

/// By the socket. Each is answered by what its comment names, or by an error.
enum class control : std::uint16_t {
  set_up = 1,           ///< worker_setup, the first of all: worker_description
  peer_link,            ///< two ordinals: peer_link
  make_communicator_id, ///< communicator_id
  build,                ///< build_args: communicator_key
  abort,                ///< communicator_key
  destroy,              ///< communicator_key
  map,                  ///< map_args, with a descriptor: the memory is there, and pinned
  unmap,                ///< number of the segment
  hand_over,            ///< communicator_key, then bytes for the program that has it from now on
  tell,                 ///< bytes for the programs
  told,                 ///< from the worker, without a number or an answer: bytes of its programs
  call_off,             ///< communicator_id: nobody wants what is built by it
};

std::string_view to_string(control x) noexcept;

/// What the thread that drives a device marks in `work_progress`: a command, or one of these.
enum class own_call : std::uint32_t {
  query = 1u << 16, ///< of events
  asked,            ///< for a request by the socket
};
/// What is marked there, in words; any number may be.
std::string call_name(std::uint32_t marked);

/// No machine has more.
inline constexpr int most_worker_devices = 1024;

/// What a worker is.
struct worker_setup {
  std::string backend;
  std::int32_t device = 0;
  std::int64_t spin_ns = -1; ///< negative: by the number of cores
  host_backend_options host;
  cuda_backend_options cuda;
};

/// What it says of itself.
struct worker_description {
  std::int32_t devices = 0;
  std::int64_t spin_ns = 0;
};
void put(wire_writer& to, const peer_link& x);
peer_link get_peer_link(wire_reader& from);

void put(wire_writer& to, const worker_setup& x);
worker_setup get_setup(wire_reader& from);

struct build_args {
  communicator_id id;
  std::int32_t size = 0;
  std::int32_t rank = 0;
  std::int32_t device = 0;
};

struct map_args {
  std::uint64_t segment = 0;
  std::uint64_t size_bytes = 0;
};

/// Stands before each message on the socket.
struct control_head {
  std::uint64_t number = 0; ///< of the request, in its reply too
  control kind{};
};

/// The longest message on the socket.
inline constexpr std::size_t control_bytes = std::size_t{64} << 10;

/// Hands all messages on, each with its descriptor if it has one, until the peer is no more or the
/// socket is interrupted.
/// @errors what receiving gives: nothing more can be received that makes sense
caf::error receive_all(
    message_socket& from,
    const std::function<void(std::span<const std::byte>, std::optional<file_descriptor>)>& to);

} // namespace troupe::detail
