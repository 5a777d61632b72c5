/// Signals that would end or stop a worker from outside, though it has no fault.
#pragma once

#include <signal.h>

namespace troupe::detail {

/// Returns the signals that end or stop a process by default, without SIGKILL, SIGSTOP and the
/// signals of a process's own fault (SIGSEGV, SIGABRT, ...).
/// They are meant for the program: a terminal or `kill` sends them to its whole process group, a
/// batch system to all processes of a job. Workers have state to lose, and end with their parent.
sigset_t program_signals() noexcept;

/// Ignores the program's signals that have the default action, and unblocks them all. For a worker,
/// which starts with all of them blocked.
void ignore_program_signals() noexcept;

} // namespace troupe::detail
