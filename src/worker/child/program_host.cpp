#include "worker/child/program_host.hpp"

#include "actors/device_access.hpp"
#include "actors/supervised.hpp"
#include "actors/system.hpp"
#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include "foundation/never_destroyed.hpp"
#include "foundation/process_note.hpp"
#include "foundation/start_thread.hpp"
#include "sharing/memory_exchange.hpp" // for memory_exchange::claim
#include "sharing/memory_note.hpp"
#include "worker/protocol/protocol.hpp"
#include <troupe/detail/user_call.hpp>
#include <troupe/nccl_world.hpp>

#include <caf/all.hpp>

#include <utility>

namespace troupe {

namespace detail {

namespace {

// A note also has the name and the status of a world, and the name of a program.
static_assert(most_program_bytes + 4096 <= control_bytes);

struct program_registry {
  std::mutex mutex;
  std::map<std::string, program_factory> all;

  static program_registry& get() { return never_destroyed<program_registry>(); }
};

program_note note_of(program_note::kind what, std::uint64_t world, std::int32_t rank) {
  program_note result;
  result.what = what;
  result.world = world;
  result.rank = rank;
  return result;
}

/// @errors errc::invalid_argument: no program is registered by that name
caf::expected<program_factory> find_program(const std::string& name) {
  auto& registry = program_registry::get();
  std::lock_guard lock{registry.mutex};
  auto i = registry.all.find(name);
  if (i == registry.all.end())
    return make_error(errc::invalid_argument,
                      "no program is registered in the worker as \"" + name + "\"");
  return i->second;
}

bool has_programs() {
  auto& registry = program_registry::get();
  std::lock_guard lock{registry.mutex};
  return !registry.all.empty();
}

} // namespace

struct program_host::system {
  config settings;
  std::optional<caf::actor_system> actors;
  std::shared_ptr<system_lease> lease;
  std::shared_ptr<lane> driver;
};

program_host::program_host(program_options options)
    : options_(std::move(options)), guest_(std::make_shared<guest_backend>(options_.guest)) {}

program_host::~program_host() {
  guest_->ends().allow_all(); // the parent is not heard any more
  if (auto* const memory = guest_->memory())
    memory->end();
  std::map<std::uint64_t, hosted> worlds;
  std::map<std::uint64_t, std::thread> beginning;
  std::vector<std::thread> over;
  {
    std::lock_guard lock{mutex_};
    worlds.swap(worlds_);
    beginning.swap(beginning_);
    over.swap(over_);
  }
  for (auto& [number, x] : worlds) {
    x.kept->end(); // an actor or a factory may wait there
    if (x.actor)
      caf::anon_send_exit(x.actor, caf::exit_reason::user_shutdown);
    x.core->close(world_phase::shut_down, make_error(errc::unavailable, "the worker ends"));
  }
  for (auto& [number, x] : beginning)
    x.join();
  for (auto& x : over)
    x.join();
}

caf::expected<program_host::system*> program_host::provide_system() {
  std::lock_guard lock{making_};
  if (system_)
    return system_.get();
  auto made = std::make_unique<system>();
  made->settings.lanes.spin = std::chrono::duration_cast<std::chrono::microseconds>(options_.spin);
  made->settings.use_backend(guest_);
  made->actors.emplace(made->settings);
  auto core = system_core::of(*made->actors);
  if (!core)
    return core.error();
  auto lease = (*core)->lease(*made->actors);
  if (!lease)
    return lease.error();
  made->lease = std::move(*lease);
  auto owner = (*core)->runtime();
  if (!owner)
    return owner.error();
  auto driver = (*owner)->lane_of(options_.guest.device);
  if (!driver)
    return driver.error();
  made->driver = std::move(*driver);
  if (auto error = wait_until_ready(made->driver->state(), made->settings.device_deadline))
    return error;
  system_ = std::move(made);
  return system_.get();
}

caf::error program_host::warm() {
  if (!has_programs())
    return {};
  auto made = provide_system();
  return made ? caf::error{} : made.error();
}

caf::error program_host::send(const program_note& note) noexcept {
  return options_.guest.tell(make_note(note_kind::program, to_bytes(note)));
}

void program_host::tell(const program_note& note) noexcept {
  if (auto error = send(note))
    log(log_level::warning, "cannot send a program's note to the parent", error, log_kind::notes);
}

void program_host::tell_ended(std::uint64_t number, std::int32_t rank,
                              const caf::error& why) noexcept {
  auto end = note_of(program_note::kind::ended, number, rank);
  end.why = brief(why);
  tell(end);
}

caf::actor program_host::begin(const program_note& note, const world& over) {
  const auto number = note.world;
  const auto rank = note.rank;
  auto ended = [this, number, rank](const caf::error& why) { tell_ended(number, rank, why); };
  auto factory = find_program(note.program);
  if (!factory) {
    ended(factory.error());
    return {};
  }
  auto report = [this, number, rank](std::vector<std::uint8_t> bytes) -> caf::error {
    if (auto error = check_program_bytes(bytes.size(), "a report"); error)
      return error;
    auto x = note_of(program_note::kind::report, number, rank);
    x.bytes = std::move(bytes);
    return send(x);
  };
  auto kept = kept_of(number);
  if (!kept)
    return {}; // the world has ended
  auto keep = [kept](const std::string& name, dtype type, std::size_t count) {
    return kept->keep(name, type, count);
  };
  caf::actor actor;
  auto why = call_user(errc::unavailable, "the program's factory", [&] {
    actor = (*factory)(program_place{*system_->actors, over.rank(static_cast<std::size_t>(rank)),
                                     note.bytes, std::move(report), std::move(keep)});
  });
  if (actor) {
    actor->attach_functor([ended](const caf::error& reason) {
      const bool wanted = !reason || reason == caf::exit_reason::normal ||
                          reason == caf::exit_reason::user_shutdown;
      ended(wanted ? caf::error{} : reason);
    });
    return actor;
  }
  if (!why)
    why = make_error(errc::unavailable, "the program's factory made no actor");
  ended(why);
  return {};
}

std::shared_ptr<kept_buffers> program_host::make_kept(const program_note& of) {
  auto owner = *(*system_core::of(*system_->actors))->runtime();
  kept_buffers::options options;
  options.first_number = owner->node();
  options.ask = [this, number = of.world, rank = of.rank](program_note x) {
    x.world = number;
    x.rank = rank;
    return send(x);
  };
  options.claim = [owner = std::weak_ptr{owner},
                   on = system_->driver->shared_state()](const gpu_token& token) {
    auto alive = owner.lock();
    // For writing alone: a claim for reading, too, is refused if a part is indeterminate.
    return alive ? alive->memory().claim(on, token, access_mode::write, clock::time_point::max())
                 : refused_operation<any_gpu_ref>(
                       "claim", make_error(errc::unavailable, "the actor system has ended"));
  };
  return std::make_shared<kept_buffers>(std::move(options));
}

std::shared_ptr<kept_buffers> program_host::kept_of(std::uint64_t number) {
  std::lock_guard lock{mutex_};
  const auto i = worlds_.find(number);
  return i == worlds_.end() ? nullptr : i->second.kept;
}

caf::expected<program_host::hosted*> program_host::provide(const program_note& note) {
  if (auto i = worlds_.find(note.world); i != worlds_.end())
    return &i->second;
  constexpr std::int32_t most_ranks = 4096;
  if (note.ranks <= 0 || note.ranks > most_ranks || note.rank < 0 || note.rank >= note.ranks)
    return make_error(errc::internal, "the parent named a rank that does not exist");
  world_limits limits;
  limits.deadline = std::chrono::nanoseconds{note.deadline_ns};
  limits.stall_limit = std::chrono::nanoseconds{note.stall_limit_ns};
  limits.quiet_limit = std::chrono::milliseconds{note.quiet_limit_ms};
  limits.waiting_limit = note.waiting_limit;
  std::vector<std::shared_ptr<lane>> lanes(static_cast<std::size_t>(note.ranks));
  lanes[static_cast<std::size_t>(note.rank)] = system_->driver;
  auto owner = (*system_core::of(*system_->actors))->runtime();
  hosted x;
  x.rank = note.rank;
  x.kept = make_kept(note);
  const auto policy =
      note.way == collective_way::direct ? collectives_policy::direct : collectives_policy::nccl;
  x.core = std::make_shared<world_core>(*owner, note.view.name, std::move(lanes), limits, policy,
                                        policy);
  x.core->set_on_end([this, number = note.world, rank = note.rank](
                         std::uint64_t epoch, const caf::error& why, communicator_role) {
    auto end = note_of(program_note::kind::fail_epoch, number, rank);
    end.view.epoch = epoch;
    end.why = brief(why);
    tell(end);
  });
  return &worlds_.emplace(note.world, std::move(x)).first->second;
}

caf::error program_host::take(communicator_key key, communicator_ranks rank,
                              std::span<const std::byte> what) {
  auto ranks = guest_->adopt(key, std::move(rank));
  auto refuse = [&](caf::error why) {
    guest_->ends().allow(key); // no operation ran on it
    static_cast<void>(guest_->abort(std::move(ranks)));
    return why;
  };
  auto note = program_note_of(what);
  if (!note)
    return refuse(make_error(errc::internal, "the parent sent malformed data"));
  std::unique_lock lock{mutex_};
  const bool stopped = stopped_.contains(note->world); // the stop overtook this
  lock.unlock();
  if (stopped)
    return refuse({}); // an error would end the process
  if (auto made = provide_system(); !made)
    return refuse(made.error());
  lock.lock();
  auto found = provide(*note);
  if (!found) {
    lock.unlock();
    return refuse(found.error());
  }
  auto& x = **found;
  auto core = x.core;
  x.epochs.emplace(key, note->view.epoch);
  for (auto& member : note->view.members)
    if (member.rank == note->rank)
      x.incarnation = member.incarnation;
  const bool is_new = !std::exchange(x.begins, true);
  const bool is_there = x.begun;
  lock.unlock();
  if (core->adopt_communicator(note->view,
                               std::move(ranks))) { // false: the parent has gone on already
    lock.lock();
    if (auto i = worlds_.find(note->world); i != worlds_.end()) // earlier epochs have ended
      std::erase_if(i->second.epochs, [&](auto& e) { return e.second < note->view.epoch; });
    lock.unlock();
  }
  if (is_new)
    begin_soon(std::move(*note), std::move(core));
  else if (is_there)
    tell_ready(note->world); // the incarnation may be another one
  return {};
}

/// Starts the program on a thread of its own: it may take long, and other requests of the parent
/// wait for this thread.
void program_host::begin_soon(program_note note, std::shared_ptr<world_core> core) {
  const auto number = note.world;
  const auto rank = note.rank;
  std::unique_lock lock{mutex_};
  auto over = std::exchange(over_, {});
  const auto why = start_thread(
      beginning_[number],
      [this, note = std::move(note), core = std::move(core)] {
        has_begun(note.world, begin(note, world_access::make({system_->lease, core, {}})));
        std::lock_guard end{mutex_};
        if (auto self = beginning_.extract(note.world)) // else the destructor is about to join it
          over_.push_back(std::move(self.mapped()));
      },
      "for the program");
  if (why)
    beginning_.erase(number);
  lock.unlock();
  for (auto& x : over)
    x.join();
  if (!why)
    return;
  tell_ended(number, rank, why);
  has_begun(number, {});
}

void program_host::has_begun(std::uint64_t number, const caf::actor& actor) {
  std::vector<program_message> early;
  {
    std::lock_guard lock{mutex_};
    auto i = worlds_.find(number);
    if (i == worlds_.end()) { // the world has ended meanwhile
      if (actor)
        caf::anon_send_exit(actor, caf::exit_reason::user_shutdown);
      return;
    }
    i->second.actor = actor;
    i->second.begun = true;
    early.swap(i->second.early);
  }
  for (auto& x : early)
    if (actor)
      detail::anon_send(actor, std::move(x));
  tell_ready(number);
}

void program_host::tell_ready(std::uint64_t number) {
  std::unique_lock lock{mutex_};
  auto i = worlds_.find(number);
  if (i == worlds_.end())
    return;
  auto ready = note_of(program_note::kind::ready, number, i->second.rank);
  ready.incarnation = i->second.incarnation;
  lock.unlock();
  tell(ready);
}

void program_host::close(communicator_key key) {
  std::shared_ptr<world_core> core;
  std::uint64_t epoch = 0;
  {
    std::lock_guard lock{mutex_};
    for (auto& [number, x] : worlds_)
      if (auto i = x.epochs.find(key); i != x.epochs.end()) {
        core = x.core;
        epoch = i->second;
        x.epochs.erase(i);
      }
  }
  if (core)
    core->fail_epoch(epoch, make_error(errc::membership_changed, "the world goes on without it"));
  guest_->ends().wait_closed(key);
}

void program_host::allow_end(communicator_key key) { guest_->ends().allow(key); }

void program_host::received(std::span<const std::byte> what) {
  if (is_note(note_kind::memory, what))
    received_memory_note(what);
  else if (is_note(note_kind::program, what))
    received_program_note(content_of(what));
}

std::vector<lent_range> program_host::trim() {
  auto* const memory = guest_->memory();
  return memory != nullptr ? memory->trim() : std::vector<lent_range>{};
}

void program_host::answered(std::uint64_t number, const caf::expected<lent_range>& result) {
  if (auto* const memory = guest_->memory())
    memory->answered(number, result);
}

bool program_host::has_system() {
  std::lock_guard lock{making_};
  return system_ != nullptr;
}

void program_host::received_memory_note(std::span<const std::byte> what) {
  if (has_system())
    return guest_->received(what);
  auto note = memory_note_of(what);
  if (!note || note->what != memory_note::kind::claim)
    return;
  memory_note refusal;
  refusal.what = memory_note::kind::refused;
  refusal.number = note->number;
  refusal.why = make_error(errc::stale_ref, "the worker has no program that could own the memory");
  if (auto error = options_.guest.tell(to_note(refusal)))
    log(log_level::warning, "a refusal did not reach the parent", error, log_kind::notes);
}

void program_host::received_program_note(std::span<const std::byte> what) {
  auto note = program_note_of(what);
  if (!note)
    return log(log_level::warning, "the parent sent a malformed message to a program",
               log_kind::notes);
  const auto kind = note->what;
  std::unique_lock lock{mutex_};
  if (kind == program_note::kind::stop)
    stopped_.insert(note->world);
  auto i = worlds_.find(note->world);
  if (i == worlds_.end())
    return;
  auto actor = i->second.actor;
  auto core = i->second.core;
  auto kept = i->second.kept;
  if (kind == program_note::kind::stop)
    worlds_.erase(i);
  else if (kind == program_note::kind::fail_epoch) // `close` then need not end the epoch again
    std::erase_if(i->second.epochs, [&](auto& x) { return x.second == note->view.epoch; });
  else if (kind == program_note::kind::message && !i->second.begun) // for an earlier process
    return i->second.early.push_back({note->rank, std::move(note->bytes)});
  lock.unlock();
  switch (kind) {
  case program_note::kind::fail_epoch:
    core->fail_epoch(note->view.epoch, note->why);
    break;
  case program_note::kind::message:
    if (actor)
      detail::anon_send(actor, program_message{note->rank, std::move(note->bytes)});
    tell_ready(note->world);
    break;
  case program_note::kind::kept:
  case program_note::kind::kept_new:
  case program_note::kind::not_kept:
    kept->answered(std::move(*note));
    break;
  case program_note::kind::stop:
    kept->end();
    if (actor)
      caf::anon_send_exit(actor, caf::exit_reason::user_shutdown);
    core->close(world_phase::shut_down, make_error(errc::unavailable, "the world was shut down"));
    break;
  default:
    break;
  }
}

} // namespace detail

caf::error register_program(std::string name, program_factory factory) {
  if (!factory || name.empty())
    return make_error(errc::invalid_argument, "a program needs a name and a factory");
  auto& registry = detail::program_registry::get();
  std::lock_guard lock{registry.mutex};
  if (!registry.all.emplace(name, std::move(factory)).second)
    return make_error(errc::invalid_argument,
                      "a program is registered as \"" + name + "\" already");
  return {};
}

} // namespace troupe
