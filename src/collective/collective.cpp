#include "foundation/collective_rules.hpp"
#include "foundation/enum_name.hpp"
#include <troupe/collective.hpp>

#include <utility>

namespace troupe {

std::string_view to_string(room_policy x) noexcept { return detail::enum_name(x); }

std::string_view to_string(collective_kind x) noexcept { return detail::rules_of(x).name; }
std::string_view to_string(collective_way x) noexcept { return detail::enum_name(x); }

namespace {

collective of(collective_kind kind, std::vector<any_gpu_ref> send, std::vector<any_gpu_ref> recv) {
  collective result;
  result.kind = kind;
  result.send = std::move(send);
  result.recv = std::move(recv);
  return result;
}

collective reducing(collective_kind kind, std::vector<any_gpu_ref> send,
                    std::vector<any_gpu_ref> recv, reduce_op op, std::vector<double> factors) {
  auto result = of(kind, std::move(send), std::move(recv));
  result.op = op;
  result.factors = std::move(factors);
  return result;
}

collective rooted(collective x, std::int32_t root) {
  x.peer = root;
  return x;
}

} // namespace

collective all_reduce::form() const {
  return reducing(collective_kind::all_reduce, send, recv, op, factors);
}

collective reduce::form() const {
  return rooted(reducing(collective_kind::reduce, send, {recv}, op, factors), root);
}

collective broadcast::form() const {
  return rooted(of(collective_kind::broadcast, {send}, recv), root);
}

collective all_gather::form() const { return of(collective_kind::all_gather, send, recv); }

collective reduce_scatter::form() const {
  return reducing(collective_kind::reduce_scatter, send, recv, op, factors);
}

collective all_to_all::form() const { return of(collective_kind::all_to_all, send, recv); }

collective all_to_all_v::form() const {
  auto result = of(collective_kind::all_to_all_v, send, recv);
  result.counts = counts;
  return result;
}

collective gather::form() const { return rooted(of(collective_kind::gather, send, {recv}), root); }

collective scatter::form() const {
  return rooted(of(collective_kind::scatter, {send}, recv), root);
}

collective send_recv::form() const {
  auto result = of(collective_kind::send, {send}, {recv});
  result.rank = from;
  result.peer = to;
  return result;
}

collective barrier::form() const { return of(collective_kind::barrier, {}, {}); }

} // namespace troupe
