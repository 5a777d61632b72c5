#include "support/very_end.hpp"

#include <cstdlib>
#include <utility>

namespace troupe::testing {

namespace {

std::function<void()>* last_function = nullptr; // never destroyed

/// Exit handlers and destructors of static objects run in reverse order of registration. This
/// constructor registers its handler before all others, so it runs last.
[[gnu::constructor(101)]] void register_first() {
  if (std::atexit([] {
        if (last_function != nullptr)
          (*last_function)();
      }) != 0)
    std::abort();
}

} // namespace

void at_the_very_end(std::function<void()> f) {
  last_function = new std::function<void()>{std::move(f)};
}

} // namespace troupe::testing
