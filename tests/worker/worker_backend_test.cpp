// Devices in worker processes, through everything above the backend.

#include "support/load.hpp"
#include "support/world_fixture.hpp"
#include <troupe/launch.hpp>
#include <troupe/worker.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

namespace troupe::testing {

namespace {

/// Known in the workers too: this binary is their program.
const bool launches_registered = [] {
  auto error = register_launch("kill the worker", [](launch_context&, auto, auto, auto) {
    ::raise(SIGKILL);
    return caf::error{};
  });
  if (!error)
    error = register_launch("add", [](launch_context& context, std::span<const any_gpu_ref> reads,
                                      std::span<const any_gpu_ref> writes,
                                      std::span<const std::byte> arguments) {
      auto from = reads.front().access();
      auto to = writes.front().access();
      if (!from || !to)
        return from ? to.error() : from.error();
      float what = 0;
      std::memcpy(&what, arguments.data(), sizeof what);
      return context.run_on_host([from = static_cast<const float*>(*from),
                                  to = static_cast<float*>(*to), n = reads.front().count(), what] {
        for (std::size_t i = 0; i < n; ++i)
          to[i] = from[i] + what;
      });
    });
  return !error;
}();

std::shared_ptr<backend> workers(int devices) {
  return must(
      make_worker_backend({.backend = on_cuda() ? "cuda" : "host", .host = {.devices = devices}}));
}

/// Until a client has `more` right sums.
::testing::AssertionResult goes_on(const std::atomic<int>& right, int more) {
  const auto from = right.load();
  const auto until = std::chrono::steady_clock::now() + patience;
  while (right < from + more && std::chrono::steady_clock::now() < until)
    std::this_thread::yield();
  return right >= from + more ? ::testing::AssertionSuccess()
                              : ::testing::AssertionFailure() << "no sum is right any more";
}

system_options in_worker_processes(int devices) {
  return {.devices = devices, .wrap = [=](std::shared_ptr<backend>) { return workers(devices); }};
}

caf::error launch_by_name(test_system& system, int ordinal, const std::string& name,
                          std::vector<any_gpu_ref> reads = {}, std::vector<any_gpu_ref> writes = {},
                          std::vector<std::byte> arguments = {}) {
  return error_of(
      answer_of(must(device::open(system, ordinal))
                    .launch(name, std::move(arguments), std::move(reads), std::move(writes))));
}

TEST(WorkerBackend, MovesAndComputes) {
  test_system system{in_worker_processes(2)};
  auto d = must(device::open(system, 1));
  EXPECT_TRUE(works(d));
  auto content = random_bytes(std::size_t{40} << 20, 7); // in pieces
  auto ref = must(answer_of(d.allocate(dtype::uint8, content.size())));
  put(d, ref, content);
  auto copy = must(answer_of(d.allocate(dtype::uint8, content.size())));
  ASSERT_TRUE(answer_of(d.copy(copy, ref)));
  EXPECT_TRUE(holds(d, copy, content));
  auto filled = must(d.allocate<float>(1000));
  ASSERT_TRUE(answer_of(d.fill(filled, 2.5F)));
  EXPECT_TRUE(holds(d, filled, std::vector<float>(1000, 2.5F)));
}

TEST(WorkerBackend, SumsOverProcesses) {
  test_system system{in_worker_processes(3)};
  auto w = system.open_world();
  for (std::uint64_t seed = 1; seed <= 5; ++seed)
    EXPECT_TRUE(works(w, seed));
}

// What was recorded first is over last.
TEST(WorkerBackend, AnEventIsRecordedAgainBeforeItIsOver) {
  auto all = workers(1);
  auto d = must(all->open(0));
  must(d->bind());
  must(d->open_memory());
  const auto held = must(d->create_stream());
  const auto other = must(d->create_stream());
  const auto event = must(d->create_event());
  const auto end = must(d->create_event());
  auto* memory = must(d->allocate_pinned(sizeof(std::uint64_t)));
  auto* word = static_cast<std::atomic<std::uint64_t>*>(memory);
  must(d->wait_word(held, word, 1));
  must(d->record(event, held));
  EXPECT_FALSE(must(d->query(event)));
  must(d->record(event, other));
  must(d->synchronize(event));
  must(d->record(end, held));
  EXPECT_FALSE(must(d->query(end)));
  word->store(1);
  must(d->synchronize(end));
  EXPECT_TRUE(must(d->query(event)));
  must(d->record(event, held));
  must(d->synchronize(event));
  must(d->destroy_event(event));
  must(d->destroy_event(end));
  must(d->destroy_stream(held));
  must(d->destroy_stream(other));
  must(d->deallocate_pinned(memory));
}

TEST(WorkerBackend, LaunchesWhatTheWorkerKnows) {
  TROUPE_HOST_ONLY("the launch computes on the host");
  ASSERT_TRUE(launches_registered);
  test_system system{in_worker_processes(1)};
  auto d = must(device::open(system, 0));
  auto in = must(d.allocate<float>(100));
  auto out = must(d.allocate<float>(100));
  ASSERT_TRUE(answer_of(d.fill(in, 1.F)));
  std::vector<std::byte> argument(sizeof(float));
  const float two = 2;
  std::memcpy(argument.data(), &two, sizeof two);
  auto added = launch_by_name(system, 0, "add", {in}, {out}, argument);
  EXPECT_FALSE(added) << describe(added);
  EXPECT_TRUE(holds(d, out, std::vector<float>(100, 3.F)));
  EXPECT_EQ(code_of(launch_by_name(system, 0, "nobody has it")), errc::invalid_argument);
  EXPECT_EQ(
      code_of(error_of(answer_of(d.launch([](launch_context&) { return caf::error{}; }, {}, {})))),
      errc::not_supported);
}

/// What can only live in the process of the device.
struct local_request {
  const char* name;
  std::function<caf::error(test_system&, const device&, const any_gpu_ref&)> ask;
};

template <class T> caf::error at_once_of(const pending<T>& x) {
  return x.ready() ? error_of(x.result()) : make_error(errc::internal, "not answered at once");
}

const local_request local_requests[] = {
    {"Adopt",
     [](test_system&, const device& d, const any_gpu_ref&) {
       std::vector<float> mine(10);
       return error_of(d.adopt(mine.data(), mine.size(), [](void*) {}));
     }},
    {"Acquire",
     [](test_system&, const device& d, const any_gpu_ref& x) {
       return at_once_of(d.acquire(x, access_mode::read, nullptr));
     }},
    {"Release",
     [](test_system&, const device& d, const any_gpu_ref& x) {
       return at_once_of(d.release(x, access_mode::read, nullptr));
     }},
    {"Callable",
     [](test_system&, const device& d, const any_gpu_ref& x) {
       return at_once_of(d.launch([](launch_context&) { return caf::error{}; }, {x}, {}));
     }},
    {"CallableByMessage",
     [](test_system& system, const device& d, const any_gpu_ref&) {
       launch_callable what;
       what.function = [](launch_context&) { return caf::error{}; };
       return error_of(ask<void>(system, must(d.actor()), what));
     }},
};

class LocalRequests : public ::testing::TestWithParam<local_request> {};

INSTANTIATE_TEST_SUITE_P(Each, LocalRequests, ::testing::ValuesIn(local_requests),
                         [](const auto& x) { return std::string{x.param.name}; });

// INV-13
TEST_P(LocalRequests, AreRefusedAtOnceElsewhere) {
  test_system system{in_worker_processes(1)};
  auto d = must(device::open(system, 0));
  auto ref = must(answer_of(d.allocate(dtype::float32, 10)));
  EXPECT_TRUE(has_code(GetParam().ask(system, d, ref), errc::not_supported));
  EXPECT_TRUE(works(d));
}

TEST(WorkerBackend, ComesBackWhenItsProcessIsKilled) {
  test_system system{in_worker_processes(3)};
  auto w = system.open_world();
  device_feed feed{system, system.device_actor(1)};
  auto kept = must(w.device_of(0).allocate<float>(1000));
  ASSERT_TRUE(answer_of(w.device_of(0).fill(kept, 4.F)));
  auto lost = must(w.device_of(1).allocate<float>(1000));
  auto before = feed.until(device_phase::ready).generation;
  EXPECT_EQ(code_of(launch_by_name(system, 1, "kill the worker")), errc::worker_lost);
  auto now = feed.until(device_phase::ready, before + 1);
  EXPECT_EQ(now.generation, before + 1);
  EXPECT_TRUE(lost.stale());
  EXPECT_FALSE(kept.stale());
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(holds(w.device_of(0), kept, std::vector<float>(1000, 4.F)));
}

TEST(WorkerBackend, GoesOnAfterManyKillsUnderLoad) {
  constexpr int kills = 10;
  test_system system{in_worker_processes(3)};
  world_config config;
  config.limits.restarts = 1000;
  config.limits.restart_backoff = 1ms;
  auto w = system.open_world(config);
  std::atomic<bool> stop = false;
  std::atomic<int> right = 0;
  std::thread client{[&] { add_up(w, stop, right); }};
  for (int i = 0; i < kills; ++i) {
    ASSERT_TRUE(goes_on(right, 3)) << "after " << i << " kills";
    EXPECT_EQ(code_of(launch_by_name(system, i % static_cast<int>(w.size()), "kill the worker")),
              errc::worker_lost);
  }
  stop = true;
  client.join();
  EXPECT_TRUE(works(w));
}

TEST(WorkerBackend, GoesOnWithASpare) {
  constexpr int kills = 5;
  test_system system{in_worker_processes(3)};
  world_config config;
  config.limits.standby = standby_policy::full;
  config.limits.restarts = 1000;
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  auto kept = must(w.device_of(0).allocate<float>(1000));
  ASSERT_TRUE(answer_of(w.device_of(0).fill(kept, 4.F)));
  std::atomic<bool> stop = false;
  std::atomic<int> right = 0;
  std::thread client{[&] { add_up(w, stop, right); }};
  for (int i = 0; i < kills; ++i) {
    auto before = feed.until(
        [](const world_status& x) { return x.phase == world_phase::ready && x.standby_ready; });
    ASSERT_TRUE(goes_on(right, 3)) << "after " << i << " kills";
    const auto device = 1 + i % static_cast<int>(w.size() - 1);
    EXPECT_EQ(code_of(launch_by_name(system, device, "kill the worker")), errc::worker_lost);
    auto now = feed.until([&](const world_status& x) {
      return x.phase == world_phase::ready && x.epoch > before.epoch;
    });
    EXPECT_FALSE(now.standby_ready);
    EXPECT_EQ(now.membership, before.membership + 1);
    auto members = before.members; // the spare is the device, in its next life
    ++members[static_cast<std::size_t>(device)].generation;
    EXPECT_EQ(now.members, members);
  }
  ASSERT_TRUE(goes_on(right, 3));
  stop = true;
  client.join();
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(holds(w.device_of(0), kept, std::vector<float>(1000, 4.F)));
}

} // namespace

} // namespace troupe::testing
