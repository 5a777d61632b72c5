/// Steps that run as one operation: as graphs, which GPUs record, and virtual devices of these
/// tests.
#include "assembly/worker_main.hpp"
#include "step/step_fixture.hpp"
#include "step/step_launches.hpp"
#include "support/eventually.hpp"
#include "support/folder.hpp"
#include "support/gate.hpp"
#include "support/recording_backend.hpp"
#include "support/worker_losses.hpp"
#include <troupe/launch.hpp>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

constexpr const char* failing_launch = "StepGraph.failing";
constexpr const char* beginning_launch = "StepGraph.beginning";
constexpr const char* later_failing_launch = "StepGraph.failing_later";
constexpr const char* refusing_launch = "StepGraph.refusing";
constexpr const char* recording_workers = "TROUPE_TEST_RECORDING_WORKERS";

/// A `beginning_launch` was called.
std::atomic<bool> one_has_begun{false};

/// Workers run the same program.
[[maybe_unused]] const bool registered = [] {
  must(register_launch(
      failing_launch,
      [](launch_context&, auto, auto, auto) {
        return make_error(errc::invalid_argument, "on purpose");
      },
      repetition::replays));
  // A worker of these tests records graphs, as the devices of the test's process do.
  if (const auto* files = std::getenv(recording_workers); files != nullptr)
    detail::wrap_backend_of_worker([=](std::shared_ptr<backend> inner) {
      std::vector<std::shared_ptr<recorder>> all;
      for (int i = 0; i < inner->device_count(); ++i) {
        all.push_back(std::make_shared<recorder>());
        all.back()->file = files + std::to_string(i);
      }
      return std::make_shared<recording_backend>(std::move(inner), std::move(all));
    });
  must(register_launch(
      beginning_launch,
      [](launch_context&, auto, auto, auto) {
        one_has_begun = true;
        one_has_begun.notify_all();
        return caf::error{};
      },
      repetition::replays));
  library_launch later;
  later.enqueue = [](launch_context&, auto, auto, auto) {
    one_has_begun.wait(false);
    return make_error(errc::out_of_memory, "on purpose");
  };
  later.repeats = repetition::replays;
  must(register_launch(later_failing_launch, std::move(later)));
  // Does not do what its registration says.
  must(register_launch(
      refusing_launch,
      [](launch_context& context, auto, auto, auto) { return context.run_on_host([] {}); },
      repetition::replays));
  return true;
}();

/// y = sum over all ranks of x, x = y
recording sum_and_copy() {
  recording r;
  r.copy("y", "x").all_reduce("y").copy("x", "y");
  return r;
}

class StepGraph : public Step {
protected:
  static constexpr int devices = 3;

  StepGraph() : StepGraph(recorders(), files_of_workers()) {}
  ~StepGraph() override { ::unsetenv(recording_workers); }

  /// Returns whether the devices are virtual ones of this process, which do as the test says.
  static bool are_recorders() { return !on_cuda() && !in_workers(); }

  /// Checks that each device has done that `times` times. GPUs count nothing.
  ::testing::AssertionResult each(std::atomic<int> recorder::* what, int times) const {
    for (std::size_t i = 0; i < w_.size() && are_recorders(); ++i)
      if (const int got = (*recorders_[i]).*what; got != times)
        return ::testing::AssertionFailure() << "device " << i << ": " << got;
    return ::testing::AssertionSuccess();
  }
  /// Checks that each device has recorded and launched so many graphs, also in a worker.
  ::testing::AssertionResult graphs(int recorded, int launched) const {
    for (std::size_t i = 0; i < w_.size() && !on_cuda() && in_workers(); ++i)
      for (const auto& [what, times] :
           {std::pair{".recorded", recorded}, {".launched", launched}}) {
        std::ifstream file{files_->file(std::to_string(i) + what)};
        const std::string all{std::istreambuf_iterator<char>{file}, {}};
        if (all.size() != static_cast<std::size_t>(times))
          return ::testing::AssertionFailure() << "worker " << i << what << ": " << all.size();
      }
    const auto first = each(&recorder::recorded, recorded);
    return first ? each(&recorder::launched, launched) : first;
  }

  /// Runs a step over x, which is full of `value`, and checks the sum over all ranks each time.
  void run_sums(const step& what, const refs& x, element value, int runs) {
    for (int i = 0; i < runs; ++i) {
      must(answer_of(what.run()));
      value *= static_cast<element>(w_.size());
      EXPECT_EQ(content(x), same(value));
    }
  }
  /// Records `sum_and_copy`, and does that with it.
  step run_sums(int runs) {
    auto x = filled(1), y = allocate();
    auto result = must(w_.record(sum_and_copy(), {{"x", x}, {"y", y}}));
    run_sums(result, x, 1, runs);
    return result;
  }

  static world_config direct() {
    world_config result;
    result.collectives = collectives_policy::direct;
    return result;
  }

  void refuse_copies() {
    for (auto& x : recorders_)
      x->refuses_copies = true;
  }

  void fail_once() {
    for (auto& x : recorders_)
      x->fails_once = true;
  }

private:
  using recorder_list = std::vector<std::shared_ptr<recorder>>;

  static std::shared_ptr<folder> files_of_workers() {
    auto result = std::make_shared<folder>();
    if (!on_cuda())
      ::setenv(recording_workers, result->file("").c_str(), 1); // before a worker starts
    return result;
  }
  static recorder_list recorders() {
    recorder_list result;
    for (int i = 0; i < devices; ++i)
      result.push_back(std::make_shared<recorder>());
    return result;
  }
  StepGraph(const recorder_list& all, std::shared_ptr<folder> files)
      : Step({.devices = devices,
              .wrap = [all](std::shared_ptr<backend> inner) -> std::shared_ptr<backend> {
                if (!are_recorders())
                  return inner;
                return std::make_shared<recording_backend>(std::move(inner), all);
              }},
             direct()),
        recorders_(all), files_(std::move(files)) {}

  const recorder_list recorders_;
  const std::shared_ptr<folder> files_;
};

TEST_F(StepGraph, IsRecordedOnceAndLaunched) {
  auto x = filled(1), y = allocate();
  const auto step = must(w_.record(sum_and_copy(), {{"x", x}, {"y", y}}));
  EXPECT_EQ(step.runs_as(), "as a graph on each device");
  element want = 1;
  for (int i = 0; i < 5; ++i) {
    const auto run = step.run();
    EXPECT_EQ(must(answer_of(run)).operation, run.number());
    want *= static_cast<element>(w_.size());
    EXPECT_EQ(content(x), same(want));
  }
  EXPECT_TRUE(graphs(1, 4)); // the first run is not a graph
}

TEST_F(StepGraph, IsInOrderWithOtherRequests) {
  auto x = allocate(), y = allocate();
  const auto step = must(w_.record(sum_and_copy(), {{"x", x}, {"y", y}}));
  constexpr std::size_t runs = 50;
  rows got(runs, row(count));
  std::vector<pending<void>> seen;
  for (std::size_t i = 0; i < runs; ++i) {
    w_.fill(x, static_cast<element>(i));
    step.run();
    const auto rank = i % w_.size();
    seen.push_back(w_.device_of(rank).download(x[rank], got[i]));
  }
  for (auto& one : seen)
    ASSERT_TRUE(is_ok(answer_of(one)));
  for (std::size_t i = 0; i < runs; ++i)
    ASSERT_EQ(got[i], row(count, static_cast<element>(i * w_.size()))) << "run " << i;
}

/// Another world has the stream that this one would have alone.
TEST_F(StepGraph, HasAllItsWorkInTheStreamOfItsWorld) {
  auto x = filled(1), y = allocate();
  const auto step = must(w_.record(sum_and_copy(), {{"x", x}, {"y", y}}));
  const auto other = system_.open_world(direct());
  auto busy = must(other.allocate<element>(count));
  must(answer_of(other.fill(busy, element{1})));
  gate held;
  auto holding = held.hold_stream(w_.device_of(1), {}, {busy[1]});
  ASSERT_TRUE(held.wait_reached());
  auto summing = other.all_reduce(busy);
  run_sums(step, x, 1, 5);
  EXPECT_FALSE(summing.ready());
  held.open();
  must(answer_of(holding));
  must(answer_of(summing));
  EXPECT_TRUE(graphs(1, 4));
}

/// Each run makes x = sum over all ranks r of 3 * x + r, or of x, with a device that is late at
/// random.
TEST_F(StepGraph, IsReplayedAThousandTimes) {
  constexpr std::size_t runs = 1000;
  recording r;
  for (int rank = 0; rank <= last() && on_cuda(); ++rank)
    r.on(rank).launch(affine_launch, to_bytes(affine{3, static_cast<element>(rank)}), {"x"}, {"y"});
  if (!on_cuda())
    r.copy("y", "x");
  r.all_reduce("y").copy("x", "y");
  auto x = filled(1), y = allocate();
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}}));
  std::vector<pending<step_done>> done;
  std::vector<pending<void>> seen;
  rows got(runs, row(count));
  for (std::size_t i = 0; i < runs; ++i) {
    const auto late = random_() % w_.size();
    w_.device_of(late).launch(delay_launch, to_bytes(std::uint32_t{300}), {x[late]}, {});
    done.push_back(step.run());
    const auto rank = i % w_.size();
    seen.push_back(w_.device_of(rank).download(x[rank], got[i]));
  }
  element want = 1;
  const auto ranks = static_cast<element>(w_.size());
  for (std::size_t i = 0; i < runs; ++i) {
    ASSERT_TRUE(is_ok(answer_of(done[i]))) << "run " << i;
    ASSERT_TRUE(is_ok(answer_of(seen[i]))) << "run " << i;
  }
  for (std::size_t i = 0; i < runs; ++i) {
    want = on_cuda() ? ranks * 3 * want + ranks * (ranks - 1) / 2 : ranks * want;
    ASSERT_EQ(got[i], row(count, want)) << "run " << i;
  }
  EXPECT_EQ(step.runs_as(), "as a graph on each device");
  EXPECT_TRUE(graphs(1, runs - 1));
}

TEST_F(StepGraph, IsRecordedAgainForOtherBuffers) {
  auto x = filled(1), y = allocate();
  const auto step = must(w_.record(sum_and_copy(), {{"x", x}, {"y", y}}));
  for (int i = 0; i < 2; ++i)
    must(answer_of(step.run()));
  auto before = step.run();
  auto z = filled(5);
  must(step.rebind("x", z));
  for (int i = 0; i < 3; ++i)
    must(answer_of(step.run()));
  must(answer_of(std::exchange(before, {})));
  const auto ranks = static_cast<element>(w_.size());
  EXPECT_EQ(content(x), same(ranks * ranks * ranks));
  EXPECT_EQ(content(z), same(5 * ranks * ranks * ranks));
  EXPECT_TRUE(graphs(2, 4));
  EXPECT_TRUE(eventually([&] { return each(&recorder::dropped, 1) == true; }));
}

TEST_F(StepGraph, RunsAgainAfterAReset) {
  auto x = filled(1), y = allocate();
  const auto step = must(w_.record(sum_and_copy(), {{"x", x}, {"y", y}}));
  for (int i = 0; i < 3; ++i)
    must(answer_of(step.run()));
  must(answer_of(w_.device_of(0).reset()));
  EXPECT_TRUE(has_code(answer_of(step.run()), errc::stale_ref));
  x = filled(2);
  y = allocate();
  must(step.rebind("x", x));
  must(step.rebind("y", y));
  run_sums(step, x, 2, 3);
  EXPECT_TRUE(graphs(2, 4));
}

/// A range of no bytes needs its memory, too, as it does in a request alone.
TEST_F(StepGraph, NeedsTheMemoryOfEmptyRanges) {
  auto x = filled(1), y = filled(1);
  recording r;
  r.copy({"y", 0, 0}, {"y", 0, 0}).all_reduce("x");
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}}));
  must(answer_of(step.run()));
  must(answer_of(w_.device_of(0).reset()));
  const auto none = must(y[0].slice(0, 0));
  EXPECT_TRUE(has_code(answer_of(w_.device_of(0).fill(none, element{1})), errc::stale_ref));
  must(step.rebind("x", filled(1)));
  EXPECT_TRUE(has_code(answer_of(step.run()), errc::stale_ref));
  must(step.rebind("x", filled(1)));
  must(step.rebind("y", filled(1)));
  must(answer_of(step.run()));
}

TEST_F(StepGraph, SaysWhyItIsNone) {
  auto x = filled(1), y = filled(1);
  recording late;
  late.launch(delay_launch, to_bytes(std::uint32_t{1}), {"x"}, {}).all_reduce("x");
  EXPECT_EQ(must(w_.record(late, {{"x", x}})).runs_as(),
            "as its requests: the launch \"StepLaunches.delay\" is not registered with "
            "repetition::replays");
}

/// Nothing would keep the function for the next run.
TEST_F(StepGraph, HasNoFunctionsOfTheHost) {
  if (in_workers())
    GTEST_SKIP() << "for devices of this process: a worker keeps the function of the first run";
  auto x = filled(1), y = filled(1);
  recording r;
  r.all_reduce("x").launch(refusing_launch, {}, {}, {"y"});
  const auto why = error_of(answer_of(must(w_.record(r, {{"x", x}, {"y", y}})).run()));
  EXPECT_NE(text_of(why).find("request 2 of the step (launch)"), std::string::npos) << text_of(why);
  EXPECT_NE(text_of(why).find("a function of the host"), std::string::npos) << text_of(why);
}

/// CUDA cannot record everything.
TEST_F(StepGraph, RunsWithoutAGraphWhereNoneCanBeMade) {
  if (!are_recorders())
    GTEST_SKIP() << "on virtual devices of this process: one that records no copies";
  refuse_copies();
  const auto step = run_sums(4);
  EXPECT_EQ(step.runs_as().find("as its requests: "), 0u) << step.runs_as();
  EXPECT_NE(step.runs_as().find("a copy is not recorded"), std::string::npos) << step.runs_as();
  EXPECT_TRUE(each(&recorder::recorded, 0));
}

/// Another thread may have called what CUDA allows no thread meanwhile.
TEST_F(StepGraph, IsRecordedLaterIfThatFailsOnce) {
  if (!are_recorders())
    GTEST_SKIP() << "on virtual devices of this process: a recording that fails";
  fail_once();
  const auto step = run_sums(4);
  EXPECT_EQ(step.runs_as(), "as a graph on each device");
  EXPECT_TRUE(each(&recorder::recorded, 1));
  EXPECT_TRUE(each(&recorder::launched, 2));
}

/// A collective without elements enqueues nothing, and collectives behind the step have no place.
TEST_F(StepGraph, TellsThePlacesOfItsCollectives) {
  auto x = filled(1), y = filled(1);
  recording r;
  r.all_reduce({"x", 0, 0}).fill("x", element{2}).all_reduce("x");
  const auto step = must(w_.record(r, {{"x", x}}));
  for (int i = 0; i < 3; ++i) {
    must(answer_of(step.run()));
    must(answer_of(w_.all_reduce(y)));
  }
  EXPECT_TRUE(each(&recorder::places, 2)); // in the first run and as it was recorded
  EXPECT_TRUE(each(&recorder::place, 3));
}

/// A step whose input on one device failed also fails on those where it has begun.
TEST_F(StepGraph, FailsWhileADeviceHasNotBegun) {
  gate lane;
  auto x = filled(1), y = allocate();
  const auto step = must(w_.record(sum_and_copy(), {{"x", x}, {"y", y}}));
  const auto on = w_.device_of(1);
  auto held = lane.hold_lane(on);
  ASSERT_TRUE(lane.wait_reached());
  auto fails = on.launch(failing_launch, {}, {}, {x[1]});
  auto run = step.run();
  EXPECT_TRUE(eventually([&] { return must(answer_of(w_.device_of(0).stats())).in_flight != 0; }));
  lane.open();
  EXPECT_TRUE(is_ok(answer_of(held)));
  EXPECT_TRUE(has_code(answer_of(fails), errc::launch_failed));
  EXPECT_TRUE(error_of(answer_of(run)));
  EXPECT_TRUE(eventually([&] { return is_ok(answer_of(w_.fill(x, element{1}))) == true; }));
  EXPECT_TRUE(eventually([&] { return is_ok(answer_of(step.run())) == true; }));
}

/// Another rank that does not make the step must not meet the collective with its next one.
TEST_F(StepGraph, EndsTheCommunicatorIfItFailsBehindACollective) {
  gate lane;
  auto x = filled(1), y = filled(1), z = filled(5);
  recording r;
  r.all_reduce("x").on(0).launch(failing_launch, {}, {}, {"y"});
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}}));
  world_feed feed{system_, w_.actor()};
  const auto before = feed.until(world_phase::ready);
  auto held = lane.hold_lane(w_.device_of(1));
  ASSERT_TRUE(lane.wait_reached());
  auto run = step.run();
  const auto why = error_of(answer_of(run));
  EXPECT_NE(text_of(why).find("request 2 of the step (launch)"), std::string::npos) << text_of(why);
  lane.open();
  EXPECT_TRUE(is_ok(answer_of(held)));
  feed.until(world_phase::ready, before.epoch + 1);
  must(answer_of(w_.all_reduce(z)));
  EXPECT_EQ(content(z), same(5 * static_cast<element>(w_.size())));
}

/// The communicator can still be used: no rank waits for another one.
TEST_F(StepGraph, KeepsTheCommunicatorIfItFailsWithoutCollectives) {
  if (in_workers())
    GTEST_SKIP() << "a launch of one rank waits for that of another";
  auto x = filled(1), z = filled(5);
  recording r;
  r.on(1).launch(beginning_launch, {}, {}, {"x"});
  r.on(0).launch(later_failing_launch, {}, {}, {"x"});
  const auto step = must(w_.record(r, {{"x", x}}));
  world_feed feed{system_, w_.actor()};
  const auto before = feed.until(world_phase::ready);
  one_has_begun = false;
  const auto why = error_of(answer_of(step.run()));
  EXPECT_NE(text_of(why).find("request 2 of the step (launch)"), std::string::npos) << text_of(why);
  must(answer_of(w_.all_reduce(z)));
  EXPECT_EQ(content(z), same(5 * static_cast<element>(w_.size())));
  EXPECT_EQ(w_.status().epoch, before.epoch);
}

TEST_F(StepGraph, NamesTheRequestThatFailed) {
  auto x = filled(1), y = filled(1);
  recording r;
  r.fill("y", element{2}).on(1).launch(failing_launch, {}, {}, {"x"});
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}}));
  const auto why = error_of(answer_of(step.run()));
  EXPECT_NE(text_of(why).find("request 2 of the step (launch)"), std::string::npos) << text_of(why);
  for (auto& ref : {x[1], y[1]}) // the step failed as a whole
    EXPECT_TRUE(has_code(w_.device_of(1).download(ref), errc::indeterminate));
  must(answer_of(w_.fill(x, element{3})));
  EXPECT_EQ(content(x), same(3));
}

/// It needs no former content of memory that it has written itself.
TEST_F(StepGraph, ReadsOnlyWhatItHasNotWritten) {
  auto x = filled(1), y = filled(1);
  EXPECT_FALSE(answer_of(w_.device_of(0).launch(failing_launch, {}, {}, {y[0]})));
  const auto reads = must(w_.record(sum_and_copy(), {{"x", y}, {"y", x}}));
  EXPECT_TRUE(has_code(answer_of(reads.run()), errc::indeterminate));
  must(answer_of(w_.fill(x, element{1})));
  const auto writes = must(w_.record(sum_and_copy(), {{"x", x}, {"y", y}}));
  for (int i = 0; i < 3; ++i)
    must(answer_of(writes.run()));
  const auto ranks = static_cast<element>(w_.size());
  EXPECT_EQ(content(y), same(ranks * ranks * ranks));
}

/// Parts of buffers that overlap are one use after the other.
TEST_F(StepGraph, UsesPartsOfBuffers) {
  auto x = filled(1);
  recording r;
  r.fill({"x", 0, 8}, element{2}).fill({"x", 4, 8}, element{3}).all_reduce({"x", 2, 4});
  const auto step = must(w_.record(r, {{"x", x}}));
  const auto ranks = static_cast<element>(w_.size());
  const row want{2, 2, 2 * ranks, 2 * ranks, 3 * ranks, 3 * ranks, 3, 3, 3, 3, 3, 3};
  for (int i = 0; i < 3; ++i) {
    must(answer_of(step.run()));
    EXPECT_EQ(content(x), rows(w_.size(), want));
  }
}

TEST_F(StepGraph, RunsInManyThreads) {
  constexpr int threads = 3, runs = 100;
  auto x = filled(0), one = filled(1), y = allocate();
  recording r;
  r.copy("y", "one").all_reduce("y").all_reduce("x").copy("x", "y");
  const auto step = must(w_.record(r, {{"x", x}, {"one", one}, {"y", y}}));
  std::vector<std::jthread> all;
  for (int i = 0; i < threads; ++i)
    all.emplace_back([&] {
      for (int k = 0; k < runs; ++k) {
        w_.fill(x, element{7}); // comes before or behind a step, never inside
        EXPECT_TRUE(is_ok(answer_of(step.run())));
      }
    });
  all.clear();
  must(answer_of(step.run()));
  EXPECT_EQ(content(x), same(static_cast<element>(w_.size())));
}

/// A rank waits in its second sum for the other one, which is late.
TEST_F(StepGraph, SaysHowFarItCameWhenItStalls) {
  if (!on_cuda())
    GTEST_SKIP() << "on GPUs: a kernel that takes long";
  world_config config;
  config.collectives = collectives_policy::direct;
  config.limits.stall_limit = 500ms;
  const auto w = system_.open_world(config);
  const auto x = must(w.allocate<element>(count));
  const auto us = must(w.allocate<element>(1));
  w.fill(x, element{1});
  w.fill(us, element{10});
  recording r;
  r.all_reduce("x").on(1).launch(wait_launch, {}, {"us"}, {});
  r.copy("y", "x").all_reduce("x");
  const auto y = must(w.allocate<element>(count));
  const auto step = must(w.record(r, {{"x", x}, {"y", y}, {"us", us}}));
  for (int i = 0; i < 3; ++i)
    must(answer_of(step.run()));
  w.fill(us, element{3'000'000});
  const auto late = step.run();
  const auto why = error_of(answer_of(late));
  EXPECT_TRUE(has_code(why, errc::stalled));
  EXPECT_NE(text_of(why).find("of 4 requests of the step, they are past 1, 1"), std::string::npos)
      << text_of(why);
  const folder files;
  const auto path = files.file("flight.json");
  EXPECT_TRUE(eventually([&] { // it is there once a rank's kernels have ended
    must(answer_of(write_flight_record(system_, path)));
    std::ifstream file{path};
    const std::string text{std::istreambuf_iterator<char>{file}, {}};
    return text.find("\"reached\":1,") != std::string::npos;
  }));
  w.fill(us, element{10});
  EXPECT_TRUE(eventually([&] { return is_ok(answer_of(w.fill(x, element{1}))) == true; }));
  EXPECT_TRUE(eventually([&] { return is_ok(answer_of(step.run())) == true; }));
}

/// The spare records it, too. Memory is kept, so the handles are valid there.
TEST_F(StepGraph, IsRecordedAgainByASpare) {
  if (!in_workers())
    GTEST_SKIP() << "for devices that are lost alone";
  world_config config;
  config.collectives = collectives_policy::direct;
  config.limits.standby = standby_policy::spares;
  config.limits.restarts = 1000;
  config.limits.restart_backoff = 1ms;
  const auto w = system_.open_world(config);
  world_feed feed{system_, w.actor()};
  auto x = must(w.allocate<element>(count)), y = must(w.allocate<element>(count));
  must(answer_of(w.fill(x, element{1})));
  const auto step = must(w.record(sum_and_copy(), {{"x", x}, {"y", y}}));
  element want = 1;
  for (int kills = 0; kills < 3; ++kills) {
    for (int i = 0; i < 3; ++i) {
      must(answer_of(step.run()));
      want *= static_cast<element>(w.size());
    }
    EXPECT_EQ(must(w.download(x)), rows(w.size(), row(count, want)));
    const auto before = feed.until([](const world_status& now) {
      return now.phase == world_phase::ready && now.standby_ready;
    });
    EXPECT_TRUE(has_code(kill_worker(w.device_of(1)), errc::worker_lost));
    feed.until(world_phase::ready, before.epoch + 1);
  }
  EXPECT_EQ(step.runs_as(), "as a graph on each device");
  EXPECT_TRUE(graphs(3, 6));
  EXPECT_EQ(must(w.download(x)), rows(w.size(), row(count, want)));
}

/// A step that has not begun is withdrawn as a whole.
TEST_F(StepGraph, IsCancelledAsAWhole) {
  gate lanes;
  auto x = filled(1), y = allocate();
  const auto step = must(w_.record(sum_and_copy(), {{"x", x}, {"y", y}}));
  must(answer_of(step.run()));
  std::vector<pending<void>> before;
  for (auto& on : devices_of(w_))
    before.push_back(lanes.hold_lane(on));
  ASSERT_TRUE(lanes.wait_reached());
  auto cancelled = step.run();
  auto late = step.run({.deadline = 50ms});
  cancelled.cancel();
  EXPECT_TRUE(has_code(answer_of(cancelled), errc::cancelled));
  EXPECT_TRUE(has_code(answer_of(late), errc::deadline_exceeded));
  lanes.open();
  for (auto& one : before)
    EXPECT_TRUE(is_ok(answer_of(one)));
  for (std::size_t rank = 0; rank < w_.size(); ++rank)
    EXPECT_TRUE(has_code(w_.device_of(rank).download(x[rank]), errc::skipped)) << "by the late one";
  const auto again = step.run({.retry_of = late.number()});
  must(answer_of(again));
  EXPECT_EQ(content(x), same(static_cast<element>(w_.size() * w_.size())));
}

} // namespace

} // namespace troupe::testing
