#include "support/backend_fixture.hpp"
#include "support/reference.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <future>
#include <iterator>
#include <latch>
#include <memory>
#include <random>
#include <semaphore>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace troupe {

namespace {

using testing::build_all;
using testing::has_code;
using testing::is_ok;
using testing::must;
using testing::open_all;
using testing::opened_device;
using testing::stream_gate;

std::size_t thread_count() {
  const std::filesystem::directory_iterator tasks{"/proc/self/task"};
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

// -- devices

TEST(HostBackend, HasTheDevicesAskedFor) {
  EXPECT_EQ(make_host_backend()->device_count(), 8);
  EXPECT_EQ(make_host_backend({.devices = 100})->device_count(), 100);
  EXPECT_EQ(make_host_backend()->name(), "host");
}

TEST(HostBackend, OpensADeviceOnceAtATime) {
  const auto backend = make_host_backend({.devices = 2});
  auto first = must(backend->open(1));
  EXPECT_TRUE(has_code(backend->open(1), errc::unavailable));
  EXPECT_TRUE(backend->open(0));
  first.reset();
  EXPECT_TRUE(backend->open(1));
}

TEST(HostBackend, RejectsOrdinalsThatDoNotExist) {
  const auto backend = make_host_backend({.devices = 2});
  EXPECT_TRUE(has_code(backend->open(-1), errc::invalid_argument));
  EXPECT_TRUE(has_code(backend->open(2), errc::invalid_argument));
}

TEST(HostBackend, StartsNoThreadBeforeThereIsWork) {
  const auto backend = make_host_backend({.devices = 64});
  auto devices = open_all(*backend);
  const auto ranks = build_all(*backend, 64);
  devices[0].drain(); // a sanitizer may start a thread with the first one
  const auto before = thread_count();
  EXPECT_TRUE(*devices[5]->query(devices[5].end));
  EXPECT_EQ(thread_count(), before);
  devices[5].drain();
  EXPECT_EQ(thread_count(), before + 1);
}

TEST(HostBackend, DescribesItsDevices) {
  const auto backend = make_host_backend({.devices = 2, .bytes_per_device = 4096});
  const opened_device x{*backend, 1};
  const auto properties = must(x->properties());
  EXPECT_EQ(properties.name, "host device 1");
  EXPECT_EQ(properties.total_bytes, 4096u);
  EXPECT_TRUE(x->signals_completion());
}

// -- links

TEST(HostLinks, AreThereUnlessTheOptionsSayOtherwise) {
  const auto backend = make_host_backend(
      {.devices = 4,
       .links = {{.from = 0, .to = 1, .access = false},
                 {.from = 2, .to = 3, .link = {link_kind::nvlink, 18, 1, false}},
                 {.from = 3, .to = 2, .access = false, .link = {link_kind::pcie, 0, 2, false}}}});
  const auto devices = open_all(*backend);
  for (int from = 0; from < 4; ++from)
    for (int to = 0; to < 4; ++to) {
      if (from == to)
        continue;
      const bool can = !(from == 0 && to == 1) && !(from == 3 && to == 2);
      EXPECT_EQ(must(devices[static_cast<std::size_t>(from)]->can_access_peer(to)), can);
      const auto link = must(backend->link(from, to));
      const auto want = from == 0 && to == 1   ? link_kind::host
                        : from == 2 && to == 3 ? link_kind::nvlink
                        : from == 3 && to == 2 ? link_kind::pcie
                                               : link_kind::memory;
      EXPECT_EQ(link.kind, want) << from << " to " << to;
    }
  const auto fast = must(backend->link(2, 3));
  EXPECT_EQ(fast.links, 18);
  EXPECT_EQ(fast.performance_rank, 1);
  EXPECT_FALSE(fast.native_atomics);
  EXPECT_TRUE(must(backend->link(1, 0)).native_atomics);
  for (auto [from, to] : {std::pair{0, 0}, std::pair{-1, 0}, std::pair{0, 4}})
    EXPECT_TRUE(has_code(backend->link(from, to), errc::invalid_argument));
  EXPECT_TRUE(has_code(devices[0]->can_access_peer(4), errc::invalid_argument));
  EXPECT_TRUE(has_code(devices[0]->enable_peer(-1), errc::invalid_argument));
  EXPECT_TRUE(has_code(devices[0]->admit_peer(4), errc::invalid_argument));
  EXPECT_TRUE(has_code(devices[0]->enable_peer(1), errc::not_supported));
  EXPECT_TRUE(has_code(devices[1]->admit_peer(0), errc::not_supported));
  EXPECT_TRUE(is_ok(devices[1]->enable_peer(0)));
  EXPECT_TRUE(is_ok(devices[0]->admit_peer(1)));
}

TEST(HostLinks, CopyBothWaysOnceAccessIsEnabledAtBothEnds) {
  const auto backend = make_host_backend({.devices = 3});
  auto devices = open_all(*backend);
  std::vector<std::int32_t*> memory;
  for (auto& x : devices) {
    memory.push_back(static_cast<std::int32_t*>(must(x->allocate(4, x.stream))));
    x.drain();
    *memory.back() = static_cast<int>(memory.size());
  }
  const auto write = [&] {
    return devices[0]->copy_peer(memory[1], 1, memory[0], 0, 4, devices[0].stream);
  };
  const auto read = [&] {
    return devices[0]->copy_peer(memory[0], 0, memory[1], 1, 4, devices[0].stream);
  };
  EXPECT_TRUE(has_code(write(), errc::not_supported));
  EXPECT_TRUE(is_ok(devices[0]->enable_peer(1)));
  EXPECT_TRUE(has_code(read(), errc::not_supported));
  EXPECT_TRUE(is_ok(devices[1]->admit_peer(0)));
  for (int i = 0; i < 2; ++i) { // access holds for all generations; a second call changes nothing
    EXPECT_TRUE(is_ok(write()));
    devices[0].drain();
    EXPECT_EQ(*memory[1], *memory[0]);
    *memory[1] = 77;
    EXPECT_TRUE(is_ok(read()));
    devices[0].drain();
    EXPECT_EQ(*memory[0], 77);
    must(devices[1]->close_memory());
    must(devices[1]->open_memory());
    memory[1] = static_cast<std::int32_t*>(must(devices[1]->allocate(4, devices[1].stream)));
    devices[1].drain();
    EXPECT_TRUE(is_ok(devices[0]->enable_peer(1)));
    EXPECT_TRUE(is_ok(devices[1]->admit_peer(0)));
  }
  // The opposite direction is another link.
  EXPECT_TRUE(has_code(devices[1]->copy_peer(memory[0], 0, memory[1], 1, 4, devices[1].stream),
                       errc::not_supported));
  EXPECT_TRUE(has_code(devices[2]->copy_peer(memory[0], 0, memory[1], 1, 4, devices[2].stream),
                       errc::invalid_argument));
  EXPECT_TRUE(has_code(devices[0]->copy_peer(nullptr, 1, memory[0], 0, 4, devices[0].stream),
                       errc::invalid_argument));
  EXPECT_TRUE(has_code(devices[0]->copy_peer(memory[1], 3, memory[0], 0, 4, devices[0].stream),
                       errc::invalid_argument));
  EXPECT_TRUE(
      has_code(devices[0]->copy_peer(memory[1], 1, memory[0], 0, 4, {}), errc::invalid_argument));
}

TEST(HostLinks, EndWithTheDevice) {
  const auto backend = make_host_backend({.devices = 2});
  auto devices = open_all(*backend);
  must(devices[0]->enable_peer(1));
  must(devices[1]->admit_peer(0));
  devices.clear();
  devices = open_all(*backend);
  std::int32_t x = 1;
  std::int32_t y = 2;
  EXPECT_TRUE(
      has_code(devices[0]->copy_peer(&x, 1, &y, 0, 4, devices[0].stream), errc::not_supported));
}

// -- streams and events

TEST(HostStream, RunsInOrder) {
  const auto backend = make_host_backend();
  opened_device x{*backend, 0};
  std::vector<int> seen;
  struct step {
    std::vector<int>* seen;
    int number;
  };
  std::vector<step> steps;
  for (int i = 0; i < 10'000; ++i)
    steps.push_back({&seen, i});
  for (auto& next : steps)
    ASSERT_TRUE(is_ok(x->launch_host(
        x.stream,
        [](void* p) {
          auto& s = *static_cast<step*>(p);
          s.seen->push_back(s.number);
        },
        &next)));
  x.drain();
  ASSERT_EQ(seen.size(), steps.size());
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
}

TEST(HostStream, AnEventIsDoneWhenTheStreamReachesIt) {
  const auto backend = make_host_backend();
  opened_device x{*backend, 0};
  const auto before = must(x->create_event());
  const auto after = must(x->create_event());
  stream_gate gate;
  ASSERT_TRUE(is_ok(x->record(before, x.stream)));
  gate.enqueue(x);
  ASSERT_TRUE(is_ok(x->record(after, x.stream)));
  gate.wait_reached();
  EXPECT_TRUE(must(x->query(before)));
  EXPECT_FALSE(must(x->query(after)));
  gate.open();
  EXPECT_TRUE(is_ok(x->synchronize(after)));
  EXPECT_TRUE(must(x->query(after)));
}

TEST(HostStream, AnEventThatWasNeverRecordedIsDone) {
  const auto backend = make_host_backend();
  opened_device x{*backend, 0};
  const auto event = must(x->create_event());
  EXPECT_TRUE(must(x->query(event)));
  EXPECT_TRUE(is_ok(x->synchronize(event)));
  EXPECT_TRUE(is_ok(x->wait(x.stream, event)));
  x.drain();
  EXPECT_TRUE(is_ok(x->destroy_event(event)));
}

TEST(HostStream, ARecordedEventCanBeRecordedAgain) {
  const auto backend = make_host_backend();
  opened_device x{*backend, 0};
  const auto event = must(x->create_event());
  for (int i = 0; i < 100; ++i) {
    stream_gate gate;
    gate.enqueue(x);
    ASSERT_TRUE(is_ok(x->record(event, x.stream)));
    EXPECT_FALSE(must(x->query(event)));
    gate.open();
    ASSERT_TRUE(is_ok(x->synchronize(event)));
    EXPECT_TRUE(must(x->query(event)));
  }
}

TEST(HostStream, WaitMeansWhatWasRecordedWhenItWasCalled) {
  const auto backend = make_host_backend();
  auto devices = open_all(*backend);
  const auto event = must(devices[0]->create_event());
  const auto other_stream = must(devices[0]->create_stream());
  for (int i = 0; i < 200; ++i) {
    struct {
      std::atomic<bool> first_done{false};
      std::atomic<bool> second_saw_it{false};
    } run;
    stream_gate gate;
    gate.enqueue(devices[0]);
    ASSERT_TRUE(is_ok(devices[0]->launch_host(
        devices[0].stream, [](void* p) { static_cast<decltype(run)*>(p)->first_done = true; },
        &run)));
    ASSERT_TRUE(is_ok(devices[0]->record(event, devices[0].stream)));
    ASSERT_TRUE(is_ok(devices[1]->wait(devices[1].stream, event)));
    ASSERT_TRUE(is_ok(devices[1]->launch_host(
        devices[1].stream,
        [](void* p) {
          auto& r = *static_cast<decltype(run)*>(p);
          r.second_saw_it = r.first_done.load();
        },
        &run)));
    // A second recording on an idle stream is done at once, while the first one is not.
    ASSERT_TRUE(is_ok(devices[0]->record(event, other_stream)));
    ASSERT_TRUE(is_ok(devices[0]->synchronize(event)));
    gate.open();
    devices[1].drain();
    EXPECT_TRUE(run.second_saw_it);
  }
}

TEST(HostStream, WaitsOrderWorkAcrossDevices) {
  constexpr int steps = 3'000;
  const auto backend = make_host_backend();
  auto devices = open_all(*backend);
  std::vector<event_view> events;
  for (const auto& x : devices)
    events.push_back(must(x->create_event()));
  // One value moves between the devices. It is not atomic, so a missing wait is a data race too.
  struct {
    std::uint64_t value = 1;
  } token;
  std::mt19937 random{7};
  std::size_t last = 0;
  for (int i = 0; i < steps; ++i) {
    const auto next = random() % devices.size();
    ASSERT_TRUE(is_ok(devices[next]->wait(devices[next].stream, events[last])));
    ASSERT_TRUE(is_ok(devices[next]->launch_host(
        devices[next].stream,
        [](void* p) {
          auto& t = *static_cast<decltype(token)*>(p);
          t.value = t.value * 6364136223846793005u + 1442695040888963407u;
        },
        &token)));
    ASSERT_TRUE(is_ok(devices[next]->record(events[next], devices[next].stream)));
    last = next;
  }
  ASSERT_TRUE(is_ok(devices[last]->synchronize(events[last])));
  std::uint64_t expected = 1;
  for (int i = 0; i < steps; ++i)
    expected = expected * 6364136223846793005u + 1442695040888963407u;
  EXPECT_EQ(token.value, expected);
}

TEST(HostStream, SignalsEachCompletion) {
  const auto backend = make_host_backend();
  auto device = must(backend->open(0));
  std::counting_semaphore<> signals{0};
  device->set_completion_signal([&] { signals.release(); });
  const auto stream = must(device->create_stream());
  const auto event = must(device->create_event());
  for (int i = 0; i < 1'000; ++i) {
    ASSERT_TRUE(is_ok(device->record(event, stream)));
    signals.acquire();
    ASSERT_TRUE(must(device->query(event)));
  }
  EXPECT_FALSE(signals.try_acquire());
}

TEST(HostStream, ADestroyedStreamFinishesItsWork) {
  const auto backend = make_host_backend();
  opened_device x{*backend, 0};
  const auto stream = must(x->create_stream());
  const auto event = must(x->create_event());
  stream_gate gate;
  gate.enqueue(*x.device, stream);
  ASSERT_TRUE(is_ok(x->record(event, stream)));
  EXPECT_TRUE(is_ok(x->destroy_stream(stream)));
  EXPECT_TRUE(has_code(x->destroy_stream(stream), errc::invalid_argument));
  EXPECT_FALSE(must(x->query(event)));
  gate.open();
  EXPECT_TRUE(is_ok(x->synchronize(event)));
  EXPECT_TRUE(must(x->query(event)));
}

TEST(HostStream, AClosedDeviceWaitsForNobody) {
  const auto backend = make_host_backend({.devices = 4});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 4);
  std::array<float, 4> values{1, 2, 3, 4};
  const auto all_reduce = [&](std::size_t r) {
    return testing::all_reduce(*communicator[r], &values[r], &values[r], 1, dtype::float32,
                               reduce_op::sum, devices[r].stream);
  };
  // Device 0 waits for device 1, which waits for rank 2, which never calls.
  ASSERT_TRUE(is_ok(all_reduce(1)));
  ASSERT_TRUE(is_ok(devices[1]->record(devices[1].end, devices[1].stream)));
  ASSERT_TRUE(is_ok(devices[0]->wait(devices[0].stream, devices[1].end)));
  ASSERT_TRUE(is_ok(devices[0]->copy(&values[0], &values[1], sizeof(float),
                                     copy_direction::device_to_device, devices[0].stream)));
  ASSERT_TRUE(is_ok(all_reduce(3)));
  devices.erase(devices.begin(), devices.begin() + 2);
  EXPECT_EQ(values, (std::array<float, 4>{1, 2, 3, 4})); // queued work was dropped
  devices.back().drain();
  EXPECT_TRUE(has_code(communicator[3]->asynchronous_error(), errc::nccl_error));
}

TEST(HostStream, ACompletionSignalMayLetTheDeviceGo) {
  const auto backend = make_host_backend({.devices = 1});
  for (int i = 0; i < 50; ++i) {
    auto owner = std::make_shared<std::unique_ptr<backend_device>>(must(backend->open(0)));
    auto& device = **owner;
    auto gone = std::make_shared<std::promise<void>>();
    device.set_completion_signal([&owner, gone] {
      owner.reset();
      gone->set_value();
    });
    const auto stream = must(device.create_stream());
    const auto event = must(device.create_event());
    stream_gate gate;
    gate.enqueue(device, stream);
    ASSERT_TRUE(is_ok(device.record(event, stream)));
    gate.open();
    gone->get_future().wait();
  }
}

TEST(HostStream, RejectsNullHandles) {
  const auto backend = make_host_backend();
  opened_device x{*backend, 0};
  EXPECT_TRUE(has_code(x->record({}, x.stream), errc::invalid_argument));
  EXPECT_TRUE(has_code(x->record(x.end, {}), errc::invalid_argument));
  EXPECT_TRUE(has_code(x->wait(x.stream, {}), errc::invalid_argument));
  EXPECT_TRUE(has_code(x->query({}), errc::invalid_argument));
  EXPECT_TRUE(has_code(x->synchronize({}), errc::invalid_argument));
  EXPECT_TRUE(has_code(x->launch_host(x.stream, nullptr, nullptr), errc::invalid_argument));
  EXPECT_TRUE(has_code(x->destroy_event({}), errc::invalid_argument));
  EXPECT_TRUE(has_code(x->allocate(16, {}), errc::invalid_argument));
  int data = 0;
  EXPECT_TRUE(has_code(x->copy(&data, &data, sizeof data, copy_direction::device_to_device, {}),
                       errc::invalid_argument));
  EXPECT_TRUE(
      has_code(x->copy(&data, nullptr, sizeof data, copy_direction::device_to_device, x.stream),
               errc::invalid_argument));
}

// -- memory

TEST(HostMemory, ComesFromTheBudgetOfItsDevice) {
  const auto backend = make_host_backend({.devices = 2, .bytes_per_device = 1'000'000});
  opened_device x{*backend, 0};
  const opened_device y{*backend, 1};
  auto* first = must(x->allocate(600'000, x.stream));
  EXPECT_EQ(must(x->memory()).free_bytes, 400'000u);
  EXPECT_EQ(must(x->memory()).total_bytes, 1'000'000u);
  EXPECT_EQ(must(y->memory()).free_bytes, 1'000'000u);

  const auto refused = x->allocate(400'001, x.stream);
  ASSERT_TRUE(has_code(refused, errc::out_of_memory));
  const auto text = describe(refused.error());
  EXPECT_NE(text.find("400001"), std::string::npos) << text;
  EXPECT_NE(text.find("400000"), std::string::npos) << text;
  EXPECT_EQ(failure_of(refused.error())->device, 0);
  EXPECT_TRUE(has_code(x->allocate(SIZE_MAX, x.stream), errc::out_of_memory));

  auto* second = must(x->allocate(400'000, x.stream));
  EXPECT_EQ(must(x->memory()).free_bytes, 0u);
  EXPECT_TRUE(is_ok(x->deallocate(first, x.stream)));
  EXPECT_TRUE(is_ok(x->deallocate(second, x.stream)));
  EXPECT_EQ(must(x->memory()).free_bytes, 1'000'000u);
  EXPECT_TRUE(has_code(x->deallocate(first, x.stream), errc::invalid_argument));
}

TEST(HostMemory, IsAlignedAndNotZero) {
  const auto backend = make_host_backend();
  opened_device x{*backend, 0};
  for (const std::size_t size_bytes : {1, 2, 255, 256, 257, 70'000, 1 << 20}) {
    auto* memory = static_cast<unsigned char*>(must(x->allocate(size_bytes, x.stream)));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 256, 0u);
    EXPECT_NE(memory[0], 0);
    EXPECT_NE(memory[size_bytes - 1], 0);
    auto* pinned = static_cast<unsigned char*>(must(x->allocate_pinned(size_bytes)));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pinned) % 256, 0u);
    EXPECT_NE(pinned[size_bytes - 1], 0);
    EXPECT_TRUE(is_ok(x->deallocate_pinned(pinned)));
  }
  EXPECT_TRUE(has_code(x->allocate(0, x.stream), errc::invalid_argument));
}

TEST(HostMemory, IsFreedInStreamOrder) {
  const auto backend = make_host_backend();
  opened_device x{*backend, 0};
  std::vector<std::uint32_t> result(1'000, 0xbad);
  stream_gate gate;
  gate.enqueue(x);
  auto* memory = must(x->allocate(4'000, x.stream));
  const std::uint32_t pattern = 0x12345678;
  ASSERT_TRUE(is_ok(x->fill(memory, std::as_bytes(std::span{&pattern, 1}), 1'000, x.stream)));
  ASSERT_TRUE(
      is_ok(x->copy(result.data(), memory, 4'000, copy_direction::device_to_host, x.stream)));
  ASSERT_TRUE(is_ok(x->deallocate(memory, x.stream)));
  gate.open();
  x.drain();
  EXPECT_EQ(std::count(result.begin(), result.end(), pattern), 1'000);
}

TEST(HostMemory, ClosesAndOpensAgain) {
  const auto backend = make_host_backend({.devices = 1, .bytes_per_device = 1'000});
  opened_device x{*backend, 0};
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(x->allocate(700, x.stream));
    EXPECT_TRUE(has_code(x->allocate(700, x.stream), errc::out_of_memory));
    EXPECT_TRUE(is_ok(x->close_memory()));
    EXPECT_TRUE(has_code(x->allocate(1, x.stream), errc::invalid_argument));
    EXPECT_TRUE(is_ok(x->open_memory()));
    EXPECT_TRUE(has_code(x->open_memory(), errc::invalid_argument));
  }
}

TEST(HostMemory, FillsWithPatternsOfEverySize) {
  const auto backend = make_host_backend();
  opened_device x{*backend, 0};
  std::mt19937_64 random{11};
  for (const std::size_t size : {1, 2, 4, 8, 16}) {
    for (const std::size_t count : {0, 1, 2, 3, 5, 100, 4'096, 33'333}) {
      const std::array bits{random(), random()};
      const auto pattern = std::as_bytes(std::span{bits});
      std::vector<std::byte> memory((count + 2) * 16, std::byte{0x5a});
      ASSERT_TRUE(is_ok(x->fill(memory.data() + 16, pattern.first(size), count, x.stream)));
      x.drain();
      for (std::size_t i = 0; i < memory.size(); ++i) {
        const auto inside = i >= 16 && i < 16 + count * size;
        ASSERT_EQ(memory[i], inside ? pattern[(i - 16) % size] : std::byte{0x5a})
            << size << ' ' << i;
      }
    }
  }
  std::array<std::byte, 32> target{};
  const auto try_fill = [&](std::size_t offset, std::size_t size) {
    return code_of(x->fill(target.data() + offset, std::span{target}.first(size), 1, x.stream));
  };
  EXPECT_EQ(try_fill(0, 0), errc::invalid_argument);
  EXPECT_EQ(try_fill(0, 3), errc::invalid_argument);
  EXPECT_EQ(try_fill(0, 32), errc::invalid_argument);
  EXPECT_TRUE(
      has_code(x->fill(nullptr, std::span{target}.first(4), 1, x.stream), errc::invalid_argument));
}

TEST(HostMemory, CopiesBetweenHostAndDevices) {
  const auto backend = make_host_backend();
  auto devices = open_all(*backend);
  std::mt19937 random{3};
  for (const std::size_t size_bytes : {1, 4'095, 100'001}) {
    std::vector<unsigned char> source(size_bytes);
    std::generate(source.begin(), source.end(),
                  [&] { return static_cast<unsigned char>(random()); });
    std::vector<unsigned char> target(size_bytes, 0);
    const void* from = source.data();
    event_view before{};
    for (auto& x : devices) {
      auto* memory = must(x->allocate(size_bytes, x.stream));
      if (before.native) {
        ASSERT_TRUE(is_ok(x->wait(x.stream, before)));
      }
      const auto direction =
          before.native ? copy_direction::device_to_device : copy_direction::host_to_device;
      ASSERT_TRUE(is_ok(x->copy(memory, from, size_bytes, direction, x.stream)));
      ASSERT_TRUE(is_ok(x->record(x.end, x.stream)));
      before = x.end;
      from = memory;
    }
    auto& last = devices.back();
    ASSERT_TRUE(is_ok(
        last->copy(target.data(), from, size_bytes, copy_direction::device_to_host, last.stream)));
    last.drain();
    EXPECT_EQ(target, source);
  }
}

// -- communicators

/// A reduction, possibly in place. Its buffers have guard bytes before and after them.
struct reduction_case {
  dtype type;
  reduce_op op;
  int ranks;
  std::size_t count;
  bool in_place;
};

void check_all_reduce(std::vector<opened_device>& devices, communicator_ranks& communicator,
                      const reduction_case& x, std::uint64_t seed) {
  constexpr std::size_t margin = 64;
  constexpr std::byte margin_byte{0x3c};
  const auto kind = seed % 4 < 2 ? testing::input_kind::any : testing::input_kind::exact;
  const auto inputs = testing::random_inputs({x.type, x.op, seed, 0, x.ranks, kind}, x.count);
  const auto size_bytes = x.count * size_of(x.type);
  std::vector<std::vector<std::byte>> send(inputs);
  std::vector<std::vector<std::byte>> recv;
  for (int i = 0; i < x.ranks; ++i) {
    const auto r = static_cast<std::size_t>(i);
    recv.emplace_back(size_bytes + 2 * margin, margin_byte);
    const auto body = std::span{recv[r]}.subspan(margin, size_bytes);
    if (x.in_place)
      std::copy(inputs[r].begin(), inputs[r].end(), body.begin());
    else
      testing::poison(body);
    const void* from = x.in_place ? body.data() : send[r].data();
    ASSERT_TRUE(is_ok(testing::all_reduce(*communicator[r], from, body.data(), x.count, x.type,
                                          x.op, devices[r].stream)));
  }
  for (int i = 0; i < x.ranks; ++i)
    devices[static_cast<std::size_t>(i)].drain();
  for (int i = 0; i < x.ranks; ++i) {
    const auto r = static_cast<std::size_t>(i);
    EXPECT_TRUE(is_ok(communicator[r]->asynchronous_error()));
    EXPECT_EQ(send[r], inputs[r]) << "an input was written to";
    const auto body = std::span{recv[r]}.subspan(margin, size_bytes);
    if (i == 0) {
      const auto result = testing::check(x.type, x.op, inputs, body, kind);
      ASSERT_TRUE(result) << to_string(x.type) << ' ' << to_string(x.op) << ", " << x.ranks
                          << " ranks, count " << x.count << ": " << to_string(result);
    }
    ASSERT_TRUE(std::equal(body.begin(), body.end(), recv[0].begin() + margin))
        << "rank " << i << " has not the bits of rank 0";
    for (std::size_t j = 0; j < margin; ++j) {
      ASSERT_EQ(recv[r][j], margin_byte);
      ASSERT_EQ(recv[r][margin + size_bytes + j], margin_byte);
    }
  }
}

class HostAllReduce : public ::testing::TestWithParam<std::tuple<dtype, reduce_op>> {};

TEST_P(HostAllReduce, GivesTheResultOnEveryRank) {
  const auto [type, op] = GetParam();
  const auto backend = make_host_backend();
  auto devices = open_all(*backend);
  std::uint64_t seed = 1;
  for (int ranks = 1; ranks <= 8; ++ranks) {
    auto communicator = build_all(*backend, ranks);
    // Counts below and above the size at which ranks share the work, and slices that end early.
    for (const std::size_t count : {std::size_t{1}, std::size_t{513}, 20'000 / size_of(type) + 7}) {
      check_all_reduce(devices, communicator, {type, op, ranks, count, seed % 2 == 0}, seed);
      ++seed;
    }
    EXPECT_TRUE(is_ok(backend->destroy(std::move(communicator))));
  }
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<dtype, reduce_op>>& info) {
  const auto [type, op] = info.param;
  return std::string{to_string(type)} + "_" + std::string{to_string(op)};
}

INSTANTIATE_TEST_SUITE_P(All, HostAllReduce,
                         ::testing::Combine(::testing::ValuesIn(real_dtypes),
                                            ::testing::ValuesIn(all_reduce_ops)),
                         name_of);

TEST(HostCommunicator, ReducesNothing) {
  const auto backend = make_host_backend({.devices = 2});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 2);
  check_all_reduce(devices, communicator, {dtype::float32, reduce_op::sum, 2, 0, true}, 2);
}

TEST(HostCommunicator, ReducesSlicesOfFewerElementsThanRanks) {
  const auto backend = make_host_backend();
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 8);
  std::mt19937 random{23};
  for (std::uint64_t i = 0; i < 40; ++i) {
    const std::size_t count = 2'049 + random() % 3'000; // of 8 bytes: large enough for shared work
    check_all_reduce(devices, communicator, {dtype::int64, reduce_op::sum, 8, count, i % 2 == 0},
                     i);
  }
}

struct mismatch_case {
  const char* name;
  std::size_t count;
  dtype type;
  reduce_op op;
};

class HostMismatch : public ::testing::TestWithParam<mismatch_case> {};

TEST_P(HostMismatch, IsAnErrorOnEveryRank) {
  const auto& other = GetParam();
  const auto backend = make_host_backend({.devices = 3});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 3);
  std::vector<std::vector<std::byte>> memory(3, std::vector<std::byte>(80'000, std::byte{1}));
  for (std::size_t r = 0; r < 3; ++r) {
    auto* data = memory[r].data();
    ASSERT_TRUE(
        is_ok(r == 1 ? testing::all_reduce(*communicator[r], data, data, other.count, other.type,
                                           other.op, devices[r].stream)
                     : testing::all_reduce(*communicator[r], data, data, 10'000, dtype::float32,
                                           reduce_op::sum, devices[r].stream)));
  }
  for (std::size_t r = 0; r < 3; ++r) {
    devices[r].drain();
    EXPECT_TRUE(has_code(communicator[r]->asynchronous_error(), errc::collective_mismatch));
    EXPECT_EQ(memory[r], std::vector<std::byte>(80'000, std::byte{1}));
    EXPECT_TRUE(has_code(testing::all_reduce(*communicator[r], memory[r].data(), memory[r].data(),
                                             1, dtype::int8, reduce_op::sum, devices[r].stream),
                         errc::collective_mismatch));
  }
  EXPECT_TRUE(is_ok(backend->abort(std::move(communicator))));
}

INSTANTIATE_TEST_SUITE_P(
    All, HostMismatch,
    ::testing::Values(mismatch_case{"Count", 9'999, dtype::float32, reduce_op::sum},
                      mismatch_case{"FewElements", 1, dtype::float32, reduce_op::sum},
                      mismatch_case{"NoElements", 0, dtype::float32, reduce_op::sum},
                      mismatch_case{"Type", 10'000, dtype::int32, reduce_op::sum},
                      mismatch_case{"Op", 10'000, dtype::float32, reduce_op::max}),
    [](const auto& x) { return std::string{x.param.name}; });

TEST(HostCommunicator, AbortLetsWaitingRanksGo) {
  const auto backend = make_host_backend({.devices = 4});
  auto devices = open_all(*backend);
  for (const std::size_t count : {1, 100'000}) {
    auto communicator = build_all(*backend, 4);
    std::vector<std::vector<float>> memory(4, std::vector<float>(count, 1));
    for (const std::size_t r : {0, 1, 3}) // rank 2 never calls
      for (int i = 0; i < 3; ++i)
        ASSERT_TRUE(
            is_ok(testing::all_reduce(*communicator[r], memory[r].data(), memory[r].data(), count,
                                      dtype::float32, reduce_op::sum, devices[r].stream)));
    for (const std::size_t r : {0, 1, 3}) {
      ASSERT_TRUE(is_ok(devices[r]->record(devices[r].end, devices[r].stream)));
      EXPECT_FALSE(must(devices[r]->query(devices[r].end)));
    }
    EXPECT_TRUE(is_ok(backend->abort(std::move(communicator))));
    for (const std::size_t r : {0, 1, 3}) {
      EXPECT_TRUE(is_ok(devices[r]->synchronize(devices[r].end)));
      EXPECT_EQ(memory[r], std::vector<float>(count, 1));
    }
  }
}

TEST(HostCommunicator, CanBeAbortedAtAnyMoment) {
  constexpr std::size_t count = 20'000;
  const auto backend = make_host_backend({.devices = 4});
  auto devices = open_all(*backend);
  std::vector<std::vector<float>> memory(4, std::vector<float>(count, 0));
  std::mt19937 random{5};
  for (int run = 0; run < 50; ++run) {
    auto communicator = build_all(*backend, 4);
    const auto calls = 1 + random() % 6;
    const auto held = random() % 8; // a blocked rank changes the moment of the abort
    stream_gate gate;
    for (std::size_t r = 0; r < 4; ++r) {
      if (r == held)
        gate.enqueue(devices[r]);
      for (unsigned i = 0; i < calls; ++i)
        ASSERT_TRUE(
            is_ok(testing::all_reduce(*communicator[r], memory[r].data(), memory[r].data(), count,
                                      dtype::float32, reduce_op::max, devices[r].stream)));
    }
    EXPECT_TRUE(is_ok(backend->abort(std::move(communicator))));
    gate.open();
    for (auto& x : devices)
      x.drain();
    // No rank of the old communicator may access the memory now.
    for (auto& x : memory)
      std::fill(x.begin(), x.end(), 0.0F);
  }
}

TEST(HostCommunicator, ARankThatLeavesEndsTheOthers) {
  const auto backend = make_host_backend({.devices = 2});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 2);
  float x = 1;
  ASSERT_TRUE(is_ok(testing::all_reduce(*communicator[0], &x, &x, 1, dtype::float32, reduce_op::sum,
                                        devices[0].stream)));
  communicator.pop_back();
  devices[0].drain();
  EXPECT_TRUE(has_code(communicator[0]->asynchronous_error(), errc::nccl_error));
}

TEST(HostCommunicator, DestroyWaitsForWhatIsEnqueued) {
  const auto backend = make_host_backend({.devices = 2});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 2);
  std::array<std::int32_t, 2> values{1, 2};
  stream_gate gate;
  gate.enqueue(devices[1]);
  for (std::size_t r = 0; r < 2; ++r)
    ASSERT_TRUE(is_ok(testing::all_reduce(*communicator[r], &values[r], &values[r], 1, dtype::int32,
                                          reduce_op::sum, devices[r].stream)));
  auto destroyed = std::async(std::launch::async, [&, ranks = std::move(communicator)]() mutable {
    auto err = backend->destroy(std::move(ranks));
    return std::pair{std::move(err), values};
  });
  gate.open();
  const auto [err, seen] = destroyed.get();
  EXPECT_TRUE(is_ok(err));
  EXPECT_EQ(seen, (std::array<std::int32_t, 2>{3, 3}));
}

TEST(HostCommunicator, MatchesCallsByTheirOrderAlsoOverSeveralStreams) {
  constexpr int calls = 500;
  const auto backend = make_host_backend({.devices = 3});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 3);
  std::mt19937 random{17};
  std::vector<stream_view> more;
  for (auto& x : devices)
    more.push_back(must(x->create_stream()));
  std::vector<std::vector<std::int64_t>> values(3, std::vector<std::int64_t>(calls));
  for (std::size_t r = 0; r < 3; ++r) {
    for (std::size_t i = 0; i < calls; ++i) {
      values[r][i] = static_cast<std::int64_t>((r + 1) * (i + 1));
      ASSERT_TRUE(
          is_ok(testing::all_reduce(*communicator[r], &values[r][i], &values[r][i], 1, dtype::int64,
                                    reduce_op::sum, random() % 2 ? devices[r].stream : more[r])));
    }
  }
  for (std::size_t r = 0; r < 3; ++r) {
    devices[r].drain();
    ASSERT_TRUE(is_ok(devices[r]->record(devices[r].end, more[r])));
    ASSERT_TRUE(is_ok(devices[r]->synchronize(devices[r].end)));
    for (std::size_t i = 0; i < calls; ++i)
      ASSERT_EQ(values[r][i], static_cast<std::int64_t>(6 * (i + 1)));
  }
}

TEST(HostCommunicator, SeveralWorkOnTheSameStreams) {
  const auto backend = make_host_backend({.devices = 4});
  auto devices = open_all(*backend);
  auto all = build_all(*backend, 4);
  const std::array<local_rank, 2> members{local_rank{0, 3}, local_rank{1, 1}};
  auto some = must(backend->build(must(backend->make_communicator_id()), 2, members));
  std::vector<std::vector<std::uint32_t>> values(4);
  std::vector<std::uint32_t> expected{1, 10, 100, 1'000};
  for (std::size_t r = 0; r < 4; ++r)
    values[r] = {expected[r]};
  for (int i = 0; i < 300; ++i) {
    for (std::size_t r = 0; r < 4; ++r)
      ASSERT_TRUE(is_ok(testing::all_reduce(*all[r], values[r].data(), values[r].data(), 1,
                                            dtype::uint32, reduce_op::sum, devices[r].stream)));
    for (std::size_t r = 0; r < 2; ++r) {
      const auto device = static_cast<std::size_t>(members[r].device);
      ASSERT_TRUE(
          is_ok(testing::all_reduce(*some[r], values[device].data(), values[device].data(), 1,
                                    dtype::uint32, reduce_op::sum, devices[device].stream)));
    }
    const auto sum = expected[0] + expected[1] + expected[2] + expected[3];
    expected = {sum, 2 * sum, sum, 2 * sum};
  }
  for (std::size_t r = 0; r < 4; ++r) {
    devices[r].drain();
    EXPECT_EQ(values[r].front(), expected[r]);
  }
}

TEST(HostCommunicator, IsBuiltAndUsedByAThreadForEachRank) {
  constexpr int ranks = 8;
  constexpr std::size_t calls = 400;
  const auto backend = make_host_backend();
  const auto id = must(backend->make_communicator_id());
  std::latch done{ranks};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      opened_device x{*backend, rank};
      const local_rank mine{rank, rank};
      auto communicator = must(backend->build(id, ranks, {&mine, 1}));
      ASSERT_EQ(communicator.size(), 1u);
      EXPECT_TRUE(is_ok(communicator[0]->connect(x.stream, connect_scope::everything)));
      std::mt19937 sizes{99}; // same seed on each rank
      std::vector<std::vector<std::uint64_t>> buffers;
      for (std::size_t i = 0; i < calls; ++i) {
        buffers.emplace_back(i % 20 == 0 ? 2'100 + sizes() % 3'000 : 1 + sizes() % 100);
        for (std::size_t j = 0; j < buffers.back().size(); ++j)
          buffers.back()[j] = (i + 1) * (j + 1) << rank;
        auto* data = buffers.back().data();
        ASSERT_TRUE(is_ok(testing::all_reduce(*communicator[0], data, data, buffers.back().size(),
                                              dtype::uint64, reduce_op::sum, x.stream)));
      }
      x.drain();
      for (std::size_t i = 0; i < calls; ++i)
        for (std::size_t j = 0; j < buffers[i].size(); ++j)
          ASSERT_EQ(buffers[i][j], (i + 1) * (j + 1) * 255);
      done.arrive_and_wait();
      EXPECT_TRUE(is_ok(backend->destroy(std::move(communicator))));
    });
  for (auto& x : threads)
    x.join();
}

TEST(HostCommunicator, IsCalledOffWhileItWaitsForARank) {
  const auto backend = make_host_backend({.devices = 2});
  const auto id = must(backend->make_communicator_id());
  const local_rank mine{0, 0};
  std::atomic<bool> over{false};
  caf::error why;
  std::thread builder{[&] {
    const auto built = backend->build(id, 2, {&mine, 1});
    why = built ? caf::error{} : built.error();
    over = true;
  }};
  while (!over) { // the builder may not be waiting yet
    backend->call_off(id);
    std::this_thread::yield();
  }
  builder.join();
  EXPECT_TRUE(has_code(why, errc::unavailable));
}

TEST(HostCommunicator, RejectsWhatCannotBeBuilt) {
  const auto backend = make_host_backend({.devices = 2});
  const auto id = must(backend->make_communicator_id());
  const auto build = [&](int size, std::vector<local_rank> ranks) {
    const auto result = backend->build(id, size, ranks);
    return result ? std::nullopt : code_of(result.error());
  };
  EXPECT_EQ(build(0, {}), errc::invalid_argument);
  EXPECT_EQ(build(1, {}), errc::invalid_argument);
  EXPECT_EQ(build(2, {{0, 0}, {2, 1}}), errc::invalid_argument);
  EXPECT_EQ(build(2, {{0, 0}, {-1, 1}}), errc::invalid_argument);
  EXPECT_EQ(build(2, {{0, 0}, {0, 1}}), errc::invalid_argument);
  EXPECT_EQ(build(2, {{0, 0}, {1, 0}}), errc::invalid_argument);
  EXPECT_EQ(build(2, {{0, 0}, {1, 2}}), errc::invalid_argument);
  EXPECT_EQ(build(2, {{0, 0}, {1, 1}}), std::nullopt);
}

TEST(HostCommunicator, RejectsBadCalls) {
  const auto backend = make_host_backend({.devices = 1});
  opened_device x{*backend, 0};
  auto communicator = build_all(*backend, 1);
  float value = 2;
  auto& rank = *communicator[0];
  EXPECT_TRUE(
      has_code(testing::all_reduce(rank, &value, &value, 1, dtype::float32, reduce_op::sum, {}),
               errc::invalid_argument));
  EXPECT_TRUE(has_code(
      testing::all_reduce(rank, nullptr, &value, 1, dtype::float32, reduce_op::sum, x.stream),
      errc::invalid_argument));
  EXPECT_TRUE(has_code(
      testing::all_reduce(rank, &value, nullptr, 1, dtype::float32, reduce_op::sum, x.stream),
      errc::invalid_argument));
  EXPECT_TRUE(has_code(testing::all_reduce(rank, &value, &value, 1, static_cast<dtype>(99),
                                           reduce_op::sum, x.stream),
                       errc::invalid_argument));
  EXPECT_TRUE(is_ok(
      testing::all_reduce(rank, &value, &value, 1, dtype::float32, reduce_op::sum, x.stream)));
  x.drain();
  EXPECT_EQ(value, 2);
}

TEST(HostCommunicator, IdsDiffer) {
  const auto backend = make_host_backend({.devices = 1});
  std::set<std::array<std::byte, 128>> ids;
  for (int i = 0; i < 1'000; ++i)
    ids.insert(must(backend->make_communicator_id()).bytes);
  EXPECT_EQ(ids.size(), 1'000u);
}

} // namespace

} // namespace troupe
