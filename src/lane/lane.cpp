/// Part of class `lane`: its life cycle, its thread's loop, and errors of calls into the backend.

#include "lane/lane.hpp"

#include "foundation/log.hpp"
#include "foundation/never_destroyed.hpp"
#include "foundation/spin.hpp"
#include "foundation/start_thread.hpp"
#include "lane/retired_operations.hpp"
#include "lane/staging.hpp"
#include "operation/admission_lock.hpp"
#include <troupe/error.hpp>

#include <chrono>
#include <utility>

namespace troupe::detail {

namespace {

/// The poll interval with work in flight, if the backend sends no signal and the lane may not spin.
constexpr std::chrono::microseconds poll_interval{50};
/// How long a lane that relies on host functions sleeps at most: they are not called on error.
constexpr std::chrono::milliseconds host_func_check{10};

} // namespace

const device_state& device_state_of(const lane& x) noexcept { return x.state(); }

lane::lane(std::shared_ptr<device_state> state, std::unique_ptr<backend_device> device,
           const lane_options& options, lane_owner& owner)
    : state_(std::move(state)), device_(std::move(device)), runs_cuda_(device_->runs_cuda()),
      is_remote_(device_->is_remote()), options_(options), owner_(owner) {}

lane::~lane() {
  if (thread_.joinable())
    leave_thread(std::move(thread_)); // abandoned (`join_within`)
  stager_.reset();                    // first: its jobs wake this lane
}

caf::error lane::start() {
  state_->set_wake([weak = weak_from_this()] {
    if (auto self = weak.lock())
      self->wake();
  });
  device_->set_completion_signal([weak = weak_from_this()] {
    if (auto self = weak.lock())
      self->wake();
  });
  device_->set_loss_signal([weak = weak_from_this()](const caf::error&) {
    if (auto self = weak.lock())
      self->owner_.on_device_lost(*self);
  });
  std::promise<void> over;
  over_ = over.get_future();
  return start_thread(
      thread_,
      [self = shared_from_this(), over = std::move(over)]() mutable {
        self->run();
        self.reset();
        over.set_value();
      },
      "for a device's lane");
}

bool lane::submit(locked, part& p) noexcept {
  if (closed_ || (away_ && p.of->failed())) {
    set(expected_, expected_.load(std::memory_order_relaxed) - 1);
    return false;
  }
  p.next = inbox_.load(std::memory_order_relaxed);
  if (p.next == nullptr) { // the lane leaves it alone: a store does not wait for the cache line
    inbox_.store(&p, std::memory_order_release);
    return true;
  }
  while (!inbox_.compare_exchange_weak(p.next, &p, std::memory_order_release,
                                       std::memory_order_relaxed)) {
  }
  return true;
}

void lane::notify() noexcept {
  std::lock_guard lock{park_mutex_};
  park_condition_.notify_one();
}

void lane::wake() noexcept {
  signalled_.store(true);
  if (parked_.load())
    notify();
}

void lane::wake_to_work(std::span<const part> parts) noexcept {
  std::atomic_thread_fence(std::memory_order_seq_cst); // either the lanes see their work, or this
  for (auto& p : parts)                                // thread sees that they are about to sleep
    if (p.on->parked_.load(std::memory_order_relaxed))
      p.on->wake();
}

void lane::wake(std::span<const part> parts) noexcept {
  for (auto& p : parts)
    p.on->signalled_.store(true, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (auto& p : parts)
    if (p.on->parked_.load(std::memory_order_relaxed))
      p.on->notify();
}

caf::expected<user_event> lane::mark_user(stream_view user) noexcept {
  std::shared_ptr<backend_device> device;
  {
    admission_lock lock;
    if (!closed_)
      device = device_;
  }
  if (!device)
    return make_error(errc::unavailable, "the device ended");
  auto event = device->record_user(user);
  if (!event)
    if (auto why = failure_of(event.error())) {
      why->device = state_->ordinal();
      return make_error(std::move(*why));
    }
  return event;
}

void lane::request_reset() noexcept {
  reset_requested_.store(true);
  wake();
}

void lane::request_revival() noexcept {
  revival_requested_.store(true);
  wake();
}

void lane::request_move() noexcept {
  move_requested_.store(true);
  wake();
}

void lane::request_stop() noexcept {
  if (!stop_requested_.load()) // from then on the lane may end and release its device
    device_->interrupt();
  stop_requested_.store(true);
  wake();
}

void lane::abandon() noexcept {
  abandoned_.store(true);
  wake();
}

bool lane::join_within(fair_limit& limit) noexcept {
  if (!thread_.joinable())
    return true;
  while (over_.wait_until(limit.next()) != std::future_status::ready)
    if (limit.over())
      return false;
  // After a kernel has failed, CUDA may wait forever at the end of a thread that has used its own
  // stream (cudaStreamPerThread). Connecting a communicator uses it, and users' launches may.
  if (runs_cuda_ && abandoned_.load())
    leave_thread(std::move(thread_));
  else
    thread_.join();
  return true;
}

// -- the thread

void lane::run() noexcept {
  forbid_blocking("a lane");
  if (!come_up())
    abandoned_.store(true);
  const auto count_look = [this] {
    looks_.store(looks_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  };
  while (!ends_now()) {
    bool worked = false;
    count_look();
    const auto left = left_.load(std::memory_order_relaxed);
    if (abandoned_.load(std::memory_order_relaxed)) {
      worked = !waiting_.empty() || !nothing_in_flight() || has_input();
      abandon_now();
    } else {
      worked |= take_inbox();
      worked |= proceed_continuing();
      worked |= issue_ready();
      worked |= poll();
      worked |= drain_released();
      worked |= serve_control();
    }
    if (left_.load(std::memory_order_relaxed) != left)
      process_room.notify();
    count_look();
    worked_ |= worked;
    if (!worked)
      idle();
  }
  leave_nothing();
  process_retired.free_all();
  bool orderly = !abandoned_.load();
  if (orderly)
    go_down();
  state_->end_of_lane();
  if (orderly) {
    device_.reset();
    return;
  }
  for (auto* ring : {&upload_ring_, &download_ring_})
    if (*ring && (*ring)->has_memory())
      given_up_.emplace_back(std::move(*ring));
  if (!given_up_.empty())
    // It is unknown when its streams stop. They would stop with the device, but pinned memory keeps
    // the device.
    keep_forever(std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(given_up_)));
}

bool lane::ends_now() noexcept {
  auto nothing_left = [this] { // the thread that requested the end is done with the device
    return stop_requested_.load(std::memory_order_acquire) && waiting_.empty() &&
           nothing_in_flight() && !has_input() && (abandoned_.load() || !state_->is_lent());
  };
  if (!nothing_left())
    return false;
  admission_lock lock;
  closed_ = nothing_left();
  return closed_;
}

bool lane::has_input() const noexcept { return inbox_.load() != nullptr || state_->has_released(); }

bool lane::take_inbox() noexcept {
  if (inbox_.load(std::memory_order_relaxed) == nullptr)
    return false;
  auto* p = inbox_.exchange(nullptr, std::memory_order_acquire);
  // The inbox is a stack: the newest part comes first.
  part* in_order = nullptr;
  while (p != nullptr) {
    auto* next = p->next;
    p->next = in_order;
    in_order = p;
    p = next;
  }
  for (; in_order != nullptr; in_order = in_order->next)
    waiting_.push_back(in_order);
  return true;
}

bool lane::nothing_continues() const noexcept { return continuing_ == 0; }

bool lane::nothing_in_flight() const noexcept { return in_flight() == 0 && nothing_continues(); }

void lane::idle() {
  bool busy = !abandoned_.load() && !nothing_in_flight();
  const bool users_work = streams_.users_parts() != 0; // the backend does not signal its end
  bool must_poll = busy && (!device_->signals_completion() || users_work);
  if (std::exchange(worked_, false))
    spin_end_ = clock::now() + *options_.spin;
  if (may_spin() && must_poll)
    return; // a query takes long enough
  if (may_spin() && clock::now() < spin_end_) {
    for (int i = 0; i < 8 && !signalled_.load(std::memory_order_relaxed) && !has_input(); ++i)
      pause();
    if (signalled_.load(std::memory_order_relaxed)) // first a load: other threads write this word
      signalled_.exchange(false);
    return;
  }
  process_retired.free_all();
  std::unique_lock lock{park_mutex_};
  parked_.store(true);
  auto awake = [this] { return signalled_.load() || inbox_.load() != nullptr; };
  if (must_poll && options_.completion == completion_strategy::host_func && !users_work)
    park_condition_.wait_for(lock, host_func_check, awake);
  else if (must_poll)
    park_condition_.wait_for(lock, poll_interval, awake);
  else
    park_condition_.wait(lock, awake);
  parked_.store(false);
  signalled_.exchange(false);
}

// -- errors of calls into the backend

/// Returns whether nothing is issued until the next generation: the device is lost.
bool lane::is_lost() const noexcept {
  if (!is_remote_ || !device_->loss())
    return false;
  const auto phase = state_->phase();
  return phase == device_phase::ready || phase == device_phase::resetting;
}

/// Returns whether `error` is the loss of this device, which the owner reports after it has closed
/// the device. A requester can then retry at once: the retry waits for the next generation.
bool lane::owner_tells(const caf::error& error) const noexcept {
  return code_of(error) == errc::worker_lost && is_lost();
}

/// Returns the error for operations when a call into the backend gave `error`.
caf::error lane::note(const caf::error& error) noexcept {
  if (!error)
    return {};
  if (code_of(error) == errc::device_fault)
    return note_fault(error);
  log(log_level::debug, "a call into the backend failed", error);
  return error;
}

/// Reports a fault. Operations do not get the error that one lane saw: all get the one cause.
caf::error lane::note_fault(const caf::error& error) noexcept {
  if (code_of(error) == errc::worker_lost)
    return error; // of the device alone; its owner is told separately
  if (!abandoned_.load())
    return owner_.on_fault(*this, error);
  auto reason = state_->reason(); // the owner may be gone
  return reason ? reason : error;
}

/// Adds the fields that the backend could not know (INV-10).
caf::error lane::in_full(const part& p, const caf::error& error) const {
  auto x = failure_of(error);
  if (!x || severity_of(x->code) == severity::process) // its origin is unknown here
    return error;
  if (x->verb.empty())
    x->verb = p.of->verb();
  if (x->operation == 0)
    x->operation = p.of->number();
  if (x->device < 0)
    x->device = state_->ordinal();
  if (x->generation == 0)
    x->generation = state_->generation();
  if (x->rank < 0)
    x->rank = p.rank;
  return make_error(std::move(*x));
}

} // namespace troupe::detail
