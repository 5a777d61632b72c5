/// Keeps objects that an abandoned thread may still use.
#pragma once

#include <memory>

namespace troupe::detail {

/// Keeps `x` until the process ends.
void keep_forever(std::shared_ptr<void> x);

} // namespace troupe::detail
