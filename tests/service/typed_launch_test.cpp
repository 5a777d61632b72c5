// Launches as functions of typed memory. Workers run the same program, so the launches are
// registered there too.

#include "support/world_fixture.hpp"
#include <troupe/typed_launch.hpp>

#include <cstdint>
#include <cstring>
#include <random>

namespace troupe::testing {

namespace {

constexpr const char* affine = "troupe.testing.affine";
constexpr const char* sum_and_difference = "troupe.testing.sum_and_difference";
constexpr const char* sizes = "troupe.testing.sizes";

struct factors {
  float slope;
  std::int32_t offset;
};

caf::error affine_on_host(launch_context& context, const factors& f, std::span<const float> from,
                          std::span<float> to) {
  return context.run_on_host([=] {
    for (std::size_t i = 0; i < to.size(); ++i)
      to[i] = f.slope * from[i] + static_cast<float>(f.offset);
  });
}

/// Two kinds of elements, and a lambda.
const auto sum_and_difference_on_host = [](launch_context& context, std::span<const std::int32_t> x,
                                           std::span<const double> y, std::span<double> sum,
                                           std::span<std::int64_t> difference) {
  return context.run_on_host([=] {
    for (std::size_t i = 0; i < x.size(); ++i) {
      sum[i] = x[i] + y[i];
      difference[i] = x[i] - static_cast<std::int64_t>(y[i]);
    }
  });
};

[[maybe_unused]] const bool registered = [] {
  must(register_launch(affine, typed_launch(affine_on_host)));
  must(register_launch(sum_and_difference, typed_launch(sum_and_difference_on_host)));
  must(register_launch(sizes, typed_launch([](launch_context&, std::span<float> x) {
                         return make_error(errc::internal, std::to_string(x.size()));
                       })));
  return true;
}();

template <class T> std::vector<T> random_values(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  std::uniform_int_distribution<int> digit{-1000, 1000};
  std::vector<T> result(count);
  for (auto& x : result)
    x = static_cast<T>(digit(random));
  return result;
}

/// Only on the host backend: the functions run on the host.
class TypedLaunch : public ::testing::Test {
protected:
  void SetUp() override {
    if (on_cuda())
      GTEST_SKIP() << "the launches are functions of the host";
  }

  template <class T> gpu_ref<T> memory_of(const std::vector<T>& content) {
    auto result = must(device_.allocate<T>(content.size()));
    must(answer_of(device_.upload(result, content)));
    return result;
  }

  test_system system_;
  device device_ = system_.open();
};

TEST_F(TypedLaunch, GetsArgumentsAndMemory) {
  const auto x = random_values<float>(1003, 1);
  const auto from = memory_of(x);
  const auto to = memory_of(random_values<float>(1003, 2));
  const factors f{3, -7};
  const auto done = device_.launch(affine, to_bytes(f), {from}, {to});
  ASSERT_TRUE(is_ok(answer_of(done)));
  const auto got = must(device_.download(to));
  for (std::size_t i = 0; i < x.size(); ++i)
    ASSERT_EQ(got[i], 3 * x[i] - 7) << i;
}

TEST_F(TypedLaunch, GetsEachHandleInItsPlace) {
  const auto x = random_values<std::int32_t>(257, 3);
  const auto y = random_values<double>(257, 4);
  const auto sum = memory_of(random_values<double>(257, 5));
  const auto difference = memory_of(random_values<std::int64_t>(257, 6));
  const auto done =
      device_.launch(sum_and_difference, {}, {memory_of(x), memory_of(y)}, {sum, difference});
  ASSERT_TRUE(is_ok(answer_of(done)));
  const auto sums = must(device_.download(sum));
  const auto differences = must(device_.download(difference));
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(sums[i], x[i] + y[i]) << i;
    ASSERT_EQ(differences[i], x[i] - static_cast<std::int64_t>(y[i])) << i;
  }
}

TEST_F(TypedLaunch, SliceHasItsOwnSize) {
  const auto all = memory_of(random_values<float>(100, 7));
  const auto done = device_.launch(sizes, {}, {}, {must(all.slice(90, 7))});
  const auto why = error_of(answer_of(done));
  EXPECT_TRUE(has_code(why, errc::launch_failed));
  EXPECT_NE(describe(why).find(": 7"), std::string::npos) << describe(why);
}

TEST_F(TypedLaunch, WrongHandlesAndArgumentsAreRefused) {
  const auto x = memory_of(random_values<float>(10, 8));
  const auto y = memory_of(random_values<float>(10, 9));
  const auto doubles = memory_of(random_values<double>(10, 10));
  const auto good = to_bytes(factors{1, 1});
  const struct {
    const char* text;
    std::vector<std::uint8_t> arguments;
    std::vector<any_gpu_ref> reads;
    std::vector<any_gpu_ref> writes;
  } cases[] = {
      {"the buffer holds float64, not float32", good, {doubles}, {y}},
      {"the buffer holds float64, not float32", good, {x}, {doubles}},
      {"the launch reads more buffers than the request names", good, {}, {y}},
      {"the launch writes more buffers than the request names", good, {x}, {}},
      {"the request names more buffers than the launch reads or writes", good, {x, x}, {y}},
      {"the request names more buffers than the launch reads or writes", good, {x}, {y, doubles}},
      {"0 bytes are not a value of 8", {}, {x}, {y}},
      {"4 bytes are not a value of 8", to_bytes(1.0f), {x}, {y}},
  };
  const auto before = must(device_.download(x));
  for (auto& wrong : cases) {
    const auto why =
        error_of(answer_of(device_.launch(affine, wrong.arguments, wrong.reads, wrong.writes)));
    EXPECT_TRUE(has_code(why, errc::launch_failed));
    EXPECT_NE(describe(why).find(wrong.text), std::string::npos) << describe(why);
  }
  const auto why = error_of(answer_of(device_.launch(sum_and_difference, good, {}, {})));
  EXPECT_NE(describe(why).find("the launch has no arguments"), std::string::npos) << describe(why);
  EXPECT_EQ(must(device_.download(x)), before); // the device goes on
}

} // namespace

} // namespace troupe::testing
