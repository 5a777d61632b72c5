// Programs whose actors drive the ranks of a world in the worker processes that have its devices.

#include "support/load.hpp"
#include "support/world_fixture.hpp"
#include <troupe/launch.hpp>
#include <troupe/worker.hpp>
#include <troupe/worker_program.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <csignal>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

namespace troupe::testing {

namespace {

template <class T> std::vector<std::uint8_t> bytes_from(const T& x) {
  std::vector<std::uint8_t> result(sizeof x);
  std::memcpy(result.data(), &x, sizeof x);
  return result;
}

template <class T> T from_bytes(const std::vector<std::uint8_t>& bytes) {
  T result{};
  if (bytes.size() == sizeof result)
    std::memcpy(&result, bytes.data(), sizeof result);
  return result;
}

constexpr std::size_t elements = 64;

/// Rank r adds r + 1; so many ranks, as `members` says, make this sum.
float sum_of(const std::vector<world_member>& members) {
  float result = 0;
  for (auto& x : members)
    result += static_cast<float>(x.rank + 1);
  return result;
}

/// The sum that a rank gets, or why not.
caf::expected<float> add_up_once(const program_place& place, const gpu_ref<float>& ref,
                                 const request_options& options, world_status& view) {
  auto d = place.rank.where();
  if (auto filled = d.fill(ref, static_cast<float>(place.rank.index() + 1)).wait(); !filled)
    return filled.error();
  auto done = place.rank.all_reduce(ref, reduce_op::sum, options).wait();
  if (!done)
    return done.error();
  view.membership = done->membership;
  auto got = d.download(ref);
  if (!got)
    return got.error();
  if (*got != std::vector<float>(elements, got->front()))
    return make_error(errc::internal, "not all elements are the same");
  return got->front();
}

/// Has the actor been told to end?
bool is_over(caf::blocking_actor* self) {
  bool over = false;
  self->receive([&](const program_message&) { over = true; },
                caf::after(std::chrono::seconds(0)) >> [] {});
  return over;
}

const bool programs_registered = [] {
  // As many sums as its arguments say, each checked.
  auto error = register_program("so many sums", [](const program_place& place) {
    return place.system.spawn([place](caf::blocking_actor* self) {
      auto ref = place.rank.where().allocate<float>(elements);
      if (!ref)
        return self->fail_state(ref.error());
      auto view = place.rank.status();
      for (auto left = from_bytes<std::uint32_t>(place.arguments); left > 0; --left) {
        auto sum = add_up_once(place, *ref, {}, view);
        if (!sum)
          return self->fail_state(sum.error());
        if (*sum != sum_of(view.members))
          return self->fail_state(make_error(errc::internal, "a wrong sum"));
      }
      if (auto lost = place.report(bytes_from<std::int32_t>(place.rank.index())))
        self->fail_state(lost);
    });
  });
  // Until it gets a message; what fails because a rank is lost is done again with the next view.
  if (!error)
    error = register_program("sums for ever", [](const program_place& place) {
      return place.system.spawn([place](caf::blocking_actor* self) {
        auto ref = place.rank.where().allocate<float>(elements);
        if (!ref)
          return self->fail_state(ref.error());
        std::uint64_t right = 0;
        while (!is_over(self)) {
          auto view = place.rank.status();
          const request_options options{.membership = view.membership, .allow_shrunk = true};
          auto sum = add_up_once(place, *ref, options, view);
          if (!sum) {
            auto code = code_of(sum.error());
            if (code == errc::unavailable)
              return; // the world ended
            if (code != errc::membership_changed && !is_loss(sum.error()))
              return self->fail_state(sum.error());
            continue;
          }
          if (*sum != sum_of(view.members))
            return self->fail_state(
                make_error(errc::internal, "the sum " + std::to_string(*sum) + " of " +
                                               std::to_string(view.members.size())));
          if (++right % 8 == 0)
            static_cast<void>(place.report(bytes_from(right)));
        }
      });
    });
  if (!error)
    error = register_program(
        "throws", [](const program_place&) -> caf::actor { throw std::runtime_error("no luck"); });
  if (!error)
    error = register_launch("end this worker", [](launch_context&, auto, auto, auto) {
      ::raise(SIGKILL);
      return caf::error{};
    });
  return !error;
}();

/// A world with a program, and what its subscriber hears.
class Programs : public ::testing::Test {
protected:
  void start(int devices, world_program what, world_limits limits = {}) {
    ASSERT_TRUE(programs_registered);
    system_.emplace(
        system_options{.devices = devices, .wrap = [&](std::shared_ptr<backend>) {
                         return must(make_worker_backend({.backend = on_cuda() ? "cuda" : "host",
                                                          .host = {.devices = devices}}));
                       }});
    self_.emplace(system_->get());
    world_config config;
    config.limits = limits;
    config.limits.restarts = 1000;
    config.limits.restart_backoff = 1ms;
    config.program = std::move(what);
    config.devices = system_->ordinals();
    actor_ = must(spawn_nccl_world(*system_, config));
    detail::send(*self_, actor_, subscribe{});
  }
  void TearDown() override {
    if (actor_)
      caf::anon_send_exit(actor_, caf::exit_reason::user_shutdown);
    actor_ = nullptr;
    self_.reset();
  }

  /// Receives until `f` says that it has what it needs.
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
  caf::error kill(int ordinal) {
    return error_of(
        answer_of(must(device::open(*system_, ordinal)).launch("end this worker", {}, {}, {})));
  }

  std::optional<test_system> system_;
  std::optional<caf::scoped_actor> self_;
  caf::actor actor_;
  world_status view_;
  std::vector<program_report> reports_;
  std::vector<program_ended> ended_;
};

TEST_F(Programs, SumBesideTheirDevices) {
  TROUPE_NEEDS_DEVICES(2);
  start(2, {"so many sums", bytes_from(std::uint32_t{200})});
  ASSERT_TRUE(until([this] { return ended_.size() == 2; }));
  EXPECT_TRUE(nobody_failed());
  ASSERT_EQ(reports_.size(), 2u);
  for (auto& x : reports_)
    EXPECT_EQ(from_bytes<std::int32_t>(x.bytes), x.rank);
  EXPECT_NE(reports_[0].rank, reports_[1].rank);
}

TEST_F(Programs, LeaveTheParentNoCollectives) {
  start(2, {"sums for ever", {}});
  ASSERT_TRUE(until_more_reports(2));
  for (auto error :
       {error_of(ask<collective_done>(*system_, actor_, barrier{})),
        error_of(ask<collective_done>(*system_, actor_, rank_local{0, barrier{}, {}}))})
    EXPECT_EQ(code_of(error), errc::not_supported) << describe(error);
  // Its devices are there for the parent, too.
  EXPECT_TRUE(works(must(device::open(*system_, 0))));
}

TEST_F(Programs, GetMessages) {
  world_limits limits; // of the ranks one may have begun a sum that the others do not come to
  limits.stall_limit = 500ms;
  start(2, {"sums for ever", {}}, limits);
  ASSERT_TRUE(until_more_reports(2));
  detail::send(*self_, actor_, program_message{-1, {1}});
  ASSERT_TRUE(until([this] { return ended_.size() == 2; }));
  EXPECT_TRUE(nobody_failed());
  caf::scoped_actor asker{system_->get()};
  auto refused = detail::ask<void>(asker, actor_, patience, program_message{7, {1}});
  EXPECT_EQ(code_of(error_of(refused)), errc::invalid_argument);
}

struct program_case {
  standby_policy standby;
  loss_policy on_loss;
};

class ProgramsGoOn : public Programs, public ::testing::WithParamInterface<program_case> {};

INSTANTIATE_TEST_SUITE_P(
    With, ProgramsGoOn,
    ::testing::Values(program_case{standby_policy::full, loss_policy::failover},
                      program_case{standby_policy::survivors, loss_policy::shrink},
                      program_case{standby_policy::none, loss_policy::rebuild}),
    [](auto& x) { return std::string{to_string(x.param.on_loss)}; });

TEST_P(ProgramsGoOn, AfterKills) {
  TROUPE_NEEDS_DEVICES(2);
  constexpr int kills = 5;
  world_limits limits;
  limits.standby = GetParam().standby;
  limits.on_loss = GetParam().on_loss;
  start(3, {"sums for ever", {}}, limits);
  const auto n = system_->ordinals().size();
  for (int i = 0; i < kills; ++i) {
    ASSERT_TRUE(until([&] {
      return view_.phase == world_phase::ready && view_.members.size() == n &&
             (GetParam().standby == standby_policy::none || view_.standby_ready);
    }));
    ASSERT_TRUE(until_more_reports(6)) << "after " << i << " kills";
    const auto epoch = view_.epoch;
    EXPECT_EQ(code_of(kill(i % static_cast<int>(n))), errc::worker_lost);
    ASSERT_TRUE(until([&] { return view_.phase == world_phase::ready && view_.epoch > epoch; }));
  }
  ASSERT_TRUE(
      until([&] { return view_.phase == world_phase::ready && view_.members.size() == n; }));
  ASSERT_TRUE(until_more_reports(6));
  EXPECT_TRUE(nobody_failed());
}

TEST_F(Programs, ThatAreNotThereAreTold) {
  start(1, {"nobody has it", {}});
  ASSERT_TRUE(until([&] { return ended_.size() == 1; }));
  EXPECT_EQ(code_of(ended_.front().why), errc::invalid_argument) << describe(ended_.front().why);
}

TEST_F(Programs, WhoseFactoriesThrowAreTold) {
  start(1, {"throws", {}});
  ASSERT_TRUE(until([&] { return ended_.size() == 1; }));
  EXPECT_EQ(code_of(ended_.front().why), errc::unavailable) << describe(ended_.front().why);
}

TEST(ProgramsInProcess, AreNotSupported) {
  if (in_workers())
    GTEST_SKIP() << "about devices of this process";
  test_system system{{.devices = 1}};
  world_config config;
  config.devices = system.ordinals();
  config.program.name = "so many sums";
  EXPECT_EQ(code_of(error_of(spawn_nccl_world(system, config))), errc::not_supported);
}

} // namespace

} // namespace troupe::testing
