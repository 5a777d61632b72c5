/// Part of class `lane`: opens its device, resets it, gets it back after a loss, and closes or
/// abandons it; also the streams and events that the lane makes on it.

#include "foundation/log.hpp"
#include "foundation/spin.hpp"
#include "lane/kept_result.hpp"
#include "lane/lane.hpp"
#include "lane/pinned_words.hpp"
#include "lane/staging.hpp"
#include "operation/admission_lock.hpp"
#include <troupe/error.hpp>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <ranges>
#include <utility>

namespace troupe::detail {

bool lane::come_up() {
  auto backoff = options_.open_backoff;
  for (int attempt = 1;; ++attempt) {
    auto error = note(open_device());
    if (!error) {
      publish();
      return true;
    }
    if (is_remote_)
      streams_.forget_streams(); // another worker does not know the old streams
    bool again = attempt < options_.open_attempts && code_of(error) != errc::device_fault;
    log(log_level::warning, again ? "cannot open a device; trying again" : "cannot open a device",
        error);
    state_->report_failed_attempt(error);
    if (!again) {
      state_->close(device_phase::failed, error);
      owner_.on_device_failed(*this, error);
      return false;
    }
    std::unique_lock lock{park_mutex_};
    parked_.store(true);
    park_condition_.wait_for(lock, backoff,
                             [this] { return stop_requested_.load() || abandoned_.load(); });
    parked_.store(false);
    if (stop_requested_.load() || abandoned_.load())
      return false;
    backoff *= 2;
  }
}

caf::error lane::open_device() {
  if (auto error = device_->bind(); error)
    return error;
  auto properties = device_->properties();
  if (!properties)
    return properties.error();
  properties_ = std::move(*properties);
  for (std::size_t i = 0; i < stream_table::lend_stream; ++i)
    if (auto error = streams_.make_stream(*device_, i); error)
      return error;
  if (auto error = streams_.make_collective_streams(*device_, 1); error)
    return error;
  if (!stager_)
    stager_ = std::make_unique<stager>([this] { wake(); });
  for (auto* ring : {&upload_ring_, &download_ring_})
    if (!*ring)
      *ring = std::make_unique<staging_ring>(*device_, options_.staging_bytes);
  if (auto error = take_over_memory(); error)
    return error;
  return open_memory();
}

/// A device in another process has its libraries there.
caf::error lane::open_memory() {
  return is_remote_
             ? device_->open_memory()
             : libraries_.open_memory(*device_, state_->ordinal(), stream(stream_kind::compute));
}

/// Keeps the memory that the device had before it was lost, if it had any and it can be kept.
caf::error lane::take_over_memory() {
  if (!keeps_memory())
    return {};
  auto error = device_->take_over();
  if (!error || code_of(error) == errc::worker_lost)
    return error;
  log(log_level::warning,
      "device " + std::to_string(state_->ordinal()) + " is back without its memory", error);
  auto why = state_->reason();
  if (!why) // it was handed over
    why = make_error({.code = errc::worker_lost,
                      .detail = "the device was handed over without its memory: " + describe(error),
                      .device = state_->ordinal()});
  {
    admission_lock lock;
    state_->close(device_phase::resetting, why);
  }
  owner_.on_memory_lost(*this, why);
  return {};
}

void lane::go_down() noexcept {
  drain_released();
  stager_.reset();
  static_cast<void>(note(upload_ring_->close()));
  static_cast<void>(note(download_ring_->close()));
  words_.reset();
  static_cast<void>(
      note(libraries_.close_memory(*device_))); // before the streams: states may use them
  for (auto event : events_)
    static_cast<void>(note(device_->destroy_event(event)));
  for (auto* s : streams_.made())
    if (s->is_ordered())
      static_cast<void>(note(device_->destroy_stream(s->stream)));
}

bool lane::serve_control() {
  if (stop_requested_.load(std::memory_order_relaxed) && !nothing_in_flight())
    if (const auto why = device_->loss()) { // there is no next generation
      leave_to_lost_process(why);
      return true;
    }
  if (revival_requested_.load(std::memory_order_relaxed)) {
    revival_requested_.store(false);
    if (away_.load() && state_->phase() == device_phase::resetting && device_->loss())
      revive();
    else // the request came late: another process has the device by now
      leave_nothing();
    return true;
  }
  if (serve_move())
    return true;
  if (!reset_requested_.load(std::memory_order_relaxed) || !nothing_in_flight() ||
      state_->is_lent() || has_lost_work())
    return false;
  reset_requested_.store(false);
  if (state_->phase() != device_phase::resetting)
    return true; // it was lost before it could be reset, and is open again
  // Operations that used its memory have failed by now, perhaps since this lane last looked. Drop
  // them, or they would get into the streams of the next generation.
  take_inbox();
  drop_failed();
  if (nothing_in_flight())
    reset_now();
  else
    reset_requested_.store(true); // a dropped release waits for its user's stream
  return true;
}

bool lane::has_lost_work() const noexcept {
  admission_lock lock;
  return state_->has_lost_work(lock);
}

void lane::reset_now() {
  drain_released();
  auto error = libraries_.close_memory(*device_);
  if (!error)
    error = open_memory();
  if (code_of(error) == errc::worker_lost)
    return; // its owner requests a revival
  if (error) {
    error = note(error);
    log(log_level::error, "a device could not be reset", error);
    state_->close(device_phase::failed, error);
    owner_.on_device_failed(*this, error);
    abandoned_.store(true);
    return;
  }
  publish();
}

void lane::publish() {
  bool was_away = false;
  {
    admission_lock lock; // no report of a loss comes in between
    was_away = away_.exchange(false);
    if (state_->live_generation() != 0)
      state_->resume();
    else
      state_->publish();
  }
  if (was_away)
    owner_.on_device_back(*this);
  if (device_->loss()) // before it was published: its owner may have ignored the loss
    owner_.on_device_lost(*this);
}

/// Takes all parts out of the streams, and fails them: nothing is known of their work any more.
std::vector<part*> lane::take_from_streams(const caf::error& why) noexcept {
  std::vector<part*> result;
  for (auto* s : streams_.made()) {
    if (s->continuing != nullptr) {
      auto& p = *std::exchange(s->continuing, nullptr);
      if (p.tenant != nullptr)
        --p.tenant->in_flight;
      --continuing_;
      note_left();
      result.push_back(&p);
    }
    for (auto* p : s->in_flight) {
      leave_flight(*p);
      result.push_back(p);
    }
    s->in_flight.clear();
  }
  issuing_.store(false);
  for (auto* p : result)
    p->of->fail(why);
  return result;
}

/// Takes all parts out of the streams. They are over when the work of the lost process is, since it
/// may use memory that is kept, and that of other devices. What is known to be done is over now.
void lane::leave_to_lost_process(const caf::error& why) noexcept {
  lost_process x;
  {
    admission_lock lock;
    x.until = state_->lost_until(lock);
  }
  x.work_is_over = device_->lost_work();
  const auto done = known_done();
  for (auto* p : take_from_streams(why)) {
    if (done.contains(p)) {
      keep_result(*p, state_->ordinal());
      finish(*p, nanoseconds(clock::now()));
      continue;
    }
    event_view event;
    {
      flag_lock lock{p->event_guard}; // another lane may be about to wait for it
      std::swap(event, p->event);
    }
    if (event.native != nullptr && !p->shares_event)
      static_cast<void>(note(device_->destroy_event(event)));
    set_recorded(*p); // no lane waits for it: what must come behind it is held in admission
    if (!p->is_placeholder)
      p->of->on_part_done(*p); // on the lane: it gives events and memory of the lane back
    record_.over(*p, !p->is_placeholder, state_->generation(), nanoseconds(clock::now()));
    x.parts.push_back(p);
  }
  owner_.on_lost_process(*this, std::move(x), why);
}

/// Ends what the owner has noted of a process that was lost without any work, unless the device is
/// lost again: then `revive` does.
void lane::leave_nothing() noexcept {
  lost_process x{.work_is_over = [] { return true; }};
  {
    admission_lock lock;
    if (loss(lock) || !state_->has_lost_work(lock))
      return;
    x.until = state_->lost_until(lock);
  }
  owner_.on_lost_process(*this, std::move(x), {});
}

/// Returns the parts in the streams whose work was done before the loss: their events tell that, or
/// those of later parts, which have waited for them.
std::unordered_set<const part*> lane::known_done() noexcept {
  std::unordered_set<const part*> result;
  for (bool again = true; again;) {
    const auto before = result.size();
    for (auto* s : streams_.made()) {
      bool done = false;
      for (auto* p : s->in_flight | std::views::reverse) {
        done = (done && s->is_ordered()) || result.contains(p) || is_known_done(*p);
        if (!done)
          continue;
        result.insert(p);
        for (auto& x : p->predecessors)
          result.insert(x.at);
      }
    }
    again = result.size() != before;
  }
  return result;
}

/// Returns whether the event of a part of a lost process tells that its work was done.
bool lane::is_known_done(const part& p) noexcept {
  if (p.event.native == nullptr || !p.recorded.load())
    return false;
  const auto done = device_->query(p.event);
  return done && *done;
}

/// Opens a lost device again. Its streams and events are gone with the process that had them, and
/// its memory, if that cannot be kept: nothing is given back.
void lane::revive() {
  reset_requested_.store(false);
  auto why = state_->reason();
  if (!why)
    why = device_->loss();
  stager_.reset(); // no thread uses the rings any more
  leave_words();
  take_inbox();
  leave_to_lost_process(why);
  streams_.forget_streams();
  drop_failed();
  drain_released();
  const auto rings = leave_rings();
  const auto events = std::exchange(events_, {});
  if (!come_up())
    give_up_device();
  if (move_requested_.exchange(false))
    owner_.on_moved(*this, why);
  // Not before: it takes time, and requests wait. To free the rings takes longer.
  forget(events);
  for (auto& ring : rings)
    if (auto free = ring->let_go())
      owner_.run_later(std::move(free));
    else
      static_cast<void>(note(ring->close()));
}

// A lost process may still write to pinned memory. Where its memory is kept, it is known how long:
// the lane does not use what was in use until then. Where it is not kept, the lane allocates anew.

void lane::leave_words() {
  if (!keeps_memory())
    words_.reset();
  else if (words_)
    words_->leave(device_->lost_work());
}

/// Returns the rings that are not to be used any more.
std::vector<std::unique_ptr<staging_ring>> lane::leave_rings() {
  std::vector<std::unique_ptr<staging_ring>> result;
  for (auto* ring : {&upload_ring_, &download_ring_})
    if (!keeps_memory() || !(*ring)->leave(device_->lost_work()))
      result.push_back(std::move(*ring));
  return result;
}

/// Destroys free events of a former process: else what is left of it would be kept.
void lane::forget(const std::vector<event_view>& events) noexcept {
  for (auto event : events)
    static_cast<void>(note(device_->destroy_event(event)));
}

/// The device does not come back from being away.
void lane::give_up_device() noexcept {
  abandoned_.store(true);
  {
    admission_lock lock;
    away_.store(false);
  }
  owner_.on_device_back(*this); // it takes what was held, and drops it
}

/// Does what `request_move` asks for, if it can be done now or never. Returns whether it did.
bool lane::serve_move() {
  if (!move_requested_.load(std::memory_order_relaxed) || is_lost())
    return false;
  const bool is_ready = state_->phase() == device_phase::ready; // else it is reset or ends
  if (is_ready && !(waiting_.empty() && nothing_in_flight() && inbox_.load() == nullptr))
    return false;
  move_requested_.store(false);
  owner_.on_moved(*this, move_now());
  return true;
}

/// Moves the device to its spare. All its work is done, and its memory stays.
caf::error lane::move_now() {
  {
    admission_lock lock;
    if (state_->phase() != device_phase::ready || !away_)
      return state_->reason();
    state_->leave_process();
  }
  auto error = state_->acquired() == 0
                   ? device_->move_to_spare()
                   : make_error({.code = errc::buffer_acquired,
                                 .detail = "its worker's program has claimed memory meanwhile",
                                 .device = state_->ordinal()});
  if (error) {
    stay();
    return error;
  }
  streams_.forget_streams();
  drain_released();
  forget(std::exchange(events_, {}));
  if (come_up())
    return {};
  give_up_device();
  return state_->reason();
}

/// The device stays in its process after all.
void lane::stay() {
  {
    admission_lock lock; // no report of a loss comes in between
    away_.store(false);
    state_->stay_in_process();
  }
  owner_.on_device_back(*this);
  if (device_->loss()) // before: its owner may have ignored the loss
    owner_.on_device_lost(*this);
}

bool lane::drain_released() {
  if (!state_->has_released())
    return false;
  for (auto& x : state_->take_released()) {
    if (x.deleter)
      state_->hand_back(std::move(x));
    else if (x.generation == state_->generation() && !abandoned_.load())
      static_cast<void>(note(device_->deallocate(x.address, stream(stream_kind::memory))));
  }
  return true;
}

void lane::abandon_now() noexcept {
  take_inbox();
  // An operation that has not failed yet must not succeed now.
  auto why = state_->reason();
  if (!why)
    why = make_error(errc::unavailable, "the device ended");
  for (auto& s : streams_.all()) {
    if (s.continuing != nullptr) {
      given_up_.push_back(s.continuing->of->used_by_streams());
      if (s.continuing->tenant != nullptr)
        --s.continuing->tenant->in_flight;
      waiting_.push_back(std::exchange(s.continuing, nullptr));
      --continuing_;
    }
    for (auto* p : s.in_flight) {
      leave_flight(*p);
      {
        flag_lock lock{p->event_guard}; // another lane may be about to wait for it
        p->event = {};
      }
      p->of->fail(why);
      given_up_.push_back(p->of->used_by_streams());
      finish(*p, nanoseconds(clock::now()));
    }
    s.in_flight.clear();
  }
  while (!waiting_.empty()) {
    auto& p = *waiting_.front();
    waiting_.pop_front();
    p.of->fail(why);
    skip(p);
  }
  for (auto& x : state_->take_released())
    state_->hand_back(std::move(x));
  libraries_.abandon();
}

caf::expected<std::shared_ptr<std::int32_t>> lane::take_word() {
  if (words_)
    if (auto word = pinned_words::take(words_))
      return word;
  auto memory = device_->allocate_pinned(pinned_words::size_bytes);
  if (!memory)
    return memory.error();
  auto free = device_->pinned_deleter();
  if (!free)
    free = [device = device_](void* x) { return device->deallocate_pinned(x); };
  words_ = std::make_shared<pinned_words>(*memory, std::move(free));
  return pinned_words::take(words_);
}

caf::error lane::provide_streams() {
  return note(streams_.make_collective_streams(*device_, tenants_.load()));
}

caf::error lane::provide_peer_stream(int peer) {
  return provide_late(stream_table::first_peer + stream_table::link_of(peer));
}

caf::error lane::provide_stream_of(const part& p) {
  if (p.stream != stream_kind::lend && p.stream != stream_kind::peer)
    return {};
  const bool lends = p.stream == stream_kind::lend;
  if (lends && nothing_before(p))
    return {}; // it needs no stream
  auto error = lends ? provide_late(stream_table::lend_stream) : provide_peer_stream(p.peer);
  auto& who = *streams_.tenant_of(p);
  if (who.in_flight == 0)
    who.stream = error   ? stream_table::stand_in
                 : lends ? stream_table::lend_stream
                         : streams_.choose_peer_stream(p);
  return error;
}

caf::error lane::provide_late(std::size_t index) {
  if (streams_.is_made(index))
    return {};
  return note(streams_.make_late(*device_, index));
}

caf::expected<event_view> lane::take_event() {
  if (events_.empty())
    return device_->create_event();
  auto event = events_.back();
  events_.pop_back();
  return event;
}

void lane::retire(event_view event) noexcept {
  if (event.native != nullptr)
    events_.push_back(event);
}

} // namespace troupe::detail
