#include "foundation/enum_name.hpp"

#include <gtest/gtest.h>

#include <cstdint>

namespace troupe::detail {
namespace {

enum class signed_code : int { none = -1, first = 0, with_gap = 5, last = 63, beyond = 64 };
enum class small_code : std::uint8_t { one = 1 };

TEST(EnumName, IsWhatTheProgramCallsIt) {
  EXPECT_EQ(enum_name(signed_code::first), "first");
  EXPECT_EQ(enum_name(signed_code::with_gap), "with_gap");
  EXPECT_EQ(enum_name(signed_code::last), "last");
  EXPECT_EQ(enum_name(small_code::one), "one");
}

TEST(EnumName, IsUnknownWithoutAnEnumeratorOrOutsideTheFirst64) {
  EXPECT_EQ(enum_name(static_cast<signed_code>(1)), "unknown");
  EXPECT_EQ(enum_name(signed_code::none), "unknown");
  EXPECT_EQ(enum_name(signed_code::beyond), "unknown");
  EXPECT_EQ(enum_name(small_code{}), "unknown");
  EXPECT_EQ(enum_name(static_cast<small_code>(255)), "unknown");
}

} // namespace
} // namespace troupe::detail
