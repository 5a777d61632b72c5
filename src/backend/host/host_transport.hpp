/// How a rank of the host backend meets the other ranks of its communicator.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace troupe::detail {

/// Where memory lies in a rank's windows; equal on two ranks if it is the same window and place.
struct host_place {
  std::uint64_t window = 0; ///< windows are numbered as they come; 0: in none
  std::size_t offset = 0;

  friend bool operator==(const host_place&, const host_place&) = default;
};

/// A rank's call, with copies of what it points to, but device memory.
struct host_call {
  /// @shape `x` is valid
  explicit host_call(const collective_call& x);

  collective_kind what;
  dtype type;
  reduce_op op;
  int peer;
  const void* send;
  void* recv;
  std::size_t count;
  std::array<std::byte, 8> factor{}; ///< of premul_sum
  exchange_plan plan;                ///< of all_to_all_v
  bool symmetric;
  host_place send_place; ///< of a symmetric call
  host_place recv_place;

  /// @units bytes; of `count` elements
  std::size_t size_bytes() const noexcept { return count * size_of(type); }
};

/// The ranks of a communicator as one of them, or all in this process, see them: `host_group` where
/// all are in this process, `host_connection` where they may be in others. Every rank that is named
/// is in this process.
/// @thread any
class host_transport {
public:
  virtual ~host_transport() = default;

  virtual int size() const noexcept = 0;

  /// Makes memory of a rank a window; blocks until all ranks have made theirs.
  /// @errors the communicator has ended, or ends because the ranks' windows are not of one size
  [[nodiscard]] virtual caf::error register_window(int rank, const void* memory,
                                                   std::size_t size_bytes) noexcept = 0;
  /// @errors errc::invalid_argument: it is none
  [[nodiscard]] virtual caf::error deregister_window(int rank, const void* memory) noexcept = 0;
  /// The place of `size_bytes` bytes; none if they are not in one window.
  virtual host_place place_of(int rank, const void* memory,
                              std::size_t size_bytes) const noexcept = 0;
  /// Has a rank begun a symmetric call that is not over? Nothing but its peers could end it.
  virtual bool has_symmetric() const noexcept = 0;

  /// Announces calls that a stream will come to.
  /// @errors errc::nccl_error or errc::collective_mismatch: the communicator has ended;
  ///         errc::not_supported: more than can be made together. Nothing is announced
  [[nodiscard]] virtual caf::error announce(int rank,
                                            std::span<const host_call> calls) noexcept = 0;

  /// Takes back what was announced.
  virtual void retract() noexcept = 0;

  /// Makes the rank's calls that were announced together, after those of all lower `sequence`:
  /// offers its messages, takes part in the collectives in their order, and waits until the
  /// messages are through. When the communicator ends, it returns with the content of what the
  /// calls write undefined, as soon as nobody reads or writes the rank's memory.
  /// @thread the stream of the rank
  virtual void run(int rank, std::uint64_t sequence, std::span<const host_call> calls) noexcept = 0;

  /// Why the communicator has ended; none while it lives.
  [[nodiscard]] virtual caf::error error() const noexcept = 0;

  /// Ends the communicator: whoever waits for a rank gives up. The first reason stays.
  virtual void end(caf::error why) noexcept = 0;

  /// Blocks until no rank is inside `run`, and lets go of what the transport holds; after `end`.
  virtual void wait_quiet() noexcept = 0;

  /// Blocks until everything announced is done.
  virtual void wait_idle() noexcept = 0;

  /// The rank makes no call any more; after `wait_idle`. The communicator ends when another rank
  /// needs it.
  virtual void leave(int rank) noexcept = 0;
};

/// A rank is no more there that another one needs, or might.
caf::error rank_left(int rank);

} // namespace troupe::detail
