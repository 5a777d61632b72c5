/// Uses of handles.
#pragma once

#include "operation/operation.hpp"
#include <troupe/gpu_ref.hpp>

#include <cstddef>

namespace troupe::detail {

/// Returns a `use` of all of `ref` by part `part`.
use use_of(const any_gpu_ref& ref, bool reads, bool writes, std::size_t part = 0);

/// Returns whether `a` and `b` share bytes.
bool overlap(const any_gpu_ref& a, const any_gpu_ref& b) noexcept;

} // namespace troupe::detail
