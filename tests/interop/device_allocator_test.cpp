// Memory of a device by address, as memory resources of other libraries allocate it.

#include "support/eventually.hpp"
#include "support/log_lines.hpp"
#include "support/random.hpp"
#include "support/world_fixture.hpp"
#include <troupe/detail/device_allocator.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

namespace troupe::testing {

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

class DeviceAllocator : public ::testing::Test {
protected:
  void SetUp() override {
    TROUPE_IN_PROCESS_ONLY("addresses of this process");
    TROUPE_HOST_ONLY("the test writes the memory itself");
    sys_ = std::make_unique<test_system>(system_options{.devices = 2, .bytes_per_device = 8 * mib});
    gpu_ = std::make_unique<device>(sys_->open());
    allocator_ = must(detail::device_allocator::make(*gpu_));
  }

  std::uint64_t free_bytes() {
    must(answer_of(gpu_->stats())); // the lane has seen what was released before
    return must(answer_of(gpu_->stats())).free_bytes;
  }

  std::unique_ptr<test_system> sys_;
  std::unique_ptr<device> gpu_;
  std::shared_ptr<detail::device_allocator> allocator_;
};

TEST_F(DeviceAllocator, CountsAsMemoryOfTheDevice) {
  const auto all = free_bytes();
  auto* one = must(allocator_->allocate(3 * mib, 256));
  EXPECT_EQ(free_bytes(), all - 3 * mib);
  auto* other = must(allocator_->allocate(4 * mib, 256));
  EXPECT_TRUE(has_code(allocator_->allocate(2 * mib, 256), errc::out_of_memory));
  EXPECT_TRUE(has_code(gpu_->allocate<std::uint8_t>(2 * mib), errc::out_of_memory));
  allocator_->deallocate(one, std::nullopt);
  EXPECT_EQ(free_bytes(), all - 4 * mib);
  allocator_->deallocate(other, std::nullopt);
  EXPECT_EQ(free_bytes(), all);
}

TEST_F(DeviceAllocator, AlignsAsAsked) {
  std::mt19937_64 random{7};
  std::map<std::byte*, std::size_t> ranges;
  for (std::size_t alignment = 1; alignment <= 64 * 1024; alignment *= 2) {
    const auto size = pick(random, 1, 10'000);
    auto* memory = static_cast<std::byte*>(must(allocator_->allocate(size, alignment)));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % alignment, 0u);
    std::memset(memory, static_cast<int>(ranges.size()), size);
    ranges.emplace(memory, size);
  }
  std::byte* end = nullptr;
  for (auto [memory, size] : ranges) {
    EXPECT_GE(memory, end) << "allocations overlap";
    end = memory + size;
    allocator_->deallocate(memory, std::nullopt);
  }
  EXPECT_EQ(free_bytes(), 8 * mib);
}

TEST_F(DeviceAllocator, RefusesWhatCannotBe) {
  EXPECT_EQ(must(allocator_->allocate(0, 256)), nullptr);
  allocator_->deallocate(nullptr, std::nullopt);
  EXPECT_TRUE(has_code(allocator_->allocate(1, 3), errc::invalid_argument));
  EXPECT_TRUE(has_code(allocator_->allocate(1, 0), errc::invalid_argument));
  EXPECT_TRUE(has_code(allocator_->allocate(SIZE_MAX, 4096), errc::out_of_memory));
  EXPECT_TRUE(has_code(allocator_->allocate(SIZE_MAX, 1), errc::out_of_memory));
  caf::error on_lane;
  must(answer_of(gpu_->launch(
      [&](launch_context&) {
        on_lane = error_of(allocator_->allocate(1, 256));
        return caf::error{};
      },
      {}, {})));
  EXPECT_TRUE(has_code(on_lane, errc::would_block));
  EXPECT_EQ(free_bytes(), 8 * mib);
}

TEST_F(DeviceAllocator, LogsMemoryThatItHasNotAllocated) {
  log_lines lines;
  int mine = 0;
  allocator_->deallocate(&mine, std::nullopt);
  EXPECT_TRUE(lines.say("memory that it has not allocated"));
}

TEST_F(DeviceAllocator, KeepsTheDeviceFromResets) {
  auto* memory = must(allocator_->allocate(1000, 256));
  EXPECT_TRUE(has_code(answer_of(gpu_->reset()), errc::buffer_acquired));
  allocator_->deallocate(memory, std::nullopt);
  EXPECT_TRUE(is_ok(answer_of(gpu_->reset())));
  auto* again = must(allocator_->allocate(1000, 256)); // in the next generation
  allocator_->deallocate(again, std::nullopt);
  EXPECT_EQ(free_bytes(), 8 * mib);
}

TEST_F(DeviceAllocator, FreesWhatIsLeftWhenItEnds) {
  log_lines lines;
  must(allocator_->allocate(mib, 256));
  must(allocator_->allocate(mib, 256));
  EXPECT_EQ(free_bytes(), 6 * mib);
  allocator_.reset();
  EXPECT_EQ(free_bytes(), 8 * mib);
  EXPECT_TRUE(lines.say("ended before 2 of its allocations"));
}

TEST_F(DeviceAllocator, TheDeviceEndsFirst) {
  auto* memory = must(allocator_->allocate(1000, 256));
  gpu_->shutdown();
  allocator_->deallocate(memory, std::nullopt);
  EXPECT_TRUE(has_code(allocator_->allocate(1000, 256), errc::unavailable));
}

TEST_F(DeviceAllocator, ManyThreadsAllocate) {
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::mt19937_64 random{t};
      std::map<std::byte*, std::vector<std::byte>> mine;
      for (int i = 0; i < 200; ++i) {
        if (mine.size() < 10 && chance(random, 0.6)) {
          const auto content = random_bytes(pick(random, 1, 20'000), random());
          auto* memory = static_cast<std::byte*>(must(allocator_->allocate(content.size(), 256)));
          std::memcpy(memory, content.data(), content.size());
          mine.emplace(memory, content);
        } else if (!mine.empty()) {
          const auto& [memory, content] = *mine.begin();
          EXPECT_EQ(std::memcmp(memory, content.data(), content.size()), 0);
          allocator_->deallocate(memory, std::nullopt);
          mine.erase(mine.begin());
        }
      }
      for (auto& [memory, content] : mine) {
        EXPECT_EQ(std::memcmp(memory, content.data(), content.size()), 0);
        allocator_->deallocate(memory, std::nullopt);
      }
    });
  for (auto& x : threads)
    x.join();
  EXPECT_EQ(free_bytes(), 8 * mib);
}

TEST(DeviceAllocatorOfWorkers, IsRefused) {
  if (!in_workers())
    GTEST_SKIP() << "only with devices in worker processes";
  test_system system;
  EXPECT_TRUE(has_code(detail::device_allocator::make(system.open()), errc::not_supported));
}

} // namespace

} // namespace troupe::testing
