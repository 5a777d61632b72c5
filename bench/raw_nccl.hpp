/// The same all-reduce with NCCL alone, for comparison with troupe.
#pragma once

#include "summing.hpp"

#include <cstddef>
#include <memory>
#include <vector>

namespace bench {

struct raw_contestants {
  /// A thread per rank issues and spins on an event. Another thread starts them and waits for all.
  std::unique_ptr<contestant> threads;
  /// One thread issues for all ranks in a group and synchronizes their streams. Window 1 only.
  std::unique_ptr<contestant> grouped;
};

/// Makes the contestants. They share a communicator, streams and buffers of `bytes`.
raw_contestants make_raw(const std::vector<int>& devices, std::size_t bytes);

} // namespace bench
