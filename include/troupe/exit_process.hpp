/// Ends a process whose devices are lost.
#pragma once

#include <string_view>

namespace troupe {

/// Ends the process now, with status `code`, and does not return. Writes `message` as a line to
/// stderr, waits for flight records that are being written, and flushes the log and stdout. All
/// this takes at most half a second; the rest is lost. Destroys no static objects and runs no exit
/// handlers, because those of CUDA may block forever.
///
/// For a program that got an error of `severity::process`: only a new process can continue. It can
/// be called from an actor, a continuation or a launch callable, and while a lane is stuck in a
/// call. A return from main also works, for programs that have to clean up: all destructors of the
/// library return. On CUDA, the process then ends half a second after `exit` began, even if exit
/// handlers of other libraries have not returned. In this case the program must not join threads of
/// its own that have used `cudaStreamPerThread`: CUDA may never let them end (seen with CUDA 13.0).
/// If several threads call this function, the first call counts, and the others wait for the end.
/// @thread any; not a signal handler
[[noreturn]] void exit_process(int code, std::string_view message) noexcept;

} // namespace troupe
