/// Generations, phases, watchers, and the release of memory.
#include "operation/buffer.hpp"
#include "operation/device_state.hpp"
#include "support/expect.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <tuple>
#include <vector>

namespace troupe {

namespace {

using detail::device_state;
using testing::has_code;
using testing::is_ok;

using change = std::tuple<device_phase, std::uint64_t, std::optional<errc>>;

std::function<void(const device_changed&)> note(std::vector<change>& seen) {
  return [&seen](const device_changed& x) {
    EXPECT_EQ(x.device, 3);
    seen.emplace_back(x.phase, x.generation, code_of(x.reason));
  };
}

const caf::error why = make_error(errc::device_reset, "on purpose");

TEST(DeviceState, HasNoMemoryBeforeItIsThere) {
  device_state state{9, 3};
  EXPECT_EQ(state.node(), 9u);
  EXPECT_EQ(state.ordinal(), 3);
  EXPECT_EQ(state.phase(), device_phase::opening);
  EXPECT_EQ(state.generation(), 0u);
  EXPECT_EQ(state.live_generation(), 0u);
}

// INV-8
TEST(DeviceState, TellsEachChangeOnceAndInOrder) {
  device_state state{9, 3};
  std::vector<change> early;
  std::vector<change> late;
  state.watch(note(early));
  state.report_failed_attempt(make_error(errc::device_failed, ""));
  state.publish();
  state.close(device_phase::resetting, why);
  EXPECT_EQ(state.live_generation(), 0u);
  EXPECT_EQ(state.generation(), 1u);
  EXPECT_EQ(state.reason(), why);
  const auto id = state.watch(note(late));
  state.publish();
  EXPECT_TRUE(is_ok(state.reason()));
  EXPECT_EQ(state.live_generation(), 2u);
  state.unwatch(id);
  state.close(device_phase::shut_down, why);
  EXPECT_EQ(early, (std::vector<change>{{device_phase::opening, 0, {}},
                                        {device_phase::opening, 0, errc::device_failed},
                                        {device_phase::ready, 1, {}},
                                        {device_phase::resetting, 1, errc::device_reset},
                                        {device_phase::ready, 2, {}},
                                        {device_phase::shut_down, 2, errc::device_reset}}));
  EXPECT_EQ(late, (std::vector<change>{{device_phase::resetting, 1, errc::device_reset},
                                       {device_phase::ready, 2, {}}}));
}

TEST(DeviceState, StaysEnded) {
  for (auto end : {device_phase::failed, device_phase::shut_down}) {
    device_state state{9, 3};
    state.publish();
    state.close(end, why);
    std::vector<change> seen;
    state.watch(note(seen));
    state.publish();
    state.close(device_phase::resetting, make_error(errc::internal, ""));
    state.close(device_phase::failed, make_error(errc::internal, ""));
    EXPECT_EQ(state.phase(), end);
    EXPECT_EQ(state.live_generation(), 0u);
    EXPECT_EQ(state.generation(), 1u);
    EXPECT_EQ(seen.size(), 1u);
    state.close(device_phase::shut_down, why); // allowed after a failure too
    EXPECT_EQ(state.phase(), device_phase::shut_down);
  }
}

TEST(DeviceState, CountsEveryLife) {
  device_state state{9, 3};
  std::vector<change> seen;
  state.watch(note(seen));
  std::thread reader{[&] {
    std::uint64_t last = 0;
    while (last < 500) {
      const auto now = state.live_generation();
      EXPECT_TRUE(now == 0 || now >= last);
      last = std::max(last, now);
    }
  }};
  for (int i = 0; i < 500; ++i) {
    if (i != 0)
      state.close(device_phase::resetting, why);
    state.publish();
  }
  reader.join();
  std::uint64_t last = 0;
  for (auto& [phase, generation, code] : seen)
    if (phase == device_phase::ready) {
      EXPECT_EQ(generation, ++last);
    }
  EXPECT_EQ(last, 500u);
}

// INV-8
TEST(DeviceState, TellsOfAHandoverWhenItIsOver) {
  device_state state{9, 3};
  state.publish();
  std::vector<change> seen;
  state.watch(note(seen));
  state.leave_process();
  EXPECT_EQ(state.phase(), device_phase::resetting);
  EXPECT_EQ(state.live_incarnation(), 0u);
  EXPECT_EQ(state.live_generation(), 1u);
  state.stay_in_process();
  EXPECT_EQ(state.phase(), device_phase::ready);
  EXPECT_EQ(state.live_incarnation(), 1u);
  EXPECT_EQ(seen.size(), 1u);
  state.leave_process();
  state.resume();
  EXPECT_EQ(state.live_incarnation(), 2u);
  EXPECT_EQ(state.live_generation(), 1u);
  EXPECT_EQ(seen, (std::vector<change>(2, {device_phase::ready, 1, {}})));
  state.close(device_phase::shut_down, why);
  state.leave_process();
  state.stay_in_process();
  EXPECT_EQ(state.phase(), device_phase::shut_down);
  EXPECT_EQ(state.live_incarnation(), 0u);
}

TEST(DeviceState, FindsBuffersByNumberWhileTheyLive) {
  const auto state = std::make_shared<device_state>(9, 3);
  state->publish();
  int bytes = 0;
  auto a = state->make_buffer(&bytes, 4);
  auto b = state->make_buffer(&bytes, 4);
  EXPECT_NE(a->id(), b->id());
  EXPECT_EQ(state->find_buffer(a->id()), a);
  EXPECT_EQ(state->find_buffer(12'345), nullptr);
  const auto id = a->id();
  a = nullptr;
  EXPECT_EQ(state->find_buffer(id), nullptr);
  EXPECT_EQ(state->find_buffer(b->id()), b);
}

TEST(DeviceState, HandsMemoryToTheLaneThatComesBy) {
  const auto state = std::make_shared<device_state>(9, 3);
  std::atomic<int> woken{0};
  std::atomic<int> freed{0};
  state->set_wake([&] { ++woken; });
  constexpr int threads = 4;
  constexpr int each = 500;
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t)
    pool.emplace_back([&] {
      for (int i = 0; i < each; ++i)
        state->release({&freed, 1, [](void* x) { ++*static_cast<std::atomic<int>*>(x); }});
    });
  int taken = 0;
  while (taken < threads * each)
    for (auto& x : state->take_released()) {
      EXPECT_EQ(x.generation, 1u);
      x.deleter(x.address);
      ++taken;
    }
  for (auto& x : pool)
    x.join();
  EXPECT_EQ(freed, threads * each);
  EXPECT_EQ(woken, threads * each);
  EXPECT_FALSE(state->has_released());
}

TEST(DeviceState, KeepsMemoryOfALostDevice) {
  const auto state = std::make_shared<device_state>(9, 3);
  int freed = 0;
  const auto holds = std::make_shared<int>(0);
  auto memory = [&] {
    return device_state::released{&freed, 1, [&freed, holds](void*) { ++freed; }};
  };
  state->release(memory());
  state->keep_memory();
  for (auto& x : state->take_released())
    state->hand_back(std::move(x));
  state->release(memory());
  state->end_of_lane();
  state->release(memory());
  EXPECT_EQ(freed, 0);
  EXPECT_EQ(holds.use_count(), 4); // objects captured by the deleters stay alive too
}

TEST(DeviceState, HandsMemoryBackItselfAfterTheLane) {
  const auto state = std::make_shared<device_state>(9, 3);
  int freed = 0;
  bool woken = false;
  state->set_wake([&] { woken = true; });
  state->release({nullptr, 1, [&](void*) { freed += 1; }});
  EXPECT_TRUE(woken);
  woken = false;
  state->end_of_lane();
  EXPECT_EQ(freed, 1);
  state->release({nullptr, 1, [&](void*) { freed += 10; }});
  state->release({nullptr, 1, {}}); // memory of the pool, which no longer exists
  EXPECT_EQ(freed, 11);
  EXPECT_FALSE(woken);
}

TEST(DeviceState, IsFoundByNodeAndOrdinal) {
  auto state = std::make_shared<device_state>(77, 3);
  detail::register_device(state);
  EXPECT_EQ(detail::find_device(77, 3), state);
  EXPECT_EQ(detail::find_device(77, 4), nullptr);
  EXPECT_EQ(detail::find_device(78, 3), nullptr);
  state = nullptr;
  EXPECT_EQ(detail::find_device(77, 3), nullptr);
}

TEST(DeviceState, NamesItsPhases) {
  EXPECT_EQ(to_string(device_phase::opening), "opening");
  EXPECT_EQ(to_string(device_phase::ready), "ready");
  EXPECT_EQ(to_string(device_phase::resetting), "resetting");
  EXPECT_EQ(to_string(device_phase::failed), "failed");
  EXPECT_EQ(to_string(device_phase::shut_down), "shut_down");
}

} // namespace

} // namespace troupe
