// The memory resource of libcu++ over a device.

#include "interop/cuda_fixture.hpp"
#include "support/world_fixture.hpp"
#include <troupe/cuda_resource.hpp>

#include <cstring>
#include <random>
#include <string>
#include <utility>

namespace troupe::testing {

namespace {

using words = std::vector<std::uint32_t>;
using cuda::mr::device_accessible;
using cuda::mr::host_accessible;

// The concepts of the version of CCCL that this toolkit has.
#if CCCL_VERSION >= 3001000
static_assert(cuda::mr::synchronous_resource_with<cuda_resource, device_accessible>);
static_assert(cuda::mr::resource_with<cuda_resource, device_accessible>);
static_assert(!cuda::mr::resource_with<cuda_resource, host_accessible>);
using any_stream_resource = cuda::mr::resource_ref<device_accessible>;
#else
static_assert(cuda::mr::resource_with<cuda_resource, device_accessible>);
static_assert(cuda::mr::async_resource_with<cuda_resource, device_accessible>);
static_assert(!cuda::mr::async_resource_with<cuda_resource, host_accessible>);
using any_stream_resource = cuda::mr::async_resource_ref<device_accessible>;
#endif

void* allocate_from(any_stream_resource x, cudaStream_t stream, std::size_t size_bytes,
                    std::size_t alignment = 256) {
#if CCCL_VERSION >= 3001000
  return x.allocate(cuda::stream_ref{stream}, size_bytes, alignment);
#else
  return x.allocate_async(size_bytes, alignment, cuda::stream_ref{stream});
#endif
}

void deallocate_to(any_stream_resource x, cudaStream_t stream, void* memory, std::size_t size_bytes,
                   std::size_t alignment = 256) {
#if CCCL_VERSION >= 3001000
  x.deallocate(cuda::stream_ref{stream}, memory, size_bytes, alignment);
#else
  x.deallocate_async(memory, size_bytes, alignment, cuda::stream_ref{stream});
#endif
}

// -- on virtual devices

TEST(CudaResource, AllocatesFromTheDevice) {
  TROUPE_IN_PROCESS_ONLY("addresses of this process");
  TROUPE_HOST_ONLY("the limits of virtual devices");
  constexpr std::size_t mib = std::size_t{1} << 20;
  test_system system{{.devices = 2, .bytes_per_device = 8 * mib}};
  auto d = system.open();
  cuda_resource resource{d};
  const cuda_resource copy = resource;
  EXPECT_EQ(copy, resource);
  EXPECT_NE(cuda_resource{d}, resource) << "it does not free what the other one has allocated";
  EXPECT_EQ(resource.where().ordinal(), 0);
  auto* memory = allocate_from(resource, nullptr, 5 * mib);
  EXPECT_EQ(must(answer_of(d.stats())).free_bytes, 3 * mib);
  try {
    static_cast<void>(allocate_from(resource, nullptr, 4 * mib));
    FAIL() << "there is no room";
  } catch (const cuda::cuda_error& why) {
    EXPECT_NE(std::string{why.what()}.find("2"), std::string::npos) << why.what();
    EXPECT_NE(std::string{why.what()}.find("out_of_memory"), std::string::npos) << why.what();
  }
  auto other = copy;
  deallocate_to(other, nullptr, memory, 5 * mib);
  must(answer_of(d.stats()));
  EXPECT_EQ(must(answer_of(d.stats())).free_bytes, 8 * mib);
  d.shutdown();
  EXPECT_THROW(static_cast<void>(resource.allocate_sync(1)), cuda::cuda_error);
}

TEST(CudaResourceOfWorkers, IsRefused) {
  if (!in_workers())
    GTEST_SKIP() << "only with devices in worker processes";
  test_system system;
  EXPECT_THROW(cuda_resource{system.open()}, cuda::cuda_error);
}

// -- on GPUs

class ResourceOnCuda : public CudaInterop {};

words random_words(std::size_t n, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  words result(n);
  for (auto& x : result)
    x = static_cast<std::uint32_t>(random());
  return result;
}

TEST_F(ResourceOnCuda, MemoryIsFreedBehindTheStream) {
  constexpr std::size_t count = std::size_t{1} << 20;
  constexpr std::size_t size = count * sizeof(std::uint32_t);
  cuda_resource resource{*gpu_};
  const auto content = random_words(count, 1);
  const pinned_words source{content};
  pinned_words seen{count};
  own_stream stream{0}; // after the pinned memory: freeing that waits for the stream
  auto* memory = allocate_from(resource, stream, size);
  must_cuda(cudaMemcpyAsync(memory, source.data(), size, cudaMemcpyHostToDevice, stream));
  stream.hold();
  must_cuda(cudaMemcpyAsync(seen.data(), memory, size, cudaMemcpyDeviceToHost, stream));
  deallocate_to(resource, stream, memory, size); // the copy has not begun
  // Memory that is allocated and overwritten meanwhile is other memory.
  for (int i = 0; i < 16; ++i) {
    auto other = must(gpu_->allocate<std::uint32_t>(count));
    must(gpu_->fill(other, 0xeeeeeeeeu, {.deadline = std::chrono::seconds{20}}).wait());
  }
  stream.open();
  stream.synchronize();
  EXPECT_EQ(seen.content(), content);
}

TEST_F(ResourceOnCuda, CountsAsMemoryOfTheDevice) {
  cuda_resource resource{*gpu_};
  const own_stream stream{0};
  auto* memory = allocate_from(resource, stream, std::size_t{1} << 30);
  EXPECT_TRUE(has_code(gpu_->reset().wait(), errc::buffer_acquired));
  cudaPointerAttributes where{};
  must_cuda(cudaPointerGetAttributes(&where, memory));
  EXPECT_EQ(where.type, cudaMemoryTypeDevice);
  EXPECT_EQ(where.device, 0);
  deallocate_to(resource, stream, memory, std::size_t{1} << 30);
  settle(*gpu_);
  must(gpu_->reset().wait());
  try {
    static_cast<void>(allocate_from(resource, stream, std::size_t{1} << 50));
    FAIL() << "no GPU has so much memory";
  } catch (const cuda::cuda_error& why) {
    EXPECT_NE(std::string{why.what()}.find("out_of_memory"), std::string::npos) << why.what();
  }
}

TEST_F(ResourceOnCuda, TheDefaultStreamsAreWaitedFor) {
  constexpr std::size_t size = std::size_t{16} << 20;
  cuda_resource resource{*gpu_};
  pinned_words seen{size / sizeof(std::uint32_t)};
  must_cuda(cudaSetDevice(0));
  for (auto* stream : {static_cast<cudaStream_t>(nullptr), cudaStreamLegacy, cudaStreamPerThread}) {
    auto* memory = allocate_from(resource, stream, size, 4096);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 4096, 0u);
    must_cuda(cudaMemsetAsync(memory, 5, size, stream));
    must_cuda(cudaMemcpyAsync(seen.data(), memory, size, cudaMemcpyDeviceToHost, stream));
    deallocate_to(resource, stream, memory, size, 4096);
    auto other = must(gpu_->allocate<std::uint8_t>(size));
    must(gpu_->fill(other, std::uint8_t{9}).wait());
    must_cuda(cudaStreamSynchronize(stream));
    EXPECT_EQ(seen.content(), words(size / sizeof(std::uint32_t), 0x05050505));
  }
}

TEST_F(ResourceOnCuda, EachDeviceHasItsOwn) {
  TROUPE_NEEDS_GPUS(2);
  cuda_resource one{*gpu_};
  cuda_resource other{must(device::open(*sys_, 1))};
  EXPECT_NE(one, other);
  for (auto* x : {&one, &other}) {
    const own_stream stream{x->where().ordinal()};
    auto* memory = allocate_from(*x, stream, 1000);
    cudaPointerAttributes where{};
    must_cuda(cudaPointerGetAttributes(&where, memory));
    EXPECT_EQ(where.device, x->where().ordinal());
    deallocate_to(*x, stream, memory, 1000);
  }
}

} // namespace

} // namespace troupe::testing
