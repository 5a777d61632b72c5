#include "worker/protocol/worker_signals.hpp"

#include <initializer_list>

namespace troupe::detail {

sigset_t program_signals() noexcept {
  sigset_t result;
  ::sigfillset(&result);
  for (const int fault : {SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS})
    ::sigdelset(&result, fault);
  for (const int without_effect : {SIGCHLD, SIGCONT, SIGURG, SIGWINCH})
    ::sigdelset(&result, without_effect);
  for (const int unstoppable : {SIGKILL, SIGSTOP})
    ::sigdelset(&result, unstoppable);
  return result;
}

/// The calls fail for signal numbers that the C library reserves for itself. Such numbers are
/// skipped.
void ignore_program_signals() noexcept {
  const auto all = program_signals();
  for (int x = 1; x < NSIG; ++x) {
    struct sigaction now{};
    if (::sigismember(&all, x) != 1 || ::sigaction(x, nullptr, &now) != 0 ||
        (now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL)
      continue;
    struct sigaction ignore{};
    ignore.sa_handler = SIG_IGN;
    ::sigaction(x, &ignore, nullptr);
  }
  ::pthread_sigmask(SIG_UNBLOCK, &all, nullptr);
}

} // namespace troupe::detail
