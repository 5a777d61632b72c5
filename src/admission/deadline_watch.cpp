#include "admission/deadline_watch.hpp"

#include "foundation/spin.hpp"
#include "lane/lane.hpp"

#include <algorithm>

namespace troupe::detail {

namespace {

/// Interval at which the thread checks that the process runs, while there are operations to watch.
constexpr std::chrono::milliseconds tick{50};

/// How often the thread checks whether lanes have looked.
constexpr std::chrono::microseconds between_looks{100};

/// How long it rests at most.
constexpr std::chrono::hours longest_rest{1};

clock::time_point at(std::int64_t nanoseconds) {
  return clock::time_point{std::chrono::nanoseconds{nanoseconds}};
}

} // namespace

/// Under mutex_. Work that has not started cannot stall before a whole limit has passed.
clock::time_point deadline_watch::due(const operation& x, clock::time_point now) const {
  auto result = x.completed() || x.deadline <= now ? clock::time_point::max() : x.deadline;
  if (x.stall_limit > 0 && !x.stall_reported_ && !x.over()) {
    std::chrono::nanoseconds left{x.stall_limit};
    if (auto started = x.first_started_at(); started != 0)
      left -= time_.passed(at(started), now);
    if (left < clock::time_point::max() - now)
      result = std::min(result, now + left);
  }
  return result;
}

deadline_watch::deadline_watch() : time_(tick), thread_([this] { run(); }) {}

deadline_watch::~deadline_watch() { stop(); }

void deadline_watch::stop() noexcept {
  {
    std::lock_guard lock{mutex_};
    stop_ = true;
  }
  condition_.notify_one();
  if (thread_.joinable())
    thread_.join();
}

void deadline_watch::add(operation& x) {
  auto when = x.deadline;
  if (const auto now = at(x.admitted_at);
      x.stall_limit > 0 && std::chrono::nanoseconds{x.stall_limit} < when - now)
    when = now + std::chrono::nanoseconds{x.stall_limit};
  {
    hot_lock lock{list_.mutex};
    x.kept_by_ = this;
    x.previous_ = list_.last;
    x.next_ = nullptr;
    (list_.last != nullptr ? list_.last->next_ : list_.first) = &x;
    list_.last = &x;
    ++list_.size;
  }
  if (when >= next_.load()) // a thread that changes next_ looks at the list after that
    return;
  std::lock_guard lock{mutex_};
  wake_at(when);
}

void deadline_watch::add_late(operation& x) {
  add(x);
  std::atomic_thread_fence(std::memory_order_seq_cst); // as in `operation::settle`
  if (x.settled())
    remove(x);
}

void deadline_watch::remove(operation& x) noexcept {
  hot_lock lock{list_.mutex};
  if (!x.watched())
    return;
  (x.previous_ != nullptr ? x.previous_->next_ : list_.first) = x.next_;
  (x.next_ != nullptr ? x.next_->previous_ : list_.last) = x.previous_;
  x.kept_by_ = nullptr;
  --list_.size;
}

void deadline_watch::for_each(const std::function<void(operation&)>& act) {
  std::vector<std::shared_ptr<completion>> all;
  {
    std::lock_guard lock{list_.mutex};
    all.reserve(list_.size);
    for (auto* x = list_.first; x != nullptr; x = x->next_)
      all.push_back(x->shared_from_this());
  }
  for (auto& x : all)
    act(static_cast<operation&>(*x));
}

std::uint64_t deadline_watch::call_at(clock::time_point when, std::function<void()> act) {
  std::lock_guard lock{mutex_};
  if (stop_)
    return 0;
  auto id = ++next_call_;
  calls_.push_back({id, when, std::move(act)});
  wake_at(when);
  return id;
}

void deadline_watch::cancel_call(std::uint64_t id) noexcept {
  std::lock_guard lock{mutex_};
  std::erase_if(calls_, [id](const call& x) { return x.id == id; });
}

std::size_t deadline_watch::size() const noexcept {
  std::lock_guard lock{list_.mutex};
  return list_.size;
}

void deadline_watch::wake_at(clock::time_point when) {
  if (when >= next_.load())
    return;
  next_ = when;
  condition_.notify_one();
}

void deadline_watch::count_anew(const std::vector<std::shared_ptr<completion>>& stalled) {
  std::lock_guard lock{mutex_};
  auto now = clock::now();
  for (auto& i : stalled) {
    auto& x = static_cast<operation&>(*i);
    std::lock_guard its{list_.mutex};
    x.count_stall_anew(now.time_since_epoch().count());
    wake_at(due(x, now));
  }
}

/// Finds the operations that are late. Under mutex_.
void deadline_watch::look(clock::time_point now) {
  std::lock_guard lock{list_.mutex};
  for (auto* x = list_.first; x != nullptr; x = x->next_) {
    if (!x->completed() && x->deadline <= now)
      expired_.push_back(x->shared_from_this());
    if (auto started = x->first_started_at();
        x->stall_limit > 0 && !x->stall_reported_ && !x->over() && started != 0 &&
        time_.passed(at(started), now) >= std::chrono::nanoseconds{x->stall_limit}) {
      x->stall_reported_ = true;
      suspected_.push_back(x->shared_from_this());
    }
    next_ = std::min(next_.load(), due(*x, now));
  }
}

void deadline_watch::ask(const std::shared_ptr<completion>& who, clock::time_point now) {
  const auto& x = static_cast<operation&>(*who);
  auto& asked = suspects_.emplace_back(suspect{who, {}, now + tick});
  for (auto& p : x.parts())
    if (const auto state = p.at.load(std::memory_order_acquire);
        state == part::state::issued || state == part::state::started)
      asked.looks.emplace_back(p.on, p.on->whole_look());
  lane::wake(x.parts());
}

std::vector<std::shared_ptr<completion>> deadline_watch::take_stalled(clock::time_point now) {
  std::vector<std::shared_ptr<completion>> result;
  std::erase_if(suspects_, [&](suspect& x) {
    const bool looked = std::all_of(x.looks.begin(), x.looks.end(),
                                    [](auto& one) { return one.first->looks() >= one.second; });
    if (!looked && now < x.until)
      return false;
    result.push_back(std::move(x.who));
    return true;
  });
  return result;
}

/// Blocks until there may be something to do, or for a tick. Under mutex_.
void deadline_watch::wait(std::unique_lock<std::mutex>& lock, clock::time_point next) {
  if (std::exchange(quiet_, false) && suspects_.empty() && rest(lock))
    return;
  if (next == clock::time_point::max())
    return condition_.wait(lock);
  const auto until = std::min(next, clock::now() + tick);
  const auto ended = condition_.wait_until(lock, until);
  time_.look(until, clock::now());
  quiet_ = ended == std::cv_status::timeout && size() == 0;
}

/// Blocks without ticks until a call is due or an operation is added. Returns false, without
/// blocking, if an operation is watched. Under mutex_.
bool deadline_watch::rest(std::unique_lock<std::mutex>& lock) {
  const auto next = next_.exchange(clock::time_point::max()); // so that `add` wakes this thread
  const bool rests = size() == 0;
  if (rests) {
    condition_.wait_until(lock, std::min(next, clock::now() + longest_rest));
    // If the process was stopped after an operation had come, and before this thread woke up, the
    // time in between does not count.
    const auto now = clock::now();
    auto came = now;
    {
      std::lock_guard its{list_.mutex};
      if (list_.first != nullptr && list_.first->admitted_at != 0)
        came = std::min(came, at(list_.first->admitted_at));
    }
    time_.look(came, now);
  }
  next_ = std::min(next_.load(), next);
  return rests;
}

void deadline_watch::run() {
  forbid_blocking("the deadline watch");
  std::unique_lock lock{mutex_};
  std::vector<std::function<void()>> called;
  while (!stop_) {
    auto now = clock::now();
    auto stalled = take_stalled(now);
    if (auto next = next_.load(); now < next && stalled.empty()) {
      wait(lock, suspects_.empty() ? next : std::min(next, now + between_looks));
      continue;
    }
    next_ = clock::time_point::max();
    look(now);
    for (auto i = calls_.begin(); i != calls_.end();) {
      if (i->when <= now) {
        called.push_back(std::move(i->act));
        i = calls_.erase(i);
      } else {
        next_ = std::min(next_.load(), i->when);
        ++i;
      }
    }
    auto expired = std::move(expired_);
    auto suspected = std::move(suspected_);
    lock.unlock();
    for (auto& x : suspected)
      ask(x, now);
    std::erase_if(stalled, [](const auto& x) { // before `expire`: its error says more
      return static_cast<operation&>(*x).on_stall();
    });
    for (auto& x : expired)
      static_cast<operation&>(*x).expire();
    for (auto& f : called)
      f();
    expired.clear();
    called.clear();
    count_anew(stalled);
    stalled.clear(); // without the lock: destructors may call this object
    suspected.clear();
    lock.lock();
  }
  lock.unlock();
  suspects_.clear();
}

} // namespace troupe::detail
