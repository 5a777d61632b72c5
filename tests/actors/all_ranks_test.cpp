/// Requests to the devices of all ranks, and the forms that the verbs of a world have.
#include "support/expect.hpp"
#include "support/world_fixture.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace troupe {

namespace {

using namespace std::chrono_literals;
using testing::answer_of;
using testing::has_code;
using testing::is_ok;
using testing::must;
using testing::test_system;

constexpr std::size_t count = 24;

class AllRanks : public ::testing::Test {
protected:
  std::vector<std::int32_t> random_row() {
    std::vector<std::int32_t> result(count);
    for (auto& x : result)
      x = static_cast<std::int32_t>(random_() % 2'000'001) - 1'000'000;
    return result;
  }
  std::vector<std::vector<std::int32_t>> random_rows() {
    std::vector<std::vector<std::int32_t>> result;
    for (std::size_t rank = 0; rank < w_.size(); ++rank)
      result.push_back(random_row());
    return result;
  }
  std::vector<std::int32_t> sum_of(const std::vector<std::vector<std::int32_t>>& rows) {
    std::vector<std::int32_t> result(count);
    for (auto& row : rows)
      for (std::size_t i = 0; i < count; ++i)
        result[i] += row[i];
    return result;
  }
  std::vector<std::vector<std::int32_t>> same(const std::vector<std::int32_t>& row) {
    return std::vector(w_.size(), row);
  }

  std::mt19937_64 random_{7};
  test_system system_{{.devices = 3}};
  world w_ = system_.open_world({});
  std::vector<gpu_ref<std::int32_t>> a_ = must(w_.allocate<std::int32_t>(count));
  std::vector<gpu_ref<std::int32_t>> b_ = must(w_.allocate<std::int32_t>(count));
};

TEST_F(AllRanks, AreFilled) {
  EXPECT_TRUE(is_ok(answer_of(w_.fill(a_, 7))));
  EXPECT_EQ(must(w_.download(a_)), same(std::vector<std::int32_t>(count, 7)));
  EXPECT_TRUE(is_ok(answer_of(w_.fill(any(a_), std::int32_t{-3}))));
  EXPECT_EQ(must(w_.download(a_)), same(std::vector<std::int32_t>(count, -3)));
}

TEST_F(AllRanks, GetPartsOfTheirOwn) {
  const auto rows = random_rows();
  EXPECT_TRUE(is_ok(answer_of(w_.upload(a_, rows))));
  EXPECT_EQ(must(w_.download(a_)), rows);
  // Parts of one array, as spans.
  std::vector<std::int32_t> all(count * w_.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::span<const std::int32_t>> parts;
  for (std::size_t rank = 0; rank < w_.size(); ++rank)
    parts.push_back(std::span{all}.subspan(rank * count, count));
  EXPECT_TRUE(is_ok(answer_of(w_.upload(a_, parts))));
  EXPECT_TRUE(is_ok(answer_of(w_.upload(a_, std::vector(parts))))) << "spans may be temporaries";
  std::vector<std::int32_t> back(all.size());
  std::vector<std::span<std::int32_t>> targets;
  for (std::size_t rank = 0; rank < w_.size(); ++rank)
    targets.push_back(std::span{back}.subspan(rank * count, count));
  EXPECT_TRUE(is_ok(answer_of(w_.download(a_, targets))));
  EXPECT_EQ(back, all);
}

TEST_F(AllRanks, KeepTemporaries) {
  const auto rows = random_rows();
  auto own = rows;
  auto all = w_.upload(a_, std::move(own)); // not awaited before the temporaries are gone
  auto one = w_.upload(b_, std::vector<std::int32_t>(count, 5));
  EXPECT_TRUE(is_ok(answer_of(all)));
  EXPECT_TRUE(is_ok(answer_of(one)));
  EXPECT_EQ(must(w_.download(a_)), rows);
  EXPECT_EQ(must(w_.download(b_)), same(std::vector<std::int32_t>(count, 5)));
  std::array<std::int32_t, count> array{};
  array.fill(6);
  EXPECT_TRUE(is_ok(answer_of(w_.upload(b_, std::move(array)))));
  EXPECT_EQ(must(w_.download(b_)), same(std::vector<std::int32_t>(count, 6)));
}

TEST_F(AllRanks, GetTheSame) {
  const auto row = random_row();
  EXPECT_TRUE(is_ok(answer_of(w_.upload(a_, row))));
  EXPECT_EQ(must(w_.download(a_)), same(row));
}

TEST_F(AllRanks, LaunchWithTheirNumber) {
  TROUPE_HOST_ONLY("the launch computes on the host");
  TROUPE_IN_PROCESS_ONLY("callables");
  const auto rows = random_rows();
  EXPECT_TRUE(is_ok(answer_of(w_.upload(a_, rows))));
  auto launched = w_.launch(
      [&](launch_context& on, std::size_t rank) -> caf::error {
        auto from = a_[rank].access();
        auto to = b_[rank].access();
        if (!from)
          return from.error();
        if (!to)
          return to.error();
        return on.run_on_host([from = *from, to = *to, rank] {
          for (std::size_t i = 0; i < count; ++i)
            to[i] = from[i] + static_cast<std::int32_t>(rank);
        });
      },
      {any(a_)}, {any(b_)});
  EXPECT_TRUE(is_ok(answer_of(launched)));
  auto want = rows;
  for (std::size_t rank = 0; rank < w_.size(); ++rank)
    for (auto& x : want[rank])
      x += static_cast<std::int32_t>(rank);
  EXPECT_EQ(must(w_.download(b_)), want);
}

TEST_F(AllRanks, AreAsMany) {
  auto few = a_;
  few.pop_back();
  const std::vector<std::vector<std::int32_t>> rows(few.size(), random_row());
  EXPECT_TRUE(has_code(answer_of(w_.fill(few, 1)), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(w_.upload(few, random_row())), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(w_.upload(a_, rows)), errc::invalid_argument));
  EXPECT_TRUE(has_code(w_.download(few), errc::invalid_argument));
  EXPECT_TRUE(
      has_code(answer_of(w_.launch("nothing", {}, {any(few)}, {})), errc::invalid_argument));
  EXPECT_TRUE(is_ok(answer_of(w_.fill(a_, 1)))) << "nothing is lost";
}

TEST_F(AllRanks, GetTheFirstErrorOfARank) {
  EXPECT_TRUE(is_ok(answer_of(w_.fill(a_, 1))));
  auto refs = a_;
  refs[0] = {};
  EXPECT_TRUE(has_code(answer_of(w_.fill(refs, 2)), errc::stale_ref));
  EXPECT_TRUE(is_ok(answer_of(w_.fill(refs, 3, {.allow_shrunk = true})))) << "rank 0 is left out";
  auto want = same(std::vector<std::int32_t>(count, 3));
  want[0].assign(count, 1);
  EXPECT_EQ(must(w_.download(a_)), want);
}

TEST_F(AllRanks, TakeOptionsWithoutAnOperation) {
  const auto rows = random_rows();
  EXPECT_TRUE(is_ok(answer_of(w_.upload(a_, rows))));
  EXPECT_TRUE(is_ok(answer_of(w_.all_reduce(a_, {.deadline = 20s}))));
  EXPECT_EQ(must(w_.download(a_)), same(sum_of(rows)));
  EXPECT_TRUE(has_code(answer_of(w_.all_reduce(a_, {.deadline = -1ns})), errc::deadline_exceeded));
  EXPECT_TRUE(
      has_code(answer_of(w_.all_reduce(a_, b_, {.deadline = -1ns})), errc::deadline_exceeded));
  EXPECT_TRUE(has_code(answer_of(w_.reduce(a_, 0, {.deadline = -1ns})), errc::deadline_exceeded));
  const auto late = w_.rank(0).all_reduce(a_[0], {.deadline = -1ns});
  EXPECT_TRUE(has_code(answer_of(late), errc::deadline_exceeded));
}

TEST_F(AllRanks, ReduceInPlaceOnTheRoot) {
  const int root = static_cast<int>(w_.size()) - 1;
  const auto rows = random_rows();
  EXPECT_TRUE(is_ok(answer_of(w_.upload(a_, rows))));
  EXPECT_TRUE(is_ok(answer_of(w_.reduce(a_, root))));
  auto want = rows;
  want.back() = sum_of(rows);
  EXPECT_EQ(must(w_.download(a_)), want);
  EXPECT_TRUE(is_ok(answer_of(w_.upload(a_, rows))));
  std::vector<pending<collective_done>> calls;
  for (std::size_t rank = 0; rank < w_.size(); ++rank)
    calls.push_back(w_.rank(rank).reduce(a_[rank], root));
  for (auto& x : calls)
    EXPECT_TRUE(is_ok(answer_of(x)));
  EXPECT_EQ(must(w_.download(a_)), want);
  EXPECT_TRUE(has_code(answer_of(w_.reduce(a_, 99)), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(w_.reduce(a_, -1)), errc::invalid_argument));
}

TEST_F(AllRanks, BroadcastInPlace) {
  const int root = static_cast<int>(w_.size()) - 1;
  const auto rows = random_rows();
  EXPECT_TRUE(is_ok(answer_of(w_.upload(a_, rows))));
  EXPECT_TRUE(is_ok(answer_of(w_.broadcast(a_, root))));
  EXPECT_EQ(must(w_.download(a_)), same(rows.back()));
  EXPECT_TRUE(has_code(answer_of(w_.broadcast(a_, 99)), errc::invalid_argument));
}

TEST_F(AllRanks, AreGivenAsArraysAndSpans) {
  const auto rows = random_rows();
  EXPECT_TRUE(is_ok(answer_of(w_.upload(a_, rows))));
  const std::span<const gpu_ref<std::int32_t>> from{a_};
  std::vector<any_gpu_ref> to = any(b_);
  EXPECT_TRUE(is_ok(answer_of(w_.all_reduce(from, std::span{to}))));
  EXPECT_EQ(must(w_.download(b_)), same(sum_of(rows)));
  auto pair = system_.open_world({.devices = {0}});
  const std::array<gpu_ref<std::int32_t>, 1> one{a_[0]};
  EXPECT_TRUE(is_ok(answer_of(pair.all_reduce(one, reduce_op::max))));
  EXPECT_EQ(must(w_.download(a_)), rows);
}

} // namespace

} // namespace troupe
