// Devices in worker processes, used through all layers above the backend.

#include "foundation/log.hpp"
#include "support/child_process.hpp"
#include "support/entries_of.hpp"
#include "support/eventually.hpp"
#include "support/load.hpp"
#include "support/log_lines.hpp"
#include "support/no_threads.hpp"
#include "support/worker_losses.hpp"
#include <troupe/bytes.hpp>
#include <troupe/launch.hpp>
#include <troupe/worker.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

namespace troupe::testing {

namespace {

/// Workers run the same binary, so the launches are registered there too.
const bool launches_registered = [] {
  auto error = register_launch("add", [](launch_context& context,
                                         std::span<const any_gpu_ref> reads,
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
  if (!error)
    error = register_launch("abort",
                            [](launch_context&, std::span<const any_gpu_ref>,
                               std::span<const any_gpu_ref>,
                               std::span<const std::byte>) -> caf::error { std::abort(); });
  // The worker's process gets no more threads until it may have them again.
  static std::optional<no_threads> held;
  if (!error)
    error = register_launch("take its threads", [](launch_context&, auto, auto, auto) {
      held.emplace();
      return caf::error{};
    });
  if (!error)
    error = register_launch("give it threads", [](launch_context&, auto, auto, auto) {
      held.reset();
      return caf::error{};
    });
  return !error;
}();

TEST(WorkerBackend, SaysBySignalsWhatEndedAWorker) {
  log_lines lines;
  test_system system{in_worker_processes(1)};
  auto d = must(device::open(system, 0));
  EXPECT_EQ(code_of(error_of(answer_of(d.launch("abort", {}, {}, {})))), errc::worker_lost);
  EXPECT_TRUE(lines.say("the worker of device 0 was ended by signal 6"));
}

TEST(WorkerBackend, MovesAndComputes) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{in_worker_processes(2)};
  auto d = must(device::open(system, 1));
  EXPECT_TRUE(works(d));
  EXPECT_TRUE(moves(d, std::size_t{40} << 20)); // in pieces
  EXPECT_TRUE(other_memory{d}.is_there());
}

TEST(WorkerBackend, SumsOverProcesses) {
  test_system system{in_worker_processes(3)};
  auto w = system.open_world();
  for (std::uint64_t seed = 1; seed <= 5; ++seed)
    EXPECT_TRUE(works(w, seed));
}

// The first recording is done last.
TEST(WorkerBackend, AnEventIsRecordedAgainBeforeItIsOver) {
  auto all = make_workers(1);
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

TEST(WorkerBackend, KeepsItsMemoryInFilesOfThisProcess) {
  auto all = make_workers(1);
  auto d = must(all->open(0));
  must(d->bind());
  must(d->open_memory());
  const auto stream = must(d->create_stream());
  const auto files = entries_of("/proc/self/fd");
  constexpr std::size_t size = std::size_t{1} << 20;
  const auto before = must(d->memory()).free_bytes;
  const auto is_taken = [&](std::size_t bytes) { // other processes use a GPU, too
    return on_cuda() || must(d->memory()).free_bytes == before - bytes;
  };
  void* const first = must(d->allocate(size, stream));
  void* const second = must(d->allocate(size, stream));
  EXPECT_EQ(entries_of("/proc/self/fd"), files + 1); // both are in one slab
  EXPECT_TRUE(is_taken(2 * size));
  must(d->deallocate(first, stream));
  EXPECT_TRUE(is_taken(size));
  must(d->deallocate(second, stream));
  EXPECT_TRUE(eventually([&] { return entries_of("/proc/self/fd") == files; }));
  EXPECT_TRUE(is_taken(0));
  must(d->allocate(size, stream));
  EXPECT_EQ(entries_of("/proc/self/fd"), files + 1);
  must(d->close_memory());
  EXPECT_EQ(entries_of("/proc/self/fd"), files);
  must(d->destroy_stream(stream));
}

constexpr std::size_t gib = std::size_t{1} << 30;

TROUPE_CHILD(HoldsMemoryInWorkers) {
  auto all = make_workers(1);
  auto d = must(all->open(0));
  must(d->bind());
  must(d->open_memory());
  const auto stream = must(d->create_stream());
  for (int i = 0; i < 8; ++i)
    must(d->allocate(gib, stream));
  tell("holds");
  while (true)
    ::pause();
}

TEST(WorkerBackend, LeavesNoMemoryWhenAllProcessesAreKilledAtOnce) {
  TROUPE_NEEDS_GPUS(1);
  auto all = make_workers(1);
  auto d = must(all->open(0));
  must(d->bind());
  const auto free_bytes = [&] { return must(d->memory()).free_bytes; };
  std::size_t held = 0;
  {
    running_child holder{"HoldsMemoryInWorkers"};
    ASSERT_TRUE(holder.wait_told("holds", patience));
    held = free_bytes();
  } // it is killed, and its worker with it
  EXPECT_TRUE(eventually([&] { return free_bytes() > held + 4 * gib; })); // others may take some
}

TEST(WorkerBackend, LaunchesWhatTheWorkerKnows) {
  TROUPE_HOST_ONLY("the launch computes on the host");
  ASSERT_TRUE(launches_registered);
  test_system system{in_worker_processes(1)};
  auto d = must(device::open(system, 0));
  auto in = must(d.allocate<float>(100));
  auto out = must(d.allocate<float>(100));
  ASSERT_TRUE(answer_of(d.fill(in, 1.F)));
  auto added = error_of(answer_of(d.launch("add", to_bytes(2.F), {in}, {out})));
  EXPECT_FALSE(added) << describe(added);
  EXPECT_TRUE(holds(d, out, std::vector<float>(100, 3.F)));
  EXPECT_EQ(code_of(error_of(answer_of(d.launch("unregistered", {}, {}, {})))),
            errc::invalid_argument);
  EXPECT_EQ(
      code_of(error_of(answer_of(d.launch([](launch_context&) { return caf::error{}; }, {}, {})))),
      errc::not_supported);
}

/// Requests that are possible only in the process of the device.
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

/// Devices whose loss signal is delayed until the test allows it, and can be given once more.
struct slow_news {
  std::function<void(const caf::error&)> signal; ///< of the device that was opened last
  door losses;
  std::atomic<int> asked = 0; ///< number of times that lanes saw a loss
};

class with_slow_news final : public forwarding_backend {
public:
  with_slow_news(std::shared_ptr<backend> inner, std::shared_ptr<slow_news> news)
      : forwarding_backend(std::move(inner)), news_(std::move(news)) {}

  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    class guest final : public forwarding_device {
    public:
      guest(std::unique_ptr<backend_device> inner, std::shared_ptr<slow_news> news)
          : forwarding_device(std::move(inner)), news_(std::move(news)) {}
      void set_loss_signal(std::function<void(const caf::error&)> signal) noexcept override {
        news_->signal = signal;
        inner_->set_loss_signal([news = news_, signal = std::move(signal)](const caf::error& why) {
          news->losses.pass();
          signal(why);
        });
      }
      caf::error loss() const noexcept override {
        auto why = inner_->loss();
        news_->asked += why ? 1 : 0;
        return why;
      }

    private:
      std::shared_ptr<slow_news> news_;
    };
    return open_as<guest>(ordinal, news_);
  }

private:
  std::shared_ptr<slow_news> news_;
};

TEST(WorkerBackend, WhoIsToldOfALossFindsTheDeviceClosed) {
  auto news = std::make_shared<slow_news>();
  test_system system{{.devices = 1, .wrap = [&](std::shared_ptr<backend>) {
                        return std::make_shared<with_slow_news>(make_workers(1), news);
                      }}};
  auto d = must(device::open(system, 0));
  auto ref = must(d.allocate<float>(100));
  std::optional<closed_door> unheard{std::in_place, news->losses};
  auto death = launch_death(d);
  auto behind = d.fill(ref, 1.F);
  ASSERT_TRUE(eventually([&] { return news->asked > 0; })); // what comes now waits for the report
  auto waiting = d.fill(ref, 2.F);
  ASSERT_TRUE(eventually([&] { return news->asked > 5; })); // the lane still runs
  EXPECT_FALSE(death.ready());
  unheard.reset();
  EXPECT_EQ(code_of(error_of(answer_of(death))), errc::worker_lost);
  EXPECT_TRUE(works(d)); // in its next generation
  EXPECT_EQ(code_of(error_of(answer_of(behind))), errc::worker_lost);
  EXPECT_EQ(code_of(error_of(answer_of(waiting))), errc::worker_lost);
}

TEST(WorkerBackend, ALateReportOfALossDoesNotCloseTheDeviceAgain) {
  auto news = std::make_shared<slow_news>();
  test_system system{{.devices = 1, .wrap = [&](std::shared_ptr<backend>) {
                        return std::make_shared<with_slow_news>(make_workers(1), news);
                      }}};
  auto d = must(device::open(system, 0));
  const auto why = error_of(answer_of(launch_death(d)));
  EXPECT_EQ(code_of(why), errc::worker_lost);
  ASSERT_TRUE(works(d)); // in its next generation
  auto ref = must(d.allocate<float>(100));
  news->signal(why);
  EXPECT_FALSE(ref.stale());
  EXPECT_TRUE(is_ok(answer_of(d.fill(ref, 1.F, {.deadline = patience}))));
}

// Errors that other ranks report first are not the cause, even if the loss signal comes late.
TEST(WorkerBackend, WhatOtherRanksSeeOfALossIsNotItsCause) {
  TROUPE_NEEDS_DEVICES(2);
  auto news = std::make_shared<slow_news>();
  test_system system{{.devices = 2, .wrap = [&](std::shared_ptr<backend>) {
                        return std::make_shared<with_slow_news>(make_workers(2), news);
                      }}};
  auto w = system.open_world();
  const auto refs = must(w.allocate<float>(100));
  must(answer_of(w.all_reduce(refs)));
  std::optional<closed_door> unheard{std::in_place, news->losses};
  auto death = launch_death(w.device_of(1));
  auto sum = w.all_reduce(refs);
  EXPECT_FALSE(must(sum.wait_for(200ms))); // rank 0 notices it long before
  unheard.reset();
  EXPECT_EQ(code_of(error_of(answer_of(sum))), errc::worker_lost);
  EXPECT_EQ(code_of(error_of(answer_of(death))), errc::worker_lost);
}

// Objects of the lost worker do not block the end of the system.
TEST(WorkerBackend, EndsBesideALossThatNobodyHasHeardOf) {
  auto news = std::make_shared<slow_news>();
  std::optional<closed_door> unheard;
  stopwatch watch;
  {
    test_system system{{.devices = 1, .wrap = [&](std::shared_ptr<backend>) {
                          return std::make_shared<with_slow_news>(make_workers(1), news);
                        }}};
    auto d = must(device::open(system, 0));
    auto ref = must(d.allocate<float>(100));
    unheard.emplace(news->losses);
    auto death = launch_death(d);
    auto behind = d.fill(ref, 1.F);
    ASSERT_TRUE(eventually([&] { return news->asked > 0; }));
    auto waiting = d.fill(ref, 2.F);
    ASSERT_TRUE(eventually([&] { return news->asked > 5; }));
    watch = {};
    d.shutdown();
    EXPECT_EQ(code_of(error_of(answer_of(death))), errc::unavailable);
    unheard.reset();
  }
  EXPECT_LT(watch.elapsed(), 2s);
}

TEST(WorkerBackend, ComesBackWhenItsProcessIsKilled) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{in_worker_processes(3)};
  auto w = system.open_world();
  EXPECT_EQ(failure_of(is_lost_alone(system, w, 1, 0))->device, 1);
}

/// How a world continues after a loss.
struct way_on {
  const char* name;
  loss_policy on_loss;
  standby_policy standby;
};

class LossLines : public ::testing::TestWithParam<way_on> {};

INSTANTIATE_TEST_SUITE_P(
    Each, LossLines,
    ::testing::Values(way_on{"Rebuild", loss_policy::rebuild, standby_policy::none},
                      way_on{"SameMembers", loss_policy::rebuild, standby_policy::communicators},
                      way_on{"Spares", loss_policy::failover, standby_policy::full},
                      way_on{"Survivors", loss_policy::shrink, standby_policy::communicators}),
    [](const auto& x) { return std::string{x.param.name}; });

TEST_P(LossLines, OneForTheLossAndOneForTheWorldThatGoesOn) {
  TROUPE_NEEDS_DEVICES(3);
  struct {
    std::mutex mutex;
    std::vector<std::string> all; // without debug lines
  } lines;
  const auto count = [&](const std::string& what) {
    EXPECT_TRUE(detail::drain_log(patience));
    std::lock_guard lock{lines.mutex};
    return std::count_if(lines.all.begin(), lines.all.end(),
                         [&](auto& x) { return x.find(what) != std::string::npos; });
  };
  set_log_sink([&](const log_line& x) {
    std::lock_guard lock{lines.mutex};
    if (x.level != log_level::debug)
      lines.all.push_back(std::string{x.text} + (x.why != nullptr ? ": " + x.why->detail : ""));
  });
  {
    test_system system{in_worker_processes(3)};
    world_config config;
    config.name = "trainer";
    config.limits.on_loss = GetParam().on_loss;
    config.limits.standby = GetParam().standby;
    auto w = system.open_world(config);
    world_feed feed{system, w.actor()};
    auto before = feed.until([&](const world_status& x) {
      return x.phase == world_phase::ready &&
             (x.standby_ready || GetParam().standby == standby_policy::none);
    });
    for (int i = 1; i <= 2; ++i) {
      EXPECT_EQ(code_of(kill_worker(w.device_of(1))), errc::worker_lost);
      before = feed.until([&](const world_status& x) {
        return x.phase == world_phase::ready && x.epoch > before.epoch && x.members.size() == 3 &&
               (x.standby_ready || GetParam().standby == standby_policy::none);
      });
      EXPECT_EQ(count("device 1 is lost"), i);
      EXPECT_EQ(count("its worker, process"), i) << "it is told more than once";
      EXPECT_GE(count("world trainer is ready again after"), i);
      EXPECT_LE(count("world trainer is ready again after"), 2 * i); // with fewer, then all ranks
    }
  }
  set_log_sink({});
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
    EXPECT_EQ(code_of(kill_worker(w.device_of(static_cast<std::size_t>(i) % w.size()))),
              errc::worker_lost);
  }
  stop = true;
  client.join();
  EXPECT_TRUE(works(w));
}

TEST(WorkerBackend, GoesOnWithASpare) {
  TROUPE_NEEDS_DEVICES(2);
  constexpr int kills = 5;
  test_system system{in_worker_processes(3)};
  world_config config;
  config.limits.standby = standby_policy::full;
  config.limits.restarts = 1000;
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  const other_memory kept{w.device_of(0)};
  std::atomic<bool> stop = false;
  std::atomic<int> right = 0;
  std::thread client{[&] { add_up(w, stop, right); }};
  for (int i = 0; i < kills; ++i) {
    auto before = feed.until(
        [](const world_status& x) { return x.phase == world_phase::ready && x.standby_ready; });
    ASSERT_TRUE(goes_on(right, 3)) << "after " << i << " kills";
    spare_takes_over(w, feed, 1 + static_cast<std::size_t>(i) % (w.size() - 1), before);
  }
  ASSERT_TRUE(goes_on(right, 3));
  stop = true;
  client.join();
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(kept.is_there());
}

/// Otherwise the rank's operation would hold up its device for good.
TEST(WorkerBackend, RanksThatStallEndInWorkersWithoutThreads) {
  TROUPE_NEEDS_DEVICES(2);
  ASSERT_TRUE(launches_registered);
  test_system system{in_worker_processes(2)};
  world_config config;
  config.limits.stall_limit = 200ms;
  config.limits.restarts = 1000;
  config.collectives = collectives_policy::nccl; // a direct one may go on in another stream
  auto w = system.open_world(config);
  EXPECT_TRUE(works(w));
  const auto on_all = [&](const std::string& launch) {
    for (std::size_t i = 0; i < w.size(); ++i)
      must(answer_of(w.device_of(i).launch(launch, {}, {}, {})));
  };
  auto data = must(w.allocate<float>(1000));
  for (std::size_t i = 0; i < w.size(); ++i)
    must(answer_of(w.device_of(i).fill(data[i], 1.F)));
  on_all("give it threads"); // now all streams that are used below have their thread
  const auto before = w.status().members;
  on_all("take its threads");
  {
    const gate closed{true};
    const auto held = closed.hold_lane(w.device_of(1));
    ASSERT_TRUE(closed.wait_reached());
    EXPECT_TRUE(has_code(answer_of(w.all_reduce(data, reduce_op::sum)), errc::stalled));
  }
  EXPECT_TRUE(is_ok(answer_of(w.device_of(0).fill(data[0], 1.F), at_once)));
  on_all("give it threads");
  EXPECT_TRUE(works(w));
  EXPECT_EQ(w.status().members, before) << "a worker was killed";
}

std::int64_t parent_of(std::int64_t pid) {
  std::ifstream stat{"/proc/" + std::to_string(pid) + "/stat"};
  std::string all;
  std::getline(stat, all);
  // The name of the program, in brackets, may contain anything.
  std::istringstream rest{all.substr(all.rfind(')') + 1)};
  std::string state;
  std::int64_t parent = -1;
  rest >> state >> parent;
  return parent;
}

TEST(WorkerBackend, StatsNameTheProcess) {
  test_system system{in_worker_processes(1)};
  const auto d = must(device::open(system, 0));
  const auto first = must(answer_of(d.stats())).worker_pid;
  EXPECT_EQ(parent_of(first), ::getpid());
  EXPECT_EQ(code_of(kill_worker(d)), errc::worker_lost);
  const auto second = must(answer_of(d.stats())).worker_pid;
  EXPECT_NE(second, first);
  EXPECT_EQ(parent_of(second), ::getpid());
}

/// The world is notified of the loss when the device is already back.
TEST(WorkerBackend, AWorldWithMuchToReadGoesOnWithItsSpareAlone) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{in_worker_processes(2)};
  world_config config;
  config.limits.standby = standby_policy::full;
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  const auto before = feed.until(
      [](const world_status& x) { return x.phase == world_phase::ready && x.standby_ready; });
  const auto lost = w.device_of(1);
  device_feed lives{system, system.device_actor(1)};
  std::atomic<int> questions = 0;
  {
    std::jthread asks{[&](const std::stop_token& stop) {
      for (; !stop.stop_requested(); ++questions)
        detail::anon_send(w.actor(), get_status{});
    }};
    ASSERT_TRUE(eventually([&] { return questions > 10'000; }));
    EXPECT_EQ(code_of(kill_worker(lost)), errc::worker_lost);
    EXPECT_EQ(lives.until(device_phase::ready, 2).incarnation, 2u);
  }
  const auto now = feed.until(world_phase::ready, before.epoch + 1);
  EXPECT_EQ(now.membership, before.membership + 1);
  EXPECT_EQ(now.members[1].incarnation, 2u);
  EXPECT_TRUE(works(w));
}

} // namespace

} // namespace troupe::testing
