/// Devices in processes of their own: a fault on a GPU ends its worker process, and no more.
#pragma once

#include <troupe/backend.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace troupe {

/// Where devices live.
enum class placement : std::uint8_t {
  in_process,
  worker_process, ///< each in a supervised child process
};

/// How worker processes are started and watched.
struct worker_settings {
  /// The program, by its path. Empty: this program itself, if it has called `worker_main`, else
  /// `troupe-worker` in the folder of this program. This program is started as it runs, also after
  /// its file was replaced or removed. Any program has to begin with `worker_main`.
  std::string program = {};
  std::vector<std::string> arguments = {}; ///< before the library's own
  /// From the start of a worker until it can be used.
  std::chrono::nanoseconds start_limit = std::chrono::seconds{30};
  /// A worker that shows no sign of life for so long is killed; 0: never.
  std::chrono::nanoseconds stuck_limit = std::chrono::seconds{1};
  /// A worker that shows signs of life, but is in one call for longer, is killed; 0: never. It
  /// counts for what a lane has it do, where the first launch of a kernel may have to load it, and
  /// the registration of a window waits for the other ranks; and for requests of other threads, but
  /// those that have a limit of their own.
  std::chrono::nanoseconds call_limit = std::chrono::seconds{30};
  /// For a rank's part in the building of a communicator; after it the building fails, and workers
  /// whose ranks are not built are killed. Those that wait for a rank that was lost are told
  /// before, and end it; but nothing else ends it where NCCL waits for one that never came. 0:
  /// none.
  std::chrono::nanoseconds build_limit = std::chrono::seconds{60};
};

/// What one end of a connection between hosts shows, and whom it believes: files in PEM form.
struct host_identity {
  std::string certificate = {}; ///< its own, then those between it and the authority's
  std::string key = {};         ///< of the certificate; without a passphrase
  std::string authority =
      {}; ///< whose certificates are those of the fleet: who has one, is trusted
};

/// Other hosts whose devices join those of this program: `troupe-worker --connect` runs on each.
/// All that this program and they say to each other goes through TLS 1.3, where each side has shown
/// a certificate of the authority before the first byte of ours is read. What ranks of different
/// hosts exchange does not: that is NCCL's network.
struct remote_hosts {
  /// The numeric address of the interface where this program listens. Empty: no other hosts.
  std::string listen_address = {};
  std::uint16_t port = 0; ///< 0: one that is free
  host_identity identity = {};
  /// Hosts that are waited for; each brings all its devices.
  int count = 0;
  /// Their names, in the order of their devices: no others are let in, and `count` is their number.
  /// Empty: whoever comes first, in the order of their names.
  std::vector<std::string> names = {};
  /// Devices of this host are there as well, before those of the others.
  bool with_local = true;
  /// How long the hosts are waited for.
  std::chrono::nanoseconds join_limit = std::chrono::seconds{60};
  /// A connection on which nothing comes for so long is lost, on both sides: then a host ends its
  /// workers, and tries to join again.
  std::chrono::nanoseconds link_limit = std::chrono::seconds{3};
  /// How long each attempt to bring a device up again waits for its host (`lane_options`).
  std::chrono::nanoseconds rejoin_limit = std::chrono::seconds{10};
  /// Hears of the port, on the thread that makes the backend, which fails if it throws
  /// (errc::unavailable).
  std::function<void(std::uint16_t)> on_listening = {};
};

/// What executes in the workers.
struct worker_backend_options {
  std::string backend = "cuda"; ///< or "host"
  /// Of "host"; without a `listen_address` that of `hosts`, or 127.0.0.1.
  host_backend_options host = {};
  cuda_backend_options cuda = {}; ///< of "cuda"
  worker_settings workers = {};
  /// How long a worker stays awake after its last work. By default 200 us where there are at least
  /// four cores per device, and two more, else 0: a lane of this process has a thread there beside
  /// it.
  std::optional<std::chrono::microseconds> spin = {};
  remote_hosts hosts = {};
};

/// Devices in worker processes, which are started when their devices are opened. This process makes
/// no CUDA context.
/// @errors errc::invalid_argument: no such backend, or settings that can never be right;
///         errc::unavailable: no worker can be started, or it has no devices, or hosts have not
///         joined in time; errc::not_supported: other hosts, and the library was built without
///         OpenSSL
caf::expected<std::shared_ptr<backend>> make_worker_backend(worker_backend_options options);

/// In a program that is to be its own worker: the first thing that `main` does, after the launches
/// and programs of workers are registered (`register_launch`, `register_program`). In a worker it
/// does the work, and returns what `main` has to return; in any other process it returns nothing,
/// at once. A worker ends with its program, and ignores the signals that are for that (SIGINT,
/// SIGTERM, SIGTSTP, ...) where their action is the default one.
[[nodiscard]] std::optional<int> worker_main(int argc, char** argv);

/// Where a device is.
struct device_place {
  std::string host = {}; ///< as the host called itself; empty: this one
  int device = 0;        ///< its ordinal there

  friend bool operator==(const device_place&, const device_place&) = default;
};

/// The places of all devices, by their ordinals. `of`: as `make_worker_backend` made it; of any
/// other backend all devices are here.
std::vector<device_place> device_places(const backend& of);

/// What a host is that joins a program on another one.
struct host_agent_options {
  std::string parent = {}; ///< "host:port"
  host_identity identity = {};
  /// The name that the parent's certificate must be for; empty: any certificate of the authority.
  std::string parent_name = {};
  std::string name = {}; ///< how this host is called; empty: as the system calls it
  /// Where ranks in this host's workers can be reached: a numeric address of the host. Empty: that
  /// of its end of the connection.
  std::string listen_address = {};
  worker_settings workers = {};
  int devices = 0; ///< of the host backend; 0: as many as the parent has
  /// For one attempt to connect.
  std::chrono::nanoseconds connect_limit = std::chrono::seconds{5};
  /// After an attempt that failed; doubles with each further one, up to four times this.
  std::chrono::nanoseconds retry_pause = std::chrono::milliseconds{500};
};

/// Joins a program on another host, and again whenever the connection was lost; meanwhile it has no
/// workers. Returns only what no further attempt can mend.
/// @errors errc::invalid_argument: options or files that are wrong; errc::not_supported: the
///         library was built without OpenSSL
caf::error run_host_agent(host_agent_options options);

} // namespace troupe
