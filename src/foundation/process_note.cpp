#include "foundation/process_note.hpp"

#include <troupe/error.hpp>

#include <utility>

namespace troupe::detail {

caf::error brief(const caf::error& why) {
  constexpr std::size_t most_text = 1024;
  if (!why)
    return why;
  auto x = failure_of(why);
  if (!x) // sent as an error of this library
    x.emplace().detail = describe(why);
  if (x->detail.size() <= most_text)
    return why;
  x->detail.resize(most_text);
  return make_error(std::move(*x));
}

} // namespace troupe::detail
