/// The same all-reduce with NCCL alone: what troupe is compared with.
#pragma once

#include "contestant.hpp"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace bench {

struct raw_contestants {
  /// A thread per rank issues and spins on an event; one more thread starts them and waits for all.
  std::unique_ptr<contestant> threads;
  /// One thread issues for all ranks in a group, and synchronizes their streams. Window 1 only.
  std::unique_ptr<contestant> grouped;
};

/// Both use one communicator, streams and buffers of `bytes` of their own.
raw_contestants make_raw(const std::vector<int>& devices, std::size_t bytes);

/// Of the NCCL that was loaded, such as "2.28.9".
std::string nccl_version();

} // namespace bench
