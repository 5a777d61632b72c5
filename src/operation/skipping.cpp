#include "operation/skipping.hpp"

#include "operation/admission_lock.hpp"

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

void add_write(std::vector<use>& to, const any_gpu_ref& ref) {
  if (ref && ref.size_bytes() != 0)
    to.push_back({ref.memory(), ref.offset(), ref.offset() + ref.size_bytes(), false, true});
}

void add_writes(std::vector<use>& to, std::span<const any_gpu_ref> refs) {
  for (auto& x : refs)
    add_write(to, x);
}

void mark_skipped(std::span<const use> writes, const caf::error& why, std::uint64_t number) {
  admission_lock lock;
  for (auto& x : writes)
    x.memory->mark({x.begin, x.end, why, number});
}

} // namespace troupe::detail
