/// Another user of a device's memory.
#pragma once

#include "support/expect.hpp"

#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace troupe::testing {

/// What the whole device has free, as other processes see it.
inline std::size_t free_bytes_of_device(int device) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
  EXPECT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  return free_bytes;
}

/// Takes the memory of a device, while it lives, until no more than `left_bytes` are free.
class full_device {
public:
  full_device(int device, std::size_t left_bytes) : device_(device) {
    constexpr std::size_t least = std::size_t{2} << 20; // what the driver gives at once
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
