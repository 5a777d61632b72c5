/// The end of operations: each is completed once and settled once, and fails if an input fails.
#include "foundation/spin.hpp"
#include "operation/admission_lock.hpp"
#include "operation/buffer.hpp"
#include "operation/use_of.hpp"
#include "support/core_fixture.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace troupe {

namespace {

using detail::issue_outcome;

using testing::allocate_bytes;
using testing::answer_of;
using testing::borrow;
using testing::core_system;
using testing::eventually;
using testing::failing_work;
using testing::gate;
using testing::has_code;
using testing::host_work;
using testing::is_ok;
using testing::no_work;
using testing::probe;
using testing::settles;
using namespace std::chrono_literals;

/// Counts the instances that are alive.
class counted_probe final : public probe {
public:
  using probe::probe;
  static inline std::atomic<int> alive{0};

private:
  struct counter {
    counter() { alive.fetch_add(1); }
    ~counter() { alive.fetch_sub(1); }
    counter(const counter&) = delete;
    counter& operator=(const counter&) = delete;
  };
  counter counter_;
};

std::shared_ptr<probe> in_place(const core_system& system, const any_gpu_ref& memory,
                                probe::issue_function on_issue = {}) {
  auto op = std::make_shared<counted_probe>(std::vector{system.lane()}, std::move(on_issue));
  op->add_use(detail::use_of(memory, true, true));
  return op;
}

// INV-1
TEST(Operation, AnswersOnceHoweverItsEndsRace) {
  core_system system;
  constexpr int rounds = 10'000;
  std::vector<std::shared_ptr<probe>> ops;
  std::vector<std::atomic<int>> answers(rounds);
  for (int i = 0; i < rounds; ++i) {
    ops.push_back(std::make_shared<probe>(std::vector{system.lane()}));
    ops.back()->on_answer([&answers, i] { answers[static_cast<std::size_t>(i)].fetch_add(1); });
  }
  const auto broken = make_error(errc::cuda_error, "on purpose");
  std::barrier sync{4};
  const auto race = [&](auto act) {
    return std::thread{[&, act] {
      for (auto& op : ops) {
        sync.arrive_and_wait();
        act(*op);
      }
    }};
  };
  std::array threads{race([](probe& x) { x.cancel(); }), race([](probe& x) { x.expire(); }),
                     race([&](probe& x) { x.fail(broken); })};
  for (auto& op : ops) {
    sync.arrive_and_wait();
    system.runtime()->start(op);
  }
  for (auto& x : threads)
    x.join();
  for (int i = 0; i < rounds; ++i) {
    auto& op = *ops[static_cast<std::size_t>(i)];
    ASSERT_TRUE(settles(op));
    ASSERT_TRUE(op.completed());
    ASSERT_FALSE(op.answer_again());
    ASSERT_EQ(answers[static_cast<std::size_t>(i)], 1) << "operation " << i;
    const auto code = code_of(op.error());
    ASSERT_TRUE(!op.error() || code == errc::cancelled || code == errc::deadline_exceeded ||
                code == errc::cuda_error)
        << describe(op.error());
    ASSERT_EQ(op.issued(), op.withdrawn() ? 0 : 1);
    ASSERT_TRUE(op.error() || op.issued() == 1) << "operation " << i << " succeeded without a deed";
  }
  EXPECT_TRUE(eventually([&] { return system.deadlines().size() == 0; }));
}

/// A failure that comes too late: its work is done, and `on_success` has begun.
class late_failure final : public probe {
public:
  using probe::probe;
  const caf::error why = make_error(errc::cuda_error, "on purpose");

private:
  void on_success() noexcept override { fail(why); }
};

// INV-12: what a request wrote is unreadable if its answer is an error, and only then.
TEST(Operation, CannotFailOnceItSucceeds) {
  core_system system;
  auto memory = allocate_bytes(system.device(), 64);
  auto op = std::make_shared<late_failure>(std::vector{system.lane()});
  op->add_use(detail::use_of(memory, false, true));
  system.runtime()->start(op);
  EXPECT_TRUE(is_ok(answer_of(op)));
  EXPECT_TRUE(settles(*op));
  EXPECT_FALSE(op->failed());
  EXPECT_TRUE(memory.access());
}

TEST(Operation, AgreesWithItsMemoryHoweverLateItFails) {
  core_system system;
  const auto broken = make_error(errc::cuda_error, "on purpose");
  std::barrier sync{2};
  std::shared_ptr<probe> op; // null: there are no more
  std::thread failing{[&] {
    for (int i = 0;; ++i) {
      sync.arrive_and_wait();
      if (!op)
        return;
      for (int n = i % 64; n > 0; --n)
        detail::pause();
      op->fail(broken);
      sync.arrive_and_wait();
    }
  }};
  const auto enough = detail::clock::now() + 10s; // a round takes long on shared cores
  for (int i = 0; i < 20'000 && detail::clock::now() < enough; ++i) {
    auto memory = allocate_bytes(system.device(), 64);
    op = std::make_shared<probe>(std::vector{system.lane()}, [](detail::part&, detail::lane&) {
      return issue_outcome::finished;
    });
    op->add_use(detail::use_of(memory, false, true));
    sync.arrive_and_wait();
    system.runtime()->start(op);
    sync.arrive_and_wait();
    EXPECT_TRUE(settles(*op));
    EXPECT_EQ(is_ok(answer_of(op)), static_cast<bool>(memory.access())) << "round " << i;
  }
  op = nullptr;
  sync.arrive_and_wait();
  failing.join();
}

// INV-12: the lane may reach an operation while it is being cancelled.
TEST(Operation, NeverSucceedsWithoutADeed) {
  core_system system{{.lanes = {.spin = 100ms}}};
  std::mt19937 random{17};
  const auto enough = detail::clock::now() + 10s; // a round takes long on shared cores
  for (int i = 0; i < 10'000 && detail::clock::now() < enough; ++i) {
    auto op = std::make_shared<probe>(std::vector{system.lane()});
    system.runtime()->start(op);
    for (auto n = random() % 32; n > 0; --n)
      detail::pause();
    op->cancel();
    ASSERT_TRUE(settles(*op));
    ASSERT_TRUE(op->issued() == 1 || has_code(answer_of(op), errc::cancelled)) << "round " << i;
  }
}

TEST(Operation, NeverIssuesWhatIsWithdrawn) {
  core_system system{{.lanes = {.in_flight_limit = 1}}};
  auto device = system.device();
  gate held;
  auto first = device.launch(held.in_stream(), {}, {}, {});
  held.wait_reached();
  std::vector<std::shared_ptr<probe>> ops;
  for (int i = 0; i < 200; ++i) {
    ops.push_back(std::make_shared<probe>(std::vector{system.lane()}));
    system.runtime()->start(ops.back());
  }
  std::mt19937 random{11};
  std::vector<bool> withdrawn;
  for (auto& op : ops) {
    withdrawn.push_back(random() % 2 == 0);
    if (withdrawn.back()) {
      op->cancel();
      EXPECT_TRUE(has_code(op->error(), errc::cancelled)); // at once, although the lane is blocked
    }
  }
  held.open();
  for (std::size_t i = 0; i < ops.size(); ++i) {
    EXPECT_TRUE(settles(*ops[i]));
    EXPECT_EQ(ops[i]->issued(), withdrawn[i] ? 0 : 1);
    EXPECT_EQ(static_cast<bool>(answer_of(ops[i])), withdrawn[i]);
  }
  EXPECT_EQ(system.lane()->queued(), 0u);
}

// INV-4
TEST(Operation, KeepsItsMemoryAfterAnEarlyAnswer) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 1 << 16);
  const std::weak_ptr<detail::buffer> watched{memory.memory()};
  auto* address = memory.memory()->address();
  gate held;
  auto op = device.launch(host_work([pass = held.passer(), address] {
                            pass();
                            std::fill_n(address, 1 << 16, std::byte{1});
                          }),
                          {}, {memory}, {});
  held.wait_reached();
  op->cancel();
  EXPECT_TRUE(has_code(answer_of(op), errc::cancelled));
  memory = {};
  EXPECT_FALSE(op->settled());
  EXPECT_FALSE(watched.expired());
  held.open();
  EXPECT_TRUE(eventually([&] { return watched.expired(); }));
  EXPECT_TRUE(op->settled());
}

TEST(Operation, LetsMemoryGoThatItsCallableHolds) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  const std::weak_ptr<detail::buffer> watched{memory.memory()};
  {
    auto op = device.launch(
        [memory](launch_context&) {
          return memory.access() ? caf::error{} : make_error(errc::internal, "");
        },
        {memory}, {memory}, {});
    EXPECT_TRUE(is_ok(answer_of(op)));
  }
  memory = {};
  EXPECT_TRUE(eventually([&] { return watched.expired(); }));
}

// INV-12
TEST(Operation, FailsThoseWhoReadWhatItWrites) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  auto beside = allocate_bytes(device, 64);
  const auto half = testing::must(memory.slice(32, 32));
  gate held;
  std::vector<std::byte> bytes(64);
  std::vector<std::byte> half_bytes(32);
  auto writer = device.launch(
      [pass = held.passer()](launch_context&) {
        pass();
        return make_error(errc::invalid_argument, "on purpose");
      },
      {}, {testing::must(memory.slice(0, 32))}, {});
  held.wait_reached();
  auto reader = device.download(memory, borrow(bytes), {});
  auto in_place_reader = device.launch(no_work(), {memory}, {memory}, {});
  auto readers_reader = device.copy(beside, memory, {});
  auto last = device.launch(no_work(), {beside}, {}, {});
  auto overwriter = device.fill(memory, std::uint8_t{3}, {});
  auto reads_overwritten = device.launch(no_work(), {memory}, {}, {});
  auto other_half = device.download(half, borrow(half_bytes), {});
  held.open();
  EXPECT_TRUE(has_code(answer_of(writer), errc::launch_failed));
  for (auto& x : {reader, in_place_reader, readers_reader, last})
    EXPECT_EQ(answer_of(x), answer_of(writer)) << describe(answer_of(x));
  for (auto& x : {overwriter, reads_overwritten, other_half})
    EXPECT_TRUE(is_ok(answer_of(x)));
}

/// Memory stays unreadable behind operations that were to overwrite or accept it, but failed,
/// before their lane comes to them.
TEST(Operation, PassesOnAtOnceWhatItLeavesUnreadable) {
  core_system system{{.devices = 2}};
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  gate held;
  gate write;
  auto lane = device.launch(held.on_lane(), {}, {}, {});
  held.wait_reached();
  auto writer = std::make_shared<probe>(
      std::vector{system.lane(1)},
      [pass = write.passer()](detail::part&, detail::lane&) -> caf::expected<issue_outcome> {
        pass();
        return make_error(errc::cuda_error, "on purpose");
      });
  writer->add_use(detail::use_of(testing::must(memory.slice(0, 32)), false, true));
  system.runtime()->start(writer);
  write.wait_reached();
  auto accepts = device.accept(memory, {});
  write.open();
  EXPECT_TRUE(has_code(answer_of(writer), errc::cuda_error));
  EXPECT_TRUE(has_code(answer_of(accepts), errc::cuda_error));
  EXPECT_TRUE(has_code(memory.access(), errc::indeterminate));
  EXPECT_TRUE(testing::must(memory.slice(32, 32)).access());

  auto overwrites = device.fill(memory, std::uint8_t{3}, {});
  EXPECT_TRUE(memory.access()); // from the call on
  overwrites->cancel();
  EXPECT_TRUE(has_code(answer_of(overwrites), errc::cancelled));
  EXPECT_TRUE(has_code(memory.access(), errc::indeterminate));
  EXPECT_FALSE(lane->completed());
  held.open();
  EXPECT_TRUE(settles(*writer));
  EXPECT_TRUE(is_ok(answer_of(device.fill(memory, std::uint8_t{4}, {}))));
  EXPECT_TRUE(memory.access());
}

TEST(Operation, IsAnsweredAfterThoseItBuildsOn) {
  core_system system;
  auto device = system.device();
  auto a = allocate_bytes(device, 64);
  auto b = allocate_bytes(device, 64);
  std::vector<std::byte> bytes(64);
  for (int round = 0; round < 200; ++round) {
    std::mutex mutex;
    std::vector<int> order;
    gate held;
    std::vector<std::shared_ptr<detail::completion>> chain{
        device.launch(held.in_stream(), {}, {a}, {}), device.copy(b, a, {}),
        device.launch(no_work(), {b}, {b}, {}), device.download(b, borrow(bytes), {})};
    for (int i = 0; i < 4; ++i)
      chain[static_cast<std::size_t>(i)]->on_answer([&, i] {
        std::lock_guard lock{mutex};
        order.push_back(i);
      });
    held.open();
    for (auto& x : chain)
      EXPECT_TRUE(is_ok(answer_of(x)));
    while (true) { // listeners run after the completion
      std::lock_guard lock{mutex};
      if (order.size() == 4)
        break;
    }
    ASSERT_EQ(order, (std::vector<int>{0, 1, 2, 3}));
  }
}

/// Chains of operations in place, each on the result before it. They need no deep stack.
class OperationChain : public ::testing::TestWithParam<bool> {};

TEST_P(OperationChain, EndsWithoutRecursion) {
  constexpr std::size_t length = 200'000;
  const bool fails = GetParam();
  core_system system{{.lanes = {.queue_limit = 2 * length}}};
  auto memory = allocate_bytes(system.device(), 64);
  const auto before = counted_probe::alive.load();
  gate held;
  auto first = in_place(
      system, memory, [&](detail::part& p, detail::lane& on) -> caf::expected<issue_outcome> {
        EXPECT_TRUE(is_ok(on.device().launch_host(
            on.stream(p.stream), [](void* x) { static_cast<gate*>(x)->passer()(); }, &held)));
        return issue_outcome::enqueued;
      });
  system.runtime()->start(first);
  held.wait_reached();
  std::weak_ptr<probe> middle;
  std::shared_ptr<probe> last;
  for (std::size_t i = 0; i < length; ++i) {
    last =
        in_place(system, memory, [](detail::part&, detail::lane&) -> caf::expected<issue_outcome> {
          return issue_outcome::finished;
        });
    system.runtime()->start(last);
    if (i == length / 2)
      middle = last;
  }
  EXPECT_FALSE(last->completed());
  if (fails)
    first->fail(make_error(errc::cuda_error, "on purpose"));
  held.open();
  const auto answer = answer_of(last);
  EXPECT_TRUE(fails ? has_code(answer, errc::cuda_error) : is_ok(answer));
  EXPECT_TRUE(settles(*last));
  first = nullptr;
  last = nullptr;
  EXPECT_TRUE(eventually([&] { return counted_probe::alive == before; }));
  EXPECT_TRUE(middle.expired());
}

INSTANTIATE_TEST_SUITE_P(Ends, OperationChain, ::testing::Bool(),
                         [](const auto& x) { return x.param ? "Fails" : "Succeeds"; });

TEST(Operation, LeavesNothingBehindInALongRun) {
  core_system system;
  auto memory = allocate_bytes(system.device(), 64);
  const auto before = counted_probe::alive.load();
  int most = 0;
  for (int i = 0; i < 20'000; ++i) {
    auto op = in_place(system, memory);
    system.runtime()->start(op);
    most = std::max(most, counted_probe::alive - before);
    if (i % 64 == 0) {
      EXPECT_TRUE(is_ok(answer_of(op)));
    }
  }
  EXPECT_LE(most, 2 * 64 + 2);
  detail::admission_lock lock;
  EXPECT_LE(memory.memory()->accesses.size(), 2u);
}

TEST(Operation, RefusesADeadlineInThePast) {
  core_system system;
  auto op = std::make_shared<probe>(std::vector{system.lane()});
  op->deadline = detail::clock::now() - 1ms;
  system.runtime()->start(op);
  EXPECT_TRUE(op->completed());
  EXPECT_TRUE(has_code(op->error(), errc::deadline_exceeded));
  const auto why = failure_of(op->error());
  EXPECT_EQ(why->operation, op->number());
  EXPECT_EQ(why->verb, "probe");
  EXPECT_EQ(op->issued(), 0);
}

// A part that fails to be issued after another part was issued.
TEST(Operation, TellsThatAPartWasLost) {
  core_system system{{.devices = 2}};
  const std::vector lanes{system.lane(0), system.lane(1)};
  for (std::size_t broken = 0; broken < 2; ++broken) {
    std::atomic<int> calls{0};
    auto op = std::make_shared<probe>(
        lanes, [&, broken](detail::part& p, detail::lane&) -> caf::expected<issue_outcome> {
          calls.fetch_add(1);
          while (calls < 2) // both parts are being issued
            std::this_thread::yield();
          if (p.index == broken)
            return make_error(errc::cuda_error, "on purpose");
          return issue_outcome::enqueued;
        });
    system.runtime()->start(op);
    EXPECT_TRUE(has_code(answer_of(op), errc::cuda_error));
    EXPECT_TRUE(settles(*op));
    EXPECT_GE(op->lost(), 1);
  }
}

TEST(Operation, DescribesItsParts) {
  core_system system{{.devices = 2}};
  gate held;
  auto busy = system.device(1).launch(held.in_stream(), {}, {}, {});
  held.wait_reached();
  auto op = std::make_shared<probe>(std::vector{system.lane(0), system.lane(1)});
  system.runtime()->start(op);
  while (op->parts()[0].at != detail::part::state::done ||
         op->parts()[1].at != detail::part::state::issued)
    std::this_thread::yield();
  const auto told = op->describe(errc::stalled, "text");
  EXPECT_EQ(told.parts, (std::vector{part_state::done, part_state::issued}));
  EXPECT_EQ(told.operation, op->number());
  held.open();
  EXPECT_TRUE(is_ok(answer_of(op)));
}

} // namespace

} // namespace troupe
