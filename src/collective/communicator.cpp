#include "collective/communicator.hpp"

#include "foundation/fair_limit.hpp"
#include "foundation/log.hpp"
#include "foundation/never_destroyed.hpp"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

namespace troupe::detail {

namespace {

/// How long the lanes of devices that were given up may take: their calls return at once.
constexpr std::chrono::seconds lost_patience{2};

/// How long to wait for the report that a process has ended.
constexpr std::chrono::seconds news_patience{2};

/// The interval between two checks of a condition.
constexpr std::chrono::microseconds between_looks{200};

/// How often to check for a lost device while no loss is known. A loaded process that is told of a
/// loss late also makes its checks late.
constexpr int looks_for_loss = 50;

template <class F> void wait_until(F f) {
  while (!f())
    std::this_thread::sleep_for(between_looks);
}

template <class F> bool wait_until(F f, std::chrono::nanoseconds limit) {
  if (limit.count() <= 0)
    return f();
  for (fair_limit left{limit}; !f(); std::this_thread::sleep_for(between_looks))
    if (left.over())
      return false;
  return true;
}

std::vector<backend_communicator*> pointers_to(const communicator_ranks& ranks) {
  std::vector<backend_communicator*> result;
  for (auto& x : ranks)
    result.push_back(x.get());
  return result;
}

std::vector<std::shared_ptr<const device_life>> lives_of(const communicator_ranks& ranks) {
  std::vector<std::shared_ptr<const device_life>> result;
  for (auto& x : ranks)
    if (auto life = x->life())
      result.push_back(std::move(life));
  return result;
}

} // namespace

communicator::communicator(std::shared_ptr<runtime> runtime, std::uint64_t epoch,
                           collective_way way, std::span<const std::shared_ptr<lane>> lanes,
                           rank_set absent, communicator_ranks ranks,
                           std::chrono::milliseconds quiet_limit,
                           std::function<void(communicator&, const caf::error&)> on_end,
                           std::function<void()> on_gone)
    : runtime_(std::move(runtime)), epoch_(epoch), way_(way), absent_(absent),
      rank_of_(lanes.size()), local_(lanes.size()), ranks_(std::move(ranks)),
      rank_at_(pointers_to(ranks_)), lives_(lives_of(ranks_)), tenants_(ranks_.size()),
      quiet_limit_(quiet_limit), on_end_(std::move(on_end)), on_gone_(std::move(on_gone)) {
  for (std::size_t i = 0; i < lanes.size(); ++i)
    if (!absent.contains(i)) {
      rank_of_[i] = members_.size();
      members_.push_back(i);
      if (!lanes[i])
        continue;
      local_[i] = lanes_.size();
      local_ranks_.push_back(i);
      lanes_.push_back(lanes[i]);
    }
  for (auto& x : lanes_) {
    x->add_tenant();
    runtime_->hold(x->state().ordinal());
  }
}

communicator::~communicator() {
  for (auto& x : lanes_)
    x->remove_tenant();
}

bool communicator::has_lost_rank() const noexcept {
  return std::any_of(lives_.begin(), lives_.end(), [](auto& x) { return x->lost(); });
}

bool communicator::is_losing_rank() const noexcept {
  return std::any_of(lives_.begin(), lives_.end(),
                     [](auto& x) { return x->lost() || x->has_ended(); });
}

caf::error communicator::dead() const {
  std::lock_guard lock{mutex_};
  return cause_ ? cause_ : make_error(errc::communicator_dead, "its communicator has ended");
}

void communicator::fail(const caf::error& cause) noexcept {
  {
    std::lock_guard lock{mutex_};
    if (!live_.load())
      return;
    cause_ = cause;
    live_.store(false);
  }
  // The loss of a worker has its own log line, and ends several communicators.
  log(code_of(cause) == errc::worker_lost ? log_level::debug : log_level::warning,
      "a communicator ended", cause);
  runtime_->note_end(cause);
  auto keep = shared_from_this();
  on_end_(*this, cause);
  runtime_->deadlines().for_each([&](operation& op) {
    if (op.communicator_key() == this)
      op.fail(cause);
  });
  note_closed();
  for (auto& x : lanes_)
    x->wake(); // a lane may wait outside the communicator for the other ranks
  runtime_->workers().run([self = std::move(keep)] { self->reap(false); });
}

/// On the ending thread, since the reaper may have to wait for a thread of its own.
void communicator::note_closed() noexcept {
  for (auto* x : rank_at_)
    x->on_closed();
}

void communicator::fail_unless_lost(const caf::error& cause) noexcept {
  const auto code = code_of(cause);
  const bool is_loss = code && severity_of(*code) >= severity::device;
  if (can_lose_ranks() && !is_loss) {
    const auto until = clock::now() + news_patience;
    for (int i = 0; live() && (i < looks_for_loss || (is_losing_rank() && clock::now() < until));
         ++i)
      std::this_thread::sleep_for(between_looks);
  }
  fail(cause);
}

void communicator::retire() noexcept { end_quietly(true); }

void communicator::discard() noexcept { end_quietly(false); }

bool communicator::is_pending() const noexcept {
  bool result = false;
  runtime_->deadlines().for_each(
      [&](operation& op) { result |= op.communicator_key() == this && !op.over(); });
  return result;
}

/// Waits in the background. Meanwhile a pending operation that stalls or fails ends it.
void communicator::retire_when_idle() noexcept {
  runtime_->workers().run([self = shared_from_this()] {
    wait_until([&] { return !self->live() || !self->is_pending(); });
    self->retire();
  });
}

void communicator::end_quietly(bool healthy) noexcept {
  {
    std::lock_guard lock{mutex_};
    if (!live_.load())
      return;
    live_.store(false);
  }
  note_closed();
  runtime_->workers().run([self = shared_from_this(), healthy] { self->reap(healthy); });
}

void communicator::end(const caf::error& cause) noexcept {
  if (is_pending())
    fail(cause);
  else
    retire();
}

caf::error communicator::stuck(std::span<const std::size_t> ranks, std::string_view what) const {
  failure why;
  why.code = errc::lane_stuck;
  if (ranks.size() == 1) { // else it is unknown which one is stuck
    why.device = lanes_[ranks.front()]->state().ordinal();
    why.rank = static_cast<int>(local_ranks_[ranks.front()]);
  }
  why.epoch = epoch_;
  why.detail = what;
  return make_error(std::move(why));
}

/// Gives up the devices of `ranks`. Returns false if devices of this kind are not lost one by one.
bool communicator::give_up(const std::vector<std::size_t>& ranks, std::string_view what) noexcept {
  return std::all_of(ranks.begin(), ranks.end(), [&](const std::size_t& i) {
    return runtime_->backend().give_up(lanes_[i]->state().ordinal(), stuck({&i, 1}, what));
  });
}

std::vector<std::size_t> communicator::ranks_inside() const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < lanes_.size(); ++i)
    if (lanes_[i]->is_inside(this))
      result.push_back(i);
  return result;
}

/// Blocks until no thread is inside. A thread that enters from now on sees the end, and leaves.
/// Returns false if the runtime has ended.
bool communicator::wait_until_quiet() noexcept {
  wait_until([this] { return visitors_.load() == 0 || runtime_->ended(); });
  auto quiet = [this] { return ranks_inside().empty() || runtime_->ended(); };
  if (!wait_until(quiet, quiet_limit_)) {
    const auto what = "the lane did not return from a call on a communicator that ended (" +
                      describe(dead()) + ")";
    auto ranks = ranks_inside();
    if (!ranks.empty() && (!give_up(ranks, what) || !wait_until(quiet, lost_patience)))
      static_cast<void>(runtime_->end_everything(stuck(ranks, what)));
  }
  return !runtime_->ended();
}

void communicator::reap(bool healthy) noexcept {
  if (!wait_until_quiet()) {
    // No call may be made on it any more: its memory is kept until the process ends.
    keep_forever(std::make_shared<communicator_ranks>(std::move(ranks_)));
  } else {
    auto error = healthy ? runtime_->backend().destroy(std::move(ranks_))
                         : runtime_->backend().abort(std::move(ranks_));
    if (code_of(error) == errc::device_fault)
      static_cast<void>(runtime_->end_with_fault("the thread that ends communicators", error));
    else if (error)
      log(log_level::warning, "the end of a communicator gave an error", error);
  }
  for (auto& x : lanes_)
    runtime_->unhold(x->state().ordinal());
  on_gone_();
}

// -- the errors of operations on it

namespace {
/// Returns why a communicator ends because of part `p` of `op`.
failure end_of(const operation& op, const part& p, std::uint64_t epoch, errc code,
               std::string detail) {
  auto x = op.describe(code, std::move(detail));
  x.rank = p.rank;
  x.device = p.on->state().ordinal();
  x.generation = p.on->state().generation();
  x.epoch = epoch;
  return x;
}
} // namespace

caf::error after_call(const operation& op, const part& p, communicator& on, caf::error error) {
  auto cause = failure_of(error);
  if (!cause ||
      (severity_of(cause->code) != severity::communicator && cause->code != errc::out_of_memory))
    return error;
  auto x = end_of(op, p, on.epoch(), cause->code, std::move(cause->detail));
  x.api = std::move(cause->api);
  x.native_name = std::move(cause->native_name);
  x.native_code = cause->native_code;
  on.fail_unless_lost(make_error(std::move(x)));
  return on.dead();
}

caf::expected<issue_outcome> issued(operation& op, const part& p, communicator& on,
                                    caf::error error) {
  error = after_call(op, p, on, std::move(error));
  if (error && !on.live())
    op.fail(on.dead()); // all pending operations on it get the same cause (INV-7)
  if (error)
    return error;
  return issue_outcome::enqueued;
}

caf::error loss_error(const operation& op, const part& p, std::uint64_t epoch, caf::error why) {
  if (!why)
    why = op.cause();
  auto cause = failure_of(why);
  if (cause && severity_of(cause->code) >= severity::communicator)
    return why;
  std::string detail = op.has_parts_elsewhere() && !op.any_issued()
                           ? "a rank's call was not issued, and others may be"
                           : "a rank could not be issued after others had been";
  if (why)
    detail += ": " + troupe::describe(why);
  auto x = end_of(op, p, epoch, errc::rank_not_issued, std::move(detail));
  if (cause) {
    x.api = cause->api;
    x.native_name = cause->native_name;
    x.native_code = cause->native_code;
  }
  return make_error(std::move(x));
}

caf::error stall_error(const operation& op, std::uint64_t epoch) {
  auto x = op.describe(errc::stalled, "not done " + std::to_string(op.stall_limit / 1'000'000) +
                                          " ms after its first rank started");
  x.epoch = epoch;
  // Name the one rank that is behind all others, if there is exactly one.
  auto least = std::min_element(x.parts.begin(), x.parts.end());
  if (std::count(x.parts.begin(), x.parts.end(), *least) == 1) {
    x.rank = static_cast<int>(least - x.parts.begin());
    for (auto& p : op.parts())
      if (p.rank == x.rank) {
        x.device = p.on->state().ordinal();
        x.generation = p.on->state().generation();
      }
  }
  return make_error(std::move(x));
}

} // namespace troupe::detail
