/// Slabs of GPUs.

#include "backend/cuda/nccl_fixture.hpp"
#include "foundation/file_descriptor.hpp"
#include "support/cuda_driver.hpp"
#include "support/expect.hpp"
#include "support/gpus.hpp"
#include <troupe/backend.hpp>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

constexpr std::size_t size = std::size_t{64} << 20;

class CudaSlabs : public ::testing::Test {
protected:
  void SetUp() override {
    TROUPE_NEEDS_GPUS(1);
    cuda_ = must(make_cuda_backend());
    device_ = must(cuda_->open(0));
    must(device_->bind());
    must(device_->open_memory());
  }

  void TearDown() override {
    if (device_) {
      EXPECT_TRUE(is_ok(device_->close_memory()));
    }
  }

  static void* address(std::size_t n = 0) {
    return reinterpret_cast<void*>(std::uintptr_t{0x2000'0000'0000} + n * size);
  }

  void fill(const memory_slab& slab, std::uint32_t value) {
    const auto stream = must(device_->create_stream());
    must(device_->fill(slab.address, std::as_bytes(std::span{&value, 1}),
                       slab.size_bytes / sizeof value, stream));
    const auto filled = must(device_->create_event());
    must(device_->record(filled, stream));
    must(device_->synchronize(filled));
    must(device_->destroy_event(filled));
    must(device_->destroy_stream(stream));
  }

  std::shared_ptr<backend> cuda_;
  std::unique_ptr<backend_device> device_;
};

/// Returns the words of a slab as another process sees them, which has only the descriptor.
std::vector<std::uint32_t> words_of(int descriptor) {
  CUmemGenericAllocationHandle memory = 0;
  EXPECT_EQ(TROUPE_DRIVER(cuMemImportFromShareableHandle, 10020)(
                &memory, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
            CUDA_SUCCESS);
  CUdeviceptr at = 0;
  EXPECT_EQ(TROUPE_DRIVER(cuMemAddressReserve, 10020)(&at, size, 0, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(TROUPE_DRIVER(cuMemMap, 10020)(at, size, 0, memory, 0), CUDA_SUCCESS);
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                               CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  EXPECT_EQ(TROUPE_DRIVER(cuMemSetAccess, 10020)(at, size, &access, 1), CUDA_SUCCESS);
  std::vector<std::uint32_t> result(size / sizeof(std::uint32_t));
  EXPECT_EQ(cudaMemcpy(result.data(), reinterpret_cast<void*>(at), size, cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_EQ(TROUPE_DRIVER(cuMemUnmap, 10020)(at, size), CUDA_SUCCESS);
  EXPECT_EQ(TROUPE_DRIVER(cuMemAddressFree, 10020)(at, size), CUDA_SUCCESS);
  EXPECT_EQ(TROUPE_DRIVER(cuMemRelease, 10020)(memory), CUDA_SUCCESS);
  return result;
}

TEST_F(CudaSlabs, LiveOnInTheirDescriptor) {
  const auto before = must(device_->memory()).free_bytes;
  {
    const memory_slab slab{0, address(), size};
    const detail::file_descriptor of_slab{must(cuda_->make_slab(slab))};
    const std::uint32_t value = 0x12345678;
    fill(slab, value);
    must(cuda_->unmap_slab(slab));
    const auto words = words_of(of_slab.get());
    EXPECT_EQ(std::count(words.begin(), words.end(), value),
              static_cast<std::ptrdiff_t>(words.size()));
  }
  EXPECT_GE(must(device_->memory()).free_bytes + (std::size_t{8} << 20), before);
}

TEST_F(CudaSlabs, LieWhereTheCallerWants) {
  const memory_slab slab{0, address(3), size};
  EXPECT_EQ(cuda_->slab_granularity(), std::size_t{2} << 20);
  const detail::file_descriptor first{must(cuda_->make_slab(slab))};
  cudaPointerAttributes what{};
  ASSERT_EQ(cudaPointerGetAttributes(&what, slab.address), cudaSuccess);
  EXPECT_EQ(what.type, cudaMemoryTypeDevice);
  EXPECT_EQ(what.device, 0);
  EXPECT_TRUE(has_code(cuda_->make_slab(slab).error(), errc::unavailable)); // in use
  must(cuda_->unmap_slab(slab));
  const detail::file_descriptor again{must(cuda_->make_slab(slab))};
  must(cuda_->unmap_slab(slab));
}

TEST_F(CudaSlabs, AreReadByAnotherDevice) {
  TROUPE_NEEDS_GPUS(2);
  auto other = must(cuda_->open(1));
  must(other->bind());
  must(other->open_memory());
  if (!must(other->can_access_peer(0)))
    GTEST_SKIP() << "the devices do not reach each other";
  const memory_slab slab{0, address(7), size};
  const detail::file_descriptor of_slab{must(cuda_->make_slab(slab))};
  const std::uint32_t value = 77;
  fill(slab, value);
  must(cuda_->unmap_slab(slab)); // as if the process with device 0 were another one
  must(cuda_->map_slab(slab, of_slab.get(), 1));
  const auto stream = must(other->create_stream());
  void* const target = must(other->allocate(size, stream));
  must(other->copy(target, slab.address, size, copy_direction::device_to_device, stream));
  const auto copied = must(other->create_event());
  must(other->record(copied, stream));
  must(other->synchronize(copied));
  std::vector<std::uint32_t> words(size / sizeof value);
  ASSERT_EQ(cudaMemcpy(words.data(), target, size, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(std::count(words.begin(), words.end(), value),
            static_cast<std::ptrdiff_t>(words.size()));
  EXPECT_TRUE(has_code(cuda_->map_slab(slab, of_slab.get(), 1), errc::unavailable)); // in use
  must(cuda_->unmap_slab(slab));
  must(other->destroy_event(copied));
  must(other->destroy_stream(stream));
  must(other->close_memory());
}

TEST_F(CudaSlabs, LieWithinOneWindow) {
  const auto at = [](std::size_t offset) {
    return reinterpret_cast<void*>(std::uintptr_t{0x2000'0000'0000} + offset);
  };
  for (const auto& wrong :
       {memory_slab{0, at(memory_slab::window - size / 2), size}, memory_slab{0, at(4096), size},
        memory_slab{0, at(0), size + 1}, memory_slab{0, at(0), 0}, memory_slab{0, nullptr, size}})
    EXPECT_TRUE(has_code(cuda_->make_slab(wrong).error(), errc::invalid_argument));
  const memory_slab last{0, at(memory_slab::window - size), size};
  const detail::file_descriptor of_slab{must(cuda_->make_slab(last))};
  EXPECT_TRUE(has_code(cuda_->make_slab({0, at(memory_slab::window - size / 2), size / 2}).error(),
                       errc::unavailable)); // in use
  must(cuda_->unmap_slab(last));
  EXPECT_TRUE(has_code(cuda_->unmap_slab(last), errc::invalid_argument));
}

/// A kernel that waits for a peer which does not come holds up no slab.
TEST_F(CudaSlabs, WaitForNoKernel) {
  std::array<nccl_member, 2> members;
  for (auto& x : members)
    x.open(*cuda_, 0, true);
  const std::vector<local_rank> where{{0, 0}, {1, 0}};
  auto ranks = must(cuda_->build_direct(where));
  const collective_call sum{.what = collective_kind::all_reduce,
                            .send = members[0].send,
                            .recv = members[0].recv,
                            .count = 100,
                            .type = dtype::uint32};
  must(members[0].device->bind());
  must(ranks[0]->enqueue({&sum, 1}, members[0].stream));
  must(ranks[0]->mark_end(members[0].event, members[0].stream, *members[0].device));
  auto made = std::async(std::launch::async, [&] {
    const memory_slab slab{0, address(9), 16 * size};
    const detail::file_descriptor of_slab{must(cuda_->make_slab(slab))};
    must(cuda_->unmap_slab(slab));
    must(cuda_->map_slab(slab, of_slab.get(), 0)); // as a peer does
    must(cuda_->unmap_slab(slab));
  });
  EXPECT_EQ(made.wait_for(std::chrono::seconds{1}), std::future_status::ready);
  EXPECT_FALSE(must(members[0].device->query(members[0].event)));
  EXPECT_TRUE(is_ok(cuda_->abort(std::move(ranks))));
  made.get();
  must(members[0].device->synchronize(members[0].event));
  for (auto& x : members)
    x.close();
}

TEST_F(CudaSlabs, AreRefusedWhereTheDeviceIsTooSmall) {
  const auto whole = must(device_->memory()).total_bytes / size * size;
  EXPECT_TRUE(has_code(cuda_->make_slab({0, address(5), whole}).error(), errc::out_of_memory));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  const memory_slab small{0, address(5), size}; // its addresses are free
  const detail::file_descriptor of_slab{must(cuda_->make_slab(small))};
  must(cuda_->unmap_slab(small));
}

} // namespace

} // namespace troupe::testing
