// The memory of a device whose worker is lost.

#include "support/eventually.hpp"
#include "support/folder.hpp"
#include "support/forwarding_backend.hpp"
#include "support/random.hpp"
#include "support/topology_fixture.hpp"
#include "support/worker_losses.hpp"
#include <troupe/bytes.hpp>
#include <troupe/launch.hpp>
#include <troupe/worker.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/stat.h>

namespace troupe::testing {

namespace {

using namespace std::chrono_literals;
using elements = std::vector<std::uint32_t>;

constexpr std::size_t count = std::size_t{1} << 16;
constexpr const char* endless_write = "KeptMemory.endless_write";
constexpr const char* while_file_exists = "KeptMemory.while_file_exists";
constexpr const char* make_file = "KeptMemory.make_file";
constexpr const char* fault_of_device = "KeptMemory.fault";

std::string text_of(std::span<const std::byte> x) {
  return {reinterpret_cast<const char*>(x.data()), x.size()};
}

/// Workers run the same program, so the launches are registered there too.
[[maybe_unused]] const bool registered = [] {
  // Makes the file that its argument names, and writes to the buffer until its process ends. On a
  // GPU, where the host cannot write there, it only lasts as long.
  must(register_launch(endless_write, [](launch_context& context, auto, auto writes, auto path) {
    auto* to = static_cast<std::uint32_t*>(must(writes.front().access()));
    return context.run_on_host([=, n = writes.front().count(),
                                on_gpu = context.cuda_stream() != nullptr, file = text_of(path)] {
      std::ofstream{file} << "begun";
      std::uint32_t elsewhere = 0;
      for (std::uint32_t i = 0;; ++i)
        *static_cast<volatile std::uint32_t*>(on_gpu ? &elsewhere : &to[i % n]) = i;
    });
  }));
  must(register_launch(while_file_exists, [](launch_context& context, auto, auto, auto path) {
    return context.run_on_host([file = text_of(path)] {
      while (std::filesystem::exists(file))
        std::this_thread::yield();
    });
  }));
  must(register_launch(make_file, [](launch_context& context, auto, auto, auto path) {
    return context.run_on_host([file = text_of(path)] { std::ofstream{file} << "made"; });
  }));
  must(register_launch(fault_of_device, [](launch_context&, auto, auto, auto native) {
    failure why{.code = errc::device_fault, .detail = "on purpose"};
    why.native_code = must(from_bytes<std::int32_t>(native));
    return make_error(std::move(why));
  }));
  return true;
}();

elements counted(std::uint32_t from) {
  elements result(count);
  std::iota(result.begin(), result.end(), from);
  return result;
}

gpu_ref<std::uint32_t> filled(const device& on, const elements& content) {
  auto result = must(on.allocate<std::uint32_t>(content.size()));
  must(answer_of(on.upload(result, host_buffer{content})));
  return result;
}

/// Returns the descriptors of this process, each with the file that it is of. Not the iterator's
/// own.
std::set<std::pair<std::string, ino_t>> open_files() {
  std::set<std::pair<std::string, ino_t>> result;
  for (const auto& x : std::filesystem::directory_iterator{"/proc/self/fd"})
    if (struct stat file{}; ::stat(x.path().c_str(), &file) == 0 && !S_ISDIR(file.st_mode))
      result.emplace(x.path().filename(), file.st_ino);
  return result;
}

std::int64_t worker_of(const device& x) { return must(answer_of(x.stats())).worker_pid; }

/// What the lanes see of their devices.
struct sight {
  std::atomic<bool> work_is_over{true}; ///< of lost workers
  std::atomic<int> at_work{-1};         ///< a device whose lost worker's work is not over
  std::atomic<int> left{0};             ///< how often work was left to a lost worker
  std::atomic<bool> hides_done{false};  ///< no event seems to be done, until the worker is lost
  std::atomic<int> hidden{0};           ///< how often an event was done nevertheless
};

class device_in_sight : public forwarding_device {
public:
  device_in_sight(std::unique_ptr<backend_device> inner, std::shared_ptr<sight> seen, int ordinal)
      : forwarding_device(std::move(inner)), seen_(std::move(seen)), ordinal_(ordinal) {}
  std::function<bool()> lost_work() const noexcept override {
    ++seen_->left;
    return [seen = seen_, ordinal = ordinal_] {
      return seen->work_is_over.load() && seen->at_work.load() != ordinal;
    };
  }
  caf::expected<bool> query(event_view event) noexcept override {
    auto done = inner_->query(event);
    if (!seen_->hides_done || inner_->loss())
      return done;
    seen_->hidden += done && *done ? 1 : 0;
    return false;
  }

private:
  std::shared_ptr<sight> seen_;
  int ordinal_;
};

class backend_in_sight : public forwarding_backend {
public:
  backend_in_sight(std::shared_ptr<backend> inner, std::shared_ptr<sight> seen)
      : forwarding_backend(std::move(inner)), seen_(std::move(seen)) {}
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    auto device = inner_->open(ordinal);
    if (!device)
      return device;
    return std::unique_ptr<backend_device>{
        std::make_unique<device_in_sight>(std::move(*device), seen_, ordinal)};
  }

private:
  std::shared_ptr<sight> seen_;
};

class KeptMemory : public ::testing::Test {
protected:
  /// Starts a system with this policy.
  void start(kept_memory keeps, int devices = 2) {
    device_ = {};
    system_.reset();
    system_ = std::make_unique<test_system>(system_options{
        .devices = devices, .wrap = [=, this](std::shared_ptr<backend>) {
          return std::make_shared<backend_in_sight>(make_workers(devices, keeps), seen_);
        }});
    device_ = system_->open(0);
  }

  /// Lets the device write to `to` without end. Returns when it has begun.
  pending<void> write_endlessly(const any_gpu_ref& to) {
    const auto file = folder_.file("begun " + std::to_string(++launches_));
    auto result = device_.launch(endless_write, bytes_of_text(file), {}, {to});
    EXPECT_TRUE(eventually([&] { return std::filesystem::exists(file); }));
    return result;
  }
  static std::vector<std::uint8_t> bytes_of_text(const std::string& x) {
    return {x.begin(), x.end()};
  }

  void see_a_living_rank_busy(kept_memory policy);

  void kill() const { ASSERT_EQ(::kill(static_cast<pid_t>(worker_of(device_)), SIGKILL), 0); }

  folder folder_;
  int launches_ = 0;
  std::shared_ptr<sight> seen_ = std::make_shared<sight>();
  std::unique_ptr<test_system> system_;
  device device_;
};

TEST_F(KeptMemory, OutlivesItsWorker) {
  start(kept_memory::after_end);
  std::vector<std::pair<gpu_ref<std::uint32_t>, elements>> all;
  for (std::uint32_t round = 0; round < 4; ++round) {
    all.emplace_back(filled(device_, counted(round)), counted(round));
    const auto* address = must(all.front().first.access());
    EXPECT_EQ(code_of(kill_worker(device_)), errc::worker_lost);
    for (auto& [memory, content] : all) {
      EXPECT_FALSE(memory.stale());
      EXPECT_TRUE(holds(device_, memory, content)) << "round " << round;
    }
    EXPECT_EQ(must(all.front().first.access()), address);
    EXPECT_EQ(device_.generation(), 1u);
    EXPECT_EQ(device_.incarnation(), round + 2);
  }
  must(answer_of(device_.copy(all[0].first, all[1].first)));
  EXPECT_TRUE(holds(device_, all[0].first, all[1].second));
  EXPECT_TRUE(works(device_));
}

/// Seen by the descriptor of its slab: other processes may use the memory of a GPU, too.
TEST_F(KeptMemory, IsGivenBackByItsNextWorker) {
  start(kept_memory::after_end);
  auto kept = filled(device_, counted(1));
  const auto free = must(answer_of(device_.stats())).free_bytes;
  const auto before = open_files();
  auto large = must(device_.allocate<std::uint8_t>(std::size_t{300} << 20)); // has its own slab
  auto slab = open_files();
  std::erase_if(slab, [&](auto& x) { return before.contains(x); });
  ASSERT_EQ(slab.size(), 1u);
  const auto is_there = [&] { return open_files().contains(*slab.begin()); };
  EXPECT_EQ(code_of(kill_worker(device_)), errc::worker_lost);
  EXPECT_TRUE(works(device_));
  EXPECT_TRUE(is_there());
  if (!on_cuda()) {
    EXPECT_LT(must(answer_of(device_.stats())).free_bytes, free - (std::size_t{290} << 20));
  }
  large = {};
  EXPECT_TRUE(eventually([&] { return !is_there(); }));
  if (!on_cuda()) {
    EXPECT_TRUE(eventually([&] { return must(answer_of(device_.stats())).free_bytes >= free; }));
  }
  EXPECT_TRUE(must(device_.allocate<std::uint8_t>(std::size_t{900} << 20)));
  EXPECT_TRUE(holds(device_, kept, counted(1)));
}

TEST_F(KeptMemory, IsIndeterminateWhereTheLostWorkerWrote) {
  start(kept_memory::after_end);
  auto memory = filled(device_, counted(0));
  const auto written = must(memory.slice(0, count / 2));
  const auto rest = must(memory.slice(count / 2, count / 2));
  auto beside = filled(device_, counted(5));
  auto endless = write_endlessly(written);
  kill();
  EXPECT_TRUE(has_code(answer_of(endless).error(), errc::worker_lost));
  const auto read = device_.download(written);
  EXPECT_TRUE(has_code(read.error(), errc::indeterminate));
  EXPECT_EQ(cause_of(read.error()), errc::worker_lost);
  EXPECT_TRUE(holds(device_, beside, counted(5)));
  const auto all = counted(0);
  EXPECT_TRUE(holds(device_, rest, elements(all.begin() + count / 2, all.end())));
  must(answer_of(device_.fill(written, 7u)));
  EXPECT_TRUE(holds(device_, written, elements(count / 2, 7)));
}

/// The answer may be lost, but it is known that the work was done.
TEST_F(KeptMemory, IsIntactWhereTheLostWorkerWasDone) {
  start(kept_memory::after_end);
  auto done = filled(device_, counted(0));
  auto written = filled(device_, counted(0));
  seen_->work_is_over = false;
  seen_->hides_done = true;
  auto filling = device_.fill(done, 5u);
  EXPECT_TRUE(eventually([&] { return seen_->hidden != 0; }));
  auto endless = write_endlessly(written);
  kill();
  EXPECT_TRUE(has_code(answer_of(endless).error(), errc::worker_lost));
  const auto how = answer_of(filling);
  EXPECT_TRUE(how || has_code(how.error(), errc::worker_lost));
  seen_->hides_done = false;
  // At first it may count as failed: the lane has yet to find that it was done.
  EXPECT_TRUE(eventually([&] { return holds(device_, done, elements(count, 5)) == true; }));
  must(answer_of(device_.fill(done, 6u)));
  EXPECT_TRUE(has_code(device_.download(written).error(), errc::indeterminate));
  seen_->work_is_over = true;
}

/// All else can be used at once.
TEST_F(KeptMemory, IsBusyWhereTheLostWorkerWroteUntilItsWorkIsOver) {
  start(kept_memory::after_end);
  seen_->work_is_over = false;
  auto written = filled(device_, counted(0));
  auto beside = filled(device_, counted(5));
  auto endless = write_endlessly(written);
  auto behind = device_.fill(written, 1u); // did not begin
  kill();
  EXPECT_TRUE(has_code(answer_of(endless).error(), errc::worker_lost));
  EXPECT_TRUE(has_code(answer_of(behind).error(), errc::worker_lost));
  auto filling = device_.fill(written, 7u);
  auto copying = device_.copy(written, beside);
  auto late = device_.fill(must(written.slice(0, 1)), 8u, {.deadline = 20ms});
  EXPECT_TRUE(has_code(answer_of(late).error(), errc::deadline_exceeded));
  auto cancelled = device_.fill(written, 9u);
  cancelled.cancel();
  EXPECT_TRUE(has_code(answer_of(cancelled).error(), errc::cancelled));
  EXPECT_TRUE(has_code(device_.download(must(written.slice(0, 1))).error(), errc::skipped));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(holds(device_, beside, counted(5)));
    EXPECT_TRUE(works(device_));
  }
  EXPECT_FALSE(filling.ready() || copying.ready());
  seen_->work_is_over = true;
  must(answer_of(filling));
  must(answer_of(copying));
}

/// The last request that would have written there waited in the lane until the loss. It never
/// began, but what it had to follow goes on.
TEST_F(KeptMemory, IsBusyWhereARequestThatNeverBeganWouldHaveWritten) {
  start(kept_memory::after_end);
  seen_->work_is_over = false;
  auto written = filled(device_, counted(0));
  auto other = filled(device_, counted(5));
  auto endless = write_endlessly(written);
  const auto worker = static_cast<pid_t>(worker_of(device_));
  ASSERT_EQ(::kill(worker, SIGSTOP), 0);
  auto first = device_.fill(other, 1u); // the lane waits for the worker's reply
  auto behind = device_.fill(written, 1u);
  auto uploading = device_.upload(written, host_buffer{counted(9)});
  ASSERT_EQ(::kill(worker, SIGKILL), 0);
  for (auto* x : {&endless, &first, &behind, &uploading})
    EXPECT_TRUE(has_code(answer_of(*x).error(), errc::worker_lost));
  const auto made = folder_.file("the memory was used");
  auto using_it = device_.launch(make_file, bytes_of_text(made), {}, {any_gpu_ref{written}});
  for (int i = 0; i < 20; ++i)
    EXPECT_TRUE(works(device_));
  EXPECT_FALSE(std::filesystem::exists(made));
  seen_->work_is_over = true;
  must(answer_of(using_it));
  EXPECT_TRUE(std::filesystem::exists(made));
}

/// Transfers use memory of the lane, which goes with the lost worker.
TEST_F(KeptMemory, EndsTheTransfersOfTheLostWorker) {
  start(kept_memory::after_end);
  seen_->work_is_over = false;
  for (std::uint32_t round = 0; round < 5; ++round) {
    auto written = filled(device_, counted(0));
    auto endless = write_endlessly(written);
    elements got(count);
    auto reading = device_.download(written, std::span{got});
    auto writing = device_.upload(written, host_buffer{counted(1)});
    kill();
    for (auto* x : {&endless, &reading, &writing})
      EXPECT_TRUE(has_code(answer_of(*x).error(), errc::worker_lost));
    EXPECT_TRUE(works(device_));
    seen_->work_is_over = true;
    must(answer_of(device_.upload(written, host_buffer{counted(round)})));
    EXPECT_TRUE(holds(device_, written, counted(round)));
    seen_->work_is_over = false;
  }
  seen_->work_is_over = true;
}

/// What a lost worker had only read can be written at once.
TEST_F(KeptMemory, IsFreeWhereTheLostWorkerRead) {
  start(kept_memory::after_end);
  seen_->work_is_over = false;
  auto read = filled(device_, counted(0));
  auto written = filled(device_, counted(0));
  auto endless = write_endlessly(written);
  auto copying = device_.copy(written, read);
  kill();
  EXPECT_FALSE(answer_of(endless));
  EXPECT_FALSE(answer_of(copying));
  must(answer_of(device_.fill(read, 3u)));
  EXPECT_TRUE(holds(device_, read, elements(count, 3)));
  seen_->work_is_over = true;
}

TEST_F(KeptMemory, IsKeptAsThePolicySays) {
  const auto after = [&](kept_memory keeps, const std::function<void()>& end) {
    start(keeps);
    auto memory = filled(device_, counted(2));
    end();
    if (!holds(device_, memory, counted(2))) {
      EXPECT_TRUE(memory.stale());
      EXPECT_TRUE(eventually([&] { return works(device_) == true; }));
      return false;
    }
    EXPECT_EQ(device_.generation(), 1u);
    return true;
  };
  const auto killed = [this] { EXPECT_EQ(code_of(kill_worker(device_)), errc::worker_lost); };
  const auto faulty = [this](std::int32_t native) {
    return [this, native] {
      auto done = answer_of(device_.launch(fault_of_device, to_bytes(native), {}, {}));
      EXPECT_TRUE(has_code(done.error(), errc::worker_lost)) << describe(done.error());
    };
  };
  constexpr std::int32_t illegal_address = 700;
  constexpr std::int32_t uncorrectable = 214;
  EXPECT_FALSE(after(kept_memory::none, killed));
  EXPECT_TRUE(after(kept_memory::after_end, killed));
  EXPECT_TRUE(after(kept_memory::after_fault, killed));
  EXPECT_FALSE(after(kept_memory::none, faulty(illegal_address)));
  EXPECT_FALSE(after(kept_memory::after_end, faulty(illegal_address)));
  EXPECT_TRUE(after(kept_memory::after_fault, faulty(illegal_address)));
  EXPECT_FALSE(after(kept_memory::after_fault, faulty(uncorrectable)));
}

TEST_F(KeptMemory, OutlivesManyWorkers) {
  start(kept_memory::after_end);
  auto memory = filled(device_, counted(3));
  for (int round = 0; round < 3; ++round) {
    for (int kills = 0; kills < 2; ++kills) {
      EXPECT_EQ(code_of(kill_worker(device_)), errc::worker_lost);
      EXPECT_FALSE(memory.stale());
    }
    EXPECT_TRUE(holds(device_, memory, counted(3)));
  }
  EXPECT_EQ(device_.generation(), 1u);
  EXPECT_EQ(device_.incarnation(), 7u);
}

/// Other devices do not wait for the work of the lost worker, also if it had just begun.
TEST_F(KeptMemory, HoldsUpNoOtherDevice) {
  TROUPE_NEEDS_DEVICES(2);
  start(kept_memory::after_end);
  seen_->work_is_over = false;
  const auto other = system_->open(1);
  const auto links = open_topology(*system_, quick_config(true));
  EXPECT_TRUE(eventually([&] { return links.graph().settled; }));
  constexpr std::size_t many = std::size_t{32} << 20;
  auto source = must(device_.allocate<std::uint32_t>(many));
  auto target = must(other.allocate<std::uint32_t>(many));
  auto written = filled(device_, counted(0));
  auto endless = write_endlessly(written);
  elements content(many, 5);
  auto uploading = device_.upload(source, std::span<const std::uint32_t>{content}); // in pieces
  auto copying = links.copy(target, source);
  kill();
  for (auto* x : {&endless, &uploading, &copying})
    EXPECT_FALSE(answer_of(*x));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(works(other));
    EXPECT_TRUE(works(device_));
  }
  seen_->work_is_over = true;
  must(answer_of(other.fill(target, 6u)));
  EXPECT_TRUE(works(other));
}

/// Direct collectives write to memory of other devices.
TEST_F(KeptMemory, IsBusyWhilePeersOfALostRankMayWrite) {
  TROUPE_NEEDS_DEVICES(2);
  start(kept_memory::after_end);
  const auto other = system_->open(1);
  const auto w =
      system_->open_world({.devices = {0, 1}, .collectives = collectives_policy::direct});
  std::vector<gpu_ref<std::uint32_t>> data{filled(device_, counted(0)), filled(other, counted(0))};
  auto beside = filled(other, counted(1));
  auto written = filled(device_, counted(2));
  const auto file = folder_.file("the rank is held up");
  std::ofstream{file} << "begun";
  auto holding = other.launch(while_file_exists, bytes_of_text(file), {}, {any_gpu_ref{data[1]}});
  auto summing = w.all_reduce(data, reduce_op::sum);
  EXPECT_TRUE(holds(device_, written, counted(2))); // now both parts are in their streams
  EXPECT_TRUE(holds(other, beside, counted(1)));
  auto endless = write_endlessly(written);
  kill();
  EXPECT_TRUE(has_code(answer_of(summing).error(), errc::worker_lost));
  EXPECT_TRUE(has_code(answer_of(endless).error(), errc::worker_lost));
  const auto made = folder_.file("the memory was used");
  auto using_it = device_.launch(make_file, bytes_of_text(made), {}, {any_gpu_ref{data[0]}});
  must(answer_of(device_.fill(written, 8u))); // its worker's own work is over
  for (int i = 0; i < 20; ++i)
    EXPECT_TRUE(works(device_));
  EXPECT_FALSE(std::filesystem::exists(made));
  std::filesystem::remove(file);
  must(answer_of(holding));
  must(answer_of(using_it));
  EXPECT_TRUE(std::filesystem::exists(made));
}

/// The other way round: kernels that the lost rank has submitted write to memory of living devices,
/// also where its own memory is not kept.
void KeptMemory::see_a_living_rank_busy(kept_memory policy) {
  start(policy);
  seen_->work_is_over = false;
  const auto other = system_->open(1);
  const auto w =
      system_->open_world({.devices = {0, 1}, .collectives = collectives_policy::direct});
  std::vector<gpu_ref<std::uint32_t>> from{filled(device_, counted(0)), filled(other, counted(0))};
  std::vector<gpu_ref<std::uint32_t>> to{filled(device_, counted(0)), filled(other, counted(0))};
  auto endless = write_endlessly(from[0]);
  auto summing = w.all_reduce(from, to, reduce_op::sum); // the other rank waits for the lost one
  auto filling = other.fill(to[1], 2u);
  const auto in_place = folder_.file("in place");
  auto changing =
      other.launch(make_file, bytes_of_text(in_place), {any_gpu_ref{to[1]}}, {any_gpu_ref{to[1]}});
  auto again = other.fill(to[1], 3u);
  kill();
  EXPECT_TRUE(has_code(answer_of(endless).error(), errc::worker_lost));
  EXPECT_TRUE(has_code(answer_of(summing).error(), errc::worker_lost));
  for (auto* x : {&filling, &changing, &again}) // may be overwritten
    EXPECT_TRUE(has_code(answer_of(*x).error(), errc::worker_lost));
  auto late = other.fill(to[1], 8u, {.deadline = 20ms});
  EXPECT_TRUE(has_code(answer_of(late).error(), errc::deadline_exceeded));
  const auto made = folder_.file("the memory was used");
  auto using_it = other.launch(make_file, bytes_of_text(made), {}, {any_gpu_ref{to[1]}});
  must(answer_of(other.fill(from[1], 6u))); // the other rank's part is over
  EXPECT_TRUE(works(other));
  EXPECT_FALSE(std::filesystem::exists(made));
  seen_->work_is_over = true;
  must(answer_of(using_it));
  EXPECT_TRUE(std::filesystem::exists(made));
}

TEST_F(KeptMemory, OfALivingRankIsBusyWhileTheLostOneMayWrite) {
  TROUPE_NEEDS_DEVICES(2);
  see_a_living_rank_busy(kept_memory::after_end);
}

TEST_F(KeptMemory, OfALivingRankIsBusyIfThatOfTheLostOneIsNotKept) {
  TROUPE_NEEDS_DEVICES(2);
  see_a_living_rank_busy(kept_memory::none);
}

/// Also if the process of the lost one is lost after the shutdown, with work in its streams.
TEST_F(KeptMemory, OfALivingRankIsBusyAfterTheEndOfTheLostOne) {
  TROUPE_NEEDS_DEVICES(2);
  start(kept_memory::after_end);
  seen_->work_is_over = false;
  const auto other = system_->open(1);
  const auto w =
      system_->open_world({.devices = {0, 1}, .collectives = collectives_policy::direct});
  std::vector<gpu_ref<std::uint32_t>> data{filled(device_, counted(0)), filled(other, counted(0))};
  auto endless = write_endlessly(data[0]);
  auto summing = w.all_reduce(data, reduce_op::sum);
  auto overwriting = other.fill(data[1], 7u);
  const auto worker = static_cast<pid_t>(worker_of(device_)); // all parts are in their streams
  device_.shutdown();
  EXPECT_TRUE(has_code(answer_of(endless).error(), errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(summing).error(), errc::unavailable));
  ASSERT_EQ(::kill(worker, SIGKILL), 0);
  ASSERT_TRUE(eventually([&] { return seen_->left > 0; }));
  EXPECT_TRUE(has_code(answer_of(overwriting).error(), errc::worker_lost));
  auto late = other.fill(data[1], 8u, {.deadline = 20ms});
  EXPECT_TRUE(has_code(answer_of(late).error(), errc::deadline_exceeded));
  auto in_time = other.fill(data[1], 9u);
  EXPECT_TRUE(works(other));
  seen_->work_is_over = true;
  must(answer_of(in_time));
}

/// Also if the process is lost while the device is about to be handed over and reset.
TEST_F(KeptMemory, OfALivingRankIsUsableAfterAHandoverAResetAndALoss) {
  TROUPE_NEEDS_DEVICES(2);
  for (const auto policy : {kept_memory::after_end, kept_memory::none}) {
    start(policy);
    const auto other = system_->open(1);
    const auto w =
        system_->open_world({.devices = {0, 1}, .collectives = collectives_policy::direct});
    std::vector<gpu_ref<std::uint32_t>> data{filled(device_, counted(0)),
                                             filled(other, counted(0))};
    const auto worker = static_cast<pid_t>(worker_of(device_));
    auto endless = write_endlessly(data[0]);
    auto summing = w.all_reduce(data, reduce_op::sum);
    auto moving = device_.hand_over();
    const auto is_away = [this] { return !must(device_.stats().wait_for(20ms)); };
    ASSERT_TRUE(eventually(is_away)); // the handover has begun
    auto reset = device_.reset();
    ASSERT_EQ(::kill(worker, SIGKILL), 0);
    EXPECT_FALSE(answer_of(endless));
    EXPECT_FALSE(answer_of(summing));
    EXPECT_FALSE(answer_of(moving));
    EXPECT_TRUE(is_ok(answer_of(reset)));
    EXPECT_TRUE(is_ok(answer_of(other.fill(data[1], 9u, {.deadline = patience}))));
    EXPECT_TRUE(works(device_));
    EXPECT_TRUE(is_ok(answer_of(device_.reset({.deadline = patience}))));
  }
}

/// The work of two lost ranks ends at different times. They do not wait for each other.
TEST_F(KeptMemory, IsBusyWhileAnotherLostRankMayWrite) {
  TROUPE_NEEDS_DEVICES(2);
  start(kept_memory::after_end);
  const auto other = system_->open(1);
  const auto w =
      system_->open_world({.devices = {0, 1}, .collectives = collectives_policy::direct});
  std::vector<gpu_ref<std::uint32_t>> data{filled(device_, counted(0)), filled(other, counted(0))};
  auto beside = filled(other, counted(1));
  auto written = filled(device_, counted(2));
  const auto file = folder_.file("the rank is held up");
  std::ofstream{file} << "begun";
  auto holding = other.launch(while_file_exists, bytes_of_text(file), {}, {any_gpu_ref{data[1]}});
  auto summing = w.all_reduce(data, reduce_op::sum);
  EXPECT_TRUE(holds(device_, written, counted(2))); // now both parts are in their streams
  EXPECT_TRUE(holds(other, beside, counted(1)));
  auto endless = write_endlessly(written);
  seen_->at_work = 1;
  const auto second = static_cast<pid_t>(worker_of(other));
  kill();
  ASSERT_EQ(::kill(second, SIGKILL), 0);
  for (auto* x : {&holding, &endless})
    EXPECT_TRUE(has_code(answer_of(*x).error(), errc::worker_lost));
  EXPECT_TRUE(has_code(answer_of(summing).error(), errc::worker_lost));
  const auto made = folder_.file("the memory was used");
  auto using_it = device_.launch(make_file, bytes_of_text(made), {}, {any_gpu_ref{data[0]}});
  must(answer_of(device_.fill(written, 8u))); // its worker's own work is over
  for (int i = 0; i < 20; ++i)
    EXPECT_TRUE(works(device_));
  EXPECT_FALSE(std::filesystem::exists(made));
  seen_->at_work = -1;
  must(answer_of(using_it));
  must(answer_of(other.fill(data[1], 9u)));
  EXPECT_TRUE(std::filesystem::exists(made));
}

TEST_F(KeptMemory, EndsWithAReset) {
  start(kept_memory::after_end);
  auto memory = filled(device_, counted(3));
  EXPECT_EQ(code_of(kill_worker(device_)), errc::worker_lost);
  EXPECT_TRUE(holds(device_, memory, counted(3)));
  EXPECT_EQ(must(answer_of(device_.reset())), 2u);
  EXPECT_TRUE(memory.stale());
  EXPECT_EQ(device_.incarnation(), 3u);
  EXPECT_TRUE(works(device_));
}

/// A reset waits for the work of the lost worker.
TEST_F(KeptMemory, IsResetWhenTheLostWorkIsOver) {
  TROUPE_NEEDS_DEVICES(2);
  start(kept_memory::after_end);
  seen_->work_is_over = false;
  auto memory = filled(device_, counted(3));
  auto endless = write_endlessly(memory);
  kill();
  EXPECT_FALSE(answer_of(endless));
  EXPECT_TRUE(works(device_));
  auto reset = device_.reset();
  EXPECT_TRUE(memory.stale());
  for (int i = 0; i < 20; ++i)
    EXPECT_TRUE(works(system_->open(1)));
  EXPECT_FALSE(reset.ready());
  seen_->work_is_over = true;
  EXPECT_EQ(must(answer_of(reset)), 2u);
  EXPECT_TRUE(works(device_));
}

/// Kills workers at random ways and moments, and knows what each buffer must hold.
class ManyLosses : public KeptMemory, public ::testing::WithParamInterface<kept_memory> {
protected:
  const int devices = on_cuda() ? 2 : 3;
  static constexpr std::size_t buffers = 6; ///< of each device

  struct known {
    gpu_ref<std::uint32_t> memory;
    std::uint32_t content = 0; ///< of all elements
    pending<void> write = {};  ///< the last one, in this round
    std::uint32_t written = 0; ///< by that
  };

  void begin() {
    start(GetParam(), devices);
    world_config config;
    config.limits.standby = standby_policy::full;
    config.limits.restarts = 1'000'000;
    world_ = system_->open_world(config);
    all_.resize(world_.size() * buffers);
    for (std::size_t i = 0; i < all_.size(); ++i)
      renew(i);
  }

  device device_of(std::size_t buffer) const { return world_.device_of(buffer / buffers); }

  /// Allocates the buffer with some content.
  void renew(std::size_t i) {
    auto& x = all_[i];
    x.memory = must(device_of(i).allocate<std::uint32_t>(count));
    x.content = ++last_content_;
    must(answer_of(device_of(i).fill(x.memory, x.content)));
  }

  /// Begins writes to some buffers of a device.
  void write_some(std::size_t rank) {
    for (std::size_t i = rank * buffers; i < (rank + 1) * buffers; ++i)
      if (auto& x = all_[i]; chance(random_, 0.4)) {
        x.written = ++last_content_;
        x.write = chance(random_, 0.5)
                      ? device_of(i).fill(x.memory, x.written)
                      : device_of(i).upload(x.memory, host_buffer{elements(count, x.written)});
      }
  }

  /// Ends the worker. Returns whether the policy keeps its memory.
  bool lose(std::size_t rank) {
    const auto d = world_.device_of(rank);
    const auto before = d.incarnation();
    bool faulty = false;
    switch (pick(random_, 0, 2)) {
    case 0:
      EXPECT_EQ(::kill(static_cast<pid_t>(worker_of(d)), SIGKILL), 0);
      break;
    case 1:
      EXPECT_EQ(code_of(kill_worker(d)), errc::worker_lost);
      break;
    default:
      faulty = true;
      EXPECT_FALSE(answer_of(d.launch(fault_of_device, to_bytes(std::int32_t{700}), {}, {})));
    }
    EXPECT_TRUE(eventually([&] { return d.incarnation() > before; }));
    return GetParam() == kept_memory::after_fault ||
           (GetParam() == kept_memory::after_end && !faulty);
  }

  /// Checks all buffers. `lost`: the rank whose worker was lost, and whether its memory is kept.
  void check(std::size_t lost, bool keeps) {
    for (std::size_t i = 0; i < all_.size(); ++i) {
      auto& x = all_[i];
      if (i / buffers == lost && !keeps) {
        EXPECT_TRUE(x.memory.stale());
        x.write = {};
        x.written = 0;
        renew(i);
        continue;
      }
      EXPECT_FALSE(x.memory.stale());
      if (const auto write = std::exchange(x.write, {}); x.written != 0) {
        x.content = std::exchange(x.written, 0);
        const auto done = answer_of(write);
        EXPECT_TRUE(done || i / buffers == lost);
        if (!done) {
          const auto got = device_of(i).download(x.memory);
          EXPECT_TRUE(got || has_code(got.error(), errc::indeterminate) ||
                      has_code(got.error(), errc::skipped));
          if (!got) // else it is known that it was done
            must(answer_of(device_of(i).fill(x.memory, x.content)));
        }
      }
      EXPECT_TRUE(holds(device_of(i), x.memory, elements(count, x.content)));
    }
  }

  std::mt19937_64 random_{1};
  world world_;
  std::vector<known> all_;
  std::uint32_t last_content_ = 0;
};

TEST_P(ManyLosses, LeaveEveryByteThatWasNotWritten) {
  begin();
  const int losses = on_cuda() ? 20 : 200; // a worker with a GPU takes a second to start
  for (int round = 0; round < losses && !HasFailure(); ++round) {
    const auto lost = pick(random_, 0, world_.size() - 1);
    write_some(lost);
    write_some((lost + 1) % world_.size());
    const bool keeps = lose(lost);
    SCOPED_TRACE("loss " + std::to_string(round) + ", of rank " + std::to_string(lost));
    check(lost, keeps);
  }
  EXPECT_TRUE(eventually([&] { return works(world_) == true; }));
}

INSTANTIATE_TEST_SUITE_P(Policies, ManyLosses,
                         ::testing::Values(kept_memory::none, kept_memory::after_end,
                                           kept_memory::after_fault),
                         [](const auto& x) { return std::string{to_string(x.param)}; });

TEST_F(KeptMemory, GoesOnInAWorldWithSpares) {
  const int devices = on_cuda() ? 2 : 3;
  start(kept_memory::after_end, devices);
  world_config config;
  config.limits.standby = standby_policy::full;
  config.limits.restarts = 1000;
  auto w = system_->open_world(config);
  world_feed feed{*system_, w.actor()};
  auto data = must(w.allocate<std::uint32_t>(count));
  for (std::size_t rank = 0; rank < w.size(); ++rank)
    must(answer_of(w.device_of(rank).upload(data[rank], host_buffer{counted(rank)})));
  std::uint64_t epoch = 0;
  for (std::size_t round = 0; round < 6; ++round) {
    const auto before = feed.until([&](const world_status& x) {
      return x.phase == world_phase::ready && x.epoch > epoch && x.standby_ready;
    });
    epoch = before.epoch;
    const auto lost = round % w.size();
    spare_takes_over(w, feed, lost, before);
    auto sums = must(w.allocate<std::uint32_t>(count));
    must(answer_of(w.all_reduce(data, sums, reduce_op::sum)));
    elements want(count);
    for (std::size_t i = 0; i < count; ++i)
      for (std::uint32_t rank = 0; rank < w.size(); ++rank)
        want[i] += static_cast<std::uint32_t>(i) + rank;
    for (std::size_t rank = 0; rank < w.size(); ++rank) {
      EXPECT_TRUE(holds(w.device_of(rank), sums[rank], want)) << "round " << round;
      EXPECT_TRUE(holds(w.device_of(rank), data[rank], counted(rank)));
    }
  }
}

} // namespace

} // namespace troupe::testing
