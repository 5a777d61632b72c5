/// The names of enumerators, as the compiler writes them.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>
#include <utility>

namespace troupe::detail {

/// Returns the name of the enumerator `value`; "unknown" if no enumerator has this value.
template <auto value> consteval std::string_view enumerator_name() {
  // Compilers write "... value = troupe::errc::stalled; ..." or "... value = (troupe::errc)99;
  // ...".
  std::string_view text = __PRETTY_FUNCTION__;
  constexpr std::string_view before = "value = ";
  text.remove_prefix(text.find(before) + before.size());
  text = text.substr(0, text.find_first_of(";]"));
  text.remove_prefix(text.find_last_of(":)") + 1);
  const bool is_number = text.front() == '-' || (text.front() >= '0' && text.front() <= '9');
  return is_number ? "unknown" : text;
}

/// Returns the name of `x`, one of the first 64 values of its type.
template <class E> constexpr std::string_view enum_name(E x) noexcept {
  constexpr auto all = []<std::size_t... i>(std::index_sequence<i...>) {
    return std::array{enumerator_name<static_cast<E>(i)>()...};
  }(std::make_index_sequence<64>{});
  const auto i = static_cast<std::size_t>(x);
  return i < all.size() ? all[i] : "unknown";
}

} // namespace troupe::detail
