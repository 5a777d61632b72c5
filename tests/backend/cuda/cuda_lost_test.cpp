#include "backend/cuda/cuda_device.hpp"
#include "backend/cuda/cuda_error.hpp"
#include "support/expect.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <memory>

namespace troupe::testing {

// On a machine without a GPU, a call that reaches CUDA returns another error.
TEST(CudaDevice, CallsNothingOnceTheDriverIsNotToBeCalled) {
  const auto before = detail::teardown_errors();
  const auto driver = std::make_shared<detail::driver_access>();
  const auto trimmer = std::make_shared<detail::pool_trimmer>(std::chrono::milliseconds{1}, driver);
  {
    auto device = must(detail::cuda_device::open(0, 1, driver, trimmer));
    EXPECT_TRUE(driver->end());
    EXPECT_FALSE(driver->end());
    std::array<std::byte, 64> memory{};
    const stream_view stream{memory.data()};
    const event_view event{memory.data()};
    auto lost = [](const auto& x) { return has_code(x, errc::device_fault); };
    EXPECT_TRUE(lost(device->bind()));
    EXPECT_TRUE(lost(device->properties()));
    EXPECT_TRUE(lost(device->memory()));
    EXPECT_TRUE(lost(device->open_memory()));
    EXPECT_TRUE(lost(device->allocate_pinned(16)));
    EXPECT_TRUE(lost(device->create_stream()));
    EXPECT_TRUE(lost(device->destroy_stream(stream)));
    EXPECT_TRUE(lost(device->create_event()));
    EXPECT_TRUE(lost(device->destroy_event(event)));
    EXPECT_TRUE(lost(device->record(event, stream)));
    EXPECT_TRUE(lost(device->wait(stream, event)));
    EXPECT_TRUE(lost(device->query(event)));
    EXPECT_TRUE(lost(device->synchronize(event)));
    EXPECT_TRUE(lost(device->copy(memory.data(), memory.data() + 32, 32,
                                  copy_direction::host_to_device, stream)));
    EXPECT_TRUE(lost(device->fill(memory.data(), {memory.data(), 1}, 32, stream)));
    EXPECT_TRUE(lost(device->launch_host(stream, [](void*) {}, nullptr)));
    EXPECT_TRUE(lost(device->can_access_peer(1)));
    EXPECT_TRUE(lost(device->enable_peer(1)));
    EXPECT_TRUE(lost(device->admit_peer(1)));
    EXPECT_TRUE(lost(device->copy_peer(memory.data(), 0, memory.data() + 32, 1, 32, stream)));
    EXPECT_TRUE(is_ok(device->deallocate_pinned(memory.data()))); // dropped
  }
  EXPECT_TRUE(has_code(detail::cuda_device::open(0, 1, driver, trimmer), errc::device_fault));
  EXPECT_EQ(detail::teardown_errors(), before);
}

} // namespace troupe::testing
