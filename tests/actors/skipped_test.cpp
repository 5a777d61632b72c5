/// Marks of requests that did not run, how the marks end, waiting for room, and the order in which
/// an actor's requests take effect.

#include "support/eventually.hpp"
#include "support/topology_fixture.hpp"
#include "support/world_fixture.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

constexpr std::size_t count = 16;

constexpr request_options refuse{.room = room_policy::refuse};
constexpr request_options late{.deadline = -1ns};

class Skipped : public ::testing::Test {
protected:
  ::testing::AssertionResult is(const any_gpu_ref& ref, std::int32_t x) {
    return holds(d_, ref, std::vector<std::int32_t>(ref.count(), x));
  }
  any_gpu_ref filled_with(std::int32_t x) {
    auto ref = must(answer_of(d_.allocate(dtype::int32, count)));
    EXPECT_TRUE(is_ok(answer_of(d_.fill(ref, x))));
    return ref;
  }

  test_system system_{{.devices = 1}};
  device d_ = system_.open();
  any_gpu_ref x_ = filled_with(1);
  any_gpu_ref y_ = filled_with(2);
};

// INV-15
TEST_F(Skipped, IsWhatARequestThatDidNotRunWouldHaveWritten) {
  EXPECT_TRUE(has_code(answer_of(d_.fill(must(x_.slice(0, 4)), 7, late)), errc::deadline_exceeded));
  auto read = answer_of(d_.copy(y_, x_));
  ASSERT_TRUE(has_code(read, errc::skipped));
  EXPECT_NE(describe(read.error()).find("its deadline was over"), std::string::npos);
  EXPECT_TRUE(
      has_code(y_.access(), errc::skipped)); // the source has a mark, so the target gets one too
  EXPECT_TRUE(is_ok(answer_of(d_.fill(y_, 3))));
  EXPECT_TRUE(is(y_, 3));
  EXPECT_TRUE(is_ok(must(x_.slice(4, 4)).access())); // no other bytes
  EXPECT_TRUE(is_ok(answer_of(d_.fill(must(x_.slice(0, 2)), 1))));
  EXPECT_TRUE(has_code(x_.access(), errc::skipped)); // overwriting a part is not enough
  EXPECT_TRUE(is_ok(answer_of(d_.fill(must(x_.slice(2, 2)), 1))));
  EXPECT_TRUE(is(x_, 1));
}

TEST_F(Skipped, IsNothingByARequestThatIsWrongWhereItsCallSaysSo) {
  EXPECT_TRUE(has_code(answer_of(d_.fill(x_, scalar{})), errc::shape_mismatch));
  EXPECT_TRUE(is(x_, 1));
  // The result of a message comes later.
  caf::scoped_actor self{system_.get()};
  std::optional<errc> got;
  request(self, d_, fill{x_, {}, {}}, patience)
      .receive([] {}, [&](const caf::error& why) { got = code_of(why); });
  EXPECT_EQ(got, errc::shape_mismatch);
  EXPECT_TRUE(has_code(x_.access(), errc::skipped));
}

TEST_F(Skipped, EndsWhenItIsAccepted) {
  EXPECT_TRUE(has_code(answer_of(d_.fill(x_, 7, late)), errc::deadline_exceeded));
  auto accepted = d_.accept(x_);
  EXPECT_TRUE(is_ok(x_.access())); // from the call on
  EXPECT_TRUE(is_ok(answer_of(accepted)));
  EXPECT_TRUE(is(x_, 1));
  // An indeterminate range cannot be accepted.
  EXPECT_TRUE(has_code(answer_of(launch_failure(d_, "on purpose", {x_})), errc::launch_failed));
  EXPECT_TRUE(has_code(answer_of(d_.accept(x_)), errc::indeterminate));
  EXPECT_TRUE(has_code(x_.access(), errc::indeterminate));
}

TEST_F(Skipped, EndsWhenTheSameRequestIsMadeAgain) {
  TROUPE_IN_PROCESS_ONLY("callables");
  TROUPE_HOST_ONLY("the launch writes host memory");
  const auto add = [&](const request_options& options) {
    return d_.launch(
        [x = x_](launch_context& context) {
          auto* p = static_cast<std::int32_t*>(must(x.access()));
          return context.run_on_host([p] {
            for (std::size_t i = 0; i < count; ++i)
              ++p[i];
          });
        },
        {x_}, {x_}, options);
  };
  auto first = add(late);
  EXPECT_TRUE(has_code(answer_of(first), errc::deadline_exceeded));
  EXPECT_TRUE(has_code(answer_of(add({})), errc::skipped)); // it is another request
  EXPECT_TRUE(has_code(answer_of(add({.retry_of = first.number()})), errc::skipped)); // of two
  EXPECT_TRUE(is_ok(answer_of(d_.accept(x_))));

  auto again = add(late);
  EXPECT_TRUE(has_code(answer_of(again), errc::deadline_exceeded));
  const request_options late_again{.deadline = -1ns, .retry_of = again.number()};
  EXPECT_TRUE(has_code(answer_of(add(late_again)), errc::deadline_exceeded)); // once more
  EXPECT_TRUE(is_ok(answer_of(add({.retry_of = again.number()}))));
  EXPECT_TRUE(is(x_, 2));
}

TEST_F(Skipped, StaysWhatItIsWhereItsOverwriterIsTakenBack) {
  EXPECT_TRUE(has_code(answer_of(d_.fill(x_, 7, late)), errc::deadline_exceeded));
  gate lane;
  auto held = lane.hold_lane(d_);
  ASSERT_TRUE(lane.wait_reached());
  auto overwrites = d_.fill(x_, 5);
  overwrites.cancel();
  EXPECT_TRUE(has_code(answer_of(overwrites), errc::cancelled));
  EXPECT_TRUE(has_code(x_.access(), errc::skipped)); // already while the lane has not come to it
  auto reads = d_.copy(y_, x_);
  lane.open();
  EXPECT_TRUE(is_ok(answer_of(held)));
  EXPECT_TRUE(answer_of(reads).error());
  EXPECT_TRUE(has_code(x_.access(), errc::skipped));
}

/// A rank's request may complete before its operation does, but not while a failed operation could
/// still mark what it has read: here one behind which an overwriter was cancelled.
TEST(SkippedByRanks, AreNotSentAsIfTheyWereThere) {
  TROUPE_NEEDS_DEVICES(3);
  test_system system{{.devices = 3}};
  auto w = system.open_world();
  auto sums = must(w.allocate(dtype::int32, count, true));
  auto others = must(w.allocate(dtype::int32, count, true));
  auto target = must(answer_of(w.device_of(2).allocate(dtype::int32, count)));
  for (std::size_t rank = 0; rank < 3; ++rank)
    for (auto& ref : {sums[rank], others[rank]})
      EXPECT_TRUE(is_ok(answer_of(w.device_of(rank).fill(ref, 1))));
  std::array<gate, 3> lanes;
  for (std::size_t rank = 0; rank < 3; ++rank) {
    static_cast<void>(lanes[rank].hold_lane(w.device_of(rank)));
    ASSERT_TRUE(lanes[rank].wait_reached());
  }
  auto fails = w.all_reduce(sums, reduce_op::sum, {.deadline = 20ms});
  auto overwrites = w.all_reduce(others, sums, reduce_op::sum);
  auto sent = w.rank(0).send(sums[0], 2);
  auto received = w.rank(2).recv(target, 0);
  EXPECT_TRUE(has_code(answer_of(fails), errc::deadline_exceeded));
  overwrites.cancel();
  EXPECT_TRUE(has_code(answer_of(overwrites), errc::cancelled));
  lanes[0].open();
  lanes[2].open();
  for (std::size_t rank : {0, 2}) // the lanes have come to the message
    EXPECT_TRUE(is_ok(answer_of(w.device_of(rank).fill(others[rank], 1))));
  lanes[1].open();
  EXPECT_TRUE(has_code(answer_of(sent), errc::deadline_exceeded)); // the error of what it has read
  EXPECT_TRUE(has_code(answer_of(received), errc::deadline_exceeded));
  EXPECT_TRUE(eventually([&] { return has_code(target.access(), errc::indeterminate); }));
}

TEST(Room, IsWaitedFor) {
  system_options options{.devices = 1};
  options.lanes.in_flight_limit = 2;
  options.lanes.queue_limit = 2;
  test_system system{options};
  auto d = system.open();
  auto x = must(d.allocate<std::int32_t>(count, true));
  gate held;
  auto first = held.hold_stream(d);
  ASSERT_TRUE(held.wait_reached());
  ASSERT_TRUE(eventually([&] { return static_cast<bool>(answer_of(d.stats(refuse))); }));
  std::vector<pending<void>> all;
  all.push_back(d.fill(x, 1));
  all.push_back(d.fill(x, 2));
  all.push_back(d.fill(x, 3)); // two wait behind the first fill
  EXPECT_TRUE(has_code(answer_of(d.fill(x, 3, {.deadline = 20ms})), errc::deadline_exceeded));
  EXPECT_TRUE(has_code(answer_of(d.fill(x, 3, refuse)), errc::overloaded));
  flag made;
  std::thread caller{[&] {
    all.push_back(d.fill(x, 4)); // blocks
    made.set();
  }};
  // An actor does not block: its requests are kept in order, up to the second bound.
  auto over = std::make_shared<std::promise<std::pair<int, int>>>();
  auto result = over->get_future();
  auto address = must(d.actor());
  flag all_asked;
  system.get().spawn([=, &all_asked](caf::event_based_actor* self) {
    constexpr int asked = 2 * 16 + 8;
    auto counts = std::make_shared<std::pair<int, int>>(0, 0);
    auto answered = [=] {
      if (counts->first + counts->second == asked)
        over->set_value(*counts);
    };
    for (int i = 0; i < asked; ++i)
      request(self, address, fill{x, i, {}}, patience)
          .then(
              [=] {
                ++counts->first;
                answered();
              },
              [=](const caf::error& why) {
                EXPECT_TRUE(has_code(why, errc::overloaded));
                ++counts->second;
                answered();
              });
    all_asked.set();
  });
  EXPECT_TRUE(all_asked.wait()); // before there is any room
  EXPECT_FALSE(made.is_set());
  held.open();
  caller.join();
  EXPECT_TRUE(is_ok(answer_of(first)));
  for (auto& done : all)
    EXPECT_TRUE(is_ok(answer_of(done)));
  auto [done, refused] = result.get();
  EXPECT_GE(done, 2 * 16 - 2);
  EXPECT_GT(refused, 0);
}

TEST(Room, IsNotWaitedForByTheThreadThatWouldHaveToMakeIt) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto w = system.open_world({.limits = {.waiting_limit = 4}});
  auto x = any(must(w.allocate<std::int32_t>(count, true)));
  std::vector<pending<collective_done>> all;
  const auto call = [&](std::size_t rank) {
    auto done = w.rank(rank).all_reduce(x[rank], reduce_op::max);
    all.push_back(done);
    return done;
  };
  for (std::size_t rank = 0; rank < w.size(); ++rank)
    call(rank); // so that the callers' threads are known
  for (int i = 0; i < 4; ++i)
    call(0);
  stopwatch watch;
  EXPECT_TRUE(has_code(answer_of(w.rank(0).all_reduce(x[0])), errc::overloaded));
  EXPECT_LT(watch.elapsed(), 1s);
  // If another thread makes the other ranks' calls, they complete.
  std::vector<std::thread> threads;
  for (std::size_t rank = 1; rank < w.size(); ++rank)
    threads.emplace_back([&, rank] {
      for (int i = 0; i < 4; ++i)
        EXPECT_TRUE(is_ok(answer_of(w.rank(rank).all_reduce(x[rank], reduce_op::max))));
    });
  for (auto& t : threads)
    t.join();
  for (auto& done : all)
    EXPECT_TRUE(is_ok(answer_of(done)));
}

/// Requests fills, a sum and downloads without waiting, and counts the ranks with a correct sum.
template <class Device, class World>
void fill_sum_and_look(caf::event_based_actor* self, std::vector<Device> devices, World w,
                       std::vector<any_gpu_ref> refs, std::shared_ptr<std::promise<int>> right) {
  const auto n = refs.size();
  auto on_error = [](const caf::error& why) { ADD_FAILURE() << describe(why); };
  for (std::size_t r = 0; r < n; ++r)
    request(self, devices[r], fill{refs[r], 1, {}}, patience).then([] {}, on_error);
  request(self, w, all_reduce{refs, {}, reduce_op::sum, {}, {}}, patience)
      .then([](const collective_done&) {}, on_error);
  auto left = std::make_shared<std::size_t>(n);
  auto found = std::make_shared<int>(0);
  for (std::size_t r = 0; r < n; ++r)
    request(self, devices[r], download{refs[r], {}}, patience)
        .then(
            [=](const host_buffer& got) {
              *found += got.as<std::int32_t>()[0] == static_cast<std::int32_t>(n);
              if (--*left == 0)
                right->set_value(*found);
            },
            on_error);
}

// INV-14
TEST(RequestsOfAnActor, TakeEffectInTheirOrder) {
  test_system system{{.devices = 3}};
  auto w = system.open_world();
  auto refs = any(must(w.allocate<std::int32_t>(count)));
  std::vector<device> devices;
  std::vector<caf::actor> addresses;
  for (std::size_t r = 0; r < w.size(); ++r) {
    devices.push_back(w.device_of(r));
    addresses.push_back(must(devices.back().actor()));
  }
  for (int i = 0; i < 100; ++i) {
    auto right = std::make_shared<std::promise<int>>();
    auto result = right->get_future();
    if (i % 2 == 0)
      system.get().spawn(
          [=](caf::event_based_actor* self) { fill_sum_and_look(self, devices, w, refs, right); });
    else
      system.get().spawn([=](caf::event_based_actor* self) {
        fill_sum_and_look(self, addresses, w.actor(), refs, right);
      });
    ASSERT_EQ(result.get(), static_cast<int>(w.size())) << "round " << i;
  }
}

TEST(RequestsOfAnActor, AfterAShutdownAreRefused) {
  test_system system{{.devices = 1}};
  auto w = system.open_world();
  auto refs = any(must(w.allocate<std::int32_t>(count, true)));
  caf::scoped_actor self{system.get()};
  tell(self, w.actor(), shutdown{});
  caf::error got;
  request(self, w, all_reduce{refs, {}, reduce_op::sum, {}, {}}, patience)
      .receive([](const collective_done&) {}, [&](const caf::error& why) { got = why; });
  EXPECT_TRUE(has_code(got, errc::unavailable));
}

/// Blocks all threads of CAF's pool during its lifetime.
class blocked_pool {
public:
  explicit blocked_pool(caf::actor_system& sys) {
    const auto threads = std::clamp(std::thread::hardware_concurrency() / 4, 2U, 4U); // as `config`
    for (unsigned i = 0; i < threads; ++i)
      sys.spawn([state = state_](caf::event_based_actor*) {
        ++state->inside;
        EXPECT_TRUE(state->open.wait());
      });
    EXPECT_TRUE(eventually([&] { return state_->inside == threads; }));
  }
  ~blocked_pool() { state_->open.set(); }
  blocked_pool(const blocked_pool&) = delete;
  blocked_pool& operator=(const blocked_pool&) = delete;

private:
  struct shared {
    std::atomic<unsigned> inside{0};
    flag open;
  };
  const std::shared_ptr<shared> state_ = std::make_shared<shared>();
};

template <class... Answer, class Handle>::testing::AssertionResult is_late(Handle handle) {
  caf::error got;
  std::move(handle).receive([](const Answer&...) {}, [&](const caf::error& why) { got = why; });
  return has_code(got, errc::deadline_exceeded);
}

// Requests are admitted on the sender's thread. The library's own thread watches their deadlines.
TEST(RequestsOfAnActor, KeepTheirDeadlinesWhileCafsPoolIsBlocked) {
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  auto w = system.open_world();
  const auto d = w.device_of(0);
  const auto t = open_topology(system);
  const auto refs = any(must(w.allocate<std::int32_t>(count, true)));
  const auto into = any(must(w.allocate<std::int32_t>(count, true)));
  const auto of_d = must(d.actor());
  plan->add({fault::hang, verb::fill, 0});
  auto held = d.fill(refs[0], 1);
  ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
  caf::scoped_actor self{system.get()};
  {
    const blocked_pool pool{system.get()};
    const all_reduce sum{.send = refs, .recv = into, .op = reduce_op::sum};
    const all_reduce part{.send = {refs[0]}, .recv = {into[0]}, .op = reduce_op::sum};
    const download bytes{.source = refs[0]};
    const copy to_other{.target = into[0], .source = refs[0]};
    EXPECT_TRUE(is_late<collective_done>(request(self, w, sum, 50ms)));
    EXPECT_TRUE(is_late<collective_done>(request(self, w.actor(), sum, 50ms)));
    EXPECT_TRUE(is_late<collective_done>(request(self, w.rank(0), part, 50ms)));
    EXPECT_TRUE(is_late<host_buffer>(request(self, d, bytes, 50ms)));
    EXPECT_TRUE(is_late<host_buffer>(request(self, of_d, bytes, 50ms)));
    EXPECT_TRUE(is_late<>(request(self, t, to_other, 50ms)));
    EXPECT_TRUE(is_late<>(request(self, t.actor(), to_other, 50ms)));
  }
  plan->release();
  EXPECT_TRUE(is_ok(answer_of(held)));
}

} // namespace

} // namespace troupe::testing
