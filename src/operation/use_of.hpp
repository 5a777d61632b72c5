/// Uses of handles.
#pragma once

#include "operation/device_state.hpp"
#include "operation/operation.hpp"
#include <troupe/gpu_ref.hpp>

#include <cstddef>

namespace troupe::detail {

/// Returns a `use` of all of `ref` by part `part`.
use use_of(const any_gpu_ref& ref, bool reads, bool writes, std::size_t part = 0);

/// Returns whether `a` and `b` share bytes.
bool overlap(const any_gpu_ref& a, const any_gpu_ref& b) noexcept;

inline constexpr const char* foreign_handle = "the handle belongs to another actor system";

/// Returns whether the memory of `ref`, which has some, is of another actor system than `here`.
inline bool is_foreign(const any_gpu_ref& ref, const device_state& here) noexcept {
  return ref.memory()->home().node() != here.node();
}

} // namespace troupe::detail
