/// Where the ranks of a communicator of the host backend meet.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace troupe::detail {

constexpr bool reduces(collective_kind x) noexcept {
  return x == collective_kind::all_reduce || x == collective_kind::reduce ||
         x == collective_kind::reduce_scatter;
}

constexpr bool has_root(collective_kind x) noexcept {
  return x == collective_kind::reduce || x == collective_kind::broadcast ||
         x == collective_kind::gather || x == collective_kind::scatter;
}

constexpr bool is_message(collective_kind x) noexcept {
  return x == collective_kind::send || x == collective_kind::recv;
}

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

/// The ranks of one communicator, all in this process: the transport between them.
/// @thread any
class host_group {
public:
  explicit host_group(int size);

  int size() const noexcept { return static_cast<int>(parts_.size()); }

  /// Makes memory of a rank a window; blocks until all ranks have made theirs.
  /// @errors the group has ended, or ends because the ranks' windows are not of one size
  [[nodiscard]] caf::error register_window(int rank, const void* memory,
                                           std::size_t size_bytes) noexcept;
  /// @errors errc::invalid_argument: it is none
  [[nodiscard]] caf::error deregister_window(int rank, const void* memory) noexcept;
  /// The place of `size_bytes` bytes; none if they are not in one window.
  host_place place_of(int rank, const void* memory, std::size_t size_bytes) const noexcept;
  /// Has a rank begun a symmetric call that is not over? Nothing but its peers could end it.
  bool has_symmetric() const noexcept;

  /// Announces calls that a stream will come to.
  /// @errors errc::nccl_error or errc::collective_mismatch: the group has ended; nothing announced
  [[nodiscard]] caf::error announce() noexcept;

  /// Takes back what was announced.
  void retract() noexcept;

  /// Makes the rank's calls that were announced together, after those of all lower `sequence`:
  /// offers its messages, takes part in the collectives in their order, and waits until the
  /// messages are through. When the group ends, it returns with the content of what the calls
  /// write undefined, as soon as no rank reads or writes another's memory.
  /// @thread the stream of the rank
  void run(int rank, std::uint64_t sequence, std::span<const host_call> calls) noexcept;

  /// Why the group has ended; none while it lives.
  [[nodiscard]] caf::error error() const noexcept;

  /// Ends the group: whoever waits for a rank gives up. The first reason stays.
  void end(caf::error why) noexcept;

  /// Blocks until no rank is inside `run`; after `end`.
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

  /// A send or recv that waits for the other side.
  struct message {
    const host_call* call;
    int rank;
    std::size_t* open; ///< counts the messages of its rank that are not through
  };

  // False: the group has ended.
  bool wait_for_turn(lock& guard, int rank, std::uint64_t sequence) noexcept;
  bool take_turn(lock& guard, int rank, std::span<const host_call> calls) noexcept;
  void end_turn(int rank) noexcept;
  bool offer(lock& guard, const message& mine) noexcept;
  bool take_part(lock& guard, int rank, const host_call& call) noexcept;
  /// Waits for all ranks; the last one calls `last` before any goes on.
  template <class F> bool meet(lock& guard, F last) noexcept;
  /// Calls `f` without the lock.
  template <class F> bool work(lock& guard, F f) noexcept;

  struct window {
    std::uint64_t number;
    const std::byte* memory;
    std::size_t size_bytes;
  };

  void end_locked(caf::error why) noexcept;
  caf::error compare_parts() const;
  caf::error compare_plans() const;
  static const char* symmetric_fault(const host_call& first, const host_call& mine, int rank);
  bool is_small() const noexcept;
  void do_all() const;
  void do_share(int rank) const;
  void reduce_elements(std::size_t from, std::size_t count, std::span<void* const> outputs) const;
  void reduce_slice(int rank, void* output) const;
  range slice_of(int rank) const noexcept;
  void gather_slices(int rank) const noexcept;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::uint64_t> turns_;    ///< by rank: sequence number of the calls that are next
  std::vector<const host_call*> parts_; ///< of the current collective, by rank
  std::map<std::pair<int, int>, std::deque<message>> messages_; ///< by sender and receiver
  std::vector<std::vector<window>> windows_;                    ///< by rank
  std::vector<window> new_windows_; ///< by rank: what is being registered
  int new_windows_there_ = 0;
  std::uint64_t last_window_ = 0;
  int symmetric_ = 0;       ///< symmetric calls inside `run`
  std::uint64_t phase_ = 0; ///< counts the meetings of all ranks
  int arrived_ = 0;         ///< ranks that wait in the current meeting
  bool done_by_one_ = false;
  int out_of_turn_ = 0; ///< streams that wait for their rank's turn
  int working_ = 0;     ///< ranks that touch memory of others
  int inside_ = 0;
  std::uint64_t announced_ = 0; ///< and not yet done
  std::atomic<bool> ended_{false};
  caf::error why_;
};

} // namespace troupe::detail
