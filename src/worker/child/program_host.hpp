/// The programs of a worker, with their actor system and their worlds.
#pragma once

#include "actors/program_note.hpp"
#include "actors/supervised.hpp"
#include "worker/child/guest_backend.hpp"
#include "worker/child/kept_buffers.hpp"
#include <troupe/config.hpp>
#include <troupe/worker_program.hpp>

#include <caf/actor_system.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace troupe::detail {

struct program_options {
  guest_options guest;
  std::chrono::nanoseconds spin{0};
};

class program_host final : public program_site {
public:
  explicit program_host(program_options options);
  ~program_host() override;

  caf::error warm() override;
  caf::error take(communicator_key key, communicator_ranks rank,
                  std::span<const std::byte> what) override;
  void close(communicator_key key) override;
  void allow_end(communicator_key key) override;
  void received(std::span<const std::byte> what) override;
  std::vector<lent_range> trim() override;
  void answered(std::uint64_t number, const caf::expected<lent_range>& result) override;

private:
  /// A world with one rank here.
  struct hosted {
    std::int32_t rank = 0;
    std::uint64_t incarnation = 0; ///< of the rank's device, as the parent counts
    std::shared_ptr<world_core> core;
    bool begins = false; ///< its program is beginning, or has begun
    bool begun = false;
    caf::actor actor; ///< null before the program has begun, or if it could not begin
    std::vector<program_message> early;               ///< messages from before the begin
    std::map<communicator_key, std::uint64_t> epochs; ///< epochs of the adopted ranks
    std::shared_ptr<kept_buffers> kept;
  };
  struct system; ///< created on first use

  caf::expected<system*> provide_system();
  bool has_system();
  caf::expected<hosted*> provide(const program_note& note);
  void begin_soon(program_note note, std::shared_ptr<world_core> core);
  std::shared_ptr<kept_buffers> make_kept(const program_note& of);
  std::shared_ptr<kept_buffers> kept_of(std::uint64_t number);
  caf::actor begin(const program_note& note, const world& over);
  void has_begun(std::uint64_t number, const caf::actor& actor);
  /// Tells the parent that the program of that world can take a message.
  void tell_ready(std::uint64_t number);
  caf::error send(const program_note& note) noexcept;
  void tell(const program_note& note) noexcept;
  void tell_ended(std::uint64_t number, std::int32_t rank, const caf::error& why) noexcept;
  void received_program_note(std::span<const std::byte> what);
  void received_memory_note(std::span<const std::byte> what);

  const program_options options_;
  const std::shared_ptr<guest_backend> guest_;
  std::mutex making_;
  std::unique_ptr<system> system_;
  std::mutex mutex_;
  std::map<std::uint64_t, hosted> worlds_;
  std::set<std::uint64_t> stopped_;                ///< worlds that must not begin again
  std::map<std::uint64_t, std::thread> beginning_; ///< by number of the world
  std::vector<std::thread> over_; ///< finished threads of `beginning_`, to be joined
};

} // namespace troupe::detail
