/// How a worker is started.
#pragma once

#include <troupe/worker.hpp>

#include <string>
#include <vector>

namespace troupe::detail {

struct worker_command {
  std::string program;                ///< a path
  std::string name;                   ///< argument 0, also used in messages
  std::vector<std::string> arguments; ///< before all others
};

/// Returns the program of workers. If it is this program, the command starts the running image,
/// even if its file was replaced or removed. Resolves relative paths at once.
/// @errors errc::unavailable: this program's own path is needed and unknown
caf::expected<worker_command> worker_program(const worker_settings& settings);

/// Makes this program its workers' program, unless the settings name another one.
void set_own_worker() noexcept;

} // namespace troupe::detail
