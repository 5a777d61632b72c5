/// The last that a program runs.
#pragma once

#include <functional>

namespace troupe::testing {

/// Has `f` run when the process ends, after the destructors of all static objects and all other
/// exit handlers. Once per process.
void at_the_very_end(std::function<void()> f);

} // namespace troupe::testing
