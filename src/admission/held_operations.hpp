/// The held operations: they have a position, but are not on the lanes.
#pragma once

#include "admission/access_order.hpp"
#include "operation/operation.hpp"

#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <utility>

namespace troupe::detail {

/// An operation that has a position but is not on the lanes.
struct held_operation : dependencies {
  std::shared_ptr<operation> op;
  bool follows_younger = false; ///< an operation in `behind` has a later position
};

/// The held operations of an `admission`, by position.
class held_operations {
public:
  bool empty() const noexcept { return all_.empty(); }
  std::size_t size() const noexcept { return all_.size(); }
  auto begin() noexcept { return all_.begin(); }
  auto end() noexcept { return all_.end(); }
  auto begin() const noexcept { return all_.begin(); }
  auto end() const noexcept { return all_.end(); }

  /// Adds `x`, whose position is the last.
  void add(held_operation x) { all_.push_back(std::move(x)); }
  /// Returns the entry of `op`; null if it is not held.
  held_operation* find(const operation& op) noexcept;
  void erase(const held_operation& x);
  /// Removes the operations for which `f` returns true, perhaps after it has moved them out.
  /// Returns whether there were any.
  template <class F> bool erase_if(F f) {
    return std::erase_if(all_, [&](held_operation& x) {
             if (!f(x))
               return false;
             inversions_ -= x.follows_younger;
             return true;
           }) != 0;
  }

  /// Notes whether `x`, whose `behind` has changed, follows an operation with a later position.
  void note_inversion(held_operation& x) noexcept;
  /// Returns whether `op` would wait for itself if it had `uses` too.
  bool would_wait_for_itself(locked, const operation& op, std::span<const use> uses);
  /// Removes withdrawn operations as predecessors. (A held predecessor is also in `behind`.)
  void forget_withdrawn_predecessors(locked);
  /// Restores the accesses that `gone` had superseded, and orders all later uses behind them.
  void restore_superseded(locked lock, std::span<const held_operation> gone);

private:
  bool is_behind(const operation& op, const operation& first);

  std::deque<held_operation> all_;
  std::size_t inversions_ = 0; // operations with `follows_younger`
};

} // namespace troupe::detail
