/// Handles to memory of another actor system of the process.
#pragma once

#include "operation/buffer.hpp"
#include "operation/device_state.hpp"
#include <troupe/gpu_ref.hpp>

namespace troupe::detail {

inline constexpr const char* foreign_handle = "the handle belongs to another actor system";

/// Returns whether the memory of `ref`, which has some, is of another actor system than `here`.
inline bool is_foreign(const any_gpu_ref& ref, const device_state& here) noexcept {
  return ref.memory()->home().node() != here.node();
}

} // namespace troupe::detail
