/// Handles: slices, views as other types, tokens.
#include "support/core_fixture.hpp"
#include <troupe/gpu_ref.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace troupe {

namespace {

using testing::allocate_bytes;
using testing::answer_of;
using testing::core_system;
using testing::failing_work;
using testing::has_code;
using testing::is_ok;
using testing::must;
using testing::same_bytes;

any_gpu_ref allocate(const core_system& system, std::size_t count, dtype type, int device = 0) {
  auto op = system.device(device).allocate(count, type, true, {});
  must(answer_of(op));
  return op->value;
}

std::byte* at(const any_gpu_ref& x) { return static_cast<std::byte*>(must(x.access())); }

TEST(GpuRef, KnowsWhatItIs) {
  core_system system{{.devices = 2}};
  const auto x = allocate(system, 100, dtype::int32, 1);
  EXPECT_TRUE(x);
  EXPECT_EQ(x.type(), dtype::int32);
  EXPECT_EQ(x.count(), 100u);
  EXPECT_EQ(x.size_bytes(), 400u);
  EXPECT_EQ(x.device(), 1);
  EXPECT_EQ(x.generation(), 1u);
  EXPECT_FALSE(x.stale());
  const any_gpu_ref none;
  EXPECT_FALSE(none);
  EXPECT_EQ(none.device(), -1);
  EXPECT_TRUE(none.stale());
  EXPECT_TRUE(has_code(none.access(), errc::stale_ref));
  EXPECT_EQ(x, any_gpu_ref{x});
  EXPECT_NE(x, must(x.slice(0, 99)));
}

TEST(GpuRef, SlicesByElements) {
  core_system system;
  const auto whole = allocate(system, 1'000, dtype::float64);
  std::mt19937 random{1};
  for (int i = 0; i < 200; ++i) {
    const std::size_t first = random() % 1'001;
    const std::size_t count = random() % (1'001 - first);
    const auto x = must(whole.slice(first, count));
    EXPECT_EQ(x.count(), count);
    EXPECT_EQ(at(x), at(whole) + 8 * first);
    const std::size_t inner = random() % (count + 1);
    EXPECT_EQ(at(must(x.slice(inner, 0))), at(x) + 8 * inner);
    EXPECT_TRUE(has_code(x.slice(inner, count - inner + 1), errc::out_of_range));
  }
  EXPECT_TRUE(has_code(whole.slice(1'001, 0), errc::out_of_range));
  EXPECT_EQ(failure_of(whole.slice(998, 3).error())->detail,
            "3 elements from element 998 on; there are 1000");
  EXPECT_TRUE(
      has_code(whole.slice(1, std::numeric_limits<std::size_t>::max()), errc::out_of_range));
  EXPECT_TRUE(
      has_code(whole.slice(std::numeric_limits<std::size_t>::max(), 2), errc::out_of_range));
}

TEST(GpuRef, ReinterpretsWholeAndAlignedElements) {
  core_system system;
  const auto bytes = allocate(system, 64, dtype::uint8);
  for (auto type : all_dtypes)
    for (std::size_t first = 0; first < 16; ++first)
      for (std::size_t count = 0; count < 24; ++count) {
        const auto x = must(bytes.slice(first, count)).reinterpret(type);
        const bool fits = first % size_of(type) == 0 && count % size_of(type) == 0;
        ASSERT_EQ(static_cast<bool>(x), fits) << to_string(type) << " " << first << " " << count;
        if (!fits) {
          ASSERT_TRUE(has_code(x, errc::shape_mismatch));
          continue;
        }
        ASSERT_EQ(x->type(), type);
        ASSERT_EQ(x->size_bytes(), count);
        ASSERT_EQ(at(*x), at(bytes) + first);
      }
}

TEST(GpuRef, ReinterpretsAdoptedMemoryByItsAddress) {
  core_system system;
  const auto device = system.device();
  must(answer_of(device.stats({}))); // the device is ready
  alignas(8) std::byte memory[32] = {};
  const auto odd = must(device.adopt(memory + 4, 24, dtype::uint8, [](void*) {}));
  EXPECT_TRUE(odd.reinterpret(dtype::int32));
  EXPECT_TRUE(has_code(odd.reinterpret(dtype::int64), errc::shape_mismatch));
  const auto even = must(must(odd.slice(4, 16)).reinterpret(dtype::int64));
  EXPECT_EQ(at(even), memory + 8);
}

TEST(GpuRef, RefusesToAdoptMoreThanThereCanBe) {
  core_system system;
  const auto device = system.device();
  must(answer_of(device.stats({})));
  int memory = 0;
  const auto free = [](void*) {};
  EXPECT_TRUE(
      has_code(device.adopt(&memory, SIZE_MAX / 2, dtype::int32, free), errc::invalid_argument));
  EXPECT_TRUE(has_code(device.adopt(nullptr, 1, dtype::int32, free), errc::invalid_argument));
  EXPECT_TRUE(has_code(device.adopt(&memory, 1, dtype::int32, {}), errc::invalid_argument));
}

TEST(GpuRef, KeepsItsType) {
  core_system system;
  const auto any = allocate(system, 8, dtype::float32);
  const auto typed = must(gpu_ref<float>::from(any));
  EXPECT_TRUE(has_code(gpu_ref<std::int32_t>::from(any), errc::shape_mismatch));
  EXPECT_EQ(typed.count(), 8u);
  EXPECT_EQ(typed.any(), any);
  EXPECT_EQ(must(typed.access()), static_cast<float*>(must(any.access())));
  EXPECT_EQ(must(typed.slice(2, 4)).count(), 4u);
  EXPECT_EQ(must(typed.reinterpret<double>()).count(), 4u);
  EXPECT_TRUE(has_code(must(typed.slice(0, 3)).reinterpret<double>(), errc::shape_mismatch));
}

TEST(GpuRef, IsStaleAfterAReset) {
  core_system system;
  const auto device = system.device();
  const auto x = allocate(system, 8, dtype::float32);
  must(answer_of(device.reset({})));
  EXPECT_TRUE(x.stale());
  EXPECT_TRUE(has_code(x.access(), errc::stale_ref));
  EXPECT_TRUE(must(x.slice(0, 4)).stale());
  EXPECT_TRUE(has_code(any_gpu_ref::resolve(x.token()), errc::stale_ref));
  EXPECT_FALSE(allocate(system, 8, dtype::float32).stale());
}

TEST(GpuRef, TellsThatItsContentIsIndeterminate) {
  core_system system;
  const auto device = system.device();
  const auto whole = allocate(system, 8, dtype::float32);
  const auto half = must(whole.slice(4, 4));
  auto failed = device.launch(failing_work(), {}, {half}, {});
  EXPECT_TRUE(has_code(answer_of(failed), errc::launch_failed));
  EXPECT_TRUE(testing::eventually([&] { return !whole.access(); }));
  EXPECT_TRUE(has_code(whole.access(), errc::indeterminate));
  EXPECT_TRUE(has_code(half.access(), errc::indeterminate));
  EXPECT_TRUE(must(whole.slice(0, 4)).access());
  EXPECT_TRUE(is_ok(answer_of(device.fill(half, same_bytes(half), {}))));
  EXPECT_TRUE(whole.access());
}

// -- tokens

TEST(GpuToken, NamesTheSameMemory) {
  core_system system;
  const auto x = must(allocate(system, 100, dtype::float16).slice(10, 20));
  const auto again = must(any_gpu_ref::resolve(x.token()));
  EXPECT_EQ(again, x);
  EXPECT_EQ(again.token(), x.token());
  EXPECT_EQ(any_gpu_ref{}.token(), gpu_token{});
  EXPECT_TRUE(has_code(any_gpu_ref::resolve(gpu_token{}), errc::stale_ref));
  EXPECT_FALSE(resolve_or_stale(gpu_token{}));
}

TEST(GpuToken, DoesNotKeepMemoryAlive) {
  core_system system;
  auto x = allocate(system, 100, dtype::int8);
  const auto token = x.token();
  x = {};
  must(answer_of(system.device().stats({}))); // the lane has released the allocation too
  EXPECT_TRUE(has_code(any_gpu_ref::resolve(token), errc::stale_ref));
}

TEST(GpuToken, OfAnotherSystemIsStale) {
  core_system here;
  core_system there;
  auto token = allocate(here, 100, dtype::int8).token();
  const auto kept = allocate(there, 100, dtype::int8);
  token.node = kept.token().node + 1;
  EXPECT_TRUE(has_code(any_gpu_ref::resolve(token), errc::stale_ref));
}

// A sender can forge every field of a token.
TEST(GpuToken, ForgedGivesNothingOutsideItsMemory) {
  core_system system;
  const auto x = allocate(system, 100, dtype::int32);
  const auto true_token = x.token();
  const auto refused = [&](auto change) {
    auto token = true_token;
    change(token);
    return has_code(any_gpu_ref::resolve(token), errc::stale_ref);
  };
  EXPECT_TRUE(refused([](gpu_token& t) { ++t.node; }));
  EXPECT_TRUE(refused([](gpu_token& t) { t.device = 7; }));
  EXPECT_TRUE(refused([](gpu_token& t) { t.device = -1; }));
  EXPECT_TRUE(refused([](gpu_token& t) { ++t.buffer; }));
  EXPECT_TRUE(refused([](gpu_token& t) { ++t.generation; }));
  EXPECT_TRUE(refused([](gpu_token& t) { t.generation = 0; }));
  EXPECT_TRUE(refused([](gpu_token& t) { ++t.count; }));
  EXPECT_TRUE(refused([](gpu_token& t) { t.count = std::numeric_limits<std::uint64_t>::max(); }));
  EXPECT_TRUE(
      refused([](gpu_token& t) { t.count = std::numeric_limits<std::uint64_t>::max() / 4 + 2; }));
  EXPECT_TRUE(refused([](gpu_token& t) { t.offset = 2; }));
  EXPECT_TRUE(refused([](gpu_token& t) { t.offset = 404; }));
  EXPECT_TRUE(
      refused([](gpu_token& t) { t.offset = std::numeric_limits<std::uint64_t>::max() - 3; }));
  EXPECT_TRUE(refused([](gpu_token& t) { t.type = static_cast<dtype>(200); }));
  std::mt19937_64 random{2};
  for (int i = 0; i < 20'000; ++i) {
    auto token = true_token;
    const auto some = [&] { return random() >> (random() % 64); };
    token.offset = some();
    token.count = some();
    token.type = static_cast<dtype>(random() % 16);
    const auto y = any_gpu_ref::resolve(token);
    if (!y)
      continue;
    ASSERT_GE(at(*y), at(x));
    ASSERT_LE(at(*y) + y->size_bytes(), at(x) + 400);
    ASSERT_EQ(y->offset() % size_of(y->type()), 0u);
  }
}

} // namespace

} // namespace troupe
