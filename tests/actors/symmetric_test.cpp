// Memory that communicators register: its lifetime, and its use by symmetric collectives.

#include "support/eventually.hpp"
#include "support/forwarding_backend.hpp"
#include "support/world_fixture.hpp"

#include <algorithm>
#include <atomic>
#include <thread>

namespace troupe::testing {
namespace {

constexpr std::size_t count = 1000;

/// Blocks the next lane that frees memory.
struct stop {
  std::atomic<bool> closed{false};
  flag reached;
  flag opened;

  void pass() {
    if (!closed.exchange(false))
      return;
    reached.set();
    opened.wait();
  }
};

/// Counts failed frees. A free fails if the memory is still in use as a window.
class watched_device final : public forwarding_device {
public:
  watched_device(std::unique_ptr<backend_device> inner, std::atomic<int>& wrong, stop& at_freeing)
      : forwarding_device(std::move(inner)), wrong_(wrong), at_freeing_(at_freeing) {}

  caf::error close_memory() noexcept override { return counted(inner_->close_memory()); }
  caf::error deallocate(void* memory, stream_view s) noexcept override {
    at_freeing_.pass();
    return counted(inner_->deallocate(memory, s));
  }

private:
  caf::error counted(caf::error error) {
    if (code_of(error) == errc::invalid_argument)
      ++wrong_;
    return error;
  }

  std::atomic<int>& wrong_;
  stop& at_freeing_;
};

class watched_backend final : public forwarding_backend {
public:
  using forwarding_backend::forwarding_backend;

  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<watched_device>(ordinal, wrong, at_freeing);
  }
  caf::error abort(communicator_ranks ranks) noexcept override {
    return counted(inner_->abort(std::move(ranks)));
  }
  caf::error destroy(communicator_ranks ranks) noexcept override {
    return counted(inner_->destroy(std::move(ranks)));
  }

  std::atomic<int> wrong{0};
  stop at_freeing;

private:
  caf::error counted(caf::error error) {
    if (code_of(error) == errc::invalid_argument)
      ++wrong;
    return error;
  }
};

/// After each test: no memory was freed too early, and no symmetric call was aborted.
class Symmetric : public ::testing::Test {
public:
  test_system make_system(int devices = 3) {
    return test_system{
        {.devices = devices, .faults = plan, .wrap = [this](std::shared_ptr<backend> inner) {
           watched = std::make_shared<watched_backend>(std::move(inner));
           return watched;
         }}};
  }

  void TearDown() override {
    if (watched) {
      EXPECT_EQ(watched->wrong.load(), 0);
    }
  }

  std::shared_ptr<fault_plan> plan = std::make_shared<fault_plan>();
  std::shared_ptr<watched_backend> watched;
};

std::vector<any_gpu_ref> allocate_symmetric(const world& on, dtype type, std::size_t number) {
  return must(on.allocate(type, number, {.symmetric = true}));
}

std::vector<any_gpu_ref> parts(const std::vector<any_gpu_ref>& of, std::size_t first,
                               std::size_t number) {
  std::vector<any_gpu_ref> result;
  for (auto& x : of)
    result.push_back(must(x.slice(first, number)));
  return result;
}

collective_data filled(const world& on, const input_spec& spec, std::vector<any_gpu_ref> refs) {
  collective_data result{spec, {}, std::move(refs)};
  result.spec.ranks = static_cast<int>(on.size());
  result.inputs = random_inputs(result.spec, result.send[0].count());
  for (std::size_t i = 0; i < on.size(); ++i)
    put(on.device_of(i), result.send[i], result.inputs[i]);
  return result;
}

/// For EXPECT_TRUE: an all-reduce in place is correct, and is symmetric or plain as expected.
::testing::AssertionResult goes(const world& on, const std::vector<any_gpu_ref>& refs,
                                bool symmetric, reduce_op op = reduce_op::sum) {
  const auto data = filled(on, {.type = refs[0].type(), .op = op}, refs);
  auto done = answer_of(on.all_reduce(refs, op));
  if (!done)
    return ::testing::AssertionFailure() << describe(done.error());
  if (auto right = reduced(on, data, refs); !right)
    return right;
  if (done->symmetric != symmetric)
    return ::testing::AssertionFailure() << (symmetric ? "went the plain way" : "went symmetric");
  return ::testing::AssertionSuccess();
}

/// For EXPECT_TRUE: the same, but waits first until the work of an ended communicator and the
/// connections of the next standby are done.
::testing::AssertionResult goes_symmetric_soon(const world& on,
                                               const std::vector<any_gpu_ref>& refs) {
  for (stopwatch time; time.elapsed() < patience;) {
    const auto data = filled(on, {.type = refs[0].type()}, refs);
    auto done = answer_of(on.all_reduce(refs));
    if (!done)
      return ::testing::AssertionFailure() << describe(done.error());
    if (auto right = reduced(on, data, refs); !right)
      return right;
    if (done->symmetric)
      return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "goes the plain way";
}

/// Concatenates the bytes, as all_gather does.
std::vector<std::byte> joined(const std::vector<std::vector<std::byte>>& all) {
  std::vector<std::byte> result;
  for (auto& x : all)
    result.insert(result.end(), x.begin(), x.end());
  return result;
}

// -- symmetric or plain

TEST_F(Symmetric, IsUsedForWhatIsSmallAndAtOnePlace) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  EXPECT_EQ(w.status().windows, 0u);
  const auto refs = allocate_symmetric(w, dtype::float32, 20'000);
  EXPECT_EQ(w.status().windows, 1u);
  EXPECT_FALSE(w.status().windows_reason);
  EXPECT_TRUE(goes(w, parts(refs, 0, 2), true));
  EXPECT_TRUE(goes(w, parts(refs, 100, count), true));
  EXPECT_TRUE(goes(w, parts(refs, 7, 1001), true));
  EXPECT_TRUE(goes(w, parts(refs, 0, 8192), true));
  EXPECT_TRUE(goes(w, parts(refs, 0, 8193), false)); // exceeds symmetric_bytes
  EXPECT_TRUE(goes(w, refs, false));
  EXPECT_TRUE(goes(w, must(w.allocate(dtype::float32, count)), false));
  EXPECT_TRUE(goes(w, parts(refs, 0, count), true));
}

TEST_F(Symmetric, HasAFormForSumsOfSmallFloats) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  for (auto type : all_dtypes)
    for (auto op : {reduce_op::sum, reduce_op::max, reduce_op::avg}) {
      const bool has_form =
          op == reduce_op::sum &&
          (type == dtype::float16 || type == dtype::bfloat16 || type == dtype::float32 ||
           type == dtype::float8_e4m3 || type == dtype::float8_e5m2);
      EXPECT_TRUE(goes(w, allocate_symmetric(w, type, 256), has_form, op))
          << to_string(type) << ' ' << to_string(op);
    }
}

TEST_F(Symmetric, MovesEveryTypeInAnAllGather) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  for (auto type : all_dtypes) {
    const auto data = filled(w, {.type = type}, allocate_symmetric(w, type, 100));
    const auto all = allocate_symmetric(w, type, 100 * w.size());
    EXPECT_TRUE(must(answer_of(w.all_gather(data.send, all))).symmetric) << to_string(type);
    std::vector<any_gpu_ref> in_place;
    for (std::size_t i = 0; i < w.size(); ++i) {
      EXPECT_TRUE(holds(w.device_of(i), all[i], joined(data.inputs)));
      put(w.device_of(i), all[i], random_bytes(all[i].size_bytes(), i));
      put(w.device_of(i), must(all[i].slice(100 * i, 100)), data.inputs[i]);
    }
    EXPECT_TRUE(must(answer_of(w.all_gather(all))).symmetric) << to_string(type);
    for (std::size_t i = 0; i < w.size(); ++i)
      EXPECT_TRUE(holds(w.device_of(i), all[i], joined(data.inputs)));
  }
}

TEST_F(Symmetric, ScattersSums) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  const auto n = w.size();
  for (bool in_place : {false, true}) {
    const auto data =
        filled(w, {.type = dtype::float32}, allocate_symmetric(w, dtype::float32, 100 * n));
    auto sums = allocate_symmetric(w, dtype::float32, 100);
    if (in_place)
      for (std::size_t i = 0; i < n; ++i)
        sums[i] = must(data.send[i].slice(100 * i, 100));
    EXPECT_TRUE(must(answer_of(w.reduce_scatter(data.send, sums))).symmetric);
    for (std::size_t i = 0; i < n; ++i) {
      std::vector<std::vector<std::byte>> inputs;
      for (auto& x : data.inputs) {
        auto first = x.begin() + static_cast<std::ptrdiff_t>(400 * i);
        inputs.emplace_back(first, first + 400);
      }
      const auto output = must(get(w.device_of(i), sums[i]));
      const auto result = check(dtype::float32, reduce_op::sum, inputs, output, data.spec.kind);
      EXPECT_TRUE(result) << to_string(result);
    }
  }
}

// Ranks with different kernels would hang.
TEST_F(Symmetric, GoesThePlainWayUnlessAllRanksAreAlike) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  const auto a = allocate_symmetric(w, dtype::float32, count);
  const auto b = allocate_symmetric(w, dtype::float32, count);
  const auto plain = must(w.allocate(dtype::float32, count));
  auto with = [](std::vector<any_gpu_ref> refs, const any_gpu_ref& other) {
    refs.back() = other;
    return refs;
  };
  EXPECT_TRUE(goes(w, with(a, plain.back()), false));
  EXPECT_TRUE(goes(w, with(plain, a.back()), false));
  EXPECT_TRUE(goes(w, with(a, b.back()), false));
  EXPECT_TRUE(
      goes(w, with(parts(a, 0, 100), must(a.back().slice(100, 100))), false)); // another offset
  const auto data = filled(w, {.type = dtype::float32}, a);
  EXPECT_FALSE(must(answer_of(w.all_reduce(a, plain))).symmetric);
  EXPECT_TRUE(reduced(w, data, plain));
  EXPECT_TRUE(must(answer_of(w.all_reduce(a, b))).symmetric);
  EXPECT_TRUE(reduced(w, data, b));
  EXPECT_TRUE(must(answer_of(w.all_reduce(parts(a, 0, 100), parts(b, 50, 100)))).symmetric);
  EXPECT_FALSE(must(answer_of(w.broadcast(a[0], b, 0))).symmetric);
  EXPECT_TRUE(goes(w, a, true));
}

TEST_F(Symmetric, RankLocalCallsDecideWhenAllAreThere) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  const auto a = allocate_symmetric(w, dtype::float32, count);
  const auto plain = must(w.allocate(dtype::float32, count));
  for (bool symmetric : {true, false, true}) {
    auto refs = a;
    if (!symmetric)
      refs.front() = plain.front();
    const auto data = filled(w, {.type = dtype::float32}, refs);
    std::vector<pending<collective_done>> all;
    for (std::size_t i = 0; i < w.size(); ++i)
      all.push_back(w.rank(i).all_reduce(refs[i]));
    for (auto& x : all)
      EXPECT_EQ(must(answer_of(x)).symmetric, symmetric);
    EXPECT_TRUE(reduced(w, data, refs));
  }
}

TEST_F(Symmetric, ComesByMessage) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  const auto all = must(
      ask<world_buffers>(system, w.actor(), allocate_all{count, dtype::float32, {true, true}, {}}));
  ASSERT_EQ(all.refs.size(), w.size());
  const std::vector<float> zeros(count);
  for (std::size_t i = 0; i < w.size(); ++i)
    EXPECT_TRUE(holds(w.device_of(i), all.refs[i], zeros));
  EXPECT_TRUE(goes(w, all.refs, true));
  const auto plain =
      must(ask<world_buffers>(system, w.actor(), allocate_all{count, dtype::float32, {true}, {}}));
  EXPECT_TRUE(holds(w.device_of(1), plain.refs[1], zeros));
  EXPECT_TRUE(goes(w, plain.refs, false));
}

TEST_F(Symmetric, CanBeSwitchedOff) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world({.limits = {.symmetric_bytes = 0}});
  EXPECT_TRUE(goes(w, allocate_symmetric(w, dtype::float32, 2), false));
}

TEST_F(Symmetric, OneRankNeedsNone) {
  auto system = make_system(1);
  auto w = system.open_world();
  EXPECT_TRUE(goes(w, allocate_symmetric(w, dtype::float32, 2), false));
}

TEST_F(Symmetric, ManyInFlightStayInOrder) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  const auto refs = must(w.allocate<float>(2, {.zeroed = true, .symmetric = true}));
  const std::vector<float> ones(2, 1.f);
  for (std::size_t i = 0; i < w.size(); ++i)
    put(w.device_of(i), refs[i], bytes_of(ones));
  std::vector<pending<collective_done>> all;
  constexpr int operations = 12;
  for (int k = 0; k < operations; ++k)
    all.push_back(w.all_reduce(refs));
  for (auto& x : all)
    EXPECT_TRUE(is_ok(answer_of(x)));
  float want = 1;
  for (int k = 0; k < operations; ++k)
    want *= static_cast<float>(w.size());
  EXPECT_TRUE(holds(w.device_of(0), refs[0], std::vector<float>(2, want)));
}

// -- work that may block it

// A symmetric kernel cannot be aborted. If earlier work may delay a rank, the plain path is used.
TEST_F(Symmetric, GoesThePlainWayBehindWhatMayStandStill) {
  TROUPE_NEEDS_DEVICES(2);
  TROUPE_HOST_ONLY("a launch holds its stream");
  auto system = make_system();
  auto w = system.open_world();
  const auto refs = allocate_symmetric(w, dtype::float32, 2);
  {
    gate held;
    auto launched = held.hold_stream(w.device_of(1), {}, {refs[1]});
    ASSERT_TRUE(held.wait_reached());
    auto behind = w.all_reduce(refs);
    EXPECT_FALSE(must(behind.wait_for(20ms)));
    held.open();
    EXPECT_FALSE(must(answer_of(behind)).symmetric);
  }
  EXPECT_TRUE(goes(w, refs, true));
}

// If a lane does not reach the call, no kernel is issued, and the world continues.
TEST_F(Symmetric, ARankThatIsNotThereEndsTheCommunicatorAlone) {
  TROUPE_HOST_ONLY("a lane is held");
  auto system = make_system();
  world_config config;
  config.limits.stall_limit = 100ms;
  config.limits.quiet_limit = std::chrono::seconds{10};
  auto w = system.open_world(config);
  const auto refs = allocate_symmetric(w, dtype::float32, 2);
  {
    gate held;
    auto launched = held.hold_lane(w.device_of(1));
    ASSERT_TRUE(held.wait_reached());
    const auto why = error_of(answer_of(w.all_reduce(refs)));
    EXPECT_TRUE(has_code(why, errc::stalled));
    EXPECT_EQ(failure_of(why)->rank, 1);
  }
  const auto again = must(w.allocate(dtype::float32, 2, {.symmetric = true}));
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(goes_symmetric_soon(w, again));
  EXPECT_TRUE(goes_symmetric_soon(w, refs));
  EXPECT_EQ(w.status().epoch, 2u);
}

// Idle lanes commit to issue a symmetric sum. After one lane has issued it, the other lanes must
// issue it before any other work.
TEST_F(Symmetric, ResetsAmongSmallSumsLeaveNoneStanding) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system(2);
  auto w = system.open_world();
  world_feed feed{system, w.actor()};
  for (std::uint64_t round = 0; round < 20; ++round) {
    const auto refs = allocate_symmetric(w, dtype::float32, 2);
    ASSERT_TRUE(goes_symmetric_soon(w, refs));
    std::atomic<std::uint64_t> sums{0};
    std::thread client{[&] {
      for (;; ++sums)
        if (auto done = answer_of(w.all_reduce(refs)); !done) {
          const auto code = code_of(done.error());
          EXPECT_TRUE(code == errc::device_reset || code == errc::stale_ref)
              << describe(done.error());
          sums = 1'000'000;
          return;
        }
    }};
    for (stopwatch time; sums < 5 * round && time.elapsed() < patience;)
      std::this_thread::yield();
    EXPECT_GE(sums, 5 * round);
    EXPECT_TRUE(is_ok(answer_of(w.device_of(1).reset())));
    client.join();
    feed.until([&](auto& x) { return x.phase == world_phase::ready && x.epoch >= round + 2; });
  }
}

TEST_F(Symmetric, AResetBesideALaneThatFreesMemoryWaitsForIt) {
  TROUPE_NEEDS_DEVICES(2);
  TROUPE_HOST_ONLY("memory is freed at once");
  auto system = make_system(2);
  auto w = system.open_world();
  world_feed feed{system, w.actor()};
  auto refs = allocate_symmetric(w, dtype::float32, 2);
  EXPECT_TRUE(goes(w, refs, true));
  {
    auto plain = must(answer_of(w.device_of(1).allocate(dtype::float32, 2)));
    watched->at_freeing.closed = true;
    plain = {};
    ASSERT_TRUE(watched->at_freeing.reached.wait());
    auto sum = w.all_reduce(refs);
    auto reset = w.device_of(1).reset();
    EXPECT_TRUE(has_code(answer_of(sum), errc::device_reset));
    EXPECT_FALSE(must(reset.wait_for(20ms)));
    watched->at_freeing.opened.set();
    EXPECT_TRUE(is_ok(answer_of(reset)));
  }
  feed.until([](auto& x) { return x.phase == world_phase::ready && x.epoch >= 2; });
  EXPECT_TRUE(goes_symmetric_soon(w, allocate_symmetric(w, dtype::float32, 2)));
}

// The requests fail although the kernel cannot be ended.
TEST_F(Symmetric, ARankThatNeverStartsIsTheEndOfTheDevices) {
  TROUPE_HOST_ONLY("a fault plan");
  TROUPE_IN_PROCESS_ONLY("there it is the end of that one worker");
  auto system = make_system();
  world_config config;
  config.limits.stall_limit = 100ms;
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  const auto refs = allocate_symmetric(w, dtype::float32, 2);
  plan->add({fault::not_issued, verb::collective, 1});
  stopwatch time;
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(refs)), errc::stalled));
  EXPECT_LT(time.elapsed(), at_once);
  EXPECT_TRUE(has_code(feed.until(world_phase::failed).reason, errc::lane_stuck));
  EXPECT_TRUE(refs[0].stale());
}

// -- registration

TEST_F(Symmetric, OneThatCannotBeRegisteredIsPlain) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  plan->add({fault::fail, verb::register_window});
  const auto refs = allocate_symmetric(w, dtype::float32, count);
  const auto now = w.status();
  EXPECT_EQ(now.phase, world_phase::ready);
  EXPECT_EQ(now.epoch, 1u);
  EXPECT_EQ(now.windows, 0u);
  EXPECT_TRUE(has_code(now.windows_reason, errc::nccl_error));
  EXPECT_TRUE(goes(w, refs, false));
  // The ranks may disagree about their windows, so this communicator uses no windows any more.
  const auto more = allocate_symmetric(w, dtype::float32, count);
  EXPECT_TRUE(goes(w, more, false));
  EXPECT_TRUE(works(w));
}

TEST_F(Symmetric, NoMemoryIsNoEnd) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  plan->add({fault::out_of_memory, verb::allocate_symmetric, 1});
  EXPECT_TRUE(
      has_code(w.allocate(dtype::float32, count, {.symmetric = true}), errc::out_of_memory));
  EXPECT_TRUE(has_code(w.allocate(dtype::float64, ~std::size_t{0}, {.symmetric = true}),
                       errc::out_of_memory));
  EXPECT_TRUE(goes(w, allocate_symmetric(w, dtype::float32, count), true));
}

// The communicator keeps its windows until all lanes have processed the release.
TEST_F(Symmetric, MemoryComesBackWhenItsHandlesAreGone) {
  TROUPE_HOST_ONLY("exact numbers of bytes");
  auto system = make_system();
  auto w = system.open_world();
  auto free_bytes = [&] { return must(answer_of(w.device_of(0).stats())).free_bytes; };
  const auto before = free_bytes();
  auto refs = allocate_symmetric(w, dtype::float32, count);
  EXPECT_LT(free_bytes(), before);
  auto last = refs.back();
  auto running = w.all_reduce(refs);
  refs.clear();
  EXPECT_TRUE(is_ok(answer_of(running)));
  EXPECT_LT(free_bytes(), before); // the handle of one rank keeps all of it
  EXPECT_EQ(w.status().windows, 1u);
  last = {};
  while (free_bytes() != before)
    std::this_thread::yield();
  EXPECT_EQ(w.status().windows, 0u);
  for (int k = 0; k < 20; ++k)
    EXPECT_TRUE(goes(w, allocate_symmetric(w, dtype::float32, count + k), true));
}

TEST_F(Symmetric, HandlesMayGoWhileOperationsAreInFlight) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  std::vector<pending<collective_done>> all;
  for (int k = 0; k < 20; ++k)
    all.push_back(w.all_reduce(must(w.allocate(dtype::float32, 2, {true, true}))));
  for (auto& x : all)
    EXPECT_TRUE(must(answer_of(x)).symmetric);
}

// -- the next communicator

TEST_F(Symmetric, HandlesMayGoWhileTheNextCommunicatorRegistersTheirs) {
  TROUPE_HOST_ONLY("exact numbers of bytes");
  auto system = make_system();
  auto w = system.open_world();
  auto free_bytes = [&] { return must(answer_of(w.device_of(0).stats())).free_bytes; };
  const auto plain = must(w.allocate(dtype::int32, 2));
  const auto before = free_bytes();
  auto refs = allocate_symmetric(w, dtype::float32, count);
  plan->add({fault::block, verb::register_window});
  plan->add({fault::fail, verb::collective, 1});
  EXPECT_FALSE(answer_of(w.all_reduce(plain)));
  // On all lanes: a lane that reached the block after the release would hang for ever.
  ASSERT_TRUE(plan->wait_injected(fault::block, static_cast<std::uint64_t>(w.size()), patience));
  refs.clear();
  // This request runs only after earlier releases have been processed.
  const std::vector<std::byte> one(4, std::byte{1});
  auto on_the_lane_that_stands = w.device_of(0).fill(plain[0], one, {.deadline = 1ms});
  EXPECT_TRUE(has_code(answer_of(on_the_lane_that_stands), errc::deadline_exceeded));
  plan->release();
  EXPECT_TRUE(eventually([&] { return free_bytes() == before; }));
  EXPECT_EQ(w.status().windows, 0u);
}

TEST_F(Symmetric, TheNextCommunicatorRegistersItBeforeItIsUsed) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  const auto refs = allocate_symmetric(w, dtype::float32, count);
  EXPECT_TRUE(goes(w, refs, true));
  plan->add({fault::fail, verb::collective, 1});
  EXPECT_FALSE(answer_of(w.all_reduce(must(w.allocate(dtype::int32, 2)))));
  EXPECT_TRUE(goes_symmetric_soon(w, refs));
  EXPECT_EQ(w.status().epoch, 2u);
  EXPECT_EQ(w.status().windows, 1u);
}

TEST_F(Symmetric, TheStandbyHasItsOwnWindows) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  world_config config;
  config.limits.standby = standby_policy::same;
  config.limits.restart_backoff = 1ms;
  auto w = system.open_world(config);
  const auto early = allocate_symmetric(w, dtype::float32, count); // possibly before the standby
  world_feed feed{system, w.actor()};
  feed.until([](auto& x) { return x.standby_ready; });
  const auto late = allocate_symmetric(w, dtype::float32, count);
  for (std::uint64_t epoch = 2; epoch < 5; ++epoch) {
    plan->add({fault::fail, verb::collective, 1});
    EXPECT_FALSE(answer_of(w.all_reduce(must(w.allocate(dtype::int32, 2)))));
    EXPECT_TRUE(goes_symmetric_soon(w, early));
    EXPECT_TRUE(goes_symmetric_soon(w, late));
    EXPECT_EQ(w.status().windows, 2u);
    feed.until([&](auto& x) { return x.standby_ready && x.epoch >= epoch; });
  }
}

TEST_F(Symmetric, AResetEndsItAndTheOtherRanksStayPlain) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  world_feed feed{system, w.actor()};
  auto refs = allocate_symmetric(w, dtype::float32, count);
  EXPECT_TRUE(goes(w, refs, true));
  EXPECT_TRUE(is_ok(answer_of(w.device_of(1).reset())));
  feed.until([](auto& x) { return x.phase == world_phase::ready && x.epoch >= 2; });
  EXPECT_TRUE(refs[1].stale());
  EXPECT_FALSE(refs[0].stale());
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(refs)), errc::stale_ref));
  refs[1] = must(answer_of(w.device_of(1).allocate(dtype::float32, count)));
  EXPECT_TRUE(goes(w, refs, false));
  EXPECT_EQ(w.status().windows, 0u);
  EXPECT_TRUE(goes_symmetric_soon(w, allocate_symmetric(w, dtype::float32, count)));
}

TEST_F(Symmetric, OneAskedForWhileTheWorldBuildsIsPlainUntilThen) {
  TROUPE_HOST_ONLY("a fault plan");
  plan->add({fault::block, verb::build});
  auto system = make_system();
  const auto actor = system.spawn_world();
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  const auto all = must(
      ask<world_buffers>(system, actor, allocate_all{count, dtype::float32, {true, true}, {}}));
  EXPECT_EQ(must(ask<world_status>(system, actor, get_status{})).windows, 0u);
  plan->release();
  while (!must(ask<collective_done>(system, actor, all_reduce{.send = all.refs})).symmetric)
    std::this_thread::yield();
  EXPECT_EQ(must(ask<world_status>(system, actor, get_status{})).windows, 1u);
  caf::anon_send_exit(actor, caf::exit_reason::user_shutdown);
}

// -- lifetime after the world

TEST_F(Symmetric, HandlesOutliveTheWorldAndItsSystem) {
  TROUPE_NEEDS_DEVICES(2);
  std::vector<any_gpu_ref> refs;
  std::vector<any_gpu_ref> others;
  {
    auto system = make_system();
    auto keeper = system.open();
    {
      auto w = system.open_world();
      refs = allocate_symmetric(w, dtype::float32, count);
      EXPECT_TRUE(goes(w, refs, true));
    }
    const auto content = random_bytes(refs[0].size_bytes(), 3);
    put(keeper, refs[0], content);
    EXPECT_TRUE(holds(keeper, refs[0], content));
    auto w = system.open_world();
    EXPECT_TRUE(goes(w, refs, false)); // it belongs to another world
    others = allocate_symmetric(w, dtype::float32, count);
    EXPECT_TRUE(goes(w, others, true));
  }
  EXPECT_TRUE(refs[0].stale());
  EXPECT_TRUE(others[0].stale());
}

TEST_F(Symmetric, WorldsThatOverlapHaveTheirOwn) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system(2);
  auto a = system.open_world({.name = "a"});
  auto b = system.open_world({.name = "b"});
  const auto of_a = must(a.allocate(dtype::float32, 2, {true, true}));
  const auto of_b = must(b.allocate(dtype::float32, 2, {true, true}));
  EXPECT_TRUE(goes(a, of_a, true));
  EXPECT_TRUE(goes(b, of_b, true));
  EXPECT_TRUE(goes(b, of_a, false));
  std::vector<std::thread> clients;
  std::atomic<int> failed{0};
  for (auto* x : {&a, &b})
    clients.emplace_back([&, x] {
      const auto& refs = x == &a ? of_a : of_b;
      for (int k = 0; k < 300; ++k)
        if (!answer_of(x->all_reduce(refs)))
          ++failed;
    });
  for (auto& x : clients)
    x.join();
  EXPECT_EQ(failed.load(), 0);
}

} // namespace
} // namespace troupe::testing
