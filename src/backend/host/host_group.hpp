/// Where the ranks of a communicator of the host backend meet.
#pragma once

#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace troupe::detail {

/// What one rank brings to an all-reduce.
struct all_reduce_part {
  const void* send;
  void* recv;
  std::size_t count;
  dtype type;
  reduce_op op;
};

/// The ranks of one communicator, all in this process: the transport between them.
/// @thread any
class host_group {
public:
  explicit host_group(int size);

  int size() const noexcept { return static_cast<int>(parts_.size()); }

  /// Announces an all-reduce that a stream will come to.
  /// @errors errc::nccl_error or errc::collective_mismatch: the group has ended; nothing announced
  [[nodiscard]] caf::error announce() noexcept;

  /// Takes back what was announced.
  void retract() noexcept;

  /// Waits for all ranks' calls of the same `sequence` and gives each the result. When the group
  /// ends, it returns with the content of `part.recv` undefined, as soon as no rank reads or writes
  /// another's memory.
  /// @thread the stream of the rank
  void all_reduce(int rank, std::uint64_t sequence, const all_reduce_part& part) noexcept;

  /// Why the group has ended; none while it lives.
  [[nodiscard]] caf::error error() const noexcept;

  /// Ends the group: whoever waits for a rank gives up. The first reason stays.
  void end(caf::error why) noexcept;

  /// Blocks until no rank is inside `all_reduce`; after `end`.
  void wait_quiet() noexcept;

  /// Blocks until everything announced is done.
  void wait_idle() noexcept;

private:
  using lock = std::unique_lock<std::mutex>;

  /// Elements `begin` to `end` - 1.
  struct range {
    std::size_t begin;
    std::size_t end;
  };

  void take_part(lock& guard, int rank, std::uint64_t sequence,
                 const all_reduce_part& part) noexcept;
  /// Waits for all ranks; the last one calls `last` before any goes on. False: the group has ended.
  template <class F> bool meet(lock& guard, F last) noexcept;
  /// Calls `f` without the lock. False: the group has ended.
  template <class F> bool work(lock& guard, F f) noexcept;
  void end_locked(caf::error why) noexcept;
  caf::error compare_parts() const;
  range slice_of(int rank) const noexcept;
  void reduce_elements(range elements, std::span<const all_reduce_part> targets) const;
  void gather(int rank) const noexcept;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<all_reduce_part> parts_; ///< of the current round, by rank
  std::uint64_t round_ = 0;            ///< sequence number of the current round
  std::uint64_t phase_ = 0;            ///< counts the meetings of all ranks
  int arrived_ = 0;                    ///< ranks that wait in the current meeting
  int working_ = 0;                    ///< ranks that touch memory of others
  int inside_ = 0;
  std::uint64_t announced_ = 0; ///< and not yet done
  std::atomic<bool> ended_{false};
  caf::error why_;
};

} // namespace troupe::detail
