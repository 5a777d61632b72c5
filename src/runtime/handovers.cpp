#include "runtime/handovers.hpp"

#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include "operation/device_state.hpp"
#include "runtime/runtime.hpp"

#include <algorithm>
#include <utility>

namespace troupe::detail {

namespace {

/// How often to look whether a handover can begin.
constexpr std::chrono::milliseconds begin_tick{1};
/// How often to look whether the device's process is at work: requests wait meanwhile.
constexpr std::chrono::microseconds drain_tick{200};

caf::error refused(int device, errc code, std::string detail) {
  return refusal("hand_over", device, code, std::move(detail));
}

caf::error system_ended(int device) {
  return refused(device, errc::unavailable, "the actor system ended");
}

/// Returns why the device cannot leave its process now.
caf::error check_device(const device_state& x) {
  if (x.phase() != device_phase::ready)
    return refused(x.ordinal(), errc::unavailable, device_is(x.phase()));
  if (x.acquired() != 0)
    return refused(x.ordinal(), errc::buffer_acquired,
                   "other processes hold memory of the device, which its next process would not");
  if (x.has_borrowed())
    return refused(x.ordinal(), errc::buffer_acquired,
                   "handles refer to memory of its worker's program, which ends with the worker");
  return {};
}

} // namespace

// -- handover_request

bool handover_request::begin() noexcept {
  std::lock_guard lock{early_mutex_};
  begun_ = !ended_early_;
  return begun_;
}

void handover_request::set_obstacle(const caf::error& what) {
  std::lock_guard lock{early_mutex_};
  obstacle_ = what;
}

void handover_request::end_early(early_end how) noexcept {
  auto why = early_failure(how);
  why.device = device_;
  {
    std::lock_guard lock{early_mutex_};
    ended_early_ = true;
    if (begun_)
      why.detail += "; the handover continues";
    else
      why.detail += (obstacle_ ? "; it waited, because " + troupe::describe(obstacle_) : "") +
                    "; nothing has changed";
  }
  answer(make_error(std::move(why)));
}

// -- handovers

void handovers::add_listener(std::weak_ptr<handover_listener> x) {
  std::lock_guard lock{mutex_};
  std::erase_if(listeners_, [](auto& old) { return old.expired(); });
  listeners_.push_back(std::move(x));
}

std::vector<std::shared_ptr<handover_listener>> handovers::listeners() {
  std::vector<std::shared_ptr<handover_listener>> result;
  std::lock_guard lock{mutex_};
  for (auto& x : listeners_)
    if (auto there = x.lock())
      result.push_back(std::move(there));
  return result;
}

caf::error handovers::check_start(const lane& on) const {
  const auto device = on.state().ordinal();
  if (!owner_.backend().allows_reset())
    return refused(device, errc::not_supported, "only the parent process can hand the device over");
  if (!on.is_remote())
    return refused(device, errc::not_supported,
                   "the device is in this process: only devices in workers can be handed over");
  return check_device(on.state());
}

std::shared_ptr<operation_of<std::uint64_t>>
handovers::start(const std::shared_ptr<lane>& on, std::chrono::steady_clock::time_point deadline) {
  const auto device = on->state().ordinal();
  const auto x = std::make_shared<handover>();
  x->request = std::make_shared<handover_request>(device);
  x->request->deadline = deadline;
  x->on = on;
  auto why = deadline <= clock::now()
                 ? refused(device, errc::deadline_exceeded, "its deadline was over before it began")
                 : check_start(*on);
  if (!why) {
    std::lock_guard lock{mutex_};
    if (!all_.emplace(device, x).second)
      why = refused(device, errc::unavailable, "the device is being handed over already");
  }
  if (why) {
    x->request->answer(std::move(why));
    return x->request;
  }
  owner_.deadlines().add(*x->request);
  x->request->on_answer([weak = owner_.weak_from_this(), of = std::weak_ptr{x->request}] {
    const auto owner = weak.lock();
    if (const auto request = of.lock(); owner && request)
      owner->deadlines().remove(*request);
  });
  owner_.workers().run([weak = owner_.weak_from_this(), x] {
    if (const auto owner = weak.lock())
      owner->moves().prepare(x);
  });
  return x->request;
}

void handovers::prepare(const entry& x) {
  const auto device = x->on->state().ordinal();
  if (const auto error = owner_.backend().prepare_move(device)) {
    auto why = failure_of(error).value_or(failure{.code = errc::unavailable});
    why.verb = "hand_over";
    why.device = device;
    return finish(x, make_error(std::move(why)));
  }
  x->at = step::waits;
  look_soon(x, {});
}

void handovers::look_soon(const entry& x, std::chrono::nanoseconds pause) {
  const auto id =
      owner_.deadlines().call_at(clock::now() + pause, [weak = owner_.weak_from_this(), x] {
        if (const auto owner = weak.lock())
          owner->moves().look(x);
      });
  if (id == 0)
    finish(x, system_ended(x->on->state().ordinal()));
}

void handovers::look(const entry& x) {
  if (find(x->on->state().ordinal()) != x)
    return; // it has ended
  if (x->at == step::waits)
    try_begin(x);
  else if (x->at == step::drains)
    drain(x);
}

void handovers::try_begin(const entry& x) {
  const auto device = x->on->state().ordinal();
  if (x->request->completed()) // it has ended early
    return finish(x, {});
  owner_.admissions().drain(); // earlier calls come before
  const auto all = listeners();
  const auto why = make_error({.code = errc::device_reset,
                               .detail = "the device is handed over to its spare",
                               .device = device});
  caf::error failed;
  caf::error obstacle;
  {
    admission_lock lock;
    failed = check_device(x->on->state());
    for (auto i = all.begin(); i != all.end() && !failed && !obstacle; ++i)
      obstacle = (*i)->check_handover(lock, device);
    if (!failed && !obstacle && x->request->begin()) {
      x->begun = clock::now();
      x->at = step::drains;
      x->on->go_away(lock, operation::last_position(lock));
      for (auto& listener : all)
        listener->begin_handover(lock, device, why);
    }
  }
  if (failed) {
    const auto reason = x->on->state().reason(); // it was lost or reset just now
    return finish(x, reason ? reason : failed);
  }
  if (obstacle)
    x->request->set_obstacle(obstacle);
  if (x->at == step::waits)
    return look_soon(x, begin_tick);
  for (auto& listener : all)
    listener->leave_process(device, why);
  drain(x);
}

void handovers::drain(const entry& x) {
  const auto& state = x->on->state();
  if (state.phase() > device_phase::resetting) // all devices have ended
    return finish(x, state.reason());
  const auto device = state.ordinal();
  if (!std::ranges::all_of(listeners(), [&](auto& user) { return user->has_left(device); }))
    return look_soon(x, drain_tick);
  std::lock_guard lock{mutex_}; // a loss ends the handover before the lane forgets the request
  if (const auto i = all_.find(device); i != all_.end() && i->second == x) {
    x->at = step::moves;
    x->on->request_move();
  }
}

void handovers::on_moved(int device, const caf::error& why) {
  const auto x = find(device);
  if (!x || x->at != step::moves)
    return;
  // Not on the lane, since listeners send messages to processes.
  const auto id =
      owner_.deadlines().call_at(clock::now(), [weak = owner_.weak_from_this(), x, why] {
        if (const auto owner = weak.lock())
          owner->moves().finish(x, why);
      });
  if (id == 0)
    finish(x, system_ended(device));
}

void handovers::end(int device, const caf::error& why) {
  if (const auto x = find(device))
    finish(x, why);
}

void handovers::finish(const entry& x, const caf::error& why) {
  if (!take(x))
    return;
  auto& state = x->on->state();
  const bool had_begun = x->at >= step::drains;
  if (had_begun)
    for (auto& listener : listeners())
      listener->end_handover(state.ordinal(), why);
  owner_.admissions().go_on();
  if (had_begun && !why) {
    x->request->value = state.incarnation();
    const auto took = std::chrono::ceil<std::chrono::microseconds>(clock::now() - x->begun);
    log(log_level::info, "device " + std::to_string(state.ordinal()) +
                             " was handed over to its spare in " + std::to_string(took.count()) +
                             " us, incarnation " + std::to_string(x->request->value));
  }
  x->request->answer(why);
}

bool handovers::take(const entry& x) {
  std::lock_guard lock{mutex_};
  const auto i = all_.find(x->on->state().ordinal());
  if (i == all_.end() || i->second != x)
    return false;
  all_.erase(i);
  return true;
}

handovers::entry handovers::find(int device) {
  std::lock_guard lock{mutex_};
  const auto i = all_.find(device);
  return i == all_.end() ? nullptr : i->second;
}

} // namespace troupe::detail
