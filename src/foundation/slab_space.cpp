#include "foundation/slab_space.hpp"

#include <algorithm>
#include <iterator>

namespace troupe::detail {

namespace {

constexpr std::size_t rounded(std::size_t size_bytes) noexcept {
  const auto size = std::max<std::size_t>(size_bytes, 1);
  return (size + slab_space::alignment - 1) / slab_space::alignment * slab_space::alignment;
}

} // namespace

std::optional<std::uint32_t> slab_space::add(std::size_t size_bytes) {
  if (slabs_ == most_slabs)
    return std::nullopt;
  auto at = std::ranges::find(all_, std::size_t{0}, &slab::size_bytes);
  if (at == all_.end())
    at = all_.insert(at, slab{});
  at->size_bytes = size_bytes / alignment * alignment;
  ++slabs_;
  const auto number = static_cast<std::uint32_t>(at - all_.begin());
  insert(number, 0, at->size_bytes);
  return number;
}

void slab_space::remove(std::uint32_t number) {
  auto& x = all_[number];
  erase(number, x.free.begin());
  x = {};
  --slabs_;
}

std::optional<slab_range> slab_space::take(std::size_t size_bytes) {
  if (size_bytes > SIZE_MAX - alignment)
    return std::nullopt;
  const auto size = rounded(size_bytes);
  const auto found = by_size_.lower_bound({size, {}});
  if (found == by_size_.end())
    return std::nullopt;
  const auto [whole, place] = *found;
  erase(place.first, all_[place.first].free.find(place.second));
  if (whole > size)
    insert(place.first, place.second + size, whole - size);
  taken_bytes_ += size;
  return slab_range{place.first, place.second, size};
}

bool slab_space::give_back(const slab_range& x) {
  auto& free = all_[x.slab].free;
  auto begin = x.begin;
  auto end = x.begin + x.size_bytes;
  auto next = free.lower_bound(begin);
  if (next != free.end() && next->first == end) {
    end += next->second;
    erase(x.slab, next);
  }
  if (const auto before = free.lower_bound(begin); before != free.begin()) {
    const auto last = std::prev(before);
    if (last->first + last->second == begin) {
      begin = last->first;
      erase(x.slab, last);
    }
  }
  insert(x.slab, begin, end - begin);
  taken_bytes_ -= x.size_bytes;
  return end - begin == all_[x.slab].size_bytes;
}

void slab_space::insert(std::uint32_t where, std::size_t begin, std::size_t size_bytes) {
  all_[where].free.emplace(begin, size_bytes);
  by_size_.emplace(size_bytes, std::pair{where, begin});
  free_bytes_ += size_bytes;
}

void slab_space::erase(std::uint32_t where, std::map<std::size_t, std::size_t>::iterator what) {
  by_size_.erase({what->second, {where, what->first}});
  free_bytes_ -= what->second;
  all_[where].free.erase(what);
}

} // namespace troupe::detail
