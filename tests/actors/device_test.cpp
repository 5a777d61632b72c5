// A device, through its facade and as an actor.

#include "support/eventually.hpp"
#include "support/world_fixture.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

namespace troupe::testing {
namespace {

constexpr std::size_t kib = 1024;
constexpr std::size_t mib = 1024 * kib;

any_gpu_ref allocate_on(const device& d, dtype type, std::size_t count, bool zeroed = false) {
  return must(answer_of(d.allocate(type, count, zeroed)));
}

// -- memory

TEST(Device, TellsWhatItIs) {
  test_system system;
  auto d = system.open(system.ordinals().back());
  EXPECT_EQ(d.ordinal(), system.ordinals().back());
  EXPECT_EQ(d.phase(), device_phase::ready);
  EXPECT_EQ(d.generation(), 1u);
}

TEST(Device, AllocatesEveryType) {
  test_system system;
  auto d = system.open();
  std::vector<any_gpu_ref> all;
  for (auto type : all_dtypes)
    for (std::size_t count : {1, 3, 257, 100'003}) {
      auto ref = allocate_on(d, type, count, true);
      EXPECT_EQ(ref.type(), type);
      EXPECT_EQ(ref.count(), count);
      EXPECT_EQ(ref.size_bytes(), count * size_of(type));
      EXPECT_EQ(ref.device(), 0);
      EXPECT_EQ(ref.generation(), 1u);
      EXPECT_FALSE(ref.stale());
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(must(ref.access())) % 256, 0u);
      EXPECT_TRUE(holds(d, ref, std::vector<std::byte>(ref.size_bytes())));
      all.push_back(ref);
    }
  // The allocations do not overlap.
  for (std::size_t i = 0; i < all.size(); ++i)
    put(d, all[i], random_bytes(all[i].size_bytes(), i));
  for (std::size_t i = 0; i < all.size(); ++i)
    EXPECT_TRUE(holds(d, all[i], random_bytes(all[i].size_bytes(), i)));
}

TEST(Device, AllocatesByMessage) {
  test_system system;
  auto d = system.open();
  auto actor = must(d.actor());
  auto ref = must(ask<any_gpu_ref>(system, actor, allocate{1001, dtype::bfloat16, true}));
  EXPECT_EQ(ref.count(), 1001u);
  EXPECT_EQ(ref.type(), dtype::bfloat16);
  EXPECT_TRUE(holds(d, ref, std::vector<std::byte>(2002)));
}

TEST(Device, ReusesMemoryOfDroppedRefs) {
  test_system system{{.bytes_per_device = 8 * mib}};
  auto d = system.open();
  for (int i = 0; i < 20; ++i) {
    auto ref = d.allocate<std::int32_t>(1 << 20);
    ASSERT_TRUE(is_ok(ref));
    ASSERT_TRUE(is_ok(answer_of(d.fill(*ref, i))));
  }
}

class DeviceTransfer : public ::testing::TestWithParam<std::size_t> {};

INSTANTIATE_TEST_SUITE_P(Sizes, DeviceTransfer,
                         ::testing::Values(1, 3, 255, 32 * kib - 1, 32 * kib, 32 * kib + 1,
                                           4 * mib - 1, 4 * mib, 4 * mib + 1, 16 * mib,
                                           16 * mib + 5, 21 * mib + 1));

TEST_P(DeviceTransfer, BringsEveryByte) {
  test_system system;
  auto d = system.open();
  const auto size = GetParam();
  auto ref = allocate_on(d, dtype::uint8, size);
  const auto actor = must(d.actor());

  // From and to a span.
  auto content = random_bytes(size, 1);
  put(d, ref, content);
  EXPECT_TRUE(holds(d, ref, content));

  // By messages.
  content = random_bytes(size, 2);
  host_buffer source{size};
  std::memcpy(source.writable().data(), content.data(), size);
  EXPECT_TRUE(is_ok(ask<void>(system, actor, upload{ref, source})));
  auto received = must(ask<host_buffer>(system, actor, download{ref}));
  EXPECT_TRUE(check_equal(dtype::uint8, content, received.bytes()));

  // From and to pinned memory.
  content = random_bytes(size, 3);
  auto pinned = must(d.allocate_pinned(size));
  ASSERT_EQ(pinned.size_bytes(), size);
  EXPECT_TRUE(pinned.pinned());
  std::memcpy(pinned.writable().data(), content.data(), size);
  EXPECT_TRUE(is_ok(answer_of(d.upload(ref, pinned))));
  poison(pinned.writable());
  EXPECT_TRUE(is_ok(answer_of(d.download(ref, pinned))));
  EXPECT_TRUE(check_equal(dtype::uint8, content, pinned.bytes()));

  // From and to a buffer that only the library keeps.
  content = random_bytes(size, 4);
  {
    host_buffer ours{size};
    std::memcpy(ours.writable().data(), content.data(), size);
    auto done = d.upload(ref, std::move(ours));
    EXPECT_TRUE(is_ok(answer_of(done)));
  }
  host_buffer target{size};
  poison(target.writable());
  EXPECT_TRUE(is_ok(answer_of(d.download(ref, target))));
  EXPECT_TRUE(check_equal(dtype::uint8, content, target.bytes()));
}

TEST(Device, TransfersTypedVectors) {
  test_system system;
  auto d = system.open();
  std::vector<double> numbers(1000);
  std::iota(numbers.begin(), numbers.end(), 0.5);
  auto ref = must(d.allocate<double>(numbers.size()));
  EXPECT_TRUE(is_ok(answer_of(d.upload(ref, numbers))));
  EXPECT_EQ(must(d.download(ref)), numbers);
  std::vector<double> half(500, -1);
  EXPECT_TRUE(is_ok(answer_of(d.download(must(ref.slice(250, 500)), std::span{half}))));
  EXPECT_EQ(half, std::vector<double>(numbers.begin() + 250, numbers.begin() + 750));
}

TEST(Device, TransfersParts) {
  test_system system;
  auto d = system.open();
  const std::size_t size = 9 * mib + 7;
  auto want = random_bytes(size, 1);
  auto ref = allocate_on(d, dtype::uint8, size);
  put(d, ref, want);
  std::mt19937_64 random{7};
  for (int i = 0; i < 12; ++i) {
    const auto first = random() % size;
    const auto count = random() % (size - first);
    const auto part = must(ref.slice(first, count));
    const auto content = random_bytes(count, 100 + i);
    put(d, part, content);
    std::copy(content.begin(), content.end(), want.begin() + static_cast<std::ptrdiff_t>(first));
    ASSERT_TRUE(holds(d, part, content));
  }
  EXPECT_TRUE(holds(d, ref, want));
}

// Many threads share a staging ring that is smaller than their transfers.
TEST(Device, InterleavesTransfers) {
  system_options options;
  options.lanes.staging_bytes = 256 * kib;
  test_system system{options};
  auto d = system.open();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&d, t] {
      std::mt19937_64 random{static_cast<std::uint64_t>(t)};
      for (int i = 0; i < 8; ++i) {
        const auto size = 1 + random() % (i % 2 == 0 ? 700 * kib : 3 * kib);
        auto ref = allocate_on(d, dtype::uint8, size);
        const auto a = random_bytes(size, random());
        const auto b = random_bytes(size, random());
        // The second upload must not overtake the first one or the download between them.
        std::vector<std::byte> got(size);
        auto first = d.upload(ref, std::span<const std::byte>{a});
        auto read = d.download(ref, std::span{got});
        auto second = d.upload(ref, std::span<const std::byte>{b});
        EXPECT_TRUE(holds(d, ref, b));
        EXPECT_TRUE(is_ok(answer_of(first)));
        EXPECT_TRUE(is_ok(answer_of(second)));
        EXPECT_TRUE(is_ok(answer_of(read)));
        EXPECT_TRUE(check_equal(dtype::uint8, a, got));
      }
    });
  for (auto& x : threads)
    x.join();
}

TEST(Device, FillsEveryType) {
  test_system system;
  auto d = system.open();
  for (auto type : all_dtypes) {
    const std::size_t count = 1003;
    auto ref = allocate_on(d, type, count, true);
    auto want = std::vector<std::byte>(ref.size_bytes());
    for (auto [first, n] : {std::pair<std::size_t, std::size_t>{0, count}, {1, 7}, {501, 500}}) {
      const auto element = random_bytes(size_of(type), n + static_cast<std::size_t>(type));
      EXPECT_TRUE(is_ok(
          answer_of(d.fill(must(ref.slice(first, n)), must(scalar::from_bytes(type, element))))));
      for (std::size_t i = first; i < first + n; ++i)
        std::copy(element.begin(), element.end(),
                  want.begin() + static_cast<std::ptrdiff_t>(i * element.size()));
      ASSERT_TRUE(holds(d, ref, want)) << to_string(type);
    }
  }
  auto ref = must(d.allocate<float>(77));
  EXPECT_TRUE(is_ok(answer_of(d.fill(ref, 1.25F))));
  EXPECT_EQ(must(d.download(ref)), std::vector<float>(77, 1.25F));
  EXPECT_TRUE(is_ok(ask<void>(system, must(d.actor()), fill{ref, same_bytes(ref)})));
  EXPECT_EQ(must(d.download(ref)), std::vector<float>(77, 0.F));
}

TEST(Device, Copies) {
  test_system system;
  auto d = system.open();
  const auto content = random_bytes(2 * mib + 3, 1);
  auto a = allocate_on(d, dtype::uint8, content.size());
  auto b = allocate_on(d, dtype::uint8, content.size());
  put(d, a, content);
  EXPECT_TRUE(is_ok(answer_of(d.copy(b, a))));
  EXPECT_TRUE(holds(d, b, content));
  // Slices of one buffer that do not overlap. Their types may differ, their sizes must be equal.
  auto left = must(a.slice(0, 1000));
  auto right = must(must(a.slice(1000, 1000)).reinterpret(dtype::float64));
  EXPECT_TRUE(is_ok(ask<void>(system, must(d.actor()), copy{left, right})));
  EXPECT_TRUE(holds(d, left, std::span{content}.subspan(1000, 1000)));
  EXPECT_TRUE(holds(d, right, std::span{content}.subspan(1000, 1000)));
}

TEST(Device, KeepsATemporaryThatIsUploaded) {
  test_system system;
  auto d = system.open();
  std::vector<float> content(10'000);
  std::iota(content.begin(), content.end(), 1.0F);
  const auto as_bytes = std::as_bytes(std::span{content});
  const auto a = must(d.allocate<float>(content.size()));
  const auto b = must(d.allocate<float>(content.size()));
  const auto c = must(d.allocate<float>(3));
  gate lane; // the lane reads the temporaries after their lifetime
  const auto held = lane.hold_lane(d);
  ASSERT_TRUE(lane.wait_reached());
  const auto first = d.upload(a, std::vector<float>(content));
  const auto second = d.upload(b, std::vector<std::byte>(as_bytes.begin(), as_bytes.end()));
  const auto third = d.upload(c, std::array{1.0F, 2.0F, 3.0F});
  // These allocations may reuse freed memory.
  const std::vector<std::vector<float>> others(8, std::vector<float>(content.size(), -1));
  lane.open();
  for (auto* x : {&first, &second, &third})
    EXPECT_TRUE(is_ok(answer_of(*x)));
  EXPECT_EQ(must(d.download(a)), content);
  EXPECT_EQ(must(d.download(b)), content);
  EXPECT_EQ(must(d.download(c)), (std::vector<float>{1, 2, 3}));
}

TEST(Device, TakesWhatHoldsElements) {
  test_system system;
  auto d = system.open();
  const auto ref = must(d.allocate<std::int32_t>(3));
  std::vector<std::int32_t> vector{1, 2, 3};
  std::array<std::int32_t, 3> array{4, 5, 6};
  std::int32_t plain[]{7, 8, 9};
  EXPECT_TRUE(is_ok(answer_of(d.upload(ref, std::span{vector}))));
  EXPECT_EQ(must(d.download(ref)), vector);
  EXPECT_TRUE(is_ok(answer_of(d.upload(ref, array))));
  EXPECT_TRUE(is_ok(answer_of(d.download(ref, vector))));
  EXPECT_EQ(vector, (std::vector<std::int32_t>{4, 5, 6}));
  EXPECT_TRUE(is_ok(answer_of(d.upload(ref, plain))));
  EXPECT_TRUE(is_ok(answer_of(d.download(ref, array))));
  EXPECT_EQ(array, (std::array<std::int32_t, 3>{7, 8, 9}));
  EXPECT_TRUE(is_ok(answer_of(d.upload(ref, std::span{std::as_const(vector)}))));
  vector.resize(2);
  EXPECT_TRUE(has_code(answer_of(d.download(ref, vector)), errc::shape_mismatch));
  vector.resize(4);
  EXPECT_TRUE(has_code(answer_of(d.download(ref, vector)), errc::out_of_range));
}

// -- launches

TEST(Device, LaunchesInOrder) {
  TROUPE_IN_PROCESS_ONLY("callables");
  TROUPE_HOST_ONLY("the launch computes in host memory");
  test_system system;
  auto d = system.open();
  auto numbers = must(d.allocate<std::int64_t>(1000));
  EXPECT_TRUE(is_ok(answer_of(d.fill(numbers, 1))));
  std::vector<pending<void>> all;
  for (int i = 0; i < 10; ++i)
    all.push_back(d.launch(
        [&](launch_context& context) {
          EXPECT_EQ(context.device(), 0);
          EXPECT_EQ(context.cuda_stream(), nullptr);
          return context.run_on_host([to = *numbers.access()] {
            std::for_each(to, to + 1000, [](auto& x) { x = 3 * x + 1; });
          });
        },
        {numbers}, {numbers}));
  std::int64_t want = 1;
  for (int i = 0; i < 10; ++i)
    want = 3 * want + 1;
  EXPECT_EQ(must(d.download(numbers)), std::vector<std::int64_t>(1000, want));
  for (auto& x : all)
    EXPECT_TRUE(is_ok(answer_of(x)));
}

// INV-3
TEST(Device, AnswersALaunchWhenItIsDone) {
  test_system system;
  auto d = system.open();
  gate held;
  auto done = held.hold_stream(d);
  ASSERT_TRUE(held.wait_reached());
  EXPECT_FALSE(done.ready());
  held.open();
  EXPECT_TRUE(is_ok(answer_of(done)));
}

TEST(Device, LaunchesWhatIsRegistered) {
  TROUPE_IN_PROCESS_ONLY("the launch tells this process what it gets");
  test_system system;
  auto d = system.open();
  const auto actor = must(d.actor());
  struct seen {
    std::vector<any_gpu_ref> reads;
    std::vector<any_gpu_ref> writes;
    std::vector<std::byte> arguments;
  };
  auto got = std::make_shared<seen>();
  ASSERT_TRUE(is_ok(register_launch("Device.LaunchesWhatIsRegistered",
                                    [got](launch_context&, std::span<const any_gpu_ref> reads,
                                          std::span<const any_gpu_ref> writes,
                                          std::span<const std::byte> arguments) {
                                      *got = {{reads.begin(), reads.end()},
                                              {writes.begin(), writes.end()},
                                              {arguments.begin(), arguments.end()}};
                                      return caf::error{};
                                    })));
  EXPECT_TRUE(find_launch("Device.LaunchesWhatIsRegistered"));
  EXPECT_FALSE(find_launch("Device.LaunchesWhatIsNotThere"));
  EXPECT_TRUE(
      has_code(register_launch("Device.LaunchesWhatIsRegistered",
                               [](launch_context&, auto, auto, auto) { return caf::error{}; }),
               errc::invalid_argument));
  auto a = allocate_on(d, dtype::int8, 5, true);
  auto b = allocate_on(d, dtype::int8, 5, true);
  auto c = must(allocate_on(d, dtype::int8, 5, true).slice(1, 3));
  EXPECT_TRUE(is_ok(
      ask<void>(system, actor, launch{"Device.LaunchesWhatIsRegistered", {7, 8, 9}, {b, a}, {c}})));
  EXPECT_EQ(got->reads, (std::vector{b, a}));
  EXPECT_EQ(got->writes, std::vector{c});
  EXPECT_EQ(got->arguments, (std::vector{std::byte{7}, std::byte{8}, std::byte{9}}));
  *got = {};
}

TEST(Device, LaunchesACallableByMessage) {
  TROUPE_IN_PROCESS_ONLY("callables");
  test_system system;
  auto d = system.open();
  std::atomic<int> calls = 0;
  launch_callable what;
  what.function = [&](launch_context&) {
    ++calls;
    return caf::error{};
  };
  EXPECT_TRUE(is_ok(ask<void>(system, must(d.actor()), what)));
  EXPECT_EQ(calls, 1);
}

// -- memory and streams of the user

TEST(Device, AdoptsMemory) {
  TROUPE_IN_PROCESS_ONLY("memory of the user");
  TROUPE_HOST_ONLY("adopts host memory");
  std::vector<float> mine(1000, 2);
  std::atomic<int> deleted = 0;
  test_system system;
  auto d = system.open();
  {
    auto ref = must(d.adopt(mine.data(), mine.size(), [&](void* x) {
      EXPECT_EQ(x, mine.data());
      ++deleted;
    }));
    EXPECT_EQ(must(ref.access()), mine.data());
    auto ours = must(d.allocate<float>(1000));
    EXPECT_TRUE(is_ok(answer_of(d.copy(ours, ref))));
    EXPECT_EQ(must(d.download(ours)), mine);
    EXPECT_TRUE(is_ok(answer_of(d.fill(ref, 3))));
    EXPECT_EQ(mine, std::vector<float>(1000, 3));
    EXPECT_EQ(deleted, 0);
  }
  EXPECT_TRUE(is_ok(answer_of(d.stats()))); // the lane has processed the release
  EXPECT_TRUE(is_ok(answer_of(d.stats())));
  EXPECT_EQ(deleted, 1);
}

// INV-4: memory lives until the operations that use it are over, even without any handle.
TEST(Device, DeletesAdoptedMemoryAfterTheLastUse) {
  TROUPE_IN_PROCESS_ONLY("memory of the user");
  TROUPE_HOST_ONLY("adopts host memory");
  std::vector<float> mine(1000);
  std::atomic<bool> deleted = false;
  flag used;
  test_system system;
  auto d = system.open();
  gate held;
  {
    auto ref = must(d.adopt(mine.data(), mine.size(), [&](void*) { deleted = true; }));
    const auto early = held.hold_stream(d, {}, {ref});
    ASSERT_TRUE(held.wait_reached());
    early.cancel();
    static_cast<void>(d.launch(
        [&](launch_context& context) {
          return context.run_on_host([&] {
            EXPECT_FALSE(deleted);
            used.set();
          });
        },
        {}, {ref}));
  }
  EXPECT_TRUE(is_ok(answer_of(d.stats())));
  EXPECT_FALSE(deleted);
  held.open();
  EXPECT_TRUE(used.wait());
  answer_of(d.launch([](launch_context&) { return caf::error{}; }, {}, {}));
  EXPECT_TRUE(is_ok(answer_of(d.stats())));
  EXPECT_TRUE(is_ok(answer_of(d.stats())));
  EXPECT_TRUE(deleted);
}

TEST(Device, AdoptsNothingBad) {
  TROUPE_IN_PROCESS_ONLY("memory of the user");
  test_system system;
  auto d = system.open();
  float x = 0;
  EXPECT_TRUE(
      has_code(d.adopt(static_cast<float*>(nullptr), 1, [](void*) {}), errc::invalid_argument));
  EXPECT_TRUE(has_code(d.adopt(&x, 1, {}), errc::invalid_argument));
  d.shutdown();
  EXPECT_TRUE(has_code(d.adopt(&x, 1, [](void*) {}), errc::unavailable));
}

TEST(Device, HasNoUserStreamsOnTheHost) {
  TROUPE_HOST_ONLY("the host backend has no streams for users");
  test_system system;
  auto d = system.open();
  auto ref = allocate_on(d, dtype::float32, 10, true);
  EXPECT_TRUE(has_code(answer_of(d.acquire(ref, access_mode::read, nullptr)), errc::not_supported));
  EXPECT_TRUE(has_code(answer_of(d.release(ref, access_mode::read, nullptr)), errc::not_supported));
  EXPECT_TRUE(works(d));
}

// -- status and notifications

TEST(Device, TellsTrueStats) {
  test_system system{{.bytes_per_device = 64 * mib}};
  auto d = system.open(system.ordinals().back());
  const auto empty = must(answer_of(d.stats()));
  EXPECT_EQ(empty.device, d.ordinal());
  EXPECT_EQ(empty.phase, device_phase::ready);
  EXPECT_EQ(empty.generation, 1u);
  EXPECT_FALSE(empty.name.empty());
  EXPECT_EQ(empty.in_flight, 0u);
  EXPECT_EQ(empty.queued, 0u);
  EXPECT_LE(empty.free_bytes, empty.total_bytes);
  if (!on_cuda()) {
    EXPECT_EQ(empty.total_bytes, 64 * mib);
    EXPECT_EQ(empty.free_bytes, 64 * mib);
    EXPECT_TRUE(empty.pci_id.empty());
    auto ref = allocate_on(d, dtype::uint8, 8 * mib);
    EXPECT_LE(must(answer_of(d.stats())).free_bytes, 56 * mib);
  } else {
    EXPECT_FALSE(empty.pci_id.empty());
    EXPECT_GT(empty.capability_major, 0);
  }
  const auto told = must(ask<device_stats>(system, must(d.actor()), stats{}));
  EXPECT_EQ(told.name, empty.name);
  EXPECT_EQ(told.total_bytes, empty.total_bytes);
}

TEST(Device, CountsWhatIsInFlightAndQueued) {
  test_system system;
  auto d = system.open();
  auto ref = allocate_on(d, dtype::int32, 100);
  gate stream;
  gate lane;
  const scalar one = same_bytes(ref, 1);
  std::vector<pending<void>> all{stream.hold_stream(d)};
  for (int i = 0; i < 3; ++i)
    all.push_back(d.fill(ref, one));
  all.push_back(lane.hold_lane(d));
  ASSERT_TRUE(lane.wait_reached());
  auto counted = d.stats();
  for (int i = 0; i < 7; ++i)
    all.push_back(d.fill(ref, one));
  lane.open();
  const auto got = must(answer_of(counted));
  EXPECT_EQ(got.in_flight, 5u);
  EXPECT_EQ(got.queued, 7u);
  stream.open();
  for (auto& x : all)
    EXPECT_TRUE(is_ok(answer_of(x)));
  const auto after = must(answer_of(d.stats()));
  EXPECT_EQ(after.in_flight, 0u);
  EXPECT_EQ(after.queued, 0u);
}

/// Checks the order of notifications: generations grow, each begins once, and phases are in order.
void expect_orderly(const std::vector<device_changed>& seen, int device) {
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].device, device);
    EXPECT_GE(seen[i].generation, last);
    if (seen[i].phase == device_phase::ready) {
      EXPECT_GT(seen[i].generation, last);
      EXPECT_TRUE(is_ok(seen[i].reason));
      last = seen[i].generation;
    } else if (seen[i].phase == device_phase::resetting) {
      EXPECT_TRUE(has_code(seen[i].reason, errc::device_reset));
    }
  }
}

// INV-8
TEST(Device, WatchersSeeEachGenerationOnceInOrder) {
  test_system system;
  auto d = system.open();
  const auto actor = must(d.actor());
  device_feed early{system, actor};
  EXPECT_EQ(early.until(device_phase::ready).generation, 1u);
  for (std::uint64_t i = 2; i <= 5; ++i)
    EXPECT_EQ(must(answer_of(d.reset())), i);
  device_feed late{system, actor};
  EXPECT_EQ(late.until(device_phase::ready, 5).generation, 5u);
  EXPECT_EQ(must(ask<std::uint64_t>(system, actor, reset{})), 6u);
  early.until(device_phase::ready, 6);
  late.until(device_phase::ready, 6);
  d.shutdown();
  early.until(device_phase::shut_down);
  late.until(device_phase::shut_down);
  EXPECT_EQ(early.seen().size(), 12u);
  expect_orderly(early.seen(), 0);
  expect_orderly(late.seen(), 0);
}

// The watch request is the first message to a new actor.
TEST(Device, TellsANewWatcherThePresent) {
  for (int i = 0; i < 20; ++i) {
    test_system system{{.devices = 1}};
    device_feed feed{system, system.device_actor()};
    const auto first = feed.until([](const device_changed&) { return true; });
    EXPECT_EQ(first.device, 0);
    feed.until(device_phase::ready);
    expect_orderly(feed.seen(), 0);
  }
}

// -- generations

TEST(DeviceLife, ResetBeginsANewGeneration) {
  test_system system{{.bytes_per_device = 64 * mib}};
  auto d = system.open();
  auto other = system.open(system.ordinals().back());
  auto old = must(d.allocate<std::int32_t>(8 << 20));
  EXPECT_TRUE(is_ok(answer_of(d.fill(old, 7))));
  const auto token = old.any().token();
  const auto before = must(answer_of(d.stats()));
  EXPECT_EQ(must(answer_of(d.reset())), 2u);
  EXPECT_EQ(d.generation(), 2u);
  EXPECT_EQ(d.phase(), device_phase::ready);
  // Old handles are stale for every use.
  EXPECT_TRUE(old.stale());
  EXPECT_EQ(old.generation(), 1u);
  EXPECT_TRUE(has_code(old.access(), errc::stale_ref));
  EXPECT_TRUE(must(old.slice(0, 1)).stale());
  EXPECT_TRUE(has_code(any_gpu_ref::resolve(token), errc::stale_ref));
  EXPECT_TRUE(has_code(answer_of(d.fill(old, 1)), errc::stale_ref));
  // Their memory is free, although the handle lives.
  const auto after = must(answer_of(d.stats()));
  EXPECT_EQ(after.generation, 2u);
  EXPECT_GE(after.free_bytes, before.free_bytes + (32 * mib) * (on_cuda() ? 0 : 1));
  auto fresh = must(d.allocate<std::int32_t>(8 << 20));
  EXPECT_EQ(fresh.generation(), 2u);
  EXPECT_TRUE(works(d));
  if (other.ordinal() != d.ordinal()) {
    EXPECT_EQ(other.generation(), 1u);
    EXPECT_TRUE(works(other));
  }
}

// INV-1, INV-8: issued and queued requests fail. Requests that need no memory go on.
TEST(DeviceLife, ResetAnswersWhatWasThere) {
  test_system system;
  auto d = system.open();
  const auto actor = must(d.actor());
  auto ref = allocate_on(d, dtype::int32, 1000, true);
  gate stream;
  gate lane;
  auto issued = stream.hold_stream(d, {}, {ref});
  auto behind = d.fill(ref, same_bytes(ref));
  auto without_memory = lane.hold_lane(d);
  ASSERT_TRUE(stream.wait_reached());
  ASSERT_TRUE(lane.wait_reached());
  auto queued = d.fill(ref, same_bytes(ref));
  auto waits = d.allocate(dtype::int32, 1000, true);
  std::vector<std::byte> bytes(ref.size_bytes());
  auto reading = d.download(ref, std::span{bytes});
  caf::scoped_actor self{system.get()};
  auto message = detail::request(self, actor, patience, fill{ref, same_bytes(ref)});
  ASSERT_TRUE(is_ok(ask<void>(system, actor, watch_generation{}))); // so the fill has been admitted
  auto reset = d.reset();
  for (auto& x : {issued, behind, queued, reading})
    EXPECT_TRUE(has_code(answer_of(x), errc::device_reset));
  std::move(message).receive(
      [] { ADD_FAILURE() << "it cannot have run"; },
      [](const caf::error& why) { EXPECT_TRUE(has_code(why, errc::device_reset)); });
  EXPECT_FALSE(reset.ready());
  EXPECT_EQ(d.phase(), device_phase::resetting);
  EXPECT_TRUE(has_code(answer_of(d.reset()), errc::unavailable));
  auto refused = answer_of(d.fill(ref, same_bytes(ref)));
  EXPECT_TRUE(has_code(refused, errc::stale_ref));
  lane.open();
  stream.open();
  EXPECT_EQ(must(answer_of(reset)), 2u);
  EXPECT_TRUE(is_ok(answer_of(without_memory)));
  auto got = must(answer_of(waits));
  EXPECT_FALSE(got.stale());
  EXPECT_TRUE(holds(d, got, std::vector<std::byte>(got.size_bytes())));
}

TEST(DeviceLife, ResetInTheMiddleOfTransfers) {
  test_system system;
  auto d = system.open();
  for (std::uint64_t i = 0; i < 5; ++i) {
    const auto content = random_bytes(12 * mib, i);
    std::vector<std::byte> got(content.size());
    auto ref = allocate_on(d, dtype::uint8, content.size());
    auto up = d.upload(ref, std::span<const std::byte>{content});
    auto down = d.download(ref, std::span{got});
    EXPECT_EQ(must(answer_of(d.reset())), i + 2);
    for (auto& x : {up, down}) {
      auto done = answer_of(x);
      EXPECT_TRUE(done || has_code(done, errc::device_reset));
    }
    EXPECT_TRUE(works(d));
  }
}

// A reset that cannot complete fails at its deadline, and completes later.
TEST(DeviceLife, ResetKeepsItsDeadline) {
  test_system system;
  auto d = system.open();
  const auto actor = must(d.actor());
  device_feed feed{system, actor};
  gate held;
  auto busy = held.hold_stream(d);
  ASSERT_TRUE(held.wait_reached());
  EXPECT_TRUE(has_code(answer_of(d.reset({.deadline = 30ms})), errc::deadline_exceeded));
  EXPECT_TRUE(
      has_code(ask<std::uint64_t>(system, actor, reset{{.deadline = 30ms}}), errc::unavailable));
  held.open();
  feed.until(device_phase::ready, 2);
  EXPECT_TRUE(is_ok(answer_of(busy)));
  EXPECT_TRUE(works(d));
}

TEST(DeviceLife, CancelledResetIsAnswered) {
  test_system system;
  auto d = system.open();
  device_feed feed{system, must(d.actor())};
  gate held;
  auto busy = held.hold_stream(d);
  ASSERT_TRUE(held.wait_reached());
  auto reset = d.reset();
  reset.cancel();
  EXPECT_TRUE(has_code(answer_of(reset), errc::cancelled));
  held.open();
  feed.until(device_phase::ready, 2);
  EXPECT_TRUE(works(d));
}

TEST(DeviceLife, ResetThatFailsEndsTheDevice) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  auto d = system.open();
  const auto actor = must(d.actor());
  device_feed feed{system, actor};
  feed.until(device_phase::ready);
  plan->add({fault::fail, verb::open_memory, 0, 1, forever});
  auto ref = allocate_on(d, dtype::int8, 10);
  auto failed = answer_of(d.reset());
  EXPECT_FALSE(failed);
  EXPECT_TRUE(feed.until(device_phase::failed).reason);
  EXPECT_EQ(d.phase(), device_phase::failed);
  EXPECT_TRUE(ref.stale());
  EXPECT_TRUE(has_code(answer_of(d.stats()), errc::unavailable));
  EXPECT_TRUE(has_code(ask<device_stats>(system, actor, stats{}), errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(d.reset()), errc::unavailable));
  EXPECT_TRUE(works(system.open(1)));
}

TEST(DeviceLife, ShutdownAnswersEverything) {
  test_system system;
  auto d = system.open();
  const auto actor = must(d.actor());
  auto ref = allocate_on(d, dtype::int32, 1000);
  gate stream;
  gate lane;
  auto issued = stream.hold_stream(d, {}, {ref});
  auto holding = lane.hold_lane(d);
  ASSERT_TRUE(stream.wait_reached());
  ASSERT_TRUE(lane.wait_reached());
  auto queued = d.fill(ref, same_bytes(ref));
  auto waiting = d.allocate(dtype::int8, 1);
  EXPECT_TRUE(is_ok(ask<void>(system, actor, shutdown{})));
  for (auto& x : {issued, holding, queued})
    EXPECT_TRUE(has_code(answer_of(x), errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(waiting), errc::unavailable));
  EXPECT_EQ(d.phase(), device_phase::shut_down);
  EXPECT_TRUE(ref.stale());
  EXPECT_TRUE(has_code(answer_of(d.stats()), errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(d.reset()), errc::unavailable));
  EXPECT_TRUE(has_code(ask<device_stats>(system, actor, stats{}), errc::unavailable));
  EXPECT_TRUE(has_code(device::open(system, 0), errc::unavailable));
  d.shutdown(); // a second call does nothing
  lane.open();
  stream.open();
}

TEST(DeviceLife, ComesUpAfterFailedAttempts) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan =
      std::make_shared<fault_plan>(0, std::vector<fault_rule>{{fault::fail, verb::bind, 0, 1, 3}});
  system_options options{.faults = plan};
  options.lanes.open_backoff = 20ms;
  test_system system{options};
  const auto actor = system.device_actor();
  device_feed feed{system, actor};
  // Requests wait for the device.
  caf::scoped_actor self{system.get()};
  auto memory = detail::request(self, actor, patience, allocate{10, dtype::int32, true});
  auto counted = detail::request(self, actor, patience, stats{});
  auto d = system.open();
  EXPECT_EQ(d.generation(), 1u);
  std::move(memory).receive(
      [&](const any_gpu_ref& x) { EXPECT_TRUE(holds(d, x, std::vector<std::byte>(40))); },
      [](const caf::error& why) { ADD_FAILURE() << describe(why); });
  std::move(counted).receive([&](const device_stats& x) { EXPECT_EQ(x.generation, 1u); },
                             [](const caf::error& why) { ADD_FAILURE() << describe(why); });
  feed.until(device_phase::ready);
  // The notifications of failed attempts contain the reason.
  int reported = 0;
  for (auto& x : feed.seen())
    if (x.phase == device_phase::opening && x.reason) {
      EXPECT_TRUE(has_code(x.reason, errc::device_failed));
      ++reported;
    }
  EXPECT_LE(reported, 3);
  EXPECT_EQ(plan->injected(), 3u);
  EXPECT_TRUE(works(d));
}

TEST(DeviceLife, RequestsWaitForADeviceUpToTheirDeadlines) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan =
      std::make_shared<fault_plan>(0, std::vector<fault_rule>{{fault::block, verb::bind, 0}});
  system_options options{.faults = plan};
  options.lanes.queue_limit = 4;
  test_system system{options};
  const auto actor = system.device_actor();
  EXPECT_TRUE(has_code(
      ask<any_gpu_ref>(system, actor, allocate{10, dtype::int8, false, {.deadline = 20ms}}),
      errc::deadline_exceeded));
  EXPECT_TRUE(has_code(device::open(system, 0, 20ms), errc::deadline_exceeded));
  EXPECT_TRUE(has_code(ask<std::uint64_t>(system, actor, reset{}), errc::unavailable));
  // The queue bound applies here too, and counts requests that are already completed.
  caf::scoped_actor self{system.get()};
  auto ask_again = [&] { return detail::request(self, actor, patience, stats{}); };
  auto first = ask_again();
  auto second = ask_again();
  auto third = ask_again();
  EXPECT_TRUE(has_code(ask<device_stats>(system, actor, stats{{.room = room_policy::refuse}}),
                       errc::overloaded));
  plan->release();
  auto d = system.open();
  for (auto* x : {&first, &second, &third})
    std::move(*x).receive([](const device_stats& got) { EXPECT_EQ(got.generation, 1u); },
                          [](const caf::error& why) { ADD_FAILURE() << describe(why); });
  EXPECT_TRUE(works(d));
}

TEST(DeviceLife, NeverComesUp) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>(
      0, std::vector<fault_rule>{{fault::fail, verb::bind, 0, 1, forever}});
  system_options options{.faults = plan};
  options.lanes.open_backoff = 1ms;
  options.lanes.open_attempts = 4;
  test_system system{options};
  const auto actor = system.device_actor();
  device_feed feed{system, actor};
  auto answer = ask<any_gpu_ref>(system, actor, allocate{10, dtype::int8});
  EXPECT_TRUE(has_code(answer, errc::device_failed) || has_code(answer, errc::unavailable))
      << describe(error_of(answer));
  EXPECT_TRUE(has_code(feed.until(device_phase::failed).reason, errc::device_failed));
  EXPECT_TRUE(has_code(device::open(system, 0), errc::device_failed));
  EXPECT_EQ(plan->injected(), 4u);
  EXPECT_TRUE(has_code(ask<device_stats>(system, actor, stats{}), errc::unavailable));
  EXPECT_TRUE(has_code(ask<std::uint64_t>(system, actor, reset{}), errc::unavailable));
  EXPECT_TRUE(works(system.open(1)));
}

TEST(DeviceLife, SystemEndsWhileADeviceIsComingUp) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>(
      0, std::vector<fault_rule>{{fault::fail, verb::bind, 0, 1, forever}});
  system_options options{.faults = plan};
  options.lanes.open_backoff = 1h;
  stopwatch watch;
  {
    test_system system{options};
    const auto actor = system.device_actor();
    ASSERT_TRUE(plan->wait_injected(fault::fail, 1, patience));
    EXPECT_TRUE(has_code(device::open(system, 0, 10ms), errc::deadline_exceeded));
  }
  EXPECT_LT(watch.elapsed(), at_once);
}

// -- handles

// INV-4
TEST(DeviceHandles, AreDroppedOnAnyThread) {
  test_system system;
  auto d = system.open();
  const auto before = must(answer_of(d.stats())).free_bytes;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&d, t] {
      for (int i = 0; i < 50; ++i) {
        auto ref = allocate_on(d, dtype::int32, 1000);
        auto copy = ref;
        static_cast<void>(d.fill(ref, same_bytes(ref, static_cast<std::uint8_t>(t))));
        ref = {};
        std::thread{[copy = std::move(copy)]() mutable { copy = {}; }}.join();
      }
    });
  for (auto& x : threads)
    x.join();
  EXPECT_TRUE(works(d));
  if (!on_cuda()) { // the lane frees it between requests
    EXPECT_TRUE(eventually([&] { return must(answer_of(d.stats())).free_bytes == before; }));
  }
}

TEST(DeviceHandles, OutliveTheActorSystem) {
  TROUPE_IN_PROCESS_ONLY("memory of the user");
  any_gpu_ref ref;
  host_buffer pinned;
  std::optional<pending<void>> answer;
  gpu_token token;
  std::vector<float> mine(10);
  std::atomic<int> deleted = 0;
  any_gpu_ref adopted;
  {
    test_system system;
    auto d = system.open();
    ref = allocate_on(d, dtype::int32, 1000);
    token = ref.token();
    pinned = must(d.allocate_pinned(100 * kib));
    answer = d.fill(ref, same_bytes(ref));
    if (!on_cuda())
      adopted = must(d.adopt(mine.data(), mine.size(), [&](void*) { ++deleted; }));
  }
  EXPECT_TRUE(ref.stale());
  EXPECT_TRUE(has_code(ref.access(), errc::stale_ref));
  EXPECT_TRUE(has_code(any_gpu_ref::resolve(token), errc::stale_ref));
  EXPECT_TRUE(answer->ready());
  EXPECT_EQ(pinned.size_bytes(), 100 * kib);
  pinned.writable().back() = std::byte{1};
  {
    test_system system; // the handles that are left do not keep the device open
    EXPECT_TRUE(works(system.open()));
  }
  std::thread{[&] {
    ref = {};
    pinned = {};
    answer.reset();
    adopted = {};
  }}.join();
  EXPECT_EQ(deleted, on_cuda() ? 0 : 1);
}

TEST(DeviceHandles, AreTokensInMessages) {
  test_system system;
  auto d = system.open();
  auto ref = allocate_on(d, dtype::int32, 1000);
  const auto token = ref.token();
  EXPECT_EQ(must(any_gpu_ref::resolve(token)), ref);
  const auto part = must(ref.slice(100, 10));
  EXPECT_EQ(must(any_gpu_ref::resolve(part.token())), part);
  auto refused = [](gpu_token x) { return has_code(any_gpu_ref::resolve(x), errc::stale_ref); };
  auto forged = [&](auto change) {
    auto x = token;
    change(x);
    return refused(x);
  };
  EXPECT_TRUE(forged([](auto& x) { ++x.node; }));
  EXPECT_TRUE(forged([](auto& x) { x.device = 1; }));
  EXPECT_TRUE(forged([](auto& x) { x.device = -1; }));
  EXPECT_TRUE(forged([](auto& x) { x.buffer += 1000; }));
  EXPECT_TRUE(forged([](auto& x) { ++x.generation; }));
  EXPECT_TRUE(forged([](auto& x) { ++x.count; }));
  EXPECT_TRUE(forged([](auto& x) { x.count = ~std::uint64_t{0}; }));
  EXPECT_TRUE(forged([](auto& x) { x.offset = 4; }));
  EXPECT_TRUE(forged([](auto& x) { x.offset = ~std::uint64_t{3}; }));
  EXPECT_TRUE(forged([](auto& x) { x.offset = 1, x.count = 1; }));
  EXPECT_TRUE(forged([](auto& x) { x.type = dtype::int64; }));
  EXPECT_TRUE(forged([](auto& x) { x.type = static_cast<dtype>(12); }));
  EXPECT_TRUE(forged([](auto& x) { x.type = static_cast<dtype>(255); }));
  EXPECT_TRUE(refused({}));
  EXPECT_TRUE(resolve_or_stale({}).stale());
  ref = {};
  EXPECT_TRUE(part.token() == must(any_gpu_ref::resolve(part.token())).token());
}

// Within one process, a claimed handle behaves as any other.
TEST(DeviceHandles, AreOfferedAndClaimed) {
  test_system system;
  auto d = system.open();
  auto ref = allocate_on(d, dtype::int32, 1000);
  auto token = must(d.offer(ref, std::chrono::hours{1}));
  EXPECT_EQ(token, ref.token());
  EXPECT_EQ(must(answer_of(d.claim(token))), ref);
  must(d.offer(ref, std::chrono::hours{1}));
  ref = {};
  auto again = must(answer_of(d.claim(token, access_mode::write)));
  EXPECT_TRUE(has_code(answer_of(d.upload(again, host_buffer{1})), errc::shape_mismatch));
  EXPECT_TRUE(is_ok(answer_of(d.fill(again, same_bytes(again)))));
  again = {};
  EXPECT_TRUE(has_code(answer_of(d.claim(token)), errc::stale_ref)); // no offer is left
}

TEST(DeviceHandles, AreNotOfferedOrClaimedWrongly) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto d = system.open();
  auto other = system.open(1);
  auto ref = allocate_on(d, dtype::int32, 1000);
  EXPECT_TRUE(has_code(d.offer({}), errc::stale_ref));
  EXPECT_TRUE(has_code(d.offer(ref, 0ns), errc::invalid_argument));
  EXPECT_TRUE(has_code(other.offer(ref), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(other.claim(ref.token())), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(d.claim({})), errc::stale_ref));
  auto foreign = ref.token();
  ++foreign.node;
  EXPECT_TRUE(has_code(answer_of(d.claim(foreign)), errc::stale_ref));
  must(answer_of(d.reset()));
  EXPECT_TRUE(has_code(d.offer(ref), errc::stale_ref));
  EXPECT_TRUE(has_code(answer_of(d.claim(ref.token())), errc::stale_ref));
}

// -- deadlines and cancellation

/// A device whose lane or stream is blocked.
class DeviceOrder : public ::testing::Test {
protected:
  void TearDown() override {
    stream.open();
    lane.open();
  }

  /// Blocks the lane: from now on it issues nothing.
  void hold_lane() {
    holding.push_back(lane.hold_lane(d));
    ASSERT_TRUE(lane.wait_reached());
  }

  /// Blocks a stream: from now on work on `ref` waits.
  pending<void> hold_stream(const request_options& options = {}) {
    auto result = stream.hold_stream(d, {ref}, {ref}, options);
    EXPECT_TRUE(stream.wait_reached());
    return result;
  }

  pending<void> set(const any_gpu_ref& to, int value, const request_options& options = {}) {
    return d.fill(to, same_bytes(to, static_cast<std::uint8_t>(value)), options);
  }

  ::testing::AssertionResult is(const any_gpu_ref& x, int value) {
    return holds(d, x, std::vector<std::byte>(x.size_bytes(), static_cast<std::byte>(value)));
  }

  test_system system;
  device d = system.open();
  any_gpu_ref ref = allocate_on(d, dtype::int32, 1000);
  gate stream;
  gate lane;
  std::vector<pending<void>> holding;
};

TEST_F(DeviceOrder, DeadlineOfWhatIsQueued) {
  EXPECT_TRUE(is_ok(answer_of(set(ref, 1))));
  hold_lane();
  auto late = set(ref, 2, {.deadline = 30ms});
  EXPECT_TRUE(has_code(answer_of(late), errc::deadline_exceeded));
  EXPECT_TRUE(has_code(
      ask<void>(system, system.device_actor(), fill{ref, same_bytes(ref, 3), {.deadline = 30ms}}),
      errc::deadline_exceeded));
  EXPECT_TRUE(has_code(ref.access(), errc::skipped));
  lane.open();
  EXPECT_TRUE(
      has_code(answer_of(d.copy(must(ref.slice(0, 1)), must(ref.slice(1, 1)))), errc::skipped));
  accept_bytes(d, ref);
  EXPECT_TRUE(is(ref, 1)); // the fill never ran
}

TEST_F(DeviceOrder, CancelOfWhatIsQueued) {
  EXPECT_TRUE(is_ok(answer_of(set(ref, 1))));
  hold_lane();
  auto first = set(ref, 2);
  auto second = set(ref, 3);
  second.cancel();
  const auto taken_back = answer_of(second);
  ASSERT_TRUE(has_code(taken_back, errc::cancelled));
  EXPECT_EQ(failure_of(error_of(taken_back))->device, d.ordinal()); // INV-10
  EXPECT_EQ(failure_of(error_of(taken_back))->generation, 1u);
  EXPECT_FALSE(first.ready());
  lane.open();
  EXPECT_TRUE(is_ok(answer_of(first)));
  EXPECT_TRUE(is(ref, 2));
  first.cancel(); // too late: no effect
  EXPECT_TRUE(is_ok(answer_of(first)));
}

// A write that is cancelled in time has no effect, also not on requests behind it.
TEST_F(DeviceOrder, CancelFailsNothingBehindIt) {
  EXPECT_TRUE(is_ok(answer_of(set(ref, 1))));
  auto other = allocate_on(d, dtype::int32, 1000, true);
  hold_lane();
  auto write = set(ref, 2);
  auto read = d.copy(other, ref);
  write.cancel();
  EXPECT_TRUE(has_code(answer_of(write), errc::cancelled));
  EXPECT_FALSE(read.ready());
  lane.open();
  EXPECT_TRUE(is_ok(answer_of(read)));
  EXPECT_TRUE(is(ref, 1));
  EXPECT_TRUE(is(other, 1));
}

// Requests made after the cancellation see the previous content.
TEST_F(DeviceOrder, CancelLeavesTheBufferAsItWas) {
  EXPECT_TRUE(is_ok(answer_of(set(ref, 1))));
  auto other = allocate_on(d, dtype::int32, 1000, true);
  hold_lane();
  auto write = set(ref, 2);
  write.cancel();
  auto read = d.copy(other, ref);
  auto late = set(ref, 3, {.deadline = 1ms});
  EXPECT_TRUE(has_code(answer_of(late), errc::deadline_exceeded));
  EXPECT_TRUE(
      has_code(answer_of(d.copy(must(other.slice(1, 1)), must(ref.slice(0, 1)))), errc::skipped));
  auto accepted = d.accept(ref);
  auto accepted_too = d.accept(other);
  auto read_again = d.copy(must(other.slice(0, 1)), must(ref.slice(0, 1)));
  lane.open();
  EXPECT_TRUE(is_ok(answer_of(read)));
  EXPECT_TRUE(is_ok(answer_of(accepted)));
  EXPECT_TRUE(is_ok(answer_of(accepted_too)));
  EXPECT_TRUE(is_ok(answer_of(read_again)));
  EXPECT_TRUE(is(ref, 1));
  EXPECT_TRUE(is(other, 1));
}

// INV-9: the cancelled request was between two others, which keep their order.
TEST_F(DeviceOrder, CancelKeepsTheOrderOfTheOthers) {
  TROUPE_HOST_ONLY("the launch writes host memory");
  EXPECT_TRUE(is_ok(answer_of(set(ref, 1))));
  const std::vector<std::byte> content(ref.size_bytes(), std::byte{2});
  auto running = hold_stream();
  auto behind = launch_write(d, ref, content);
  hold_lane();
  auto cancelled = d.upload(ref, host_buffer{ref.size_bytes()});
  cancelled.cancel();
  EXPECT_TRUE(has_code(answer_of(cancelled), errc::cancelled));
  lane.open();
  EXPECT_TRUE(is_ok(answer_of(d.stats()))); // the lane has passed the upload
  std::vector<std::byte> got(ref.size_bytes());
  auto read = d.download(ref, std::span{got});
  EXPECT_FALSE(must(read.wait_for(50ms)));
  stream.open();
  EXPECT_TRUE(is_ok(answer_of(read)));
  EXPECT_TRUE(check_equal(dtype::uint8, content, got));
  EXPECT_TRUE(is_ok(answer_of(behind)));
  EXPECT_TRUE(is_ok(answer_of(running)));
}

// The same for a read that is cancelled between a read and a write.
TEST_F(DeviceOrder, CancelOfAReadKeepsTheOrderOfTheOthers) {
  TROUPE_HOST_ONLY("the launch reads host memory");
  EXPECT_TRUE(is_ok(answer_of(set(ref, 1))));
  const auto seen = allocate_on(d, dtype::int32, ref.count());
  auto running = stream.hold_stream(d);
  ASSERT_TRUE(stream.wait_reached());
  auto reading = launch_copy(d, seen, ref);
  hold_lane();
  auto cancelled = launch_nothing(d, {ref});
  cancelled.cancel();
  lane.open();
  EXPECT_TRUE(is_ok(answer_of(d.stats())));
  auto write = d.upload(ref, host_buffer{ref.size_bytes()});
  EXPECT_FALSE(must(write.wait_for(50ms)));
  stream.open();
  EXPECT_TRUE(is_ok(answer_of(write)));
  EXPECT_TRUE(is_ok(answer_of(reading)));
  EXPECT_TRUE(is(seen, 1));
}

// INV-1, INV-4
TEST_F(DeviceOrder, DeadlineOfWhatRuns) {
  auto running = hold_stream({.deadline = 500ms}); // it is running by then
  EXPECT_TRUE(has_code(answer_of(running), errc::deadline_exceeded));
  // Its buffers stay busy: later requests wait until it is over.
  auto next = set(ref, 5);
  EXPECT_FALSE(must(next.wait_for(20ms)));
  stream.open();
  EXPECT_TRUE(is_ok(answer_of(next)));
  EXPECT_TRUE(is(ref, 5));
}

TEST_F(DeviceOrder, CancelOfWhatRuns) {
  EXPECT_TRUE(is_ok(answer_of(set(ref, 4))));
  auto running = hold_stream();
  running.cancel();
  EXPECT_TRUE(has_code(answer_of(running), errc::cancelled));
  std::vector<std::byte> got(ref.size_bytes());
  auto read = d.download(ref, std::span{got});
  EXPECT_FALSE(must(read.wait_for(20ms)));
  stream.open();
  EXPECT_TRUE(is_ok(answer_of(read))); // it did not fail: the content is valid
  EXPECT_TRUE(is(ref, 4));
}

// After the result, the library does not access the requester's memory.
TEST_F(DeviceOrder, CancelledTransfersLeaveTheRequestersMemory) {
  const std::size_t size = 9 * mib;
  auto large = allocate_on(d, dtype::uint8, size);
  for (int i = 0; i < 4; ++i) {
    auto content = std::make_unique<std::vector<std::byte>>(random_bytes(size, 1));
    auto target = std::make_unique<std::vector<std::byte>>(size);
    auto up = d.upload(large, std::span<const std::byte>{*content});
    if (i % 2 == 0) {
      EXPECT_TRUE(is_ok(answer_of(up)));
    }
    auto down = d.download(large, std::span{*target});
    up.cancel();
    down.cancel();
    static_cast<void>(answer_of(up));
    static_cast<void>(answer_of(down));
    content.reset(); // a sanitizer reports later accesses
    target.reset();
    put(d, large, random_bytes(size, 2)); // in any state of the cancelled upload
    EXPECT_TRUE(holds(d, large, random_bytes(size, 2)));
  }
}

// -- content

TEST(DeviceContent, IsIndeterminateAfterAFailedWrite) {
  test_system system;
  auto d = system.open();
  auto ref = allocate_on(d, dtype::uint8, 1000, true);
  auto other = allocate_on(d, dtype::uint8, 1000, true);
  auto fails = [&](std::vector<any_gpu_ref> writes) {
    EXPECT_TRUE(has_code(answer_of(launch_failure(d, "on purpose", writes)), errc::launch_failed));
  };
  auto over = [&] { // waits for all earlier launches
    answer_of(launch_nothing(d));
    answer_of(d.stats());
  };
  fails({must(ref.slice(200, 300))});
  for (int i = 0; i < 2; ++i) { // before and after the failed work is over
    auto refused = answer_of(d.copy(other, ref));
    ASSERT_TRUE(has_code(refused, errc::indeterminate));
    EXPECT_NE(describe(error_of(refused)).find("on purpose"), std::string::npos);
    EXPECT_TRUE(has_code(get(d, must(ref.slice(499, 1))), errc::indeterminate));
    EXPECT_TRUE(holds(d, must(ref.slice(0, 200)), std::vector<std::byte>(200)));
    EXPECT_TRUE(holds(d, must(ref.slice(500, 500)), std::vector<std::byte>(500)));
    over();
  }
  EXPECT_TRUE(has_code(ref.access(), errc::indeterminate));
  // After a partial overwrite the rest stays indeterminate.
  const auto content = random_bytes(1000, 1);
  put(d, must(ref.slice(100, 300)), std::span{content}.subspan(100, 300));
  EXPECT_TRUE(holds(d, must(ref.slice(0, 400)).slice(100, 300).value(),
                    std::span{content}.subspan(100, 300)));
  EXPECT_TRUE(has_code(get(d, ref), errc::indeterminate));
  EXPECT_TRUE(has_code(must(ref.slice(400, 1)).access(), errc::indeterminate));
  put(d, ref, content);
  EXPECT_TRUE(holds(d, ref, content));
  EXPECT_TRUE(is_ok(ref.access()));
  // The first cause is kept.
  fails({ref});
  over();
  answer_of(launch_failure(d, "the second", {ref}));
  over();
  EXPECT_NE(describe(error_of(get(d, ref))).find("on purpose"), std::string::npos);
}

TEST(DeviceContent, AFailureIsTheAnswerOfAllThatWasBehindIt) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  auto d = system.open();
  auto a = allocate_on(d, dtype::int32, 1000, true);
  auto b = allocate_on(d, dtype::int32, 1000, true);
  auto c = allocate_on(d, dtype::int32, 1000, true);
  gate held;
  auto blocked = held.hold_lane(d);
  ASSERT_TRUE(held.wait_reached());
  plan->add({fault::fail, verb::fill, 0});
  auto broken = d.fill(a, same_bytes(a));
  auto reads = d.copy(b, a);
  auto reads_that = d.copy(c, b);
  auto apart = d.fill(must(c.slice(0, 1)), same_bytes(must(c.slice(0, 1)), 1));
  held.open();
  for (auto& x : {broken, reads, reads_that})
    EXPECT_TRUE(has_code(answer_of(x), errc::cuda_error));
  EXPECT_TRUE(is_ok(answer_of(apart)));
  EXPECT_TRUE(has_code(get(d, a), errc::indeterminate));
  EXPECT_TRUE(is_ok(answer_of(d.fill(a, same_bytes(a)))));
  EXPECT_TRUE(is_ok(get(d, a)));
}

class DeviceFaults : public ::testing::TestWithParam<verb> {};

INSTANTIATE_TEST_SUITE_P(Calls, DeviceFaults,
                         ::testing::Values(verb::allocate, verb::fill, verb::copy,
                                           verb::launch_host, verb::allocate_pinned, verb::wait),
                         [](const auto& x) { return std::string{to_string(x.param)}; });

// A failed call is the error of the request that made it, and of no other.
TEST_P(DeviceFaults, AreTheAnswerOfOneRequest) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  auto d = system.open();
  plan->add({fault::fail, GetParam(), 0});
  // Some of the requests make this call. The one that fails reports it.
  int failures = 0;
  auto note = [&](const caf::error& why) {
    if (why) {
      EXPECT_TRUE(has_code(why, errc::cuda_error) || has_code(why, errc::launch_failed) ||
                  has_code(why, errc::indeterminate))
          << describe(why);
      ++failures;
    }
  };
  auto ref = answer_of(d.allocate(dtype::uint8, 100 * kib, true));
  if (!ref) {
    note(ref.error());
    ref = answer_of(d.allocate(dtype::uint8, 100 * kib, true));
  }
  ASSERT_TRUE(is_ok(ref));
  const auto content = random_bytes(100 * kib, 1);
  note(error_of(answer_of(d.upload(*ref, std::span<const std::byte>{content}))));
  note(error_of(get(d, *ref)));
  note(error_of(answer_of(d.fill(*ref, std::uint8_t{1}))));
  note(error_of(answer_of(launch_nothing(d, {}, {*ref}))));
  note(error_of(d.allocate_pinned(10)));
  EXPECT_EQ(d.phase(), device_phase::ready);
  if (plan->injected() == 1) {
    EXPECT_GE(failures, 1);
  }
  EXPECT_TRUE(works(d));
}

/// Requests a reset of a device and waits for the result.
class resetting_actor : public caf::event_based_actor {
public:
  resetting_actor(caf::actor_config& cfg, caf::actor device)
      : caf::event_based_actor(cfg), device_(std::move(device)) {}

  caf::behavior make_behavior() override {
    detail::request(this, device_, caf::infinite, troupe::reset{{.deadline = 20s}})
        .then([](std::uint64_t) {}, [this](const caf::error&) { quit(); });
    return {[](int) {}};
  }

private:
  caf::actor device_;
};

TEST(DeviceLife, APendingResetEndsWithTheSystem) {
  stopwatch watch;
  {
    gate held;
    test_system system{{.devices = 1}};
    auto device = system.open();
    auto ref = must(device.allocate<float>(4));
    auto busy = held.hold_stream(device, {}, {ref.any()});
    ASSERT_TRUE(held.wait_reached());
    device_feed feed{system, must(device.actor())};
    system.get().spawn<resetting_actor>(must(device.actor()));
    feed.until(device_phase::resetting);
    caf::anon_send_exit(system.root(), caf::exit_reason::user_shutdown);
    held.open();
  }
  EXPECT_LT(watch.elapsed(), at_once);
}

} // namespace
} // namespace troupe::testing
