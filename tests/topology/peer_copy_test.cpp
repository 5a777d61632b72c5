// Copies over a link, on the lane of one of its ends.

#include "device/operations.hpp"
#include "support/core_fixture.hpp"
#include "support/forwarding_backend.hpp"
#include "topology/peer_operations.hpp"
#include <troupe/testing/fault_plan.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using detail::connect_peers_operation;
using detail::peer_copy_operation;
using detail::peer_findings;

constexpr std::size_t size = 5000;

/// Counts how often the memory of a device was closed.
class counting_device final : public forwarding_device {
public:
  counting_device(std::unique_ptr<backend_device> inner, std::atomic<int>& closed)
      : forwarding_device(std::move(inner)), closed_(closed) {}
  caf::error close_memory() noexcept override {
    ++closed_;
    return inner_->close_memory();
  }

private:
  std::atomic<int>& closed_;
};

class counting_backend final : public forwarding_backend {
public:
  using forwarding_backend::forwarding_backend;
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<counting_device>(ordinal, closed.at(static_cast<std::size_t>(ordinal)));
  }

  std::array<std::atomic<int>, 3> closed{};
};

/// Three devices. Devices 0 and 1 have access to each other.
class PeerCopy : public ::testing::Test {
protected:
  PeerCopy() {
    for (int i : {0, 1})
      must(answer_of(connect(i, {1 - i})));
  }

  std::shared_ptr<connect_peers_operation> connect(int device, std::vector<int> peers) {
    auto op =
        std::make_shared<connect_peers_operation>(std::move(peers), [](const peer_findings&) {});
    op->parts()[0].on = system_.lane(device).get();
    system_.runtime()->start(op);
    return op;
  }

  std::shared_ptr<peer_copy_operation> copy(const any_gpu_ref& target, const any_gpu_ref& source,
                                            int by, std::size_t times = 1) {
    auto op = std::make_shared<peer_copy_operation>(target, source, by, times);
    op->parts()[0].on = system_.lane(by).get();
    op->deadline = detail::clock::now() + patience;
    system_.runtime()->start(op);
    return op;
  }

  any_gpu_ref filled(int device, int value) {
    auto ref = allocate_bytes(system_.device(device), size);
    must(answer_of(system_.device(device).fill(ref, static_cast<std::uint8_t>(value), {})));
    return ref;
  }

  /// For EXPECT_TRUE: every byte of `ref` is `value`.
  ::testing::AssertionResult holds(const any_gpu_ref& ref, int value) {
    std::vector<std::byte> content(ref.size_bytes());
    if (auto error = answer_of(system_.device(ref.device()).download(ref, borrow(content), {})))
      return ::testing::AssertionFailure() << describe(error);
    auto right = static_cast<std::size_t>(
        std::count(content.begin(), content.end(), static_cast<std::byte>(value)));
    if (right == content.size())
      return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << content.size() - right << " bytes differ";
  }

  /// Starts a copy from device 0 to 1 that hangs in a stream of device `by`.
  std::shared_ptr<peer_copy_operation> hanging_copy(const any_gpu_ref& target,
                                                    const any_gpu_ref& source, int by) {
    plan_->add({.kind = fault::hang, .on = verb::copy_peer, .device = by});
    auto op = copy(target, source, by);
    EXPECT_TRUE(plan_->wait_injected(fault::hang, 1, patience));
    return op;
  }

  std::shared_ptr<counting_backend> backend_ =
      std::make_shared<counting_backend>(make_host_backend({.devices = 3}));
  std::shared_ptr<fault_plan> plan_ = std::make_shared<fault_plan>();
  core_system system_{{.plan = plan_, .backend = backend_}};
};

TEST_F(PeerCopy, BringsEveryByteOnEitherLane) {
  auto here = filled(0, 1);
  auto there = filled(1, 2);
  for (int by : {0, 1}) {
    auto there_again = filled(1, 2);
    EXPECT_TRUE(is_ok(answer_of(copy(there_again, here, by))));
    EXPECT_TRUE(holds(there_again, 1));
    auto here_again = filled(0, 1);
    EXPECT_TRUE(is_ok(answer_of(copy(here_again, there, by, 3))));
    EXPECT_TRUE(holds(here_again, 2));
  }
  auto part = must(there.slice(1000, 7));
  EXPECT_TRUE(is_ok(answer_of(copy(part, must(here.slice(0, 7)), 0))));
  EXPECT_TRUE(holds(part, 1));
  EXPECT_TRUE(holds(must(there.slice(0, 1000)), 2));
  EXPECT_TRUE(holds(must(there.slice(1007, size - 1007)), 2));
  EXPECT_TRUE(is_ok(answer_of(copy(must(there.slice(0, 0)), must(here.slice(0, 0)), 0))));
}

TEST_F(PeerCopy, TellsItsTimes) {
  auto before = detail::clock::now();
  auto op = copy(filled(1, 2), filled(0, 1), 0);
  must(answer_of(op));
  EXPECT_LE(before, op->issued_at());
  EXPECT_LE(op->issued_at(), op->done_at());
  EXPECT_LE(op->done_at(), detail::clock::now());
}

// INV-9: operations before and after the copy on either device are ordered by events.
TEST_F(PeerCopy, KeepsItsPlaceInTheOrderOfBothDevices) {
  auto here = filled(0, 1);
  auto there = filled(1, 2);
  gate before;
  auto held = system_.device(1).launch(before.in_stream(), {}, {there}, {});
  before.wait_reached();
  auto copied = copy(there, here, 0);
  auto overwritten = system_.device(0).fill(here, std::uint8_t{3}, {});
  auto back = copy(here, there, 1);
  auto last = system_.device(1).fill(there, std::uint8_t{4}, {});
  EXPECT_FALSE(copied->completed());
  EXPECT_FALSE(overwritten->completed());
  before.open();
  for (auto& op :
       std::vector<std::shared_ptr<detail::operation>>{held, copied, overwritten, back, last})
    EXPECT_TRUE(is_ok(answer_of(op)));
  EXPECT_TRUE(holds(here, 1));
  EXPECT_TRUE(holds(there, 4));
}

// A lane that waits for another lane sleeps until that lane has issued the awaited operation.
TEST_F(PeerCopy, ALaneWakesTheOneThatWaitsForIt) {
  auto here = filled(0, 1);
  auto there = filled(1, 2);
  for (int value = 0; value < 200; ++value) {
    std::vector<std::byte> content(size, static_cast<std::byte>(value));
    auto written = system_.device(0).upload(here, borrow(content), {});
    auto copied = copy(there, here, 1);                              // waits for the upload
    auto freed = system_.device(0).fill(here, std::uint8_t{77}, {}); // waits for the copy
    std::vector<std::byte> found(size);
    auto read = system_.device(1).download(there, borrow(found), {});
    for (auto& op : std::vector<std::shared_ptr<detail::operation>>{written, copied, freed, read})
      ASSERT_TRUE(is_ok(answer_of(op)));
    ASSERT_EQ(found, content);
  }
}

// Lane 1 waits for an operation that lane 0 never issues.
TEST_F(PeerCopy, ALaneThatSkipsWakesTheOneThatWaitsForIt) {
  for (int i = 0; i < 50; ++i) {
    auto here = filled(0, 1);
    auto there = filled(1, 2);
    gate blocked;
    auto first = system_.device(0).launch(blocked.on_lane(), {}, {}, {});
    blocked.wait_reached();
    auto taken_back = system_.device(0).fill(here, std::uint8_t{3}, {});
    auto copied = copy(there, here, 1);
    taken_back->cancel();
    blocked.open();
    EXPECT_TRUE(is_ok(answer_of(first)));
    EXPECT_TRUE(has_code(answer_of(taken_back), errc::cancelled));
    EXPECT_TRUE(is_ok(answer_of(copied))); // as if the fill had never been requested
    EXPECT_TRUE(settles(*copied));
    EXPECT_TRUE(holds(here, 1));
    EXPECT_TRUE(holds(there, 1));
    EXPECT_TRUE(is_ok(answer_of(system_.device(1).fill(there, std::uint8_t{1}, {}))));
  }
}

TEST_F(PeerCopy, WithoutAccessTheLinkFails) {
  auto target = filled(2, 2);
  auto op = copy(target, filled(0, 1), 0);
  auto error = answer_of(op);
  ASSERT_TRUE(has_code(error, errc::link_failed));
  auto x = failure_of(error);
  EXPECT_EQ(x->verb, "copy");
  EXPECT_EQ(x->device, 0);
  EXPECT_EQ(x->operation, op->number());
  EXPECT_TRUE(settles(*op));
  std::vector<std::byte> content(size);
  EXPECT_TRUE(has_code(answer_of(system_.device(2).download(target, borrow(content), {})),
                       errc::indeterminate));
  EXPECT_TRUE(is_ok(answer_of(system_.device(2).fill(target, std::uint8_t{1}, {}))));
  EXPECT_TRUE(holds(target, 1));
}

TEST_F(PeerCopy, AStaleHandleOfEitherEndIsRefused) {
  for (int end : {0, 1}) {
    auto here = filled(0, 1);
    auto there = filled(1, 2);
    must(answer_of(system_.device(end).reset({})));
    for (int by : {0, 1})
      EXPECT_TRUE(has_code(answer_of(copy(there, here, by)), errc::stale_ref));
  }
}

/// The end that is reset or shut down, and the lane that has the copy.
class PeerCopyLife : public PeerCopy, public ::testing::WithParamInterface<std::pair<int, int>> {};

INSTANTIATE_TEST_SUITE_P(Ends, PeerCopyLife,
                         ::testing::Values(std::pair{0, 0}, std::pair{0, 1}, std::pair{1, 0},
                                           std::pair{1, 1}));

// INV-4, INV-8: the memory is freed after its last use, and every request fails at once.
TEST_P(PeerCopyLife, ResetWaitsForIt) {
  auto [end, by] = GetParam();
  auto here = filled(0, 1);
  auto there = filled(1, 2);
  auto copied = hanging_copy(there, here, by);
  auto behind = copy(here, there, 1 - by);
  auto reset = system_.device(end).reset({});
  EXPECT_TRUE(has_code(answer_of(copied), errc::device_reset));
  EXPECT_TRUE(has_code(answer_of(behind), errc::device_reset));
  EXPECT_EQ(failure_of(copied->error())->device, end);
  EXPECT_FALSE(copied->settled());
  EXPECT_EQ(backend_->closed[static_cast<std::size_t>(end)], 0);
  EXPECT_FALSE(reset->completed());
  plan_->release();
  must(answer_of(reset));
  EXPECT_EQ(reset->value, 2u);
  EXPECT_EQ(backend_->closed[static_cast<std::size_t>(end)], 1);
  // If the other end's buffer was written, it is indeterminate. Both devices continue.
  here = filled(0, 5);
  there = filled(1, 6);
  EXPECT_TRUE(is_ok(answer_of(copy(there, here, by))));
  EXPECT_TRUE(holds(there, 5));
}

TEST_P(PeerCopyLife, ShutdownWaitsForIt) {
  auto [end, by] = GetParam();
  auto here = filled(0, 1);
  auto there = filled(1, 2);
  auto copied = hanging_copy(there, here, by);
  system_.device(end).shut_down(make_error(errc::unavailable, "on purpose"));
  EXPECT_TRUE(has_code(answer_of(copied), errc::unavailable));
  EXPECT_EQ(backend_->closed[static_cast<std::size_t>(end)], 0);
  plan_->release();
  EXPECT_TRUE(settles(*copied));
  auto closed = [&, end = end] { return backend_->closed[static_cast<std::size_t>(end)] == 1; };
  EXPECT_TRUE(eventually(closed));
}

// On lane 0 an allocation waits for the next generation. Behind it is the fill that the copy waits
// for, and the reset waits for the copy.
TEST_F(PeerCopy, AResetWaitsForNothingThatWaitsForIt) {
  auto here = filled(0, 1);
  auto there = filled(1, 2);
  gate blocked;
  auto first = system_.device(0).launch(blocked.on_lane(), {}, {}, {});
  blocked.wait_reached();
  auto allocated = system_.device(0).allocate(size, dtype::uint8, false, {});
  auto written = system_.device(0).fill(here, std::uint8_t{3}, {});
  auto copied = copy(here, there, 1);
  auto reset = system_.device(0).reset({});
  for (auto& op : std::vector<std::shared_ptr<detail::operation>>{written, copied})
    EXPECT_TRUE(has_code(answer_of(op), errc::device_reset));
  blocked.open();
  EXPECT_TRUE(is_ok(answer_of(reset)));
  EXPECT_TRUE(is_ok(answer_of(first)));
  EXPECT_TRUE(is_ok(answer_of(allocated)));
  EXPECT_TRUE(holds(there, 2));
}

TEST_F(PeerCopy, ConnectsWhatCanBeConnected) {
  plan_->add({.kind = fault::fail, .on = verb::enable_peer, .device = 2, .peer = 0});
  plan_->add({.kind = fault::fail, .on = verb::admit_peer, .device = 2, .peer = 1});
  auto op = connect(2, {0, 1});
  must(answer_of(op));
  EXPECT_EQ(op->value.generation, 1u);
  ASSERT_EQ(op->value.peers.size(), 2u);
  EXPECT_TRUE(op->value.peers[0].can_access);
  EXPECT_TRUE(has_code(op->value.peers[0].enabled, errc::cuda_error));
  EXPECT_TRUE(is_ok(op->value.peers[0].admitted));
  EXPECT_TRUE(op->value.peers[1].can_access);
  EXPECT_TRUE(is_ok(op->value.peers[1].enabled));
  EXPECT_TRUE(has_code(op->value.peers[1].admitted, errc::cuda_error));
}

TEST_F(PeerCopy, AFaultEndsTheProcessDevices) {
  plan_->add({.kind = fault::poison, .on = verb::admit_peer, .device = 2});
  EXPECT_TRUE(has_code(answer_of(connect(2, {0, 1})), errc::device_fault));
  EXPECT_TRUE(system_.runtime()->ended());
}

/// Imitates a device in another process: a wait for another device's event asks that process. Once
/// armed, the wait blocks at a gate.
class asking_device final : public forwarding_device {
public:
  struct state {
    std::atomic<bool> armed{false};
    gate at;
  };

  asking_device(std::unique_ptr<backend_device> inner, state& x)
      : forwarding_device(std::move(inner)), state_(x) {}

  bool is_remote() const noexcept override { return true; }
  event_word word_of(event_view) const noexcept override { return {word_, 1}; }
  caf::error wait(stream_view on, event_view x) noexcept override {
    ask();
    return inner_->wait(on, x);
  }
  caf::error wait_word(stream_view, const std::atomic<std::uint64_t>*,
                       std::uint64_t) noexcept override {
    ask();
    return {};
  }

private:
  void ask() const {
    if (state_.armed)
      state_.at.passer()();
  }

  state& state_;
  std::shared_ptr<std::atomic<std::uint64_t>> word_ =
      std::make_shared<std::atomic<std::uint64_t>>(0);
};

class asking_backend final : public forwarding_backend {
public:
  explicit asking_backend(asking_device::state& x)
      : forwarding_backend(make_host_backend({.devices = 2})), state_(x) {}
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<asking_device>(ordinal, state_);
  }

private:
  asking_device::state& state_;
};

/// The streams of copies to other devices.
class link_streams {
public:
  void note(int peer, stream_view on) {
    std::lock_guard lock{mutex_};
    all_.emplace_back(peer, on.native);
  }
  /// Returns the stream of the last copy to `peer`, or null if there was none.
  void* last_to(int peer) const {
    std::lock_guard lock{mutex_};
    auto i = std::find_if(all_.rbegin(), all_.rend(), [=](auto& x) { return x.first == peer; });
    return i == all_.rend() ? nullptr : i->second;
  }
  std::size_t count() const {
    std::lock_guard lock{mutex_};
    return all_.size();
  }

private:
  mutable std::mutex mutex_;
  std::vector<std::pair<int, void*>> all_;
};

class noting_device final : public forwarding_device {
public:
  noting_device(std::unique_ptr<backend_device> inner, link_streams& streams)
      : forwarding_device(std::move(inner)), streams_(streams) {}
  caf::error copy_peer(void* to, int to_device, const void* from, int from_device,
                       std::size_t size_bytes, stream_view on) noexcept override {
    streams_.note(to_device, on);
    return inner_->copy_peer(to, to_device, from, from_device, size_bytes, on);
  }

private:
  link_streams& streams_;
};

class noting_backend final : public forwarding_backend {
public:
  noting_backend() : forwarding_backend(make_host_backend({.devices = 4})) {}
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<noting_device>(ordinal, streams);
  }

  link_streams streams;
};

/// Device 0 copies to the others. The first copy to device 1 hangs.
class LinkStreams : public ::testing::Test {
protected:
  static constexpr std::size_t size = std::size_t{1} << 21;

  LinkStreams() {
    for (int i = 3; i >= 0; --i) {
      auto op = std::make_shared<connect_peers_operation>(
          i == 0 ? std::vector{1, 2, 3} : std::vector{0}, [](const peer_findings&) {});
      start(op, i);
      must(answer_of(op));
    }
    source_ = filled(7);
    plan_->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0});
    first_ = copy_to(1, source_);
    EXPECT_TRUE(plan_->wait_injected(fault::hang, 1, patience));
  }

  template <class Op> void start(const std::shared_ptr<Op>& op, int device = 0) {
    op->parts()[0].on = system_.lane(device).get();
    system_.runtime()->start(op);
  }
  any_gpu_ref filled(int value) {
    auto ref = allocate_bytes(system_.device(0), size);
    must(answer_of(system_.device(0).fill(ref, static_cast<std::uint8_t>(value), {})));
    return ref;
  }
  std::shared_ptr<peer_copy_operation> copy_to(int device, const any_gpu_ref& source) {
    auto op = std::make_shared<peer_copy_operation>(
        allocate_bytes(system_.device(device), source.size_bytes()), source, 0, 1);
    op->deadline = detail::clock::now() + patience;
    start(op);
    return op;
  }
  /// Returns the stream of the last copy to `device`, after `n` copies in total.
  void* stream_of(int device, std::size_t n) {
    EXPECT_TRUE(eventually([&] { return streams().count() >= n; }));
    return streams().last_to(device);
  }
  link_streams& streams() { return backend_->streams; }

  std::shared_ptr<noting_backend> backend_ = std::make_shared<noting_backend>();
  std::shared_ptr<fault_plan> plan_ = std::make_shared<fault_plan>();
  core_system system_{{.plan = plan_, .backend = backend_}};
  any_gpu_ref source_;
  std::shared_ptr<peer_copy_operation> first_;
};

// A device has one engine for its copies to other devices.
TEST_F(LinkStreams, CopiesOfOneSizeComeOneAfterTheOther) {
  auto second = copy_to(2, source_);
  auto third = copy_to(3, source_);
  auto stream = stream_of(3, 3);
  EXPECT_EQ(stream, streams().last_to(1));
  EXPECT_EQ(stream, streams().last_to(2));
  // All copies in flight on a link stay in one stream, because their order relies on it.
  auto small = copy_to(2, must(source_.slice(0, 1)));
  EXPECT_EQ(stream_of(2, 4), stream);
  EXPECT_FALSE(second->completed());
  plan_->release();
  for (auto& op : {first_, second, third, small})
    EXPECT_TRUE(is_ok(answer_of(op)));
  // No copy is in flight that the next one could join.
  EXPECT_TRUE(is_ok(answer_of(copy_to(2, source_))));
  EXPECT_NE(stream_of(2, 5), stream);
}

TEST_F(LinkStreams, ASmallCopyWaitsForNoLargeOneToAnotherDevice) {
  EXPECT_TRUE(is_ok(answer_of(copy_to(2, must(source_.slice(0, size - 1))))));
  EXPECT_NE(stream_of(2, 2), streams().last_to(1));
  EXPECT_FALSE(first_->completed());
  plan_->release();
  EXPECT_TRUE(is_ok(answer_of(first_)));
}

TEST_F(LinkStreams, SmallCopiesGoBesideEachOther) {
  plan_->release();
  EXPECT_TRUE(is_ok(answer_of(first_)));
  plan_->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0});
  auto standing = copy_to(1, must(source_.slice(0, 100)));
  EXPECT_TRUE(plan_->wait_injected(fault::hang, 2, patience));
  EXPECT_TRUE(is_ok(answer_of(copy_to(2, must(source_.slice(0, 100))))));
  EXPECT_NE(stream_of(2, 3), streams().last_to(1));
  EXPECT_TRUE(is_ok(answer_of(copy_to(3, source_)))); // a large copy does not wait behind it either
  EXPECT_FALSE(standing->completed());
  plan_->release();
  EXPECT_TRUE(is_ok(answer_of(standing)));
}

TEST_F(LinkStreams, WhatWaitsStandsInNobodysWay) {
  auto other = filled(1);
  gate work;
  auto kernel = std::make_shared<detail::launch_operation>(
      work.in_stream(), std::vector<any_gpu_ref>{}, std::vector{other});
  start(kernel);
  work.wait_reached();
  auto waiting = copy_to(2, other);
  EXPECT_NE(stream_of(2, 2), streams().last_to(1));
  // No other copy joins it either.
  plan_->release();
  EXPECT_TRUE(is_ok(answer_of(first_)));
  EXPECT_TRUE(is_ok(answer_of(copy_to(3, source_))));
  EXPECT_NE(stream_of(3, 3), streams().last_to(2));
  EXPECT_FALSE(waiting->completed());
  work.open();
  EXPECT_TRUE(is_ok(answer_of(kernel)));
  EXPECT_TRUE(is_ok(answer_of(waiting)));
}

TEST(RemoteOrdering, ALaneThatAsksAnotherProcessHoldsUpNoOtherLane) {
  asking_device::state asks;
  core_system system{{.backend = std::make_shared<asking_backend>(asks)}};
  for (int i : {0, 1}) {
    auto op =
        std::make_shared<connect_peers_operation>(std::vector{1 - i}, [](const peer_findings&) {});
    op->parts()[0].on = system.lane(i).get();
    system.runtime()->start(op);
    must(answer_of(op));
  }
  auto here = allocate_bytes(system.device(0), size);
  auto there = allocate_bytes(system.device(1), size);
  gate work;
  auto writer = std::make_shared<detail::launch_operation>(
      work.in_stream(), std::vector<any_gpu_ref>{}, std::vector{here});
  writer->parts()[0].on = system.lane(0).get();
  system.runtime()->start(writer);
  work.wait_reached();
  asks.armed = true;
  auto copy = std::make_shared<peer_copy_operation>(there, here, 1, 1);
  copy->parts()[0].on = system.lane(1).get();
  system.runtime()->start(copy);
  asks.at.wait_reached();
  work.open();
  EXPECT_TRUE(is_ok(answer_of(writer)));
  EXPECT_TRUE(settles(*writer)); // its event was returned to the pool
  asks.at.open();
  EXPECT_TRUE(is_ok(answer_of(copy)));
}

} // namespace

} // namespace troupe::testing
