// Device memory that a worker's program and its parent lend each other, by tokens, wherever the
// worker runs.

#include "sharing/claim_fixture.hpp"
#include <troupe/launch.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

constexpr auto elements = kept_elements;

TEST_P(Claim, GivesTheParentAProgramsMemory) {
  begin();
  ASSERT_TRUE(is_ok(claim(theirs(3))));
  EXPECT_EQ(ref_.count(), elements);
  EXPECT_EQ(ref_.device(), rank_);
  EXPECT_EQ(value(), 3);
  // The parent can use it as its own memory.
  auto own = must(device_->allocate<float>(elements));
  ASSERT_TRUE(is_ok(answer_of(device_->copy(own, ref_))));
  EXPECT_EQ(must(value_of(*device_, own)), 3);
}

TEST_P(Claim, GivesAProgramItsParentsMemory) {
  begin();
  ref_ = must(device_->allocate<float>(elements));
  ASSERT_TRUE(is_ok(fill(4)));
  const auto token = must(device_->offer(ref_));
  ref_ = {}; // the offer keeps the memory
  ASSERT_EQ(tell({.what = verb::claim, .token = token}).code, errc{});
  EXPECT_EQ(tell(verb::sum, false).value, 4);
}

TEST_P(Claim, SeesWhatWasAdmittedBefore) {
  begin();
  constexpr int rounds = 50;
  const std::size_t many = 1u << 20;
  for (int i = 0; i < rounds; ++i) {
    auto ref = must(device_->allocate<float>(many));
    const std::vector<float> content(many, static_cast<float>(i));
    auto written = device_->upload(ref, content);
    ASSERT_EQ(tell({.what = verb::claim, .token = must(device_->offer(ref))}).code, errc{});
    ASSERT_EQ(tell(verb::sum, false).value, static_cast<float>(i));
    ASSERT_TRUE(is_ok(answer_of(written)));
  }
}

TEST_P(Claim, ForWritingIsWrittenByOne) {
  begin();
  ASSERT_TRUE(is_ok(claim(theirs(5), access_mode::read_write)));
  EXPECT_EQ(tell(verb::sum).code, errc::buffer_acquired);
  EXPECT_EQ(tell(verb::fill).code, errc::buffer_acquired);
  ASSERT_TRUE(is_ok(fill(6)));
  EXPECT_EQ(value(), 6);
  ref_ = {};
  ASSERT_TRUE(comes_to(verb::sum, errc{}));
  EXPECT_EQ(tell(verb::sum).value, 6);
  EXPECT_EQ(tell(verb::fill).code, errc{});
}

TEST_P(Claim, ForReadingIsReadByBoth) {
  begin();
  ASSERT_TRUE(is_ok(claim(theirs(7))));
  EXPECT_TRUE(has_code(fill(8), errc::buffer_acquired));
  EXPECT_EQ(tell(verb::sum).value, 7);
  EXPECT_EQ(tell(verb::fill).code, errc::buffer_acquired);
  // Each handle claimed by another process has a lease of its own.
  auto again = must(device_->claim<float>(tell(verb::offer).token));
  ref_ = {};
  EXPECT_EQ(must(value_of(*device_, again)), 7);
  EXPECT_EQ(tell(verb::fill).code, errc::buffer_acquired);
  again = {};
  EXPECT_TRUE(comes_to(verb::fill, errc{}));
}

TEST_P(Claim, OfMemoryThatSomebodyHoldsIsRefused) {
  begin();
  const auto token = theirs(1);
  ASSERT_TRUE(is_ok(claim(token, access_mode::write)));
  EXPECT_TRUE(has_code(device_->claim<float>(token), errc::buffer_acquired));
  EXPECT_TRUE(has_code(device_->claim<float>(token, access_mode::write), errc::buffer_acquired));
}

TEST_P(Claim, KeepsAResetAway) {
  begin();
  auto own = must(device_->allocate<float>(elements));
  ASSERT_EQ(tell({.what = verb::claim, .token = own.any().token()}).code, errc{});
  EXPECT_TRUE(has_code(answer_of(device_->reset()), errc::buffer_acquired));
  tell(verb::drop, false);
  caf::error refused;
  EXPECT_TRUE(eventually([&] {
    refused = error_of(answer_of(device_->reset()));
    return code_of(refused) != errc::buffer_acquired;
  }));
  EXPECT_TRUE(is_ok(refused));
  // Only the parent may reset a program's device.
  EXPECT_EQ(tell(verb::reset).code, errc::not_supported);
}

TEST_P(Claim, OfForgedTokensIsRefused) {
  begin();
  const auto token = theirs(1);
  auto own = must(device_->allocate<float>(elements));
  for (auto& [what, change] : std::vector<std::pair<const char*, std::function<void(gpu_token&)>>>{
           {"another node", [](auto& x) { ++x.node; }},
           {"another device", [](auto& x) { ++x.device; }},
           {"no device", [](auto& x) { x.device = -1; }},
           {"another buffer", [](auto& x) { ++x.buffer; }},
           {"another generation", [](auto& x) { ++x.generation; }},
           {"no generation", [](auto& x) { x.generation = 0; }},
           {"more elements", [](auto& x) { ++x.count; }},
           {"too many elements", [](auto& x) { x.count = ~std::uint64_t{0}; }},
           {"a place in an element", [](auto& x) { x.offset = 2; }},
           {"a place outside", [](auto& x) { x.offset = 4 * elements + 4; }},
           {"no type", [](auto& x) { x.type = static_cast<dtype>(255); }},
           {"nothing", [](auto& x) { x = {}; }}}) {
    auto forged = token;
    change(forged);
    EXPECT_TRUE(has_code(answer_of(device_->claim(forged)), errc::stale_ref)) << what;
    forged = own.any().token();
    change(forged);
    EXPECT_EQ(tell({.what = verb::claim, .token = forged}).code, errc::stale_ref) << what;
  }
  // A slice with another type is valid.
  auto part = must(own.slice(10, 20)).any();
  ASSERT_TRUE(is_ok(answer_of(device_->fill(own, 2.0f))));
  EXPECT_EQ(tell({.what = verb::claim, .token = part.token()}).code, errc{});
  EXPECT_EQ(tell(verb::sum, false).value, 2);
}

TEST_P(Claim, OfAnotherDevicesMemoryIsRefused) {
  TROUPE_NEEDS_DEVICES(2);
  begin(2);
  const auto token = theirs(1);
  // Device 1's process does not have this memory, and the parent has none of another device for it.
  auto other = system_->open(rank_ + 1);
  EXPECT_TRUE(has_code(other.claim<float>(token), errc::stale_ref));
  auto own = must(other.allocate<float>(elements));
  EXPECT_TRUE(has_code(device_->claim<float>(own.any().token()), errc::invalid_argument));
  EXPECT_EQ(tell({.what = verb::claim, .token = own.any().token()}).code, errc::invalid_argument);
  EXPECT_EQ(tell({.what = verb::claim, .token = own.any().token()}, rank_ + 1).code, errc{});
}

TEST_P(Claim, OffersEndWithTheirTime) {
  begin();
  const auto before = must(answer_of(device_->stats())).free_bytes;
  ref_ = must(device_->allocate<float>(1u << 20));
  auto token = must(device_->offer(ref_, std::chrono::hours{1}));
  ref_ = {};
  EXPECT_TRUE(is_ok(answer_of(device_->claim(token)))); // in the same process, as `resolve`
  ref_ = must(device_->allocate<float>(1u << 20));
  const stopwatch watch;
  token = must(device_->offer(ref_, 100ms));
  EXPECT_NE(must(answer_of(device_->stats())).free_bytes, before);
  ref_ = {};
  ASSERT_TRUE(eventually([&] { return !any_gpu_ref::resolve(token); }));
  EXPECT_GE(watch.elapsed(), 90ms);
  EXPECT_EQ(tell({.what = verb::claim, .token = token}).code, errc::stale_ref);
}

TEST_P(Claim, TakesOneOffer) {
  begin();
  const auto token = theirs(9, std::chrono::hours{1});
  tell(verb::offer); // a second offer
  tell(verb::drop);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(is_ok(claim(token)));
    EXPECT_EQ(value(), 9);
    ref_ = {};
  }
  caf::error last;
  EXPECT_TRUE(eventually([&] { // the previous lease may not have ended yet
    last = claim(token);
    ref_ = {};
    return static_cast<bool>(last);
  }));
  EXPECT_TRUE(has_code(last, errc::stale_ref));
}

TEST_P(Claim, LeavesHalfWrittenWhatFailed) {
  begin();
  const auto token = theirs(1, std::chrono::hours{1});
  tell(verb::offer);
  ASSERT_TRUE(is_ok(claim(token, access_mode::read_write)));
  EXPECT_TRUE(has_code(fail_to_write(*device_, must(ref_.slice(10, 1))), errc::launch_failed));
  EXPECT_TRUE(has_code(value_of(*device_, ref_), errc::indeterminate));
  ref_ = {};
  ASSERT_TRUE(comes_to(verb::sum, errc::indeterminate));
  EXPECT_TRUE(has_code(claim(token), errc::indeterminate));
  EXPECT_EQ(tell(verb::fill, true, 2).code, errc{});
  ASSERT_TRUE(is_ok(claim(token)));
  EXPECT_EQ(value(), 2);
  // The same in the opposite direction.
  auto own = must(device_->allocate<float>(elements));
  ASSERT_TRUE(is_ok(answer_of(device_->fill(own, 1.0f))));
  ASSERT_EQ(tell({.what = verb::claim,
                  .mode = access_mode::write,
                  .token = must(own.slice(10, 5)).any().token()})
                .code,
            errc{});
  EXPECT_EQ(tell(verb::fail, false).code, errc::launch_failed);
  tell(verb::drop, false);
  caf::error refused;
  EXPECT_TRUE(eventually([&] {
    refused = error_of(value_of(*device_, own));
    return code_of(refused) != errc::buffer_acquired;
  }));
  EXPECT_TRUE(has_code(refused, errc::indeterminate));
  EXPECT_EQ(must(value_of(*device_, must(own.slice(0, 10)))), 1);
  EXPECT_EQ(must(value_of(*device_, must(own.slice(15, elements - 15)))), 1);
}

TEST_P(Claim, EndsWithItsDeadline) {
  begin();
  const auto token = theirs(1);
  ASSERT_TRUE(is_ok(claim(token, access_mode::read_write)));
  // Memory lent for writing cannot be claimed again. A failed claim leaves no lease.
  for (int i = 0; i < 100; ++i)
    EXPECT_FALSE(is_ok(answer_of(device_->claim(token, access_mode::read, {.deadline = 1us}))));
  ref_ = {};
  EXPECT_TRUE(comes_to(verb::fill, errc{}));
  // The deadline may be over at any step of a claim.
  for (int i = 0; i < 1000; ++i)
    static_cast<void>(answer_of(device_->claim(token, access_mode::write,
                                               {.deadline = std::chrono::microseconds{i % 250}})));
  EXPECT_TRUE(comes_to(verb::fill, errc{}));
}

TEST_P(Claim, KeepsWhatIsHalfWrittenSo) {
  begin();
  const auto token = theirs(1, std::chrono::hours{1});
  EXPECT_EQ(tell(verb::fail).code, errc::launch_failed);
  // A claim for writing is allowed, but does not make the range determinate by itself.
  ASSERT_TRUE(is_ok(claim(token, access_mode::write)));
  EXPECT_TRUE(has_code(value_of(*device_, ref_), errc::indeterminate));
  ASSERT_TRUE(is_ok(answer_of(device_->fill(must(ref_.slice(0, 500)), 2.0f))));
  EXPECT_EQ(must(value_of(*device_, must(ref_.slice(0, 500)))), 2);
  ref_ = {};
  EXPECT_TRUE(comes_to(verb::sum, errc::indeterminate));
  ASSERT_TRUE(is_ok(claim(token, access_mode::write)));
  ASSERT_TRUE(is_ok(fill(3)));
  ref_ = {};
  ASSERT_TRUE(comes_to(verb::sum, errc{}));
  EXPECT_EQ(tell(verb::sum).value, 3);
}

TEST_P(Claim, ManyAreGivenBackAtOnce) {
  begin();
  const auto token = theirs(1, std::chrono::hours{1});
  std::vector<any_gpu_ref> all;
  for (int i = 0; i < 3000; ++i)
    all.push_back(must(answer_of(device_->claim(token))));
  EXPECT_EQ(tell(verb::fill).code, errc::buffer_acquired);
  all.clear();
  EXPECT_TRUE(comes_to(verb::fill, errc{}));
}

TEST_P(Claim, LeavesTheDeviceToTheParent) {
  begin();
  ASSERT_TRUE(is_ok(claim(theirs(1))));
  tell(verb::shut_down); // has no effect
  EXPECT_EQ(value(), 1);
  EXPECT_EQ(tell(verb::sum).value, 1);
}

TEST_P(Claim, EndsWithTheProcess) {
  begin();
  const auto token = theirs(1);
  ASSERT_TRUE(is_ok(claim(token)));
  auto own = must(device_->allocate<float>(elements));
  ASSERT_EQ(
      tell({.what = verb::claim, .mode = access_mode::write, .token = own.any().token()}).code,
      errc{});
  const auto epoch = view_.epoch;
  EXPECT_EQ(code_of(kill(rank_)), errc::worker_lost);
  ASSERT_TRUE(until([&] { return view_.phase == world_phase::ready && view_.epoch > epoch; }));
  EXPECT_TRUE(ref_.stale());
  EXPECT_TRUE(has_code(value_of(*device_, ref_), errc::stale_ref));
  ref_ = {};
  EXPECT_TRUE(has_code(claim(token), errc::stale_ref));
  // The lost process was not writing to it.
  EXPECT_EQ(tell({.what = verb::claim, .token = own.any().token()}).code,
            own.stale() ? errc::stale_ref : errc{});
  // No lease of the lost process blocks the device.
  ASSERT_TRUE(is_ok(claim(theirs(2))));
  EXPECT_EQ(value(), 2);
  ref_ = {};
  tell(verb::drop);
  tell(verb::drop, false);
  EXPECT_TRUE(eventually([&] { return is_ok(answer_of(device_->reset())); }));
}

TEST_P(Claim, IsAMessage) {
  begin();
  const auto token = theirs(3);
  auto actor = must(device_->actor());
  auto ref = must(ask<any_gpu_ref>(*system_, actor, troupe::claim{token, access_mode::read, {}}));
  EXPECT_EQ(must(value_of(*device_, must(gpu_ref<float>::from(ref)))), 3);
  auto own = must(device_->allocate<float>(elements));
  ASSERT_TRUE(is_ok(answer_of(device_->fill(own, 5.0f))));
  auto offered = must(ask<gpu_token>(*system_, actor, offer{own, 10s}));
  own = {};
  ASSERT_EQ(tell({.what = verb::claim, .token = offered}).code, errc{});
  EXPECT_EQ(tell(verb::sum, false).value, 5);
}

} // namespace

} // namespace troupe::testing
