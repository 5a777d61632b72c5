/// A function that runs last in a process.
#pragma once

#include <functional>

namespace troupe::testing {

/// Runs `f` when the process ends, after the destructors of all static objects and all other exit
/// handlers. May be called once per process.
void at_the_very_end(std::function<void()> f);

} // namespace troupe::testing
