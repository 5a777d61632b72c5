/// The step in which an operation gets its place in the process-wide order and its predecessors on
/// every buffer it uses.
#pragma once

#include "core/operation.hpp"

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

namespace troupe::detail {

class timekeeper;

/// A request that makes an operation together with others, each for its part.
class alignas(64) joining {
public:
  virtual ~joining() = default;

  // Under the lock of the order.

  /// The operation that it belongs to; not admitted yet if this is its first request. It is right
  /// as `operation::on_check` says.
  /// @errors why it cannot join
  virtual caf::expected<operation*> joint() = 0;
  /// An operation of it alone, for whoever looks whether it is right before it has any effect.
  /// @errors why it is refused
  virtual caf::expected<operation*> alone(queue_bound bound) = 0;
  /// It was refused with `why`, and counts among its caller's all the same, unless `why` is such
  /// that it does not.
  virtual void count_refused(const caf::error& why) = 0;
  /// Brings what placing it needs into the cache of the calling thread.
  virtual void fetch_ahead() const noexcept = 0;
  /// Those that can make one operation together have the same one; null: none can.
  virtual const void* kin() const noexcept = 0;
  /// The operation that `all`, of which this is the first, make, if nobody's is missing then and
  /// none is wrong beside the others, nor as `operation::on_check` says; null if not. They are
  /// still to join it, and until then nothing has happened.
  virtual std::shared_ptr<operation> whole(std::span<joining* const> all) = 0;
  /// As `join`, for each of them.
  virtual void join_whole(std::span<joining* const> all,
                          const std::shared_ptr<operation>& joint) = 0;
  /// What it adds.
  virtual std::span<const use> uses() const = 0;
  /// It has its place: its `joint` has its uses now, and keeps it while it needs it. False:
  /// something is left to do (`placed`).
  virtual bool join(std::shared_ptr<operation> self) = 0;
  /// It never will: it uses what waits for other requests that wait for this one.
  virtual caf::error refuse_cycle() = 0;

  /// After it: it is refused with `why`, or has its place, and perhaps an answer, too.
  virtual void placed(const caf::error& why) = 0;

protected:
  /// While it is in a list.
  std::shared_ptr<operation> take_self() noexcept { return std::move(self_); }

private:
  friend class admission;
  joining* next_ = nullptr; // in the list of what is handed in, or was
  std::shared_ptr<operation> self_;
  caf::error refusal_;
  std::shared_ptr<operation> complete_; // goes to the lanes with it
};

/// Orders operations, and hands their parts to the lanes. What waits for something that no lane
/// does (its world's next communicator) keeps its place in the order of its buffers, but comes to
/// the lanes only then, and so does what comes behind it: a lane that waited would hold up the very
/// work that ends the wait. What fails meanwhile gives its place up, as if it had never had one.
class admission : public std::enable_shared_from_this<admission> {
public:
  explicit admission(timekeeper& keeper) : keeper_(keeper) {}

  /// @errors why it is refused; what it would have written is skipped, unless it fails validation
  caf::error admit(const std::shared_ptr<operation>& op, room_policy room = room_policy::wait);

  /// Hands in one of the requests that make an operation together, without the lock. It has its
  /// place before whatever asks for one later, as far as anybody can tell: who takes the lock next
  /// sees to it (`place_handed_in`). The operation goes to the lanes with the last of its requests.
  void hand_in(const std::shared_ptr<operation>& request, joining& how) noexcept;
  /// Gives what was handed in its place: now, or within a millisecond. Those that make a whole
  /// operation take much less time together than one by one.
  void place_handed_in();
  void place_handed_in_soon() noexcept;
  /// A request that has its place together with others.
  struct entrant {
    std::shared_ptr<operation> self;
    joining* how;
  };
  /// Gives `all`, of one caller, their places in one step; or none of them.
  /// @errors why one of them is refused: the caller sees to what that means for all of them
  caf::error place_together(std::span<const entrant> all, queue_bound bound);
  /// Returns which threads make room in the queue of `full`. Under the lock of the order.
  room_maker who_makes_room(const lane& full) const;

  /// Hands on what waits for nothing any more. Called when that may have changed, as when something
  /// failed that is not on the lanes.
  void go_on() noexcept;
  /// The same for what waits for nothing but operations that were held: some came to the lanes.
  void go_on_behind() noexcept;
  /// The same, on the timekeeper's thread.
  void go_on_soon() noexcept;

private:
  using operations = std::vector<std::shared_ptr<operation>>;

  /// An access in whose place another one is now.
  struct displaced_access {
    buffer* memory; ///< of the other one, too
    access what;
  };

  struct surroundings {
    operations behind; ///< what an operation must follow and is held itself
    // Kept of what may come to be held:
    std::vector<displaced_access> displaced;
    std::vector<std::uint64_t> since; ///< of each of its uses (`access::since`)
  };
  /// Has its place, but is not on the lanes.
  struct held_operation : surroundings {
    std::shared_ptr<operation> op;
    bool follows_younger = false; ///< some of what it is behind has a later place
  };

  /// What is to be done without the lock after something under it (`finish`).
  class aftermath {
  public:
    aftermath() = default;
    aftermath(const aftermath&) = delete;
    aftermath& operator=(const aftermath&) = delete;

    void add_placed(joining& x) noexcept {
      x.next_ = nullptr;
      *end_ = &x;
      end_ = &x.next_;
    }
    joining* placed() const noexcept { return placed_; }

    std::vector<part*> too_late;             ///< their lanes have ended
    std::vector<held_operation> gone;        ///< they have given their places up
    std::vector<predecessor> not_awaited;    ///< theirs: what goes with one may need the lock
    std::vector<operation::casualty> failed; ///< still to be answered

  private:
    joining* placed_ = nullptr; // for which something is left to do: the others may be gone
    joining** end_ = &placed_;
  };

  caf::error admit(const std::shared_ptr<operation>& op, room_choice how, bool& held);
  room_maker who_makes_room(const operation& op, queue_bound bound) const;
  caf::error place(const std::shared_ptr<operation>& op, queue_bound bound, std::int64_t now,
                   bool& held, aftermath& after);
  /// What is checked gets its place. `held`: it is not on the lanes yet.
  void commit(const std::shared_ptr<operation>& op, std::int64_t now, bool& held, aftermath& after);
  /// What comes first whenever something is to be placed: those that failed give their places up,
  /// and those that were handed in get theirs.
  void bring_up_to_date(aftermath& after);
  void place_all(joining* last, aftermath& after);
  /// If `all` make an operation that is right: gives them their places. Else nothing happens.
  bool place_whole(std::span<joining* const> all, aftermath& after);
  caf::error join(joining& one, aftermath& after);
  static caf::error check_alone(const operation& request, joining& how, queue_bound bound);
  void finish(aftermath& after);
  void after_placing(joining* done);
  held_operation* find_held(const operation& op) noexcept;
  bool is_behind(const operation& op, const operation& first);
  bool would_wait_for_itself(const operation& op, std::span<const use> uses);
  /// Orders `uses` of `op`, which are new. `held`: it may come to be.
  static void order_uses(const std::shared_ptr<operation>& op, surroundings& around,
                         std::span<const use> uses, bool held);
  /// Orders `run` behind those of `accesses` that were there `before` it.
  static void order_run(const std::shared_ptr<operation>& op, surroundings& around,
                        std::span<const use> run, access_list& accesses, std::uint64_t before,
                        bool held);
  static bool order_use(const std::shared_ptr<operation>& op, surroundings& around, const use& u,
                        const std::shared_ptr<operation>& by, access_list& accesses, std::size_t i,
                        bool held);
  void note_use(const std::shared_ptr<operation>& op, surroundings& around, const use& u,
                bool held);
  static void submit(operation& op, aftermath& after);
  void give_up_places(aftermath& after);
  void close_ranks();
  void put_back(std::span<const held_operation> gone);
  void note_inversion(held_operation& x) noexcept;
  void release(bool all) noexcept;

  timekeeper& keeper_;
  std::deque<held_operation> held_; // in order
  std::size_t inversions_ = 0;      // how many of them follow younger ones
  std::uint64_t last_access_ = 0;   // `access::since`
  std::uint64_t failed_ = 0;        // `operation::failed_off_lanes` when it looked last
  std::atomic<std::size_t> asked_{0};
  std::atomic<bool> asked_for_all_{false};
  std::atomic<bool> soon_{false};
  std::atomic<joining*> handed_in_{nullptr}; // the last one
  std::atomic<bool> placing_soon_{false};
};

} // namespace troupe::detail
