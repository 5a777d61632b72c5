/// The end of a process whose CUDA is gone.
#pragma once

namespace troupe::detail {

/// Bounds what an ordinary end of the process takes from now on: exit handlers of CUDA, of NCCL and
/// of others that call them may wait for what never comes. If they are not through within half a
/// second, the process ends without them, with the status that it wanted.
/// @thread any
void watch_exit() noexcept;

} // namespace troupe::detail
