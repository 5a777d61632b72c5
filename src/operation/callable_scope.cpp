#include "operation/callable_scope.hpp"

#include <algorithm>

namespace troupe::detail {

namespace {
thread_local const operation* in_callable = nullptr;
} // namespace

callable_scope::callable_scope(const operation& of) noexcept { in_callable = &of; }

callable_scope::~callable_scope() { in_callable = nullptr; }

bool callable_scope::covers(const buffer& memory, std::size_t begin, std::size_t end) noexcept {
  if (in_callable == nullptr)
    return false;
  auto& uses = in_callable->uses();
  return std::any_of(uses.begin(), uses.end(), [&](const use& u) {
    return u.memory.get() == &memory && u.begin <= begin && end <= u.end;
  });
}

} // namespace troupe::detail
