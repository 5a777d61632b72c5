/// For what a thread that was given up may still use.
#pragma once

#include <memory>

namespace troupe::detail {

/// Never frees it.
void keep_forever(std::shared_ptr<void> x);

} // namespace troupe::detail
