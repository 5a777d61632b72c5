// The memory resource for RMM over a device.

#include "interop/cuda_fixture.hpp"
#include "support/world_fixture.hpp"
#include <troupe/rmm.hpp>

#include <rmm/cuda_stream_view.hpp>
#include <rmm/device_buffer.hpp>
#include <rmm/device_uvector.hpp>
#include <rmm/resource_ref.hpp>
#ifndef TROUPE_RMM_HAS_BASE
#include <rmm/mr/statistics_resource_adaptor.hpp>
#else
#include <rmm/mr/device/per_device_resource.hpp>
#include <rmm/mr/device/statistics_resource_adaptor.hpp>
#endif

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace troupe::testing {

namespace {

using words = std::vector<std::uint32_t>;

#ifndef TROUPE_RMM_HAS_BASE
static_assert(cuda::mr::synchronous_resource_with<rmm_resource, cuda::mr::device_accessible>);
static_assert(cuda::mr::resource_with<rmm_resource, cuda::mr::device_accessible>);

using rmm_stream = cuda::stream_ref;

void* allocate_from(rmm::device_async_resource_ref x, cudaStream_t stream, std::size_t size) {
  return x.allocate(cuda::stream_ref{stream}, size, 256);
}
void deallocate_to(rmm::device_async_resource_ref x, cudaStream_t stream, void* memory,
                   std::size_t size) {
  x.deallocate(cuda::stream_ref{stream}, memory, size, 256);
}
#else
static_assert(std::is_base_of_v<rmm::mr::device_memory_resource, rmm_resource>);

using rmm_stream = rmm::cuda_stream_view;

void* allocate_from(rmm::device_async_resource_ref x, cudaStream_t stream, std::size_t size) {
  return x.allocate_async(size, 256, cuda::stream_ref{stream});
}
void deallocate_to(rmm::device_async_resource_ref x, cudaStream_t stream, void* memory,
                   std::size_t size) {
  x.deallocate_async(memory, size, 256, cuda::stream_ref{stream});
}
#endif

// -- on virtual devices

TEST(RmmResource, AllocatesFromTheDevice) {
  TROUPE_HOST_ONLY("the limits of virtual devices");
  constexpr std::size_t mib = std::size_t{1} << 20;
  test_system system{{.devices = 1, .bytes_per_device = 8 * mib}};
  auto d = system.open();
  rmm_resource resource{d};
  EXPECT_EQ(resource.where().ordinal(), 0);
  auto* memory = allocate_from(resource, nullptr, 5 * mib);
  EXPECT_EQ(must(answer_of(d.stats())).free_bytes, 3 * mib);
  try {
    static_cast<void>(allocate_from(resource, nullptr, 4 * mib));
    FAIL() << "there is no room";
  } catch (const rmm::out_of_memory& why) {
    EXPECT_NE(std::string{why.what()}.find("out_of_memory"), std::string::npos) << why.what();
  }
  deallocate_to(resource, nullptr, memory, 5 * mib);
  must(answer_of(d.stats()));
  EXPECT_EQ(must(answer_of(d.stats())).free_bytes, 8 * mib);
  d.shutdown();
  try {
    static_cast<void>(allocate_from(resource, nullptr, 1));
    FAIL() << "the device has ended";
  } catch (const rmm::out_of_memory& why) {
    FAIL() << why.what();
  } catch (const rmm::bad_alloc& why) {
    EXPECT_NE(std::string{why.what()}.find("shut_down"), std::string::npos) << why.what();
  }
}

TEST(RmmResource, WorksUnderAnAdaptorOfRmm) {
  TROUPE_HOST_ONLY("the test has no stream");
  test_system system{{.devices = 1}};
  rmm_resource resource{system.open()};
#ifndef TROUPE_RMM_HAS_BASE
  rmm::mr::statistics_resource_adaptor counted{resource};
#else
  rmm::mr::statistics_resource_adaptor<rmm_resource> counted{&resource};
#endif
  auto* memory = allocate_from(counted, nullptr, 1024);
  EXPECT_EQ(counted.get_bytes_counter().value, 1024);
  deallocate_to(counted, nullptr, memory, 1024);
  EXPECT_EQ(counted.get_bytes_counter().value, 0);
}

// -- on GPUs

class RmmOnCuda : public CudaInterop {};

TEST_F(RmmOnCuda, ContainersUseTheDevicesMemory) {
  constexpr std::size_t count = std::size_t{1} << 22;
  constexpr std::size_t size = count * sizeof(std::uint32_t);
  std::mt19937_64 random{1};
  words content(count);
  for (auto& x : content)
    x = static_cast<std::uint32_t>(random());
  const pinned_words source{content};
  pinned_words seen{count};
  rmm_resource resource{*gpu_};
  own_stream stream{0}; // after the pinned memory: freeing that waits for the stream
  {
    const rmm_stream view{static_cast<cudaStream_t>(stream)};
    rmm::device_uvector<std::uint32_t> x{count, view, resource};
    must_cuda(cudaMemcpyAsync(x.data(), source.data(), size, cudaMemcpyHostToDevice, stream));
    const rmm::device_buffer copy{x.data(), size, view, resource};
    EXPECT_TRUE(has_code(gpu_->reset().wait(), errc::buffer_acquired));
    stream.hold();
    must_cuda(cudaMemcpyAsync(seen.data(), copy.data(), size, cudaMemcpyDeviceToHost, stream));
  } // frees both behind the copy, which has not begun
  for (int i = 0; i < 8; ++i) {
    auto other = must(gpu_->allocate<std::uint32_t>(count));
    must(gpu_->fill(other, 0xeeeeeeeeu).wait());
  }
  stream.open();
  stream.synchronize();
  EXPECT_EQ(seen.content(), content);
  settle(*gpu_);
  must(gpu_->reset().wait());
}

TEST_F(RmmOnCuda, IsTheResourceOfADevice) {
  rmm_resource resource{*gpu_};
  own_stream stream{0};
#ifndef TROUPE_RMM_HAS_BASE
  auto before = rmm::mr::set_current_device_resource(resource);
#else
  auto* before = rmm::mr::set_current_device_resource(&resource);
#endif
  {
    const rmm::device_buffer x{1000, rmm_stream{static_cast<cudaStream_t>(stream)}};
    EXPECT_TRUE(has_code(gpu_->reset().wait(), errc::buffer_acquired));
  }
  rmm::mr::set_current_device_resource(before);
  stream.synchronize();
  settle(*gpu_);
  must(gpu_->reset().wait());
}

} // namespace

} // namespace troupe::testing
