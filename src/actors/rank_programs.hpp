/// The parent's side of a world whose ranks are driven in their workers, by a program's actors.
#pragma once

#include "actors/named_memory.hpp"
#include "actors/program_note.hpp"
#include "world/world_core.hpp"
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

/// The worlds of an actor system that have programs. Passes on what their processes send.
class program_board {
public:
  /// Adds a world and returns its number. Called before `told`.
  std::uint64_t add(std::weak_ptr<rank_programs> who);
  void remove(std::uint64_t number) noexcept;
  /// Reads a note from the process of a device, and passes it on.
  /// @errors errc::internal: the note is not valid
  caf::error told(int device, std::span<const std::byte> bytes) const;

private:
  mutable std::mutex mutex_;
  std::uint64_t last_ = 0;
  std::map<std::uint64_t, std::weak_ptr<rank_programs>> all_;
};

/// The programs of one world. @thread any
class rank_programs : public std::enable_shared_from_this<rank_programs> {
public:
  static std::shared_ptr<rank_programs> make(std::shared_ptr<program_board> board,
                                             const std::shared_ptr<world_core>& core,
                                             world_program what);
  ~rank_programs();

  /// Sets the actor that gets the programs' reports. Called before the first communicator.
  void set_world(const caf::actor& world);
  /// Hands the new live communicator over to its ranks' processes.
  void on_live(communicator& x, const world_status& view);
  /// Tells the ranks' processes that a communicator has ended.
  void on_end(std::uint64_t epoch, const caf::error& why);
  /// @errors errc::invalid_argument: no such rank; errc::overloaded: too many messages wait for its
  ///         program; errc::unavailable
  caf::error send(const program_message& x);
  /// Ends the programs, since the world has ended. Called while the actor system exists.
  void stop();
  /// Handles a note from the process of `device`.
  /// @errors errc::internal: the note is not valid
  caf::error told(int device, program_note note);

private:
  rank_programs(std::shared_ptr<program_board> board, const std::shared_ptr<world_core>& core,
                world_program what)
      : board_(std::move(board)), core_(core), program_(std::move(what)) {}
  caf::error tell(std::size_t rank, const program_note& note);
  void reply(const program_note& note);
  void pass_on(const world_core& core, std::size_t rank);
  caf::error ended_in(const world_core& core, const std::vector<std::size_t>& ranks);
  void on_program_end(const world_core& core, std::size_t rank, const caf::error& why);
  void on_ready(const std::shared_ptr<world_core>& core, std::size_t rank,
                std::uint64_t incarnation);

  /// Messages for a rank's program. Only one at a time is on its way. So a program that is slow to
  /// begin, or a slow network, delays nothing else in the process.
  struct outbox {
    std::deque<std::vector<std::byte>> notes;
    std::uint64_t ready_in = 0; ///< incarnation of the device whose process can take a message
    bool passes_on = false;     ///< a thread is in `pass_on`
  };

  struct program_end {
    std::uint64_t incarnation = 0; ///< of the device whose process ran the program
    caf::error why;
  };

  const std::shared_ptr<program_board> board_;
  const std::weak_ptr<world_core> core_; // calls this object
  const world_program program_;
  std::uint64_t number_ = 0;
  std::shared_ptr<named_memory> named_; ///< set by `make`
  std::mutex mutex_;
  caf::actor_addr world_;
  std::map<std::size_t, outbox> outboxes_; // by rank
  std::map<std::size_t, program_end> ended_;
};

/// Makes `board` receive what the devices' processes send about programs. Gives up a process that
/// sends an invalid note.
void listen(runtime& from, std::shared_ptr<program_board> board);

} // namespace troupe::detail
