// Requests that are answered in batches, on replicas that may be lost.

#include "support/random.hpp"
#include "support/world_fixture.hpp"
#include <troupe/batch_server.hpp>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using numbers = std::vector<int>;
/// Its model is an element of device memory.
using server = batch_server<int, int, any_gpu_ref>;

/// A request that a test completes, or a cancellation ends.
class open_request {
public:
  pending<void> wait() const { return {completion_, nullptr}; }
  void complete() const { completion_->answer({}); }
  bool cancelled() const {
    return completion_->completed() && code_of(completion_->error()) == errc::cancelled;
  }

private:
  class cancellable final : public detail::completion {
  public:
    void cancel() noexcept override { answer(make_error(errc::cancelled, "in a test")); }
  };
  std::shared_ptr<cancellable> completion_ = std::make_shared<cancellable>();
};

/// For EXPECT_TRUE: an error with this code, and with `part` in its text.
template <class T>
::testing::AssertionResult fails(const pending<T>& x, errc code, const std::string& part = {}) {
  const auto y = answer_of(x);
  if (auto right = has_code(y, code); !right)
    return right;
  if (describe(y.error()).find(part) == std::string::npos)
    return ::testing::AssertionFailure() << describe(y.error());
  return ::testing::AssertionSuccess();
}

class BatchServer : public ::testing::Test {
protected:
  static task<any_gpu_ref> allocate(device on) {
    co_return co_await value_of(on.allocate(dtype::int32, 1, true));
  }

  /// Returns the squares.
  static task<numbers> square(numbers batch) {
    for (auto& x : batch)
      x *= x;
    co_return batch;
  }

  /// Loses the device, and fails as its memory does.
  static task<numbers> lose(device on, any_gpu_ref memory) {
    co_await value_of(on.reset());
    co_await value_of(on.fill(memory, scalar{std::int32_t{1}}));
    co_return numbers{};
  }

  /// `run` gets the number of the run, from 0.
  using run_type =
      std::function<task<numbers>(int, const device&, const any_gpu_ref&, const numbers&)>;
  void serve(batch_limits limits, run_type run, std::size_t replicas = 1) {
    serve(limits, std::move(run), replicas, [](const device& on) { return allocate(on); });
  }
  void serve(batch_limits limits, run_type run, std::size_t replicas, server::load_function load) {
    std::vector<device> devices;
    for (std::size_t i = 0; i < replicas; ++i)
      devices.push_back(sys_.open(sys_.ordinals()[i]));
    server_ = std::make_unique<server>(
        devices, limits,
        [this, load = std::move(load)](const device& on) {
          ++loads_;
          return load(on);
        },
        [this, run = std::move(run)](const device& on, const any_gpu_ref& with, const numbers& x) {
          {
            const std::lock_guard lock{mutex_};
            batches_.push_back(x);
          }
          return run(runs_++, on, with, x);
        });
  }
  static task<numbers> always_square(int, const device&, const any_gpu_ref&, const numbers& x) {
    return square(x);
  }

  void TearDown() override {
    if (!server_)
      return;
    const auto over = server_->close();
    server_ = nullptr;
    EXPECT_TRUE(is_ok(answer_of(over))); // no task uses this object any more
  }

  std::vector<numbers> batches() const {
    const std::lock_guard lock{mutex_};
    return batches_;
  }

  test_system sys_{{.devices = 2}};
  std::atomic<int> loads_{0};
  std::atomic<int> runs_{0};
  std::unique_ptr<server> server_;

private:
  mutable std::mutex mutex_;
  std::vector<numbers> batches_;
};

TEST_F(BatchServer, AnswersInBatches) {
  serve({.most = 3, .patience = 1h}, always_square);
  std::vector<pending<int>> asked;
  for (int i = 0; i < 6; ++i)
    asked.push_back(server_->ask(i));
  for (int i = 0; i < 6; ++i)
    EXPECT_EQ(must(answer_of(asked[static_cast<std::size_t>(i)])), i * i);
  EXPECT_EQ(batches(), (std::vector<numbers>{{0, 1, 2}, {3, 4, 5}}));
  const auto counts = server_->counts();
  EXPECT_EQ(counts.answers, 6u);
  EXPECT_EQ(counts.batches, 2u);
  EXPECT_EQ(counts.repeated, 0u);
  EXPECT_EQ(counts.losses, 0u);
}

TEST_F(BatchServer, RequestsAndModelsNeedNoCopies) {
  using request = std::unique_ptr<int>;
  batch_server<request, int, std::unique_ptr<int>> owner{
      {sys_.open()},
      {.most = 1},
      [](const device&) -> task<std::unique_ptr<int>> { co_return std::make_unique<int>(10); },
      [](const device&, const std::unique_ptr<int>& ten,
         const std::vector<request>& batch) -> task<numbers> {
        numbers result;
        for (auto& x : batch)
          result.push_back(*ten * *x);
        co_return result;
      }};
  EXPECT_EQ(must(answer_of(owner.ask(std::make_unique<int>(7)))), 70);
  EXPECT_TRUE(is_ok(answer_of(owner.close())));
}

TEST_F(BatchServer, EachReplicaRunsWithItsOwnModel) {
  TROUPE_NEEDS_DEVICES(2);
  open_request first;
  serve(
      {.most = 1, .patience = 0ns},
      [&first](int number, device on, any_gpu_ref with, numbers) -> task<numbers> {
        if (number == 0) // so the other replica has to take the second batch
          co_await value_of(first.wait());
        co_return numbers{on.ordinal() == with.device() ? on.ordinal() : -1};
      },
      2);
  const auto a = server_->ask(1);
  const auto b = server_->ask(2);
  const auto of_b = must(answer_of(b));
  first.complete();
  numbers used{must(answer_of(a)), of_b};
  std::ranges::sort(used);
  EXPECT_EQ(used, sys_.ordinals());
}

TEST_F(BatchServer, BatchOfALostReplicaRunsAgain) {
  serve({.most = 2, .patience = 1h},
        [](int number, const device& on, const any_gpu_ref& with, const numbers& x) {
          return number == 0 ? lose(on, with) : square(x);
        });
  const auto a = server_->ask(3);
  const auto b = server_->ask(4);
  EXPECT_EQ(must(answer_of(a)), 9);
  EXPECT_EQ(must(answer_of(b)), 16);
  EXPECT_EQ(batches(), (std::vector<numbers>{{3, 4}, {3, 4}}));
  EXPECT_EQ(loads_, 2);
  const auto counts = server_->counts();
  EXPECT_EQ(counts.answers, 2u);
  EXPECT_EQ(counts.batches, 2u);
  EXPECT_EQ(counts.repeated, 2u);
  EXPECT_EQ(counts.losses, 1u);
}

TEST_F(BatchServer, ErrorOfALossCountsAsOneBeforeHandlesAreStale) {
  serve({.most = 1, .patience = 0ns},
        [](int number, device, any_gpu_ref, numbers x) -> task<numbers> {
          // Made before the co_await: GCC 12 destroys such temporaries in it twice.
          caf::error why = make_error({.code = errc::skipped, .cause = errc::worker_lost});
          if (number == 0)
            why = make_error(errc::worker_lost, "just now");
          if (number < 2)
            co_await end_with(why);
          co_return co_await value_of(square(x));
        });
  EXPECT_EQ(must(answer_of(server_->ask(3))), 9);
  EXPECT_EQ(loads_, 3);
  EXPECT_EQ(server_->counts().losses, 2u);
  EXPECT_EQ(server_->counts().repeated, 2u);
}

TEST_F(BatchServer, AnotherReplicaRunsTheBatchOfALostOne) {
  TROUPE_NEEDS_DEVICES(2);
  std::atomic<int> lost{-1}, used{-1};
  serve(
      {.most = 1, .patience = 0ns},
      [&](int number, device on, any_gpu_ref with, numbers x) -> task<numbers> {
        if (number == 0) {
          lost = on.ordinal();
          on.shutdown(); // does not come back
          co_await value_of(on.fill(with, scalar{std::int32_t{1}}));
        }
        used = on.ordinal();
        co_return co_await value_of(square(x));
      },
      2);
  EXPECT_EQ(must(answer_of(server_->ask(5))), 25);
  EXPECT_NE(lost, used);
  EXPECT_EQ(server_->counts().losses, 1u);
}

TEST_F(BatchServer, ModelIsLoadedAgainIfTheDeviceIsLostMeanwhile) {
  std::atomic<int> loads{0};
  serve({.most = 1, .patience = 0ns}, always_square, 1,
        [&loads](const device& on) -> task<any_gpu_ref> {
          const auto gpu = on;
          if (loads++ == 0) {
            co_await value_of(gpu.reset());
            co_await end_with(make_error(errc::skipped, "a follow-up of the loss"));
          }
          co_return co_await value_of(allocate(gpu));
        });
  EXPECT_EQ(must(answer_of(server_->ask(6))), 36);
  EXPECT_EQ(loads, 2);
}

TEST_F(BatchServer, LateRequestsAreRefused) {
  serve({.most = 2, .patience = 1h}, always_square);
  EXPECT_TRUE(fails(server_->ask(1, 5ms), errc::deadline_exceeded, "no answer within 5 ms"));
  EXPECT_TRUE(fails(server_->ask(1, 250us), errc::deadline_exceeded, "within 250 us"));
  EXPECT_EQ(runs_, 0);
  EXPECT_EQ(server_->counts().answers, 2u);
}

TEST_F(BatchServer, RunEndsAtItsFirstDeadline) {
  open_request never;
  serve({.most = 2, .patience = 1h},
        [&never](int number, device, any_gpu_ref, numbers x) -> task<numbers> {
          if (number == 0)
            co_await value_of(never.wait());
          co_return co_await value_of(square(x));
        });
  const auto hurried = server_->ask(2, 20ms);
  const auto patient = server_->ask(3);
  EXPECT_TRUE(fails(hurried, errc::deadline_exceeded, "no answer within 20 ms"));
  EXPECT_TRUE(never.cancelled());
  const auto another = server_->ask(4); // now the batch is full
  EXPECT_EQ(must(answer_of(patient)), 9);
  EXPECT_EQ(must(answer_of(another)), 16);
  EXPECT_EQ(batches(), (std::vector<numbers>{{2, 3}, {3, 4}}));
  EXPECT_EQ(server_->counts().repeated, 2u);
  EXPECT_EQ(server_->counts().losses, 0u);
}

TEST_F(BatchServer, FailedRunFailsItsRequests) {
  serve({.most = 2, .patience = 1h},
        [](int number, const device&, const any_gpu_ref&, const numbers& x) -> task<numbers> {
          if (number == 0)
            return [](numbers) -> task<numbers> {
              co_await end_with(make_error(errc::launch_failed, "on purpose"));
              co_return numbers{};
            }(x);
          return square(x);
        });
  const auto a = server_->ask(1, 1h);
  const auto b = server_->ask(2);
  EXPECT_TRUE(fails(a, errc::launch_failed, "on purpose"));
  EXPECT_TRUE(fails(b, errc::launch_failed, "on purpose"));
  const auto c = server_->ask(3);
  const auto d = server_->ask(4);
  EXPECT_EQ(must(answer_of(c)), 9);
  EXPECT_EQ(must(answer_of(d)), 16);
  EXPECT_EQ(loads_, 1);
  EXPECT_EQ(server_->counts().repeated, 0u);
}

TEST_F(BatchServer, ExceptionsBecomeErrors) {
  serve({.most = 1, .patience = 0ns},
        [](int number, const device&, const any_gpu_ref&, const numbers& x) -> task<numbers> {
          if (number == 0)
            throw std::runtime_error("before the task");
          return [](bool throws, numbers y) -> task<numbers> {
            if (throws)
              throw std::runtime_error("in the task");
            co_return y;
          }(number == 1, x);
        });
  EXPECT_TRUE(fails(server_->ask(1), errc::unavailable, "before the task"));
  EXPECT_TRUE(fails(server_->ask(2), errc::unavailable, "in the task"));
  EXPECT_EQ(must(answer_of(server_->ask(3))), 3);
}

TEST_F(BatchServer, WrongNumberOfResultsIsAnError) {
  serve({.most = 2, .patience = 1h},
        [](int number, const device&, const any_gpu_ref&, const numbers&) {
          return square(numbers(number == 0 ? 1 : 3));
        });
  for (const std::string results : {"1 results", "3 results"}) {
    const auto a = server_->ask(1);
    const auto b = server_->ask(2);
    EXPECT_TRUE(fails(a, errc::shape_mismatch, "a batch of 2 requests returned " + results));
    EXPECT_TRUE(fails(b, errc::shape_mismatch));
  }
  EXPECT_EQ(runs_, 2);
}

task<any_gpu_ref> fail_to_load(std::string why) {
  co_await end_with(make_error(errc::out_of_memory, why));
  co_return any_gpu_ref{};
}

TEST_F(BatchServer, ReplicaThatCannotLoadLeavesTheWorkToTheOthers) {
  TROUPE_NEEDS_DEVICES(2);
  const int bad = sys_.ordinals()[0];
  std::atomic<int> used{-1};
  serve(
      {.most = 1, .patience = 0ns},
      [&used](int, const device& on, const any_gpu_ref&, const numbers& x) {
        used = on.ordinal();
        return square(x);
      },
      2,
      [bad](const device& on) {
        return on.ordinal() == bad ? fail_to_load("too large") : allocate(on);
      });
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(must(answer_of(server_->ask(i))), i * i);
    EXPECT_NE(used, bad);
  }
}

TEST_F(BatchServer, EndOfTheLastReplicaRefusesAllRequests) {
  open_request begin;
  serve({.most = 1, .patience = 0ns}, always_square, 1,
        [&begin](const device&) -> task<any_gpu_ref> {
          co_await value_of(begin.wait());
          throw std::runtime_error("no such file");
        });
  const auto waiting = server_->ask(1);
  begin.complete();
  EXPECT_TRUE(fails(waiting, errc::unavailable,
                    "no replica left: unavailable: the task threw: no such file"));
  EXPECT_TRUE(fails(server_->ask(2), errc::unavailable, "no such file"));
  EXPECT_TRUE(is_ok(answer_of(server_->close())));
  EXPECT_TRUE(fails(server_->ask(3), errc::unavailable, "no such file"));
}

TEST_F(BatchServer, NoReplicas) {
  serve({}, always_square, 0);
  EXPECT_TRUE(fails(server_->ask(1), errc::unavailable, "no replicas"));
  EXPECT_TRUE(is_ok(answer_of(server_->close())));
}

TEST_F(BatchServer, CloseAnswersWhatRunsAndRefusesTheRest) {
  open_request end;
  flag begun;
  serve({.most = 1, .patience = 0ns}, [&](int, device, any_gpu_ref, numbers x) -> task<numbers> {
    begun.set();
    co_await value_of(end.wait());
    co_return co_await value_of(square(x));
  });
  const auto runs = server_->ask(7);
  ASSERT_TRUE(begun.wait());
  const auto waits = server_->ask(8);
  const auto over = server_->close();
  EXPECT_TRUE(fails(waits, errc::unavailable, "closed"));
  EXPECT_TRUE(fails(server_->ask(9), errc::unavailable, "closed"));
  EXPECT_FALSE(runs.ready());
  EXPECT_FALSE(over.ready());
  end.complete();
  EXPECT_EQ(must(answer_of(runs)), 49);
  EXPECT_TRUE(is_ok(answer_of(over)));
  EXPECT_TRUE(is_ok(answer_of(server_->close())));
  EXPECT_EQ(server_->counts().answers, 3u);
}

TEST_F(BatchServer, BatchThatWouldRunAgainIsRefusedByTheClosedServer) {
  open_request go_on;
  flag begun;
  serve({.most = 2, .patience = 1h},
        [&](int, device on, any_gpu_ref with, numbers) -> task<numbers> {
          begun.set();
          co_await value_of(go_on.wait());
          co_return co_await value_of(lose(on, with));
        });
  const auto a = server_->ask(1);
  const auto b = server_->ask(2);
  ASSERT_TRUE(begun.wait());
  const auto over = server_->close();
  EXPECT_FALSE(over.ready());
  go_on.complete();
  EXPECT_TRUE(fails(a, errc::unavailable, "closed"));
  EXPECT_TRUE(fails(b, errc::unavailable, "closed"));
  EXPECT_TRUE(is_ok(answer_of(over)));
  EXPECT_EQ(server_->counts().repeated, 0u);
}

TEST_F(BatchServer, CloseCancelsLoads) {
  open_request never;
  flag begun;
  serve({}, always_square, 1, [&](const device&) -> task<any_gpu_ref> {
    begun.set();
    co_await value_of(never.wait());
    co_return any_gpu_ref{};
  });
  ASSERT_TRUE(begun.wait());
  const auto waits = server_->ask(1);
  EXPECT_TRUE(is_ok(answer_of(server_->close())));
  EXPECT_TRUE(never.cancelled());
  EXPECT_TRUE(fails(waits, errc::unavailable, "closed"));
}

TEST_F(BatchServer, EndRefusesEvenWhatRuns) {
  open_request never;
  flag begun;
  serve({.most = 1, .patience = 0ns}, [&](int, device, any_gpu_ref, numbers x) -> task<numbers> {
    begun.set();
    co_await value_of(never.wait());
    co_return x;
  });
  const auto runs = server_->ask(1);
  ASSERT_TRUE(begun.wait());
  const auto waits = server_->ask(2);
  server_ = nullptr;
  EXPECT_TRUE(fails(waits, errc::unavailable, "ended"));
  EXPECT_TRUE(fails(runs, errc::unavailable, "ended"));
  EXPECT_TRUE(has_code(answer_of(never.wait()), errc::cancelled));
}

TEST_F(BatchServer, CancelledRequestDoesNotRun) {
  serve({.most = 3, .patience = 1h}, always_square);
  const auto a = server_->ask(1);
  const auto b = server_->ask(2);
  a.cancel();
  EXPECT_TRUE(fails(a, errc::cancelled));
  const auto c = server_->ask(3);
  EXPECT_EQ(must(answer_of(b)), 4);
  EXPECT_EQ(must(answer_of(c)), 9);
  EXPECT_EQ(batches(), (std::vector<numbers>{{2, 3}}));
}

/// Runs, loses its device, fails, hangs until it is cancelled, or lasts some time.
task<numbers> run_with_luck(std::uint64_t seed, device on, any_gpu_ref with, numbers batch) {
  std::mt19937_64 random{seed};
  if (chance(random, 0.1))
    co_await value_of(on.reset());
  else if (chance(random, 0.05))
    co_await end_with(make_error(errc::launch_failed, "bad luck"));
  else if (chance(random, 0.05))
    co_await after(1h);
  else
    co_await after(std::chrono::microseconds{pick(random, 0, 300)});
  co_await value_of(on.fill(with, scalar{std::int32_t{1}}));
  for (auto& x : batch)
    x *= x;
  co_return batch;
}

TEST_F(BatchServer, EachRequestHasTheRightAnswerOrItsError) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    serve(
        {.most = 4, .patience = 100us},
        [seed](int number, const device& on, const any_gpu_ref& with, const numbers& x) {
          return run_with_luck(1000 * seed + static_cast<std::uint64_t>(number), on, with, x);
        },
        static_cast<std::size_t>(sys_.devices()));
    const int count = 200;
    std::atomic<int> right{0}, late{0}, unlucky{0};
    std::vector<std::jthread> clients;
    for (int c = 0; c < 2; ++c)
      clients.emplace_back([&, c] {
        std::mt19937_64 random{100 * seed + static_cast<std::uint64_t>(c)};
        std::vector<pending<int>> asked;
        for (int i = 0; i < count; ++i)
          asked.push_back(server_->ask(i, std::chrono::microseconds{pick(random, 100, 100'000)}));
        for (int i = 0; i < count; ++i) {
          const auto x = answer_of(asked[static_cast<std::size_t>(i)]);
          if (x)
            right += *x == i * i ? 1 : 0;
          else if (code_of(x.error()) == errc::deadline_exceeded)
            ++late;
          else
            unlucky += has_code(x, errc::launch_failed) ? 1 : 0;
        }
      });
    clients.clear();
    EXPECT_EQ(right + late + unlucky, 2 * count) << "seed " << seed;
    EXPECT_EQ(server_->counts().answers, 2u * count);
    EXPECT_TRUE(is_ok(answer_of(server_->close())));
  }
}

} // namespace

} // namespace troupe::testing
