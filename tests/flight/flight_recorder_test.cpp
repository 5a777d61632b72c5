/// Records of lanes, and their content in a snapshot.
#include "flight/flight_recorder.hpp"
#include "lane/lane.hpp"
#include "support/core_fixture.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace troupe::detail {
namespace {

using namespace troupe::testing;

std::int64_t now() { return clock::now().time_since_epoch().count(); }

/// Returns the snapshot of one device at this moment.
flight_snapshot::device taken(core_system& system, std::size_t device = 0) {
  return system.runtime()->recorder().take().devices.at(device);
}

std::vector<flight_entry> entries_of(const flight_snapshot::device& x, std::uint64_t operation) {
  std::vector<flight_entry> result;
  std::copy_if(x.operations.begin(), x.operations.end(), std::back_inserter(result),
               [&](auto& entry) { return entry.operation == operation; });
  return result;
}

TEST(FlightRecorder, LanesWriteTimesInOrder) {
  core_system system;
  auto device = system.device();
  auto before = now();
  auto ref = allocate_bytes(device, 1000);
  std::vector<std::byte> content(1000);
  must(answer_of(device.upload(ref, borrow(content), {})));
  auto failed = device.launch(failing_work(), {}, {ref}, {});
  EXPECT_TRUE(answer_of(failed));
  EXPECT_TRUE(settles(*failed));
  auto all = taken(system).operations;
  ASSERT_EQ(all.size(), 3u);
  EXPECT_STREQ(all[0].verb, "allocate");
  EXPECT_STREQ(all[1].verb, "upload");
  for (auto& x : {all[0], all[1]}) {
    EXPECT_EQ(x.count, 1000u);
    EXPECT_EQ(x.type, static_cast<std::uint8_t>(dtype::uint8));
    EXPECT_EQ(x.progress.state, flight_state::done);
  }
  ASSERT_EQ(all[1].refs, 1);
  EXPECT_EQ(all[1].ref[0].buffer, ref.memory()->id());
  EXPECT_EQ(all[1].ref[0].end, 1000u);
  EXPECT_TRUE(all[1].ref_writes(0));
  EXPECT_FALSE(all[1].ref_reads(0));
  for (auto& x : all) {
    EXPECT_EQ(x.generation, 1u);
    EXPECT_EQ(x.rank, -1);
    EXPECT_LE(before, x.admitted_at);
    EXPECT_LE(x.admitted_at, x.issued_at);
    EXPECT_LE(x.issued_at, x.started_at == 0 ? x.over_at : x.started_at);
    EXPECT_LE(x.started_at, x.over_at);
    EXPECT_LE(x.over_at, now());
  }
  EXPECT_EQ(all[2].progress.state, flight_state::failed);
  EXPECT_EQ(all[2].progress.error, errc::launch_failed);
}

TEST(FlightRecorder, KnowsWhatWaitsAndWhatNeverRan) {
  core_system system;
  auto device = system.device();
  gate held;
  auto standing = device.launch(held.on_lane(), {}, {}, {});
  held.wait_reached();
  auto behind = device.launch(no_work(), {}, {}, {});
  auto all = taken(system).operations;
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].operation, standing->number());
  EXPECT_EQ(all[0].progress.state, flight_state::issuing);
  EXPECT_EQ(all[1].operation, behind->number());
  EXPECT_EQ(all[1].progress.state, flight_state::not_issued);
  EXPECT_EQ(all[1].progress.error, errc{});
  EXPECT_EQ(all[1].issued_at, 0);
  EXPECT_EQ(all[1].over_at, 0);
  EXPECT_NE(all[1].admitted_at, 0);
  behind->cancel();
  held.open();
  must(answer_of(standing));
  EXPECT_TRUE(settles(*behind));
  all = taken(system).operations;
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[1].operation, behind->number());
  EXPECT_EQ(all[1].progress.state, flight_state::not_issued);
  EXPECT_EQ(all[1].progress.error, errc::cancelled);
  EXPECT_NE(all[1].over_at, 0);
}

/// Issues in pieces until `enough` is set.
class piecewise final : public probe {
public:
  explicit piecewise(const std::shared_ptr<lane>& on)
      : probe({on}, [](part&, lane&) { return issue_outcome::continues; }) {}
  caf::expected<issue_outcome> proceed(part&, lane&) override {
    return enough.load() ? issue_outcome::finished : issue_outcome::continues;
  }

  std::atomic<bool> enough{false};
};

TEST(FlightRecorder, NamesWhatTheNextInOrderWaitsFor) {
  core_system system;
  auto first = std::make_shared<piecewise>(system.lane());
  system.runtime()->start(first);
  auto next = system.device().launch(no_work(), {}, {}, {}); // on the same stream
  EXPECT_TRUE(eventually([&] { return taken(system).holder == first->number(); }));
  auto waiting = entries_of(taken(system), next->number());
  ASSERT_EQ(waiting.size(), 1u);
  EXPECT_EQ(waiting[0].progress.state, flight_state::not_issued);
  first->enough.store(true);
  system.lane()->wake();
  must(answer_of(next));
  EXPECT_EQ(taken(system).holder, 0u);
}

// One stream is blocked while another runs far more operations than the ring holds.
TEST(FlightRecorder, KeepsWhatIsNotOver) {
  core_system system;
  auto device = system.device();
  gate held;
  auto standing = device.launch(held.in_stream(), {}, {}, {});
  held.wait_reached();
  std::shared_ptr<operation> last;
  for (std::size_t i = 0; i < flight_ring::default_capacity + 100; ++i) {
    last = device.stats({});
    must(answer_of(last));
  }
  EXPECT_TRUE(settles(*last));
  auto all = taken(system).operations;
  ASSERT_EQ(all.size(), flight_ring::default_capacity + 1);
  EXPECT_EQ(all.front().operation, standing->number());
  EXPECT_EQ(all.front().progress.state, flight_state::started);
  EXPECT_EQ(all.back().operation, last->number());
  held.open();
  must(answer_of(standing));
}

TEST(FlightRecorder, EveryPartStandsThereOnceWhileLanesWork) {
  core_system system{{.devices = 2}};
  std::atomic<bool> stop{false};
  std::thread client{[&] {
    while (!stop.load()) {
      std::vector<std::shared_ptr<operation>> some;
      for (int i = 0; i < 50; ++i)
        some.push_back(system.device(i % 2).launch(no_work(), {}, {}, {}));
      for (auto& x : some)
        must(answer_of(x));
    }
  }};
  for (int i = 0; i < 50; ++i)
    for (auto& device : system.runtime()->recorder().take().devices) {
      std::vector<std::uint64_t> numbers;
      for (auto& x : device.operations)
        numbers.push_back(x.operation);
      std::sort(numbers.begin(), numbers.end());
      ASSERT_EQ(std::adjacent_find(numbers.begin(), numbers.end()), numbers.end());
    }
  stop.store(true);
  client.join();
}

} // namespace
} // namespace troupe::detail
