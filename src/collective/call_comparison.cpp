#include "collective/call_comparison.hpp"

#include "foundation/collective_rules.hpp"
#include <troupe/backend.hpp>
#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>

#include <algorithm>
#include <type_traits>
#include <utility>

namespace troupe::detail {

namespace {

/// Compares all but the kind.
bool same_shape(const collective_call& a, const collective_call& b) noexcept {
  return a.what == collective_kind::barrier ||
         (a.type == b.type && a.count == b.count && a.op == b.op &&
          (!has_root(a.what) || a.peer == b.peer));
}

bool has_symmetric_form(const collective_call& x) noexcept {
  if (!reduces(x.what) || !rules_of(x.what).symmetric)
    return rules_of(x.what).symmetric;
  switch (x.type) {
  case dtype::float16:
  case dtype::bfloat16:
  case dtype::float32:
  case dtype::float8_e4m3:
  case dtype::float8_e5m2:
    return x.op == reduce_op::sum;
  default:
    return false;
  }
}

} // namespace

bool alike(const rank_call& a, const rank_call& b) noexcept {
  return a.call.what == b.call.what && same_shape(a.call, b.call);
}

std::string difference(const rank_call& a, const rank_call& b) {
  auto apart = [&](const auto& of_a, const auto& of_b) {
    auto text = [](const auto& x) {
      if constexpr (std::is_integral_v<std::decay_t<decltype(x)>>)
        return std::to_string(x);
      else
        return std::string{x};
    };
    return "rank " + std::to_string(b.rank) + " called " + text(of_b) + " where rank " +
           std::to_string(a.rank) + " called " + text(of_a);
  };
  auto described = [](const rank_call& x) {
    auto text = std::string{to_string(x.call.what)} + " of " + elements(x.call.count) + " of " +
                std::string{to_string(x.call.type)};
    if (reduces(x.call.what))
      text += " with " + std::string{to_string(x.call.op)};
    if (has_root(x.call.what))
      text += " with root " + std::to_string(x.call.peer);
    return text;
  };
  if (!a.is_message() && a.call.what != b.call.what)
    return apart(to_string(a.call.what), to_string(b.call.what));
  if (!same_shape(a.call, b.call))
    return apart(described(a), described(b));
  if (a.plan)
    for (auto [from, to] : {std::pair{&a, &b}, std::pair{&b, &a}})
      if (auto sent = from->plan->send_counts[to->rank], wanted = to->plan->recv_counts[from->rank];
          sent != wanted)
        return "rank " + std::to_string(from->rank) + " sends " + elements(sent) + " to rank " +
               std::to_string(to->rank) + ", which receives " + std::to_string(wanted);
  return {};
}

bool is_symmetric(std::span<const rank_call* const> calls, std::size_t ranks,
                  std::size_t limit) noexcept {
  auto& first = *calls.front();
  if (first.send_place.of == nullptr || first.recv_place.of == nullptr || calls.size() != ranks ||
      ranks < 2 || !has_symmetric_form(first.call))
    return false;
  const auto& rules = rules_of(first.call.what);
  auto bytes = first.call.count * size_of(first.call.type) * (rules.per_rank() ? ranks : 1);
  if (bytes == 0 || bytes > limit)
    return false;
  bool in_place = std::all_of(calls.begin(), calls.end(),
                              [](auto* x) { return uses_own_block(x->call, x->rank); });
  return std::all_of(calls.begin(), calls.end(), [&](const rank_call* x) {
    bool same_send = x->send_place == first.send_place;
    bool same_recv = x->recv_place == first.recv_place;
    if (x->call.what != first.call.what || x->send_place.of != first.send_place.of ||
        x->recv_place.of != first.recv_place.of)
      return false;
    if (in_place)
      return rules.recv.per_rank ? same_recv : same_send;
    return same_send && same_recv;
  });
}

} // namespace troupe::detail
