// Devices that are handed over to their spares.

#include "support/folder.hpp"
#include "worker/handover_fixture.hpp"
#include <troupe/launch.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>

namespace troupe::testing {

namespace {

constexpr const char* write_when_told = "Handover.write_when_told";
constexpr const char* library_name = "Handover.library";
constexpr const char* times_prepared = "Handover.times_prepared";

/// Counts how often the process has prepared a launch for so many elements.
struct preparations final : library_state {
  std::map<std::size_t, std::uint32_t> times;
};

preparations& preparations_of(const launch_context& context) {
  return dynamic_cast<preparations&>(*context.library(library_name));
}

/// Workers run the same program, so the launch is registered there too.
[[maybe_unused]] const bool registered = [] {
  // Makes a file with ".begun" behind the name in its argument. Once the file of that name is
  // there, writes 1 to all of the buffer.
  must(register_launch(write_when_told, [](launch_context& context, auto, auto writes, auto path) {
    auto* to = static_cast<std::uint32_t*>(must(writes.front().access()));
    return context.run_on_host(
        [=, n = writes.front().count(),
         file = std::string{reinterpret_cast<const char*>(path.data()), path.size()}] {
          std::ofstream{file + ".begun"} << "begun";
          while (!std::filesystem::exists(file))
            std::this_thread::yield();
          std::fill_n(to, n, 1u);
        });
  }));
  must(register_library(library_name, [](launch_context&) {
    return caf::expected<std::unique_ptr<library_state>>{std::make_unique<preparations>()};
  }));
  library_launch launch;
  launch.prepare = [](launch_context& context, auto, auto writes, auto) {
    ++preparations_of(context).times[writes.front().count];
    return caf::error{};
  };
  launch.enqueue = [](launch_context& context, auto, auto writes, auto) {
    const auto& to = writes.front();
    return context.run_on_host([=, times = preparations_of(context).times[to.count]] {
      std::fill_n(static_cast<std::uint32_t*>(to.address), to.count, times);
    });
  };
  must(register_launch(times_prepared, std::move(launch)));
  return true;
}();

class Handover : public HandoverTest {
protected:
  void SetUp() override { TROUPE_HOST_ONLY("launches that compute on the host"); }
  void TearDown() override { // before the files, which launches wait for
    device_ = {};
    system_.reset();
  }

  /// A launch that writes 1 to a buffer when it is told to.
  struct held_write {
    std::string file;
    pending<void> done;
    void go_on() const { std::ofstream{file} << "go on"; }
  };
  /// Returns when it has begun.
  held_write hold(const any_gpu_ref& to, const request_options& options = {}) {
    held_write result{folder_.file("go " + std::to_string(++launches_)), {}};
    result.done = device_.launch(write_when_told, {result.file.begin(), result.file.end()}, {},
                                 {to}, options);
    EXPECT_TRUE(eventually([&] { return std::filesystem::exists(result.file + ".begun"); }));
    return result;
  }

  /// Waits until the handover has begun. Returns a request that waits for its end: it writes `to`.
  pending<void> wait_until_begun(const any_gpu_ref& to, const elements& content) const {
    pending<void> result;
    EXPECT_TRUE(eventually([&] {
      result = device_.upload(to, host_buffer{content}); // in a stream without the held launch
      return !must(result.wait_for(500ms));
    }));
    return result;
  }

  folder folder_;
  int launches_ = 0;
};

TEST_F(Handover, MovesADeviceWithItsMemory) {
  start();
  device_feed feed{*system_, system_->device_actor()};
  feed.until(device_phase::ready, 1);
  auto memory = filled(device_, counted(1));
  const auto* address = must(memory.access());
  auto process = worker_of(device_);
  for (std::uint64_t life = 2; life < 7; ++life) {
    if (life % 2 == 0)
      EXPECT_EQ(must(answer_of(device_.hand_over())), life);
    else
      EXPECT_EQ(must(ask<std::uint64_t>(*system_, system_->device_actor(), hand_over{})), life);
    const auto former = std::exchange(process, worker_of(device_));
    EXPECT_NE(former, process);
    EXPECT_TRUE(eventually([&] { return !is_there(former); }));
    EXPECT_EQ(device_.incarnation(), life);
    EXPECT_EQ(device_.generation(), 1u);
    EXPECT_EQ(feed.until(device_phase::ready, life).generation, 1u);
    EXPECT_FALSE(memory.stale());
    EXPECT_EQ(must(memory.access()), address);
    EXPECT_TRUE(holds(device_, memory, counted(1)));
    EXPECT_TRUE(works(device_));
  }
}

/// A request that waits for the end of the handover would use memory that is not there any more.
TEST_F(Handover, FailsWhatWaitsIfItsMemoryIsLost) {
  start();
  const auto memory = filled(device_, counted(1));
  const auto held = hold(filled(device_, counted(2)));
  moves_->loses_memory = true;
  auto moved = device_.hand_over();
  auto waiting = wait_until_begun(memory, counted(3));
  held.go_on();
  EXPECT_TRUE(has_code(answer_of(waiting), errc::worker_lost));
  static_cast<void>(answer_of(moved));
  EXPECT_TRUE(memory.stale());
  EXPECT_EQ(device_.generation(), 2u);
  EXPECT_TRUE(works(device_));
}

/// After a move the launch is prepared again, besides in advance.
TEST_F(Handover, PreparesLaunchesInSpares) {
  start();
  const auto times = [&](const any_gpu_ref& memory) {
    must(answer_of(device_.launch(times_prepared, {}, {}, {memory})));
    return must(device_.download(must(gpu_ref<std::uint32_t>::from(memory)))).front();
  };
  const auto first = filled(device_, elements(3));
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(times(first), 1u);
  must(answer_of(device_.hand_over())); // to a spare that starts now
  EXPECT_EQ(times(first), 2u);
  const auto w = open_with_spares();
  EXPECT_TRUE(eventually([&] { return w.status().standby_ready; }));
  const auto second = filled(device_, elements(5));
  EXPECT_EQ(times(second), 1u);
  must(answer_of(device_.hand_over())); // to the spare that was there
  EXPECT_EQ(times(second), 2u);
  EXPECT_EQ(times(first), 2u);
}

/// The memory is moved while its process is alive, so it is trusted.
TEST_F(Handover, MovesMemoryThatALossWouldEnd) {
  start(1, kept_memory::none);
  auto memory = filled(device_, counted(1));
  EXPECT_EQ(must(answer_of(device_.hand_over())), 2u);
  EXPECT_TRUE(holds(device_, memory, counted(1)));
  EXPECT_EQ(code_of(kill_worker(device_)), errc::worker_lost);
  EXPECT_TRUE(eventually([&] { return works(device_) == true; }));
  EXPECT_TRUE(memory.stale());
}

TEST_F(Handover, ComesBetweenTwoRequests) {
  start();
  auto written = filled(device_, counted(0));
  auto beside = filled(device_, counted(5));
  const auto held = hold(written);
  auto behind = device_.fill(must(written.slice(0, 1)), 2u);
  auto moved = device_.hand_over();
  const auto waits = wait_until_begun(beside, elements(count, 6));
  EXPECT_FALSE(moved.ready());
  EXPECT_EQ(device_.incarnation(), 1u);
  EXPECT_TRUE(has_code(answer_of(device_.hand_over()), errc::unavailable));
  held.go_on();
  EXPECT_EQ(must(answer_of(moved)), 2u);
  must(answer_of(held.done));
  must(answer_of(behind));
  must(answer_of(waits));
  elements content(count, 1);
  content.front() = 2;
  EXPECT_TRUE(holds(device_, written, content));
  EXPECT_TRUE(holds(device_, beside, elements(count, 6)));
}

TEST_F(Handover, ContinuesIfItIsCancelledOnceItHasBegun) {
  start();
  auto written = filled(device_, counted(0));
  auto beside = filled(device_, counted(5));
  const auto held = hold(written);
  auto moved = device_.hand_over();
  const auto waits = wait_until_begun(beside, elements(count, 6));
  moved.cancel();
  const auto why = error_of(answer_of(moved));
  EXPECT_TRUE(has_code(why, errc::cancelled));
  EXPECT_NE(describe(why).find("continues"), std::string::npos) << describe(why);
  held.go_on();
  must(answer_of(waits));
  EXPECT_TRUE(eventually([&] { return device_.incarnation() == 2; }));
  EXPECT_TRUE(holds(device_, written, elements(count, 1)));
  EXPECT_TRUE(holds(device_, beside, elements(count, 6)));
}

TEST_F(Handover, ChangesNothingIfItEndsBeforeItBegins) {
  start();
  auto memory = filled(device_, counted(3));
  {
    const closed_door no_spare{ways_->spares};
    auto late = answer_of(device_.hand_over({.deadline = 20ms}));
    EXPECT_TRUE(has_code(late, errc::deadline_exceeded));
    EXPECT_NE(describe(late.error()).find("nothing has changed"), std::string::npos);
    EXPECT_TRUE(
        has_code(answer_of(device_.hand_over({.deadline = -1ns})), errc::deadline_exceeded));
    EXPECT_TRUE(holds(device_, memory, counted(3)));
  }
  // The one that was late is over soon.
  pending<std::uint64_t> moved;
  EXPECT_TRUE(eventually([&] {
    moved = device_.hand_over();
    return code_of(error_of(answer_of(moved))) != errc::unavailable;
  }));
  EXPECT_EQ(must(answer_of(moved)), 2u);
  EXPECT_TRUE(holds(device_, memory, counted(3)));
}

TEST_F(Handover, IsCancelledBeforeItBegins) {
  start();
  const closed_door no_spare{ways_->spares};
  auto moved = device_.hand_over();
  moved.cancel();
  EXPECT_TRUE(has_code(answer_of(moved), errc::cancelled));
  EXPECT_TRUE(works(device_));
  EXPECT_EQ(device_.incarnation(), 1u);
}

TEST_F(Handover, IsRefusedWhereItIsImpossible) {
  {
    test_system in_process{{.devices = 1}};
    if (!in_workers()) {
      const auto d = in_process.open();
      EXPECT_TRUE(has_code(answer_of(d.hand_over()), errc::not_supported));
      EXPECT_TRUE(works(d));
    }
  }
  EXPECT_TRUE(has_code(answer_of(device{}.hand_over()), errc::invalid_argument));
  start();
  device_.shutdown();
  EXPECT_TRUE(has_code(answer_of(device_.hand_over()), errc::unavailable));
}

TEST_F(Handover, EndsWithTheLossOfItsDevice) {
  start();
  auto written = filled(device_, counted(0));
  auto beside = filled(device_, counted(5));
  const auto process = worker_of(device_);
  const auto held = hold(written);
  auto moved = device_.hand_over();
  const auto waits = wait_until_begun(beside, elements(count, 6));
  kill_now(process);
  EXPECT_TRUE(has_code(answer_of(held.done).error(), errc::worker_lost));
  EXPECT_TRUE(has_code(answer_of(moved), errc::worker_lost));
  must(answer_of(waits)); // it was not in the lost process
  EXPECT_TRUE(holds(device_, beside, elements(count, 6)));
  EXPECT_EQ(device_.incarnation(), 2u);
  EXPECT_EQ(must(answer_of(device_.hand_over())), 3u);
  EXPECT_TRUE(holds(device_, beside, elements(count, 6)));
}

/// A request that waits for the handover, and uses a buffer of an earlier one, is made again behind
/// that, which otherwise could not be made again.
TEST_F(Handover, KeepsRequestsThatAreMadeAgainInOrder) {
  start();
  auto written = filled(device_, counted(0));
  auto copied = filled(device_, counted(1));
  auto beside = filled(device_, counted(5));
  const auto process = worker_of(device_);
  const request_options again{.max_retries = 3};
  const auto held = hold(written, again);
  auto moved = device_.hand_over();
  const auto waits = wait_until_begun(beside, elements(count, 6));
  auto copying = device_.copy(copied, written, again);
  auto filling = device_.fill(written, 7u, again);
  auto last = device_.fill(copied, 8u, again); // behind the copy, which waits too
  kill_now(process);
  EXPECT_TRUE(has_code(answer_of(moved), errc::worker_lost));
  must(answer_of(waits));
  EXPECT_FALSE(held.done.ready());
  held.go_on();
  for (const auto& x : {held.done, copying, filling, last})
    EXPECT_TRUE(is_ok(answer_of(x)));
  EXPECT_TRUE(holds(device_, written, elements(count, 7)));
  EXPECT_TRUE(holds(device_, copied, elements(count, 8)));
}

TEST_F(Handover, EndsWithAReset) {
  start();
  auto written = filled(device_, counted(0));
  const auto held = hold(written);
  auto moved = device_.hand_over();
  EXPECT_TRUE(eventually([&] { return !must(device_.stats().wait_for(100ms)); }));
  auto reset = device_.reset();
  EXPECT_TRUE(has_code(answer_of(moved), errc::device_reset));
  held.go_on();
  EXPECT_EQ(must(answer_of(reset)), 2u);
  EXPECT_TRUE(works(device_));
  EXPECT_EQ(must(answer_of(device_.hand_over())), 3u);
}

TEST_F(Handover, EndsWithItsDevice) {
  start();
  auto written = filled(device_, counted(0));
  const auto held = hold(written);
  auto moved = device_.hand_over();
  EXPECT_TRUE(eventually([&] { return !must(device_.stats().wait_for(100ms)); }));
  device_.shutdown();
  EXPECT_TRUE(has_code(answer_of(moved), errc::unavailable));
  held.go_on();
}

/// Nothing is lost if the spare dies before the device has moved.
TEST_F(Handover, LeavesTheDeviceWhereItIsWithoutASpare) {
  start(1);
  auto memory = filled(device_, counted(3));
  const auto process = worker_of(device_);
  moves_->before = [&] {
    for (auto x : children())
      if (x != process)
        kill_now(x);
    EXPECT_TRUE(eventually([&] { return children() == std::set{process}; }));
  };
  const auto moved = answer_of(device_.hand_over());
  EXPECT_TRUE(has_code(moved, errc::unavailable) || has_code(moved, errc::worker_lost));
  EXPECT_EQ(worker_of(device_), process);
  EXPECT_EQ(device_.incarnation(), 1u);
  EXPECT_TRUE(holds(device_, memory, counted(3)));
  moves_->before = [] {};
  EXPECT_EQ(must(answer_of(device_.hand_over())), 2u);
  EXPECT_TRUE(holds(device_, memory, counted(3)));
}

/// That is a loss of the device like any other.
TEST_F(Handover, EndsWithTheLossOfTheNextProcess) {
  start(1);
  auto memory = filled(device_, counted(3));
  const auto before = children();
  moves_->after = [&] {
    for (auto x : children())
      if (!before.contains(x))
        kill_now(x);
  };
  const auto moved = answer_of(device_.hand_over());
  EXPECT_TRUE(moved || has_code(moved, errc::worker_lost));
  EXPECT_TRUE(eventually([&] { return works(device_) == true; }));
  EXPECT_TRUE(holds(device_, memory, counted(3)));
  EXPECT_EQ(device_.generation(), 1u);
  EXPECT_GE(device_.incarnation(), 2u);
}

} // namespace

} // namespace troupe::testing
