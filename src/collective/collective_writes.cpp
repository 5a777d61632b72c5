#include "collective/collective_writes.hpp"

#include "foundation/collective_rules.hpp"

namespace troupe::detail {

bool counts_among_calls(const caf::error& why, std::uint64_t membership) noexcept {
  const auto code = code_of(why);
  if (code == errc::buffer_acquired) // another process or stream holds it: a matter of timing
    return true;
  return !fails_validation(why) && (code != errc::membership_changed || membership == 0);
}

void add_writes(std::vector<use>& to, const collective_view& x, std::size_t ranks,
                std::size_t first_rank) {
  if (!x.recv.empty())
    return add_writes(to, x.recv);
  const auto& rules = rules_of(x.kind);
  if (!rules.recv.optional || ranks == 0) // an empty `world` has no ranks
    return;
  const auto blocks = rules.send.blocks(ranks);
  for (std::size_t i = 0; i < x.send.size(); ++i) {
    auto& ref = x.send[i];
    if (!ref || ref.count() % blocks != 0)
      continue;
    auto count = ref.count() / blocks;
    if (auto own = ref.slice(rules.send.block_of((first_rank + i) % ranks) * count, count))
      add_write(to, *own);
  }
}

void add_writes(std::vector<use>& to, const group& x, std::size_t ranks) {
  for (auto& call : x.calls)
    add_writes(to, collective_view{call}, ranks);
}

void add_writes(std::vector<use>& to, const exchange& x) {
  for (auto& end : x.recvs)
    add_write(to, end.buffer);
}

} // namespace troupe::detail
