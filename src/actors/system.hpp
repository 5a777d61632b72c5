/// The state of one actor system: the runtime and, while they are needed, the actors of its
/// devices.
#pragma once

#include "runtime/runtime.hpp"
#include <troupe/config.hpp>
#include <troupe/log.hpp>

#include <caf/actor.hpp>
#include <caf/actor_system.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace troupe::detail {

class answer_spinner;
class program_board;

/// Registers the library's messages with CAF.
void register_types(config& cfg);

/// Spawns the root of the device actors.
caf::actor spawn_devices(caf::actor_system& sys, std::shared_ptr<runtime> owner);

/// Returns the log level for the fact that CUDA is not used because of `why`: info if the machine
/// has no GPU, warning if, for example, its driver is broken.
log_level level_without_cuda(const caf::error& why);

/// The holder of a lease: handles of the user, or an actor that the user must end.
enum class lease_holder { handle, actor };

/// Keeps the device actors alive; the last lease ends them.
struct system_lease : std::enable_shared_from_this<system_lease> {
  system_lease(caf::actor_system& s, caf::actor r) : system(s), root(std::move(r)) {}
  ~system_lease();
  system_lease(const system_lease&) = delete;
  system_lease& operator=(const system_lease&) = delete;

  /// Returns this lease as held by `what`, which `holders` names while copies of the result exist.
  std::shared_ptr<system_lease> held_by(std::string what, lease_holder how);
  /// Returns for the log each object once, with what is missing for its end.
  std::vector<std::string> holders() const;

  caf::actor_system& system;
  const caf::actor root;

private:
  struct held;

  mutable std::mutex mutex_;
  std::multiset<std::pair<std::string, lease_holder>> holders_; // under mutex_
};

/// Lives in the configuration, so longer than the actor system.
class system_core {
public:
  explicit system_core(const config& cfg) : config_(cfg) {}
  ~system_core();

  /// @errors errc::invalid_argument: the system's configuration is no `troupe::config`
  static caf::expected<system_core*> of(caf::actor_system& sys);

  /// Makes the backend at the first call; if that fails, each later call has the same error.
  /// @errors errc::unavailable, not_supported: the backend is not available;
  ///         errc::invalid_argument: an option is wrong
  caf::expected<std::shared_ptr<detail::runtime>> runtime();
  /// Returns why the host backend was chosen.
  std::string reason();
  void use_backend(std::shared_ptr<backend> backend);

  /// Sets how long an actor system waits for its actors before the log says why. Called before the
  /// first lease.
  void set_shutdown_patience(std::chrono::nanoseconds x) noexcept { shutdown_patience_ = x; }

  /// Returns the current lease, or spawns the root of the device actors for a new one.
  caf::expected<std::shared_ptr<system_lease>> lease(caf::actor_system& sys);

  /// Returns the job that spins for answers to actors of `sys`.
  answer_spinner& spinner(caf::actor_system& sys);

  /// Returns the worlds whose ranks are driven in other processes. Called after `runtime`.
  std::shared_ptr<program_board> programs();

  const config& settings() const noexcept { return config_; }

private:
  /// `without_cuda`: set to the reason if virtual devices are used without a request for them.
  caf::error choose_backend(caf::error& without_cuda);
  /// Checks the options, and chooses the backend unless there is one. Needs `mutex_`.
  caf::error prepare(caf::error& without_cuda);
  caf::error check_names() const;
  caf::error check_numbers() const;
  caf::error check_effects() const;
  caf::error check_settings() const;
  placement wanted_placement() const;
  remote_hosts wanted_hosts() const;
  host_backend_options wanted_host() const;
  cuda_backend_options wanted_cuda() const;
  lane_options wanted_lanes() const;

  const config& config_;
  std::mutex mutex_;
  std::shared_ptr<backend> backend_;
  std::string reason_;
  std::shared_ptr<detail::runtime> runtime_;
  caf::error failure_; // of `prepare`
  std::weak_ptr<system_lease> lease_;
  std::chrono::nanoseconds shutdown_patience_ = std::chrono::seconds{5};
  std::shared_ptr<program_board> programs_;
  std::once_flag spinner_made_;
  std::shared_ptr<answer_spinner> spinner_;
};

/// Returns whether a thread is in `~actor_system`, or in `await_all_actors_done`, and waits for
/// actors to end. Also false if that is unknown with the CAF version or the C library.
bool waits_for_actors(caf::actor_system& sys) noexcept;

/// Watches the actor system of a lease while the lease is held. Once the system has waited for its
/// actors for `patience`, logs the holders of the lease, and again after pauses that double.
void watch_shutdown(deadline_watch& deadlines, std::weak_ptr<system_lease> lease,
                    std::chrono::nanoseconds patience);

} // namespace troupe::detail
