/// The slabs of one owner: which ranges of them are in use, and since when nothing of a slab is.
#pragma once

#include "foundation/slab_space.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace troupe::detail {

/// Gives out memory of slabs by `slab_space`, and finds the slabs that are empty. Touches no
/// memory. @thread one at a time
class slab_book {
public:
  using clock = std::chrono::steady_clock;
  using slab = std::span<std::byte>;

  /// Adds a slab, which is empty. Returns false if there are `slab_space::most_slabs`.
  bool add(slab what);
  /// Takes a range, and returns its address; none: no free range is large enough.
  std::optional<std::pair<std::byte*, slab_range>> take(std::size_t size_bytes);
  /// Gives back what `take` returned. Returns whether its slab is empty now.
  bool give_back(const slab_range& x);
  /// Removes a slab that is empty since `when` or before.
  std::optional<slab> take_empty(clock::time_point when);
  /// Returns since when the first of the empty slabs is empty.
  std::optional<clock::time_point> first_empty() const;

  std::vector<slab> all() const;
  bool is_full() const noexcept { return space_.slabs() == slab_space::most_slabs; }
  std::size_t slabs() const noexcept { return space_.slabs(); }
  std::size_t free_bytes() const noexcept { return space_.free_bytes(); }
  std::size_t largest_free() const noexcept { return space_.largest_free(); }

private:
  struct entry {
    slab what;
    std::optional<clock::time_point> empty_since;
  };

  slab_space space_;
  std::map<std::uint32_t, entry> slabs_; ///< by number in `space_`
};

} // namespace troupe::detail
