/// One test suite for all traits classes of `unique_handle`.
#pragma once

#include "foundation/unique_handle.hpp"

#include <gtest/gtest.h>

#include <type_traits>
#include <utility>
#include <vector>

namespace troupe::testing {

/// Wraps `Traits` and records which values were destroyed.
template <class Traits> struct recorded {
  using value_type = typename Traits::value_type;
  struct entry {
    value_type value;
    int device;
    friend bool operator==(const entry&, const entry&) = default;
  };
  static inline std::vector<entry> destroyed;
  static void destroy(value_type value, int device) noexcept {
    destroyed.push_back({value, device});
    Traits::destroy(value, device);
  }
};

/// `Case` has `traits`, `available()`, and `make()`, which returns a new value each time, on device
/// 0.
template <class Case> class UniqueHandle : public ::testing::Test {
public:
  using traits = recorded<typename Case::traits>;
  using handle_type = detail::unique_handle<traits>;
  using value_type = typename traits::value_type;

protected:
  void SetUp() override {
    if (!Case::available())
      GTEST_SKIP() << "nothing to make it with";
    traits::destroyed.clear();
  }

  static auto& destroyed() { return traits::destroyed; }
};

TYPED_TEST_SUITE_P(UniqueHandle);

TYPED_TEST_P(UniqueHandle, IsMoveOnlyAndNeverThrows) {
  using type = typename TestFixture::handle_type;
  static_assert(!std::is_copy_constructible_v<type> && !std::is_copy_assignable_v<type>);
  static_assert(std::is_nothrow_move_constructible_v<type>);
  static_assert(std::is_nothrow_move_assignable_v<type>);
  static_assert(std::is_nothrow_default_constructible_v<type>);
  static_assert(!std::is_convertible_v<type, bool>);
}

TYPED_TEST_P(UniqueHandle, OwnsNothingByDefault) {
  {
    typename TestFixture::handle_type empty;
    EXPECT_FALSE(empty);
    EXPECT_EQ(empty.get(), typename TestFixture::value_type{});
    empty.reset();
  }
  EXPECT_TRUE(this->destroyed().empty());
}

TYPED_TEST_P(UniqueHandle, DestroysOnceAtTheEndOfItsScope) {
  const auto value = TypeParam::make();
  {
    const typename TestFixture::handle_type owner{value, 0};
    EXPECT_TRUE(owner);
    EXPECT_EQ(owner.get(), value);
    EXPECT_EQ(owner.device(), 0);
    EXPECT_TRUE(this->destroyed().empty());
  }
  ASSERT_EQ(this->destroyed().size(), 1u);
  EXPECT_EQ(this->destroyed()[0].value, value);
  EXPECT_EQ(this->destroyed()[0].device, 0);
}

TYPED_TEST_P(UniqueHandle, MovesAwayWhatItOwns) {
  const auto value = TypeParam::make();
  {
    typename TestFixture::handle_type from{value, 0};
    const typename TestFixture::handle_type to{std::move(from)};
    EXPECT_FALSE(from); // NOLINT(bugprone-use-after-move): that is what is tested
    EXPECT_EQ(to.get(), value);
    EXPECT_EQ(to.device(), 0);
    EXPECT_TRUE(this->destroyed().empty());
  }
  EXPECT_EQ(this->destroyed().size(), 1u);
}

TYPED_TEST_P(UniqueHandle, DestroysWhatItHadWhenAssignedTo) {
  const auto first = TypeParam::make();
  const auto second = TypeParam::make();
  {
    typename TestFixture::handle_type to{first, 0};
    typename TestFixture::handle_type from{second, 0};
    to = std::move(from);
    ASSERT_EQ(this->destroyed().size(), 1u);
    EXPECT_EQ(this->destroyed()[0].value, first);
    EXPECT_EQ(to.get(), second);
    EXPECT_FALSE(from); // NOLINT(bugprone-use-after-move): that is what is tested
    to = typename TestFixture::handle_type{};
    EXPECT_FALSE(to);
    EXPECT_EQ(this->destroyed().size(), 2u);
  }
  EXPECT_EQ(this->destroyed().size(), 2u);
}

TYPED_TEST_P(UniqueHandle, SurvivesAssignmentToItself) {
  const auto value = TypeParam::make();
  {
    typename TestFixture::handle_type owner{value, 0};
    auto& same = owner;
    owner = std::move(same);
    EXPECT_EQ(owner.get(), value);
    EXPECT_EQ(owner.device(), 0);
    EXPECT_TRUE(this->destroyed().empty());
  }
  EXPECT_EQ(this->destroyed().size(), 1u);
}

TYPED_TEST_P(UniqueHandle, GivesAwayWhatIsReleased) {
  const auto value = TypeParam::make();
  {
    typename TestFixture::handle_type owner{value, 0};
    EXPECT_EQ(owner.release(), value);
    EXPECT_FALSE(owner);
    EXPECT_EQ(owner.release(), typename TestFixture::value_type{});
  }
  EXPECT_TRUE(this->destroyed().empty());
  TypeParam::traits::destroy(value, 0);
}

TYPED_TEST_P(UniqueHandle, DestroysOnceWhenResetTwice) {
  typename TestFixture::handle_type owner{TypeParam::make(), 0};
  owner.reset();
  EXPECT_FALSE(owner);
  owner.reset();
  EXPECT_EQ(this->destroyed().size(), 1u);
}

TYPED_TEST_P(UniqueHandle, SwapsValuesAndDevices) {
  const auto value = TypeParam::make();
  {
    typename TestFixture::handle_type a{value, 0};
    typename TestFixture::handle_type b;
    a.swap(b);
    EXPECT_FALSE(a);
    EXPECT_EQ(a.device(), -1);
    EXPECT_EQ(b.get(), value);
    EXPECT_EQ(b.device(), 0);
    EXPECT_TRUE(this->destroyed().empty());
  }
  EXPECT_EQ(this->destroyed().size(), 1u);
}

REGISTER_TYPED_TEST_SUITE_P(UniqueHandle, IsMoveOnlyAndNeverThrows, OwnsNothingByDefault,
                            DestroysOnceAtTheEndOfItsScope, MovesAwayWhatItOwns,
                            DestroysWhatItHadWhenAssignedTo, SurvivesAssignmentToItself,
                            GivesAwayWhatIsReleased, DestroysOnceWhenResetTwice,
                            SwapsValuesAndDevices);

} // namespace troupe::testing
