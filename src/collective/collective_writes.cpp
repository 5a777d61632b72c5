#include "collective/collective_writes.hpp"

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
  if (x.kind == collective_kind::all_reduce)
    return add_writes(to, x.send);
  if (x.kind != collective_kind::reduce_scatter)
    return;
  for (std::size_t i = 0; i < x.send.size(); ++i) {
    auto& ref = x.send[i];
    if (!ref || ref.count() % ranks != 0)
      continue;
    auto count = ref.count() / ranks;
    if (auto part = ref.slice((first_rank + i) % ranks * count, count))
      add_write(to, *part);
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
