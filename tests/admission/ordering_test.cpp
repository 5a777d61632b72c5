/// Hazards between streams, and how failures propagate along them.
#include "device/operations.hpp"
#include "foundation/spin.hpp"
#include "operation/admission_lock.hpp"
#include "operation/use_of.hpp"
#include "support/backend_fixture.hpp"
#include "support/core_fixture.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace troupe {

namespace {

/// Returns a kind of streams of a lane.
detail::stream_kind some_stream(std::uint64_t number) {
  auto result = static_cast<detail::stream_kind>(number % detail::stream_count);
  return detail::in_lane_stream(result) ? result : detail::stream_kind::compute;
}

using testing::allocate_bytes;
using testing::answer_of;
using testing::borrow;
using testing::core_system;
using testing::failing_work;
using testing::gate;
using testing::has_code;
using testing::host_work;
using testing::is_ok;
using testing::must;
using testing::no_work;
using testing::patience;
using testing::probe;
using testing::settles;
using testing::stream_gate;
using namespace std::chrono_literals;

std::byte* address(const any_gpu_ref& ref) { return static_cast<std::byte*>(must(ref.access())); }

/// Reads device memory directly, not through the library.
std::vector<std::byte> content(const any_gpu_ref& ref) {
  return {address(ref), address(ref) + ref.size_bytes()};
}

void poke(const any_gpu_ref& ref, std::byte value) {
  std::fill_n(address(ref), ref.size_bytes(), value);
}

// INV-9 and INV-12: the cancelled operation was between a reader and a writer.
TEST(Ordering, KeepsTheOrderAroundAWithdrawnOperation) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  auto beside = allocate_bytes(device, 64);
  poke(memory, std::byte{1});
  std::vector<std::byte> seen;
  gate reading;
  gate lane;
  auto reader = device.launch(host_work([&, pass = reading.passer(), from = address(memory)] {
                                pass();
                                seen.assign(from, from + 64);
                              }),
                              {memory}, {}, {});
  reading.wait_reached();
  auto held = device.launch(lane.on_lane(), {}, {}, {});
  lane.wait_reached();
  std::vector<std::byte> twos(64, std::byte{2});
  std::vector<std::byte> threes(64, std::byte{3});
  std::vector<std::byte> back(64);
  auto withdrawn = device.upload(memory, borrow(twos), {});
  auto writer = device.upload(memory, borrow(threes), {});
  auto other = device.download(beside, borrow(back), {});
  withdrawn->cancel();
  EXPECT_TRUE(has_code(answer_of(withdrawn), errc::cancelled));
  lane.open();
  EXPECT_TRUE(is_ok(answer_of(other))); // admitted last: the lane has passed the writer
  EXPECT_FALSE(writer->wait_until(detail::clock::now() + 50ms)) << "it overtook the reader";
  reading.open();
  EXPECT_TRUE(is_ok(answer_of(reader)));
  EXPECT_TRUE(is_ok(answer_of(writer)));
  EXPECT_EQ(seen, std::vector<std::byte>(64, std::byte{1}));
  EXPECT_EQ(content(memory), threes);
}

// INV-12: for every order of admission and the end of the writer.
TEST(Ordering, FailsWhatReadsAFailedWrite) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 8);
  std::vector<std::byte> bytes(8);
  std::mt19937 random{7};
  for (int i = 0; i < 20'000; ++i) {
    must(answer_of(device.fill(memory, std::uint8_t{1}, {})));
    auto writer = device.launch(failing_work(), {}, {memory}, {});
    for (auto n = random() % 64; n > 0; --n)
      detail::pause();
    auto reader = device.download(memory, borrow(bytes), {});
    EXPECT_TRUE(has_code(answer_of(writer), errc::launch_failed));
    ASSERT_TRUE(answer_of(reader)) << "round " << i << ": it read what a failed launch was writing";
  }
}

/// Returns a launch that blocks its stream, then adds `by` to every byte.
launch_function add_later(gate& held, const any_gpu_ref& memory, int by) {
  return host_work([pass = held.passer(), at = address(memory), size = memory.size_bytes(), by] {
    pass();
    for (std::size_t i = 0; i < size; ++i)
      at[i] = static_cast<std::byte>(std::to_integer<int>(at[i]) + by);
  });
}

// INV-9
TEST(Ordering, ReadsWhatAnotherStreamWrites) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  poke(memory, std::byte{1});
  gate held;
  std::vector<std::byte> bytes(64);
  auto writer = device.launch(add_later(held, memory, 1), {memory}, {memory}, {});
  auto reader = device.download(memory, borrow(bytes), {});
  EXPECT_FALSE(reader->wait_until(detail::clock::now() + 20ms));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(reader)));
  EXPECT_EQ(bytes, std::vector<std::byte>(64, std::byte{2}));
}

// A user's work on its own stream is done before operations behind the release of its buffer run.
// This holds whatever the result of the release is, and whatever part of the buffer it names.
class Releasing : public ::testing::Test {
protected:
  void SetUp() override {
    acquire(memory);
    EXPECT_TRUE(is_ok(answer_of(last)));
    users.enqueue(lane->device(), user);
    users.wait_reached();
    lane_stands = device.launch(on_lane.on_lane(), {}, {}, {});
    on_lane.wait_reached();
  }

  void acquire(const any_gpu_ref& ref, access_mode mode = access_mode::read_write) {
    begin(std::make_shared<detail::acquire_operation>(ref, mode, user));
  }
  void release(const any_gpu_ref& ref, access_mode mode = access_mode::read_write) {
    begin(std::make_shared<detail::release_operation>(ref, mode, must(lane->mark_user(user))));
  }
  void begin(std::shared_ptr<detail::operation_of<detail::nothing>> op) {
    last = std::move(op);
    last->parts()[0].on = lane.get();
    last->deadline = detail::clock::now() + patience;
    system.runtime()->start(last);
  }

  void expect_order(const any_gpu_ref& written) {
    std::vector<std::byte> bytes(written.size_bytes());
    auto writer = device.upload(written, borrow(bytes), {});
    on_lane.open();
    EXPECT_FALSE(writer->wait_until(detail::clock::now() + 50ms)) << "it overtook the user's work";
    users.open();
    EXPECT_TRUE(is_ok(answer_of(writer)));
    EXPECT_EQ(lane->state().acquired(), 0);
  }

  core_system system;
  std::shared_ptr<detail::lane> lane = system.lane();
  detail::device_core device = system.device();
  any_gpu_ref memory = allocate_bytes(device, 64);
  stream_view user = must(lane->device().create_stream());
  stream_gate users;
  gate on_lane;
  std::shared_ptr<detail::operation_of<detail::nothing>> last;
  std::shared_ptr<detail::operation_of<detail::nothing>> lane_stands;
};

TEST_F(Releasing, TakenBackOrdersAllTheSame) {
  release(memory);
  last->cancel();
  EXPECT_TRUE(has_code(answer_of(last), errc::cancelled));
  expect_order(memory);
}

TEST_F(Releasing, ByAPartOrdersTheWholeBuffer) {
  release(must(memory.slice(0, 8)));
  expect_order(must(memory.slice(32, 32)));
  EXPECT_TRUE(is_ok(answer_of(last)));
}

TEST_F(Releasing, DoesNotWaitForOtherStreams) {
  on_lane.open();
  release(memory);
  const auto held = last;
  const auto other = allocate_bytes(device, 64);
  user = must(lane->device().create_stream());
  acquire(other);
  EXPECT_TRUE(is_ok(answer_of(last)));
  release(other);
  EXPECT_TRUE(is_ok(answer_of(last)));
  EXPECT_FALSE(held->completed());
  users.open();
  EXPECT_TRUE(is_ok(answer_of(held)));
}

TEST_F(Releasing, HoldsUpNoOtherWork) {
  on_lane.open();
  const auto other = allocate_bytes(device, 64);
  constexpr int more_than_may_be_in_flight = 300;
  for (int i = 0; i < more_than_may_be_in_flight; ++i) {
    acquire(other, access_mode::read);
    ASSERT_TRUE(is_ok(answer_of(last)));
    release(other, access_mode::read);
  }
  std::vector<std::byte> bytes(64);
  EXPECT_TRUE(is_ok(answer_of(device.download(other, borrow(bytes), {}))));
  EXPECT_FALSE(last->completed());
  users.open();
  EXPECT_TRUE(is_ok(answer_of(last)));
}

// Ranges outside the acquired range stay indeterminate.
TEST_F(Releasing, HealsWhatWasAcquiredAndNoMore) {
  users.open();
  on_lane.open();
  release(memory);
  EXPECT_TRUE(is_ok(answer_of(last)));
  const auto half = must(memory.slice(0, 32));
  const auto other = must(memory.slice(32, 32));
  EXPECT_TRUE(
      has_code(answer_of(device.launch(failing_work(), {}, {memory}, {})), errc::launch_failed));
  acquire(other, access_mode::write);
  EXPECT_TRUE(is_ok(answer_of(last)));
  release(memory, access_mode::write);
  EXPECT_TRUE(is_ok(answer_of(last)));
  std::vector<std::byte> bytes(32);
  EXPECT_TRUE(is_ok(answer_of(device.download(other, borrow(bytes), {}))));
  EXPECT_TRUE(has_code(answer_of(device.download(half, borrow(bytes), {})), errc::indeterminate));
}

TEST(Ordering, WritesAfterAnotherStreamRead) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  poke(memory, std::byte{1});
  gate held;
  std::vector<std::byte> bytes(64, std::byte{9});
  std::vector<std::byte> seen;
  auto reader = device.launch(host_work([&, pass = held.passer(), at = address(memory)] {
                                pass();
                                seen.assign(at, at + 64);
                              }),
                              {memory}, {}, {});
  auto writer = device.upload(memory, borrow(bytes), {});
  EXPECT_FALSE(writer->wait_until(detail::clock::now() + 20ms));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(writer)));
  EXPECT_EQ(seen, std::vector<std::byte>(64, std::byte{1}));
  EXPECT_EQ(content(memory), bytes);
}

TEST(Ordering, WritesAfterAnotherStreamWrote) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  gate held;
  std::vector<std::byte> bytes(64, std::byte{9});
  auto first = device.launch(add_later(held, memory, 1), {}, {memory}, {});
  auto second = device.upload(memory, borrow(bytes), {});
  EXPECT_FALSE(second->wait_until(detail::clock::now() + 20ms));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(second)));
  EXPECT_TRUE(is_ok(answer_of(first)));
  EXPECT_EQ(content(memory), bytes);
}

TEST(Ordering, DoesNotOrderWhatHasNothingInCommon) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  const auto left = must(memory.slice(0, 32));
  const auto right = must(memory.slice(32, 32));
  gate held;
  std::vector<std::byte> bytes(32, std::byte{9});
  auto writer = device.launch(add_later(held, left, 1), {}, {left}, {});
  held.wait_reached();
  EXPECT_TRUE(is_ok(answer_of(device.upload(right, borrow(bytes), {}))));
  EXPECT_TRUE(is_ok(answer_of(device.download(right, borrow(bytes), {}))));
  EXPECT_FALSE(writer->completed());
  auto reader = device.download(left, borrow(bytes), {});
  EXPECT_FALSE(reader->wait_until(detail::clock::now() + 20ms));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(reader)));
}

// INV-9: every byte has the value of a serial execution.
TEST(Ordering, AgreesWithOneAfterTheOther) {
  constexpr std::size_t size = 96;
  constexpr std::size_t buffers = 3;
  core_system system{{.lanes = {.in_flight_limit = 64}}};
  auto device = system.device();
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random{seed};
    std::array<any_gpu_ref, buffers> memory;
    std::array<std::vector<std::byte>, buffers> model;
    for (std::size_t i = 0; i < buffers; ++i) {
      memory[i] = allocate_bytes(device, size);
      poke(memory[i], static_cast<std::byte>(i));
      model[i].assign(size, static_cast<std::byte>(i));
    }
    struct download {
      std::vector<std::byte> got;
      std::vector<std::byte> wanted;
    };
    std::vector<std::unique_ptr<download>> downloads;
    std::vector<std::unique_ptr<std::vector<std::byte>>> uploads;
    std::vector<std::shared_ptr<detail::completion>> all;
    for (int step = 0; step < 40; ++step) {
      const auto which = random() % buffers;
      const auto first = random() % size;
      const auto count = 1 + random() % (size - first);
      const auto part = must(memory[which].slice(first, count));
      const auto at = model[which].begin() + static_cast<std::ptrdiff_t>(first);
      const auto value = static_cast<std::byte>(random());
      switch (random() % 6) {
      case 0:
        all.push_back(device.fill(part, static_cast<std::uint8_t>(value), {}));
        std::fill_n(at, count, value);
        break;
      case 1: {
        auto& source = *uploads.emplace_back(std::make_unique<std::vector<std::byte>>(count));
        for (auto& x : source)
          x = static_cast<std::byte>(random());
        all.push_back(device.upload(part, borrow(source), {}));
        std::copy(source.begin(), source.end(), at);
        break;
      }
      case 2: {
        auto& x = *downloads.emplace_back(std::make_unique<download>());
        x.got.assign(count, std::byte{0xEE});
        x.wanted.assign(at, at + static_cast<std::ptrdiff_t>(count));
        all.push_back(device.download(part, borrow(x.got), {}));
        break;
      }
      case 3: { // from another buffer
        const auto from = (which + 1 + random() % (buffers - 1)) % buffers;
        const auto from_first = random() % (size - count + 1);
        all.push_back(device.copy(part, must(memory[from].slice(from_first, count)), {}));
        std::copy_n(model[from].begin() + static_cast<std::ptrdiff_t>(from_first), count, at);
        break;
      }
      case 4: { // in place, and slow
        const auto spins = random() % 2'000;
        all.push_back(device.launch(host_work([address = address(part), count, value, spins] {
                                      for (unsigned n = 0; n < spins; ++n)
                                        detail::pause();
                                      for (std::size_t i = 0; i < count; ++i)
                                        address[i] ^= value;
                                    }),
                                    {part}, {part}, {}));
        for (std::size_t i = 0; i < count; ++i)
          at[static_cast<std::ptrdiff_t>(i)] ^= value;
        break;
      }
      default: { // on the collective stream, from one buffer to another
        const auto from = (which + 1) % buffers;
        const auto source = must(memory[from].slice(first, count));
        auto op = std::make_shared<probe>(
            std::vector{system.lane()},
            [to = address(part), source_address = address(source),
             count](detail::part& p, detail::lane& on) -> caf::expected<detail::issue_outcome> {
              if (auto error =
                      on.device().copy(to, source_address, count, copy_direction::device_to_device,
                                       on.stream(p.stream)))
                return error;
              return detail::issue_outcome::enqueued;
            });
        op->parts()[0].stream = detail::stream_kind::collective;
        op->add_use(detail::use_of(source, true, false));
        op->add_use(detail::use_of(part, false, true));
        system.runtime()->start(op);
        all.push_back(op);
        std::copy_n(model[from].begin() + static_cast<std::ptrdiff_t>(first), count, at);
      }
      }
    }
    for (auto& x : all)
      ASSERT_TRUE(is_ok(answer_of(x))) << "seed " << seed;
    for (auto& x : downloads)
      ASSERT_EQ(x->got, x->wanted) << "seed " << seed;
    for (std::size_t i = 0; i < buffers; ++i)
      ASSERT_EQ(content(memory[i]), model[i]) << "seed " << seed;
  }
}

/// Returns an issue function for work on the host, in the stream of its part.
template <class F> probe::issue_function in_stream(std::shared_ptr<F> todo) {
  return [todo](detail::part& p, detail::lane& on) -> caf::expected<detail::issue_outcome> {
    auto error =
        on.device().launch_host(on.stream(p), [](void* x) { (*static_cast<F*>(x))(); }, todo.get());
    if (error)
      return error;
    return detail::issue_outcome::enqueued;
  };
}

// The same with operations that are cancelled at random: each runs completely or not at all.
TEST(Ordering, AgreesWithOneAfterTheOtherWhenSomeAreTakenBack) {
  constexpr std::size_t size = 64;
  core_system system{{.lanes = {.in_flight_limit = 4}}};
  auto device = system.device();
  auto memory = allocate_bytes(device, size);
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random{seed};
    poke(memory, std::byte{0});
    std::vector<std::shared_ptr<probe>> ops;
    std::vector<std::byte> values;
    // Each operation writes its value to all bytes on a random stream and keeps the old content.
    std::vector<std::vector<std::byte>> found(30);
    for (std::size_t i = 0; i < found.size(); ++i) {
      values.push_back(static_cast<std::byte>(i + 1));
      struct work {
        std::byte* at;
        std::byte value;
        std::vector<std::byte>* found;
        void operator()() {
          found->assign(at, at + size);
          std::fill_n(at, size, value);
        }
      };
      auto todo = std::make_shared<work>(work{address(memory), values[i], &found[i]});
      auto op = std::make_shared<probe>(std::vector{system.lane()}, in_stream(todo));
      op->parts()[0].stream = some_stream(random());
      op->parts()[0].peer = static_cast<int>(random() % 3);
      op->add_use(detail::use_of(memory, false, true));
      system.runtime()->start(op);
      ops.push_back(op);
    }
    for (auto& op : ops)
      if (random() % 2 == 0)
        op->cancel();
    std::byte before{0};
    for (std::size_t i = 0; i < ops.size(); ++i) {
      ASSERT_TRUE(settles(*ops[i]));
      if (ops[i]->withdrawn()) {
        ASSERT_TRUE(found[i].empty());
        continue;
      }
      ASSERT_EQ(found[i], std::vector<std::byte>(size, before))
          << "seed " << seed << ", operation " << i;
      before = values[i];
    }
    ASSERT_EQ(content(memory), std::vector<std::byte>(size, before));
  }
}

/// Starts an operation of one part that does nothing and writes `memory`.
template <class P>
std::shared_ptr<P> start_writing(const core_system& system, const std::vector<any_gpu_ref>& memory,
                                 int ordinal = 0) {
  auto op = std::make_shared<P>(std::vector{system.lane(ordinal)});
  for (auto& x : memory)
    op->add_use(detail::use_of(x, false, true));
  system.runtime()->start(op);
  return op;
}

/// An operation that waits until `may_go` is set.
class waiting_probe : public probe {
public:
  using probe::probe;
  const void* waits_for(detail::locked) const override { return may_go.load() ? nullptr : this; }
  std::atomic<bool> may_go{false};
};

// The same over several buffers. Some operations wait for a condition that no lane sets, and others
// wait behind them. A cancelled operation there blocks no other and keeps no position in the order.
TEST(Ordering, AgreesWithOneAfterTheOtherWhenSomeAreTakenBackThatWait) {
  constexpr std::size_t size = 32;
  constexpr std::size_t count = 40;
  core_system system{{.devices = 2, .lanes = {.in_flight_limit = 4}}};
  std::vector<any_gpu_ref> memory;
  for (int i = 0; i < 4; ++i)
    memory.push_back(allocate_bytes(system.device(i / 2), size));
  struct access {
    std::size_t memory;
    std::size_t begin;
    std::size_t end;
    bool writes;
    std::byte* at;
    std::vector<std::byte> found;
  };
  struct work {
    std::vector<access> accesses;
    std::byte value;
    void operator()() {
      for (auto& a : accesses) {
        a.found.assign(a.at + a.begin, a.at + a.end);
        if (a.writes)
          std::fill(a.at + a.begin, a.at + a.end, value);
      }
    }
  };
  std::size_t overtaken = 0; // operations that ran while an older one waited
  for (unsigned seed = 0; seed < 1000; ++seed) {
    std::mt19937 random{seed};
    auto any = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    for (auto& x : memory)
      poke(x, std::byte{0});
    std::vector<std::shared_ptr<waiting_probe>> ops;
    std::vector<std::shared_ptr<work>> works;
    auto let_go = [&](waiting_probe& op) {
      op.may_go.store(true);
      system.runtime()->admissions().go_on();
    };
    for (std::size_t i = 0; i < count; ++i) {
      auto todo = std::make_shared<work>();
      todo->value = static_cast<std::byte>(i + 1);
      auto op = std::make_shared<waiting_probe>(std::vector{system.lane(static_cast<int>(any(2)))},
                                                in_stream(todo));
      op->parts()[0].stream = some_stream(any(detail::stream_count - 1));
      op->parts()[0].peer = static_cast<int>(any(3));
      op->may_go = any(4) != 0;
      bool writes = any(3) != 0; // a reader of a cancelled write fails with it
      for (std::size_t m = 0; m < memory.size(); ++m) {
        if (any(3) == 0)
          continue;
        auto begin = any(3) == 0 ? any(size - 1) : 0;
        auto end = any(3) == 0 ? begin + 1 + any(size - begin) : size;
        auto part = must(memory[m].slice(begin, end - begin));
        op->add_use(detail::use_of(part, !writes, writes));
        todo->accesses.push_back({m, begin, end, writes, address(memory[m]), {}});
      }
      system.runtime()->start(op);
      ops.push_back(op);
      works.push_back(todo);
      if (any(2) == 0)
        ops[any(ops.size())]->cancel();
      if (any(8) == 0)
        let_go(*ops[any(ops.size())]);
    }
    for (auto n = any(10); n > 0; --n)
      ops[any(ops.size())]->cancel();
    for (auto& op : ops)
      if (op->issued() != 0)
        overtaken += std::any_of(ops.begin(), ops.end(), [&](auto& other) {
          return !other->may_go && other->position() < op->position();
        });
    std::vector<std::size_t> order(ops.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    for (auto i : order)
      let_go(*ops[i]);
    std::vector<std::vector<std::byte>> model(memory.size(), std::vector<std::byte>(size));
    for (std::size_t i = 0; i < ops.size(); ++i) {
      ASSERT_TRUE(settles(*ops[i])) << "seed " << seed << ", operation " << i;
      ASSERT_TRUE(!ops[i]->withdrawn() || ops[i]->issued() == 0) << "seed " << seed;
      if (ops[i]->failed())
        continue;
      for (auto& a : works[i]->accesses) {
        auto first = model[a.memory].begin();
        auto begin = first + static_cast<std::ptrdiff_t>(a.begin);
        auto end = first + static_cast<std::ptrdiff_t>(a.end);
        ASSERT_TRUE(std::equal(begin, end, a.found.begin(), a.found.end()))
            << "seed " << seed << ", operation " << i << ", buffer " << a.memory;
        if (a.writes)
          std::fill(begin, end, works[i]->value);
      }
    }
    for (std::size_t m = 0; m < memory.size(); ++m)
      ASSERT_EQ(content(memory[m]), model[m]) << "seed " << seed;
  }
  EXPECT_GT(overtaken, 0U);
}

// An operation that fails before it reaches the lanes blocks no other. A range that it would have
// overwritten stays indeterminate.
TEST(Ordering, IsAsIfWhatIsTakenBackWhileItWaitsHadNeverBeen) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  auto other = allocate_bytes(device, 64);
  std::vector<std::byte> bytes(64);
  EXPECT_TRUE(answer_of(device.launch(failing_work(), {}, {other}, {})));
  auto first = start_writing<waiting_probe>(system, {memory});
  auto behind = start_writing<probe>(system, {memory, other});
  auto last = device.fill(memory, std::uint8_t{2}, {});
  EXPECT_FALSE(last->on_lanes());
  behind->cancel();
  EXPECT_TRUE(has_code(answer_of(behind), errc::cancelled));
  EXPECT_TRUE(has_code(answer_of(device.download(other, borrow(bytes), {})), errc::indeterminate));
  EXPECT_TRUE(is_ok(answer_of(device.fill(other, std::uint8_t{1}, {}))));
  EXPECT_TRUE(is_ok(answer_of(device.download(other, borrow(bytes), {}))));
  EXPECT_EQ(bytes, std::vector<std::byte>(64, std::byte{1}));
  EXPECT_FALSE(last->on_lanes()) << "it overtook the first";
  first->may_go.store(true);
  system.runtime()->admissions().go_on();
  EXPECT_TRUE(is_ok(answer_of(first)));
  EXPECT_TRUE(is_ok(answer_of(last)));
  EXPECT_TRUE(settles(*behind));
  EXPECT_EQ(behind->issued(), 0);
}

/// Calls `at_answer` before it is completed.
class telling_probe : public waiting_probe {
public:
  using waiting_probe::waiting_probe;
  std::function<void()> at_answer;

protected:
  void before_answer(const caf::error&) noexcept override {
    if (at_answer)
      at_answer();
  }
};

// INV-12: the reader fails with the writer, however soon the writer stops blocking the reader.
TEST(Ordering, FailsWhatReadsWhatExpiresWhileItWaits) {
  core_system system;
  auto memory = allocate_bytes(system.device(), 64);
  auto writer = start_writing<waiting_probe>(system, {memory});
  auto reader = std::make_shared<probe>(std::vector{system.lane()});
  reader->add_use(detail::use_of(memory, true, false));
  system.runtime()->start(reader);
  writer->on_answer([&] {
    system.runtime()->admissions().go_on();
    reader->wait_until(detail::clock::now() + 200ms);
  });
  writer->expire();
  EXPECT_TRUE(has_code(answer_of(reader), errc::deadline_exceeded))
      << "it read what was not written";
}

// INV-12: the same for readers of a range that the cancelled writer would have made determinate.
TEST(Ordering, FailsWhatReadsWhatIsHalfWrittenAgain) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  EXPECT_TRUE(answer_of(device.launch(failing_work(), {}, {memory}, {})));
  auto writer = start_writing<telling_probe>(system, {memory});
  std::vector<std::shared_ptr<probe>> readers;
  for (int i = 0; i < 2; ++i) {
    readers.push_back(std::make_shared<probe>(std::vector{system.lane()}));
    readers.back()->add_use(detail::use_of(memory, true, false));
  }
  readers[0]->on_answer([&] { readers[1]->wait_until(detail::clock::now() + 50ms); });
  writer->at_answer = [&] {
    for (auto& x : readers)
      system.runtime()->start(x);
  };
  writer->cancel();
  for (auto& x : readers)
    EXPECT_TRUE(answer_of(x)) << "it read what is half-written";
}

// The destructor of an operation's last reference may take the admission lock itself.
TEST(Ordering, EndsNothingUnderItsLock) {
  core_system system({.devices = 2});
  auto memory = allocate_bytes(system.device(), 64);
  auto other = allocate_bytes(system.device(), 64);
  std::atomic<bool> locked{false};
  std::atomic<bool> gone{false};
  auto held = start_writing<waiting_probe>(system, {other});
  gate before;
  std::shared_ptr<void> last{nullptr, [&](void*) {
                               std::thread{[&] {
                                 locked = !detail::admission_lock::mutex().try_lock();
                                 if (!locked)
                                   detail::admission_lock::mutex().unlock();
                               }}.join();
                               gone = true;
                             }};
  auto first = std::make_shared<probe>(std::vector{system.lane()},
                                       [last, pass = before.passer()](auto&, auto&) {
                                         pass();
                                         return detail::issue_outcome::finished;
                                       });
  last.reset();
  first->add_use(detail::use_of(memory, false, true));
  system.runtime()->start(first);
  auto behind = start_writing<probe>(system, {memory, other}, 1);
  before.open();
  EXPECT_TRUE(settles(*first));
  const std::weak_ptr<probe> rest{first};
  first.reset();
  EXPECT_TRUE(testing::eventually([&] { return rest.use_count() == 1; })) << "who is behind it";
  behind->cancel();
  EXPECT_TRUE(testing::eventually([&] { return gone.load(); }));
  EXPECT_FALSE(locked);
  held->cancel();
  EXPECT_TRUE(settles(*behind));
}

// A buffer whose acquire is cancelled does not belong to the user.
TEST(Ordering, GivesBackWhatIsNotAcquired) {
  core_system system;
  auto memory = allocate_bytes(system.device(), 64);
  auto held = start_writing<waiting_probe>(system, {memory});
  auto acquire =
      std::make_shared<detail::acquire_operation>(memory, access_mode::write, stream_view{});
  acquire->parts()[0].on = system.lane().get();
  acquire->deadline = detail::clock::now() + patience;
  system.runtime()->start(acquire);
  EXPECT_TRUE(has_code(answer_of(system.device().fill(memory, std::uint8_t{1}, {})),
                       errc::buffer_acquired));
  acquire->cancel();
  auto fill = system.device().fill(memory, std::uint8_t{1}, {});
  EXPECT_FALSE(fill->completed()) << "refused: " << caf::to_string(fill->error());
  held->may_go.store(true);
  system.runtime()->admissions().go_on();
  EXPECT_TRUE(is_ok(answer_of(fill)));
  EXPECT_EQ(system.lane()->state().acquired(), 0);
}

// INV-12: the operation between the writer and the reader was cancelled.
TEST(Ordering, FailsWhatReadsAFailedWriteBehindAWithdrawnOne) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  std::vector<std::byte> bytes(64);
  gate held;
  auto writer = device.launch(
      [pass = held.passer()](launch_context&) {
        pass();
        return make_error(errc::invalid_argument, "on purpose");
      },
      {}, {memory}, {});
  held.wait_reached();
  auto withdrawn = device.fill(memory, std::uint8_t{2}, {});
  withdrawn->cancel();
  auto reader = device.download(memory, borrow(bytes), {});
  held.open();
  EXPECT_TRUE(has_code(answer_of(writer), errc::launch_failed));
  EXPECT_TRUE(has_code(answer_of(withdrawn), errc::cancelled));
  EXPECT_TRUE(answer_of(reader)) << "it read what a failed launch was writing";
}

TEST(Ordering, HealsWithAnOverwriteThatIsAdmitted) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  std::vector<std::byte> bytes(64);
  for (int round = 0; round < 500; ++round) {
    auto writer = device.launch(failing_work(), {}, {memory}, {});
    auto overwriter = device.fill(memory, std::uint8_t{2}, {});
    auto reader = device.download(memory, borrow(bytes), {});
    EXPECT_TRUE(has_code(answer_of(writer), errc::launch_failed));
    EXPECT_TRUE(is_ok(answer_of(overwriter)));
    ASSERT_TRUE(is_ok(answer_of(reader))) << "round " << round;
    ASSERT_EQ(bytes, std::vector<std::byte>(64, std::byte{2}));
  }
}

TEST(Ordering, RemembersNoMoreThanItNeeds) {
  core_system system;
  auto device = system.device();
  auto memory = allocate_bytes(device, 64);
  gate held;
  auto lane = device.launch(held.on_lane(), {}, {}, {});
  held.wait_reached(); // no operation settles
  std::vector<std::byte> bytes(64);
  const auto remembered = [&] {
    detail::admission_lock lock;
    return memory.memory()->accesses.size();
  };
  std::vector<std::shared_ptr<detail::completion>> all;
  for (int i = 0; i < 100; ++i)
    all.push_back(device.fill(memory, std::uint8_t{1}, {}));
  EXPECT_EQ(remembered(), 1u);
  for (int i = 0; i < 100; ++i)
    all.push_back(device.download(memory, borrow(bytes), {})); // the last one covers all
  EXPECT_EQ(remembered(), 2u);
  for (int i = 0; i < 100; ++i)
    all.push_back(device.launch(no_work(), {memory}, {memory}, {}));
  EXPECT_LE(remembered(), 2u);
  held.open();
  for (auto& x : all)
    EXPECT_TRUE(is_ok(answer_of(x)));
}

TEST(Ordering, ForgetsUsesOfOtherRangesThatAreOver) {
  core_system system;
  auto device = system.device();
  constexpr std::size_t ranges = 1'000;
  auto memory = allocate_bytes(device, 2 * ranges);
  const auto remembered = [&] {
    detail::admission_lock lock;
    return memory.memory()->accesses.size();
  };
  std::size_t most = 0;
  for (std::size_t i = 0; i < ranges; ++i) {
    auto done = device.fill(must(memory.slice(2 * i, 1)), std::uint8_t{1}, {});
    EXPECT_TRUE(is_ok(answer_of(done)));
    EXPECT_TRUE(settles(*done));
    most = std::max(most, remembered());
  }
  EXPECT_LE(most, 16u);
  gate held;
  auto lane = device.launch(held.on_lane(), {}, {}, {});
  held.wait_reached();
  std::vector<std::shared_ptr<detail::completion>> all;
  for (std::size_t i = 0; i < ranges; ++i)
    all.push_back(device.fill(must(memory.slice(2 * i, 1)), std::uint8_t{1}, {}));
  EXPECT_GE(remembered(), ranges); // none of them has run yet
  held.open();
  for (auto& x : all)
    EXPECT_TRUE(is_ok(answer_of(x)));
}

TEST(Ordering, AccessTellsOfAWriterThatFailed) {
  core_system system;
  auto ref = allocate_bytes(system.device(), 64);
  gate work;
  gate lane;
  auto holding = system.device().launch(lane.on_lane(), {}, {}, {});
  lane.wait_reached();
  auto writer = system.device().launch(
      [pass = work.passer()](launch_context& context) {
        static_cast<void>(context.run_on_host(pass));
        return make_error(errc::invalid_argument, "on purpose");
      },
      {}, {ref}, {});
  lane.open();
  EXPECT_TRUE(has_code(answer_of(writer), errc::launch_failed));
  EXPECT_TRUE(has_code(ref.access(), errc::indeterminate)); // although its work is not done
  work.open();
  EXPECT_TRUE(settles(*writer));
  EXPECT_TRUE(has_code(ref.access(), errc::indeterminate));
}

} // namespace

} // namespace troupe
