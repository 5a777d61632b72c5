// Which stranger makes room at a port.

#include "remote/stranger_limits.hpp"
#include "support/expect.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace troupe::testing {

namespace {

using detail::find_surplus;
using detail::stranger;
using detail::stranger_stage;

constexpr detail::stranger_limits few{.total = 8, .per_address = 3};

stranger from(const std::string& address, stranger_stage at = stranger_stage::silent) {
  return {must(detail::address_from_string(address)), at};
}

/// Strangers that come one after the other.
class crowd {
public:
  /// Returns the one that went, if any.
  std::optional<stranger> comes(const stranger& next) {
    present_.push_back(next);
    const auto i = find_surplus(present_, next.at, few, random_);
    if (!i)
      return std::nullopt;
    const auto result = present_.at(*i);
    present_.erase(present_.begin() + static_cast<std::ptrdiff_t>(*i));
    return result;
  }
  std::size_t count(const std::string& address) const {
    const auto wanted = from(address).from;
    return static_cast<std::size_t>(
        std::ranges::count_if(present_, [&](auto& x) { return x.from == wanted; }));
  }
  std::size_t size() const { return present_.size(); }

private:
  std::vector<stranger> present_;
  std::minstd_rand random_{1};
};

TEST(StrangerLimits, EachAddressHasItsShare) {
  crowd all;
  all.comes(from("10.0.0.1"));
  for (int i = 0; i < 1000; ++i)
    all.comes(from("10.0.0.2"));
  EXPECT_EQ(all.count("10.0.0.2"), few.per_address);
  EXPECT_EQ(all.count("10.0.0.1"), 1U);
}

TEST(StrangerLimits, TheAddressWithTheMostMakesRoom) {
  crowd all;
  for (int i = 0; i < 3; ++i)
    all.comes(from("10.0.0.1"));
  for (int i = 0; i < 5; ++i)
    EXPECT_FALSE(all.comes(from("10.0.1." + std::to_string(i))));
  ASSERT_EQ(all.size(), few.total);
  const auto gone = all.comes(from("10.0.0.9"));
  ASSERT_TRUE(gone);
  EXPECT_EQ(gone->from, from("10.0.0.1").from);
  EXPECT_EQ(all.count("10.0.0.1"), 2U);
  EXPECT_EQ(all.size(), few.total);
}

TEST(StrangerLimits, OneStageHasNoEffectOnAnother) {
  for (auto later :
       {stranger_stage::waiting, stranger_stage::handshake, stranger_stage::authenticated}) {
    crowd all;
    EXPECT_FALSE(all.comes(from("10.0.0.1", later)));
    for (int i = 0; i < 1000; ++i) {
      const auto gone = all.comes(from("10.0.0." + std::to_string(i % 250)));
      EXPECT_TRUE(!gone || gone->at == stranger_stage::silent);
    }
    EXPECT_EQ(all.size(), few.total + 1);
  }
}

/// None of one address can count on staying, or on going, by its place.
TEST(StrangerLimits, ChanceDecidesAmongThoseOfOneAddress) {
  std::minstd_rand random{1};
  const std::vector<stranger> present(few.per_address + 1, from("10.0.0.1"));
  std::map<std::size_t, int> gone;
  constexpr int times = 4000;
  for (int i = 0; i < times; ++i)
    ++gone[find_surplus(present, stranger_stage::silent, few, random).value()];
  ASSERT_EQ(gone.size(), present.size());
  for (auto& [i, number] : gone)
    EXPECT_NEAR(number, times / 4, times / 20) << i;
}

TEST(StrangerLimits, ChanceDecidesAmongAddressesThatHaveAsMany) {
  std::minstd_rand random{1};
  std::vector<stranger> present;
  for (std::size_t i = 0; i <= few.total; ++i)
    present.push_back(from("10.0.0." + std::to_string(1 + i)));
  std::map<std::size_t, int> gone;
  constexpr int times = 9000;
  for (int i = 0; i < times; ++i)
    ++gone[find_surplus(present, stranger_stage::silent, few, random).value()];
  ASSERT_EQ(gone.size(), present.size());
  for (auto& [i, number] : gone)
    EXPECT_NEAR(number, times / 9, times / 45) << i;
}

TEST(StrangerLimits, ANetworkOfVersionSixIsOneAddress) {
  crowd all;
  for (int i = 0; i < 1000; ++i)
    all.comes(from("2001:db8:0:1::" + std::to_string(i)));
  EXPECT_EQ(all.size(), few.per_address);
  EXPECT_FALSE(all.comes(from("2001:db8:0:2::1")));
}

TEST(StrangerLimits, EachStageTakesAtMostAQuarterOfTheDescriptors) {
  for (auto at : {stranger_stage::silent, stranger_stage::waiting, stranger_stage::handshake,
                  stranger_stage::authenticated}) {
    EXPECT_EQ(detail::limits_of(at, 0).per_address, at == stranger_stage::authenticated ? 4U : 1U);
    EXPECT_EQ(detail::limits_of(at, 40).total, 10U);
    const auto most = at == stranger_stage::silent ? 256U : 64U;
    EXPECT_EQ(detail::limits_of(at, 1 << 20).total, most);
  }
}

} // namespace

} // namespace troupe::testing
