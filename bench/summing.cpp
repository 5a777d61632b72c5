#include "summing.hpp"

#include "checking.hpp"

#include <algorithm>
#include <string>
#include <vector>

namespace bench {

namespace {

/// Contents are copied to and from the ranks in pieces of this many elements.
constexpr auto piece = std::size_t{61} * 65536;

/// Rank r has (r + 1) * weight(i) at element i.
float weight(std::size_t i) { return static_cast<float>(i % 61 + 1); }

/// Returns the factor of the weights after `operations` in place. Each one after the first
/// multiplies by the number of ranks.
double factor_after(std::size_t operations, std::size_t ranks) {
  auto result = static_cast<double>(ranks * (ranks + 1)) / 2;
  for (std::size_t k = 1; k < operations; ++k)
    result *= static_cast<double>(ranks);
  return result;
}

/// Returns the number of operations, at most `most`, with results and intermediate values that
/// float32 holds exactly.
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

} // namespace

void summing_contestant::verify(std::size_t size_bytes, std::size_t window) {
  const auto count = size_bytes / sizeof(float);
  const auto longest = std::min(count, piece);
  for_each_at_once(ranks(), [&](std::size_t rank) {
    std::vector<float> numbers(longest);
    for (std::size_t i = 0; i < longest; ++i)
      numbers[i] = static_cast<float>(rank + 1) * weight(i);
    for_pieces(count, piece, [&](std::size_t first, std::size_t n) {
      write(rank, first, std::span{numbers}.first(n));
    });
  });
  const auto operations = exact_operations(ranks(), window);
  sum(count, operations, window);
  const auto factor = factor_after(operations, ranks());
  for_each_at_once(ranks(), [&](std::size_t rank) {
    std::vector<float> numbers(longest);
    for_pieces(count, piece, [&](std::size_t first, std::size_t n) {
      std::fill(numbers.begin(), numbers.end(), -1.0f);
      read(rank, first, std::span{numbers}.first(n));
      for (std::size_t i = 0; i < n; ++i)
        if (numbers[i] != static_cast<float>(factor * weight(i)))
          fail(name() + ", " + std::to_string(size_bytes) + " bytes, " + std::to_string(window) +
               " in flight: rank " + std::to_string(rank) + " has " + std::to_string(numbers[i]) +
               " at element " + std::to_string(first + i) + ", not " +
               std::to_string(factor * weight(i)));
    });
  });
  clear(count); // sums of zeros stay zeros
}

} // namespace bench
