/// What this process holds, as /proc shows it.
#pragma once

#include <cstddef>
#include <filesystem>
#include <iterator>

namespace troupe::testing {

/// Returns the number of entries of a folder: of "/proc/self/fd", the open files, of
/// "/proc/self/task", the threads.
inline std::size_t entries_of(const char* folder) {
  const std::filesystem::directory_iterator all{folder};
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

} // namespace troupe::testing
