#include "core/skipping.hpp"

#include "core/order.hpp"

namespace troupe::detail {

bool fails_validation(const caf::error& why) noexcept {
  switch (code_of(why).value_or(errc::internal)) {
  case errc::stale_ref: // of a handle that never had memory
    return failure_of(why)->generation == 0;
  case errc::invalid_argument:
  case errc::shape_mismatch:
  case errc::out_of_range:
  case errc::not_supported:
  case errc::buffer_acquired:
  case errc::would_block:
    return true;
  default:
    return false;
  }
}

bool counts_among_calls(const caf::error& why, std::uint64_t membership) noexcept {
  const auto code = code_of(why);
  if (code == errc::buffer_acquired) // another process or stream holds it: a matter of timing
    return true;
  return !fails_validation(why) && (code != errc::membership_changed || membership == 0);
}

void add_write(std::vector<use>& to, const any_gpu_ref& ref) {
  if (ref && ref.size_bytes() != 0)
    to.push_back({ref.memory(), ref.offset(), ref.offset() + ref.size_bytes(), false, true});
}

void add_writes(std::vector<use>& to, std::span<const any_gpu_ref> refs) {
  for (auto& x : refs)
    add_write(to, x);
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

void mark_skipped(std::span<const use> writes, const caf::error& why, std::uint64_t number) {
  std::lock_guard lock{order_mutex()};
  for (auto& x : writes)
    x.memory->mark({x.begin, x.end, why, number});
}

} // namespace troupe::detail
