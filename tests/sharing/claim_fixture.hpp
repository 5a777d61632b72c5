/// Memory that a worker's program and its parent lend each other, by tokens.
#pragma once

#include "sharing/memory_keeper.hpp"
#include "support/eventually.hpp"
#include "worker/program_fixture.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>

namespace troupe::testing {

/// A world whose ranks keep memory, and the device of one rank.
class ClaimTest : public ProgramsTest {
protected:
  using verb = keeper_order::verb;

  /// `rank`: the rank that gets orders if no other is named.
  void begin(system_options where, int rank) {
    rank_ = rank;
    start(std::move(where), memory_keeper());
    ASSERT_TRUE(until([this] { return view_.phase == world_phase::ready; }));
    device_.emplace(system_->open(rank_));
  }
  void TearDown() override {
    ref_ = {};
    device_.reset();
    ProgramsTest::TearDown();
  }

  keeper_outcome tell(const keeper_order& x, int rank) {
    const auto before = reports_.size();
    detail::send(*self_, actor_, program_message{rank, to_bytes(x)});
    EXPECT_TRUE(until([&] { return reports_.size() > before; }));
    return reports_.size() > before ? must(from_bytes<keeper_outcome>(reports_.back().bytes))
                                    : keeper_outcome{errc::internal, {}, 0};
  }
  keeper_outcome tell(const keeper_order& x) { return tell(x, rank_); }
  keeper_outcome tell(verb what, bool mine = true, float value = 0) {
    return tell({.what = what, .mine = mine, .value = value});
  }
  /// Returns the token of the program's memory, filled with `value`.
  gpu_token theirs(float value, std::chrono::nanoseconds grace = 10s) {
    auto offered = tell({.what = verb::offer, .grace_ns = grace.count()});
    EXPECT_EQ(offered.code, errc{});
    EXPECT_EQ(tell(verb::fill, true, value).code, errc{});
    return offered.token;
  }
  /// Claims the memory for the parent.
  caf::error claim(const gpu_token& token, access_mode mode = access_mode::read) {
    auto got = device_->claim<float>(token, mode);
    if (!got)
      return got.error();
    ref_ = *got;
    return {};
  }
  float value() { return must(value_of(*device_, ref_)); }
  caf::error fill(float value) { return error_of(device_->fill(ref_, value).wait()); }
  /// For EXPECT_TRUE: the order returns `code`, possibly only after a lease has been given back.
  ::testing::AssertionResult comes_to(verb what, errc code, bool mine = true) {
    errc got{};
    auto came = eventually([&] { return (got = tell(what, mine).code) == code; });
    return came ? came : came << ": it is " << to_string(got);
  }

  int rank_ = 0;
  std::optional<device> device_;
  gpu_ref<float> ref_;
};

/// Devices whose programs run in one kind of process.
class claim_place {
public:
  virtual ~claim_place() = default;
  /// Returns options for a system. This object must outlive the system.
  virtual system_options system(int devices) = 0;
  /// Returns the ordinal of the first device.
  virtual int first() const noexcept = 0;
};

struct claim_place_kind {
  std::string name;
  std::function<std::unique_ptr<claim_place>()> make;

  friend std::ostream& operator<<(std::ostream& out, const claim_place_kind& x) {
    return out << x.name;
  }
};

/// Tests independent of the program's process. Each binary defines which processes it uses.
class Claim : public ClaimTest, public ::testing::WithParamInterface<claim_place_kind> {
protected:
  void begin(int devices = 1) {
    place_ = GetParam().make();
    ClaimTest::begin(place_->system(devices), place_->first());
  }
  void TearDown() override {
    ClaimTest::TearDown();
    system_.reset();
  }

private:
  std::unique_ptr<claim_place> place_;
};

} // namespace troupe::testing
