#include "copies.hpp"

#include "checking.hpp"

#include <algorithm>
#include <atomic>
#include <string>

namespace bench {

namespace {

/// Contents are copied to and from the devices in pieces of this many words.
constexpr auto piece = std::size_t{1} << 20;

/// Content of a route's buffer: word k is `first + k * step`. No two contents of a process have the
/// same word at the same place.
struct content {
  std::uint64_t first;

  static constexpr std::uint64_t step = 0x9E3779B97F4A7C15;

  std::uint64_t at(std::size_t k) const { return first + k * step; }
};

content new_content() {
  static std::atomic<std::uint64_t> number{0};
  return {(number.fetch_add(1) + 1) * 0xD1B54A32D192ED03}; // odd, so that no content repeats
}

} // namespace

std::vector<route> routes_between(const std::vector<int>& devices) {
  std::vector<route> result;
  for (std::size_t step = 1; step < devices.size(); ++step)
    for (std::size_t i = 0; i < devices.size(); ++i)
      result.push_back({devices[i], devices[(i + step) % devices.size()]});
  return result;
}

void copying_contestant::verify(std::size_t size_bytes, std::size_t window) {
  const auto words = size_bytes * window / sizeof(std::uint64_t);
  std::vector<content> contents(routes());
  std::generate(contents.begin(), contents.end(), new_content);
  for_each_at_once(routes(), [&](std::size_t i) {
    std::vector<std::uint64_t> numbers(std::min(words, piece));
    for_pieces(words, piece, [&](std::size_t first, std::size_t n) {
      for (std::size_t k = 0; k < n; ++k)
        numbers[k] = contents[i].at(first + k);
      write(i, first * sizeof(std::uint64_t), std::as_bytes(std::span{numbers}.first(n)));
    });
  });
  run(size_bytes, window, window);
  for_each_at_once(routes(), [&](std::size_t i) {
    std::vector<std::uint64_t> numbers(std::min(words, piece));
    for_pieces(words, piece, [&](std::size_t first, std::size_t n) {
      std::fill(numbers.begin(), numbers.end(), contents[i].at(words)); // wrong at every place
      read(i, first * sizeof(std::uint64_t), std::as_writable_bytes(std::span{numbers}.first(n)));
      for (std::size_t k = 0; k < n; ++k)
        if (numbers[k] != contents[i].at(first + k))
          fail(name() + ", " + std::to_string(size_bytes) + " bytes, " + std::to_string(window) +
               " in flight: wrong over route " + std::to_string(i) + " at byte " +
               std::to_string((first + k) * sizeof(std::uint64_t)));
    });
  });
}

} // namespace bench
