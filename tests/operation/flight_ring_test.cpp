#include "operation/flight_ring.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

namespace troupe::detail {
namespace {

flight_entry numbered(std::uint64_t number) {
  flight_entry x;
  x.operation = number;
  x.verb = "probe";
  x.epoch = 3 * number;
  x.count = 5 * number;
  x.issued_at = static_cast<std::int64_t>(number);
  x.add_ref({7 * number, number, number + 1}, true, false);
  x.progress = {flight_state::issuing};
  return x;
}

TEST(FlightRing, KeepsTheLastOnesInOrder) {
  flight_ring ring{8};
  EXPECT_TRUE(ring.read().empty());
  for (std::uint64_t i = 1; i <= 20; ++i)
    EXPECT_EQ(ring.add(numbered(i)), i);
  EXPECT_EQ(ring.added(), 20u);
  auto all = ring.read();
  ASSERT_EQ(all.size(), 8u);
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].operation, 13 + i);
    EXPECT_EQ(all[i].ref[0].buffer, 7 * (13 + i));
    EXPECT_TRUE(all[i].ref_reads(0));
    EXPECT_FALSE(all[i].ref_writes(0));
  }
}

TEST(FlightRing, TellsWhatBecameOfAnEntryWhileItIsThere) {
  flight_ring ring{2};
  auto first = ring.add(numbered(1));
  auto second = ring.add(numbered(2));
  ring.advance(first, {flight_state::issued});
  ring.advance(second, {flight_state::started}, 30);
  ring.advance(second, {flight_state::failed, errc::nccl_error, 0, -3}, 40);
  auto all = ring.read();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].progress.state, flight_state::issued);
  EXPECT_EQ(all[0].over_at, 0);
  EXPECT_EQ(all[1].progress.state, flight_state::failed);
  EXPECT_EQ(all[1].progress.error, errc::nccl_error);
  EXPECT_EQ(all[1].progress.native_code, -3);
  EXPECT_EQ(all[1].started_at, 30);
  EXPECT_EQ(all[1].over_at, 40);
  ring.add(numbered(3));
  ring.advance(first, {flight_state::done}, 50); // overwritten
  all = ring.read();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[1].operation, 3u);
  EXPECT_EQ(all[1].progress.state, flight_state::issuing);
}

TEST(FlightRing, CutsWhatDoesNotFit) {
  flight_entry x;
  for (std::uint64_t i = 0; i < 6; ++i)
    x.add_ref({i, 0, 1}, false, true);
  EXPECT_EQ(x.refs, 4);
  EXPECT_EQ(x.refs_left_out, 2u);
  EXPECT_TRUE(x.ref_writes(3));
  auto tag = make_world_tag(std::string(100, 'w'));
  EXPECT_EQ(std::string{tag.name.data()}, std::string(31, 'w'));
  EXPECT_NE(make_world_tag("w").id, tag.id);
}

TEST(FlightRing, IsReadWhileItIsWritten) {
  flight_ring ring{16};
  std::atomic<bool> stop{false};
  std::thread writer{[&] {
    for (std::uint64_t i = 1; !stop.load(std::memory_order_relaxed); ++i) {
      auto entry = ring.add(numbered(i));
      auto time = static_cast<std::int64_t>(i);
      ring.advance(entry, {flight_state::issued});
      ring.advance(entry, {flight_state::started}, time + 1);
      ring.advance(entry, {flight_state::done}, time + 2);
    }
  }};
  std::size_t read = 0;
  for (int i = 0; i < 2000 || read < 1000; ++i) {
    std::uint64_t last = 0;
    for (auto& x : ring.read()) {
      ++read;
      auto time = static_cast<std::int64_t>(x.operation);
      ASSERT_GT(x.operation, last);
      last = x.operation;
      ASSERT_EQ(x.epoch, 3 * x.operation);
      ASSERT_EQ(x.count, 5 * x.operation);
      ASSERT_EQ(x.ref[0].buffer, 7 * x.operation);
      ASSERT_EQ(x.issued_at, time);
      ASSERT_EQ(x.started_at, x.progress.state >= flight_state::started ? time + 1 : 0);
      ASSERT_EQ(x.over_at, x.progress.state >= flight_state::done ? time + 2 : 0);
    }
  }
  stop.store(true);
  writer.join();
}

} // namespace
} // namespace troupe::detail
