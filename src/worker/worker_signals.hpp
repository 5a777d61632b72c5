/// Signals that would end or stop a worker which has done nothing wrong.
#pragma once

#include <signal.h>

namespace troupe::detail {

/// The signals that end or stop a process by default. The signals by which a process tells of a
/// fault of its own (SIGSEGV, SIGABRT, ...) are not among them, nor are SIGKILL and SIGSTOP. They
/// are for the program: a terminal and `kill` send them to its whole process group, a batch system
/// to all processes of a job. Workers have their state to lose, and end with their parent.
sigset_t program_signals() noexcept;

/// Ignores the program's signals whose action is the default one, and unblocks them all. For a
/// worker, which starts with all of them blocked.
void ignore_program_signals() noexcept;

} // namespace troupe::detail
