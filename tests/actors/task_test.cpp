// Coroutines over requests, and results of several requests as one.

#include "support/eventually.hpp"
#include "support/manual_executor.hpp"
#include "support/world_fixture.hpp"
#include <troupe/detail/caf_compat.hpp>
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <coroutine>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace troupe::testing {

namespace {

/// Runs tasks in `post`.
class inline_executor final : public executor {
public:
  void post(std::function<void()> task) override { task(); }
};

class thread_pool final : public executor {
public:
  explicit thread_pool(int threads) {
    for (int i = 0; i < threads; ++i)
      threads_.emplace_back([this](const std::stop_token& stop) { run(stop); });
  }
  void post(std::function<void()> task) override {
    const std::lock_guard lock{mutex_};
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

private:
  void run(const std::stop_token& stop) {
    std::unique_lock lock{mutex_};
    while (changed_.wait(lock, stop, [this] { return !tasks_.empty(); })) {
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::jthread> threads_; // the last member: they end first
};

/// A request that only a cancellation ends.
class cancellable final : public detail::completion {
public:
  void cancel() noexcept override { answer(make_error(errc::cancelled, "in a test")); }
};

pending<void> open_request() { return {std::make_shared<cancellable>(), nullptr}; }

/// Drops its tasks.
class dropping_executor final : public executor {
public:
  void post(std::function<void()>) override {}
};

/// A coroutine of a user's own kind, which begins at once.
struct own_coroutine {
  struct promise_type {
    own_coroutine get_return_object() const noexcept { return {}; }
    std::suspend_never initial_suspend() const noexcept { return {}; }
    std::suspend_never final_suspend() const noexcept { return {}; }
    void return_void() const noexcept {}
    void unhandled_exception() const noexcept { std::terminate(); }
  };
};

using number = gpu_ref<std::int32_t>;

class Tasks : public ::testing::Test {
protected:
  /// Fills, and returns what is there then.
  static task<std::int32_t> write_and_read(device gpu, number at, std::int32_t x) {
    std::vector<std::int32_t> result(1);
    co_await value_of(gpu.fill(at, x));
    co_await value_of(gpu.download(at, result));
    co_return result[0];
  }

  /// A request that is not done before `hold_` opens.
  pending<void> held() { return hold_.hold_stream(gpu_, {}, {number_}); }

  test_system sys_{{.devices = 2}};
  device gpu_ = sys_.open();
  number number_ = must(gpu_.allocate<std::int32_t>(1, true));
  gate hold_;
};

TEST_F(Tasks, AwaitRequests) { EXPECT_EQ(must(start(write_and_read(gpu_, number_, 7)).wait()), 7); }

TEST_F(Tasks, GiveErrorsToTheCoroutine) {
  auto work = [](device gpu) -> task<bool> {
    co_return has_code(co_await gpu.allocate(dtype::float32, std::size_t{1} << 60),
                       errc::out_of_memory);
  };
  EXPECT_TRUE(must(start(work(gpu_)).wait()));
}

TEST_F(Tasks, EndWithTheErrorOfWhatTheyRequire) {
  auto alive = std::make_shared<int>();
  auto inner = [](device gpu, std::shared_ptr<int>) -> task<any_gpu_ref> {
    co_return co_await value_of(gpu.allocate(dtype::float32, std::size_t{1} << 60));
  };
  auto middle = [&inner](device gpu, std::shared_ptr<int> x) -> task<> {
    static_cast<void>(co_await value_of(inner(gpu, x)));
    ADD_FAILURE() << "it went on";
  };
  auto outer = [&middle](device gpu, std::shared_ptr<int> x) -> task<std::string> {
    auto done = co_await middle(gpu, x);
    EXPECT_TRUE(has_code(done, errc::out_of_memory));
    co_await value_of(middle(gpu, std::move(x)));
    co_return "it went on";
  };
  EXPECT_TRUE(has_code(start(outer(gpu_, alive)).wait(), errc::out_of_memory));
  EXPECT_EQ(alive.use_count(), 1) << "the frames are gone before the answer";
}

TEST_F(Tasks, EndWithAnErrorOfTheirOwn) {
  auto value = [](bool fails) -> task<std::int32_t> {
    if (fails)
      co_return make_error(errc::shape_mismatch, "mine");
    co_return 1;
  };
  auto none = []() -> task<> {
    co_await end_with(make_error(errc::out_of_range, "mine"));
    ADD_FAILURE() << "it went on";
  };
  EXPECT_TRUE(has_code(start(value(true)).wait(), errc::shape_mismatch));
  EXPECT_EQ(must(start(value(false)).wait()), 1);
  EXPECT_TRUE(has_code(start(none()).wait(), errc::out_of_range));
}

TEST_F(Tasks, ThatThrowFail) {
  auto throws = [](pending<void> first) -> task<> {
    must(co_await first);
    throw std::runtime_error{"out of luck"};
  };
  auto result = start(throws(gpu_.fill(number_, 1))).wait();
  EXPECT_TRUE(has_code(result, errc::unavailable));
  EXPECT_NE(describe(result.error()).find("out of luck"), std::string::npos);
}

TEST_F(Tasks, RunOnTheirExecutorAlone) {
  manual_executor where;
  std::thread::id ran;
  auto work = [&](pending<void> first) -> task<> {
    must(co_await first);
    ran = std::this_thread::get_id();
  };
  auto first = held();
  auto result = start(work(first), where);
  where.run_one(); // it begins
  hold_.open();
  must(first.wait());
  EXPECT_FALSE(result.ready());
  where.run_one();
  EXPECT_TRUE(result.ready());
  EXPECT_EQ(ran, std::this_thread::get_id());
}

TEST_F(Tasks, EndWhereTheirExecutorDropsThem) {
  auto alive = std::make_shared<int>();
  auto work = [](std::shared_ptr<int>) -> task<> { co_return; };
  dropping_executor where;
  EXPECT_TRUE(has_code(start(work(alive), where).wait(), errc::cancelled));
  EXPECT_EQ(alive.use_count(), 1);
}

/// Its tasks are over before `post` returns.
class hasty_executor final : public executor {
public:
  ~hasty_executor() override { *gone_ = true; }
  void post(std::function<void()> task) override {
    const auto gone = gone_;
    std::thread{std::move(task)}.join();
    EXPECT_FALSE(*gone) << "it was destroyed in its own function";
  }

private:
  std::shared_ptr<std::atomic<bool>> gone_ = std::make_shared<std::atomic<bool>>(false);
};

TEST_F(Tasks, KeepTheirExecutorUntilItHasPosted) {
  auto work = [](pending<void> x) -> task<> { co_await value_of(std::move(x)); };
  auto result = start(work(held()), std::make_shared<hasty_executor>());
  hold_.open();
  EXPECT_TRUE(is_ok(answer_of(result)));
}

TEST_F(Tasks, NeedAnExecutorAndAFrame) {
  auto work = [](std::int32_t x) -> task<std::int32_t> { co_return x; };
  auto x = work(1);
  auto y = std::move(x);
  EXPECT_TRUE(has_code(start(std::move(x)).wait(), errc::invalid_argument));
  EXPECT_TRUE(
      has_code(start(std::move(y), std::shared_ptr<executor>{}).wait(), errc::invalid_argument));
}

TEST_F(Tasks, ThatNeverBeginLeaveNothing) {
  auto alive = std::make_shared<int>();
  {
    auto work = [](std::shared_ptr<int>) -> task<> { co_return; };
    auto never = work(alive);
    EXPECT_EQ(alive.use_count(), 2);
  }
  EXPECT_EQ(alive.use_count(), 1);
}

TEST_F(Tasks, AreToldThatTheyAreCancelled) {
  std::promise<void> began;
  std::vector<std::optional<errc>> seen;
  auto work = [&](pending<void> one, pending<void> other) -> task<> {
    began.set_value();
    for (auto& x : {one, other}) {
      auto done = co_await x;
      seen.push_back(code_of(done ? caf::error{} : done.error()));
    }
    EXPECT_TRUE((co_await stop_token_of_task()).stop_requested());
  };
  auto result = start(work(open_request(), open_request()));
  began.get_future().wait();
  result.cancel();
  EXPECT_TRUE(is_ok(answer_of(result))) << "it decides itself";
  EXPECT_EQ(seen, (std::vector<std::optional<errc>>(2, errc::cancelled)));
}

TEST_F(Tasks, AreStoppedByAToken) {
  std::stop_source stop;
  auto work = [](pending<void> x) -> task<> { co_await value_of(x); };
  inline_executor here;
  auto result = start(work(held()), here, stop.get_token());
  EXPECT_FALSE(result.ready());
  stop.request_stop(); // it ends within this call
  EXPECT_TRUE(result.ready());
  EXPECT_TRUE(has_code(result.wait(), errc::cancelled));
  EXPECT_TRUE(has_code(start(work(held()), here, stop.get_token()).wait(), errc::cancelled))
      << "requested before";
  hold_.open();
}

TEST_F(Tasks, GoOnInManyThreads) {
  constexpr int tasks = 200;
  constexpr int steps = 20;
  auto work = [](device gpu, number at) -> task<std::int32_t> {
    std::int32_t sum = 0;
    for (int i = 0; i < steps; ++i)
      sum += co_await value_of(write_and_read(gpu, at, i));
    co_return sum;
  };
  thread_pool pool{4};
  std::vector<pending<std::int32_t>> all;
  for (int i = 0; i < tasks; ++i)
    all.push_back(start(work(gpu_, must(gpu_.allocate<std::int32_t>(1, true))), pool));
  for (auto x : must(when_all(std::move(all)).wait()))
    EXPECT_EQ(x, steps * (steps - 1) / 2);
}

TEST_F(Tasks, MayBeStoppedAtAnyTime) {
  auto work = [](device gpu, number at) -> task<> {
    for (;;)
      co_await value_of(write_and_read(gpu, at, 1));
  };
  thread_pool pool{4};
  for (int round = 0; round < 20; ++round) {
    std::stop_source stop;
    std::vector<pending<void>> all;
    for (int i = 0; i < 20; ++i)
      all.push_back(start(work(gpu_, number_), pool, stop.get_token()));
    must(all[0].wait_for(std::chrono::microseconds{100 * round})); // any moment
    stop.request_stop();
    for (auto& x : all)
      EXPECT_TRUE(has_code(x.wait(), errc::cancelled));
  }
}

TEST_F(Tasks, AreStoppedInTheMiddleOfWhatTheyJoin) {
  std::stop_source stop;
  auto work = [](pending<std::tuple<std::monostate, std::monostate>> x) -> task<> {
    static_cast<void>(co_await value_of(std::move(x)));
  };
  inline_executor here;
  // Only the task keeps it.
  auto open = open_request();
  auto result = start(
      work(when_all(std::exchange(open, {}), pending<void>{make_error(errc::stale_ref, "x")})),
      here, stop.get_token());
  stop.request_stop();
  EXPECT_TRUE(has_code(result.wait(), errc::cancelled));
}

TEST_F(Tasks, EndWithAnErrorEvenIfItIsNone) {
  auto value = []() -> task<std::string> { co_return caf::error{}; };
  auto none = []() -> task<> { co_await end_with({}); };
  auto outer = [&]() -> task<std::string> { co_return co_await value_of(value()); };
  EXPECT_TRUE(has_code(start(outer()).wait(), errc::invalid_argument));
  EXPECT_TRUE(has_code(start(none()).wait(), errc::invalid_argument));
}

/// Cannot be moved without an exception.
struct stubborn {
  stubborn() = default;
  stubborn(const stubborn& x) : moves(x.moves - 1) {
    if (moves == 0)
      throw std::runtime_error{"no further"};
  }
  int moves = 3;
};

TEST_F(Tasks, ThatCannotGiveTheirResultFail) {
  auto work = [](int moves) -> task<stubborn> {
    stubborn x;
    x.moves = moves;
    co_return x;
  };
  for (int moves = 1; moves < 3; ++moves)
    EXPECT_TRUE(has_code(start(work(moves)).wait(), errc::unavailable));
}

TEST_F(Tasks, AwaitWhatIsReadyWithoutGrowingTheStack) {
  auto work = [](pending<void> ready) -> task<> {
    for (int i = 0; i < 1'000'000; ++i)
      co_await value_of(ready);
  };
  auto ready = gpu_.fill(number_, 1);
  must(ready.wait());
  EXPECT_TRUE(is_ok(answer_of(start(work(ready)))));
}

TEST_F(Tasks, OtherCoroutinesAwaitRequestsToo) {
  manual_executor where;
  std::thread::id first;
  std::promise<std::int32_t> result;
  auto work = [&](device gpu, number at) -> own_coroutine {
    must(co_await resume_on(where, held()));
    first = std::this_thread::get_id();
    std::vector<std::int32_t> value(1);
    must(co_await gpu.fill(at, 5));
    must(co_await gpu.download(at, value));
    result.set_value(value[0]);
  };
  work(gpu_, number_); // it awaits now
  hold_.open();
  where.run_one();
  EXPECT_EQ(first, std::this_thread::get_id());
  EXPECT_EQ(result.get_future().get(), 5);
}

// -- in actors

/// Starts a task that counts in the actor, without atomics, beside the actor's messages.
class counting_actor final : public caf::event_based_actor {
public:
  counting_actor(caf::actor_config& cfg, device gpu, number at, std::promise<pending<int>>& result)
      : event_based_actor(cfg), gpu_(std::move(gpu)), at_(std::move(at)), result_(result) {}

  caf::behavior make_behavior() override {
    result_.set_value(start(count(), executor_of(this)));
    return {runs_tasks(), [this](int x) { number_ += x; }};
  }

private:
  task<int> count() {
    for (int i = 0; i < 100; ++i) {
      co_await value_of(gpu_.fill(at_, i));
      ++number_;
    }
    while (number_ < 200) // until all messages have come
      co_await value_of(gpu_.fill(at_, 0));
    co_return number_;
  }

  device gpu_;
  number at_;
  std::promise<pending<int>>& result_;
  int number_ = 0;
};

TEST_F(Tasks, RunInAnActor) {
  std::promise<pending<int>> result;
  auto x = sys_.get().spawn<counting_actor>(gpu_, number_, std::ref(result));
  for (int i = 0; i < 100; ++i)
    detail::anon_send(x, 1);
  EXPECT_EQ(must(result.get_future().get().wait()), 200);
}

/// Starts a task that waits for `what`.
class waiting_actor final : public caf::event_based_actor {
public:
  waiting_actor(caf::actor_config& cfg, pending<void> what, std::promise<pending<void>>& result)
      : event_based_actor(cfg), what_(std::move(what)), result_(result) {}

  caf::behavior make_behavior() override {
    result_.set_value(start(work(what_), executor_of(this)));
    return {runs_tasks()};
  }

private:
  static task<> work(pending<void> what) { co_await value_of(std::move(what)); }

  pending<void> what_;
  std::promise<pending<void>>& result_;
};

TEST_F(Tasks, KeepTheirActor) {
  std::promise<pending<void>> result;
  sys_.get().spawn<waiting_actor>(held(), std::ref(result)); // no other handle
  auto end = result.get_future().get();
  EXPECT_FALSE(must(end.wait_for(20ms)));
  hold_.open();
  EXPECT_TRUE(is_ok(answer_of(end)));
}

/// Keeps the result of its own task.
class keeping_actor final : public caf::event_based_actor {
public:
  keeping_actor(caf::actor_config& cfg, std::shared_ptr<int> alive)
      : event_based_actor(cfg), alive_(std::move(alive)) {}

  caf::behavior make_behavior() override {
    result_ = start(work(), executor_of(this));
    return {runs_tasks()};
  }

private:
  static task<> work() { co_return; }

  std::shared_ptr<int> alive_;
  pending<void> result_;
};

TEST_F(Tasks, DoNotKeepAnActorThatKeepsTheirResult) {
  auto alive = std::make_shared<int>();
  sys_.get().spawn<keeping_actor>(alive);
  EXPECT_TRUE(eventually([&] { return alive.use_count() == 1; }));
}

TEST_F(Tasks, EndWithTheirActor) {
  std::promise<pending<void>> result;
  auto x = sys_.get().spawn<waiting_actor>(held(), std::ref(result));
  auto end = result.get_future().get();
  caf::scoped_actor self{sys_.get()};
  self->send_exit(x, caf::exit_reason::user_shutdown);
  self->wait_for(x);
  hold_.open(); // the actor is not there any more to run the rest
  EXPECT_TRUE(has_code(end.wait(), errc::cancelled));
}

// -- empty results

TEST_F(Tasks, AnEmptyResultHasFailed) {
  pending<std::int32_t> x;
  EXPECT_TRUE(x.ready());
  EXPECT_TRUE(has_code(x.wait(), errc::invalid_argument));
  EXPECT_TRUE(must(x.wait_for(1s)));
  x.cancel();
  std::promise<std::optional<errc>> told;
  x.then([&](const auto& result) { told.set_value(code_of(result.error())); });
  EXPECT_EQ(told.get_future().get(), errc::invalid_argument);
  x = start(write_and_read(gpu_, number_, 3));
  auto y = std::move(x);
  EXPECT_EQ(must(y.wait()), 3);
  EXPECT_TRUE(has_code(x.result(), errc::invalid_argument)) << "moved from";
}

// -- several at once

TEST_F(Tasks, WhenAllGivesAllValues) {
  auto other = sys_.open(1);
  std::vector<pending<any_gpu_ref>> all{gpu_.allocate(dtype::int32, 1),
                                        other.allocate(dtype::float32, 2)};
  auto refs = must(when_all(all).wait());
  ASSERT_EQ(refs.size(), 2u);
  EXPECT_EQ(refs[1].count(), 2u);
  auto [ref, nothing] = must(when_all(gpu_.allocate(dtype::int8, 3), gpu_.fill(number_, 1)).wait());
  EXPECT_EQ(ref.count(), 3u);
  static_assert(std::is_same_v<decltype(nothing), std::monostate>);
  EXPECT_TRUE(is_ok(answer_of(when_all(std::vector<pending<void>>{}))));
  EXPECT_TRUE(must(when_all(std::vector<pending<int>>{}).wait()).empty());
}

TEST_F(Tasks, WhenAllFailsWithTheFirstError) {
  const auto wrong = [](errc x) { return pending<void>{make_error(x, "wrong")}; };
  auto first = held();
  auto all = when_all(std::vector{first, wrong(errc::out_of_range), wrong(errc::stale_ref)});
  EXPECT_FALSE(all.ready()) << "one is not over";
  hold_.open();
  EXPECT_TRUE(has_code(all.wait(), errc::out_of_range));
}

TEST_F(Tasks, WhenAnyGivesTheFirst) {
  auto slow = held();
  std::vector<pending<void>> all{slow, pending<void>{make_error(errc::cancelled, "x")}};
  EXPECT_EQ(must(when_any(all).wait()), 1u);
  auto later = when_any(std::vector{slow, gpu_.fill(number_, 1)}); // behind it
  EXPECT_FALSE(later.ready());
  hold_.open();
  EXPECT_EQ(must(later.wait()), 0u);
  EXPECT_TRUE(has_code(when_any(std::vector<pending<int>>{}).wait(), errc::invalid_argument));
}

TEST_F(Tasks, CancellingAllCancelsEach) {
  const auto one = open_request();
  const auto other = open_request();
  auto all = when_all(one, other);
  all.cancel();
  for (auto code : {code_of(all.error()), code_of(one.error()), code_of(other.error())})
    EXPECT_EQ(code, errc::cancelled);
}

TEST_F(Tasks, ATokenCancelsARequest) {
  std::stop_source stop;
  auto first = held();
  auto second = gpu_.fill(number_, 3).cancel_on(stop.get_token());
  auto done = pending<void>{make_error(errc::stale_ref, "before")}.cancel_on(stop.get_token());
  EXPECT_FALSE(second.ready());
  stop.request_stop();
  EXPECT_TRUE(has_code(second.wait(), errc::cancelled));
  EXPECT_TRUE(has_code(done.wait(), errc::stale_ref));
  EXPECT_TRUE(has_code(gpu_.fill(number_, 3).cancel_on(stop.get_token()).wait(), errc::cancelled))
      << "requested before";
  hold_.open();
  EXPECT_TRUE(is_ok(answer_of(first)));
}

} // namespace

} // namespace troupe::testing
