/// Slabs of virtual devices.

#include "foundation/file_descriptor.hpp"
#include "support/expect.hpp"
#include <troupe/backend.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>

#include <sys/mman.h>
#include <unistd.h>

namespace troupe::testing {

namespace {

constexpr std::size_t size = std::size_t{1} << 20;

class HostSlabs : public ::testing::Test {
protected:
  /// Returns addresses that are free now.
  static void* free_address() {
    void* const place = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(place, MAP_FAILED);
    EXPECT_EQ(::munmap(place, size), 0);
    return place;
  }

  std::shared_ptr<backend> host_ = make_host_backend({.devices = 2, .bytes_per_device = 3 * size});
  const memory_slab slab_{1, free_address(), size};
};

TEST_F(HostSlabs, LiveOnInTheirDescriptor) {
  const detail::file_descriptor of_slab{must(host_->make_slab(slab_))};
  std::memset(slab_.address, 7, size);
  must(host_->unmap_slab(slab_));
  void* const again = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, of_slab.get(), 0);
  ASSERT_NE(again, MAP_FAILED);
  EXPECT_EQ(static_cast<const char*>(again)[0], 7);
  EXPECT_EQ(static_cast<const char*>(again)[size - 1], 7);
  EXPECT_EQ(::munmap(again, size), 0);
}

TEST_F(HostSlabs, AreMemoryOfTheirDevice) {
  auto device = must(host_->open(1));
  auto other = must(host_->open(0));
  const detail::file_descriptor of_slab{must(host_->make_slab(slab_))};
  EXPECT_EQ(must(device->memory()).free_bytes, 2 * size);
  EXPECT_EQ(must(other->memory()).free_bytes, 3 * size);
  must(device->open_memory());
  const auto stream = must(device->create_stream());
  EXPECT_TRUE(has_code(device->allocate(2 * size + 1, stream).error(), errc::out_of_memory));
  must(device->allocate(2 * size, stream));
  must(host_->unmap_slab(slab_));
  EXPECT_EQ(must(device->memory()).free_bytes, size);
}

TEST_F(HostSlabs, AreMappedByOthers) {
  const auto other = make_host_backend({.devices = 2, .bytes_per_device = size});
  const detail::file_descriptor of_slab{must(host_->make_slab(slab_))};
  std::memset(slab_.address, 7, size);
  EXPECT_TRUE(has_code(other->map_slab(slab_, of_slab.get(), 0), errc::unavailable)); // in use
  must(host_->unmap_slab(slab_));
  must(other->map_slab(slab_, of_slab.get(), 0));
  EXPECT_EQ(static_cast<const char*>(slab_.address)[size - 1], 7);
  auto device = must(other->open(1));
  EXPECT_EQ(must(device->memory()).free_bytes, 0u); // wherever it is mapped
  must(other->unmap_slab(slab_));
  const memory_slab larger{1, slab_.address, 2 * size};
  EXPECT_TRUE(has_code(other->map_slab(larger, of_slab.get(), 0), errc::invalid_argument));
  EXPECT_TRUE(has_code(other->map_slab(slab_, -1, 0), errc::invalid_argument));
  EXPECT_TRUE(has_code(other->map_slab(slab_, of_slab.get(), 2), errc::invalid_argument));
}

TEST_F(HostSlabs, AreRefusedWithoutATrace) {
  const auto unit = host_->slab_granularity();
  ASSERT_GT(unit, 0u);
  auto refused = [&](memory_slab what) {
    const auto made = host_->make_slab(what);
    EXPECT_FALSE(made);
    return made ? caf::error{} : made.error();
  };
  EXPECT_TRUE(has_code(refused({2, slab_.address, size}), errc::invalid_argument));
  EXPECT_TRUE(has_code(refused({0, nullptr, size}), errc::invalid_argument));
  EXPECT_TRUE(has_code(refused({0, slab_.address, 0}), errc::invalid_argument));
  EXPECT_TRUE(has_code(refused({0, slab_.address, unit + 1}), errc::invalid_argument));
  EXPECT_TRUE(has_code(refused({0, static_cast<std::byte*>(slab_.address) + 1, unit}),
                       errc::invalid_argument));
  EXPECT_TRUE(has_code(refused({0, slab_.address, 4 * size}), errc::out_of_memory));
  const detail::file_descriptor of_slab{must(host_->make_slab(slab_))};
  EXPECT_TRUE(has_code(refused(slab_), errc::unavailable)); // in use
  EXPECT_TRUE(has_code(host_->unmap_slab({1, slab_.address, unit}), errc::invalid_argument));
  must(host_->unmap_slab(slab_));
  EXPECT_TRUE(has_code(host_->unmap_slab(slab_), errc::invalid_argument));
}

} // namespace

} // namespace troupe::testing
