/// When settled operations are freed.
#include "lane/retired_operations.hpp"
#include "operation/operation.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

namespace troupe {

namespace {

using detail::operation;
using detail::retired_operations;

std::weak_ptr<operation> retire_one(retired_operations& to) {
  auto x = std::make_shared<operation>("test", 0);
  std::weak_ptr<operation> result = x;
  to.add(std::move(x));
  return result;
}

TEST(RetiredOperations, AreFreedByTheNextCaller) {
  retired_operations retired;
  auto first = retire_one(retired);
  auto second = retire_one(retired);
  EXPECT_FALSE(first.expired());
  EXPECT_FALSE(second.expired());
  retired.free_all();
  EXPECT_TRUE(first.expired());
  EXPECT_TRUE(second.expired());
}

TEST(RetiredOperations, AreNotKeptForAnotherOwner) {
  retired_operations retired;
  auto owner = std::make_shared<operation>("test", 0);
  retired.add(owner);
  EXPECT_EQ(owner.use_count(), 1);
}

TEST(RetiredOperations, AreAtMostAFew) {
  retired_operations retired;
  for (int round = 0; round < 2; ++round) {
    std::vector<std::weak_ptr<operation>> all;
    for (int i = 0; i < 1'000; ++i)
      all.push_back(retire_one(retired));
    EXPECT_EQ(std::ranges::count_if(all, [](auto& x) { return !x.expired(); }), 64);
    retired.free_all();
    EXPECT_TRUE(std::ranges::all_of(all, [](auto& x) { return x.expired(); }));
  }
}

TEST(RetiredOperations, AreFreedOnceByManyThreads) {
  retired_operations retired;
  std::vector<std::vector<std::weak_ptr<operation>>> all(4);
  {
    std::vector<std::jthread> threads;
    for (auto& mine : all)
      threads.emplace_back([&] {
        for (int i = 0; i < 10'000; ++i) {
          mine.push_back(retire_one(retired));
          if (i % 3 == 0)
            retired.free_all();
        }
      });
  }
  retired.free_all();
  for (auto& mine : all)
    EXPECT_TRUE(std::ranges::all_of(mine, [](auto& x) { return x.expired(); }));
}

} // namespace

} // namespace troupe
