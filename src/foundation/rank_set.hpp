/// A set of ranks of a world.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace troupe::detail {

/// Holds ranks below `most`. A larger world uses only empty sets.
class rank_set {
public:
  static constexpr std::size_t most = 64;

  constexpr rank_set() noexcept = default;
  constexpr explicit rank_set(std::uint64_t bits) noexcept : bits_(bits) {}
  static constexpr rank_set of(std::size_t rank) noexcept {
    return rank_set{std::uint64_t{1} << rank};
  }

  /// Returns the first `number` ranks, or an empty set if these are more than `most`.
  static constexpr rank_set all(std::size_t number) noexcept {
    if (number > most)
      return {};
    return rank_set{number == most ? ~std::uint64_t{0} : (std::uint64_t{1} << number) - 1};
  }

  constexpr bool contains(std::size_t rank) const noexcept {
    return rank < most && (bits_ >> rank & 1) != 0;
  }
  constexpr rank_set with(std::size_t rank) const noexcept {
    return rank_set{bits_ | of(rank).bits_};
  }
  constexpr rank_set without(std::size_t rank) const noexcept {
    return rank < most ? rank_set{bits_ & ~of(rank).bits_} : *this;
  }
  constexpr std::size_t size() const noexcept {
    return static_cast<std::size_t>(std::popcount(bits_));
  }
  /// Returns how many ranks of the set are lower than `rank`.
  constexpr std::size_t below(std::size_t rank) const noexcept {
    return rank < most ? rank_set{bits_ & (of(rank).bits_ - 1)}.size() : size();
  }
  /// Returns the lowest rank. The set is not empty.
  constexpr std::size_t first() const noexcept {
    return static_cast<std::size_t>(std::countr_zero(bits_));
  }
  constexpr bool includes(rank_set other) const noexcept { return (other.bits_ & ~bits_) == 0; }
  constexpr bool empty() const noexcept { return bits_ == 0; }
  constexpr std::uint64_t bits() const noexcept { return bits_; }

  friend constexpr bool operator==(rank_set, rank_set) noexcept = default;

private:
  std::uint64_t bits_ = 0;
};

} // namespace troupe::detail
