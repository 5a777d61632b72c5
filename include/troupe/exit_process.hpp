/// The end of a process whose devices are lost.
#pragma once

#include <string_view>

namespace troupe {

/// Ends the process now, with status `code`, and does not return. Writes `message` as a line to
/// stderr, and what is on its way to the log, to the flight record and to stdout, as far as that
/// succeeds within half a second. Static objects are not destroyed and no exit handler runs: those
/// of CUDA may wait for what never comes.
///
/// For a program that has got an error of `severity::process`, and so can only begin anew: from an
/// actor, a continuation or a launch callable as well, and while a lane is stuck in a call. An
/// ordinary return from main works too, for programs that have something to clean up: all
/// destructors of the library return, and on CUDA the process ends half a second after `exit` began
/// if the exit handlers of other libraries have not returned by then. What a program must not do
/// then is join threads of its own that have used `cudaStreamPerThread`: CUDA may never let them
/// end (seen with CUDA 13.0). The first of several callers decides; the others wait for the end.
/// @thread any; not a signal handler
[[noreturn]] void exit_process(int code, std::string_view message) noexcept;

} // namespace troupe
