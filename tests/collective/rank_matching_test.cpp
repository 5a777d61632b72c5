// Which calls form one operation while some ranks are missing from the world.

#include "collective/rank_matching.hpp"

#include <gtest/gtest.h>

#include <initializer_list>
#include <thread>

namespace troupe::testing {
namespace {

using namespace detail;

constexpr std::size_t ranks = 3;

bool hands_in(rank_matching& x, std::size_t rank) {
  return x.handed_in(rank, x.collectives(admission_lock{}).left_out());
}

TEST(RankMatching, TheLastOfAllSeesThatItIs) {
  rank_matching x{ranks};
  for (int round = 0; round < 3; ++round) {
    EXPECT_FALSE(hands_in(x, 1));
    EXPECT_FALSE(hands_in(x, 0));
    EXPECT_TRUE(hands_in(x, 2));
  }
}

TEST(RankMatching, ACallThatWasRefusedIsMadeAgain) {
  rank_matching x{ranks};
  EXPECT_FALSE(hands_in(x, 0));
  EXPECT_FALSE(hands_in(x, 1));
  EXPECT_TRUE(hands_in(x, 2));
  x.refused(2);
  EXPECT_TRUE(hands_in(x, 2));
}

TEST(RankMatching, WhoIsAbsentIsNotWaitedFor) {
  rank_matching x{ranks};
  EXPECT_FALSE(hands_in(x, 0));
  EXPECT_FALSE(hands_in(x, 2));
  x.leave_out(admission_lock{}, rank_set::of(1)); // before its call
  for (int round = 0; round < 3; ++round) {
    EXPECT_FALSE(hands_in(x, 2));
    EXPECT_TRUE(hands_in(x, 0));
  }
  for (int round = 0; round < 4; ++round) { // all operations have a position
    x.collectives(admission_lock{}).take(2, nullptr);
    x.collectives(admission_lock{}).take(0, nullptr);
  }
  x.leave_out(admission_lock{}, {});
  for (int round = 0; round < 3; ++round) { // rank 1 is level with the others
    EXPECT_FALSE(hands_in(x, 0));
    EXPECT_FALSE(hands_in(x, 2));
    EXPECT_TRUE(hands_in(x, 1));
  }
}

TEST(RankMatching, WhoIsBackHasMadeAsManyAsWerePlaced) {
  rank_matching x{ranks};
  x.leave_out(admission_lock{}, rank_set::of(1));
  for (int round = 0; round < 2; ++round) {
    EXPECT_FALSE(hands_in(x, 0));
    EXPECT_TRUE(hands_in(x, 2));
    x.collectives(admission_lock{}).take(0, nullptr);
    x.collectives(admission_lock{}).take(2, nullptr);
  }
  EXPECT_FALSE(hands_in(x, 0));
  x.leave_out(admission_lock{}, {});
  x.refused(0); // its call allows fewer ranks
  for (int round = 0; round < 2; ++round) {
    EXPECT_FALSE(hands_in(x, 0));
    EXPECT_FALSE(hands_in(x, 2));
    EXPECT_TRUE(hands_in(x, 1));
  }
}

TEST(RankMatching, ANewThreadIsNotTheOneThatEnded) {
  rank_matching x{ranks};
  std::thread::id ended;
  std::thread([&] {
    x.note_caller(0);
    EXPECT_EQ(x.maker_of(0), room_maker::caller);
    ended = std::this_thread::get_id();
  }).join();
  bool again = false; // a thread has had the same id
  for (int i = 0; i < 1000 && !again; ++i)
    std::thread([&] {
      again = std::this_thread::get_id() == ended;
      EXPECT_EQ(x.maker_of(0), room_maker::others);
    }).join();
  EXPECT_TRUE(again);
  EXPECT_EQ(x.maker_of(1), room_maker::unknown);
}

/// Takes the next call of each of `callers`.
void take(call_queue& x, std::initializer_list<std::size_t> callers) {
  for (auto i : callers)
    x.take(i, nullptr);
}

TEST(CallLine, WaitsForTheCallsOfAll) {
  call_queue x{ranks};
  take(x, {0, 0, 2});
  EXPECT_EQ(x.ahead(0), 2u);
  EXPECT_EQ(x.ahead(1), 0u);
  EXPECT_EQ(x.ahead(2), 1u);
  take(x, {1}); // the first one is complete
  EXPECT_EQ(x.ahead(0), 1u);
  EXPECT_EQ(x.ahead(2), 0u);
  EXPECT_FALSE(x.empty());
  take(x, {2, 1});
  EXPECT_TRUE(x.empty());
}

TEST(CallLine, WhoIsLeftOutHasNoPartInWhatIsOpen) {
  call_queue x{ranks};
  take(x, {0, 0, 2});
  x.leave_out(rank_set::of(1));
  EXPECT_EQ(x.ahead(0), 1u); // the first one lacked only this rank
  take(x, {2});
  EXPECT_TRUE(x.empty());
}

TEST(CallLine, WhoIsBackIsWaitedForInWhatComesThen) {
  call_queue x{ranks};
  x.leave_out(rank_set::of(1));
  take(x, {0, 2, 0, 0, 2}); // the last one lacks a call
  x.leave_out({});
  EXPECT_EQ(x.ahead(1), 1u); // it does not wait for rank 1
  take(x, {1});              // this call belongs to the next one
  EXPECT_EQ(x.ahead(1), 2u);
  take(x, {2});
  EXPECT_EQ(x.ahead(1), 1u);
  EXPECT_EQ(x.ahead(0), 0u);
  take(x, {0});
  EXPECT_FALSE(x.empty());
  take(x, {2});
  EXPECT_TRUE(x.empty());
}

/// Returns the error that the next call of `caller` ends with.
caf::error end_of_next(const call_queue& x, std::size_t caller) {
  auto* next = x.next_of(caller);
  return next != nullptr && next->refusal ? next->why_ended(admission_lock{}) : caf::error{};
}

TEST(CallLine, WhatOneWasRefusedEndsForAll) {
  call_queue x{ranks};
  const auto refusal = [](errc code) { return refused_call{make_error(code, "on purpose"), 1}; };
  take(x, {1, 1});
  for (int i = 0; i < 100; ++i)
    x.refuse(1, refusal(i == 0 ? errc::overloaded : errc::deadline_exceeded)); // first error counts
  take(x, {1});
  x.refuse(1, refusal(errc::unavailable));
  EXPECT_EQ(x.ahead(1), 104u);
  EXPECT_EQ(x.awaited(0), 104u);
  for (auto i : {0, 2}) {
    const auto caller = static_cast<std::size_t>(i);
    take(x, {caller, caller});
    for (int k = 0; k < 100; ++k) {
      EXPECT_EQ(code_of(end_of_next(x, caller)), errc::overloaded) << k;
      take(x, {caller});
    }
    EXPECT_FALSE(end_of_next(x, caller));
    EXPECT_EQ(x.next_of(caller, 2), nullptr);
    EXPECT_EQ(code_of(x.next_of(caller, 1)->why_ended(admission_lock{})), errc::unavailable);
    take(x, {caller});
    EXPECT_EQ(code_of(end_of_next(x, caller)), errc::unavailable);
    take(x, {caller});
    EXPECT_EQ(x.next_of(caller), nullptr);
  }
  EXPECT_TRUE(x.empty());
}

TEST(CallLine, WhatWasRefusedToOneIsNotAwaitedOfThoseWhoLeave) {
  call_queue x{ranks};
  for (int i = 0; i < 3; ++i)
    x.refuse(0, {make_error(errc::overloaded, "on purpose"), 1});
  take(x, {1}); // of the first refused call
  x.leave_out(rank_set::of(2));
  EXPECT_EQ(x.ahead(0), 3u);
  EXPECT_TRUE(x.lacks(1));
  EXPECT_FALSE(x.lacks(2));
  x.refuse(0, {make_error(errc::overloaded, "on purpose"), 1});
  take(x, {1, 1, 1});
  EXPECT_TRUE(x.empty());
  x.leave_out({});
  take(x, {0, 1});
  EXPECT_FALSE(x.empty());
  take(x, {2});
  EXPECT_TRUE(x.empty());
}

TEST(CallLine, SomeMayLeaveWhileOthersAreOut) {
  call_queue x{ranks};
  take(x, {0});
  x.leave_out(rank_set::of(1));
  take(x, {0});
  x.leave_out(rank_set::of(1).with(2));
  EXPECT_TRUE(x.empty());
  take(x, {0, 0});
  EXPECT_TRUE(x.empty());
  x.leave_out(rank_set::of(2));
  take(x, {0});
  EXPECT_EQ(x.ahead(1), 0u);
  take(x, {1});
  EXPECT_TRUE(x.empty());
}

} // namespace
} // namespace troupe::testing
