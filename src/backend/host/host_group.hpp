/// The meeting point of a communicator's ranks in the host backend.
#pragma once

#include "backend/host/host_transport.hpp"
#include <troupe/error.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace troupe::detail {

/// The ranks of one communicator, all in this process. A hub has one for ranks of any process.
/// @thread any
class host_group final : public host_transport {
public:
  explicit host_group(int size);

  int size() const noexcept override { return static_cast<int>(parts_.size()); }

  caf::error announce(int rank, std::span<const host_call> calls) noexcept override;
  void run(int rank, std::uint64_t sequence, std::span<const host_call> calls) noexcept override;
  void end(caf::error why) noexcept override;
  void wait_quiet() noexcept override;
  void leave(int rank) noexcept override;

private:
  /// Elements `begin` to `end` - 1.
  struct range {
    std::size_t begin;
    std::size_t end;
  };

  /// A send or recv that waits for its peer.
  struct message {
    const host_call* call;
    int rank;
    std::size_t* open; ///< counts the messages of its rank that are not done
  };

  // Return false if the group has ended.
  bool wait_for_turn(lock& guard, int rank, std::uint64_t sequence) noexcept;
  bool take_turn(lock& guard, int rank, std::span<const host_call> calls) noexcept;
  void end_turn(int rank) noexcept;
  bool offer(lock& guard, const message& mine) noexcept;
  bool take_part(lock& guard, int rank, const host_call& call) noexcept;
  /// Waits for all ranks. The last one calls `last` before any rank continues.
  template <class F> bool meet(lock& guard, F last) noexcept;
  /// Calls `f` without the lock.
  template <class F> bool work(lock& guard, F f) noexcept;

  caf::error compare_parts() const;
  caf::error compare_plans() const;
  bool is_small() const noexcept;
  void do_all() const;
  void do_share(int rank) const;
  void reduce_elements(std::size_t from, std::size_t count, std::span<void* const> outputs) const;
  void reduce_slice(int rank, void* output) const;
  range slice_of(int rank) const noexcept;
  void gather_slices(int rank) const noexcept;

  std::vector<std::uint64_t> turns_;    ///< by rank: sequence number of the next calls
  std::vector<const host_call*> parts_; ///< of the current collective, by rank
  std::map<std::pair<int, int>, std::deque<message>> messages_; ///< by sender and receiver
  std::uint64_t phase_ = 0; ///< counts the meetings of all ranks
  int arrived_ = 0;         ///< ranks that wait in the current meeting
  bool done_by_one_ = false;
  int out_of_turn_ = 0;    ///< streams that wait for their rank's turn
  int working_ = 0;        ///< ranks that access memory of others
  std::vector<bool> left_; ///< by rank
  int first_left_ = -1;    ///< a rank that has left
};

} // namespace troupe::detail
