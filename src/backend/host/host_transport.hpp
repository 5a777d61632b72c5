/// The connection of a rank of the host backend to the other ranks of its communicator.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>

namespace troupe::detail {

/// A rank's call, with copies of all that it points to, except device memory.
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

  /// @units bytes; of `count` elements
  std::size_t size_bytes() const noexcept { return count * size_of(type); }
};

/// The ranks of a communicator, as seen by one of them, or by all ranks of this process.
/// `host_group` has all ranks in this process; with `host_connection` they may be in other
/// processes. A rank that is passed to a function is in this process.
/// @thread any
class host_transport {
public:
  virtual ~host_transport() = default;

  virtual int size() const noexcept = 0;

  /// Announces calls that a stream will run.
  /// @errors errc::nccl_error or errc::collective_mismatch: the communicator has ended;
  ///         errc::not_supported: more than one group can hold. Nothing is announced
  [[nodiscard]] virtual caf::error announce(int rank,
                                            std::span<const host_call> calls) noexcept = 0;

  /// Takes back one announcement.
  void retract() noexcept;

  /// Makes the rank's calls that were announced together, after the calls of all lower `sequence`.
  /// Offers its messages, takes part in the collectives in order, and waits until the messages are
  /// done. If the communicator ends, the memory that the calls write is undefined. `run` then
  /// returns as soon as no thread accesses the rank's memory.
  /// @thread the stream of the rank
  virtual void run(int rank, std::uint64_t sequence, std::span<const host_call> calls) noexcept = 0;

  /// Returns why the communicator has ended; none while it lives.
  [[nodiscard]] caf::error error() const noexcept;

  /// Ends the communicator: waiting ranks return. The first reason stays.
  virtual void end(caf::error why) noexcept = 0;

  /// Blocks until no rank is inside `run`, then releases the transport's resources; after `end`.
  virtual void wait_quiet() noexcept = 0;

  /// Blocks until all announced calls are done.
  void wait_idle() noexcept;

  /// Notes that the rank makes no more calls; after `wait_idle`. The communicator ends when another
  /// rank needs it.
  virtual void leave(int rank) noexcept = 0;

protected:
  using lock = std::unique_lock<std::mutex>;

  void end_locked(caf::error why) noexcept;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int inside_ = 0;
  std::uint64_t announced_ = 0; ///< not yet done
  std::atomic<bool> ended_{false};
  caf::error why_;
};

/// Returns the error for a rank that has left and that another rank needs, or might need.
caf::error rank_left(int rank);

} // namespace troupe::detail
