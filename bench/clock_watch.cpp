#include "clock_watch.hpp"

#include <algorithm>

namespace bench {

namespace {

constexpr std::size_t cpus_for_a_thread = 8;
constexpr std::chrono::microseconds shortest_gap{100};

} // namespace

clock_watch::clock_watch() {
  const auto count = std::thread::hardware_concurrency() / cpus_for_a_thread;
  for (std::size_t i = 0; i < count; ++i)
    threads_.emplace_back([this] { look(); });
}

clock_watch::~clock_watch() {
  over_ = true;
  for (auto& x : threads_)
    x.join();
}

void clock_watch::look() {
  for (auto last = clock::now(); !over_;) {
    auto now = clock::now();
    if (now - last >= shortest_gap) {
      const std::lock_guard lock{mutex_};
      gaps_.push_back({last, now});
      now = clock::now();
    }
    last = now;
  }
}

clock_watch::clock::duration clock_watch::missed(clock::time_point from,
                                                 clock::time_point to) const {
  const std::lock_guard lock{mutex_};
  clock::duration result{};
  for (auto& x : gaps_)
    result = std::max(result, std::min(x.to, to) - std::max(x.from, from));
  return result;
}

} // namespace bench
