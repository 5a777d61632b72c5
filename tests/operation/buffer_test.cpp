/// Tracks which bytes a failed operation left indeterminate, and the cause.
#include "operation/buffer.hpp"
#include "operation/device_state.hpp"
#include "support/expect.hpp"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <random>
#include <set>
#include <vector>

namespace troupe {

namespace {

using detail::buffer;
using testing::has_code;
using testing::is_ok;

constexpr std::size_t size = 64;

struct a_buffer {
  std::shared_ptr<detail::device_state> state = std::make_shared<detail::device_state>(1, 0);
  std::shared_ptr<buffer> memory;
  std::array<std::byte, size> bytes{};

  a_buffer() {
    state->publish();
    memory = state->make_buffer(bytes.data(), size, [](void*) {});
  }
};

/// Returns an error that differs from the errors of other numbers.
caf::error cause(std::uint64_t number) {
  failure x;
  x.code = errc::cuda_error;
  x.operation = number;
  return make_error(x);
}

std::uint64_t number_of(const caf::error& e) { return failure_of(e).value().operation; }

TEST(Buffer, IsDeterminateFromTheStart) {
  a_buffer x;
  EXPECT_TRUE(is_ok(x.memory->check_determinate(0, size)));
  EXPECT_TRUE(x.memory->mark_overwritten(0, size).empty());
}

TEST(Buffer, NamesTheFirstCause) {
  a_buffer x;
  x.memory->mark({8, 16, cause(1)});
  x.memory->mark({0, size, cause(2)});
  const auto told = x.memory->check_determinate(10, 12);
  EXPECT_TRUE(has_code(told, errc::indeterminate));
  EXPECT_EQ(number_of(told), 1u);
  EXPECT_NE(failure_of(told)->detail.find("cuda_error"), std::string::npos);
  EXPECT_EQ(cause_of(told), errc::cuda_error);
  EXPECT_EQ(cause_of(detail::skipped(detail::skipped(told))), errc::cuda_error);
  EXPECT_EQ(number_of(x.memory->check_determinate(16, 17)), 2u);
}

TEST(Buffer, AgreesWithABitmap) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random{seed};
    a_buffer x;
    std::array<std::uint64_t, size> model{}; // number of the cause; 0: determinate
    for (std::uint64_t step = 1; step < 60; ++step) {
      std::size_t begin = random() % (size + 1);
      std::size_t end = random() % (size + 1);
      if (end < begin)
        std::swap(begin, end);
      switch (random() % 3) {
      case 0:
        x.memory->mark({begin, end, cause(step)});
        for (auto i = begin; i < end; ++i)
          if (model[i] == 0)
            model[i] = step;
        break;
      case 1: {
        std::array<std::uint64_t, size> overwritten{};
        for (auto& w : x.memory->mark_overwritten(begin, end)) {
          ASSERT_LE(begin, w.begin);
          ASSERT_LT(w.begin, w.end);
          ASSERT_LE(w.end, end);
          for (auto i = w.begin; i < w.end; ++i) {
            ASSERT_EQ(overwritten[i], 0u);
            overwritten[i] = number_of(w.cause);
          }
        }
        for (auto i = begin; i < end; ++i) {
          ASSERT_EQ(overwritten[i], model[i])
              << "seed " << seed << ", step " << step << ", byte " << i;
          model[i] = 0;
        }
        break;
      }
      default: {
        std::set<std::uint64_t> causes;
        for (auto i = begin; i < end; ++i)
          if (model[i] != 0)
            causes.insert(model[i]);
        const auto told = x.memory->check_determinate(begin, end);
        if (begin == end)
          break;
        ASSERT_EQ(causes.empty(), !told) << "seed " << seed << ", step " << step;
        ASSERT_TRUE(!told || causes.contains(number_of(told)));
      }
      }
      for (std::size_t i = 0; i < size; ++i) {
        const auto told = x.memory->check_determinate(i, i + 1);
        ASSERT_EQ(told ? number_of(told) : 0, model[i])
            << "seed " << seed << ", step " << step << ", byte " << i;
      }
    }
  }
}

TEST(Buffer, IsStaleInEveryOtherLife) {
  a_buffer x;
  EXPECT_FALSE(x.memory->stale());
  x.state->close(device_phase::resetting, make_error(errc::device_reset, ""));
  EXPECT_TRUE(x.memory->stale());
  x.state->publish();
  EXPECT_TRUE(x.memory->stale());
}

TEST(Buffer, IsFreedByTheLane) {
  a_buffer x;
  int freed = 0;
  x.memory = x.state->make_buffer(x.bytes.data(), size, [&](void*) { ++freed; });
  const auto id = x.memory->id();
  EXPECT_EQ(x.state->find_buffer(id), x.memory);
  x.state->take_released();
  x.memory = nullptr;
  EXPECT_EQ(x.state->find_buffer(id), nullptr);
  EXPECT_EQ(freed, 0);
  auto released = x.state->take_released();
  ASSERT_EQ(released.size(), 1u);
  EXPECT_EQ(released[0].address, x.bytes.data());
  EXPECT_EQ(released[0].generation, 1u);
  EXPECT_TRUE(released[0].deleter);
}

} // namespace

} // namespace troupe
