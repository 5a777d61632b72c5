#include "measure.hpp"

#include "statistics.hpp"

#include <algorithm>
#include <thread>

#include <sys/resource.h>

namespace bench {

namespace {

/// Up to this size contents are checked again in each round.
constexpr std::size_t cheap_to_check = std::size_t{1} << 20;

/// Checks all contestants once, and finds the number of operations that fill a segment.
void prepare(cell& x, const effort& how_much, watchdog& guard) {
  for (auto* who : x.contestants) {
    guard.enter("first check of " + who->name() + ", " + x.label());
    who->verify(x.size_bytes, x.window);
    x.results.push_back({who->name(), {}, {}, {}});
  }
  auto& first = *x.contestants.front();
  guard.enter("trial of " + first.name() + ", " + x.label());
  const auto trial = std::max<std::size_t>(5, 2 * x.window);
  const auto one = first.run(x.size_bytes, trial, x.window).per_operation;
  const auto fitting = static_cast<double>(how_much.segment.count()) / one;
  x.operations = static_cast<std::size_t>(
      std::clamp(fitting, static_cast<double>(std::max<std::size_t>(10, 4 * x.window)), 10000.0));
}

/// Returns the median of one segment.
double run_segment(const cell& x, contestant& who, series& result, watchdog& guard) {
  guard.enter(who.name() + ", " + x.label());
  if (x.size_bytes <= cheap_to_check)
    who.verify(x.size_bytes, x.window);
  who.run(x.size_bytes, std::max<std::size_t>(3, std::min(2 * x.window, x.operations / 10)),
          x.window);
  auto times = who.run(x.size_bytes, x.operations, x.window);
  const auto typical = times.each.empty() ? times.per_operation : median(times.each);
  result.rounds.push_back(typical);
  result.each.insert(result.each.end(), times.each.begin(), times.each.end());
  return typical;
}

void run_round(cell& x, watchdog& guard) {
  if (!x.has_reference) {
    for (std::size_t i = 0; i < x.contestants.size(); ++i)
      run_segment(x, *x.contestants[i], x.results[i], guard);
    return;
  }
  auto before = run_segment(x, *x.contestants[0], x.results[0], guard);
  for (std::size_t i = 1; i < x.contestants.size(); ++i) {
    const auto time = run_segment(x, *x.contestants[i], x.results[i], guard);
    const auto after = run_segment(x, *x.contestants[0], x.results[0], guard);
    x.results[i].ratios.push_back(time / ((before + after) / 2));
    before = after;
  }
}

double cpu_seconds() {
  rusage used{};
  if (getrusage(RUSAGE_SELF, &used) != 0)
    fail("getrusage failed");
  const auto seconds = [](const timeval& x) {
    return static_cast<double>(x.tv_sec) + static_cast<double>(x.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

} // namespace

std::string cell::label() const {
  auto result = what.empty() ? "" : what + ", ";
  result += std::to_string(size_bytes) + " bytes";
  if (window > 1)
    result += ", " + std::to_string(window) + " in flight";
  return result;
}

void measure(std::vector<cell>& cells, const effort& how_much, watchdog& guard) {
  for (auto& x : cells)
    prepare(x, how_much, guard);
  for (std::size_t round = 0; round < how_much.rounds; ++round)
    for (auto& x : cells)
      run_round(x, guard);
}

double idle_percent(std::chrono::milliseconds time) {
  const auto cpu = cpu_seconds();
  const auto start = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(time);
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - start;
  return 100 * (cpu_seconds() - cpu) / wall.count();
}

} // namespace bench
