/// Limits the time for the end of a process whose CUDA is lost.
#pragma once

namespace troupe::detail {

/// Limits the time that an ordinary exit of the process takes from now on. Exit handlers of CUDA,
/// of NCCL and of code that calls them may wait for good. After half a second, the process ends
/// without them, with its intended status.
/// @thread any
void watch_exit() noexcept;

} // namespace troupe::detail
