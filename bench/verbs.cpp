#include "verbs.hpp"

namespace bench {

namespace {

using enum buffer_rule::holders;
using call = troupe::collective_kind;

constexpr buffer_rule nothing{};
constexpr buffer_rule block{all};
constexpr buffer_rule blocks{all, true};
constexpr buffer_rule block_at_root{root};
constexpr buffer_rule blocks_at_root{root, true};
constexpr buffer_rule block_at_second{second};

constexpr verb table[] = {
    {verb_kind::all_reduce, "all_reduce", call::all_reduce, block, block, true},
    {verb_kind::reduce, "reduce", call::reduce, block, block_at_root, true},
    {verb_kind::broadcast, "broadcast", call::broadcast, block_at_root, block},
    {verb_kind::all_gather, "all_gather", call::all_gather, block, blocks},
    {verb_kind::reduce_scatter, "reduce_scatter", call::reduce_scatter, blocks, block, true},
    {verb_kind::all_to_all, "all_to_all", call::all_to_all, blocks, blocks},
    {verb_kind::gather, "gather", call::gather, block, blocks_at_root},
    {verb_kind::scatter, "scatter", call::scatter, blocks_at_root, block},
    {verb_kind::send_recv, "send_recv", call::send, block_at_root, block_at_second, false, 2},
    {verb_kind::exchange, "exchange", call::send, block, block},
    {verb_kind::barrier, "barrier", call::barrier, nothing, nothing},
};

} // namespace

double verb::bus_factor(std::size_t ranks) const noexcept {
  const auto n = static_cast<double>(ranks);
  if (kind == verb_kind::all_reduce)
    return 2 * (n - 1) / n;
  if (kind == verb_kind::barrier)
    return 0;
  return send.per_rank || recv.per_rank ? n - 1 : 1;
}

std::span<const verb> all_verbs() noexcept { return table; }

const verb* find_verb(std::string_view name) noexcept {
  for (auto& x : table)
    if (x.name == name)
      return &x;
  return nullptr;
}

} // namespace bench
