/// Messages between a parent and the agents on other hosts, in frames (frame_link.hpp). Both sides
/// have the same version of the library. A channel is one life of a worker, with a number from the
/// parent. A device is named by its ordinal on its own host.
#pragma once

#include "worker/protocol/command_ring.hpp"
#include "worker/protocol/protocol.hpp"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace troupe::detail {

enum class host_frame : std::uint32_t {
  beat = 0,

  // from an agent
  hello,    ///< host_hello, the first frame
  ready,    ///< std::int32_t: its number of devices; after the welcome
  started,  ///< of a channel: an error, or none; answers `start`
  released, ///< of a request: nothing; answers `release`
  reply,    ///< of a channel: number of the command, then the worker's reply
  answer,   ///< of a channel: the worker's answer to a request by its socket
  done,     ///< of a channel: number of communicator errors; then done_event...
  lost,     ///< of a channel: the error with the reason
  told,     ///< std::int32_t: a device; then bytes from a program in its worker

  // from the parent
  welcome, ///< host_welcome: answers `hello`
  start,   ///< of a channel: start_args
  release, ///< of a request: std::int32_t: a device that needs no worker any more
  command, ///< of a channel: command_head, then its body
  request, ///< of a channel: a request for the worker's socket, without a descriptor
  word,    ///< of a channel: word_args
  give_up, ///< of a channel: nothing; it is not needed any more

  // from both
  refused, ///< text: why the peer cannot join; the last frame
  content, ///< of a channel: shared_place, then bytes of a segment
};

/// Returns the value for a frame's head.
constexpr std::uint32_t number(host_frame x) noexcept { return static_cast<std::uint32_t>(x); }

/// Returns a writer that has written `x`.
template <class T> wire_writer packed(const T& x) {
  wire_writer result;
  result.put(x);
  return result;
}

struct start_args {
  std::int32_t device = 0;
  std::int32_t spare = 0; ///< nonzero: the device's spare
};

/// A value that a word of a segment has reached, or passed.
struct word_args {
  shared_place word;
  std::uint64_t value = 0;
};

struct done_event {
  std::uint64_t event = 0;
  std::uint64_t record = 0;
};

/// The size of the pieces in which segments are sent.
inline constexpr std::size_t content_bytes = std::size_t{128} << 10;
/// The largest body of a frame: a command of the ring, or a control message.
inline constexpr std::size_t most_frame_bytes = link_area::command_bytes / 2 + 4096;
static_assert(content_bytes + sizeof(shared_place) <= most_frame_bytes);
static_assert(control_bytes <= most_frame_bytes);

/// The first frame of an agent. Its first three fields are the same in all versions.
struct host_hello {
  static constexpr std::uint64_t right_magic = 0x7472'6f75'7065'1a57;
  static constexpr std::uint32_t right_protocol = 3;

  std::uint64_t magic = right_magic;
  std::uint32_t size_bytes = sizeof(host_hello);
  std::uint32_t protocol = right_protocol;
  std::array<char, 32> version{}; ///< of the library
  std::array<char, 64> name{};    ///< of the host
};

/// Returns a hello with this library's version.
/// @errors errc::invalid_argument: not a name; a name has letters, digits, '.', '_', '-'
caf::expected<host_hello> make_host_hello(const std::string& name);
/// Returns the name in a peer's hello, if the hello is of this version.
/// @errors errc::unavailable: another version, no hello or no name; the text names both versions
caf::expected<std::string> read_host_hello(std::span<const std::byte> from);

/// The settings that a parent gives to an agent.
struct host_welcome {
  std::string backend;
  std::int32_t devices = 0; ///< of the host backend
  std::uint64_t bytes_per_device = 0;
  std::int64_t spin_ns = -1; ///< negative: depends on the number of cores
  std::int64_t silence_limit_ns = 0;
  std::int64_t keep_freed_ms = 0; ///< of the CUDA backend
};
void wire_fields(auto& wire, message_of<host_welcome> auto& x) {
  wire(x.backend, x.devices, x.bytes_per_device, x.spin_ns, x.silence_limit_ns, x.keep_freed_ms);
}

} // namespace troupe::detail
