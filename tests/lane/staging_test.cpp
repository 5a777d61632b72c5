/// Transfers between pageable host memory and a device.
#include "lane/staging.hpp"
#include "support/core_fixture.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace troupe {

namespace {

using testing::allocate_bytes;
using testing::answer_of;
using testing::borrow;
using testing::core_system;
using testing::fault;
using testing::fault_plan;
using testing::gate;
using testing::has_code;
using testing::host_work;
using testing::is_ok;
using testing::must;
using testing::settles;
using testing::verb;

std::vector<std::byte> random_bytes(std::mt19937& random, std::size_t size) {
  std::vector<std::byte> result(size);
  for (auto& x : result)
    x = static_cast<std::byte>(random());
  return result;
}

// -- the ring

TEST(StagingRing, HandsOutEveryByteOnce) {
  constexpr std::size_t size = 4096;
  const auto backend = make_host_backend({.devices = 1});
  const auto device = must(backend->open(0));
  detail::staging_ring ring{*device, size};
  ASSERT_EQ(ring.piece_limit(), size / 4);
  std::byte* const start = must(ring.take(1));
  ring.give_back(start);
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::mt19937 random{seed};
    std::map<std::byte*, std::size_t> out;
    for (int step = 0; step < 400; ++step) {
      if (random() % 2 == 0) {
        const auto want = 1 + random() % ring.piece_limit();
        if (auto* p = must(ring.take(want))) {
          ASSERT_GE(p, start);
          ASSERT_LE(p + want, start + size);
          for (auto& [at, length] : out)
            ASSERT_TRUE(p + want <= at || at + length <= p) << "seed " << seed << ", step " << step;
          out.emplace(p, want);
        } else {
          ASSERT_FALSE(out.empty()) << "an empty ring has room";
        }
      } else if (!out.empty()) {
        auto i = out.begin(); // in any order
        std::advance(i, random() % out.size());
        ring.give_back(i->first);
        out.erase(i);
      }
    }
    while (!out.empty()) {
      ring.give_back(out.begin()->first);
      out.erase(out.begin());
    }
    // The whole ring is free again.
    for (int i = 0; i < 3; ++i) {
      auto* p = must(ring.take(ring.piece_limit()));
      ASSERT_NE(p, nullptr);
      out.emplace(p, 0);
    }
    for (auto& x : out)
      ring.give_back(x.first);
  }
  EXPECT_TRUE(is_ok(ring.close()));
}

TEST(StagingRing, KeepsTheRoomOfAnOlderPiece) {
  const auto backend = make_host_backend({.devices = 1});
  const auto device = must(backend->open(0));
  detail::staging_ring ring{*device, 4096};
  auto* old = must(ring.take(1024));
  auto* young = must(ring.take(1024));
  ring.give_back(young); // as a cancelled transfer does
  for (int i = 0; i < 16; ++i)
    if (auto* p = must(ring.take(700))) {
      EXPECT_TRUE(p + 700 <= old || old + 1024 <= p);
      ring.give_back(p);
    }
  EXPECT_TRUE(is_ok(ring.close()));
}

TEST(StagingRing, TellsThatThereIsNoMemory) {
  const auto plan = std::make_shared<fault_plan>(
      0, std::vector<testing::fault_rule>{
             {.kind = fault::out_of_memory, .on = verb::allocate_pinned}});
  const auto device = must(with_faults(make_host_backend({.devices = 1}), plan)->open(0));
  detail::staging_ring ring{*device, 4096};
  EXPECT_TRUE(has_code(ring.take(1), errc::out_of_memory));
  EXPECT_TRUE(ring.take(1)); // later allocations succeed
  EXPECT_TRUE(is_ok(ring.close()));
}

// -- transfers

/// By staging size: pieces that the lane copies itself, and pieces for the copy thread.
class Transfers : public ::testing::TestWithParam<std::size_t> {};

TEST_P(Transfers, MoveEveryByteInBothDirections) {
  core_system system{{.lanes = {.staging_bytes = GetParam()}}};
  const auto device = system.device();
  const auto piece = GetParam() / 4;
  std::mt19937 random{5};
  struct trip {
    std::vector<std::byte> sent;
    std::vector<std::byte> received;
    std::shared_ptr<detail::completion> up;
    std::shared_ptr<detail::completion> down;
  };
  for (int round = 0; round < 6; ++round) {
    std::vector<trip> trips(12);
    for (auto& x : trips) {
      const std::size_t sizes[] = {1,         piece - 1, piece,
                                   piece + 1, 3 * piece, 1 + random() % (9 * piece)};
      x.sent = random_bytes(random, sizes[random() % std::size(sizes)]);
      x.received.assign(x.sent.size(), std::byte{0xEE});
      auto memory = allocate_bytes(device, x.sent.size());
      x.up = device.upload(memory, borrow(x.sent), {});
      x.down = device.download(memory, borrow(x.received), {});
    }
    for (auto& x : trips) {
      EXPECT_TRUE(is_ok(answer_of(x.up)));
      EXPECT_TRUE(is_ok(answer_of(x.down)));
      EXPECT_EQ(x.sent, x.received);
    }
  }
}

TEST_P(Transfers, MoveWhatIsNotTakenBack) {
  core_system system{{.lanes = {.staging_bytes = GetParam()}}};
  const auto device = system.device();
  std::mt19937 random{9};
  const auto size = 5 * GetParam() / 4;
  for (int round = 0; round < 40; ++round) {
    const auto kept = random_bytes(random, size);
    auto sent = kept;
    std::vector<std::byte> received(size);
    auto dropped = std::make_unique<std::vector<std::byte>>(random_bytes(random, size));
    auto memory = allocate_bytes(device, size);
    auto other = allocate_bytes(device, size);
    auto up = device.upload(memory, borrow(sent), {});
    auto taken_back = device.upload(other, borrow(*dropped), {});
    auto down = device.download(memory, borrow(received), {});
    for (auto n = random() % 2'000; n > 0; --n)
      std::atomic_signal_fence(std::memory_order_seq_cst);
    taken_back->cancel();
    const auto told = answer_of(taken_back);
    EXPECT_TRUE(!told || has_code(told, errc::cancelled));
    dropped = nullptr; // it belongs to the requester again
    EXPECT_TRUE(is_ok(answer_of(up)));
    EXPECT_TRUE(is_ok(answer_of(down)));
    ASSERT_EQ(received, kept);
    EXPECT_TRUE(settles(*taken_back));
    auto check = device.download(other, borrow(received), {});
    if (told)
      EXPECT_TRUE(!answer_of(check) || has_code(answer_of(check), errc::indeterminate));
    else
      EXPECT_TRUE(is_ok(answer_of(check)));
  }
}

TEST_P(Transfers, LeaveMemoryAloneAfterAnAnswer) {
  core_system system{{.lanes = {.staging_bytes = GetParam()}}};
  const auto device = system.device();
  const std::size_t size = 3 * GetParam();
  auto memory = allocate_bytes(device, size);
  std::vector<std::byte> target(size, std::byte{7});
  gate held;
  auto before = device.launch(held.in_stream(), {}, {memory}, {});
  held.wait_reached();
  auto down = device.download(memory, borrow(target), {});
  down->cancel();
  EXPECT_TRUE(has_code(answer_of(down), errc::cancelled));
  std::fill(target.begin(), target.end(), std::byte{9});
  held.open();
  EXPECT_TRUE(settles(*down));
  EXPECT_EQ(target, std::vector<std::byte>(size, std::byte{9}));
}

TEST_P(Transfers, KeepWhatTheyOwnAfterAnAnswer) {
  core_system system{{.lanes = {.staging_bytes = GetParam()}}};
  const auto device = system.device();
  const std::size_t size = 2 * GetParam();
  auto memory = allocate_bytes(device, size);
  gate held;
  auto before = device.launch(held.in_stream(), {memory}, {}, {});
  held.wait_reached();
  auto up = device.upload(memory, std::make_shared<detail::host_range>(host_buffer{size}), {});
  up->cancel(); // possibly too late: only the operation holds its memory
  held.open();
  EXPECT_TRUE(settles(*up));
}

TEST_P(Transfers, FailWithTheBackendAndGoOn) {
  const auto piece = GetParam() / 4;
  for (std::uint64_t at = 1; at <= 8; ++at)
    for (auto what : {verb::copy, verb::allocate_pinned, verb::query}) {
      if (what == verb::allocate_pinned && at > 1)
        continue;
      const auto plan = std::make_shared<fault_plan>();
      core_system system{{.lanes = {.staging_bytes = GetParam()}, .plan = plan}};
      const auto device = system.device();
      std::mt19937 random{static_cast<unsigned>(at)};
      const auto kept = random_bytes(random, 6 * piece + 5);
      auto sent = kept;
      std::vector<std::byte> received(kept.size());
      auto memory = allocate_bytes(device, kept.size());
      plan->add(
          {.kind = fault::fail, .on = what, .device = 0, .first = at, .error = errc::cuda_error});
      auto up = device.upload(memory, borrow(sent), {});
      const auto up_told = answer_of(up);
      EXPECT_TRUE(settles(*up));
      auto down = device.download(memory, borrow(received), {});
      const auto down_told = answer_of(down);
      EXPECT_TRUE(!up_told || has_code(up_told, errc::cuda_error)) << describe(up_told);
      if (up_told) {
        EXPECT_TRUE(has_code(down_told, errc::indeterminate)) << describe(down_told);
      } else if (!down_told) {
        EXPECT_EQ(received, kept);
      }
      plan->disarm();
      EXPECT_TRUE(is_ok(answer_of(device.upload(memory, borrow(sent), {}))));
      EXPECT_TRUE(is_ok(answer_of(device.download(memory, borrow(received), {}))));
      EXPECT_EQ(received, kept) << to_string(what) << " " << at;
    }
}

INSTANTIATE_TEST_SUITE_P(Staging, Transfers,
                         ::testing::Values(std::size_t{16} << 10, std::size_t{256} << 10),
                         [](const auto& x) { return std::to_string(x.param >> 10) + "KiB"; });

TEST(Transfer, GoesDirectlyToPinnedMemory) {
  const auto plan = std::make_shared<fault_plan>();
  core_system system{{.plan = plan}};
  const auto device = system.device();
  auto pinned = device.allocate_pinned(5'000, {});
  must(answer_of(pinned));
  ASSERT_TRUE(pinned->value.pinned());
  // Staging memory is not available: the library must not request it.
  plan->add({.kind = fault::fail, .on = verb::allocate_pinned, .times = testing::forever});
  auto memory = allocate_bytes(device, 5'000);
  std::fill_n(pinned->value.writable().begin(), 5'000, std::byte{3});
  const auto whole = [&] { return std::make_shared<detail::host_range>(pinned->value); };
  EXPECT_TRUE(is_ok(answer_of(device.upload(memory, whole(), {}))));
  std::fill_n(pinned->value.writable().begin(), 5'000, std::byte{0});
  EXPECT_TRUE(is_ok(answer_of(device.download(memory, whole(), {}))));
  for (auto x : pinned->value.bytes())
    ASSERT_EQ(x, std::byte{3});
}

TEST(HostRange, IsNotTouchedOnceRevoked) {
  std::vector<std::byte> memory(64, std::byte{1});
  std::vector<std::byte> other(64, std::byte{2});
  detail::host_range range{std::span{memory}};
  EXPECT_TRUE(range.copy_from(other.data(), 0, 32));
  range.revoke();
  EXPECT_FALSE(range.copy_from(other.data(), 32, 32));
  EXPECT_FALSE(range.copy_to(other.data(), 0, 64));
  EXPECT_EQ(std::count(memory.begin(), memory.end(), std::byte{2}), 32);
  EXPECT_EQ(std::count(other.begin(), other.end(), std::byte{2}), 64);
}

} // namespace

} // namespace troupe
