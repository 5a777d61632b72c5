/// What the ranks of a communicator and its hub send each other: frames of a fixed header, and
/// behind it what the header announces. Nothing is allocated for a length before it is checked.
/// Both sides are of one version of the library on machines of one kind.
#pragma once

#include "host_transport.hpp"
#include "socket.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <caf/error.hpp>
#include <caf/expected.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

namespace troupe::detail {

using const_blocks = std::vector<std::span<const std::byte>>;
using mutable_blocks = std::vector<std::span<std::byte>>;

/// The bounds of what one side takes from the other.
constexpr int most_ranks = 4096;
constexpr std::uint32_t most_calls = 65'536;                       ///< of one group
constexpr std::uint64_t most_head_bytes = std::uint64_t{16} << 20; ///< that describe them
constexpr std::uint64_t most_data_bytes = std::uint64_t{64} << 30; ///< that they send, or receive

/// What a communicator's id says where its ranks meet at a hub.
struct hub_invitation {
  std::array<char, 8> magic{'t', 'r', 'o', 'u', 'p', 'e', '.', '1'};
  std::array<std::byte, 32> secret{};
  std::uint64_t group = 0; ///< the hub's number of the communicator
  socket_address hub;
  std::uint32_t unused = 0;
};

communicator_id id_of(const hub_invitation& x) noexcept;
/// None: the ranks meet in one process.
std::optional<hub_invitation> invitation_of(const communicator_id& x) noexcept;

/// The first that goes to a hub: a rank that wants to be one of a communicator.
struct wire_hello {
  std::array<char, 8> magic{'t', 'r', 'o', 'u', 'p', 'e', '.', '1'};
  std::array<std::byte, 32> secret{};
  std::uint64_t group = 0;
  std::int32_t size = 0;
  std::int32_t rank = 0;
};

enum class frame_kind : std::uint32_t {
  accepted = 1, ///< to a rank: it is one of the communicator; others are missing
  ready,        ///< to a rank: all are there
  calls,        ///< of a rank: head: the calls; data: what they send
  done,         ///< to a rank: its calls are done; data: what they received
  window,       ///< of a rank: `number` is the size in bytes
  window_ready, ///< to a rank: all ranks have theirs
  window_gone,  ///< of a rank: `number` is the number of the window
  leave,        ///< of a rank: the last that it sends
  end,          ///< of a rank, to a rank: the communicator has ended, or the rank is refused; head:
                ///< why; the last that is sent
};

struct frame_header {
  frame_kind kind{};
  std::uint32_t calls = 0;
  std::uint64_t number = 0;
  std::uint64_t head_bytes = 0;
  std::uint64_t data_bytes = 0;
};

/// The bytes of a value that goes over a connection as it lies in memory.
template <class T> std::span<const std::byte> bytes_of(const T& x) noexcept {
  static_assert(std::has_unique_object_representations_v<T>);
  return std::as_bytes(std::span{&x, 1});
}

template <class T> std::span<std::byte> writable_bytes_of(T& x) noexcept {
  static_assert(std::has_unique_object_representations_v<T>);
  return std::as_writable_bytes(std::span{&x, 1});
}

/// Why something ended; long texts are cut.
struct wire_error {
  std::uint32_t code = 0;
  std::int32_t rank = -1;
  std::int32_t device = -1;
  std::uint32_t verb_bytes = 0;
  std::uint32_t detail_bytes = 0;
  std::array<char, 32> verb{};
  std::array<char, 460> detail{};
};

wire_error wire_of(const caf::error& x);
/// None: no error that could be.
std::optional<caf::error> error_of(const wire_error& x);

/// A frame that says why something ended.
struct end_frame {
  frame_header header{.kind = frame_kind::end, .head_bytes = sizeof(wire_error)};
  wire_error why;
};

/// The memory that the call of a rank reads, and that it writes, in the order in which its content
/// goes over a connection.
void add_sent(const host_call& x, int rank, int ranks, const_blocks& to);
void add_received(const host_call& x, int rank, int ranks, mutable_blocks& to);

template <class T> std::uint64_t size_bytes_of(const std::vector<std::span<T>>& blocks) noexcept {
  std::uint64_t result = 0;
  for (const auto& x : blocks)
    result += x.size();
  return result;
}

/// @errors errc::not_supported: more than one side takes from the other
caf::error check_bounds(std::span<const host_call> calls, int rank, int ranks);

/// The head of a frame of calls.
std::vector<std::byte> encode(std::span<const host_call> calls, int rank);

/// Calls of a rank of another process, with memory for what they send and receive.
class remote_calls {
public:
  /// @errors errc::nccl_error: nothing that a rank would send, or no memory for it
  static caf::expected<remote_calls> decode(const frame_header& header,
                                            std::span<const std::byte> head, int rank, int ranks);

  std::span<const host_call> calls() const noexcept { return calls_; }
  /// What the calls send: to be filled.
  mutable_blocks sent() const;
  /// What the calls have received.
  const_blocks received() const;

private:
  struct free_memory {
    void operator()(std::byte* x) const noexcept { std::free(x); }
  };

  int rank_ = 0;
  int ranks_ = 0;
  std::vector<host_call> calls_;
  std::unique_ptr<std::byte, free_memory> memory_;
};

} // namespace troupe::detail
