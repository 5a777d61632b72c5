// User functions that throw: the exception becomes an error value or a log line, and the library
// continues.

#include "support/child_process.hpp"
#include "support/log_lines.hpp"
#include "support/world_fixture.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {
namespace {

/// An exception that a function throws, and its text in messages.
struct thrown {
  const char* name;
  std::function<void()> from;
  const char* text;
};

class UserFunctions : public ::testing::TestWithParam<thrown> {
protected:
  log_lines lines_;
  test_system sys_{{.devices = 1}};
  device gpu_ = sys_.open();
  gpu_ref<std::uint32_t> ref_ = must(gpu_.allocate<std::uint32_t>(100, true));
  const std::function<void()> throws_ = GetParam().from;
  const std::string text_ = GetParam().text;
};

INSTANTIATE_TEST_SUITE_P(Throwing, UserFunctions,
                         ::testing::Values(thrown{"Exceptions",
                                                  [] { throw std::runtime_error("out of luck"); },
                                                  "out of luck"},
                                           thrown{"OtherThings", [] { throw 7; },
                                                  "an exception that is not a std::exception"}),
                         [](const auto& x) { return std::string{x.param.name}; });

TEST_P(UserFunctions, CallbacksAreNamedInTheLog) {
  auto filled = gpu_.fill(ref_, 1u);
  filled.then([this](const caf::expected<void>&) { throws_(); });
  flag next;
  filled.then([&](const caf::expected<void>&) { next.set(); });
  EXPECT_TRUE(next.wait());
  EXPECT_TRUE(lines_.say("a callback threw: " + text_));
}

/// Runs tasks at once, and throws before or after a task if a test wants it.
struct test_executor final : executor {
  void post(std::function<void()> task) override {
    if (before)
      before();
    task();
    if (after)
      after();
  }
  std::function<void()> before;
  std::function<void()> after;
};

TEST_P(UserFunctions, CallbacksThrowNothingIntoTheirExecutor) {
  test_executor mine;
  bool reached = false;
  mine.after = [&] { reached = true; };
  const auto filled = gpu_.fill(ref_, 1u);
  EXPECT_TRUE(is_ok(answer_of(filled))); // so that the executor runs on this thread
  filled.then(mine, [this](const caf::expected<void>&) { throws_(); });
  EXPECT_TRUE(reached);
  EXPECT_TRUE(lines_.say("a callback threw: " + text_));
}

// On the completing thread, and on the thread of a client that calls then() after the completion.
TEST_P(UserFunctions, AnExecutorThatThrowsLosesNoCallback) {
  test_executor refuses;
  refuses.before = throws_;
  gate held;
  const auto launched = held.hold_stream(gpu_, {}, {ref_});
  ASSERT_TRUE(held.wait_reached());
  flag early;
  launched.then(refuses, [&](const caf::expected<void>& x) {
    EXPECT_TRUE(is_ok(x));
    early.set();
  });
  held.open();
  EXPECT_TRUE(early.wait());
  EXPECT_TRUE(is_ok(answer_of(launched)));
  flag late;
  launched.then(refuses, [&](const caf::expected<void>&) { late.set(); });
  EXPECT_TRUE(late.wait());
  EXPECT_TRUE(lines_.say("an executor"));
  EXPECT_TRUE(lines_.say("threw: " + text_));
}

TEST_P(UserFunctions, AnExecutorThatRunsAndThrowsRunsACallbackOnce) {
  test_executor mine;
  mine.after = throws_;
  const auto filled = gpu_.fill(ref_, 1u);
  EXPECT_TRUE(is_ok(answer_of(filled)));
  std::atomic<int> calls = 0;
  filled.then(mine, [&](const caf::expected<void>&) { ++calls; });
  EXPECT_TRUE(lines_.say("threw: " + text_));
  flag next; // behind earlier tasks of the callback thread
  filled.then([&](const caf::expected<void>&) { next.set(); });
  EXPECT_TRUE(next.wait());
  EXPECT_EQ(calls, 1);
}

TEST_P(UserFunctions, LaunchesFail) {
  TROUPE_IN_PROCESS_ONLY("callables");
  TROUPE_HOST_ONLY("computes on the host");
  const auto failed = [this](launch_function f) {
    const auto answer = answer_of(gpu_.launch(std::move(f), {}, {}));
    EXPECT_TRUE(has_code(answer, errc::launch_failed));
    EXPECT_NE(describe(error_of(answer)).find("the callable threw: " + text_), std::string::npos)
        << describe(error_of(answer));
  };
  failed([this](launch_context&) -> caf::error {
    throws_();
    return {};
  });
  failed([this](launch_context& context) { return context.run_on_host(throws_); });
  EXPECT_TRUE(is_ok(answer_of(gpu_.fill(ref_, 2u))));
}

TEST_P(UserFunctions, DeletersAreNamedInTheLog) {
  TROUPE_IN_PROCESS_ONLY("memory of the user");
  TROUPE_HOST_ONLY("adopts host memory");
  std::vector<float> mine(10);
  static_cast<void>(must(gpu_.adopt(mine.data(), mine.size(), [this](void*) { throws_(); })));
  EXPECT_TRUE(lines_.say("the deleter of memory of a device threw: " + text_));
  EXPECT_TRUE(is_ok(answer_of(gpu_.fill(ref_, 2u)))); // the lane continues
}

// On the thread that drops the last handle.
TEST_P(UserFunctions, DeletersAreNamedInTheLogAfterTheirDeviceEnded) {
  TROUPE_IN_PROCESS_ONLY("memory of the user");
  TROUPE_HOST_ONLY("adopts host memory");
  std::vector<float> mine(10);
  gpu_ref<float> last;
  {
    test_system other{{.devices = 1}};
    last = must(other.open().adopt(mine.data(), mine.size(), [this](void*) { throws_(); }));
  }
  const auto before = lines_.count();
  last = {};
  EXPECT_GT(lines_.count(), before);
  EXPECT_TRUE(lines_.say("the deleter of memory of a device threw: " + text_));
}

// -- the log

template <class F> int log_through(F sink) {
  set_log_sink(std::move(sink));
  test_system system{{.devices = 1}};
  auto gpu = system.open();
  auto ref = must(gpu.allocate<std::uint32_t>(100, true));
  const auto filled = gpu.fill(ref, 1u);
  for (const auto* text : {"first", "second"})
    filled.then([text](const caf::expected<void>&) { throw std::runtime_error(text); });
  flag last;
  filled.then([&](const caf::expected<void>&) { last.set(); });
  return last.wait() ? 7 : 1;
}

TROUPE_CHILD(LogsThroughASinkThatThrows) {
  return log_through([](const log_line& x) {
    if (x.level == log_level::error)
      throw std::runtime_error("the disk is full");
  });
}

TROUPE_CHILD(LogsThroughASinkThatThrowsANumber) {
  return log_through([](const log_line& x) {
    if (x.level == log_level::error)
      throw 7;
  });
}

TEST(LogSink, ThatThrowsLosesNoLine) {
  for (auto [scenario, text] : {std::pair{"LogsThroughASinkThatThrows", "the disk is full"},
                                std::pair{"LogsThroughASinkThatThrowsANumber",
                                          "an exception that is not a std::exception"}}) {
    const auto end = run_child(scenario, patience);
    EXPECT_EQ(end.status, 7) << to_string(end);
    std::string wanted;
    for (const auto* line : {"first", "second"})
      wanted += std::string{"troupe: a callback threw: "} + line +
                " (the log's sink threw: " + text + ")\n";
    EXPECT_EQ(end.err, wanted) << "each line once";
  }
}

} // namespace
} // namespace troupe::testing
