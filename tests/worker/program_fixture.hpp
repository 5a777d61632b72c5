/// Worlds whose ranks are driven by programs in worker processes.
#pragma once

#include "support/worker_losses.hpp"
#include <troupe/bytes.hpp>
#include <troupe/nccl_world.hpp>
#include <troupe/worker_program.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace troupe::testing {

/// A world with a program, and the notifications of its subscriber.
class ProgramsTest : public ::testing::Test {
protected:
  void start(int devices, world_program what, world_limits limits = {}) {
    start(in_worker_processes(devices), std::move(what), limits);
  }
  void start(system_options where, world_program what, world_limits limits = {}) {
    system_.emplace(std::move(where));
    self_.emplace(system_->get());
    limits_ = limits;
    program_ = std::move(what);
    open_world();
  }
  /// Opens the world, or another one like it.
  void open_world() {
    world_config config;
    config.limits = limits_;
    config.limits.restarts = 1000;
    config.limits.restart_backoff = 1ms;
    config.program = program_;
    config.devices = system_->ordinals();
    config.collectives = collectives_;
    actor_ = must(spawn_nccl_world(*system_, config));
    detail::send(*self_, actor_, subscribe{});
  }
  void TearDown() override {
    if (actor_)
      caf::anon_send_exit(actor_, caf::exit_reason::user_shutdown);
    actor_ = nullptr;
    self_.reset();
  }

  /// For EXPECT_TRUE: receives until `f` is true.
  template <class F>::testing::AssertionResult until(F f) {
    while (!f()) {
      bool late = false;
      if (auto failed = nobody_failed(); !failed)
        return failed;
      (*self_)->receive([&](const world_status& x) { view_ = x; },
                        [&](const program_report& x) { reports_.push_back(x); },
                        [&](const program_ended& x) { ended_.push_back(x); },
                        caf::after(patience) >> [&] { late = true; });
      if (late)
        return ::testing::AssertionFailure()
               << "what a test waits for was not told; " << ended_.size() << " have ended";
    }
    return ::testing::AssertionSuccess();
  }
  ::testing::AssertionResult until_more_reports(std::size_t more) {
    return until([this, wanted = reports_.size() + more] { return reports_.size() >= wanted; });
  }
  ::testing::AssertionResult nobody_failed() const {
    for (auto& x : ended_)
      if (x.why)
        return ::testing::AssertionFailure() << "rank " << x.rank << ": " << describe(x.why);
    return ::testing::AssertionSuccess();
  }
  caf::error kill(int ordinal) { return kill_worker(must(device::open(*system_, ordinal))); }

  collectives_policy collectives_ = collectives_of_run(); ///< set before `start`
  world_limits limits_;
  world_program program_;
  std::optional<test_system> system_;
  std::optional<caf::scoped_actor> self_;
  caf::actor actor_;
  world_status view_;
  std::vector<program_report> reports_;
  std::vector<program_ended> ended_;
};

} // namespace troupe::testing
