#include "actors/rank_programs.hpp"

#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include "foundation/process_note.hpp"
#include <troupe/worker_program.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

namespace troupe::detail {

namespace {

caf::error nonsense(std::string_view what) {
  return make_error(errc::internal, "it sent a malformed note (" + std::string{what} + ")");
}

} // namespace

std::uint64_t program_board::add(std::weak_ptr<rank_programs> who) {
  std::lock_guard lock{mutex_};
  all_.emplace(++last_, std::move(who));
  return last_;
}

void program_board::remove(std::uint64_t number) noexcept {
  std::lock_guard lock{mutex_};
  all_.erase(number);
}

caf::error program_board::told(int device, std::span<const std::byte> bytes) const {
  auto note = program_note_of(bytes);
  if (!note)
    return nonsense("a note of a program cannot be parsed");
  std::shared_ptr<rank_programs> to;
  {
    std::lock_guard lock{mutex_};
    if (auto i = all_.find(note->world); i != all_.end())
      to = i->second.lock();
  }
  return to ? to->told(device, std::move(*note)) : caf::error{};
}

void listen(runtime& from, std::shared_ptr<program_board> board) {
  from.hear_programs([&from, board = std::move(board)](int device,
                                                       std::span<const std::byte> bytes) {
    if (auto error = board->told(device, bytes); error && !from.backend().give_up(device, error))
      log(log_level::warning, "what is said of a program", error, log_kind::notes);
  });
}

std::shared_ptr<rank_programs> rank_programs::make(std::shared_ptr<program_board> board,
                                                   const std::shared_ptr<world_core>& core,
                                                   world_program what) {
  std::shared_ptr<rank_programs> result{new rank_programs{std::move(board), core, std::move(what)}};
  result->named_ =
      std::make_shared<named_memory>([self = std::weak_ptr{result}](const program_note& note) {
        if (auto alive = self.lock())
          alive->reply(note);
      });
  result->number_ = result->board_->add(result);
  return result;
}

rank_programs::~rank_programs() { board_->remove(number_); }

void rank_programs::set_world(const caf::actor& world) {
  std::lock_guard lock{mutex_};
  world_ = world.address();
}

void rank_programs::on_live(communicator& x, const world_status& view) {
  auto core = core_.lock();
  if (!core)
    return;
  program_note note{.what = program_note::kind::adopt, .world = number_};
  note.ranks = static_cast<std::int32_t>(core->size());
  note.view = view;
  note.view.reason = brief(view.reason);
  note.program = program_.name;
  note.bytes = program_.arguments;
  note.way = core->main_way();
  auto& limits = core->limits();
  note.deadline_ns = limits.deadline.count();
  note.stall_limit_ns = limits.stall_limit.count();
  note.quiet_limit_ms = limits.quiet_limit.count();
  note.waiting_limit = limits.waiting_limit;
  for (auto i : x.members()) {
    note.rank = static_cast<std::int32_t>(i);
    const auto bytes = to_bytes(note);
    if (auto error = x.call_from_outside(
            i, [&](backend_communicator& rank) { return rank.hand_over(bytes); })) {
      if (code_of(error) != errc::worker_lost) // a loss ends it in any case
        x.fail(error);
      return;
    }
  }
}

caf::error rank_programs::tell(std::size_t rank, const program_note& note) {
  auto core = core_.lock();
  if (!core)
    return make_error(errc::unavailable, "the world has ended");
  return core->owner()->tell(core->lanes()[rank]->state().ordinal(),
                             make_note(note_kind::program, to_bytes(note)));
}

void rank_programs::reply(const program_note& note) {
  if (auto error = tell(static_cast<std::size_t>(note.rank), note);
      error && code_of(error) != errc::worker_lost)
    log(log_level::warning, "cannot reply to a program's request for memory", error,
        log_kind::notes);
}

void rank_programs::on_end(std::uint64_t epoch, const caf::error& why) {
  auto core = core_.lock();
  program_note note{.what = program_note::kind::fail_epoch, .world = number_};
  note.view.epoch = epoch;
  note.why = brief(why);
  for (std::size_t i = 0; core && i < core->size(); ++i)
    if (auto error = tell(i, note); error && code_of(error) != errc::worker_lost)
      log(log_level::warning, "cannot send the end of a program to a rank's process", error,
          log_kind::notes);
}

caf::error rank_programs::send(const program_message& x) {
  auto core = core_.lock();
  const auto ranks = core ? core->size() : 0;
  if (x.rank >= static_cast<std::int32_t>(ranks))
    return make_error(errc::invalid_argument, out_of_range("rank", x.rank, ranks));
  if (auto error = check_program_bytes(x.bytes.size(), "a message for a program"); error)
    return error;
  if (!core || core->status().phase > world_phase::ready)
    return make_error(errc::unavailable, "the world has ended");
  std::vector<std::size_t> to;
  for (std::size_t i = 0; i < ranks; ++i)
    if (x.rank < 0 ? !core->absent().contains(i) : i == static_cast<std::size_t>(x.rank))
      to.push_back(i);
  for (auto i : to)
    if (core->lanes()[i]->state().phase() > device_phase::resetting)
      return make_error(errc::unavailable,
                        "the device of rank " + std::to_string(i) + " has ended");
  program_note note{.what = program_note::kind::message, .world = number_};
  note.bytes = x.bytes;
  if (auto error = ended_in(*core, to); error)
    return error;
  std::vector<std::vector<std::byte>> notes;
  for (auto i : to) {
    note.rank = static_cast<std::int32_t>(i);
    notes.push_back(make_note(note_kind::program, to_bytes(note)));
  }
  {
    std::lock_guard lock{mutex_};
    const auto limit = std::max<std::size_t>(core->limits().waiting_limit, 1);
    for (auto i : to) // all of them, or none
      if (outboxes_[i].notes.size() >= limit)
        return make_error(errc::overloaded, std::to_string(outboxes_[i].notes.size()) +
                                                " messages wait for the program of rank " +
                                                std::to_string(i));
    for (std::size_t k = 0; k < to.size(); ++k)
      outboxes_[to[k]].notes.push_back(std::move(notes[k]));
  }
  for (auto i : to)
    pass_on(*core, i);
  return {};
}

/// Returns none if all of these ranks have their program, or will have it.
caf::error rank_programs::ended_in(const world_core& core, const std::vector<std::size_t>& ranks) {
  std::lock_guard lock{mutex_};
  for (auto i : ranks) {
    const auto x = ended_.find(i);
    const auto& device = core.lanes()[i]->state();
    if (x == ended_.end() || x->second.incarnation != device.live_incarnation())
      continue; // the device's next process begins it anew
    const auto& why = x->second.why;
    return make_error(errc::unavailable,
                      "the program \"" + program_.name + "\" of rank " + std::to_string(i) +
                          " has ended: " + (why ? describe(why) : "it was done"));
  }
  return {};
}

void rank_programs::on_program_end(const world_core& core, std::size_t rank,
                                   const caf::error& why) {
  {
    std::lock_guard lock{mutex_};
    ended_[rank] = {core.lanes()[rank]->state().incarnation(), why};
  }
  if (why)
    log(log_level::warning,
        "world " + core.name() + ": the program \"" + program_.name + "\" of rank " +
            std::to_string(rank) + " has ended",
        why);
}

/// Sends in order, and only to a process that has the program: the next process begins it anew.
void rank_programs::pass_on(const world_core& core, std::size_t rank) {
  std::unique_lock lock{mutex_};
  auto& x = outboxes_[rank];
  if (std::exchange(x.passes_on, true))
    return;
  const auto& device = core.lanes()[rank]->state();
  while (!x.notes.empty() && x.ready_in != 0 && x.ready_in == device.live_incarnation()) {
    x.ready_in = 0;
    const auto note = std::move(x.notes.front());
    x.notes.pop_front();
    lock.unlock();
    const auto error = core.owner()->tell(device.ordinal(), note);
    lock.lock();
    if (error) // not delivered; the next process reports when it is ready
      x.notes.push_front(note);
  }
  x.passes_on = false;
}

void rank_programs::stop() {
  auto core = core_.lock();
  program_note note{.what = program_note::kind::stop, .world = number_};
  for (std::size_t i = 0; core && i < core->size(); ++i)
    static_cast<void>(tell(i, note)); // on failure the process is gone
  board_->remove(number_);
  named_->end();
}

void rank_programs::on_ready(const std::shared_ptr<world_core>& core, std::size_t rank,
                             std::uint64_t incarnation) {
  {
    std::lock_guard lock{mutex_};
    auto& x = outboxes_[rank];
    x.ready_in = std::max(x.ready_in, incarnation);
    if (x.notes.empty())
      return;
  }
  // Not on this thread, which reads from the process.
  core->owner()->workers().run(
      [self = shared_from_this(), core, rank] { self->pass_on(*core, rank); });
}

caf::error rank_programs::told(int device, program_note note) {
  caf::actor world;
  {
    std::lock_guard lock{mutex_};
    world = caf::actor_cast<caf::actor>(world_);
  }
  auto core = core_.lock();
  if (!core)
    return {};
  if (note.rank < 0 || static_cast<std::size_t>(note.rank) >= core->size())
    return nonsense("a note names a rank that does not exist");
  const auto& of = core->lanes()[static_cast<std::size_t>(note.rank)]->state();
  if (of.ordinal() != device || note.incarnation > of.incarnation())
    return nonsense("it sent a note for another rank");
  switch (note.what) {
  case program_note::kind::fail_epoch:
    core->fail_epoch(note.view.epoch, note.why);
    break;
  case program_note::kind::report:
    if (world)
      detail::anon_send(world, program_report{note.rank, std::move(note.bytes)});
    break;
  case program_note::kind::ended:
    on_program_end(*core, static_cast<std::size_t>(note.rank), note.why);
    if (world)
      detail::anon_send(world, program_ended{note.rank, std::move(note.why)});
    break;
  case program_note::kind::ready:
    on_ready(core, static_cast<std::size_t>(note.rank), note.incarnation);
    break;
  case program_note::kind::keep: // not on this thread, which reads from the process
    core->owner()->workers().run(
        [named = named_, core, note = std::move(note)] { named->keep(core, note); });
    break;
  default:
    return nonsense("it sent a note that only the parent sends");
  }
  return {};
}

} // namespace troupe::detail
