/// The same copies with CUDA alone: what troupe is compared with.
#pragma once

#include "copies.hpp"

#include <cstddef>
#include <memory>
#include <vector>

namespace bench {

/// Memory of `cudaMalloc`.
std::shared_ptr<void> plain_memory(int device, std::size_t size_bytes);

/// Memory of a pool of `device`, to which all of `devices` have access.
class memory_pool;
std::shared_ptr<memory_pool> make_pool(int device, const std::vector<int>& devices);
std::shared_ptr<void> pool_memory(const std::shared_ptr<memory_pool>& pool, std::size_t size_bytes);

/// For plain memory, between all devices wherever they can, in all directions.
void enable_access(const std::vector<int>& devices);

/// One thread issues `cudaMemcpyPeerAsync` and waits for all: several ways to do so, since it
/// depends on the machine and on the size which one is the fastest.
std::vector<std::unique_ptr<copying_contestant>>
make_raw_copies(const std::vector<route_memory>& memory);

} // namespace bench
