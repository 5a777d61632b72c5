/// What belongs to one actor system: the runtime and, while somebody needs them, the actors of its
/// devices.
#pragma once

#include "core/runtime.hpp"
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

/// How loud it is said that CUDA's devices are not used because of `why`: a machine without a GPU
/// is as it is meant to be, one whose driver is broken is not.
log_level level_without_cuda(const caf::error& why);

/// How a lease is held: by handles of the user's, or by an actor that the user has to end.
enum class lease_holder { handle, actor };

/// Keeps the device actors alive; the last one ends them.
struct system_lease : std::enable_shared_from_this<system_lease> {
  system_lease(caf::actor_system& s, caf::actor r) : system(s), root(std::move(r)) {}
  ~system_lease();
  system_lease(const system_lease&) = delete;
  system_lease& operator=(const system_lease&) = delete;

  /// Returns this lease as `what` holds it, an object that `holders` names while there are copies.
  std::shared_ptr<system_lease> held_by(std::string what, lease_holder how);
  /// For the log: each object once, and what is missing to its end.
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
  /// @errors errc::unavailable, not_supported: it is not there; errc::invalid_argument: an option
  ///         is wrong
  caf::expected<std::shared_ptr<detail::runtime>> runtime();
  /// Why the host backend was taken.
  std::string reason();
  void use_backend(std::shared_ptr<backend> backend);

  /// How long an actor system waits for its actors before the log says why. Before the first lease.
  void set_shutdown_patience(std::chrono::nanoseconds x) noexcept { shutdown_patience_ = x; }

  /// Spawns the root of the device actors if there is none.
  caf::expected<std::shared_ptr<system_lease>> lease(caf::actor_system& sys);

  /// Returns the job that spins for answers to actors of `sys`.
  answer_spinner& spinner(caf::actor_system& sys);

  /// The worlds whose ranks are driven in other processes. After `runtime`.
  std::shared_ptr<program_board> programs();

  const config& settings() const noexcept { return config_; }

private:
  /// `without_cuda`: why virtual devices are taken where that was not asked for.
  caf::error choose_backend(caf::error& without_cuda);
  /// Checks the options, and chooses the backend unless there is one. Under the mutex.
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

} // namespace troupe::detail
