#include "runtime/runtime.hpp"

#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include "foundation/never_destroyed.hpp"
#include "foundation/process_note.hpp"
#include "foundation/spin.hpp"
#include "operation/admission_lock.hpp"

#include <algorithm>
#include <random>
#include <shared_mutex>
#include <thread>
#include <utility>

namespace troupe::detail {

namespace {

/// How long lanes and background jobs may take to end when the runtime closes.
constexpr std::chrono::seconds end_patience{5};
/// The same after the devices were lost: what still runs only has to find that out.
constexpr std::chrono::milliseconds lost_patience{500};

/// How soon requests are made again if some of them are not in the queue yet.
constexpr std::chrono::microseconds retry_tick{100};

/// Staging uses the memory in quarters.
constexpr std::size_t least_staging_bytes = 4096;

std::uint64_t random_node() {
  std::random_device source;
  return (std::uint64_t{source()} << 32) ^ source();
}

lane_options resolved(lane_options options, int devices) {
  options.in_flight_limit = std::max<std::size_t>(options.in_flight_limit, 1);
  options.staging_bytes = std::max(options.staging_bytes, least_staging_bytes);
  if (!options.spin) {
    auto cores = static_cast<int>(std::thread::hardware_concurrency());
    options.spin = std::chrono::microseconds{cores >= 2 * devices + 2 ? 200 : 0};
  }
  if (!options.client_spin)
    options.client_spin = std::chrono::microseconds{options.spin->count() != 0 ? 10'000 : 0};
  return options;
}

} // namespace

// -- runtime

/// Guards the runtime for threads that deliver notes: none of them may drop the last reference.
struct runtime::note_gate {
  std::shared_mutex mutex;
  runtime* owner = nullptr; ///< null: the runtime has closed
};

runtime::runtime(std::shared_ptr<troupe::backend> backend, const lane_options& options)
    : backend_(std::move(backend)), options_(resolved(options, backend_->device_count())),
      node_(random_node()), slots_(static_cast<std::size_t>(backend_->device_count())),
      gate_(std::make_shared<note_gate>()) {
  gate_->owner = this;
  set_client_spin(*options_.client_spin);
}

runtime::~runtime() { close(); }

void runtime::add_parts(std::shared_ptr<memory_exchange> memory,
                        std::shared_ptr<flight_recorder> recorder,
                        std::vector<runtime_listener*> listeners) {
  memory_ = std::move(memory);
  recorder_ = std::move(recorder);
  listeners_ = std::move(listeners);
}

void runtime::note_end(const caf::error& why) noexcept {
  for (auto* x : listeners_)
    x->on_end(why);
}

void runtime::note_closed(const caf::error& why) {
  for (auto* x : listeners_)
    x->on_devices_closed(why);
}

void runtime::close() noexcept {
  {
    std::lock_guard lock{slots_mutex_};
    if (std::exchange(closed_, true))
      return;
  }
  {
    std::lock_guard lock{gate_->mutex};
    gate_->owner = nullptr;
  }
  for (auto* x : listeners_)
    x->on_close();
  auto why = make_error(errc::unavailable, "the actor system ended");
  for (int i = 0; i < device_count(); ++i)
    shut_down(i, why);
  admission_->go_on(); // all have failed
  fair_limit limit{ended() ? lost_patience : end_patience};
  bool stuck = !workers_.wait_idle(limit);
  for (auto& s : slots_)
    stuck |= s.worker && !s.worker->join_within(limit);
  if (stuck) {
    log(log_level::error, "a thread is stuck in a call and was given up");
    if (auto self = weak_from_this().lock())
      keep_forever(std::move(self)); // the stuck thread may come back
    return;
  }
  // Not in the destructor: the last handle to this may be dropped on the deadline watch's thread.
  deadlines_.stop();
  for (int i = 0; i < device_count(); ++i)
    watch_lost(i); // nothing waits for their work any more
  refuse_retries();
}

caf::error runtime::check_ordinal(int x) const {
  if (x >= 0 && x < device_count())
    return {};
  return make_error(errc::invalid_argument, device_out_of_range(x, device_count()));
}

caf::expected<std::vector<std::shared_ptr<lane>>> runtime::lanes_of(std::span<const int> ordinals) {
  for (auto ordinal : ordinals)
    if (auto error = check_ordinal(ordinal); error)
      return error;
  std::vector<std::shared_ptr<lane>> result;
  for (auto ordinal : ordinals) {
    auto x = lane_of(ordinal);
    if (!x)
      return x.error();
    result.push_back(std::move(*x));
  }
  return result;
}

caf::expected<std::shared_ptr<lane>> runtime::lane_of(int ordinal) {
  if (auto error = check_ordinal(ordinal); error)
    return error;
  std::lock_guard lock{slots_mutex_};
  auto& s = slots_[static_cast<std::size_t>(ordinal)];
  if (!s.worker) {
    if (closed_)
      return make_error(errc::unavailable, "the actor system ended");
    if (!std::exchange(hears_, true))
      backend_->set_listener([gate = gate_](int from, std::span<const std::byte> note) {
        std::shared_lock pass{gate->mutex};
        if (gate->owner != nullptr)
          gate->owner->hear(from, note);
      });
    auto device = backend_->open(ordinal);
    if (!device)
      return device.error();
    auto state = std::make_shared<device_state>(node_, ordinal);
    register_device(state);
    auto options = options_;
    if ((*device)->is_remote() && options.completion == completion_strategy::host_func)
      options.completion =
          completion_strategy::event_poll; // host functions of this process do not run there
    s.worker = std::make_shared<lane>(std::move(state), std::move(*device), options, *this);
    if (auto error = s.worker->start()) {
      s.worker.reset();
      return error;
    }
  }
  return s.worker;
}

std::vector<std::shared_ptr<lane>> runtime::lanes() {
  std::lock_guard lock{slots_mutex_};
  std::vector<std::shared_ptr<lane>> result;
  for (auto& s : slots_)
    if (s.worker)
      result.push_back(s.worker);
  return result;
}

void runtime::hear_programs(std::function<void(int, std::span<const std::byte>)> f) {
  std::lock_guard lock{notes_mutex_};
  on_program_note_ = std::move(f);
}

void runtime::hear(int ordinal, std::span<const std::byte> note) {
  if (is_note(note_kind::memory, note)) {
    for (auto* x : listeners_)
      x->on_memory_note(ordinal, note);
    return;
  }
  std::function<void(int, std::span<const std::byte>)> to;
  if (is_note(note_kind::program, note)) {
    std::lock_guard lock{notes_mutex_};
    to = on_program_note_;
  }
  if (to)
    to(ordinal, content_of(note));
}

void runtime::start(const std::shared_ptr<operation>& op, room_policy room) {
  if (auto error = admission_->admit(op, room); error)
    op->answer(std::move(error));
}

void runtime::start(const std::shared_ptr<operation>& op, const request_options& options) {
  if (options.retry_of != 0)
    op->set_retry_of(options.retry_of);
  start(op, options.room);
}

void runtime::retry(std::shared_ptr<retryable> x) {
  retries_.add(std::move(x));
  make_again_at(clock::now());
}

void runtime::make_again_at(clock::time_point when) {
  if (retries_soon_.exchange(true))
    return;
  auto again = [self = weak_from_this()] {
    if (auto alive = self.lock())
      alive->make_again();
  };
  if (deadlines_.call_at(when, again) == 0)
    refuse_retries();
}

void runtime::refuse_retries() {
  retries_soon_.store(false);
  retries_.refuse_all(make_error(errc::unavailable, "the actor system ended"));
}

void runtime::make_again() {
  retries_soon_.store(false);
  if (!retries_.make_again())
    make_again_at(clock::now() + retry_tick);
}

void runtime::end_loss() {
  {
    admission_lock lock;
    admission_->retries(lock).end_loss(lock);
  }
  make_again();
}

namespace {
caf::error actors_ended(const operation& op) {
  return make_error(op.describe(errc::unavailable, "the devices' actors ended"));
}
} // namespace

void runtime::reply_to_actor(operation& op) noexcept {
  op.replies_to_actor.store(true);
  if (roots_.load() == 0)
    op.answer(actors_ended(op));
}

void runtime::end_replies() noexcept {
  if (roots_.fetch_sub(1) != 1)
    return;
  deadlines_.for_each([](operation& op) {
    if (op.replies_to_actor.load())
      op.answer(actors_ended(op));
  });
}

std::vector<std::shared_ptr<operation>> runtime::users_of(int ordinal, bool only_with_memory) {
  std::vector<std::shared_ptr<operation>> result;
  deadlines_.for_each([&](operation& op) {
    auto uses_it = [&](const part& p) {
      return p.on->state().ordinal() == ordinal && (p.uses_memory || !only_with_memory);
    };
    if (op.borrows_from(ordinal) || std::any_of(op.parts().begin(), op.parts().end(),
                                                [&](const part& p) { return uses_it(p); }))
      result.push_back(std::static_pointer_cast<operation>(op.shared_from_this()));
  });
  return result;
}

void runtime::fail_users_of(int ordinal, const caf::error& why, bool only_with_memory) {
  for (auto& x : users_of(ordinal, only_with_memory))
    x->fail(why);
}

std::shared_ptr<operation_of<std::uint64_t>> runtime::reset(int ordinal,
                                                            clock::time_point deadline) {
  // No lane sees this request: the next generation answers it, or its deadline.
  auto answer = std::make_shared<operation_of<std::uint64_t>>("reset", 0);
  answer->deadline = deadline;
  auto worker = lane_of(ordinal);
  if (!worker) {
    answer->answer(worker.error());
    return answer;
  }
  auto& state = (*worker)->state();
  auto why = make_error({.code = errc::device_reset,
                         .detail = "reset requested",
                         .device = ordinal,
                         .generation = state.generation()});
  admission_->drain();          // earlier calls fail with the others
  std::uint64_t generation = 0; // the one that ends
  {
    admission_lock lock;
    auto refuse = [&](errc code, std::string detail) {
      answer->answer(refusal("reset", ordinal, code, std::move(detail)));
    };
    if (!backend_->allows_reset()) {
      refuse(errc::not_supported, "only the parent process can reset the device");
      return answer;
    }
    if (deadline <= clock::now()) {
      refuse(errc::deadline_exceeded, "its deadline was over before it began");
      return answer;
    }
    if (state.phase() != device_phase::ready) {
      refuse(errc::unavailable, device_is(state.phase()));
      return answer;
    }
    if (state.acquired() != 0) {
      refuse(errc::buffer_acquired,
             "user streams, other libraries or other processes hold memory of the device");
      return answer;
    }
    generation = state.generation();
    state.close(device_phase::resetting, why);
  }
  watch_reset(*worker, generation, answer);
  moves_.end(ordinal, why);
  note_closed(why);
  fail_users_of(ordinal, why, true);
  std::lock_guard lock{slots_mutex_};
  auto& s = slots_[static_cast<std::size_t>(ordinal)];
  s.reset_wanted = true;
  act_on_quiet(s);
  return answer;
}

std::shared_ptr<operation_of<std::uint64_t>> runtime::hand_over(int ordinal,
                                                                clock::time_point deadline) {
  auto worker = lane_of(ordinal);
  return worker ? moves_.start(*worker, deadline)
                : refused_operation<std::uint64_t>("hand_over", worker.error());
}

void runtime::watch_reset(const std::shared_ptr<lane>& worker, std::uint64_t generation,
                          const std::shared_ptr<operation_of<std::uint64_t>>& answer) {
  auto state = worker->shared_state();
  deadlines_.add(*answer);
  auto watch = state->watch([answer, old = generation](const device_changed& change) {
    if (change.phase == device_phase::ready && change.generation > old && !answer->completed()) {
      answer->value = change.generation;
      answer->answer({});
    } else if (change.phase == device_phase::failed || change.phase == device_phase::shut_down) {
      answer->answer(change.reason ? change.reason
                                   : make_error(errc::unavailable, "the device ended"));
    }
  });
  answer->on_answer(
      [self = weak_from_this(), state = std::weak_ptr{state}, watch, of = std::weak_ptr{answer}] {
        auto owner = self.lock();
        if (!owner)
          return;
        if (auto x = of.lock())
          owner->deadlines_.remove(*x);
        // Not on the thread that answers: a watcher must not call its device.
        owner->deadlines_.call_at(clock::now(), [state, watch] {
          if (auto device = state.lock())
            device->unwatch(watch);
        });
      });
}

void runtime::shut_down(int ordinal, const caf::error& why) {
  std::shared_ptr<lane> worker;
  {
    std::lock_guard lock{slots_mutex_};
    worker = slots_[static_cast<std::size_t>(ordinal)].worker;
  }
  if (!worker)
    return;
  admission_->drain(); // earlier calls fail with the others
  {
    admission_lock lock;
    worker->state().close(device_phase::shut_down, why);
  }
  moves_.end(ordinal, why);
  note_closed(why);
  fail_users_of(ordinal, why, false);
  std::lock_guard lock{slots_mutex_};
  auto& s = slots_[static_cast<std::size_t>(ordinal)];
  s.stop_wanted = true;
  act_on_quiet(s);
}

void runtime::act_on_quiet(slot& s) {
  if (s.holders != 0)
    return;
  if (std::exchange(s.reset_wanted, false))
    s.worker->request_reset();
  if (s.stop_wanted)
    s.worker->request_stop();
}

void runtime::hold(int ordinal) noexcept {
  std::lock_guard lock{slots_mutex_};
  ++slots_[static_cast<std::size_t>(ordinal)].holders;
}

void runtime::unhold(int ordinal) noexcept {
  std::lock_guard lock{slots_mutex_};
  auto& s = slots_[static_cast<std::size_t>(ordinal)];
  if (--s.holders == 0)
    act_on_quiet(s);
}

caf::error runtime::on_fault(lane& where, const caf::error& why) noexcept {
  return end_with_fault("device " + std::to_string(where.state().ordinal()), why);
}

caf::error runtime::end_with_fault(const std::string& seen, const caf::error& why) noexcept {
  // Only work in flight can have caused it. With several devices at work, the origin is unknown.
  auto origin = failure_of(why).value_or(failure{});
  std::vector<int> busy;
  for (auto& x : lanes())
    if (x->at_work() || x->state().acquired() != 0) // a user's stream may be at work
      busy.push_back(x->state().ordinal());
  origin.code = errc::device_fault; // also if only an event could not be recorded
  origin.device = busy.size() == 1 ? busy.front() : -1;
  if (busy.size() != 1) {
    origin.detail += origin.detail.empty() ? "" : "; ";
    origin.detail += "seen on " + seen + ", its origin is unknown: " + std::to_string(busy.size()) +
                     " devices were at work";
  }
  return end_everything(make_error(std::move(origin)));
}

caf::error runtime::end_everything(const caf::error& why) noexcept {
  auto all = lanes();
  {
    // A later caller returns the cause at once: by then all handles must be stale.
    std::lock_guard lock{end_mutex_};
    if (ended_)
      return end_cause_;
    ended_ = true;
    end_cause_ = why;
    backend_->abandon(why);
    for (auto& x : all)
      if (x->runs_cuda())
        x->state().keep_memory(); // users' deleters call CUDA as well
    admission_lock order;
    for (auto& x : all)
      x->state().close(device_phase::failed, why);
  }
  log(log_level::error, "the process cannot use its devices any more", why);
  note_end(why);
  note_closed(why);
  for (auto& x : all)
    x->abandon();
  deadlines_.for_each([&](operation& op) {
    if (op.needs_devices())
      op.fail(why);
  });
  return why;
}

void runtime::on_device_failed(lane& where, const caf::error& why) noexcept {
  moves_.end(where.state().ordinal(), why);
  note_end(why);
  note_closed(why);
  fail_users_of(where.state().ordinal(), why, false);
}

} // namespace troupe::detail
