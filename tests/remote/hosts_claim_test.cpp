// Memory leases between a parent and workers of other hosts, and their end when a host is lost.

#include "remote/hosts_support.hpp"
#include "remote/test_wire.hpp"
#include "sharing/claim_fixture.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

/// A host on which the devices have other ordinals than in the parent.
class another_host final : public claim_place {
public:
  system_options system(int devices) override {
    return fleet_.emplace(fleet_options{.local = 1, .devices = devices}).system();
  }
  int first() const noexcept override { return 1; }

private:
  std::optional<test_fleet> fleet_;
};

INSTANTIATE_TEST_SUITE_P(Hosts, Claim,
                         ::testing::Values(claim_place_kind{
                             "elsewhere", [] { return std::make_unique<another_host>(); }}),
                         [](const auto& x) { return x.param.name; });

/// A connection to the host that a test can cut.
class HostClaim : public ClaimTest {
protected:
  static constexpr auto link_limit = 1s;

  void begin(fleet_options options = {.local = 1, .devices = 1}) {
    options.link_limit = link_limit;
    options.way = [this](std::uint16_t port) { return wire_.emplace(port).port(); };
    fleet_.emplace(std::move(options));
    ClaimTest::begin(fleet_->system(), 1);
  }
  void TearDown() override {
    ClaimTest::TearDown();
    system_.reset();
  }

  std::size_t free_bytes() { return must(answer_of(device_->stats())).free_bytes; }

  /// For EXPECT_TRUE: the world is ready with the device in this generation.
  ::testing::AssertionResult until_member_has(std::uint64_t generation) {
    return until([&] {
      return view_.phase == world_phase::ready &&
             view_.members.at(static_cast<std::size_t>(rank_)).generation == generation;
    });
  }
  /// For EXPECT_TRUE: the worker is lost, or was lost when the request started.
  static ::testing::AssertionResult is_gone_for(const caf::error& why) {
    for (auto code : {errc::unavailable, errc::stale_ref})
      if (code_of(why) == code)
        return ::testing::AssertionSuccess();
    return has_code(why, errc::worker_lost);
  }

  /// Expects that leases in both directions end with `lose`, and that none is left after `find`.
  template <class Lose, class Find> void ends_with(Lose lose, Find find) {
    device_feed feed{*system_, system_->device_actor(rank_)};
    const auto before = feed.until(device_phase::ready).generation;
    const auto free_at_first = free_bytes();
    const auto token = theirs(1);
    ASSERT_TRUE(is_ok(claim(token)));
    auto own = must(device_->allocate<float>(kept_elements));
    const auto own_token = own.any().token();
    ASSERT_EQ(tell({.what = verb::claim, .mode = access_mode::write, .token = own_token}).code,
              errc{});
    const stopwatch watch;
    lose();
    // Requests on the way to the host fail with it, long before their own deadline.
    auto claimed = device_->claim(token, access_mode::read, {.deadline = patience});
    EXPECT_TRUE(is_gone_for(error_of(device_->download(ref_))));
    EXPECT_TRUE(is_gone_for(error_of(answer_of(claimed))));
    feed.until([](const device_changed& x) { return x.phase != device_phase::ready; });
    EXPECT_LT(watch.elapsed(), link_limit + at_once);
    EXPECT_TRUE(ref_.stale());
    EXPECT_TRUE(has_code(value_of(*device_, ref_), errc::stale_ref));
    EXPECT_TRUE(has_code(value_of(*device_, own), errc::stale_ref));
    find();
    feed.until(device_phase::ready, before + 1);
    ASSERT_TRUE(until_member_has(before + 1));
    // No memory of the next generation is lent, and all of it is free.
    EXPECT_EQ(free_bytes(), free_at_first);
    ref_ = {};
    EXPECT_TRUE(has_code(claim(token), errc::stale_ref));
    EXPECT_EQ(tell({.what = verb::claim, .token = own_token}).code, errc::stale_ref);
    EXPECT_TRUE(is_ok(answer_of(device_->reset())));
    feed.until(device_phase::ready, before + 2);
    ASSERT_TRUE(until_member_has(before + 2));
    ASSERT_TRUE(is_ok(claim(theirs(2))));
    EXPECT_EQ(value(), 2);
    ref_ = {};
    own = must(device_->allocate<float>(kept_elements));
    ASSERT_TRUE(is_ok(answer_of(device_->fill(own, 3.0f))));
    ASSERT_EQ(tell({.what = verb::claim, .token = own.any().token()}).code, errc{});
    EXPECT_EQ(tell(verb::sum, false).value, 3);
  }

  std::optional<test_wire> wire_;
  std::optional<test_fleet> fleet_;
};

TEST_F(HostClaim, EndsWithTheLink) {
  begin();
  ends_with([this] { wire_->cut(); }, [this] { wire_->mend(); });
}

TEST_F(HostClaim, EndsWithTheAgent) {
  begin();
  ends_with(
      [this] {
        auto& agent = fleet_->agent("alpha");
        ASSERT_TRUE(agent.wait_told("process", patience));
        agent.kill();
        ASSERT_TRUE(goes(std::stoi(agent.told("process")), at_once));
      },
      [this] { fleet_->start_agent("alpha"); });
}

TEST_F(HostClaim, OutlivesTheSystem) {
  begin();
  ASSERT_TRUE(is_ok(claim(theirs(1))));
  auto own = must(device_->allocate<float>(kept_elements));
  ASSERT_EQ(
      tell({.what = verb::claim, .mode = access_mode::write, .token = own.any().token()}).code,
      errc{});
  const auto kept = std::exchange(ref_, {});
  ClaimTest::TearDown();
  const stopwatch watch;
  system_.reset();
  EXPECT_LT(watch.elapsed(), 3s); // the runtime gives up stuck work after 5 s
  EXPECT_TRUE(kept.stale());
  EXPECT_TRUE(own.stale());
}

TEST_F(HostClaim, OfAnotherHostsMemoryIsRefused) {
  begin({.local = 1, .names = {"alpha", "beta"}, .devices = 1});
  const auto token = theirs(1);
  for (const int other : {0, 2}) { // a device of this host and one of the other host
    auto elsewhere = system_->open(other);
    EXPECT_TRUE(has_code(elsewhere.claim<float>(token), errc::stale_ref)) << other;
    EXPECT_EQ(tell({.what = verb::claim, .token = token}, other).code, errc::stale_ref) << other;
    auto own = must(elsewhere.allocate<float>(kept_elements));
    EXPECT_EQ(tell({.what = verb::claim, .token = own.any().token()}).code, errc::invalid_argument)
        << other;
  }
  EXPECT_TRUE(is_ok(claim(token)));
}

} // namespace

} // namespace troupe::testing
