// Requests that are made again after the loss of a device (`request_options::max_retries`).

#include "support/eventually.hpp"
#include "support/folder.hpp"
#include "support/random.hpp"
#include "support/topology_fixture.hpp"
#include "support/worker_losses.hpp"
#include <troupe/launch.hpp>
#include <troupe/worker.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

namespace troupe::testing {

namespace {

using elements = std::vector<std::uint32_t>;
using buffer_of_elements = gpu_ref<std::uint32_t>;

constexpr std::size_t count = 1000;
constexpr std::uint32_t written_by_launch = 77;
constexpr request_options again{.max_retries = 3};

constexpr const char* hold_once = "Retries.hold_once";
constexpr const char* hold_always = "Retries.hold_always";
constexpr const char* death = "Retries.death";
constexpr const char* sum_of_two = "Retries.sum_of_two";

std::string path_in(std::span<const std::byte> x) {
  return {reinterpret_cast<const char*>(x.data()), x.size()};
}

/// Makes a file that says that the process has begun the launch. Then waits for the end of the
/// process, unless a former one had begun it and `once` is set.
void hold(const std::string& path, bool once) {
  const bool is_first = !std::filesystem::exists(path);
  std::ofstream{path + '.' + std::to_string(getpid())} << "begun";
  std::ofstream{path} << "begun"; // last: the test goes on when it is there
  while (is_first || !once)
    pause();
}

/// Workers run the same program, so the launches are registered there too.
[[maybe_unused]] const bool registered = [] {
  const auto holding = [](bool once) {
    return [once](launch_context& context, auto, auto writes, auto path) {
      auto* to = static_cast<std::uint32_t*>(must(writes.front().access()));
      return context.run_on_host([=, n = writes.front().count(), file = path_in(path)] {
        hold(file, once);
        std::fill_n(to, n, written_by_launch);
      });
    };
  };
  must(register_launch(hold_once, holding(true)));
  must(register_launch(hold_always, holding(false)));
  must(register_launch(death, [](launch_context&, auto, auto, auto) -> caf::error {
    kill(getpid(), SIGKILL);
    return {};
  }));
  must(register_launch(sum_of_two, [](launch_context& context, auto reads, auto writes, auto) {
    const auto* a = static_cast<const std::uint32_t*>(must(reads[0].access()));
    const auto* b = static_cast<const std::uint32_t*>(must(reads[1].access()));
    auto* to = static_cast<std::uint32_t*>(must(writes[0].access()));
    return context.run_on_host(
        [=, n = writes[0].count()] { std::transform(a, a + n, b, to, std::plus<>{}); });
  }));
  return true;
}();

class Retries : public ::testing::Test {
protected:
  void SetUp() override { TROUPE_HOST_ONLY("launches that compute on the host"); }

  void start(kept_memory keeps = kept_memory::after_end, int devices = 2) {
    device_ = {};
    system_.reset();
    system_ = std::make_unique<test_system>(
        system_options{.devices = devices, .wrap = [=](std::shared_ptr<backend>) {
                         return make_workers(devices, keeps);
                       }});
    device_ = system_->open(0);
  }

  buffer_of_elements filled(const device& on, std::uint32_t content) const {
    auto result = must(on.allocate<std::uint32_t>(count));
    must(answer_of(on.fill(result, content)));
    return result;
  }
  buffer_of_elements filled(std::uint32_t content) const { return filled(device_, content); }

  ::testing::AssertionResult has(const buffer_of_elements& x, std::uint32_t content) const {
    return holds(system_->open(x.device()), x, elements(count, content));
  }

  /// Its writer has failed. It may have begun.
  ::testing::AssertionResult is_unreadable(const buffer_of_elements& x) const {
    const auto why = system_->open(x.device()).download(x).error();
    if (cause_of(why) == errc::worker_lost && code_of(why) != errc::worker_lost)
      return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << describe(why);
  }

  /// Launches what holds the device's stream for kernels until its process ends. Returns when it
  /// has begun.
  pending<void> hold_device(const char* launch, const any_gpu_ref& to, request_options options) {
    const auto file = folder_.file("begun " + std::to_string(++launches_));
    auto result = device_.launch(launch, {file.begin(), file.end()}, {}, {to}, options);
    EXPECT_TRUE(eventually([&] { return std::filesystem::exists(file); }));
    return result;
  }
  /// Returns how many processes have begun the last such launch.
  std::size_t begun() const {
    const auto file = folder_.file("begun " + std::to_string(launches_)) + '.';
    std::size_t result = 0;
    for (auto& x : std::filesystem::directory_iterator{std::filesystem::path{file}.parent_path()})
      result += x.path().string().starts_with(file) ? 1 : 0;
    return result;
  }

  static void kill_process_of(const device& x) {
    ASSERT_EQ(::kill(static_cast<pid_t>(must(answer_of(x.stats())).worker_pid), SIGKILL), 0);
  }
  void kill() const { kill_process_of(device_); }

  folder folder_;
  int launches_ = 0;
  std::unique_ptr<test_system> system_;
  device device_;
};

/// The stream for kernels is held, so that the requests behind it are not done before the loss.
TEST_F(Retries, GiveTheResultOfTheLastAttempt) {
  start();
  auto busy = filled(0);
  auto a = filled(1);
  auto b = filled(2);
  auto copied = filled(0);
  auto target = filled(0);
  auto sum = filled(0);
  auto uploaded = filled(0);
  elements content(count, 9);
  auto held = hold_device(hold_once, busy, {});
  std::vector<pending<void>> all;
  all.push_back(device_.fill(target, 5u, again));
  all.push_back(device_.copy(copied, a, again));
  all.push_back(device_.launch(sum_of_two, {}, {a, b}, {sum}, again));
  all.push_back(device_.upload(uploaded, std::span<const std::uint32_t>{content}, again));
  kill();
  EXPECT_TRUE(has_code(answer_of(held).error(), errc::worker_lost));
  for (auto& x : all)
    EXPECT_TRUE(is_ok(answer_of(x)));
  EXPECT_TRUE(has(target, 5));
  EXPECT_TRUE(has(copied, 1));
  EXPECT_TRUE(has(sum, 3));
  EXPECT_TRUE(has(uploaded, 9));
  EXPECT_TRUE(is_unreadable(busy));
  EXPECT_EQ(device_.incarnation(), 2u);
}

TEST_F(Retries, RunAChainInItsOrder) {
  start();
  auto first = filled(1);
  auto second = filled(2);
  auto third = filled(3);
  auto held = hold_device(hold_once, first, again);
  auto copying = device_.copy(second, first, again);
  auto adding = device_.launch(sum_of_two, {}, {first, second}, {third}, again);
  auto filling = device_.fill(must(third.slice(0, 1)), 4u, again); // overwrites a result
  kill();
  for (auto* x : {&held, &copying, &adding, &filling})
    EXPECT_TRUE(is_ok(answer_of(*x)));
  EXPECT_EQ(begun(), 2u);
  EXPECT_TRUE(has(first, written_by_launch));
  EXPECT_TRUE(has(second, written_by_launch));
  auto want = elements(count, 2 * written_by_launch);
  want.front() = 4;
  EXPECT_TRUE(holds(device_, third, want));
}

/// A request that is not made again fails as before, and the requests that read its results, too.
TEST_F(Retries, DoNotReadWhatWasNotWritten) {
  start();
  auto first = filled(1);
  auto second = filled(2);
  auto held = hold_device(hold_once, first, {});
  auto copying = device_.copy(second, first, again);
  kill();
  EXPECT_TRUE(has_code(answer_of(held).error(), errc::worker_lost));
  const auto why = answer_of(copying).error();
  EXPECT_TRUE(has_code(why, errc::worker_lost));
  EXPECT_NE(describe(why).find("not made again"), std::string::npos) << describe(why);
  EXPECT_TRUE(is_unreadable(second));
  must(answer_of(device_.fill(first, 3u)));
  must(answer_of(device_.copy(second, first, again)));
  EXPECT_TRUE(has(second, 3));
}

/// The later request may have run already, on another stream.
TEST_F(Retries, DoNotReadAnInputThatALaterRequestOverwrites) {
  start();
  auto busy = filled(0);
  auto input = filled(1);
  auto output = filled(2);
  auto held = hold_device(hold_once, busy, {});
  auto copying = device_.copy(output, input, again);
  auto overwriting = device_.fill(input, 3u);
  kill();
  EXPECT_FALSE(answer_of(held));
  EXPECT_FALSE(answer_of(overwriting));
  const auto why = answer_of(copying).error();
  EXPECT_TRUE(has_code(why, errc::worker_lost));
  EXPECT_NE(describe(why).find("a later request writes to one of its buffers"), std::string::npos)
      << describe(why);
  EXPECT_TRUE(is_unreadable(output));
}

/// The results of the later request stay, whether it is made again or was done.
TEST_F(Retries, DoNotOverwriteALaterResult) {
  start();
  auto memory = filled(0);
  auto held = hold_device(hold_once, memory, again);
  auto filling = device_.fill(memory, 5u, again);
  kill();
  must(answer_of(held));
  must(answer_of(filling));
  EXPECT_EQ(begun(), 2u);
  EXPECT_TRUE(has(memory, 5));

  auto parts = filled(0);
  const auto left = must(parts.slice(0, count / 2));
  const auto right = must(parts.slice(count / 2, count / 2));
  held = hold_device(hold_once, left, again);
  // Another stream, and another part of the buffer: it is done before the loss.
  must(answer_of(device_.upload(right, host_buffer{elements(count / 2, 6)})));
  kill();
  EXPECT_TRUE(has_code(answer_of(held).error(), errc::worker_lost));
  EXPECT_EQ(begun(), 1u);
  EXPECT_TRUE(holds(device_, right, elements(count / 2, 6)));
}

TEST_F(Retries, EndWithTheDeadline) {
  start();
  auto memory = filled(0);
  auto copy = filled(1);
  auto held = hold_device(hold_always, memory, {.deadline = 2s, .max_retries = 1000});
  kill();
  EXPECT_TRUE(eventually([&] { return begun() == 2; }));
  EXPECT_FALSE(held.ready());
  EXPECT_TRUE(has_code(answer_of(held).error(), errc::deadline_exceeded));
  auto behind = device_.copy(copy, memory, again); // waits, since the work runs on
  kill();
  EXPECT_FALSE(answer_of(behind));
  EXPECT_TRUE(eventually([&] { return works(device_) == true; }));
  EXPECT_EQ(begun(), 2u);
}

TEST_F(Retries, EndWhenTheyAreCancelled) {
  start();
  auto memory = filled(0);
  auto held = hold_device(hold_always, memory, {.max_retries = 1000});
  kill();
  EXPECT_TRUE(eventually([&] { return begun() == 2; }));
  held.cancel();
  EXPECT_TRUE(has_code(answer_of(held).error(), errc::cancelled));
  kill();
  EXPECT_TRUE(eventually([&] { return works(device_) == true; }));
  must(answer_of(device_.fill(memory, 4u)));
  EXPECT_TRUE(has(memory, 4));
  EXPECT_EQ(begun(), 2u);
}

/// A request that ends its process each time must not do so without end.
TEST_F(Retries, AreLimitedInNumber) {
  start();
  auto memory = filled(1);
  const auto why = answer_of(device_.launch(death, {}, {}, {memory}, {.max_retries = 2})).error();
  EXPECT_TRUE(has_code(why, errc::worker_lost));
  EXPECT_NE(describe(why).find("issued 3 times"), std::string::npos) << describe(why);
  EXPECT_TRUE(works(device_));
  EXPECT_EQ(device_.incarnation(), 4u);
}

TEST_F(Retries, NeedKeptMemory) {
  start(kept_memory::none);
  auto busy = filled(0);
  auto memory = filled(1);
  auto held = hold_device(hold_once, busy, again);
  auto filling = device_.fill(memory, 5u, again);
  kill();
  for (auto* x : {&held, &filling}) {
    const auto why = answer_of(*x).error();
    EXPECT_TRUE(has_code(why, errc::worker_lost));
    EXPECT_NE(describe(why).find("not made again"), std::string::npos) << describe(why);
  }
  EXPECT_TRUE(memory.stale());
  EXPECT_TRUE(works(device_));
  EXPECT_EQ(begun(), 1u);
}

TEST_F(Retries, AreRefusedWhereTheyCannotBeRight) {
  start();
  auto w = system_->open_world();
  auto memory = must(w.allocate<std::uint32_t>(2 * count));
  auto block = must(w.allocate<std::uint32_t>(count));
  must(answer_of(w.fill(memory, 1u)));
  auto& own = memory.front();
  const auto part = must(own.slice(0, count));
  const auto refused = [](const auto& x, errc code) {
    return x.ready() ? has_code(x.error(), code)
                     : ::testing::AssertionFailure() << "it was not refused at once";
  };
  const auto in_place = errc::invalid_argument;
  EXPECT_TRUE(refused(w.all_reduce(memory, again), in_place));
  EXPECT_TRUE(refused(w.all_gather(memory, again), in_place));
  EXPECT_TRUE(refused(device_.launch(sum_of_two, {}, {part, part}, {own}, again), in_place));
  const auto other = errc::not_supported;
  elements got(2 * count);
  EXPECT_TRUE(refused(device_.download(own, std::span{got}, again), other));
  EXPECT_TRUE(refused(device_.accept(own, again), other));
  EXPECT_TRUE(refused(device_.stats(again), other));
  EXPECT_TRUE(refused(device_.reset(again), other));
  EXPECT_TRUE(refused(device_.allocate(dtype::uint32, 1, false, again), other));
  EXPECT_TRUE(refused(w.rank(0).all_reduce(part, block.front(), again), other));
  EXPECT_FALSE(w.allocate<std::uint32_t>(1, false, again));
  EXPECT_TRUE(holds(device_, own, elements(2 * count, 1)));
  EXPECT_TRUE(works(w));
}

TEST_F(Retries, CopyBetweenDevices) {
  start();
  const auto other = system_->open(1);
  const auto links = open_topology(*system_);
  EXPECT_TRUE(eventually([&] { return links.graph().settled; }));
  auto source = filled(1);
  auto target = filled(other, 2);
  auto last = filled(other, 3);
  auto held = hold_device(hold_once, source, again);
  auto copying = links.copy(target, source, again);
  auto batch = links.copy({{last, target}}, again);
  kill();
  for (auto* x : {&held, &copying, &batch})
    EXPECT_TRUE(is_ok(answer_of(*x)));
  EXPECT_TRUE(has(target, written_by_launch));
  EXPECT_TRUE(has(last, written_by_launch));
}

TEST_F(Retries, RunCollectivesAndGroups) {
  start(kept_memory::after_end, 3);
  auto w = system_->open_world({.limits = {.restarts = 1000, .standby = standby_policy::full}});
  auto data = must(w.allocate<std::uint32_t>(count));
  auto sums = must(w.allocate<std::uint32_t>(count));
  auto copies = must(w.allocate<std::uint32_t>(count));
  must(answer_of(w.fill(data, 2u)));
  auto held = hold_device(hold_once, data.front(), again);
  auto reducing = w.all_reduce(data, sums, again);
  auto sending = w.run(send_recv{0, 1, sums[0], copies[1]}, again);
  auto grouping = w.run(group{{broadcast{sums[2], any(copies), 2}}, again});
  kill();
  must(answer_of(held));
  const auto sum = must(answer_of(reducing));
  EXPECT_NE(sum.operation, reducing.number());
  EXPECT_GT(sum.membership, 1u);
  EXPECT_TRUE(is_ok(answer_of(sending)));
  EXPECT_TRUE(is_ok(answer_of(grouping)));
  for (std::size_t rank = 0; rank < w.size(); ++rank) {
    EXPECT_TRUE(has(sums[rank], written_by_launch + 4));
    EXPECT_TRUE(has(copies[rank], written_by_launch + 4));
  }
}

TEST_F(Retries, AnswerActors) {
  start();
  auto busy = filled(0);
  auto memory = filled(1);
  auto held = hold_device(hold_once, busy, {});
  caf::scoped_actor self{*system_};
  bool done = false;
  auto request = troupe::request(self, device_,
                                 fill{.target = memory, .element = 5u, .options = again}, patience);
  kill();
  std::move(request).receive([&] { done = true; },
                             [](const caf::error& why) { ADD_FAILURE() << describe(why); });
  EXPECT_TRUE(done);
  EXPECT_FALSE(answer_of(held));
  EXPECT_TRUE(has(memory, 5));
}

/// Random requests on buffers of a world while workers are killed. Which buffer holds what is known
/// without the library.
class RetriesUnderLosses : public Retries {
protected:
  static constexpr std::size_t buffers = 6; ///< of each rank
  static constexpr request_options always{.max_retries = 1'000'000};

  struct known {
    buffer_of_elements memory;
    std::uint32_t content = 0;
    /// No request of this round writes it any more: another one reads it, or wrote it and depends
    /// on a collective. If that is lost, a later write on another device may be done already.
    bool is_fixed = false;
    bool is_of_ranks = false; ///< in this round its content comes from a collective
  };

  void SetUp() override {}

  void begin() {
    start(kept_memory::after_end, on_cuda() ? 2 : 3);
    world_ = system_->open_world({.limits = {.restarts = 1'000'000,
                                             .restart_backoff = 0ms,
                                             .standby = standby_policy::full}});
    for (std::size_t rank = 0; rank < world_.size(); ++rank)
      for (std::size_t i = 0; i < buffers; ++i) {
        all_.push_back({filled(world_.device_of(rank), ++last_content_)});
        all_.back().content = last_content_;
      }
  }

  known& any_of(std::size_t rank) { return all_[rank * buffers + pick(random_, 0, buffers - 1)]; }
  /// Notes that `to` is computed from `x`. Returns the content of `x`.
  static std::uint32_t read(known& x, known& to) {
    x.is_fixed = true;
    to.is_of_ranks |= x.is_of_ranks;
    to.is_fixed |= x.is_of_ranks;
    return x.content;
  }

  /// Makes a request, unless it would write to a buffer that another request of the round reads.
  void request_one() {
    const auto rank = pick(random_, 0, world_.size() - 1);
    const auto on = world_.device_of(rank);
    auto& to = any_of(rank);
    auto& from = any_of(rank);
    auto& other = any_of(rank);
    if (to.is_fixed || &from == &to || &other == &to)
      return;
    switch (pick(random_, 0, 4)) {
    case 0:
      to.content = ++last_content_;
      done_.push_back(on.fill(to.memory, to.content, always));
      break;
    case 1:
      to.content = ++last_content_;
      done_.push_back(on.upload(to.memory, host_buffer{elements(count, to.content)}, always));
      break;
    case 2:
      to.content = read(from, to);
      done_.push_back(on.copy(to.memory, from.memory, always));
      break;
    case 3:
      if (on_cuda()) // the launch computes on the host
        return;
      to.content = read(from, to) + read(other, to);
      done_.push_back(on.launch(sum_of_two, {}, {from.memory, other.memory}, {to.memory}, always));
      break;
    default:
      sum_up();
    }
  }

  void sum_up() {
    std::vector<buffer_of_elements> from;
    std::vector<buffer_of_elements> to;
    std::vector<known*> targets;
    std::uint32_t sum = 0;
    for (std::size_t rank = 0; rank < world_.size(); ++rank) {
      auto& a = any_of(rank);
      auto& b = any_of(rank);
      if (&a == &b || b.is_fixed)
        return;
      from.push_back(a.memory);
      to.push_back(b.memory);
      targets.push_back(&b);
      sum += a.content;
    }
    for (std::size_t rank = 0; rank < world_.size(); ++rank)
      for (auto& x : all_)
        x.is_fixed |= x.memory == from[rank] || x.memory == to[rank];
    for (auto* x : targets) {
      x->content = sum;
      x->is_of_ranks = true;
    }
    sums_.push_back(world_.all_reduce(from, to, reduce_op::sum, always));
  }

  /// Waits for all requests. None may have an error.
  void finish() {
    for (auto& x : std::exchange(done_, {}))
      EXPECT_TRUE(is_ok(answer_of(x)));
    for (auto& x : std::exchange(sums_, {})) {
      const auto sum = answer_of(x);
      EXPECT_TRUE(is_ok(sum));
      made_again_ += sum && sum->operation != x.number() ? 1 : 0;
    }
    for (auto& x : all_) {
      EXPECT_FALSE(x.memory.stale());
      EXPECT_TRUE(has(x.memory, x.content));
      x.is_fixed = x.is_of_ranks = false;
    }
  }

  std::mt19937_64 random_{1};
  world world_;
  std::vector<known> all_;
  std::vector<pending<void>> done_;
  std::vector<pending<collective_done>> sums_;
  std::uint32_t last_content_ = 0;
  int made_again_ = 0; ///< collectives
};

TEST_F(RetriesUnderLosses, LeaveNoErrorAndEveryResult) {
  begin();
  const int losses = on_cuda() ? 20 : 200; // a worker with a GPU takes a second to start
  for (int round = 0; round < losses && !HasFailure(); ++round) {
    SCOPED_TRACE("loss " + std::to_string(round));
    const auto lost = world_.device_of(pick(random_, 0, world_.size() - 1));
    const auto before = lost.incarnation();
    const auto process = static_cast<pid_t>(must(answer_of(lost.stats())).worker_pid);
    const auto requests = pick(random_, 10, 60);
    const auto last_before = pick(random_, 0, requests - 1);
    for (std::size_t i = 0; i < requests; ++i) {
      if (i == last_before) {
        ASSERT_EQ(::kill(process, SIGKILL), 0);
      }
      request_one();
    }
    EXPECT_TRUE(eventually([&] { return lost.incarnation() > before; }));
    finish();
  }
  EXPECT_GT(made_again_, losses / 10); // else the test shows little
  EXPECT_TRUE(works(world_));
}

} // namespace

} // namespace troupe::testing
