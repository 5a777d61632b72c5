#pragma once

#include "support/world_fixture.hpp"

namespace troupe::testing {

/// Returns whether requests that write `ref` are refused, also while earlier ones are not over.
inline bool is_acquired(const device& d, const any_gpu_ref& ref) {
  auto probe = d.accept(ref);
  probe.cancel();
  return code_of(error_of(answer_of(probe))) == errc::buffer_acquired;
}

} // namespace troupe::testing
