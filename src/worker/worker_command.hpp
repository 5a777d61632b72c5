/// How a worker is started.
#pragma once

#include <troupe/worker.hpp>

#include <string>
#include <vector>

namespace troupe::detail {

struct worker_command {
  std::string program;                ///< a path
  std::string name;                   ///< argument 0, and in messages
  std::vector<std::string> arguments; ///< before all others
};

/// The program of workers. Where that is this program, the command starts what runs now, also after
/// its file was replaced or removed. Relative paths are resolved now.
/// @errors errc::unavailable: this program's own path is not known, and needed
caf::expected<worker_command> worker_program(const worker_settings& settings);

/// This program is its workers' program, unless the settings name another one.
void set_own_worker() noexcept;

} // namespace troupe::detail
