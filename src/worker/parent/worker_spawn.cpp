#include "worker/parent/worker_spawn.hpp"

#include "foundation/blocked_signals.hpp"
#include "foundation/log.hpp"
#include "foundation/system_call.hpp"
#include "worker/parent/worker_process.hpp"
#include "worker/protocol/worker_page.hpp"
#include "worker/protocol/worker_parent.hpp"

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/// Of code that runs in the memory of another process: a sanitizer would note what it does there as
/// done by the other process.
#define TROUPE_NO_SANITIZER __attribute__((no_sanitize("address", "thread", "undefined")))

#if defined(__SANITIZE_THREAD__)
#define TROUPE_SANITIZES_THREADS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TROUPE_SANITIZES_THREADS 1
#endif
#endif
#ifdef TROUPE_SANITIZES_THREADS
/// The C library's function. The thread sanitizer replaces `clone` by one that takes a child with
/// the same memory for a copy.
extern "C" int __clone(int (*f)(void*), void* stack, int flags, void* argument, ...); // NOLINT
#define TROUPE_CLONE __clone
#else
#define TROUPE_CLONE ::clone
#endif

namespace troupe::detail {

namespace {

constexpr int worker_descriptor = STDERR_FILENO + 1;
/// In bytes, as the system calls for signals expect it.
constexpr std::size_t native_signal_set = _NSIG / 8;

/// The steps of the new process before it executes the worker's program. All of it is ready before
/// the process starts: that may neither allocate nor lock, since it shares the memory of this
/// process.
struct start_plan {
  pid_t parent = -1;
  int streams[worker_descriptor]{}; ///< descriptor for each standard stream; -1: it is passed on
  int socket = -1;
  sigset_t blocked{};
  const char* program = nullptr;
  char* const* arguments = nullptr;
  char* const* variables = nullptr;

  const char* api = nullptr; ///< the call that failed; null: none
  int code = 0;              ///< its errno
};

TROUPE_NO_SANITIZER int fail(start_plan& x, const char* api) noexcept {
  x.api = api;
  x.code = errno;
  while (true)
    ::syscall(SYS_exit_group, 127);
}

/// Passes the standard streams and the worker's socket, and closes every other descriptor.
TROUPE_NO_SANITIZER void pass_descriptors(start_plan& x) noexcept {
  for (int stream = 0; stream < worker_descriptor; ++stream)
    if (const int from = x.streams[stream]; from >= 0 && ::syscall(SYS_dup3, from, stream, 0) < 0)
      fail(x, "dup3");
  if (x.socket != worker_descriptor) {
    if (::syscall(SYS_dup3, x.socket, worker_descriptor, 0) < 0)
      fail(x, "dup3");
  } else if (::syscall(SYS_fcntl, x.socket, F_SETFD, 0) < 0) { // dup3 refuses equal descriptors
    fail(x, "fcntl");
  }
  ::closefrom(worker_descriptor + 1);
}

/// The new process, until the worker's program replaces it. Makes system calls without the C
/// library's functions where a sanitizer replaces these. Changes `errno` of the thread that starts
/// the process.
TROUPE_NO_SANITIZER int become_worker(void* argument) noexcept {
  auto& x = *static_cast<start_plan*>(argument);
  // First: if the process is stopped from here on, it ends with its parent nevertheless.
  if (::syscall(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0)
    fail(x, "prctl(PR_SET_PDEATHSIG)");
  // The parent may have ended before that. It has the number 0 if it is outside of this process's
  // name space of processes.
  if (const auto parent = ::syscall(SYS_getppid); parent != x.parent && parent != 0)
    fail(x, "getppid");
  static constexpr long default_action[8]{};     // no less than the kernel's `struct sigaction`
  for (int signal = 1; signal < _NSIG; ++signal) // fails for SIGKILL and SIGSTOP
    ::syscall(SYS_rt_sigaction, signal, default_action, nullptr, native_signal_set);
  if (::syscall(SYS_setpgid, 0, 0) != 0)
    fail(x, "setpgid");
  pass_descriptors(x);
  if (::syscall(SYS_rt_sigprocmask, SIG_SETMASK, &x.blocked, nullptr, native_signal_set) != 0)
    fail(x, "rt_sigprocmask");
  ::syscall(SYS_execve, x.program, x.arguments, x.variables);
  return fail(x, "execve");
}

/// Stack of the new process, with a page below it that ends the process if it is too small.
class start_stack {
public:
  start_stack() noexcept
      : place_(::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0)) {}
  ~start_stack() {
    if (place_ != MAP_FAILED && ::munmap(place_, size_bytes) != 0)
      log(log_level::warning, "a worker's start",
          system_failure("munmap", errno, "memory is left"));
  }
  start_stack(const start_stack&) = delete;
  start_stack& operator=(const start_stack&) = delete;

  /// Returns false if there is none; errno has the reason.
  bool ready() const noexcept {
    return place_ != MAP_FAILED &&
           ::mprotect(place_, static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)), PROT_NONE) == 0;
  }
  void* top() const noexcept { return static_cast<std::byte*>(place_) + size_bytes; }

private:
  static constexpr std::size_t size_bytes = 256 << 10; // pages may have 64 KiB

  void* const place_;
};

void await_end(pid_t id) noexcept {
  while (::waitpid(id, nullptr, 0) < 0 && errno == EINTR) {
  }
}

/// Starts a process that carries out the plan. Returns when the worker's program runs in it.
/// `posix_spawn` would do the same, but cannot have the kernel kill the process with its parent.
caf::expected<spawned_worker> start(start_plan& plan, const std::string& name) {
  const auto refused = [&](const char* api, int code) {
    return system_failure(api, code, "cannot start the worker " + name + ": " + system_text(code));
  };
  const start_stack stack;
  if (!stack.ready())
    return refused("mmap", errno);
  int native = -1;
  pid_t id = -1;
  int code = 0;
  {
    // A handler of this process must not run in the other one.
    const blocked_signals blocked;
    id = TROUPE_CLONE(become_worker, stack.top(), CLONE_VM | CLONE_VFORK | CLONE_PIDFD | SIGCHLD,
                      &plan, &native);
    code = errno;
  }
  if (id < 0)
    return refused("clone", code);
  file_descriptor pidfd{native};
  if (plan.api != nullptr) {
    await_end(id);
    return refused(plan.api, plan.code);
  }
  if (!pidfd) { // it had the number of a standard stream, and there is no other
    auto why = system_failure("fcntl", errno, "cannot watch the worker " + name);
    // It is not reaped yet, so the number is still its own.
    if (::kill(id, SIGKILL) != 0 && errno != ESRCH)
      log(log_level::error, "a worker", system_failure("kill", errno, "it may run on"));
    await_end(id);
    return why;
  }
  return spawned_worker{id, std::move(pidfd)};
}

/// Replaces closed and close-on-exec standard streams by /dev/null. A descriptor that has such a
/// number later is never the library's.
caf::error fill_streams(start_plan& plan, file_descriptor& null) {
  for (int i = 0; i < worker_descriptor; ++i) {
    const int flags = ::fcntl(i, F_GETFD);
    plan.streams[i] = -1;
    if (flags >= 0 && (flags & FD_CLOEXEC) == 0)
      continue;
    if (!null)
      null = file_descriptor{::open("/dev/null", O_RDWR | O_CLOEXEC)};
    if (!null)
      return system_failure("open", errno, "cannot open /dev/null for a worker's standard streams");
    plan.streams[i] = null.get();
  }
  return {};
}

} // namespace

caf::expected<spawned_worker> spawn_worker(const worker_options& options, int socket) {
  start_plan plan;
  plan.parent = ::getpid();
  plan.socket = socket;
  plan.blocked = program_signals();
  plan.program = options.program.c_str();
  file_descriptor null;
  if (auto error = fill_streams(plan, null))
    return error;
  std::vector<std::string> texts{options.name};
  texts.insert(texts.end(), options.arguments.begin(), options.arguments.end());
  texts.push_back(std::string{worker_flag} + std::to_string(worker_descriptor));
  std::vector<char*> arguments;
  for (auto& x : texts)
    arguments.push_back(x.data());
  arguments.push_back(nullptr);
  const auto of_mark = std::string{worker_variable} + "=";
  auto mark = of_mark + std::to_string(worker_descriptor);
  std::vector<char*> variables{mark.data()};
  for (char** x = environ; *x != nullptr; ++x)
    if (!std::string_view{*x}.starts_with(of_mark))
      variables.push_back(*x);
  variables.push_back(nullptr);
  plan.arguments = arguments.data();
  plan.variables = variables.data();
  return start(plan, options.name);
}

} // namespace troupe::detail
