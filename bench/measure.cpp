#include "measure.hpp"

#include "statistics.hpp"

#include <algorithm>
#include <thread>

#include <sys/resource.h>

namespace bench {

namespace {

/// Contents travel to and from the ranks in pieces of so many elements.
constexpr auto piece = std::size_t{61} * 65536;

/// Contents are checked again in each round up to this size.
constexpr std::size_t cheap_to_check = std::size_t{1} << 20;

/// Rank r has (r + 1) * weight(i) at element i.
float weight(std::size_t i) { return static_cast<float>(i % 61 + 1); }

/// Each further operation in place multiplies what the first one gives by the number of ranks.
double factor_after(std::size_t operations, std::size_t ranks) {
  auto result = static_cast<double>(ranks * (ranks + 1)) / 2;
  for (std::size_t k = 1; k < operations; ++k)
    result *= static_cast<double>(ranks);
  return result;
}

/// How many operations, `most` at most, give numbers that float32 holds exactly, on the way too.
std::size_t exact_operations(std::size_t ranks, std::size_t most) {
  const auto holds = [ranks](std::size_t operations) {
    const auto factor = factor_after(operations, ranks);
    for (std::size_t i = 0; i < 61; ++i)
      if (const auto x = factor * weight(i) * static_cast<double>(ranks);
          x > 1e38 || static_cast<double>(static_cast<float>(x)) != x)
        return false;
    return true;
  };
  std::size_t result = 1;
  while (result < most && holds(result + 1))
    ++result;
  return result;
}

/// `work(rank)` on a thread for each.
template <class F> void for_ranks(std::size_t ranks, F work) {
  std::vector<std::thread> threads;
  threads.reserve(ranks);
  for (std::size_t r = 0; r < ranks; ++r)
    threads.emplace_back(work, r);
  for (auto& x : threads)
    x.join();
}

/// `work(first, count)` for the pieces of `total` elements.
template <class F> void for_pieces(std::size_t total, F work) {
  for (std::size_t first = 0; first < total; first += piece)
    work(first, std::min(piece, total - first));
}

/// Runs `who` as it is going to be timed, and compares every element of every rank.
void check_sums(const cell& where, contestant& who) {
  const auto count = where.count();
  const auto longest = std::min(count, piece);
  for_ranks(who.ranks(), [&](std::size_t rank) {
    std::vector<float> numbers(longest);
    for (std::size_t i = 0; i < longest; ++i)
      numbers[i] = static_cast<float>(rank + 1) * weight(i);
    for_pieces(count, [&](std::size_t first, std::size_t n) {
      who.write(rank, first, std::span{numbers}.first(n));
    });
  });
  const auto operations = exact_operations(who.ranks(), where.window);
  who.run(count, operations, where.window);
  const auto factor = factor_after(operations, who.ranks());
  for_ranks(who.ranks(), [&](std::size_t rank) {
    std::vector<float> numbers(longest);
    for_pieces(count, [&](std::size_t first, std::size_t n) {
      std::fill(numbers.begin(), numbers.end(), -1.0f);
      who.read(rank, first, std::span{numbers}.first(n));
      for (std::size_t i = 0; i < n; ++i)
        if (numbers[i] != static_cast<float>(factor * weight(i)))
          fail(who.name() + ", " + where.label() + ": rank " + std::to_string(rank) + " has " +
               std::to_string(numbers[i]) + " at element " + std::to_string(first + i) + ", not " +
               std::to_string(factor * weight(i)));
    });
  });
  who.clear(count); // zeros stay zeros, however often they are summed
}

/// Checks all contestants once, and finds out how many operations fill a segment.
void prepare(cell& x, const effort& how_much, watchdog& guard) {
  for (auto* who : x.contestants) {
    guard.enter("first check of " + who->name() + ", " + x.label());
    check_sums(x, *who);
    x.results.push_back({who->name(), {}, {}, {}});
  }
  auto& first = *x.contestants.front();
  guard.enter("trial of " + first.name() + ", " + x.label());
  const auto trial = std::max<std::size_t>(5, 2 * x.window);
  const auto one = first.run(x.count(), trial, x.window).per_operation;
  const auto fitting = static_cast<double>(how_much.segment.count()) / one;
  x.operations = static_cast<std::size_t>(
      std::clamp(fitting, static_cast<double>(std::max<std::size_t>(10, 4 * x.window)), 10000.0));
}

/// The median of one segment.
double run_segment(const cell& x, contestant& who, series& result, watchdog& guard) {
  guard.enter(who.name() + ", " + x.label());
  if (x.size_bytes <= cheap_to_check)
    check_sums(x, who);
  who.run(x.count(), std::max<std::size_t>(3, std::min(2 * x.window, x.operations / 10)), x.window);
  auto times = who.run(x.count(), x.operations, x.window);
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
  auto result = std::to_string(size_bytes) + " bytes";
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
