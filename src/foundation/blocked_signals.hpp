/// Keeps signals away from a thread.
#pragma once

#include <csignal>
#include <initializer_list>

namespace troupe::detail {

/// Blocks signals in this thread during its lifetime. A thread that is started meanwhile has them
/// blocked for good.
class blocked_signals {
public:
  /// Blocks all signals except these.
  explicit blocked_signals(std::initializer_list<int> except = {}) noexcept {
    sigset_t all;
    ::sigfillset(&all);
    for (const int x : except)
      ::sigdelset(&all, x);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~blocked_signals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  blocked_signals(const blocked_signals&) = delete;
  blocked_signals& operator=(const blocked_signals&) = delete;

private:
  sigset_t before_{};
};

} // namespace troupe::detail
