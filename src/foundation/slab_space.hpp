/// Gives out ranges of slabs: large pieces of device memory. Only numbers, no memory is touched, so
/// that the parent of a worker can keep it when the worker dies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace troupe::detail {

/// A range of a slab.
struct slab_range {
  std::uint32_t slab = 0;
  std::size_t begin = 0; ///< bytes
  std::size_t size_bytes = 0;
};

/// The free and the taken ranges of all slabs of a device. Takes the smallest free range that is
/// large enough, and joins free ranges that touch: at most half of a slab can be lost between
/// allocations of one size. @thread one at a time
class slab_space {
public:
  static constexpr std::size_t alignment = 512; ///< of each range; sizes are rounded up to it
  static constexpr std::size_t most_slabs = 256;

  /// Adds a slab, and returns its number; none: there are `most_slabs`.
  std::optional<std::uint32_t> add(std::size_t size_bytes);
  /// Removes a slab of which nothing is taken.
  void remove(std::uint32_t slab);

  /// Takes a range; none: no free range is large enough.
  std::optional<slab_range> take(std::size_t size_bytes);
  /// Gives back what `take` returned. Returns whether nothing of its slab is taken now.
  bool give_back(const slab_range& x);

  std::size_t taken_bytes() const noexcept { return taken_bytes_; }
  std::size_t free_bytes() const noexcept { return free_bytes_; }
  /// Returns the size of the largest range that can be taken.
  std::size_t largest_free() const noexcept {
    return by_size_.empty() ? 0 : by_size_.rbegin()->first;
  }
  std::size_t slabs() const noexcept { return slabs_; }

private:
  struct slab {
    std::size_t size_bytes = 0;                ///< 0: there is none of this number
    std::map<std::size_t, std::size_t> free{}; ///< begin to size
  };
  using free_range = std::pair<std::size_t, std::pair<std::uint32_t, std::size_t>>;

  void insert(std::uint32_t where, std::size_t begin, std::size_t size_bytes);
  void erase(std::uint32_t where, std::map<std::size_t, std::size_t>::iterator what);

  std::vector<slab> all_;
  std::set<free_range> by_size_; ///< size, then slab and begin: low numbers first
  std::size_t slabs_ = 0;
  std::size_t taken_bytes_ = 0;
  std::size_t free_bytes_ = 0;
};

} // namespace troupe::detail
