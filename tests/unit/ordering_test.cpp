/// Hazards between streams, and how failures follow them.
#include "core/spin.hpp"
#include "support/core_fixture.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace troupe {

namespace {

using detail::runtime;
using testing::allocate_bytes;
using testing::answer_of;
using testing::borrow;
using testing::core_system;
using testing::failing_work;
using testing::gate;
using testing::has_code;
using testing::host_work;
using testing::is_ok;
using testing::must;
using testing::no_work;
using testing::settles;
using namespace std::chrono_literals;

std::byte* address(const any_gpu_ref& ref) { return static_cast<std::byte*>(must(ref.access())); }

/// What is in device memory, read behind the library's back.
std::vector<std::byte> content(const any_gpu_ref& ref) {
  return {address(ref), address(ref) + ref.size_bytes()};
}

void poke(const any_gpu_ref& ref, std::byte value) {
  std::fill_n(address(ref), ref.size_bytes(), value);
}

// INV-9, and INV-12: the one that was taken back stood between a reader and a writer.
TEST(Ordering, KeepsTheOrderAroundAWithdrawnOperation) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  auto beside = allocate_bytes(device, 64);
  poke(memory, std::byte{1});
  std::vector<std::byte> seen;
  gate reading;
  gate lane;
  auto reader = device.launch(host_work([&, pass = reading.passer(), from = address(memory)] {
                                pass();
                                seen.assign(from, from + 64);
                              }),
                              {memory}, {}, {});
  reading.wait_reached();
  auto held = device.launch(lane.on_lane(), {}, {}, {});
  lane.wait_reached();
  std::vector<std::byte> twos(64, std::byte{2});
  std::vector<std::byte> threes(64, std::byte{3});
  std::vector<std::byte> back(64);
  auto withdrawn = device.upload(memory, borrow(twos), {});
  auto writer = device.upload(memory, borrow(threes), {});
  auto other = device.download(beside, borrow(back), {});
  withdrawn->cancel();
  EXPECT_TRUE(has_code(answer_of(withdrawn), errc::cancelled));
  lane.open();
  EXPECT_TRUE(is_ok(answer_of(other))); // admitted last: the lane came by the writer
  EXPECT_FALSE(writer->wait_until(detail::clock::now() + 50ms)) << "it overtook the reader";
  reading.open();
  EXPECT_TRUE(is_ok(answer_of(reader)));
  EXPECT_TRUE(is_ok(answer_of(writer)));
  EXPECT_EQ(seen, std::vector<std::byte>(64, std::byte{1}));
  EXPECT_EQ(content(memory), threes);
}

// INV-12: however admission and the writer's end race.
TEST(Ordering, FailsWhatReadsAFailedWrite) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 8);
  std::vector<std::byte> bytes(8);
  std::mt19937 random{7};
  for (int i = 0; i < 20'000; ++i) {
    must(answer_of(device.fill(memory, {std::byte{1}}, {})));
    auto writer = device.launch(failing_work(), {}, {memory}, {});
    for (auto n = random() % 64; n > 0; --n)
      detail::pause();
    auto reader = device.download(memory, borrow(bytes), {});
    EXPECT_TRUE(has_code(answer_of(writer), errc::launch_failed));
    ASSERT_TRUE(answer_of(reader)) << "round " << i << ": it read what a failed launch was writing";
  }
}

} // namespace

} // namespace troupe
