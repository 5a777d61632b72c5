/// The same copies with CUDA alone, for comparison with troupe.
#pragma once

#include "copies.hpp"

#include <cstddef>
#include <memory>
#include <vector>

namespace bench {

/// Allocates with `cudaMalloc`.
std::shared_ptr<void> plain_memory(int device, std::size_t size_bytes);

/// A memory pool of `device`, to which all of `devices` have access.
class memory_pool;
std::shared_ptr<memory_pool> make_pool(int device, const std::vector<int>& devices);
std::shared_ptr<void> pool_memory(const std::shared_ptr<memory_pool>& pool, std::size_t size_bytes);

/// Enables access to plain memory in both directions between all devices that support it.
void enable_access(const std::vector<int>& devices);

/// Makes contestants in which one thread issues `cudaMemcpyPeerAsync` and waits for all copies.
/// There are several, since the fastest way depends on the machine and the size.
std::vector<std::unique_ptr<copying_contestant>>
make_raw_copies(const std::vector<route_memory>& memory);

} // namespace bench
