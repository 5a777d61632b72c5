#include "foundation/unique_handle.hpp"
#include "support/unique_handle_suite.hpp"

#include <gtest/gtest.h>

#include <utility>

namespace troupe::testing {

namespace {

/// A number, such as a file descriptor.
struct number_case {
  struct traits {
    using value_type = int;
    static void destroy(int, int) noexcept {}
  };
  static bool available() { return true; }
  static int make() {
    static int last = 0;
    return ++last;
  }
};

/// An opaque pointer, such as CUDA's streams and NCCL's communicators.
struct pointer_case {
  struct traits {
    using value_type = struct opaque*;
    static void destroy(value_type, int) noexcept {}
  };
  static bool available() { return true; }
  static traits::value_type make() {
    static char objects[64];
    static int last = 0;
    return reinterpret_cast<traits::value_type>(&objects[++last % 64]);
  }
};

/// A value of several parts, such as memory that belongs to a stream.
struct pair_case {
  struct traits {
    struct value_type {
      int first = 0;
      int second = 0;
      friend bool operator==(const value_type&, const value_type&) = default;
    };
    static void destroy(value_type, int) noexcept {}
  };
  static bool available() { return true; }
  static traits::value_type make() {
    static int last = 0;
    return {++last, -last};
  }
};

using all_cases = ::testing::Types<number_case, pointer_case, pair_case>;

} // namespace

INSTANTIATE_TYPED_TEST_SUITE_P(Fake, UniqueHandle, all_cases);

TEST(UniqueHandleDevice, GoesWithTheValue) {
  using traits = recorded<number_case::traits>;
  traits::destroyed.clear();
  {
    detail::unique_handle<traits> a{number_case::make(), 3};
    detail::unique_handle<traits> b{number_case::make(), 5};
    a = std::move(b);
    EXPECT_EQ(a.device(), 5);
  }
  ASSERT_EQ(traits::destroyed.size(), 2u);
  EXPECT_EQ(traits::destroyed[0].device, 3);
  EXPECT_EQ(traits::destroyed[1].device, 5);
}

} // namespace troupe::testing
