#include "lane/lane.hpp"

#include "foundation/keep_forever.hpp"
#include "foundation/log.hpp"
#include "foundation/spin.hpp"
#include "foundation/start_thread.hpp"
#include "lane/retired_operations.hpp"
#include "lane/staging.hpp"
#include "operation/order.hpp"

#include <algorithm>
#include <cstdint>
#include <ranges>
#include <set>
#include <thread>
#include <utility>

namespace troupe::detail {

namespace {

/// The poll interval with work in flight, if the backend sends no signal and the lane may not spin.
constexpr std::chrono::microseconds poll_interval{50};
/// How long a lane that relies on host functions sleeps at most: they are not called on error.
constexpr std::chrono::milliseconds host_func_check{10};

/// How many operations one event query settles at most.
constexpr std::size_t poll_batch = 8;
/// The oldest event is queried after an event further back was not done for this long.
constexpr std::chrono::microseconds poll_patience{100};
/// How long a completed operation may wait until it is settled. The next request may come at once,
/// so this work is done while the device works on that request, or after this time.
constexpr std::chrono::microseconds settle_patience{10};
/// How many parts are issued before the lane polls for completions again.
constexpr int issue_batch = 16;
/// From this size on, copies to several devices go one behind the other. Smaller ones gain nothing.
constexpr std::uint64_t long_copy_bytes = 1 << 20;

std::int64_t nanoseconds(clock::time_point x) { return x.time_since_epoch().count(); }

/// Returns whether two copies must keep their order.
bool touch(const peer_copy& a, const peer_copy& b) noexcept {
  auto overlap = [](const void* x, std::size_t x_bytes, const void* y, std::size_t y_bytes) {
    auto begin = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
    return begin(x) < begin(y) + y_bytes && begin(y) < begin(x) + x_bytes;
  };
  return overlap(a.target, a.size_bytes, b.target, b.size_bytes) ||
         overlap(a.target, a.size_bytes, b.source, b.size_bytes) ||
         overlap(a.source, a.size_bytes, b.target, b.size_bytes);
}

/// Returns whether `x` and all work before it are over.
bool passed(const part& x) noexcept { return x.over() && !x.dropped(); }

/// Returns the predecessors that replace `x`, if `x` is dropped.
std::vector<predecessor> behind_dropped(const predecessor& x) {
  std::vector<predecessor> result;
  flag_lock lock{x.at->event_guard};
  if (x.at->dropped())
    for (auto& y : x.at->predecessors)
      if (y.memory == x.memory && !passed(*y.at))
        result.push_back(y);
  return result;
}

} // namespace

const device_state& device_state_of(const lane& x) noexcept { return x.state(); }

lane::lane(std::shared_ptr<device_state> state, std::unique_ptr<backend_device> device,
           const lane_options& options, lane_owner& owner)
    : state_(std::move(state)), device_(std::move(device)), runs_cuda_(device_->runs_cuda()),
      is_remote_(device_->is_remote()), options_(options), owner_(owner) {
  forget_late();
}

lane::~lane() {
  if (thread_.joinable())
    thread_.detach(); // abandoned (`join_within`)
  stager_.reset();    // first: its jobs wake this lane
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
  device_->set_loss_signal([weak = weak_from_this()](const caf::error& why) {
    if (auto self = weak.lock())
      self->owner_.on_device_lost(*self, why);
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

bool lane::submit(part& p) noexcept {
  if (closed_ || (away_ && p.of->failed() && !p.promised)) {
    set(expected_, expected_.load(std::memory_order_relaxed) - 1);
    return false;
  }
  newest_.store(p.of, std::memory_order_relaxed);
  newest_needs_.store(p.needs, std::memory_order_relaxed);
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

void lane::request_reset() noexcept {
  reset_requested_.store(true);
  wake();
}

void lane::request_revival() noexcept {
  revival_requested_.store(true);
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
    thread_.detach();
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
      worked = !waiting_.empty() || !late_.empty() || !nothing_in_flight() || has_input();
      abandon_now();
    } else {
      worked |= take_inbox();
      worked |= proceed_continuing();
      worked |= issue_ready();
      worked |= settle_late();
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
    return stop_requested_.load(std::memory_order_acquire) && waiting_.empty() && late_.empty() &&
           nothing_in_flight() && !has_input() && (abandoned_.load() || !state_->is_lent());
  };
  if (!nothing_left())
    return false;
  std::lock_guard lock{order_mutex()};
  closed_ = nothing_left();
  return closed_;
}

bool lane::come_up() {
  auto backoff = options_.open_backoff;
  for (int attempt = 1;; ++attempt) {
    auto error = note(open_device());
    if (!error) {
      set_away(false);
      publish();
      return true;
    }
    if (is_remote_)
      forget_streams(); // another worker does not know the old streams
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
  for (std::size_t i = 0; i < lend_stream; ++i)
    if (auto error = make_stream(i); error)
      return error;
  if (auto error = make_collective_streams(1); error)
    return error;
  if (!stager_)
    stager_ = std::make_unique<stager>([this] { wake(); });
  if (!upload_ring_) {
    upload_ring_ = std::make_unique<staging_ring>(*device_, options_.staging_bytes);
    download_ring_ = std::make_unique<staging_ring>(*device_, options_.staging_bytes);
  }
  return device_->open_memory();
}

caf::error lane::make_stream(std::size_t index) {
  auto& s = streams_[index];
  if (s.stream.native != nullptr)
    return {};
  auto stream = device_->create_stream();
  if (!stream)
    return stream.error();
  s.stream = *stream;
  made_.push_back(&s);
  return {};
}

caf::error lane::make_collective_streams(std::size_t number) {
  for (; collectives_made_ < std::min(number, collective_streams); ++collectives_made_)
    if (auto error = make_stream(first_collective + collectives_made_); error)
      return error;
  return {};
}

caf::error lane::provide_streams() { return note(make_collective_streams(tenants_.load())); }

caf::error lane::provide_peer_stream(int peer) { return provide_late(first_peer + link_of(peer)); }

caf::error lane::provide_stream_of(const part& p) {
  if (p.stream != stream_kind::lend && p.stream != stream_kind::peer)
    return {};
  const bool lends = p.stream == stream_kind::lend;
  if (lends && nothing_before(p))
    return {}; // it needs no stream
  auto error = lends ? provide_late(lend_stream) : provide_peer_stream(p.peer);
  auto& who = *tenant_of(p);
  if (who.in_flight == 0)
    who.stream = error ? stand_in : lends ? lend_stream : choose_peer_stream(p);
  return error;
}

caf::error lane::provide_late(std::size_t index) {
  if (streams_[index].stream.native != nullptr)
    return {};
  // CUDA assigns its queues to streams in turn: make the streams of kernels first.
  if (auto error = make_collective_streams(collective_streams); error)
    return note(error);
  return note(make_stream(index));
}

void lane::go_down() noexcept {
  drain_released();
  stager_.reset();
  static_cast<void>(note(upload_ring_->close()));
  static_cast<void>(note(download_ring_->close()));
  for (auto event : events_)
    static_cast<void>(note(device_->destroy_event(event)));
  for (auto* s : made_)
    static_cast<void>(note(device_->destroy_stream(s->stream)));
  static_cast<void>(note(device_->close_memory()));
}

bool lane::serve_control() {
  if (stop_requested_.load(std::memory_order_relaxed) && !nothing_in_flight())
    if (const auto why = device_->loss()) { // there is no next generation
      lose_streams(why);
      return true;
    }
  if (revival_requested_.load(std::memory_order_relaxed)) {
    revival_requested_.store(false);
    if (device_->loss()) // else it was lost while it was opened, and is open by now
      revive();
    return true;
  }
  if (!reset_requested_.load(std::memory_order_relaxed) || !nothing_in_flight() ||
      state_->is_lent())
    return false;
  reset_requested_.store(false);
  if (state_->phase() != device_phase::resetting)
    return true; // it was lost before it could be reset, and is open again
  // Operations that used its memory have failed by now, perhaps since this lane last looked. Drop
  // them, or they would get into the streams of the next generation.
  take_inbox();
  drop_failed();
  reset_now();
  return true;
}

void lane::reset_now() {
  drain_released();
  auto error = device_->close_memory();
  if (!error)
    error = device_->open_memory();
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
  state_->publish();
  if (auto why = device_->loss()) // before it was published: its owner may have ignored the loss
    owner_.on_device_lost(*this, why);
}

/// Fails all parts in the streams: their work does not end any more.
void lane::lose_streams(const caf::error& why) noexcept {
  for (auto* s : made_) {
    if (s->continuing != nullptr) {
      auto& p = *std::exchange(s->continuing, nullptr);
      if (p.tenant != nullptr)
        --p.tenant->in_flight;
      --continuing_;
      p.of->fail(why);
      note_left();
      finish(p, nanoseconds(clock::now()));
    }
    while (!s->in_flight.empty()) {
      auto& p = *s->in_flight.front();
      s->in_flight.pop_front();
      leave_flight(p);
      p.of->fail(why);
      finish(p, nanoseconds(clock::now()));
    }
  }
  issuing_.store(false);
}

/// Forgets all streams: they are gone with the process that had them.
void lane::forget_streams() noexcept {
  for (auto* s : made_) {
    s->stream = {};
    s->not_done_since = {};
  }
  made_.clear();
  collectives_made_ = 0;
  forget_late();
}

/// Sets the stand-in stream for parts that are lost or cancelled before their stream is made. It
/// always exists, and is not the stream of allocations, which wait for nothing.
void lane::forget_late() noexcept {
  lends_.stream = stand_in;
  for (auto& x : links_)
    x.stream = stand_in;
}

/// Opens a lost device again. Its streams, events and memory are gone with the process that had
/// them: nothing is given back.
void lane::revive() {
  set_away(true);
  reset_requested_.store(false);
  auto why = state_->reason();
  if (!why)
    why = device_->loss();
  stager_.reset(); // no thread uses the rings any more
  settle_now();
  take_inbox();
  lose_streams(why);
  forget_streams();
  drop_failed();
  drain_released();
  for (auto event : events_) // else the remains of the old process would be kept
    static_cast<void>(note(device_->destroy_event(event)));
  events_.clear();
  // The remains of the old process may still write into the old rings.
  for (auto* ring : {&upload_ring_, &download_ring_}) {
    static_cast<void>(note((*ring)->close()));
    ring->reset();
  }
  if (!come_up()) {
    abandoned_.store(true);
    set_away(false);
  }
}

void lane::set_away(bool x) noexcept {
  std::lock_guard lock{order_mutex()};
  away_ = x;
}

bool lane::has_input() const noexcept { return inbox_.load() != nullptr || state_->has_released(); }

bool lane::take_inbox() noexcept {
  auto* p = inbox_.load(std::memory_order_relaxed);
  if (p == nullptr)
    return false;
  operation::prefetch(p, newest_.load(std::memory_order_relaxed),
                      newest_needs_.load(std::memory_order_relaxed));
  p = inbox_.exchange(nullptr, std::memory_order_acquire);
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
  if (waiting_.size() > 1)
    operation::prefetch(*waiting_.front());
  return true;
}

bool lane::issue_ready() {
  bool worked = state_->phase() == device_phase::resetting && drop_failed();
  if (is_held() || is_lost())
    return worked;
  for (int i = 0; i < issue_batch && !waiting_.empty() && in_flight() < options_.in_flight_limit;
       ++i) {
    if (try_issue(*waiting_.front()) == verdict::held)
      break;
    worked = true;
    if (is_held())
      break;
  }
  end_run();
  return worked;
}

/// Drops failed parts while a reset holds up the queue: a part that never runs must not hold up
/// others, for which the reset may wait. After a device loss no failed part goes on in the next
/// generation, unless it was promised.
bool lane::drop_failed() noexcept {
  std::vector<part*> dropped;
  std::erase_if(waiting_, [&](part* p) {
    auto& op = *p->of;
    bool stale = p->uses_memory || op.borrows_from(state_->ordinal());
    bool drops = op.withdrawn() || (op.failed() && (stale || away_) && !p->promised);
    if (drops)
      dropped.push_back(p);
    return drops;
  });
  for (auto* p : dropped)
    if (p->of->withdrawn())
      skip(*p);
    else
      lose(*p, {});
  return !dropped.empty();
}

bool lane::is_held() noexcept {
  auto made = made_streams();
  bool held = continuing_ != 0 && std::any_of(made.begin(), made.end(), [](const lane_stream* s) {
                return s->continuing != nullptr && s->continuing->of->holds_lane();
              });
  if (held != held_.load(std::memory_order_relaxed))
    held_.store(held, std::memory_order_relaxed);
  return held;
}

bool lane::lets_pass() noexcept {
  auto made = made_streams();
  return continuing_ == 0 || std::all_of(made.begin(), made.end(), [](const lane_stream* s) {
           return s->continuing == nullptr || s->continuing->of->lets_pass();
         });
}

/// Returns the tenant's own stream while it has work there, else a free one. If none is free,
/// returns one in which nothing is known to stand still.
std::size_t lane::choose_stream(const stream_tenant& who) const noexcept {
  auto is_free = [](const lane_stream& s) {
    return s.stream.native != nullptr && s.in_flight.empty() && !s.continuing;
  };
  if (who.in_flight != 0 || is_free(streams_[who.stream]))
    return who.stream;
  auto best = // its own may be of an earlier generation
      streams_[who.stream].stream.native != nullptr ? who.stream : first_collective;
  std::size_t least = SIZE_MAX;
  for (auto i = first_collective; i < first_collective + collectives_made_; ++i) {
    auto& s = streams_[i];
    if (is_free(s))
      return i;
    if (!s.continuing && !s.in_flight.back()->of->failed() && s.in_flight.size() < least) {
      best = i;
      least = s.in_flight.size();
    }
  }
  return best;
}

/// Returns the stream of a link that has nothing in flight: its own, or that of another link at
/// work if the copy is long, unless it would wait there for a longer one.
std::size_t lane::choose_peer_stream(const part& p) const noexcept {
  const auto index = first_peer + link_of(p.peer);
  const auto size = p.of->size_bytes();
  if (size < long_copy_bytes || !streams_[index].in_flight.empty() || !nothing_before(p))
    return index;
  auto all = peer_range();
  auto at_work = std::find_if(all.begin(), all.end(), [&](const lane_stream& s) {
    return !s.in_flight.empty() && s.continuing == nullptr && !s.waits && s.largest_bytes <= size &&
           s.largest_bytes >= long_copy_bytes;
  });
  return at_work == all.end() ? index
                              : first_peer + static_cast<std::size_t>(at_work - all.begin());
}

bool lane::starts_for_sure(const part& p) const noexcept {
  auto ends = [](const lane_stream& s) {
    return s.continuing == nullptr && (s.in_flight.empty() || s.in_flight.back()->certain);
  };
  auto collective = collective_range();
  return state_->acquired() == 0 && nothing_before(p) &&
         ends(streams_[static_cast<std::size_t>(stream_kind::compute)]) &&
         std::all_of(collective.begin(), collective.end(), ends);
}

bool lane::collectives_over() const noexcept {
  auto all = collective_range();
  return std::all_of(all.begin(), all.end(), [](const auto& s) {
    return std::all_of(s.in_flight.begin(), s.in_flight.end(),
                       [](const part* p) { return p->of->failed(); });
  });
}

void lane::begin_connecting() noexcept {
  connecting_until_.store(std::numeric_limits<std::int64_t>::max(), std::memory_order_relaxed);
}

void lane::end_connecting() noexcept {
  connecting_until_.store(nanoseconds(clock::now()), std::memory_order_relaxed);
}

/// Prefetches the next parts, which a client's thread wrote, while one part is issued.
void lane::fetch_ahead() const noexcept {
  if (waiting_.size() > 1)
    __builtin_prefetch(waiting_[1]);
  if (!waiting_.empty())
    operation::prefetch(*waiting_.front());
}

lane::verdict lane::try_issue(part& p) {
  auto& op = *p.of;
  if (p.tenant != nullptr)
    p.tenant->stream = choose_stream(*p.tenant);
  auto holder = p.promised ? std::nullopt : held_by(p);
  record_.held_by(holder.value_or(0));
  const bool does_nothing = op.withdrawn() && !stands_between(p);
  if (holder && !does_nothing)
    return verdict::held;
  if ((p.tenant != nullptr || p.stream == stream_kind::compute) && !does_nothing && !lets_pass())
    return verdict::held;
  waiting_.pop_front();
  fetch_ahead();
  auto error = provide_stream_of(p);
  if (!joins_run(p))
    end_run();
  if (!op.claim_issue(p)) {
    skip(p);
    return verdict::gone;
  }
  // In the step that issues: a stale handle never reaches a launch (INV-2).
  if (!error && !p.promised)
    error = check_generation(p);
  if (!error && !op.lost_a_part() && p.stream != stream_kind::none)
    error = note(wait_for_what_is_before(p));
  if (owner_tells(error))
    return wait_for_owner(p);
  if (error || !op.begin_issue(p)) {
    lose(p, error);
    return verdict::gone;
  }
  p.at.store(part::state::issuing, std::memory_order_release);
  auto now = nanoseconds(clock::now());
  issuing_since_.store(now, std::memory_order_relaxed);
  if (p.stream != stream_kind::none && stream_of(p).in_flight.empty() && nothing_before(p))
    operation::part_started(p, now); // the call itself may block
  issuing_.store(true);
  auto outcome = op.issue(p, *this);
  record_.issuing(p, state_->generation(), now); // while the device works
  if (!outcome) {
    operation::take_back_issue(p);
    if (p.stream == stream_kind::none && owner_tells(outcome.error())) {
      issuing_.store(!nothing_continues());
      return wait_for_owner(p);
    }
  }
  after_issue(p, outcome);
  issuing_.store(!nothing_continues());
  return verdict::gone;
}

/// Returns the operation that `p` must wait for; 0: the next generation. None: `p` may be issued.
std::optional<std::uint64_t> lane::held_by(part& p) noexcept {
  if (state_->phase() == device_phase::resetting)
    return 0;
  if (p.stream != stream_kind::none)
    if (auto* first = stream_of(p).continuing)
      return first->of->number();
  for (bool again = true; again;) {
    again = false;
    for (auto& x : p.predecessors) {
      if (must_await(*x.at))
        return x.of->number();
      again |= x.at->dropped();
    }
    if (again)
      see_through_dropped(p);
  }
  // CUDA may put a stream that was made late into one queue with another stream. Work that a
  // continuing part still has to enqueue there must not come behind a part that waits for others.
  // (A claim may wait long: it holds up no transfer, and no transfer holds it up.)
  const bool lends = p.stream == stream_kind::lend;
  if ((p.stream == stream_kind::peer || lends) && !nothing_before(p))
    for (auto* s : made_)
      if (s->continuing != nullptr && (!lends || s->continuing->tenant != nullptr))
        return s->continuing->of->number();
  return std::nullopt;
}

/// Replaces dropped predecessors of `p` by their own predecessors. There may be long chains of
/// them, and many paths from one to another.
void lane::see_through_dropped(part& p) {
  std::set<std::pair<const part*, const buffer*>> seen;
  std::vector<predecessor> result;
  std::vector<predecessor> dropped;
  auto sort_in = [&](std::vector<predecessor> all) {
    for (auto& x : all)
      if (seen.emplace(x.at, x.memory).second)
        (x.at->dropped() ? dropped : result).push_back(std::move(x));
  };
  sort_in(std::move(p.predecessors));
  while (!dropped.empty()) {
    auto x = std::move(dropped.back());
    dropped.pop_back();
    sort_in(behind_dropped(x));
  }
  p.predecessors = std::move(result);
}

bool lane::must_await(const part& x) noexcept {
  auto pending = [&] { return !x.recorded.load() && !x.over(); };
  if (!pending())
    return false;
  if (x.on == this)
    return true;
  flag_lock lock{x.event_guard};
  if (std::find(x.waiting.begin(), x.waiting.end(), this) == x.waiting.end())
    x.waiting.push_back(this);
  x.awaited.store(true); // before the second check: the other lane does both in the opposite order
  return pending();
}

void lane::wake_waiting(const part& x) noexcept {
  if (!x.awaited.load())
    return;
  std::vector<lane*> all;
  {
    flag_lock lock{x.event_guard};
    all.swap(x.waiting);
  }
  for (auto* other : all)
    other->wake();
}

void lane::set_recorded(part& p) noexcept {
  p.recorded.store(true);
  wake_waiting(p);
}

void lane::set_skipped(part& p) noexcept {
  auto& all = p.predecessors;
  std::erase_if(all, [&](auto& x) { return &x.memory->home() == &p.on->state(); });
  if (!all.empty()) {
    see_through_dropped(p);
    std::erase_if(all, [](auto& x) { return passed(*x.at); });
    auto self = std::static_pointer_cast<operation>(p.of->shared_from_this());
    for (auto& x : all) // until they are settled, later operations are ordered behind this one
      x.of->precede(self, false);
  }
  {
    flag_lock lock{p.event_guard};
    p.at.store(all.empty() ? part::state::skipped : part::state::dropped,
               std::memory_order_release);
  }
  wake_waiting(p);
}

/// Returns whether later work relies on `p` to come after work that is not over yet.
bool lane::stands_between(const part& p) const noexcept {
  if (!p.uses_memory || p.of->left_order() || p.stream == stream_kind::none ||
      state_->live_generation() == 0)
    return false;
  auto& s = stream_of(p);
  return s.continuing != nullptr || !s.in_flight.empty() || !nothing_before(p);
}

/// Returns whether all predecessors of `p` are over or in its stream, and its former communicator
/// has no work in flight.
bool lane::nothing_before(const part& p) noexcept {
  return std::all_of(p.predecessors.begin(), p.predecessors.end(),
                     [&](const predecessor& x) {
                       return !x.at->dropped() && (x.at->over() || x.at->shares_stream(p));
                     }) &&
         (p.after == nullptr || p.after->in_flight == 0);
}

caf::error lane::wait_for_what_is_before(part& p) {
  auto to = stream(p);
  auto result = wait_for_predecessors(p, to);
  if (p.after == nullptr || p.after->in_flight == 0)
    return result;
  for (auto* x : streams_[p.after->stream].in_flight)
    if (x->tenant == p.after && x->event.native != nullptr)
      if (auto error = device_->wait(to, x->event); error && !result)
        result = std::move(error);
  return result;
}

caf::error lane::wait_for_predecessors(part& p, stream_view stream) {
  caf::error result;
  for (auto& x : p.predecessors) {
    if (x.at->over() || x.at->shares_stream(p))
      continue;
    if (auto error = wait_for(*x.at, stream); error && !result)
      result = std::move(error);
  }
  return result;
}

caf::error lane::wait_for(const part& x, stream_view stream) {
  if (x.on == this) // only this lane changes its event
    return x.event.native != nullptr ? device_->wait(stream, x.event) : caf::error{};
  event_word word;
  {
    flag_lock lock{x.event_guard};
    if (x.event.native == nullptr)
      return {};
    if (is_remote_)
      word = x.on->device().word_of(x.event);
    if (!word.word)
      return device_->wait(stream, x.event);
  }
  // Without the lock: this is a request to another process.
  return device_->wait_word(stream, word.word.get(), word.value);
}

caf::error lane::check_generation(const part& p) const {
  if (p.generation == 0 || p.generation == state_->live_generation())
    return {};
  for (auto& u : p.of->uses_of(p))
    if (u.part == p.index && u.memory->stale()) {
      // An operation that was admitted in time fails with the same cause as all others (INV-7).
      auto& home = u.memory->home();
      if (home.live_generation() == 0)
        if (auto reason = home.reason())
          return reason;
      auto why = p.of->describe(errc::stale_ref, "the device was reset after the allocation");
      why.device = home.ordinal();
      why.generation = u.memory->generation();
      return make_error(std::move(why));
    }
  return {};
}

void lane::after_issue(part& p, const caf::expected<issue_outcome>& outcome) {
  auto& op = *p.of;
  if (!outcome) {
    auto why = in_full(p, note(outcome.error()));
    if (p.stream == stream_kind::none) {
      lose(p, why);
      return;
    }
    if (!owner_tells(why))
      op.part_lost(p, why);
    // Some of its work may be in the stream, and uses the memory until it is over.
    put_in_flight(p);
    return;
  }
  switch (*outcome) {
  case issue_outcome::enqueued:
    put_in_flight(p);
    break;
  case issue_outcome::finished:
    note_left();
    issuing_.store(!nothing_continues()); // before the result: its receiver finds the lane idle
    finish(p, nanoseconds(clock::now()));
    return;
  case issue_outcome::continues:
    p.at.store(part::state::issued, std::memory_order_release);
    record_.issued(p);
    stream_of(p).continuing = &p;
    ++continuing_;
    if (p.tenant != nullptr)
      ++p.tenant->in_flight;
    break;
  }
}

void lane::put_in_flight(part& p) {
  auto& s = stream_of(p);
  in_flight_.fetch_add(1, std::memory_order_relaxed);
  note_left(); // second: the part is counted at any time (`comes_next`)
  if (auto* who = tenant_of(p))
    ++who->in_flight;
  if (p.tenant != nullptr && !s.in_flight.empty() && s.in_flight.back()->tenant != p.tenant)
    p.behind_others.store(true, std::memory_order_relaxed);
  if (p.stream == stream_kind::peer)
    note_copy(s, p);
  s.in_flight.push_back(&p);
  run_.in = &s;
  ++run_.parts;
  if (!run_goes_on_after(p))
    end_run();
}

/// Returns whether the next part continues the run of `p`, as far as is known now.
bool lane::run_goes_on_after(const part& p) const noexcept {
  return p.is_small_copy && !p.is_placeholder && !waiting_.empty() &&
         waiting_.front()->is_small_copy && waiting_.front()->peer == p.peer &&
         device_->prefers_copy_peers();
}

/// Returns whether `p` can join the run. If it waited for other work, the whole run would wait too.
bool lane::joins_run(const part& p) const noexcept {
  return p.is_small_copy && &stream_of(p) == run_.in && nothing_before(p);
}

caf::error lane::copy_over_link(part& p, const peer_copy& x) {
  if (run_.goes_apart || (run_.in == nullptr && !run_goes_on_after(p)))
    return device_->copy_peer(x.target, x.target_device, x.source, x.source_device, x.size_bytes,
                              stream(p));
  // Copies in one call run in any order.
  if (std::any_of(run_.copies.begin(), run_.copies.end(),
                  [&](const peer_copy& other) { return touch(x, other); }))
    issue_run(stream(p));
  run_.copies.push_back(x);
  run_.owners.push_back(&p);
  return {};
}

void lane::end_run() {
  if (run_.in == nullptr)
    return;
  issue_run(run_.in->stream);
  mark_last(*std::exchange(run_.in, nullptr), std::exchange(run_.parts, 0));
}

void lane::issue_run(stream_view stream) {
  if (run_.copies.size() < 2 || note(device_->copy_peers(run_.copies, stream)))
    issue_apart();
  run_.copies.clear();
  run_.owners.clear();
}

/// Issues the copies of a run one by one: to find the wrong one, and to stop at a failed link.
void lane::issue_apart() {
  run_.goes_apart = true;
  for (auto* p : run_.owners) {
    auto outcome = p->of->issue(*p, *this);
    if (outcome)
      continue;
    operation::take_back_issue(*p);
    p->of->part_lost(*p, in_full(*p, note(outcome.error())));
  }
  run_.goes_apart = false;
}

/// Records one event behind the last `parts` parts in flight in `s`, which share it.
void lane::mark_last(lane_stream& s, std::size_t parts) {
  auto last = std::prev(s.in_flight.end());
  auto first = std::prev(s.in_flight.end(), static_cast<std::ptrdiff_t>(parts));
  for (auto i = first; i <= last; ++i)
    if (!(*i)->is_placeholder) {
      (*i)->at.store(part::state::issued, std::memory_order_release);
      record_.issued(**i);
    }
  if ((*last)->event.native == nullptr) {
    auto event = mark(s.stream);
    if (!event) {
      if (owner_tells(event.error()))
        return;
      // Without an event it is unknown when the work is over: only the end of the process is left.
      auto why = note_fault(event.error());
      for (auto i = first; i <= last; ++i)
        (*i)->of->fail(why);
      return;
    }
    (*last)->event = *event;
  }
  for (auto i = first; i <= last; ++i) {
    if (i != last) {
      (*i)->event = (*last)->event;
      (*i)->shares_event = true;
    }
    set_recorded(**i);
  }
  if (options_.completion == completion_strategy::host_func && !device_->signals_completion())
    static_cast<void>(note(device_->launch_host(
        s.stream, [](void* self) { static_cast<lane*>(self)->wake(); }, this)));
  else if (options_.completion == completion_strategy::synchronize)
    static_cast<void>(note(device_->synchronize((*last)->event)));
  note_started(s);
}

bool lane::proceed_continuing() {
  bool worked = false;
  for (std::size_t i = 0; continuing_ != 0 && i < made_.size(); ++i) { // more may be made meanwhile
    auto& s = *made_[i];
    if (s.continuing == nullptr)
      continue;
    auto& p = *s.continuing;
    auto outcome = p.of->proceed(p, *this);
    if (outcome && *outcome == issue_outcome::continues)
      continue;
    s.continuing = nullptr;
    --continuing_;
    if (p.tenant != nullptr)
      --p.tenant->in_flight;
    worked = true;
    after_issue(p, outcome);
    issuing_.store(!nothing_continues());
  }
  return worked;
}

void lane::note_started(lane_stream& s) noexcept {
  if (s.in_flight.empty())
    return;
  auto& p = *s.in_flight.front();
  if (p.at.load(std::memory_order_relaxed) != part::state::issued)
    return;
  if (!nothing_before(p))
    return;
  p.at.store(part::state::started, std::memory_order_release);
  auto now = nanoseconds(clock::now());
  record_.started(p, now);
  if (p.of->stall_limit != 0)
    operation::part_started(p, now);
}

bool lane::poll() {
  bool worked = false;
  for (auto* s : made_streams())
    if (!s->in_flight.empty())
      worked |= poll(*s);
  return worked;
}

bool lane::poll(lane_stream& s) {
  bool worked = false;
  bool one_by_one = device_->signals_completion();
  while (!s.in_flight.empty()) {
    // To query an event that is done costs more than one that is not. So query one further back: if
    // it is done, all before it are done too.
    auto batch = one_by_one ? 1 : std::clamp<std::size_t>(s.in_flight.size() / 2, 1, poll_batch);
    auto& p = *s.in_flight[batch - 1];
    if (p.event.native == nullptr)
      return worked; // the end of the device or the process, which follows, drops it
    auto of_its_run = [event = p.event.native](const part* x) { return x->event.native == event; };
    auto done = device_->query(p.event);
    if (!done) {
      static_cast<void>(note(done.error()));
      if (auto code = code_of(done.error());
          code == errc::device_fault || code == errc::worker_lost)
        return worked; // the streams may still run: only the end of device or process drops it
      if (batch != 1) {
        one_by_one = true; // find the one that failed
        continue;
      }
      for (auto* x : s.in_flight | std::views::take_while(of_its_run))
        x->of->fail(x->of->on_failed_work(*x, in_full(*x, done.error())));
      // The work may still run, and uses its memory until it is over.
      if (auto error = device_->synchronize(p.event)) {
        static_cast<void>(note_fault(error));
        return worked;
      }
      done = true;
    }
    if (!*done) {
      note_started(s);
      if (batch == 1 || of_its_run(s.in_flight.front()))
        return worked;
      auto now = clock::now();
      if (s.not_done_since == clock::time_point{})
        s.not_done_since = now;
      if (batch == poll_batch && now < s.not_done_since + poll_patience)
        return worked;
      s.not_done_since = {};
      one_by_one = true; // earlier events may be done
      continue;
    }
    s.not_done_since = {};
    p.of->fetch_answer(p);
    auto now = nanoseconds(clock::now());
    for (std::size_t i = 0; i < batch || (!s.in_flight.empty() && of_its_run(s.in_flight.front()));
         ++i) {
      auto& over = *s.in_flight.front();
      s.in_flight.pop_front();
      leave_flight(over);
      finish(over, now);
    }
    worked = true;
  }
  return worked;
}

void lane::note_copy(lane_stream& s, const part& p) noexcept {
  if (s.in_flight.empty()) {
    s.largest_bytes = 0;
    s.waits = false;
  }
  s.largest_bytes = std::max(s.largest_bytes, p.of->size_bytes());
  s.waits |= !nothing_before(p);
}

void lane::leave_flight(part& p) noexcept {
  in_flight_.fetch_sub(1, std::memory_order_relaxed);
  if (auto* who = tenant_of(p))
    --who->in_flight;
}

void lane::finish(part& p, std::int64_t now) noexcept {
  event_view event;
  {
    flag_lock lock{p.event_guard};
    std::swap(event, p.event);
    p.at.store(p.is_placeholder ? part::state::skipped : part::state::done,
               std::memory_order_release);
  }
  wake_waiting(p);
  if (!p.shares_event)
    retire(event);
  p.predecessors.clear();
  if (!p.is_placeholder)
    p.of->on_part_done(p);
  record_.over(p, !p.is_placeholder, state_->generation(), now);
  p.of->on_part_over(p);
  if (!p.of->one_over())
    return;
  if (may_spin() && waiting_.empty() && nothing_in_flight() && p.of->answer_ahead()) {
    late_.push_back(std::static_pointer_cast<operation>(p.of->shared_from_this()));
    settle_at_ = clock::time_point{std::chrono::nanoseconds{now}} + settle_patience;
  } else if (p.tenant != nullptr) {
    process_retired.add(p.of->settle()); // a collective holds no objects of the user any more
  } else {
    p.of->settle();
  }
}

bool lane::settle_late() noexcept {
  if (late_.empty())
    return false;
  bool device_works = waiting_.empty() && nothing_continues() && in_flight() != 0;
  bool ends = stop_requested_.load(std::memory_order_relaxed) ||
              reset_requested_.load(std::memory_order_relaxed);
  if (!device_works && !ends && clock::now() < settle_at_)
    return false;
  settle_now();
  return true;
}

void lane::settle_now() noexcept {
  for (auto& op : late_)
    op->settle();
  late_.clear();
}

void lane::skip(part& p) noexcept {
  p.of->make_placeholder(p);
  if (stands_between(p) && !abandoned_.load()) {
    p.is_placeholder = true;
    static_cast<void>(note(wait_for_what_is_before(p)));
    put_in_flight(p);
    return;
  }
  note_left();
  set_skipped(p);
  record_.over(p, p.record != 0, state_->generation(), nanoseconds(clock::now()));
  p.of->on_part_over(p);
  p.of->part_over();
}

void lane::lose(part& p, const caf::error& why) noexcept {
  p.of->part_lost(p, why);
  skip(p);
}

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

/// Puts the part back into the queue, until the owner reports the loss.
lane::verdict lane::wait_for_owner(part& p) {
  p.at.store(part::state::queued, std::memory_order_release);
  p.claimed.store(false);
  waiting_.push_front(&p);
  return verdict::held;
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

caf::expected<event_view> lane::mark(stream_view stream) {
  event_view event;
  if (events_.empty()) {
    auto created = device_->create_event();
    if (!created)
      return created.error();
    event = *created;
  } else {
    event = events_.back();
    events_.pop_back();
  }
  if (auto error = device_->record(event, stream); error) {
    events_.push_back(event);
    return error;
  }
  return event;
}

void lane::retire(event_view event) noexcept {
  if (event.native != nullptr)
    events_.push_back(event);
}

bool lane::drain_released() {
  if (!state_->has_released())
    return false;
  // To free memory may wait for other devices, which may wait for a part that is promised here.
  freeing_.store(true);
  if (deferrals_.load() != 0) {
    freeing_.store(false);
    return false;
  }
  for (auto& x : state_->take_released()) {
    if (x.deleter)
      state_->hand_back(std::move(x));
    else if (x.generation == state_->generation() && !abandoned_.load())
      static_cast<void>(note(device_->deallocate(x.address, stream(stream_kind::memory))));
  }
  freeing_.store(false);
  return true;
}

bool lane::nothing_continues() const noexcept { return continuing_ == 0; }

bool lane::nothing_in_flight() const noexcept { return in_flight() == 0 && nothing_continues(); }

void lane::abandon_now() noexcept {
  settle_now();
  take_inbox();
  // An operation that has not failed yet must not succeed now.
  auto why = state_->reason();
  if (!why)
    why = make_error(errc::unavailable, "the device ended");
  for (auto& s : streams_) {
    if (s.continuing != nullptr) {
      given_up_.push_back(s.continuing->of->used_by_streams());
      if (s.continuing->tenant != nullptr)
        --s.continuing->tenant->in_flight;
      waiting_.push_back(std::exchange(s.continuing, nullptr));
      --continuing_;
    }
    for (auto* p : s.in_flight) {
      leave_flight(*p);
      p->event = {};
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
}

void lane::idle() {
  bool busy = !abandoned_.load() && !nothing_in_flight();
  bool must_poll = busy && !device_->signals_completion();
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
  if (!late_.empty())
    return settle_now();
  process_retired.free_all();
  std::unique_lock lock{park_mutex_};
  parked_.store(true);
  auto awake = [this] { return signalled_.load() || inbox_.load() != nullptr; };
  if (must_poll && options_.completion == completion_strategy::host_func)
    park_condition_.wait_for(lock, host_func_check, awake);
  else if (must_poll)
    park_condition_.wait_for(lock, poll_interval, awake);
  else
    park_condition_.wait(lock, awake);
  parked_.store(false);
  signalled_.exchange(false);
}

} // namespace troupe::detail
