/// `device` and `world` objects without a device or world.
#include "support/expect.hpp"
#include "support/world_fixture.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace troupe {

namespace {

using namespace std::chrono_literals;
using testing::answer_of;
using testing::has_code;
using testing::is_ok;
using testing::must;
using testing::test_system;

constexpr auto wrong = errc::invalid_argument;

void expect_empty(const device& d) {
  const any_gpu_ref ref;
  EXPECT_EQ(d.ordinal(), -1);
  EXPECT_EQ(d.generation(), 0u);
  EXPECT_EQ(d.phase(), device_phase::failed);
  EXPECT_TRUE(has_code(d.actor(), wrong));
  EXPECT_TRUE(has_code(d.allocate<float>(4), wrong));
  EXPECT_TRUE(has_code(answer_of(d.allocate(dtype::float32, 4)), wrong));
  EXPECT_TRUE(has_code(d.allocate_pinned(4), wrong));
  EXPECT_TRUE(has_code(answer_of(d.upload(ref, host_buffer{4})), wrong));
  EXPECT_TRUE(has_code(answer_of(d.download(ref, host_buffer{4})), wrong));
  EXPECT_TRUE(has_code(answer_of(d.fill(ref, 1.0f)), wrong));
  EXPECT_TRUE(has_code(answer_of(d.copy(ref, ref)), wrong));
  EXPECT_TRUE(has_code(answer_of(d.accept(ref)), wrong));
  EXPECT_TRUE(
      has_code(answer_of(d.launch([](launch_context&) { return caf::error{}; }, {}, {})), wrong));
  EXPECT_TRUE(has_code(answer_of(d.launch("nothing", {}, {}, {})), wrong));
  float memory = 0;
  EXPECT_TRUE(has_code(d.adopt(&memory, 1, [](void*) {}), wrong));
  EXPECT_TRUE(has_code(answer_of(d.acquire(ref, access_mode::read, nullptr)), wrong));
  EXPECT_TRUE(has_code(answer_of(d.release(ref, access_mode::read, nullptr)), wrong));
  EXPECT_TRUE(has_code(d.offer(ref), wrong));
  EXPECT_TRUE(has_code(answer_of(d.claim(gpu_token{})), wrong));
  EXPECT_TRUE(has_code(answer_of(d.stats()), wrong));
  EXPECT_TRUE(has_code(answer_of(d.reset()), wrong));
  EXPECT_TRUE(has_code(answer_of(d.hand_over()), wrong));
  d.shutdown();
}

void expect_empty(const world& w) {
  const std::vector<any_gpu_ref> none;
  const std::vector<gpu_ref<float>> typed;
  EXPECT_EQ(w.size(), 0u);
  EXPECT_EQ(w.status().phase, world_phase::failed);
  EXPECT_EQ(code_of(w.status().reason), wrong);
  EXPECT_FALSE(w.actor());
  expect_empty(w.device_of(0));
  EXPECT_TRUE(has_code(w.split("parts", {0}), wrong));
  EXPECT_TRUE(has_code(w.allocate<float>(4), wrong));
  EXPECT_TRUE(has_code(answer_of(w.fill(typed, 1.0f)), wrong));
  EXPECT_TRUE(has_code(answer_of(w.upload(typed, std::vector<float>{1})), wrong));
  EXPECT_TRUE(has_code(w.download(typed), wrong));
  EXPECT_TRUE(has_code(answer_of(w.launch("nothing", {}, {}, {})), wrong));
  for (auto& x :
       {w.all_reduce(none), w.all_reduce(none, none), w.reduce(none, 0), w.broadcast(none, 0),
        w.all_gather(none), w.all_gather(none, none), w.reduce_scatter(none),
        w.all_to_all(none, none), w.all_to_all_v(none, none, {}), w.gather(none, {}, 0),
        w.scatter({}, none, 0), w.send_recv(0, {}, 0, {}), w.barrier(), w.run(group{})})
    EXPECT_TRUE(has_code(answer_of(x), wrong));
  const auto rank = w.rank(0);
  expect_empty(rank.where());
  for (auto& x : {rank.all_reduce({}), rank.broadcast({}, 0), rank.barrier(), rank.exchange({}, {}),
                  rank.all_to_all_v({}, {}, {}, {}), rank.run(barrier{})})
    EXPECT_TRUE(has_code(answer_of(x), wrong));
  EXPECT_TRUE(has_code(mesh_comm::open(w), wrong));
}

TEST(EmptyHandles, OfDevicesRefuseEverything) { expect_empty(device{}); }

TEST(EmptyHandles, OfWorldsRefuseEverything) { expect_empty(world{}); }

TEST(EmptyHandles, AreAssignedToAndMovedFrom) {
  test_system system{{.devices = 2}};
  device d;
  d = system.open(0);
  EXPECT_EQ(d.ordinal(), 0);
  auto ref = must(d.allocate<float>(4));
  const auto moved = std::move(d);
  expect_empty(d); // NOLINT(bugprone-use-after-move): moved-from objects are empty
  EXPECT_TRUE(is_ok(answer_of(moved.fill(ref, 1.0f))));
  world w;
  w = system.open_world({});
  EXPECT_GE(w.size(), 1u);
  const auto kept = std::move(w);
  expect_empty(w); // NOLINT(bugprone-use-after-move)
  EXPECT_TRUE(is_ok(answer_of(kept.barrier())));
  EXPECT_TRUE(has_code(world::open(std::vector<device>{moved, device{}}), wrong));
}

TEST(EmptyHandles, AnswerActors) {
  test_system system{{.devices = 1}};
  auto ref = must(system.open(0).allocate<float>(4));
  caf::scoped_actor self{system.get()};
  const auto code_of_reply = []<class T>(auto handle, std::type_identity<T>) {
    errc result = errc::internal;
    std::move(handle).receive(
        [](const T&) {},
        [&](const caf::error& why) { result = code_of(why).value_or(errc::internal); });
    return result;
  };
  const auto done = [&](auto handle) {
    return code_of_reply(std::move(handle), std::type_identity<collective_done>{});
  };
  EXPECT_EQ(code_of_reply(request(self, device{}, allocate{.count = 4}, 10s),
                          std::type_identity<any_gpu_ref>{}),
            wrong);
  EXPECT_EQ(done(request(self, world{}, all_reduce{.send = {ref}}, 10s)), wrong);
  EXPECT_EQ(done(request(self, world{}, reduce_scatter{.send = {ref}}, 10s)), wrong);
  EXPECT_EQ(done(request(self, world{}, group{{all_reduce{.send = {ref}}}}, 10s)), wrong);
  EXPECT_EQ(done(request(self, world{}.rank(0), barrier{}, 10s)), wrong);
  EXPECT_EQ(done(request(self, world{}.rank(0), all_gather{.recv = {ref}}, 10s)), wrong);
}

} // namespace

} // namespace troupe
