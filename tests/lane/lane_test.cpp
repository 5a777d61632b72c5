/// Lanes: order, bounds, completions, and the generations of a device.
#include "lane/lane.hpp"
#include "support/core_fixture.hpp"
#include "support/eventually.hpp"
#include "support/forwarding_backend.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <sys/resource.h>

namespace troupe {

namespace {

using detail::issue_outcome;
using detail::lane;
using detail::part;
using testing::allocate_bytes;
using testing::answer_of;
using testing::borrow;
using testing::core_system;
using testing::fault;
using testing::fault_plan;
using testing::gate;
using testing::has_code;
using testing::host_work;
using testing::is_ok;
using testing::must;
using testing::no_work;
using testing::probe;
using testing::settles;
using testing::verb;
using namespace std::chrono_literals;

/// A device whose completions must be polled, as CUDA's.
class silent_device : public testing::forwarding_device {
public:
  using forwarding_device::forwarding_device;

  bool signals_completion() const noexcept override { return false; }
  void set_completion_signal(std::function<void()>) noexcept override {}
};

class silent_backend final : public testing::forwarding_backend {
public:
  silent_backend() : forwarding_backend(make_host_backend({.devices = 1})) {}

  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<silent_device>(ordinal);
  }
};

/// A device whose work is over for the lane only from a time on that the test chooses, all at once.
class held_device final : public silent_device {
public:
  held_device(std::unique_ptr<backend_device> inner, std::atomic<bool>& lets_go)
      : silent_device(std::move(inner)), lets_go_(lets_go) {}

  caf::expected<bool> query(event_view event) noexcept override {
    if (!lets_go_)
      return false;
    if (auto error = inner_->synchronize(event))
      return error;
    return true;
  }

private:
  std::atomic<bool>& lets_go_;
};

class held_backend final : public testing::forwarding_backend {
public:
  held_backend() : forwarding_backend(make_host_backend({.devices = 1})) {}

  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<held_device>(ordinal, lets_go);
  }

  std::atomic<bool> lets_go{true};
};

/// Notes that it is over, on the lane.
class noted_probe final : public probe {
public:
  noted_probe(const std::shared_ptr<lane>& on, detail::stream_kind stream, std::vector<int>& over,
              int name)
      : probe({on}), over_(over), name_(name) {
    parts()[0].stream = stream;
  }

private:
  void on_settled() noexcept override { over_.push_back(name_); }

  std::vector<int>& over_;
  const int name_;
};

/// The last error that CUDA keeps for each thread. `fault` cannot be cleared.
thread_local int last_error = 0;
constexpr int fault = 700;

/// A device with such errors.
class erring_device final : public testing::forwarding_device {
public:
  using forwarding_device::forwarding_device;

  caf::error clear_last_error(std::string_view, std::string_view call,
                              std::uint64_t number) noexcept override {
    EXPECT_EQ(call, "launch");
    EXPECT_NE(number, 0u);
    if (last_error == fault)
      return make_error(errc::device_fault, "it stays");
    last_error = 0;
    return {};
  }
};

class erring_backend final : public testing::forwarding_backend {
public:
  erring_backend() : forwarding_backend(make_host_backend({.devices = 1})) {}

  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<erring_device>(ordinal);
  }
};

/// Waits for phases of the device, through a watcher.
class phase_watch {
public:
  explicit phase_watch(detail::device_state& state) : state_(state) {
    id_ = state.watch([seen = seen_](const device_changed& x) {
      std::lock_guard lock{seen->mutex};
      seen->changes.push_back(x);
      seen->changed.notify_all();
    });
  }
  ~phase_watch() { state_.unwatch(id_); }
  phase_watch(const phase_watch&) = delete;
  phase_watch& operator=(const phase_watch&) = delete;

  ::testing::AssertionResult reaches(device_phase phase) {
    std::unique_lock lock{seen_->mutex};
    if (seen_->changed.wait_for(lock, testing::patience,
                                [&] { return seen_->changes.back().phase == phase; }))
      return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "it is " << to_string(seen_->changes.back().phase);
  }
  std::vector<device_changed> changes() const {
    std::lock_guard lock{seen_->mutex};
    return seen_->changes;
  }

private:
  struct shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<device_changed> changes;
  };
  detail::device_state& state_;
  std::shared_ptr<shared> seen_ = std::make_shared<shared>();
  std::uint64_t id_ = 0;
};

std::shared_ptr<probe> start_probe(const core_system& system, probe::issue_function f = {}) {
  auto op = std::make_shared<probe>(std::vector{system.lane()}, std::move(f));
  system.runtime()->start(op);
  return op;
}

// -- order and bounds

// INV-6
TEST(Lane, IssuesInTheOrderOfAdmission) {
  core_system system{{.devices = 3}};
  std::vector<std::shared_ptr<lane>> lanes{system.lane(0), system.lane(1), system.lane(2)};
  std::array<std::vector<std::uint64_t>, 3> issued; // each written only by its lane
  std::vector<std::vector<std::shared_ptr<probe>>> by_client(4);
  std::vector<std::thread> clients;
  for (std::size_t c = 0; c < by_client.size(); ++c)
    clients.emplace_back([&, c] {
      for (int i = 0; i < 500; ++i) {
        auto op = std::make_shared<probe>(
            lanes, [&issued](part& p, lane& on) -> caf::expected<issue_outcome> {
              issued[static_cast<std::size_t>(on.state().ordinal())].push_back(p.of->number());
              return issue_outcome::finished;
            });
        system.runtime()->start(op);
        by_client[c].push_back(std::move(op));
      }
    });
  for (auto& x : clients)
    x.join();
  std::map<std::uint64_t, std::size_t> client_of;
  for (std::size_t c = 0; c < by_client.size(); ++c)
    for (auto& op : by_client[c]) {
      ASSERT_TRUE(is_ok(answer_of(op)));
      ASSERT_TRUE(settles(*op));
      client_of[op->number()] = c;
    }
  ASSERT_EQ(issued[0].size(), 2'000u);
  EXPECT_EQ(issued[1], issued[0]); // one order for all devices
  EXPECT_EQ(issued[2], issued[0]);
  std::array<std::uint64_t, 4> last{};
  for (auto number : issued[0]) {
    auto& before = last[client_of.at(number)];
    ASSERT_LT(before, number); // and it keeps each client's order
    before = number;
  }
}

TEST(Lane, BoundsWhatIsInFlight) {
  core_system system{{.lanes = {.in_flight_limit = 3}}};
  const auto worker = system.lane();
  gate held;
  auto first = system.device().launch(held.in_stream(), {}, {}, {});
  held.wait_reached();
  std::atomic<std::size_t> most{0};
  std::vector<std::shared_ptr<probe>> ops;
  for (int i = 0; i < 50; ++i)
    ops.push_back(start_probe(system, [&](part&, lane& on) -> caf::expected<issue_outcome> {
      most = std::max(most.load(), on.in_flight() + 1);
      return issue_outcome::enqueued;
    }));
  ASSERT_TRUE(
      testing::eventually([&] { return worker->in_flight() == 3 && worker->queued() == 48; }));
  held.open();
  for (auto& x : ops)
    EXPECT_TRUE(is_ok(answer_of(x)));
  EXPECT_EQ(most, 3u);
  EXPECT_TRUE(settles(*ops.back()));
  EXPECT_EQ(worker->in_flight(), 0u);
  EXPECT_EQ(worker->queued(), 0u);
}

TEST(Lane, RefusesMoreThanItsQueueHolds) {
  core_system system{{.lanes = {.in_flight_limit = 1, .queue_limit = 5}}};
  const auto device = system.device();
  gate held;
  auto first = device.launch(held.in_stream(), {}, {}, {});
  held.wait_reached();
  while (system.lane()->queued() != 0)
    std::this_thread::yield();
  std::vector<std::shared_ptr<detail::completion>> queued;
  for (int i = 0; i < 5; ++i)
    queued.push_back(device.launch(no_work(), {}, {}, {}));
  auto refused = device.launch(no_work(), {}, {}, {.room = room_policy::refuse});
  ASSERT_TRUE(refused->completed());
  EXPECT_TRUE(has_code(refused->error(), errc::overloaded));
  EXPECT_EQ(severity_of(errc::overloaded), severity::retry);
  held.open();
  for (auto& x : queued)
    EXPECT_TRUE(is_ok(answer_of(x)));
  EXPECT_TRUE(is_ok(answer_of(device.launch(no_work(), {}, {}, {}))));
}

TEST(Lane, TakesBoundsOfZeroForTheLeast) {
  core_system system{{.lanes = {.in_flight_limit = 0, .staging_bytes = 0}}};
  const auto device = system.device();
  auto memory = allocate_bytes(device, 100'000);
  std::vector<std::byte> sent(100'000, std::byte{5});
  std::vector<std::byte> received(100'000);
  EXPECT_TRUE(is_ok(answer_of(device.upload(memory, borrow(sent), {}))));
  EXPECT_TRUE(is_ok(answer_of(device.download(memory, borrow(received), {}))));
  EXPECT_EQ(received, sent);
}

TEST(Lane, TellsTheTruthAboutItself) {
  core_system system{{.lanes = {.in_flight_limit = 2}}};
  const auto device = system.device();
  gate held;
  auto first = device.launch(held.in_stream(), {}, {}, {});
  auto second = device.launch(no_work(), {}, {}, {});
  held.wait_reached();
  held.open();
  EXPECT_TRUE(is_ok(answer_of(second)));
  auto memory = allocate_bytes(device, 1 << 20);
  auto stats = device.stats({});
  must(answer_of(stats));
  EXPECT_EQ(stats->value.device, 0);
  EXPECT_EQ(stats->value.phase, device_phase::ready);
  EXPECT_EQ(stats->value.generation, 1u);
  EXPECT_EQ(stats->value.queued, 0u);
  EXPECT_EQ(stats->value.total_bytes - stats->value.free_bytes, std::uint64_t{1} << 20);
}

// -- completions

TEST(Lane, WakesWhenItIsParked) {
  core_system system{{.lanes = {.spin = 0us}}};
  const auto device = system.device();
  for (int i = 0; i < 2'000; ++i)
    ASSERT_TRUE(is_ok(answer_of(device.launch(no_work(), {}, {}, {}))));
}

TEST(Lane, CostsNothingWhenItIsIdle) {
  core_system system{{.devices = 8}};
  for (int i = 0; i < 8; ++i)
    must(answer_of(system.device(i).launch(no_work(), {}, {}, {})));
  const auto cpu = [] {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    const auto of = [](const timeval& x) { return x.tv_sec * 1s + x.tv_usec * 1us; };
    return of(used.ru_utime) + of(used.ru_stime);
  };
  std::this_thread::sleep_for(100ms); // earlier work ends
  const auto before = cpu();
  std::this_thread::sleep_for(500ms);
  EXPECT_LT(cpu() - before, 20ms);
}

TEST(Lane, LaunchesFindNoErrorThatOthersHaveLeft) {
  core_system system{{.backend = std::make_shared<erring_backend>()}};
  const auto device = system.device();
  std::atomic<int> found{0};
  const launch_function leave = [&](launch_context&) {
    found += last_error;
    last_error = 101;
    return caf::error{};
  };
  for (int i = 0; i < 3; ++i)
    ASSERT_TRUE(is_ok(answer_of(device.launch(leave, {}, {}, {}))));
  EXPECT_EQ(found, 0);
  const launch_function fail = [](launch_context&) {
    last_error = fault;
    return caf::error{}; // the launch ignores the error
  };
  EXPECT_TRUE(has_code(answer_of(device.launch(fail, {}, {}, {})), errc::device_fault));
}

class CompletionStrategies : public ::testing::TestWithParam<std::tuple<completion_strategy, int>> {
protected:
  core_system system_{{.lanes = {.completion = std::get<0>(GetParam()),
                                 .spin = std::chrono::microseconds{std::get<1>(GetParam())}},
                       .backend = std::make_shared<silent_backend>()}};
};

TEST_P(CompletionStrategies, SeeEveryEnd) {
  const auto device = system_.device();
  auto a = allocate_bytes(device, 4'096);
  auto b = allocate_bytes(device, 4'096);
  std::vector<std::byte> sent(4'096);
  std::vector<std::byte> received(4'096);
  for (int i = 0; i < 50; ++i) {
    std::fill(sent.begin(), sent.end(), static_cast<std::byte>(i));
    std::vector<std::shared_ptr<detail::completion>> all{device.upload(a, borrow(sent), {}),
                                                         device.copy(b, a, {})};
    for (int n = 0; n < 40; ++n)
      all.push_back(device.launch(no_work(), {b}, {b}, {}));
    all.push_back(device.download(b, borrow(received), {}));
    for (auto& x : all)
      ASSERT_TRUE(is_ok(answer_of(x)));
    ASSERT_EQ(received, sent);
  }
}

std::string strategy_name(const ::testing::TestParamInfo<CompletionStrategies::ParamType>& x) {
  constexpr const char* names[] = {"EventPoll", "HostFunc", "Synchronize"};
  const auto [strategy, spin] = x.param;
  return std::string{names[static_cast<std::size_t>(strategy)]} +
         (spin != 0 ? "Spinning" : "Parking");
}

INSTANTIATE_TEST_SUITE_P(Lane, CompletionStrategies,
                         ::testing::Combine(::testing::Values(completion_strategy::event_poll,
                                                              completion_strategy::host_func,
                                                              completion_strategy::synchronize),
                                            ::testing::Values(0, 200)),
                         strategy_name);

// With many operations in flight, a slow one does not delay the results of those before it.
TEST(Lane, AnswersWhatIsDoneBeforeASlowOne) {
  for (const bool silent : {false, true}) {
    core_system system{{.backend = silent ? std::make_shared<silent_backend>() : nullptr}};
    const auto device = system.device();
    gate front;
    gate slow;
    std::vector<std::shared_ptr<detail::completion>> before{
        device.launch(front.in_stream(), {}, {}, {})};
    for (int i = 0; i < 4; ++i)
      before.push_back(device.launch(no_work(), {}, {}, {}));
    auto held = device.launch(slow.in_stream(), {}, {}, {});
    std::vector<std::shared_ptr<detail::completion>> after;
    for (int i = 0; i < 30; ++i)
      after.push_back(device.launch(no_work(), {}, {}, {}));
    while (system.lane()->in_flight() != 36)
      std::this_thread::yield();
    front.open();
    slow.wait_reached();
    for (auto& x : before)
      ASSERT_TRUE(x->wait_until(detail::clock::now() + 10s)) << (silent ? "silent" : "signalling");
    EXPECT_FALSE(held->completed());
    slow.open();
    for (auto& x : after)
      EXPECT_TRUE(is_ok(answer_of(x)));
  }
}

// Many operations that are over at the same time, in one stream, delay no answer of another stream.
TEST(Lane, FinishesWorkOfAllItsStreamsInTurn) {
  constexpr int many = 64;
  using detail::stream_kind;
  for (const auto& [crowded, other] : {std::pair{stream_kind::compute, stream_kind::download},
                                       std::pair{stream_kind::download, stream_kind::compute}}) {
    const auto backend = std::make_shared<held_backend>();
    core_system system{{.backend = backend}};
    must(answer_of(system.device().launch(no_work(), {}, {}, {})));
    backend->lets_go = false;
    std::vector<int> over;
    std::vector<std::shared_ptr<noted_probe>> all;
    for (int i = 0; i <= many; ++i) {
      all.push_back(
          std::make_shared<noted_probe>(system.lane(), i == many ? other : crowded, over, i));
      system.runtime()->start(all.back());
    }
    EXPECT_TRUE(testing::eventually([&] { return system.lane()->in_flight() == many + 1; }));
    backend->lets_go = true;
    for (auto& x : all) {
      EXPECT_TRUE(is_ok(answer_of(x)));
      EXPECT_TRUE(settles(*x));
    }
    system.runtime()->close();
    ASSERT_EQ(over.size(), all.size());
    EXPECT_LT(std::ranges::find(over, many) - over.begin(), many / 2);
  }
}

TEST(Lane, FailsWhatItCannotAskFor) {
  const auto plan = std::make_shared<fault_plan>();
  core_system system{{.plan = plan, .backend = std::make_shared<silent_backend>()}};
  const auto device = system.device();
  gate front;
  std::vector<std::shared_ptr<detail::completion>> all{
      device.launch(front.in_stream(), {}, {}, {})};
  for (int i = 0; i < 40; ++i)
    all.push_back(device.launch(no_work(), {}, {}, {}));
  while (system.lane()->in_flight() != 41)
    std::this_thread::yield();
  plan->add({.on = verb::query, .times = testing::forever, .error = errc::cuda_error});
  front.open();
  for (auto& x : all)
    EXPECT_TRUE(has_code(answer_of(x), errc::cuda_error));
}

// INV-10
TEST(Lane, TellsWhatTheBackendCannotKnow) {
  const auto plan = std::make_shared<fault_plan>();
  core_system system{{.devices = 2, .plan = plan}};
  const auto device = system.device(1);
  auto memory = allocate_bytes(device, 64);
  plan->add({.on = verb::fill, .error = errc::cuda_error});
  auto op = device.fill(memory, std::uint8_t{0}, {});
  const auto told = failure_of(answer_of(op)).value();
  EXPECT_EQ(told.code, errc::cuda_error);
  EXPECT_EQ(told.verb, "fill");
  EXPECT_EQ(told.operation, op->number());
  EXPECT_EQ(told.device, 1);
  EXPECT_EQ(told.generation, 1u);
  EXPECT_EQ(told.rank, -1);
  EXPECT_EQ(told.api, "fill");
}

// -- opening a device

TEST(Lane, TriesAgainToComeUp) {
  const auto plan = std::make_shared<fault_plan>(
      0, std::vector<testing::fault_rule>{
             {.on = verb::bind, .error = errc::device_failed},
             {.on = verb::create_stream, .first = 2, .error = errc::cuda_error},
             {.on = verb::open_memory, .error = errc::cuda_error}});
  core_system system{{.lanes = {.open_attempts = 4, .open_backoff = 1ms}, .plan = plan}};
  auto early = system.device().launch(no_work(), {}, {}, {}); // waits for the device
  EXPECT_TRUE(is_ok(answer_of(early)));
  EXPECT_EQ(plan->injected(), 3u);
  EXPECT_EQ(system.lane()->state().generation(), 1u);
}

TEST(Lane, GivesUpToComeUp) {
  const auto plan = std::make_shared<fault_plan>(
      0, std::vector<testing::fault_rule>{
             {.on = verb::bind, .times = testing::forever, .error = errc::device_failed}});
  core_system system{{.lanes = {.open_attempts = 3, .open_backoff = 1ms}, .plan = plan}};
  const auto device = system.device();
  phase_watch watch{device.state()};
  auto early = device.launch(no_work(), {}, {}, {});
  EXPECT_TRUE(answer_of(early)) << "nothing can have run";
  EXPECT_TRUE(watch.reaches(device_phase::failed));
  EXPECT_EQ(plan->injected(), 3u);
  auto late = device.launch(no_work(), {}, {}, {});
  EXPECT_TRUE(has_code(answer_of(late), errc::unavailable));
}

// INV-12: requests that arrive while the device fails.
TEST(Lane, NeverSucceedsWhileItFailsToComeUp) {
  for (int round = 0; round < 300; ++round) {
    const auto plan = std::make_shared<fault_plan>(
        0, std::vector<testing::fault_rule>{
               {.on = verb::bind, .times = testing::forever, .error = errc::device_failed}});
    core_system system{{.lanes = {.open_attempts = 1}, .plan = plan}};
    const auto device = system.device();
    for (int i = 0; i < 20; ++i)
      ASSERT_TRUE(answer_of(device.launch(no_work(), {}, {}, {}))) << "round " << round;
  }
}

TEST(Lane, StopsWhileItTriesToComeUp) {
  const auto plan = std::make_shared<fault_plan>(
      0, std::vector<testing::fault_rule>{
             {.on = verb::bind, .times = testing::forever, .error = errc::device_failed}});
  const auto begin = detail::clock::now();
  {
    core_system system{{.lanes = {.open_attempts = 100, .open_backoff = 1h}, .plan = plan}};
    auto early = system.device().launch(no_work(), {}, {}, {});
    EXPECT_TRUE(plan->wait_injected(fault::fail, 1, testing::patience));
    system.runtime()->close();
    EXPECT_TRUE(has_code(answer_of(early), errc::unavailable));
  }
  EXPECT_LT(detail::clock::now() - begin, 4s);
}

// -- reset

// INV-8, INV-2
TEST(Lane, BeginsAnotherLife) {
  core_system system;
  const auto device = system.device();
  auto memory = allocate_bytes(device, 1 << 20);
  phase_watch watch{device.state()};
  gate running;
  std::vector<std::byte> bytes(1 << 20);
  auto user = device.launch(running.in_stream(), {memory}, {}, {});
  running.wait_reached();
  auto queued_user = device.download(memory, borrow(bytes), {});
  auto reset = device.reset({});
  EXPECT_TRUE(memory.stale());
  EXPECT_TRUE(has_code(memory.access(), errc::stale_ref));
  EXPECT_TRUE(has_code(answer_of(user), errc::device_reset));
  EXPECT_TRUE(has_code(answer_of(queued_user), errc::device_reset));
  EXPECT_TRUE(has_code(answer_of(device.fill(memory, std::uint8_t{0}, {})), errc::stale_ref));
  auto for_the_next = device.allocate(64, dtype::uint8, true, {}); // waits for the reset
  EXPECT_FALSE(reset->wait_until(detail::clock::now() + 50ms)) << "its memory is in use";
  EXPECT_FALSE(for_the_next->completed());
  running.open();
  EXPECT_TRUE(is_ok(answer_of(reset)));
  EXPECT_EQ(reset->value, 2u);
  EXPECT_TRUE(is_ok(answer_of(for_the_next)));
  EXPECT_EQ(for_the_next->value.generation(), 2u);
  EXPECT_TRUE(memory.stale());
  auto stats = device.stats({});
  must(answer_of(stats));
  EXPECT_EQ(stats->value.total_bytes - stats->value.free_bytes, 64u);
  std::vector<std::pair<device_phase, std::uint64_t>> seen;
  for (auto& x : watch.changes())
    seen.emplace_back(x.phase, x.generation);
  EXPECT_EQ(seen,
            (std::vector<std::pair<device_phase, std::uint64_t>>{
                {device_phase::ready, 1}, {device_phase::resetting, 1}, {device_phase::ready, 2}}));
}

TEST(Lane, AnswersAResetByItsDeadline) {
  core_system system;
  const auto device = system.device();
  gate running;
  auto user = device.launch(running.in_stream(), {}, {}, {});
  running.wait_reached();
  auto reset = device.reset({.deadline = 20ms});
  EXPECT_TRUE(has_code(answer_of(reset), errc::deadline_exceeded));
  EXPECT_TRUE(has_code(answer_of(device.reset({})), errc::unavailable)); // one is running
  phase_watch watch{device.state()};
  running.open();
  EXPECT_TRUE(watch.reaches(device_phase::ready)); // the reset still completes
  EXPECT_EQ(device.state().generation(), 2u);
  EXPECT_TRUE(has_code(answer_of(device.reset({.deadline = -1ms})), errc::deadline_exceeded));
  EXPECT_EQ(device.state().phase(), device_phase::ready);
}

// INV-8: a lane resets only a device closed for the reset, not one that was lost and reopened.
TEST(Lane, ResetsNoDeviceThatIsReady) {
  core_system system;
  const auto device = system.device();
  const auto memory = allocate_bytes(device, 64);
  system.lane()->request_reset();
  must(answer_of(device.launch(no_work(), {}, {}, {})));
  must(answer_of(device.launch(no_work(), {}, {}, {})));
  EXPECT_EQ(device.state().generation(), 1u);
  EXPECT_FALSE(memory.stale());
  EXPECT_TRUE(is_ok(answer_of(device.reset({}))));
  EXPECT_EQ(device.state().generation(), 2u);
}

TEST(Lane, WaitsForThoseWhoHoldTheDevice) {
  core_system system;
  const auto device = system.device();
  must(answer_of(device.launch(no_work(), {}, {}, {})));
  system.runtime()->hold(0);
  auto reset = device.reset({});
  EXPECT_FALSE(reset->wait_until(detail::clock::now() + 50ms));
  system.runtime()->unhold(0);
  EXPECT_TRUE(is_ok(answer_of(reset)));
}

TEST(Lane, FailsWhenItCannotBeginAnotherLife) {
  const auto plan = std::make_shared<fault_plan>();
  core_system system{{.plan = plan}};
  const auto device = system.device();
  must(answer_of(device.launch(no_work(), {}, {}, {})));
  plan->add({.on = verb::open_memory, .error = errc::device_failed});
  auto reset = device.reset({});
  auto behind = device.allocate(64, dtype::uint8, false, {});
  EXPECT_TRUE(has_code(answer_of(reset), errc::device_failed));
  EXPECT_TRUE(answer_of(behind));
  EXPECT_EQ(device.state().phase(), device_phase::failed);
  EXPECT_EQ(device.state().generation(), 1u);
  EXPECT_TRUE(has_code(answer_of(device.launch(no_work(), {}, {}, {})), errc::unavailable));
}

TEST(Lane, ResetsAgainAndAgainUnderLoad) {
  core_system system;
  const auto device = system.device();
  must(answer_of(device.stats({}))); // the device is ready
  std::atomic<bool> stop{false};
  std::vector<std::thread> clients;
  for (unsigned seed = 0; seed < 2; ++seed)
    clients.emplace_back([&, seed] {
      std::mt19937 random{seed};
      std::vector<std::byte> sent(3'000);
      std::vector<std::byte> received(3'000);
      while (!stop) {
        auto memory = device.allocate(3'000, dtype::uint8, false, {});
        if (answer_of(memory))
          continue;
        std::fill(sent.begin(), sent.end(), static_cast<std::byte>(random()));
        auto up = device.upload(memory->value, borrow(sent), {});
        auto down = device.download(memory->value, borrow(received), {});
        const auto up_told = answer_of(up);
        const auto told = answer_of(down);
        if (!told) {
          ASSERT_FALSE(up_told);
          ASSERT_EQ(received, sent);
        } else {
          ASSERT_TRUE(has_code(told, errc::device_reset) || has_code(told, errc::stale_ref))
              << describe(told);
        }
      }
    });
  for (std::uint64_t i = 2; i < 100; ++i) {
    auto reset = device.reset({});
    EXPECT_TRUE(is_ok(answer_of(reset)));
    EXPECT_EQ(reset->value, i);
  }
  stop = true;
  for (auto& x : clients)
    x.join();
}

// -- stopping

TEST(Lane, AnswersEverythingWhenItStops) {
  core_system system{{.lanes = {.in_flight_limit = 2}}};
  const auto device = system.device();
  gate running;
  std::vector<std::shared_ptr<detail::completion>> all{
      device.launch(running.in_stream(), {}, {}, {})};
  for (int i = 0; i < 20; ++i)
    all.push_back(device.launch(no_work(), {}, {}, {}));
  running.wait_reached();
  const auto why = make_error(errc::unavailable, "on purpose");
  device.shut_down(why);
  for (auto& x : all) {
    EXPECT_TRUE(x->completed());
    EXPECT_EQ(answer_of(x), why);
  }
  EXPECT_TRUE(has_code(answer_of(device.launch(no_work(), {}, {}, {})), errc::unavailable));
  running.open();
  detail::fair_limit limit{testing::patience};
  EXPECT_TRUE(system.lane()->join_within(limit));
}

TEST(Lane, TakesBackHandlesOnAnyThread) {
  any_gpu_ref outlives;
  std::atomic<int> freed{0};
  int adopted_bytes[4] = {};
  any_gpu_ref adopted;
  {
    core_system system;
    const auto device = system.device();
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&] {
        for (int i = 0; i < 200; ++i)
          allocate_bytes(device, 4'096);
      });
    for (auto& x : threads)
      x.join();
    auto stats = device.stats({});
    do {
      stats = device.stats({});
      must(answer_of(stats));
    } while (stats->value.free_bytes != stats->value.total_bytes);
    outlives = allocate_bytes(device, 64);
    adopted = must(device.adopt(adopted_bytes, 4, dtype::int32, [&](void*) { ++freed; }));
  }
  EXPECT_TRUE(outlives.stale());
  outlives = {};
  EXPECT_EQ(freed, 0);
  adopted = {};
  EXPECT_EQ(freed, 1);
}

// INV-12, INV-7: no operation that a fault ends is reported as a success.
TEST(Lane, FailsAllThatAFaultLetsGo) {
  for (int round = 0; round < 200; ++round) {
    auto plan = std::make_shared<fault_plan>();
    core_system system{{.devices = 2, .plan = plan}};
    std::vector<std::shared_ptr<detail::completion>> answers;
    std::vector<std::unique_ptr<gate>> gates;
    for (int i = 0; i < 2; ++i) {
      auto device = system.device(i);
      gates.push_back(std::make_unique<gate>());
      auto memory = allocate_bytes(device, 8);
      for (int n = 0; n < 50; ++n)
        answers.push_back(device.launch(gates.back()->in_stream(), {}, {memory}, {}));
    }
    for (auto& x : gates)
      x->wait_reached();
    plan->poison();
    for (auto& x : answers)
      ASSERT_TRUE(has_code(answer_of(x), errc::device_fault)) << "round " << round;
    for (auto& x : answers)
      ASSERT_EQ(x->error(), answers.front()->error());
    for (auto& x : gates)
      x->open();
  }
}

} // namespace

} // namespace troupe
