/// The protocol between the ranks of a communicator and its hub: frames with a fixed header, then
/// the bytes that the header announces. A length is checked before memory is allocated for it. Both
/// sides run the same version of the library on machines of the same kind.
#pragma once

#include "backend/host/host_transport.hpp"
#include "net/socket.hpp"
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

/// Limits on the data that one side accepts from the other.
constexpr int most_ranks = 4096;
constexpr std::uint32_t most_calls = 65'536;                       ///< in one group
constexpr std::uint64_t most_head_bytes = std::uint64_t{16} << 20; ///< that describe the calls
constexpr std::uint64_t most_data_bytes = std::uint64_t{64} << 30; ///< that they send, or receive

/// The content of a communicator's id if its ranks meet at a hub.
struct hub_invitation {
  std::array<char, 8> magic{'t', 'r', 'o', 'u', 'p', 'e', '.', '2'};
  std::array<std::byte, 32> secret{};
  std::uint64_t group = 0; ///< the hub's number for the communicator
  socket_address hub;
  std::uint32_t unused = 0;
};

communicator_id id_of(const hub_invitation& x) noexcept;
/// Returns the invitation in an id; none if the ranks meet in one process.
std::optional<hub_invitation> invitation_of(const communicator_id& x) noexcept;

/// The first message to a hub: a rank asks to join a communicator.
struct wire_hello {
  std::array<char, 8> magic{'t', 'r', 'o', 'u', 'p', 'e', '.', '2'};
  std::array<std::byte, 32> secret{};
  std::uint64_t group = 0;
  std::int32_t size = 0;
  std::int32_t rank = 0;
};

enum class frame_kind : std::uint32_t {
  accepted = 1, ///< to a rank: it is accepted; other ranks are missing
  ready,        ///< to a rank: all ranks are connected
  calls,        ///< from a rank: head: the calls; data: what they send
  done,         ///< to a rank: its calls are done; data: what they received
  leave,        ///< from a rank: its last frame
  end, ///< both ways: the communicator has ended, or the rank is refused; head: why; last frame
};

struct frame_header {
  frame_kind kind{};
  std::uint32_t calls = 0;
  std::uint64_t head_bytes = 0;
  std::uint64_t data_bytes = 0;
};

/// Returns the bytes of a value that is sent as it lies in memory.
template <class T> std::span<const std::byte> bytes_of(const T& x) noexcept {
  static_assert(std::has_unique_object_representations_v<T>);
  return std::as_bytes(std::span{&x, 1});
}

template <class T> std::span<std::byte> writable_bytes_of(T& x) noexcept {
  static_assert(std::has_unique_object_representations_v<T>);
  return std::as_writable_bytes(std::span{&x, 1});
}

/// The reason why a communicator has ended; long texts are cut.
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
/// Returns the error; none if it is not valid.
std::optional<caf::error> error_of(const wire_error& x);

/// A frame with the reason why a communicator has ended.
struct end_frame {
  frame_header header{.kind = frame_kind::end, .head_bytes = sizeof(wire_error)};
  wire_error why;
};

/// Add the memory that a rank's call reads, or writes, in the order in which its content is sent.
void add_sent(const host_call& x, int rank, int ranks, const_blocks& to);
void add_received(const host_call& x, int rank, int ranks, mutable_blocks& to);

template <class T> std::uint64_t size_bytes_of(const std::vector<std::span<T>>& blocks) noexcept {
  std::uint64_t result = 0;
  for (const auto& x : blocks)
    result += x.size();
  return result;
}

/// @errors errc::not_supported: more than the other side accepts
caf::error check_bounds(std::span<const host_call> calls, int rank, int ranks);

/// Returns the head of a frame of calls.
std::vector<std::byte> encode(std::span<const host_call> calls);

/// Calls of a rank in another process, with memory for the data that they send and receive.
class remote_calls {
public:
  /// @errors errc::nccl_error: the calls are not valid, or there is no memory for them
  static caf::expected<remote_calls> decode(const frame_header& header,
                                            std::span<const std::byte> head, int rank, int ranks);

  std::span<const host_call> calls() const noexcept { return calls_; }
  /// Returns the memory that the calls send, for the caller to fill.
  mutable_blocks sent() const;
  /// Returns the memory that the calls have received.
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
