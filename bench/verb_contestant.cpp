#include "verb_contestant.hpp"

#include "checking.hpp"

#include <algorithm>
#include <string>
#include <vector>

namespace bench {

namespace {

constexpr contestant_label labels[] = {
    {"raw", "threads", "raw, a thread per rank"},
    {"nccl", "facade", "troupe nccl, facade"},
    {"direct", "facade", "troupe direct, facade"},
    {"nccl", "message", "troupe nccl, message"},
    {"direct", "message", "troupe direct, message"},
    {"nccl", "rank_local", "troupe nccl, rank-local"},
    {"direct", "rank_local", "troupe direct, rank-local"},
    {"raw", "grouped", "raw, one thread, grouped", false},
};

/// Contents are copied to and from the ranks in pieces of this many elements.
constexpr auto piece = std::size_t{61} * 65536;

/// Each block has a factor, by which the weight of element i is multiplied.
float weight(std::size_t i) { return static_cast<float>(i % 61 + 1); }

/// Returns the factor of a block that `rank` sends: another one for each rank and block.
double factor_sent(std::size_t rank, std::size_t block, std::size_t ranks) {
  return static_cast<double>(rank + block * ranks + 1);
}

/// Returns the factor of a block in the result of one operation.
double factor_received(const verb& what, std::size_t rank, std::size_t block, std::size_t ranks) {
  const auto sent = what.send.block_of(rank);
  if (!what.sums)
    return factor_sent(what.source_of(rank, block, ranks), sent, ranks);
  double result = 0;
  for (std::size_t sender = 0; sender < ranks; ++sender)
    result += factor_sent(sender, sent, ranks);
  return result;
}

/// Returns the factor by which `operations` in place multiply the result of one operation. Each one
/// after the first multiplies by the number of ranks.
double repetition_of(std::size_t operations, std::size_t ranks) {
  double result = 1;
  for (std::size_t k = 1; k < operations; ++k)
    result *= static_cast<double>(ranks);
  return result;
}

/// Returns the number of sums in place, at most `most`, with results and intermediate values that
/// float32 holds exactly.
std::size_t exact_operations(const verb& what, std::size_t ranks, std::size_t most) {
  const auto first = factor_received(what, 0, 0, ranks);
  const auto holds = [&](std::size_t operations) {
    const auto factor = first * repetition_of(operations, ranks);
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

std::span<const contestant_label> all_labels() noexcept { return labels; }

const contestant_label& label_of(std::string_view text) {
  for (auto& x : labels)
    if (x.text == text)
      return x;
  fail("no contestant has the name " + std::string{text});
}

void verb_contestant::verify(std::size_t size_bytes, std::size_t window) {
  const auto count = size_bytes / sizeof(float);
  for_each_at_once(ranks(), [&](std::size_t rank) { fill(rank, count); });
  const auto operations = what_.in_place() ? exact_operations(what_, ranks(), window) : window;
  drive(count, operations, window);
  const auto repetition = what_.in_place() ? repetition_of(operations, ranks()) : 1;
  for_each_at_once(ranks(), [&](std::size_t rank) {
    if (what_.recv.held(rank))
      compare(rank, count, window, repetition);
    if (what_.in_place()) { // sums of zeros stay zeros
      const std::vector<float> zeros(std::min(count, piece));
      for_pieces(count, piece, [&](std::size_t first, std::size_t n) {
        write(rank, direction::send, first, std::span{zeros}.first(n));
      });
    }
  });
}

/// Writes what the rank sends, and poison to what it receives.
void verb_contestant::fill(std::size_t rank, std::size_t count) {
  std::vector<float> numbers(std::min(count, piece));
  const auto write_block = [&](direction where, std::size_t block) {
    for_pieces(count, piece, [&](std::size_t first, std::size_t n) {
      write(rank, where, block * count + first, std::span{numbers}.first(n));
    });
  };
  if (what_.send.held(rank))
    for (std::size_t block = 0; block < what_.send.blocks(ranks()); ++block) {
      const auto factor = static_cast<float>(factor_sent(rank, block, ranks()));
      for (std::size_t i = 0; i < numbers.size(); ++i)
        numbers[i] = factor * weight(i);
      write_block(direction::send, block);
    }
  if (what_.in_place() || !what_.recv.held(rank))
    return;
  std::fill(numbers.begin(), numbers.end(), -1.0f);
  for (std::size_t block = 0; block < what_.recv.blocks(ranks()); ++block)
    write_block(direction::recv, block);
}

void verb_contestant::compare(std::size_t rank, std::size_t count, std::size_t window,
                              double repetition) {
  std::vector<float> numbers(std::min(count, piece));
  const auto where = what_.in_place() ? direction::send : direction::recv;
  for (std::size_t block = 0; block < what_.recv.blocks(ranks()); ++block) {
    const auto factor = factor_received(what_, rank, block, ranks()) * repetition;
    for_pieces(count, piece, [&](std::size_t first, std::size_t n) {
      std::fill(numbers.begin(), numbers.end(), -1.0f);
      read(rank, where, block * count + first, std::span{numbers}.first(n));
      for (std::size_t i = 0; i < n; ++i)
        if (numbers[i] != static_cast<float>(factor * weight(i)))
          fail(name() + ", " + std::string{what_.name} + ", blocks of " +
               std::to_string(count * sizeof(float)) + " bytes, " + std::to_string(window) +
               " in flight: rank " + std::to_string(rank) + " has " + std::to_string(numbers[i]) +
               " at element " + std::to_string(first + i) + " of block " + std::to_string(block) +
               ", not " + std::to_string(factor * weight(i)));
    });
  }
}

} // namespace bench
