/// The configuration of an actor system with devices.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/detail/caf_compat.hpp>
#include <troupe/runtime_options.hpp>
#include <troupe/worker.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace troupe {

namespace detail {
class system_core;
} // namespace detail

/// The configuration of an actor system that uses the library. It registers the library's messages
/// and these options, which the command line also accepts:
/// --troupe.backend=auto|cuda|host: the backend; auto: GPUs where CUDA is usable, else virtual
/// devices of the host backend; with other hosts, auto means cuda
/// --troupe.placement=in_process|worker: where devices live (troupe/worker.hpp)
/// --troupe.worker=PATH: the program of the workers
/// --troupe.hosts.listen=ADDRESS, --troupe.hosts.port=N, --troupe.hosts.certificate=FILE,
/// --troupe.hosts.key=FILE, --troupe.hosts.authority=FILE, --troupe.hosts.revoked=FILE,
/// --troupe.hosts.count=N, --troupe.hosts.names=NAME,NAME: other hosts whose devices join
/// (`remote_hosts`); with --troupe.hosts.join-limit=SECONDS,
/// --troupe.hosts.link-limit=MILLISECONDS
/// --troupe.devices=N: number of virtual devices of the host backend, 1 to 1,024
/// --troupe.keep-freed=MILLISECONDS: how long GPUs keep freed memory (`cuda_backend_options`); -1:
/// until memory runs out
/// --troupe.completion=event_poll|host_func|synchronize
/// --troupe.in-flight=N, --troupe.queue=N: limits per device, in operations
/// --troupe.spin=MICROSECONDS: how long a lane, or a worker, spins after its last work
/// --troupe.client-spin=MICROSECONDS: how long a client that waits for a result spins before it
/// parks
/// --troupe.flight-record=PATH: the file for the last operations after a failure
/// (`flight_record_options`)
/// If an option is out of range, or has no effect beside the others, the first call that needs
/// devices fails, as does every later one. The error names the option and its value.
/// CAF's scheduler shares work among at most four threads, because a parked thread is slow to wake
/// and actors that do not block need few. CAF's option scheduler.max-threads changes that.
class config : private detail::known_types, public detail::config_base {
public:
  config();
  ~config() override;
  config(const config&) = delete;
  config& operator=(const config&) = delete;

  /// Returns whether `parse` has printed what --help, --long-help or --dump-config request. The
  /// program should then make no actor system and end with success, as CAF's own programs do.
  bool help_printed() const noexcept;

  /// Uses this backend, whatever the options say. Call it before the actor system is made.
  void use_backend(std::shared_ptr<backend> backend);

  troupe::placement placement = troupe::placement::in_process;
  worker_settings workers; ///< for devices in worker processes
  remote_hosts hosts;      ///< for devices in worker processes
  lane_options lanes;
  host_backend_options host;
  cuda_backend_options cuda;
  flight_record_options flight_record;
  /// Default deadline of a device request.
  std::chrono::nanoseconds device_deadline = std::chrono::seconds{30};

  /// Internal.
  detail::system_core& core() const noexcept { return *core_; }

private:
  std::string backend_name_ = "auto";
  std::string placement_name_;
  std::string hosts_names_;
  std::string completion_ = "event_poll";
  // Options that are not given leave the members above as they are.
  static constexpr std::int64_t not_given = INT64_MIN;
  std::int64_t hosts_port_ = not_given;
  std::int64_t hosts_count_ = not_given;
  std::int64_t hosts_join_s_ = not_given;
  std::int64_t hosts_link_ms_ = not_given;
  std::int64_t host_devices_ = not_given;
  std::int64_t keep_freed_ms_ = not_given;
  std::int64_t in_flight_ = not_given;
  std::int64_t queue_ = not_given;
  std::int64_t spin_us_ = not_given;
  std::int64_t client_spin_us_ = not_given;
  std::unique_ptr<detail::system_core> core_;
  friend class detail::system_core;
};

} // namespace troupe
