/// The registered launches and libraries of the process.
#pragma once

#include <troupe/launch.hpp>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace troupe::detail {

/// Returns the library's launch of that name; null if there is none.
std::shared_ptr<const library_launch> find_library_launch(const std::string& name);

/// Returns whether what the launch of that name enqueues may be recorded (`repetition::replays`).
bool replays(const std::string& name);

/// Returns the libraries and their names, in the order in which they were registered.
std::vector<std::pair<std::string, library_maker>> registered_libraries();

} // namespace troupe::detail
