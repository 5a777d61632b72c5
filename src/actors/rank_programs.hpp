/// The side of a world whose ranks are driven where their devices live, by a program's actors.
#pragma once

#include "actors/program_note.hpp"
#include "core/world_core.hpp"
#include <troupe/nccl_world.hpp>

#include <caf/actor_addr.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace troupe::detail {

class rank_programs;

/// The worlds of an actor system that have programs; hands on what comes from the processes.
class program_board {
public:
  /// Before `told`. The result is the world's number.
  std::uint64_t add(std::weak_ptr<rank_programs> who);
  void remove(std::uint64_t number) noexcept;
  /// Reads what the process of a device says, and hands it on.
  /// @errors errc::internal: it makes no sense
  caf::error told(int device, std::span<const std::byte> bytes) const;

private:
  mutable std::mutex mutex_;
  std::uint64_t last_ = 0;
  std::map<std::uint64_t, std::weak_ptr<rank_programs>> all_;
};

/// Of one world. @thread any
class rank_programs : public std::enable_shared_from_this<rank_programs> {
public:
  static std::shared_ptr<rank_programs> make(std::shared_ptr<program_board> board,
                                             const std::shared_ptr<world_core>& core,
                                             world_program what);
  ~rank_programs();

  /// Who hears what the programs report. Before the first communicator.
  void set_world(const caf::actor& world);
  /// A communicator is the live one: its ranks' processes have it from now on.
  void on_live(communicator& x, const world_status& view);
  /// It ended.
  void on_end(std::uint64_t epoch, const caf::error& why);
  /// @errors errc::invalid_argument: no such rank; errc::overloaded: too many wait for its program;
  ///         errc::unavailable
  caf::error send(const program_message& x);
  /// The world has ended. While its actor system is there.
  void stop();
  /// By the process of `device`.
  /// @errors errc::internal: it makes no sense
  caf::error told(int device, program_note note);

private:
  rank_programs(std::shared_ptr<program_board> board, const std::shared_ptr<world_core>& core,
                world_program what)
      : board_(std::move(board)), core_(core), program_(std::move(what)) {}
  caf::error tell(std::size_t rank, const program_note& note);
  void pass_on(const world_core& core, std::size_t rank);
  caf::error ended_in(const world_core& core, const std::vector<std::size_t>& ranks);
  void on_program_end(const world_core& core, std::size_t rank, const caf::error& why);
  void on_ready(const std::shared_ptr<world_core>& core, std::size_t rank,
                std::uint64_t generation);

  /// Messages for a rank's program. One at a time is on its way, so that a program that takes long
  /// to begin, or a network that is slow, holds up nothing else of the process.
  struct outbox {
    std::deque<std::vector<std::byte>> notes;
    std::uint64_t ready_in = 0; ///< the generation of the device whose process takes one
    bool passes_on = false;     ///< somebody does
  };

  struct program_end {
    std::uint64_t generation = 0; ///< of the device whose process it was in
    caf::error why;
  };

  const std::shared_ptr<program_board> board_;
  const std::weak_ptr<world_core> core_; // which calls this
  const world_program program_;
  std::uint64_t number_ = 0;
  std::mutex mutex_;
  caf::actor_addr world_;
  std::map<std::size_t, outbox> outboxes_; // by rank
  std::map<std::size_t, program_end> ended_;
};

/// Has `board` hear what the processes of the devices say of programs; one that makes no sense is
/// given up.
void listen(runtime& from, std::shared_ptr<program_board> board);

} // namespace troupe::detail
