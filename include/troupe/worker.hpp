/// Devices in processes of their own: a GPU fault ends only its worker process.
#pragma once

#include <troupe/backend.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

namespace troupe {

/// The process in which devices live.
enum class placement : std::uint8_t {
  in_process,
  worker_process, ///< each device in a supervised child process
};

/// After which end of a worker its device memory is kept for the device's next worker. A worker
/// that ends by itself or by any signal counts as ended.
enum class kept_memory : std::uint8_t {
  none,        ///< the memory of a device is gone with its worker
  after_end,   ///< it is kept, unless a fault of the device ended the worker
  after_fault, ///< also after a fault, whose kernel may have written to any of it
};

std::string_view to_string(kept_memory x) noexcept;

/// How worker processes are started and watched.
struct worker_settings {
  /// Path of the worker program. Empty: this program if it has called `worker_main`, otherwise
  /// `troupe-worker` in the folder of this program. This program is started as it runs now, even if
  /// its file was replaced or removed. Any worker program has to begin with `worker_main`.
  std::string program = {};
  std::vector<std::string> arguments = {}; ///< placed before the library's own
  /// Time limit from the start of a worker until it can be used. A worker of another host has the
  /// limit of its agent; a spare there has three times that, since it starts after the device's
  /// worker. The program waits for the agent as long as its own limit, and twice
  /// `remote_hosts::link_limit` more; then it ends the connection with that host.
  std::chrono::nanoseconds start_limit = std::chrono::seconds{30};
  /// A worker that shows no sign of life for this long is killed; 0: never.
  std::chrono::nanoseconds stuck_limit = std::chrono::seconds{1};
  /// A worker that shows signs of life, but is in one call for longer than this, is killed; 0:
  /// never. It applies to calls for a lane, including the first launch of a kernel, which may have
  /// to load it. It also applies to requests of other threads, except requests with a limit of
  /// their own. For a worker of another host (0: none there, either) it is twice
  /// `remote_hosts::link_limit` longer.
  std::chrono::nanoseconds call_limit = std::chrono::seconds{30};
  /// Time limit for a rank's part in building a communicator; 0: none. When it expires, the build
  /// fails, and workers whose ranks are not built are killed. Ranks that wait for a lost rank are
  /// told earlier and give up. Only this limit ends the wait of NCCL for a rank that never arrives.
  std::chrono::nanoseconds build_limit = std::chrono::seconds{60};
  /// Memory that is kept has the same address and the same generation, and handles to it stay
  /// valid. What operations of the lost worker could be writing is `indeterminate`; it is busy
  /// until that worker's work is over. Memory is never kept after an error of the memory or of a
  /// link, on other hosts, and where the backend has no slabs (`backend::slab_granularity`).
  kept_memory keep_memory = kept_memory::after_end;
};

/// The certificate of one end of a connection between hosts, and the authority that it trusts:
/// files in PEM format. Files that change are read anew within a second, for new connections. If
/// the new content cannot be used, the old one stays in use, and the log says so.
struct host_identity {
  std::string certificate = {}; ///< its own, then those between it and the authority's
  std::string key = {};         ///< private key of the certificate; without a passphrase
  /// The certificate authority of the fleet. Each holder of its certificates is a member.
  std::string authority = {};
  /// The authority's list of certificates that it has revoked; empty: there is none. They are
  /// refused from the next connection on. A list that has expired refuses all.
  std::string revoked = {};
};

/// Other hosts whose devices join those of this program; `troupe-worker --connect` runs on each.
/// All traffic between this program and them uses TLS 1.3. Each side shows a certificate of the
/// authority before the first byte of the library's protocol is read. Data between ranks of
/// different hosts does not use TLS: it goes over NCCL's network.
struct remote_hosts {
  /// The numeric address of the interface where this program listens. Empty: no other hosts.
  std::string listen_address = {};
  std::uint16_t port = 0; ///< 0: a free port
  host_identity identity = {};
  /// Number of hosts to wait for; each brings all its devices.
  int count = 0;
  /// Names of the hosts, in the order of their devices. No other hosts are admitted, and `count` is
  /// their number. Empty: the first `count` hosts that join, in the order of their names.
  std::vector<std::string> names = {};
  /// Whether the devices of this host are included, before those of the others.
  bool with_local = true;
  /// How long to wait for the hosts.
  std::chrono::nanoseconds join_limit = std::chrono::seconds{60};
  /// A connection on which no data arrives for this long is lost, on both sides. The host then ends
  /// its workers and tries to join again.
  std::chrono::nanoseconds link_limit = std::chrono::seconds{3};
  /// How long each attempt to open a device again waits for its host (`lane_options`). A host that
  /// is lost again and again within seconds is used after growing pauses, up to this long.
  std::chrono::nanoseconds rejoin_limit = std::chrono::seconds{10};
  /// Ends the wait for the hosts with errc::cancelled, within 50 ms. It is polled, so that a
  /// signal handler of the program may request it, too, where the standard library's `request_stop`
  /// may run there (that of libstdc++ does only atomic operations as long as there is no callback).
  /// An actor system whose wait was ended stays
  /// without devices.
  std::stop_token stop = {};
  /// Called with the port, on the thread that makes the backend. If it throws, making the backend
  /// fails (errc::unavailable).
  std::function<void(std::uint16_t)> on_listening = {};
};

/// Options of a backend whose devices are in worker processes.
struct worker_backend_options {
  std::string backend = "cuda"; ///< the backend in the workers: "cuda" or "host"
  /// For "host". If its `listen_address` is empty, that of `hosts` counts, or 127.0.0.1.
  host_backend_options host = {};
  cuda_backend_options cuda = {}; ///< for "cuda"
  worker_settings workers = {};
  /// How long a worker stays awake after its last work. Default: 200 us if the machine has at least
  /// four cores per device plus two, else 0, because each worker has a lane in this process, too.
  std::optional<std::chrono::microseconds> spin = {};
  remote_hosts hosts = {};
};

/// Makes a backend with devices in worker processes, which start when their devices are opened.
/// This process makes no CUDA context.
/// @errors errc::invalid_argument: no such backend, or settings that can never be valid;
///         errc::unavailable: no worker can be started, it has no devices, or hosts have not joined
///         in time; errc::cancelled: the wait for hosts was ended; errc::not_supported: other
///         hosts, but the library was built without OpenSSL
caf::expected<std::shared_ptr<backend>> make_worker_backend(worker_backend_options options);

/// Runs the worker, if this process is one. A program that is to be its own worker calls it first
/// in `main`, after it has registered the launches and programs of workers (`register_launch`,
/// `register_program`). In a worker it does the work, and returns the value for `main` to return.
/// In any other process it returns none, at once. A worker ends when the program that started it
/// ends. It ignores the signals that are for that program (SIGINT, SIGTERM, SIGTSTP, ...) if their
/// action is the default one.
[[nodiscard]] std::optional<int> worker_main(int argc, char** argv);

/// The location of a device.
struct device_place {
  std::string host = {}; ///< as the host named itself; empty: this host
  int device = 0;        ///< its ordinal there

  friend bool operator==(const device_place&, const device_place&) = default;
};

/// Returns the locations of all devices, by ordinal. `of`: the result of `make_worker_backend`; for
/// any other backend all devices are on this host.
std::vector<device_place> device_places(const backend& of);

/// Options of a host that joins a program on another host.
struct host_agent_options {
  std::string parent = {}; ///< "host:port"
  host_identity identity = {};
  /// The name or numeric address that the parent's certificate must be for; empty: that in
  /// `parent`.
  std::string parent_name = {};
  /// Name of this host, one that its certificate has. Empty: the first name in its certificate.
  std::string name = {};
  /// Numeric address of this host for ranks in its workers. Empty: that of its connection's end.
  std::string listen_address = {};
  worker_settings workers = {};
  int devices = 0; ///< number of devices of the host backend; 0: as many as the parent has
  /// Time limit of one attempt to connect.
  std::chrono::nanoseconds connect_limit = std::chrono::seconds{5};
  /// Pause after a failed attempt; doubles with each further one, up to four times this.
  std::chrono::nanoseconds retry_pause = std::chrono::milliseconds{500};
};

/// Joins a program on another host, and again whenever the connection is lost. Without a connection
/// it has no workers. Returns only errors that no further attempt can fix.
/// @errors errc::invalid_argument: wrong options or files; errc::not_supported: the library was
///         built without OpenSSL
caf::error run_host_agent(host_agent_options options);

} // namespace troupe
