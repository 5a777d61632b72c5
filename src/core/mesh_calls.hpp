/// What the ranks of a mesh have in common: which of their calls belong together.
#pragma once

#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace troupe::detail {

/// One rank's call as a whole; `count` as at `collective_call`.
struct mesh_spec {
  collective_kind what = collective_kind::barrier;
  dtype type = dtype::uint8;
  std::size_t count = 0;
  reduce_op op = reduce_op::sum;
  int peer = -1; ///< root, or the other side of a message

  bool is_message() const noexcept {
    return what == collective_kind::send || what == collective_kind::recv;
  }
};

/// A call of all ranks, or of the two that exchange a message. It fails for all of them.
/// @thread any
class joint_call {
public:
  explicit joint_call(const mesh_spec& first, int rank) : first_(first), rank_(rank) {}

  /// The first rank's: what the others' must agree with, and what its chunks follow.
  const mesh_spec& spec() const noexcept { return first_; }
  /// What `other`, of rank `rank`, differs in; empty if it belongs here.
  std::string difference(const mesh_spec& other, int rank) const;

  caf::error error() const;
  /// The first cause stays.
  void fail(const caf::error& why);
  /// Calls `act` when it fails, or at once if it has.
  void on_failure(std::function<void()> act);

  /// Nobody makes a chunk of it.
  bool is_void() const;
  void make_void(const caf::error& why);

private:
  const mesh_spec first_;
  const int rank_;
  mutable std::mutex mutex_;
  caf::error error_;
  bool void_ = false;
  std::vector<std::function<void()>> listeners_;
};

/// The k-th collective calls of all ranks belong together, and the k-th send from one rank to
/// another and the k-th recv there.
/// @thread any
class mesh_calls {
public:
  explicit mesh_calls(std::size_t ranks) : ranks_(ranks), closed_(ranks, false) {}

  std::size_t ranks() const noexcept { return ranks_; }

  /// The next call of `rank`; one that cannot be done has failed.
  std::shared_ptr<joint_call> take(const mesh_spec& what, int rank);
  /// `rank` makes no calls any more: what waits for one fails, and so does what will.
  void close(int rank);
  /// The ranks' chunks are out of step: every call from now on fails.
  void lose_step(const caf::error& why);

private:
  struct line {
    std::vector<int> callers;
    std::vector<std::uint64_t> next; ///< of each caller
    std::uint64_t first = 0;         ///< the number of open[0]
    std::deque<std::shared_ptr<joint_call>> open;
  };

  line& line_of(const mesh_spec& what, int rank);
  std::optional<int> missing(const line& in, std::uint64_t number) const;

  const std::size_t ranks_;
  std::mutex mutex_;
  std::map<std::pair<int, int>, line> lines_; // from, to; of collectives: -1, -1
  std::vector<bool> closed_;
  caf::error lost_;
};

} // namespace troupe::detail
