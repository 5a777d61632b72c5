/// An actor system that has devices.
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

/// The configuration of an actor system that uses the library: knows its messages, and these
/// options, on the command line too:
/// --troupe.backend=auto|cuda|host: which devices; auto takes CUDA's where they can be used, else
/// those of the host backend; where other hosts join it is cuda
/// --troupe.placement=in_process|worker: where devices live (troupe/worker.hpp)
/// --troupe.worker=PATH: the workers' program
/// --troupe.hosts.listen=ADDRESS, --troupe.hosts.port=N, --troupe.hosts.certificate=FILE,
/// --troupe.hosts.key=FILE, --troupe.hosts.authority=FILE, --troupe.hosts.count=N,
/// --troupe.hosts.names=NAME,NAME: other hosts whose devices join (`remote_hosts`); with
/// --troupe.hosts.join-limit=SECONDS, --troupe.hosts.link-limit=MILLISECONDS
/// --troupe.devices=N: number of virtual devices of the host backend, 1 to 1,024
/// --troupe.keep-freed=MILLISECONDS: how long GPUs keep freed memory (`cuda_backend_options`); -1:
/// until memory runs out
/// --troupe.completion=event_poll|host_func|synchronize
/// --troupe.in-flight=N, --troupe.queue=N: bounds per device, in operations
/// --troupe.spin=MICROSECONDS: how long a lane, or a worker, spins after its last work
/// --troupe.client-spin=MICROSECONDS: how long a client that waits for an answer spins before it
/// parks
/// --troupe.flight-record=PATH: where the last operations are written when something fails
/// (`flight_record_options`)
/// An option that is out of range, or has no effect beside the others, is refused by name with its
/// value: by what asks for devices first, and by all that asks later.
/// CAF's scheduler shares work among at most four threads: a parked thread is slow to wake, and
/// actors that do not block need few. It is an option of CAF's like any other
/// (scheduler.max-threads).
class config : private detail::known_types, public detail::config_base {
public:
  config();
  ~config() override;
  config(const config&) = delete;
  config& operator=(const config&) = delete;

  /// Has `parse` printed what --help, --long-help or --dump-config ask for? Then a program is to
  /// end with success, as CAF's own do, and makes no actor system.
  bool help_printed() const noexcept;

  /// Uses this backend, whatever the options say. Before the actor system is made.
  void use_backend(std::shared_ptr<backend> backend);

  troupe::placement placement = troupe::placement::in_process;
  worker_settings workers; ///< where devices live in worker processes
  remote_hosts hosts;      ///< the same
  lane_options lanes;
  host_backend_options host;
  cuda_backend_options cuda;
  flight_record_options flight_record;
  /// Of a device request that names none.
  std::chrono::nanoseconds device_deadline = std::chrono::seconds{30};

  /// For the library.
  detail::system_core& core() const noexcept { return *core_; }

private:
  std::string backend_name_ = "auto";
  std::string placement_name_;
  std::string hosts_names_;
  std::string completion_ = "event_poll";
  // Of those that are not given, what the members above say counts.
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
