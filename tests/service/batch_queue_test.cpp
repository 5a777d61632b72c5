// Batches of requests.

#include "support/eventually.hpp"
#include "support/manual_executor.hpp"
#include "support/random.hpp"
#include "support/world_fixture.hpp"
#include <troupe/batch_queue.hpp>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

namespace troupe::testing {

namespace {

using queue = batch_queue<int>;

std::vector<int> numbers_of(const queue::batch& x) {
  std::vector<int> result;
  for (auto& entry : x)
    result.push_back(entry.what);
  return result;
}

/// A queue whose tasks run on the test's thread.
class BatchQueue : public ::testing::Test {
protected:
  void use(batch_limits limits) { queue_ = std::make_unique<queue>(limits); }

  void add(int x, std::chrono::nanoseconds deadline = 1h) {
    EXPECT_TRUE(queue_->push(x, deadline));
  }

  pending<queue::batch> take() { return begin(queue_->take()); }
  pending<queue::batch> take_late() { return begin(queue_->take_late()); }

  /// Runs tasks until `x` is over.
  caf::expected<queue::batch> run_until(const pending<queue::batch>& x) {
    while (!x.ready())
      executor_.run_one();
    return x.result();
  }
  std::vector<int> numbers_in(const pending<queue::batch>& x) {
    return numbers_of(must(run_until(x)));
  }

  manual_executor executor_;
  std::unique_ptr<queue> queue_;

private:
  /// Starts a task, and runs it to its first wait.
  pending<queue::batch> begin(task<queue::batch> x) {
    auto result = start(std::move(x), executor_);
    executor_.run_one();
    return result;
  }
};

using numbers = std::vector<int>;

TEST_F(BatchQueue, FullBatchIsDueAtOnce) {
  use({.most = 3, .patience = 1h});
  for (int i = 0; i < 5; ++i)
    EXPECT_TRUE(queue_->push(i));
  const auto first = take();
  ASSERT_TRUE(first.ready());
  EXPECT_EQ(numbers_in(first), (numbers{0, 1, 2}));
  const auto second = take();
  EXPECT_FALSE(second.ready());
  EXPECT_TRUE(queue_->push(5)); // now there are three
  EXPECT_EQ(numbers_in(second), (numbers{3, 4, 5}));
  EXPECT_EQ(queue_->size(), 0u);
}

TEST_F(BatchQueue, FirstEntryWaitsForOthersAsLongAsThePatience) {
  use({.most = 10, .patience = 30ms});
  const auto batch = take();
  const auto begin = queue::clock::now();
  add(1);
  add(2);
  EXPECT_EQ(numbers_in(batch), (numbers{1, 2}));
  EXPECT_GE(queue::clock::now(), begin + 30ms);
}

TEST_F(BatchQueue, NoPatienceTakesWhatThereIs) {
  use({.most = 0, .patience = 0ns}); // most: counts as 1
  add(1);
  add(2);
  EXPECT_EQ(numbers_in(take()), numbers{1});
  EXPECT_EQ(numbers_in(take()), numbers{2});
}

TEST_F(BatchQueue, LateEntriesLeaveItTheOtherWay) {
  use({.most = 2, .patience = 1h});
  const auto late = take_late();
  EXPECT_FALSE(late.ready());
  const auto begin = queue::clock::now();
  add(1, 20ms);
  const auto got = must(run_until(late));
  EXPECT_EQ(numbers_of(got), numbers{1});
  EXPECT_GE(queue::clock::now(), begin + 20ms);
  EXPECT_EQ(got[0].due - got[0].arrived, 20ms);
  add(2);
  add(3);
  EXPECT_EQ(numbers_in(take()), (numbers{2, 3}));
}

TEST_F(BatchQueue, LateEntriesAreInNoBatch) {
  use({.most = 2, .patience = 0ns});
  add(1, -1ms);
  add(2);
  add(3, -1ms);
  EXPECT_EQ(numbers_in(take()), numbers{2});
  EXPECT_EQ(queue_->size(), 2u);
  EXPECT_EQ(numbers_in(take_late()), (numbers{1, 3}));
}

TEST_F(BatchQueue, EarlierDeadlineThatComesLaterIsSeen) {
  use({.most = 10, .patience = 1h});
  const auto late = take_late();
  add(1, 1h);
  add(2, 5ms);
  EXPECT_EQ(numbers_in(late), numbers{2});
}

TEST_F(BatchQueue, WhatIsGivenBackComesFirstAndKeepsItsTimes) {
  use({.most = 2, .patience = 0ns});
  for (int i = 0; i < 4; ++i)
    add(i, 1h);
  auto batch = must(run_until(take()));
  const auto due = batch[0].due;
  EXPECT_TRUE(queue_->give_back(std::move(batch)));
  const auto again = must(run_until(take()));
  EXPECT_EQ(numbers_of(again), (numbers{0, 1}));
  EXPECT_EQ(again[0].due, due);
  EXPECT_EQ(numbers_in(take()), (numbers{2, 3}));
}

TEST_F(BatchQueue, LateWhenItIsGivenBack) {
  use({.most = 1, .patience = 0ns});
  add(1, 5ms);
  auto batch = must(run_until(take()));
  const auto late = take_late();
  EXPECT_TRUE(is_ok(answer_of(after(10ms))));
  EXPECT_TRUE(queue_->give_back(std::move(batch)));
  EXPECT_EQ(numbers_in(late), numbers{1});
}

TEST_F(BatchQueue, CloseEndsTheWaitsAndReturnsTheRest) {
  use({.most = 5, .patience = 1h});
  const auto batch = take();
  const auto late = take_late();
  add(1);
  add(2);
  EXPECT_EQ(numbers_of(queue_->close()), (numbers{1, 2}));
  EXPECT_TRUE(has_code(run_until(batch), errc::unavailable));
  EXPECT_TRUE(has_code(run_until(late), errc::unavailable));
  EXPECT_FALSE(queue_->push(3));
  queue::batch mine{{4, {}, {}}};
  EXPECT_FALSE(queue_->give_back(std::move(mine)));
  EXPECT_EQ(mine.size(), 1u);
  EXPECT_TRUE(has_code(run_until(take()), errc::unavailable));
  EXPECT_TRUE(queue_->close().empty());
  EXPECT_EQ(queue_->size(), 0u);
}

TEST_F(BatchQueue, CancelledWaitTakesNothing) {
  use({.most = 2, .patience = 1h});
  const auto first = take();
  const auto second = take();
  add(1);
  first.cancel();
  EXPECT_TRUE(has_code(run_until(first), errc::cancelled));
  add(2);
  EXPECT_EQ(numbers_in(second), (numbers{1, 2}));
}

/// Takes batches and gives some of them back, until the queue is closed.
task<> take_some(queue& from, std::uint64_t seed, std::vector<int>& taken) {
  std::mt19937_64 random{seed};
  while (true) {
    auto batch = co_await value_of(from.take());
    if (chance(random, 0.3)) {
      EXPECT_TRUE(from.give_back(std::move(batch)));
      continue;
    }
    for (auto& x : batch)
      taken.push_back(x.what);
    co_await after(std::chrono::microseconds{pick(random, 0, 200)});
  }
}

task<> take_all_late(queue& from, std::vector<int>& taken) {
  while (true) {
    auto late = co_await value_of(from.take_late());
    for (auto& x : late)
      taken.push_back(x.what);
  }
}

TEST_F(BatchQueue, EachEntryLeavesItOnce) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    std::mt19937_64 random{seed};
    use({.most = pick(random, 1, 8), .patience = std::chrono::microseconds{pick(random, 0, 500)}});
    std::vector<int> taken, late;
    std::vector<pending<void>> tasks;
    for (std::uint64_t t = 0; t < 3; ++t)
      tasks.push_back(start(take_some(*queue_, 100 * seed + t, taken), executor_));
    tasks.push_back(start(take_all_late(*queue_, late), executor_));
    const int count = 500;
    for (int i = 0; i < count; ++i) {
      const bool hurried = chance(random, 0.3);
      add(i,
          hurried ? std::chrono::microseconds{pick(random, 0, 300)} : std::chrono::nanoseconds{1h});
      if (chance(random, 0.2)) {
        // Something happens at the latest when this timer ends.
        after(std::chrono::microseconds{pick(random, 0, 300)})
            .then(executor_, [](const caf::expected<void>&) {});
        executor_.run_one();
      }
    }
    while (taken.size() + late.size() < static_cast<std::size_t>(count))
      executor_.run_one();
    EXPECT_TRUE(queue_->close().empty());
    for (auto& x : tasks)
      while (!x.ready())
        executor_.run_one();
    taken.insert(taken.end(), late.begin(), late.end());
    std::ranges::sort(taken);
    ASSERT_EQ(taken.size(), static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i)
      ASSERT_EQ(taken[static_cast<std::size_t>(i)], i) << "seed " << seed;
  }
}

} // namespace

} // namespace troupe::testing
