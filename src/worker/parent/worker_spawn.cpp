#include "worker/parent/worker_spawn.hpp"

#include "foundation/log.hpp"
#include "foundation/system_call.hpp"
#include "worker/parent/worker_process.hpp"
#include "worker/protocol/worker_page.hpp"
#include "worker/protocol/worker_parent.hpp"

#include <cerrno>
#include <csignal>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace troupe::detail {

namespace {

constexpr int worker_descriptor = STDERR_FILENO + 1;

/// Older C libraries do not wrap this system call.
int open_pidfd(pid_t id) noexcept { return static_cast<int>(::syscall(SYS_pidfd_open, id, 0)); }

/// Settings for `posix_spawn`. The destructor destroys initialized objects.
class spawn_settings {
public:
  spawn_settings() noexcept {
    has_actions_ =
        call("posix_spawn_file_actions_init", ::posix_spawn_file_actions_init, &actions_);
    has_attributes_ = call("posix_spawnattr_init", ::posix_spawnattr_init, &attributes_);
  }
  ~spawn_settings() {
    if (has_attributes_)
      ::posix_spawnattr_destroy(&attributes_);
    if (has_actions_)
      ::posix_spawn_file_actions_destroy(&actions_);
  }
  spawn_settings(const spawn_settings&) = delete;
  spawn_settings& operator=(const spawn_settings&) = delete;

  /// Passes the standard streams; /dev/null replaces closed and close-on-exec ones. A descriptor
  /// that has such a number later is never the library's.
  caf::error pass_standard_streams() {
    for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
      const int flags = ::fcntl(stream, F_GETFD);
      if (flags >= 0 && (flags & FD_CLOEXEC) == 0)
        continue;
      if (!null_)
        null_ = file_descriptor{::open("/dev/null", O_RDWR | O_CLOEXEC)};
      if (!null_)
        return system_failure("open", errno,
                              "cannot open /dev/null for a worker's standard streams");
      call("posix_spawn_file_actions_adddup2", ::posix_spawn_file_actions_adddup2, &actions_,
           null_.get(), stream);
    }
    return {};
  }

  /// Passes the worker's socket, as the last of its descriptors.
  void pass(int socket) noexcept {
    call("posix_spawn_file_actions_adddup2", ::posix_spawn_file_actions_adddup2, &actions_, socket,
         worker_descriptor);
    call("posix_spawn_file_actions_addclosefrom_np", ::posix_spawn_file_actions_addclosefrom_np,
         &actions_, worker_descriptor + 1);
  }

  void keep_from_signals() noexcept {
    const auto blocked = program_signals();
    sigset_t all;
    ::sigfillset(&all);
    call("posix_spawnattr_setsigmask", ::posix_spawnattr_setsigmask, &attributes_, &blocked);
    call("posix_spawnattr_setsigdefault", ::posix_spawnattr_setsigdefault, &attributes_, &all);
    call("posix_spawnattr_setpgroup", ::posix_spawnattr_setpgroup, &attributes_, 0);
    call("posix_spawnattr_setflags", ::posix_spawnattr_setflags, &attributes_,
         POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  }

  caf::expected<pid_t> spawn(const worker_options& options) {
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
    pid_t id = -1;
    if (!call("posix_spawn", ::posix_spawn, &id, options.program.c_str(), &actions_, &attributes_,
              arguments.data(), variables.data()))
      return system_failure(api_, error_,
                            "cannot start the worker " + options.name + ": " + system_text(error_));
    return id;
  }

private:
  /// Calls `f`, unless an earlier call has failed. Returns whether no call has failed.
  template <class F, class... Args> bool call(const char* api, F f, Args... arguments) noexcept {
    if (error_ == 0) {
      api_ = api;
      error_ = f(arguments...);
    }
    return error_ == 0;
  }

  file_descriptor null_;
  posix_spawn_file_actions_t actions_{};
  posix_spawnattr_t attributes_{};
  bool has_actions_ = false;
  bool has_attributes_ = false;
  const char* api_ = "";
  int error_ = 0;
};

} // namespace

caf::expected<spawned_worker> spawn_worker(const worker_options& options, int socket) {
  spawn_settings settings;
  if (auto error = settings.pass_standard_streams())
    return error;
  settings.pass(socket);
  settings.keep_from_signals();
  const auto id = settings.spawn(options);
  if (!id)
    return id.error();
  // It is not reaped yet, so the number is still its own.
  file_descriptor pidfd{open_pidfd(*id)};
  if (!pidfd) {
    auto why = system_failure("pidfd_open", errno, "cannot watch the worker " + options.name);
    if (::kill(*id, SIGKILL) != 0 && errno != ESRCH)
      log(log_level::error, "a worker", system_failure("kill", errno, "it may run on"));
    while (::waitpid(*id, nullptr, 0) < 0 && errno == EINTR) {
    }
    return why;
  }
  return spawned_worker{*id, std::move(pidfd)};
}

} // namespace troupe::detail
