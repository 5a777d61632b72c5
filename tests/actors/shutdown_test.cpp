// An actor system that waits for its actors logs the reason, and ends when the reason is gone. Each
// scenario that may wait for ever runs in a child process.

#include "actors/system.hpp"
#include "support/child_process.hpp"
#include "support/world_fixture.hpp"
#include <troupe/detail/caf_compat.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

namespace troupe::testing {
namespace {

constexpr int return_status = 7;
constexpr auto real_patience = 5s;

// -- in the child

/// Counts the log lines that say why an actor system waits.
class waiting_lines {
public:
  waiting_lines() {
    set_log_sink([this](const log_line& x) {
      if (x.text.find("the actor system has waited for ") == std::string_view::npos)
        return;
      std::lock_guard lock{mutex_};
      tell("line", x.text);
      ++number_;
      more_.notify_all();
    });
  }
  ~waiting_lines() { set_log_sink({}); }
  waiting_lines(const waiting_lines&) = delete;
  waiting_lines& operator=(const waiting_lines&) = delete;

  bool wait(int number) {
    std::unique_lock lock{mutex_};
    return more_.wait_for(lock, patience, [&] { return number_ >= number; });
  }

private:
  std::mutex mutex_;
  std::condition_variable more_;
  int number_ = 0;
};

/// Lets the actor system end: calls `let_go` on another thread when the log has two lines.
class late_end {
public:
  explicit late_end(std::function<void()> let_go)
      : thread_([this, let_go = std::move(let_go)] {
          if (lines_.wait(2))
            tell("let_go");
          let_go();
        }) {}
  ~late_end() { thread_.join(); }
  late_end(const late_end&) = delete;
  late_end& operator=(const late_end&) = delete;

private:
  waiting_lines lines_;
  std::thread thread_;
};

void make_impatient(test_system& system) {
  must(detail::system_core::of(system))->set_shutdown_patience(100ms);
}

TROUPE_CHILD(WaitsForAWorld) {
  std::optional<world> w;
  std::optional<late_end> end;
  {
    test_system system;
    make_impatient(system);
    w = system.open_world({.name = "trainer"});
    end.emplace([&] { w.reset(); });
  }
  return return_status;
}

TROUPE_CHILD(WaitsForADevice) {
  std::optional<device> d;
  std::optional<late_end> end;
  {
    test_system system;
    make_impatient(system);
    d = system.open();
    end.emplace([&] { d.reset(); });
  }
  return return_status;
}

TROUPE_CHILD(WaitsForAWorldsActor) {
  caf::actor actor;
  std::optional<late_end> end;
  {
    test_system system;
    make_impatient(system);
    actor = system.spawn_world({.name = "trainer"});
    end.emplace([&] {
      detail::anon_send(actor, shutdown{});
      actor = nullptr;
    });
  }
  return return_status;
}

TROUPE_CHILD(WaitsForATopologysActor) {
  caf::actor actor;
  std::optional<late_end> end;
  {
    test_system system;
    make_impatient(system);
    actor = must(spawn_p2p_topology(system, {.devices = system.ordinals()}));
    end.emplace([&] {
      detail::anon_send(actor, shutdown{});
      actor = nullptr;
    });
  }
  return return_status;
}

/// Holds another actor, and optionally a world.
class holder_actor final : public caf::event_based_actor {
public:
  holder_actor(caf::actor_config& cfg, std::optional<world> w)
      : caf::event_based_actor(cfg), world_(std::move(w)) {}
  caf::behavior make_behavior() override {
    return {[this](const caf::actor& other) { other_ = other; }};
  }
  void on_exit() override {
    other_ = nullptr;
    world_.reset();
  }

private:
  caf::actor other_;
  std::optional<world> world_;
};

TROUPE_CHILD(WaitsForActorsThatHoldEachOther) {
  std::optional<late_end> end;
  {
    test_system system;
    make_impatient(system);
    auto a = system.get().spawn<holder_actor>(system.open_world({.name = "trainer"}));
    auto b = system.get().spawn<holder_actor>(std::nullopt);
    detail::anon_send(a, b);
    detail::anon_send(b, a);
    end.emplace([a = a.address(), b = b.address()] {
      for (auto& x : {a, b})
        caf::anon_send_exit(x, caf::exit_reason::user_shutdown);
    });
  }
  return return_status;
}

TROUPE_CHILD(WaitsAsLongAsByDefault) {
  waiting_lines lines;
  std::optional<world> w;
  std::thread ends;
  {
    test_system system;
    w = system.open_world({.name = "trainer"});
    ends = std::thread{[&] {
      if (lines.wait(1))
        tell_time("let_go");
      w.reset();
    }};
    tell_time("waits");
  }
  ends.join();
  return return_status;
}

// -- in the parent

struct waiting {
  const char* scenario;
  const char* reason;
};

class Shutdown : public ::testing::TestWithParam<waiting> {};

INSTANTIATE_TEST_SUITE_P(
    Everything, Shutdown,
    ::testing::Values(
        waiting{"WaitsForAWorld", "world \"trainer\": a handle of it is still held"},
        waiting{"WaitsForADevice", "device 0: a handle of it is still held"},
        waiting{"WaitsForAWorldsActor", "world \"trainer\": `shutdown` was not sent to its actor"},
        waiting{"WaitsForATopologysActor", "a topology: `shutdown` was not sent to its actor"},
        waiting{"WaitsForActorsThatHoldEachOther",
                "world \"trainer\": a handle of it is still held"}),
    [](const auto& x) { return std::string{x.param.scenario}; });

TEST_P(Shutdown, SaysWhatItWaitsForAndEndsWhenThatIsGone) {
  const auto end = run_child(GetParam().scenario, patience);
  EXPECT_TRUE(end.in_time);
  EXPECT_EQ(end.status, return_status) << to_string(end);
  EXPECT_TRUE(end.was_told("let_go")) << to_string(end);
  const auto lines = end.values("line");
  ASSERT_GE(lines.size(), 2u);
  for (auto& x : lines) {
    const auto reason = std::string{"end, and still does: "} + GetParam().reason;
    EXPECT_EQ(x.substr(x.size() - std::min(x.size(), reason.size())), reason) << x;
  }
}

TEST(ShutdownPatience, IsFiveSeconds) {
  const auto end = run_child("WaitsAsLongAsByDefault", patience);
  EXPECT_EQ(end.status, return_status) << to_string(end);
  EXPECT_GE(end.time("let_go") - end.time("waits"), real_patience);
  EXPECT_LT(end.time("let_go") - end.time("waits"), real_patience + at_once);
}

TEST(ShutdownWatch, KnowsASystemThatWaits) {
  test_system system;
  std::optional<device> d = system.open();
  EXPECT_FALSE(detail::waits_for_actors(system));
  std::thread waits{[&] { system.get().await_all_actors_done(); }};
  while (!detail::waits_for_actors(system)) // bounded by the test's time limit
    std::this_thread::yield();
  d.reset();
  waits.join();
  EXPECT_FALSE(detail::waits_for_actors(system));
}

} // namespace
} // namespace troupe::testing
