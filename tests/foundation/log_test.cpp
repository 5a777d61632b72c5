/// The queue, the thread and the limits of the log.
#include "foundation/log.hpp"
#include "foundation/log_limit.hpp"
#include "support/blocked_sink.hpp"
#include "support/child_process.hpp"
#include "support/log_lines.hpp"
#include "support/no_threads.hpp"
#include "support/very_end.hpp"
#include <troupe/exit_process.hpp>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

namespace troupe::testing {

namespace {

using namespace std::chrono_literals;
using detail::log;
using detail::log_kind;
using detail::log_limit;

constexpr auto patience = 30s;

// -- the queue

TEST(Log, KeepsTheOrderOfLines) {
  log_lines lines;
  std::vector<std::string> expected;
  for (int i = 0; i < 500; ++i) {
    expected.push_back("line " + std::to_string(i));
    log(log_level::debug, expected.back());
  }
  EXPECT_EQ(lines.all(), expected);
}

TEST(Log, HasTheFieldsOfAFailure) {
  std::promise<failure> got;
  set_log_sink([&](const log_line& x) {
    if (x.why != nullptr)
      got.set_value(*x.why);
  });
  log(log_level::warning, "a device",
      make_error({.code = errc::stalled, .detail = "why", .device = 3, .parts = {{}, {}}}));
  auto why = got.get_future();
  ASSERT_EQ(why.wait_for(patience), std::future_status::ready);
  const auto x = why.get();
  EXPECT_EQ(x.code, errc::stalled);
  EXPECT_EQ(x.detail, "why");
  EXPECT_EQ(x.device, 3);
  EXPECT_EQ(x.parts.size(), 2u);
  set_log_sink({});
}

TEST(Log, ASinkThatBlocksStopsNoThread) {
  constexpr std::size_t many = 5000;
  blocked_sink sink;
  auto logged = std::async(std::launch::async, [] {
    for (std::size_t i = 0; i < many; ++i)
      log(log_level::warning, "line " + std::to_string(i));
  });
  EXPECT_EQ(logged.wait_for(patience), std::future_status::ready);
  const auto all = sink.end();
  ASSERT_EQ(all.size(), 1u + 1000 + 1);
  EXPECT_EQ(all[1], "line 0");
  EXPECT_EQ(all[1000], "line 999");
  EXPECT_EQ(all[1001], "4000 lines of the log were left out: its sink is slow");
}

TEST(Log, SaysWhereLinesAreMissing) {
  blocked_sink sink;
  for (int i = 0; i < 1003; ++i)
    log(log_level::info, "early");
  sink.let(1);
  sink.wait_calls(2); // now there is room for one line
  log(log_level::info, "late");
  log(log_level::info, "too late");
  const auto all = sink.end();
  ASSERT_EQ(all.size(), 1u + 1000 + 3);
  EXPECT_EQ(all[1001], "3 lines of the log were left out: its sink is slow");
  EXPECT_EQ(all[1002], "late");
  EXPECT_EQ(all[1003], "1 line of the log was left out: its sink is slow");
}

TEST(Log, BoundsTheBytesOfItsQueue) {
  blocked_sink sink;
  const std::string large(std::size_t{2} << 20, 'x');
  const std::string medium(100 << 10, 'y');
  log(log_level::info, large); // alone in the queue
  for (int i = 0; i < 5; ++i)
    log(log_level::info, medium);
  sink.let_all();
  ASSERT_TRUE(detail::drain_log(patience));
  EXPECT_EQ(sink.end(), (std::vector<std::string>{
                            "first", large, "5 lines of the log were left out: its sink is slow"}));
  blocked_sink next;
  for (int i = 0; i < 20; ++i)
    log(log_level::info, medium);
  const auto all = next.end();
  ASSERT_EQ(all.size(), 1u + 10 + 1);
  EXPECT_EQ(all.back(), "10 lines of the log were left out: its sink is slow");
}

TEST(Log, GoesOnAfterASinkThatThrows) {
  std::promise<std::string> got;
  set_log_sink([&](const log_line& x) {
    if (x.text == "a line for stderr")
      throw std::runtime_error("thrown by a test");
    got.set_value(std::string{x.text});
  });
  log(log_level::info, "a line for stderr");
  log(log_level::info, "next");
  auto next = got.get_future();
  ASSERT_EQ(next.wait_for(patience), std::future_status::ready);
  EXPECT_EQ(next.get(), "next");
  set_log_sink({});
}

TEST(Log, TakesLinesOfItsSink) {
  std::vector<std::string> all;
  std::promise<void> over;
  set_log_sink([&](const log_line& x) {
    all.emplace_back(x.text);
    if (all.size() < 3)
      log(log_level::info, "said by the sink");
    else
      over.set_value();
    EXPECT_FALSE(detail::drain_log(patience)); // it would wait for itself
  });
  log(log_level::info, "said");
  EXPECT_EQ(over.get_future().wait_for(patience), std::future_status::ready);
  set_log_sink({});
  EXPECT_EQ(all, (std::vector<std::string>{"said", "said by the sink", "said by the sink"}));
}

// -- the sink is replaced

TEST(Log, ReplacesItsSinkWhenTheOldOneIsNotInACall) {
  auto is_inside = std::make_shared<std::atomic<bool>>(false);
  std::promise<void> entered;
  std::promise<void> held;
  set_log_sink([&, is_inside](const log_line&) {
    *is_inside = true;
    entered.set_value();
    held.get_future().wait();
    *is_inside = false;
  });
  log(log_level::info, "a line");
  entered.get_future().wait();
  auto replaced = std::async(std::launch::async, [&is_inside] {
    set_log_sink({});
    return is_inside->load();
  });
  EXPECT_EQ(replaced.wait_for(1500ms), std::future_status::timeout);
  held.set_value();
  EXPECT_FALSE(replaced.get());
  EXPECT_EQ(is_inside.use_count(), 1); // the old sink is destroyed
}

TEST(Log, GivesEarlierLinesToTheOldSink) {
  std::vector<std::string> old;
  set_log_sink([&](const log_line& x) { old.emplace_back(x.text); });
  for (int i = 0; i < 300; ++i)
    log(log_level::info, "early");
  log_lines lines;
  log(log_level::info, "late");
  EXPECT_EQ(old.size(), 300u);
  EXPECT_EQ(lines.all(), std::vector<std::string>{"late"});
}

TEST(Log, IsGivenAnotherSinkByItsSink) {
  std::promise<std::string> got;
  set_log_sink([&](const log_line&) {
    set_log_sink([&](const log_line& x) { got.set_value(std::string{x.text}); });
  });
  log(log_level::info, "first");
  log(log_level::info, "second");
  auto second = got.get_future();
  ASSERT_EQ(second.wait_for(patience), std::future_status::ready);
  EXPECT_EQ(second.get(), "second");
  set_log_sink({});
}

// -- limits

TEST(LogLimit, LetsSomeLinesPassInEachWindow) {
  log_limit limit;
  auto now = log_limit::clock::now();
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < log_limit::most_lines; ++i)
      EXPECT_TRUE(limit.admit(now + i * 1ms));
    EXPECT_FALSE(limit.has_left_out());
    EXPECT_EQ(limit.due(), log_limit::clock::time_point::max());
    EXPECT_FALSE(limit.admit(now + 1s));
    EXPECT_FALSE(limit.admit(now + log_limit::window - 1ns));
    EXPECT_EQ(limit.due(), now + log_limit::window);
    EXPECT_EQ(limit.take_left_out(), 2u);
    EXPECT_FALSE(limit.has_left_out());
    now += log_limit::window;
  }
}

TEST(LogLimit, CountsEachKindByItself) {
  const log_window endless{1h};
  log_lines lines;
  for (int i = 0; i < 1000; ++i) {
    log(log_level::info, "a stranger", log_kind::strangers);
    log(log_level::info, "a failure", make_error(errc::unavailable, "it"), log_kind::strangers);
  }
  for (int i = 0; i < 30; ++i)
    log(log_level::info, "a member", log_kind::members);
  for (int i = 0; i < 30; ++i)
    log(log_level::info, "any");
  EXPECT_EQ(lines.count_of("a stranger"), 10u);
  EXPECT_EQ(lines.count_of("a failure"), 10u);
  EXPECT_EQ(lines.count_of("a member"), 20u);
  EXPECT_EQ(lines.count_of("any"), 30u);
  EXPECT_EQ(lines.count(), 70u);
}

TEST(LogLimit, SaysHowManyWereLeftOutWhenTheWindowIsOver) {
  const log_window brief{300ms};
  log_lines lines;
  for (int i = 0; i < 1000; ++i)
    log(log_level::info, "a note", log_kind::notes);
  EXPECT_TRUE(lines.say(" lines about notes of other processes were left out: at most 20 are "
                        "logged in 300 ms"));
}

TEST(LogLimit, SaysHowManyWereLeftOutToTheSinkThatGotTheOthers) {
  const log_window endless{1h};
  std::vector<std::string> all;
  set_log_sink([&](const log_line& x) { all.emplace_back(x.text); });
  for (int i = 0; i < 100; ++i)
    log(log_level::info, "a host", log_kind::certificates);
  log_lines next;
  ASSERT_EQ(all.size(), 21u);
  EXPECT_EQ(all.back(), "80 lines about certificates were left out: at most 20 are logged in "
                        "3600 s");
  log(log_level::info, "for the next sink", log_kind::certificates); // with a limit of its own
  EXPECT_EQ(next.count(), 1u);
}

// -- without a thread

TROUPE_CHILD(LogsWithoutAThread) {
  std::vector<std::thread::id> on;
  {
    const no_threads guard;
    set_log_sink([&](const log_line& x) {
      on.push_back(std::this_thread::get_id());
      if (x.text == "first")
        log(log_level::info, "said by the sink");
    });
    log(log_level::info, "first");
    EXPECT_EQ(on, std::vector(2, std::this_thread::get_id()));
  }
  log(log_level::info, "second");
  EXPECT_TRUE(detail::drain_log(patience));
  EXPECT_EQ(on.size(), 3u);
  EXPECT_NE(on.back(), std::this_thread::get_id());
  set_log_sink({});
  return 7;
}

TEST(LogThread, IsNotNeeded) {
  const auto end = run_child("LogsWithoutAThread", patience);
  EXPECT_EQ(end.status, 7) << to_string(end);
}

TROUPE_CHILD(LogsAfterAFork) {
  const auto parent = ::getpid();
  blocked_sink sink; // its thread is in a call
  log(log_level::info, "queued");
  const auto child = ::fork();
  if (child == 0) {
    bool called = false;
    const auto here = std::this_thread::get_id();
    set_log_sink([&](const log_line& x) {
      called = x.text == "a line" && ::getpid() != parent && std::this_thread::get_id() == here;
    });
    log(log_level::info, "a line");
    ::_exit(called ? 9 : 1);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 9);
  EXPECT_EQ(sink.end(), (std::vector<std::string>{"first", "queued"}));
  return 7;
}

TEST(LogThread, IsNotNeededAfterAFork) {
  const auto end = run_child("LogsAfterAFork", patience);
  EXPECT_EQ(end.status, 7) << to_string(end);
}

// -- the end of the process

void log_some(int number) {
  for (int i = 0; i < number; ++i)
    log(log_level::info, "line " + std::to_string(i));
}

/// Logs lines, and lets the sink send them to the parent when all are in the queue.
void log_for_the_parent(int number) {
  auto* all = new std::promise<void>; // the sink is used until the process ends
  set_log_sink([all, are_all = all->get_future().share()](const log_line& x) {
    are_all.wait();
    tell("line", x.text);
  });
  log_some(number);
  all->set_value();
}

TROUPE_CHILD(ReturnsWithLinesInTheQueue) {
  log_for_the_parent(500);
  return 7;
}

/// The sink begins when `exit_process` has written its message.
TROUPE_CHILD(ExitsWithLinesInTheQueue) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0 || ::dup2(ends[1], STDERR_FILENO) < 0)
    return 1;
  set_log_sink([from = ends[0], has_begun = false](const log_line& x) mutable {
    char byte = 0;
    while (!has_begun && ::read(from, &byte, 1) == 1)
      has_begun = byte == '\n';
    tell("line", x.text);
  });
  log_some(500);
  exit_process(7, "the end");
}

TROUPE_CHILD(ExitsFromItsSink) {
  std::printf("printed\n");
  set_log_sink([](const log_line&) { exit_process(7, "the end"); });
  log(log_level::info, "a line");
  for (;;)
    ::pause();
}

TROUPE_CHILD(LogsAtTheVeryEnd) {
  set_log_sink([](const log_line& x) { tell("line", x.text); });
  at_the_very_end([] { log_some(3); });
  return 7;
}

TROUPE_CHILD(ReturnsWhileItsSinkBlocks) {
  static auto* sink = new blocked_sink; // blocked until the end
  static_cast<void>(sink);
  log_some(300);
  at_the_very_end([] { log_some(300); });
  return 7;
}

TEST(LogEnd, GivesAllLinesToTheSink) {
  for (auto [how, number] : {std::pair{"ReturnsWithLinesInTheQueue", 500},
                             {"ExitsWithLinesInTheQueue", 500},
                             {"LogsAtTheVeryEnd", 3}}) {
    const auto end = run_child(how, patience);
    EXPECT_EQ(end.status, 7) << to_string(end);
    std::vector<std::string> expected;
    for (int i = 0; i < number; ++i)
      expected.push_back("line " + std::to_string(i));
    EXPECT_EQ(end.values("line"), expected) << how;
  }
}

TEST(LogEnd, IsNotHeldUpByASinkThatBlocks) {
  const auto end = run_child("ReturnsWhileItsSinkBlocks", patience);
  EXPECT_EQ(end.status, 7) << to_string(end);
}

TEST(LogEnd, CanBeCausedByTheSink) {
  const auto end = run_child("ExitsFromItsSink", patience);
  EXPECT_EQ(end.status, 7) << to_string(end);
  EXPECT_EQ(end.out, "printed\n");
}

} // namespace

} // namespace troupe::testing
