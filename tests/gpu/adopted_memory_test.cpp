/// Memory that the user has allocated with CUDA, in all ways, in direct collectives.

#include "support/cuda_driver.hpp"
#include "support/expect.hpp"
#include "support/gpus.hpp"
#include <troupe/troupe.hpp>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

void must_cuda(cudaError_t code) { ASSERT_EQ(code, cudaSuccess) << cudaGetErrorName(code); }

struct allocation {
  void* memory = nullptr;
  std::function<void(void*)> free;
};

allocation plain(int device, std::size_t size) {
  must_cuda(cudaSetDevice(device));
  void* memory = nullptr;
  must_cuda(cudaMalloc(&memory, size));
  return {memory, [](void* x) { EXPECT_EQ(cudaFree(x), cudaSuccess); }};
}

allocation of_a_pool(int device, std::size_t size) {
  must_cuda(cudaSetDevice(device));
  void* memory = nullptr;
  must_cuda(cudaMallocAsync(&memory, size, nullptr));
  must_cuda(cudaStreamSynchronize(nullptr));
  return {memory, [](void* x) { EXPECT_EQ(cudaFree(x), cudaSuccess); }};
}

/// Returns memory in the middle of reserved addresses, mapped in two parts.
allocation mapped(int device, std::size_t size) {
  CUmemAllocationProp what{};
  what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  what.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  std::size_t unit = 0;
  EXPECT_EQ(TROUPE_DRIVER(cuMemGetAllocationGranularity,
                          10020)(&unit, &what, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
            CUDA_SUCCESS);
  const std::size_t part = (size / 2 + unit - 1) / unit * unit;
  CUdeviceptr reserved = 0;
  EXPECT_EQ(TROUPE_DRIVER(cuMemAddressReserve, 10020)(&reserved, 4 * part, 0, 0, 0), CUDA_SUCCESS);
  const CUdeviceptr address = reserved + part;
  for (int i = 0; i < 2; ++i) {
    CUmemGenericAllocationHandle handle{};
    EXPECT_EQ(TROUPE_DRIVER(cuMemCreate, 10020)(&handle, part, &what, 0), CUDA_SUCCESS);
    const auto at = address + static_cast<std::size_t>(i) * part;
    EXPECT_EQ(TROUPE_DRIVER(cuMemMap, 10020)(at, part, 0, handle, 0), CUDA_SUCCESS);
    EXPECT_EQ(TROUPE_DRIVER(cuMemRelease, 10020)(handle), CUDA_SUCCESS); // as long as it is mapped
  }
  const CUmemAccessDesc access{what.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  EXPECT_EQ(TROUPE_DRIVER(cuMemSetAccess, 10020)(address, 2 * part, &access, 1), CUDA_SUCCESS);
  // The middle of the memory is where the parts meet.
  return {reinterpret_cast<void*>(static_cast<std::uintptr_t>(address + part - size / 2)),
          [=](void*) {
            EXPECT_EQ(TROUPE_DRIVER(cuMemUnmap, 10020)(address, 2 * part), CUDA_SUCCESS);
            EXPECT_EQ(TROUPE_DRIVER(cuMemAddressFree, 10020)(reserved, 4 * part), CUDA_SUCCESS);
          }};
}

using allocate = allocation (*)(int device, std::size_t size);

class AdoptedMemory : public ::testing::TestWithParam<allocate> {
protected:
  void SetUp() override {
    TROUPE_NEEDS_GPUS(2);
    cfg_ = std::make_unique<config>();
    cfg_->use_backend(must(make_cuda_backend()));
    sys_ = std::make_unique<caf::actor_system>(*cfg_);
  }

  /// Returns `count` elements on each device of `w`.
  std::vector<gpu_ref<float>> adopt(const world& w, std::size_t count) {
    std::vector<gpu_ref<float>> result;
    for (std::size_t rank = 0; rank < w.size(); ++rank) {
      const auto d = w.device_of(rank);
      auto x = GetParam()(d.ordinal(), count * sizeof(float));
      result.push_back(must(d.adopt(static_cast<float*>(x.memory), count, x.free)));
    }
    return result;
  }

  std::unique_ptr<config> cfg_;
  std::unique_ptr<caf::actor_system> sys_;
};

INSTANTIATE_TEST_SUITE_P(
    Ways, AdoptedMemory, ::testing::Values(plain, of_a_pool, mapped), [](const auto& x) {
      return std::string{x.param == plain ? "Plain" : x.param == of_a_pool ? "OfAPool" : "Mapped"};
    });

TEST_P(AdoptedMemory, IsReachedByItsPeers) {
  auto w = must(world::open(*sys_, {.devices = {0, 1}, .collectives = collectives_policy::direct}));
  for (std::size_t count : {std::size_t{2}, std::size_t{100'000}, std::size_t{3} << 20}) {
    SCOPED_TRACE(count);
    auto refs = adopt(w, count);
    auto all = adopt(w, 2 * count);
    for (std::size_t rank = 0; rank < w.size(); ++rank)
      must(w.device_of(rank).fill(refs[rank], static_cast<float>(rank + 1)).wait());
    must(w.all_gather(refs, all).wait());
    must(w.all_reduce(refs).wait());
    for (std::size_t rank = 0; rank < w.size(); ++rank) {
      EXPECT_EQ(must(w.device_of(rank).download(refs[rank])), std::vector<float>(count, 3));
      auto both = std::vector<float>(count, 1);
      both.resize(2 * count, 2);
      EXPECT_EQ(must(w.device_of(rank).download(all[rank])), both);
    }
  }
}

TEST_P(AdoptedMemory, LiesOnItsDevice) {
  auto d = must(device::open(*sys_, 0));
  auto elsewhere = GetParam()(1, 1024);
  void* pinned = nullptr;
  must_cuda(cudaMallocHost(&pinned, 1024));
  std::vector<std::byte> pageable(1024);
  for (void* x : {elsewhere.memory, pinned, static_cast<void*>(pageable.data())})
    EXPECT_TRUE(
        has_code(d.adopt(x, 1024, dtype::uint8, [](void*) { FAIL(); }), errc::invalid_argument));
  must_cuda(cudaFreeHost(pinned));
  elsewhere.free(elsewhere.memory);
}

TEST(MappedMemory, IsAdoptedToItsEndAtMost) {
  TROUPE_NEEDS_GPUS(1);
  config cfg;
  cfg.use_backend(must(make_cuda_backend()));
  caf::actor_system sys{cfg};
  auto d = must(device::open(sys, 0));
  constexpr std::size_t size = 8 << 20;
  auto x = mapped(0, size);
  EXPECT_TRUE(has_code(d.adopt(x.memory, 2 * size, dtype::uint8, [](void*) { FAIL(); }),
                       errc::invalid_argument));
  auto ref = must(d.adopt(static_cast<std::uint8_t*>(x.memory), size, x.free));
  must(d.fill(ref, std::uint8_t{3}).wait());
  EXPECT_EQ(must(d.download(ref)), std::vector<std::uint8_t>(size, 3));
}

} // namespace

} // namespace troupe::testing
