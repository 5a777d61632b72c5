#include "operation/use_of.hpp"

#include <cstdint>

namespace troupe::detail {

use use_of(const any_gpu_ref& ref, bool reads, bool writes, std::size_t part) {
  return {ref.memory(), ref.offset(), ref.offset() + ref.size_bytes(),
          reads,        writes,       static_cast<std::uint32_t>(part)};
}

bool overlap(const any_gpu_ref& a, const any_gpu_ref& b) noexcept {
  return a.memory() == b.memory() && a.offset() < b.offset() + b.size_bytes() &&
         b.offset() < a.offset() + a.size_bytes();
}

} // namespace troupe::detail
