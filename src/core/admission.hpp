/// The step in which an operation gets its place in the process-wide order and its predecessors on
/// every buffer it uses.
#pragma once

#include "core/operation.hpp"

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

namespace troupe::detail {

class timekeeper;

/// Orders operations, and hands their parts to the lanes. What waits for something that no lane
/// does (its world's next communicator) keeps its place in the order of its buffers, but comes to
/// the lanes only then, and so does what comes behind it: a lane that waited would hold up the very
/// work that ends the wait.
class admission : public std::enable_shared_from_this<admission> {
public:
  explicit admission(timekeeper& keeper) : keeper_(keeper) {}

  /// @errors why it is refused; it leaves no trace
  caf::error admit(const std::shared_ptr<operation>& op);

  /// Hands on what waits for nothing any more. Called when that may have changed.
  void go_on() noexcept;

private:
  using operations = std::vector<std::shared_ptr<operation>>;

  /// Has its place, but is not on the lanes.
  struct held_operation {
    std::shared_ptr<operation> op;
    operations behind; ///< what it must follow and is held itself
  };

  static void order_use(const std::shared_ptr<operation>& op, const use& u, operations& behind);
  /// Parts whose lane has ended come `too_late`.
  static void submit(operation& op, std::vector<part*>& too_late);
  void release() noexcept;
  void go_on_soon() noexcept;

  timekeeper& keeper_;
  std::vector<held_operation> held_; // in order
  std::atomic<std::size_t> asked_{0};
  std::atomic<bool> soon_{false};
};

} // namespace troupe::detail
