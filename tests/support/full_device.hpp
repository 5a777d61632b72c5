/// Occupies the memory of a device, as another user would.
#pragma once

#include "support/expect.hpp"

#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace troupe::testing {

/// Returns the free memory of the whole device, as other processes see it.
inline std::size_t free_bytes_of_device(int device) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
  EXPECT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  return free_bytes;
}

/// Occupies the memory of a device during its lifetime, until at most `left_bytes` are free.
class full_device {
public:
  full_device(int device, std::size_t left_bytes) : device_(device) {
    constexpr std::size_t least = std::size_t{2} << 20; // granularity of the driver's allocations
    for (std::size_t piece = std::size_t{4} << 30; piece >= least;) {
      const auto free_bytes = free_bytes_of_device(device);
      if (free_bytes <= left_bytes)
        break;
      void* memory = nullptr;
      if (free_bytes - left_bytes >= piece && cudaMalloc(&memory, piece) == cudaSuccess)
        pieces_.push_back(memory);
      else
        piece /= 2;
      (void)cudaGetLastError();
    }
  }
  ~full_device() { release(); }
  full_device(const full_device&) = delete;
  full_device& operator=(const full_device&) = delete;

  void release() {
    EXPECT_EQ(cudaSetDevice(device_), cudaSuccess);
    for (void* x : pieces_)
      EXPECT_EQ(cudaFree(x), cudaSuccess);
    pieces_.clear();
  }

private:
  const int device_;
  std::vector<void*> pieces_;
};

} // namespace troupe::testing
