/// Devices in processes of their own: a fault on a GPU ends its worker process, and no more.
#pragma once

#include <troupe/backend.hpp>

#include <chrono>
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
  /// `troupe-worker` in the folder of this program.
  std::string program;
  std::vector<std::string> arguments; ///< before the library's own
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
  /// whose ranks are not built are killed: nothing else ends what they wait for. 0: none.
  std::chrono::nanoseconds build_limit = std::chrono::seconds{60};
};

/// What executes in the workers.
struct worker_backend_options {
  std::string backend = "cuda"; ///< or "host"
  host_backend_options host;    ///< of "host"; `listen_address` is 127.0.0.1 if it is empty
  worker_settings workers;
  /// How long a worker stays awake after its last work. By default 200 us where there are at least
  /// four cores per device, else 0: a lane of this process has a thread there beside it.
  std::optional<std::chrono::microseconds> spin;
};

/// Devices in worker processes, which are started when their devices are opened. This process makes
/// no CUDA context.
/// @errors errc::invalid_argument: no such backend, or settings that can never be right;
/// errc::unavailable: no worker can be started, or
///         it has no devices
caf::expected<std::shared_ptr<backend>> make_worker_backend(worker_backend_options options);

/// In a program that is to be its own worker: the first thing that `main` does, after the launches
/// that workers make are registered (`register_launch`). In a worker it does the work, and returns
/// what `main` has to return; in any other process it returns nothing, at once.
std::optional<int> worker_main(int argc, char** argv);

} // namespace troupe
