#include "core/timekeeper.hpp"

#include "core/operation.hpp"
#include "core/spin.hpp"

#include <algorithm>

namespace troupe::detail {

namespace {

clock::time_point at(std::int64_t nanoseconds) {
  return clock::time_point{std::chrono::nanoseconds{nanoseconds}};
}

} // namespace

/// Work that has not started cannot stall before the limit.
clock::time_point timekeeper::due(const operation& x, clock::time_point now) {
  auto result = x.answered() || x.deadline <= now ? clock::time_point::max() : x.deadline;
  if (x.stall_limit > 0 && !x.stall_told_) {
    auto started = x.first_started_at();
    auto begin = started != 0 ? at(started) : now;
    if (std::chrono::nanoseconds limit{x.stall_limit}; limit < clock::time_point::max() - begin)
      result = std::min(result, begin + limit);
  }
  return result;
}

timekeeper::timekeeper() : thread_([this] { run(); }) {}

timekeeper::~timekeeper() { stop(); }

void timekeeper::stop() noexcept {
  {
    std::lock_guard lock{mutex_};
    stop_ = true;
  }
  condition_.notify_one();
  if (thread_.joinable())
    thread_.join();
}

void timekeeper::add(operation& x) {
  auto when = std::min(x.deadline, due(x, at(x.admitted_at)));
  hot_lock lock{mutex_};
  x.kept_by_ = this;
  x.previous_ = last_;
  x.next_ = nullptr;
  (last_ != nullptr ? last_->next_ : first_) = &x;
  last_ = &x;
  ++size_;
  wake_at(when);
}

void timekeeper::remove(operation& x) noexcept {
  hot_lock lock{mutex_};
  if (!x.watched())
    return;
  (x.previous_ != nullptr ? x.previous_->next_ : first_) = x.next_;
  (x.next_ != nullptr ? x.next_->previous_ : last_) = x.previous_;
  x.kept_by_ = nullptr;
  --size_;
}

void timekeeper::for_each(const std::function<void(operation&)>& act) {
  std::vector<std::shared_ptr<completion>> all;
  {
    std::lock_guard lock{mutex_};
    all.reserve(size_);
    for (auto* x = first_; x != nullptr; x = x->next_)
      all.push_back(x->shared_from_this());
  }
  for (auto& x : all)
    act(static_cast<operation&>(*x));
}

std::uint64_t timekeeper::call_at(clock::time_point when, std::function<void()> act) {
  std::lock_guard lock{mutex_};
  auto id = ++next_call_;
  calls_.push_back({id, when, std::move(act)});
  wake_at(when);
  return id;
}

void timekeeper::cancel_call(std::uint64_t id) noexcept {
  std::lock_guard lock{mutex_};
  std::erase_if(calls_, [id](const call& x) { return x.id == id; });
}

std::size_t timekeeper::size() const noexcept {
  std::lock_guard lock{mutex_};
  return size_;
}

void timekeeper::wake_at(clock::time_point when) {
  if (when >= next_)
    return;
  next_ = when;
  condition_.notify_one();
}

void timekeeper::count_anew(const std::vector<std::shared_ptr<completion>>& stalled) {
  std::lock_guard lock{mutex_};
  auto now = clock::now();
  for (auto& i : stalled) {
    auto& x = static_cast<operation&>(*i);
    x.count_stall_anew(now.time_since_epoch().count());
    wake_at(due(x, now));
  }
}

void timekeeper::run() {
  forbid_blocking("the timekeeper");
  std::unique_lock lock{mutex_};
  std::vector<std::shared_ptr<completion>> expired;
  std::vector<std::shared_ptr<completion>> stalled;
  std::vector<std::function<void()>> called;
  while (!stop_) {
    auto now = clock::now();
    if (now < next_) {
      if (next_ == clock::time_point::max())
        condition_.wait(lock);
      else
        condition_.wait_until(lock, next_);
      continue;
    }
    next_ = clock::time_point::max();
    for (auto* x = first_; x != nullptr; x = x->next_) {
      if (!x->answered() && x->deadline <= now)
        expired.push_back(x->shared_from_this());
      if (auto started = x->first_started_at();
          x->stall_limit > 0 && !x->stall_told_ && started != 0 &&
          now - at(started) >= std::chrono::nanoseconds{x->stall_limit}) {
        x->stall_told_ = true;
        stalled.push_back(x->shared_from_this());
      }
      next_ = std::min(next_, due(*x, now));
    }
    for (auto i = calls_.begin(); i != calls_.end();) {
      if (i->when <= now) {
        called.push_back(std::move(i->act));
        i = calls_.erase(i);
      } else {
        next_ = std::min(next_, i->when);
        ++i;
      }
    }
    lock.unlock();
    std::erase_if(stalled, [](const auto& x) { // first: its error says more
      return static_cast<operation&>(*x).on_stall();
    });
    for (auto& x : expired)
      static_cast<operation&>(*x).expire();
    for (auto& f : called)
      f();
    expired.clear();
    called.clear();
    count_anew(stalled);
    stalled.clear();
    lock.lock();
  }
}

} // namespace troupe::detail
