/// Results of several requests as one.
#pragma once

#include <troupe/pending.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace troupe {

namespace detail {

using completions = std::vector<std::shared_ptr<completion>>;

/// Returns a completion that is answered when `awaited` of `parts` are, with what `gather` returns
/// for the index of the last of these. `gather` runs once, on the completing thread. Cancelling it
/// cancels all parts.
std::shared_ptr<completion> join(completions parts, std::size_t awaited,
                                 std::function<caf::error(std::size_t)> gather);

/// Returns the first error among completed `parts`, in their order.
caf::error first_error(const completions& parts);

template <class T>
using value_or_nothing = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

template <class T> value_or_nothing<T> value_of_done(const pending<T>& x) {
  if constexpr (std::is_void_v<T>)
    return {};
  else
    return *pending_access::value_of(x);
}

template <class T> completions completions_of(const std::vector<pending<T>>& all) {
  completions result;
  for (auto& x : all)
    result.push_back(pending_access::completion_of(x));
  return result;
}

} // namespace detail

/// Completes when all of them have. The values are in the same order. Cancelling it cancels all.
/// @shape  a value for each; of requests without values, none
/// @errors the first error in that order
template <class T> auto when_all(std::vector<pending<T>> all) {
  using values =
      std::conditional_t<std::is_void_v<T>, void, std::vector<detail::value_or_nothing<T>>>;
  auto parts = detail::completions_of(all);
  const auto number = parts.size();
  if constexpr (std::is_void_v<T>) {
    auto gather = [parts](std::size_t) { return detail::first_error(parts); };
    return pending<values>{detail::join(std::move(parts), number, std::move(gather)), nullptr};
  } else {
    auto to = std::make_shared<values>();
    auto gather = [parts, to, all = std::move(all)](std::size_t) {
      if (auto error = detail::first_error(parts))
        return error;
      for (auto& x : all)
        to->push_back(detail::value_of_done(x));
      return caf::error{};
    };
    return pending<values>{detail::join(std::move(parts), number, std::move(gather)), to};
  }
}

/// The same for requests of different types. In place of a missing value is a `std::monostate`.
template <class... Ts>
  requires(sizeof...(Ts) > 0)
pending<std::tuple<detail::value_or_nothing<Ts>...>> when_all(pending<Ts>... all) {
  using values = std::tuple<detail::value_or_nothing<Ts>...>;
  detail::completions parts{detail::pending_access::completion_of(all)...};
  // Values need not have a default.
  auto to = std::make_shared<std::vector<values>>();
  to->reserve(1);
  auto gather = [parts, to, ... xs = std::move(all)](std::size_t) {
    if (auto error = detail::first_error(parts))
      return error;
    to->emplace_back(detail::value_of_done(xs)...);
    return caf::error{};
  };
  const auto number = parts.size();
  return {detail::join(std::move(parts), number, std::move(gather)),
          std::shared_ptr<values>{to, to->data()}};
}

/// Completes when the first of them has, successfully or not, with its index. The others go on.
/// Cancelling it cancels all.
/// @errors errc::invalid_argument: there are none
template <class T> pending<std::size_t> when_any(const std::vector<pending<T>>& all) {
  if (all.empty())
    return pending<std::size_t>{make_error(errc::invalid_argument, "when_any of no requests")};
  auto to = std::make_shared<std::size_t>(0);
  return {detail::join(detail::completions_of(all), 1,
                       [to](std::size_t first) {
                         *to = first;
                         return caf::error{};
                       }),
          to};
}

} // namespace troupe
