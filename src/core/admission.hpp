/// The step in which an operation gets its place in the process-wide order and its predecessors on
/// every buffer it uses.
#pragma once

#include "core/operation.hpp"

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

namespace troupe::detail {

class timekeeper;

/// A request that makes an operation together with others, each for its part.
class joining {
public:
  virtual ~joining() = default;

  // Under the lock of the order.

  /// The operation that it belongs to; not admitted yet if this is its first request.
  /// @errors why it cannot join
  virtual caf::expected<std::shared_ptr<operation>> joint() = 0;
  /// Brings what placing it needs into the cache of the calling thread.
  virtual void fetch_ahead() const noexcept = 0;
  /// What it adds.
  virtual std::span<const use> uses() const = 0;
  /// It has its place: `joint` has its uses now.
  virtual void join(operation& joint) = 0;
  /// It never will: it uses what waits for other requests that wait for this one.
  virtual caf::error refuse_cycle() = 0;

  /// After it: it has its place, or is refused with `why`.
  virtual void placed(const caf::error& why) = 0;

private:
  friend class admission;
  joining* next_ = nullptr;         // in the list of what is handed in, or was
  std::shared_ptr<operation> self_; // while it is in a list
  caf::error refusal_;
  std::shared_ptr<operation> complete_; // went to the lanes with it
};

/// Orders operations, and hands their parts to the lanes. What waits for something that no lane
/// does (its world's next communicator) keeps its place in the order of its buffers, but comes to
/// the lanes only then, and so does what comes behind it: a lane that waited would hold up the very
/// work that ends the wait.
class admission : public std::enable_shared_from_this<admission> {
public:
  explicit admission(timekeeper& keeper) : keeper_(keeper) {}

  /// @errors why it is refused; it leaves no trace
  caf::error admit(const std::shared_ptr<operation>& op);

  /// Hands in one of the requests that make an operation together, without the lock. It has its
  /// place before whatever asks for one later, as far as anybody can tell: who takes the lock next
  /// sees to it (`place_handed_in`). The operation goes to the lanes with the last of its requests,
  /// or
  /// (`go_on_soon`) when it has failed.
  void hand_in(const std::shared_ptr<operation>& request, joining& how) noexcept;
  /// Gives what was handed in its place: now, or within a millisecond.
  void place_handed_in();
  void place_handed_in_soon() noexcept;
  /// Now if nobody has the lock, else soon.
  void place_handed_in_if_free();

  /// Hands on what waits for nothing any more. Called when that may have changed.
  void go_on() noexcept;
  /// The same for what waits for nothing but operations that were held: some came to the lanes.
  void go_on_behind() noexcept;
  /// The same, on the timekeeper's thread.
  void go_on_soon() noexcept;

private:
  using operations = std::vector<std::shared_ptr<operation>>;

  /// Has its place, but is not on the lanes.
  struct held_operation {
    std::shared_ptr<operation> op;
    operations behind;            ///< what it must follow and is held itself
    bool follows_younger = false; ///< some of that has a later place
  };

  caf::error place(const std::shared_ptr<operation>& op, std::int64_t now, bool& held,
                   std::vector<part*>& too_late);
  /// Those for which `after_placing` has something left to do, without the lock.
  joining* place_all_handed_in(std::vector<part*>& too_late);
  caf::error join(joining& x, std::vector<part*>& too_late);
  void after_placing(joining* done);
  held_operation* find_held(const operation& op) noexcept;
  bool is_behind(const operation& op, const operation& first);
  bool would_wait_for_itself(const operation& op, std::span<const use> uses);
  static void order_use(const std::shared_ptr<operation>& op, const use& u, operations& behind);
  /// Parts whose lane has ended come `too_late`.
  static void submit(operation& op, std::vector<part*>& too_late);
  void note_inversion(held_operation& x) noexcept;
  void release(bool all) noexcept;

  timekeeper& keeper_;
  std::deque<held_operation> held_; // in order
  std::size_t inversions_ = 0;      // how many of them follow younger ones
  std::atomic<std::size_t> asked_{0};
  std::atomic<bool> asked_for_all_{false};
  std::atomic<bool> soon_{false};
  std::atomic<joining*> handed_in_{nullptr}; // the last one
  std::atomic<bool> placing_soon_{false};
};

} // namespace troupe::detail
