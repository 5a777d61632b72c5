#include "foundation/slab_book.hpp"

#include <algorithm>

namespace troupe::detail {

bool slab_book::add(slab what) {
  const auto number = space_.add(what.size());
  if (number)
    slabs_.emplace(*number, entry{what, clock::now()});
  return number.has_value();
}

std::optional<std::pair<std::byte*, slab_range>> slab_book::take(std::size_t size_bytes) {
  const auto range = space_.take(size_bytes);
  if (!range)
    return std::nullopt;
  auto& in = slabs_.at(range->slab);
  in.empty_since.reset();
  return std::pair{in.what.data() + range->begin, *range};
}

bool slab_book::give_back(const slab_range& x) {
  const bool is_empty = space_.give_back(x);
  if (is_empty)
    slabs_.at(x.slab).empty_since = clock::now();
  return is_empty;
}

std::optional<slab_book::slab> slab_book::take_empty(clock::time_point when) {
  const auto found = std::ranges::find_if(slabs_, [when](const auto& x) {
    return x.second.empty_since && *x.second.empty_since <= when;
  });
  if (found == slabs_.end())
    return std::nullopt;
  space_.remove(found->first);
  const auto result = found->second.what;
  slabs_.erase(found);
  return result;
}

std::optional<slab_book::clock::time_point> slab_book::first_empty() const {
  std::optional<clock::time_point> result;
  for (const auto& [number, x] : slabs_)
    if (x.empty_since && (!result || *x.empty_since < *result))
      result = x.empty_since;
  return result;
}

std::vector<slab_book::slab> slab_book::all() const {
  std::vector<slab> result;
  for (const auto& [number, x] : slabs_)
    result.push_back(x.what);
  return result;
}

} // namespace troupe::detail
