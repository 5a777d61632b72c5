// The requests of a parent to its workers, and when it makes them. The workers follow scripts.

#include "foundation/wire.hpp"
#include "support/expect.hpp"
#include "worker/child/guest_backend.hpp"
#include "worker/parent/remote_device.hpp"
#include "worker/parent/worker_backend.hpp"
#include "worker/parent/worker_link.hpp"
#include "worker/protocol/protocol.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {
namespace {

using detail::control;
using detail::control_head;
using detail::worker_link;
using namespace std::chrono_literals;

constexpr auto patience = 20s;

/// Two workers that answer as the test says.
class scripted_workers final : public detail::worker_pool {
public:
  scripted_workers() {
    for (int i = 0; i < 2; ++i) {
      const auto area = std::make_shared<detail::link_area>();
      links_[static_cast<std::size_t>(i)] =
          std::make_shared<worker_link>(i, *area, area, std::make_unique<sender>(*this, i));
    }
    answering_ = std::jthread{[this](const std::stop_token& stop) { answer_all(stop); }};
  }
  ~scripted_workers() override {
    for (auto& x : links_)
      x->lose(make_error(errc::worker_lost, "the test is over"));
  }

  int device_count() const noexcept override { return 2; }
  caf::expected<std::shared_ptr<worker_link>> provide(int ordinal,
                                                      const std::stop_token&) noexcept override {
    return current(ordinal);
  }
  std::shared_ptr<worker_link> current(int ordinal) const noexcept override {
    return links_[static_cast<std::size_t>(ordinal)];
  }
  caf::error provide_spare(int, const std::stop_token&) noexcept override {
    return make_error(errc::not_supported, "scripted workers have no spares");
  }
  std::shared_ptr<worker_link> spare(int) const noexcept override { return nullptr; }
  void release(int) noexcept override {}

  /// A worker does not answer such requests by itself.
  void hold(int worker, control what) {
    std::lock_guard lock{mutex_};
    held_.emplace_back(worker, what);
  }
  void fail(int worker, control what, caf::error why) {
    std::lock_guard lock{mutex_};
    failing_.push_back({worker, what, std::move(why)});
  }
  /// Answers the request that was held.
  void go_on(int worker, control what) {
    std::lock_guard lock{mutex_};
    std::erase(held_, std::pair{worker, what});
    changed_.notify_all();
  }
  bool was_asked(int worker, control what, std::chrono::nanoseconds limit = {}) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, limit, [&] {
      return std::find(asked_.begin(), asked_.end(), std::pair{worker, what}) != asked_.end();
    });
  }
  bool was_killed(int worker, std::chrono::nanoseconds limit) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, limit,
                             [&] { return killed_[static_cast<std::size_t>(worker)]; });
  }

private:
  class sender final : public detail::control_sender {
  public:
    sender(scripted_workers& all, int worker) : all_(all), worker_(worker) {}
    caf::error send(std::span<const std::byte> message, std::optional<int>) noexcept override {
      detail::wire_reader reader{message};
      all_.asked(worker_, reader.get<control_head>());
      return {};
    }
    void kill() noexcept override { all_.killed(worker_); }

  private:
    scripted_workers& all_;
    const int worker_;
  };
  struct request {
    int worker = 0;
    control_head head;
  };
  struct failure_of_request {
    int worker = 0;
    control what{};
    caf::error why;
  };

  void asked(int worker, const control_head& head) {
    std::lock_guard lock{mutex_};
    asked_.emplace_back(worker, head.kind);
    open_.push_back({worker, head});
    changed_.notify_all();
  }
  void killed(int worker) {
    std::lock_guard lock{mutex_};
    killed_[static_cast<std::size_t>(worker)] = true;
    changed_.notify_all();
  }
  bool is_held(const request& x) const {
    return std::find(held_.begin(), held_.end(), std::pair{x.worker, x.head.kind}) != held_.end();
  }
  void answer_all(const std::stop_token& stop) {
    std::unique_lock lock{mutex_};
    for (;;) {
      auto next = open_.end();
      const bool any = changed_.wait(lock, stop, [&] {
        next = std::find_if(open_.begin(), open_.end(), [&](auto& x) { return !is_held(x); });
        return next != open_.end();
      });
      if (!any)
        return;
      const auto x = *next;
      open_.erase(next);
      const auto message = answer_to(x);
      lock.unlock();
      links_[static_cast<std::size_t>(x.worker)]->received(message);
      lock.lock();
    }
  }
  std::vector<std::byte> answer_to(const request& x) const {
    const auto failing = std::find_if(failing_.begin(), failing_.end(), [&](auto& f) {
      return f.worker == x.worker && f.what == x.head.kind;
    });
    detail::wire_writer message;
    message.put(x.head);
    message.put(failing == failing_.end() ? caf::error{} : failing->why);
    if (failing == failing_.end()) {
      std::vector<std::byte> result;
      auto append = [&result](const auto& value) {
        const auto bytes = detail::bytes_of(value);
        result.assign(bytes.begin(), bytes.end());
      };
      if (x.head.kind == control::make_communicator_id)
        append(communicator_id{});
      else if (x.head.kind == control::build)
        append(detail::communicator_key{7});
      message.put_bytes(result);
    }
    return {message.bytes().begin(), message.bytes().end()};
  }

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<std::pair<int, control>> asked_;
  std::deque<request> open_;
  std::vector<std::pair<int, control>> held_;
  std::vector<failure_of_request> failing_;
  std::array<bool, 2> killed_{};
  std::array<std::shared_ptr<worker_link>, 2> links_;
  std::jthread answering_; ///< last: it uses the others
};

class WorkerRequests : public ::testing::Test {
protected:
  static worker_settings limits() {
    worker_settings result;
    result.build_limit = 1s;
    return result;
  }
  caf::expected<communicator_ranks> build() { return all_.build({}, 2, ranks_); }

  const std::vector<local_rank> ranks_{{0, 0}, {1, 1}};
  const std::shared_ptr<scripted_workers> workers_ = std::make_shared<scripted_workers>();
  detail::worker_backend all_{workers_, "scripted", limits()};
};

// A rank that fails while it connects may leave its peers in NCCL for good.
TEST_F(WorkerRequests, NoRankIsBuiltBeforeAllWorkersHaveChecked) {
  workers_->fail(1, control::check_build, make_error(errc::out_of_memory, "1 MiB is free"));
  EXPECT_TRUE(has_code(build(), errc::out_of_memory));
  for (int i : {0, 1}) {
    EXPECT_TRUE(workers_->was_asked(i, control::check_build));
    EXPECT_FALSE(workers_->was_asked(i, control::build));
  }
  EXPECT_FALSE(workers_->was_killed(0, {}));
}

TEST_F(WorkerRequests, AWorkerThatChecksForEverIsKilled) {
  workers_->hold(1, control::check_build);
  EXPECT_TRUE(has_code(build(), errc::worker_lost));
  EXPECT_TRUE(workers_->was_killed(1, {}));
  EXPECT_FALSE(workers_->was_killed(0, {}));
}

TEST_F(WorkerRequests, AWorkerThatGoesOnWithABuildThatHasFailedIsKilled) {
  workers_->hold(0, control::build);
  workers_->fail(1, control::build, make_error(errc::invalid_argument, "no such rank"));
  EXPECT_TRUE(has_code(build(), errc::invalid_argument));
  EXPECT_TRUE(workers_->was_asked(0, control::call_off, patience));
  EXPECT_TRUE(workers_->was_killed(0, patience)) << "it hangs for ever";
  EXPECT_FALSE(workers_->was_killed(1, {}));
}

/// An aborted rank may send its peers anything, and their work then ends as if all was well.
TEST_F(WorkerRequests, NoRankOfAProgramEndsBeforeAllAreClosed) {
  using ending = caf::error (detail::worker_backend::*)(communicator_ranks) noexcept;
  for (auto [end, last] :
       {std::pair<ending, control>{&detail::worker_backend::abort, control::abort},
        std::pair<ending, control>{&detail::worker_backend::destroy, control::destroy}}) {
    auto ranks = must(build());
    for (auto& x : ranks)
      EXPECT_TRUE(is_ok(x->hand_over({})));
    workers_->hold(1, control::close);
    std::jthread ends{[&, end = end] { EXPECT_TRUE(is_ok((all_.*end)(std::move(ranks)))); }};
    EXPECT_TRUE(workers_->was_asked(0, control::close, patience));
    EXPECT_TRUE(workers_->was_asked(1, control::close, patience));
    EXPECT_FALSE(workers_->was_asked(0, last, 100ms));
    workers_->go_on(1, control::close);
    ends.join();
    EXPECT_TRUE(workers_->was_asked(0, last));
    EXPECT_TRUE(workers_->was_asked(1, last));
  }
}

TEST_F(WorkerRequests, AWorkerThatCannotCloseItsRankIsKilled) {
  auto ranks = must(build());
  for (auto& x : ranks)
    EXPECT_TRUE(is_ok(x->hand_over({})));
  workers_->fail(1, control::close, make_error(errc::unavailable, "no thread"));
  EXPECT_TRUE(is_ok(all_.abort(std::move(ranks))));
  EXPECT_TRUE(workers_->was_killed(1, {}));
  EXPECT_FALSE(workers_->was_killed(0, {}));
}

/// What is left of the rank would hold up its device for good.
TEST_F(WorkerRequests, AWorkerThatCannotAbortItsRankIsKilled) {
  auto ranks = must(build());
  workers_->fail(1, control::abort, make_error(errc::unavailable, "no thread"));
  EXPECT_TRUE(is_ok(all_.abort(std::move(ranks)))) << "the rank has ended with its worker";
  EXPECT_TRUE(workers_->was_killed(1, {}));
  EXPECT_FALSE(workers_->was_killed(0, {}));
}

TEST_F(WorkerRequests, AWorkerThatCannotAbortTheRankOfAFailedBuildIsKilled) {
  workers_->fail(0, control::build, make_error(errc::invalid_argument, "no such rank"));
  workers_->fail(1, control::abort, make_error(errc::unavailable, "no thread"));
  EXPECT_TRUE(has_code(build(), errc::invalid_argument));
  EXPECT_TRUE(workers_->was_killed(1, patience));
  EXPECT_FALSE(workers_->was_killed(0, {}));
}

TEST_F(WorkerRequests, ARankThatCannotBeDestroyedIsAborted) {
  auto ranks = must(build());
  workers_->fail(1, control::destroy, make_error(errc::unavailable, "no thread"));
  EXPECT_TRUE(is_ok(all_.destroy(std::move(ranks))));
  EXPECT_TRUE(workers_->was_asked(1, control::abort));
  EXPECT_FALSE(workers_->was_asked(0, control::abort));
  EXPECT_FALSE(workers_->was_killed(1, {}));
}

TEST_F(WorkerRequests, ARankThatWasDestroyedWithAnErrorHasEnded) {
  auto ranks = must(build());
  workers_->fail(1, control::destroy, make_error(errc::nccl_error, "a peer is lost"));
  EXPECT_TRUE(has_code(all_.destroy(std::move(ranks)), errc::nccl_error));
  EXPECT_FALSE(workers_->was_asked(1, control::abort));
  EXPECT_FALSE(workers_->was_killed(1, {}));
}

/// Its work may use the memory of the other ranks' programs.
TEST_F(WorkerRequests, ALostWorkerHoldsTheRanksOfProgramsUntilItsProcessIsGone) {
  const auto first = workers_->current(0);
  const auto lost = workers_->current(1);
  lost->set_slab_granularity(4096);
  auto ranks = must(build());
  for (auto& x : ranks)
    EXPECT_TRUE(is_ok(x->hand_over({})));
  lost->lose(make_error(errc::worker_lost, "the test wants it"));
  EXPECT_TRUE(is_ok(all_.abort(std::move(ranks))));
  EXPECT_FALSE(first->program_ranks().is_none());
  lost->reaped();
  EXPECT_TRUE(first->program_ranks().is_none());
}

/// Kernels of the other ranks may write to memory that the lost program had claimed.
TEST_F(WorkerRequests, TheWorkOfALostProgramIsOverWhenItsCommunicatorHasEnded) {
  auto ranks = must(build());
  for (auto& x : ranks)
    EXPECT_TRUE(is_ok(x->hand_over({})));
  const auto lost = workers_->current(0);
  lost->set_slab_granularity(4096); // so it may map memory of other devices
  const auto device = must(all_.open(0));
  lost->lose(make_error(errc::worker_lost, "the test wants it"));
  EXPECT_TRUE(has_code(device->bind(), errc::worker_lost));
  const auto is_over = device->lost_work();
  EXPECT_FALSE(is_over());
  lost->reaped();
  EXPECT_FALSE(is_over());
  EXPECT_TRUE(is_ok(all_.abort(std::move(ranks))));
  EXPECT_TRUE(is_over());
}

TEST_F(WorkerRequests, TheWorkOfALostWorkerWithoutSlabsIsOver) {
  const auto device = must(all_.open(0));
  workers_->current(0)->lose(make_error(errc::worker_lost, "the test wants it"));
  EXPECT_TRUE(has_code(device->bind(), errc::worker_lost));
  EXPECT_TRUE(device->lost_work()());
}

TEST_F(WorkerRequests, AWorkerHasAWordForSoManyClaims) {
  EXPECT_EQ(all_.take_word(0, 1), nullptr) << "its memory is not kept";
  workers_->current(0)->set_slab_granularity(4096);
  std::set<std::uint32_t> numbers;
  std::set<const void*> words;
  std::vector<std::shared_ptr<const shared_word>> all;
  for (std::size_t i = 0; i < detail::link_area::word_count; ++i) {
    all.push_back(all_.take_word(0, i));
    ASSERT_NE(all.back(), nullptr);
    EXPECT_EQ(all.back()->value->load(), i);
    numbers.insert(all.back()->number);
    words.insert(all.back()->value);
  }
  EXPECT_EQ(*numbers.begin(), 1u);
  EXPECT_EQ(*numbers.rbegin(), all.size());
  EXPECT_EQ(words.size(), all.size());
  EXPECT_EQ(all_.take_word(0, 1), nullptr);
  const auto number = all[7]->number;
  all[7].reset();
  all[7] = all_.take_word(0, 5);
  ASSERT_NE(all[7], nullptr);
  EXPECT_EQ(all[7]->number, number);
  EXPECT_EQ(all[7]->value->load(), 5u);
}

TEST_F(WorkerRequests, AProgramFindsTheWordsThatThereAre) {
  std::array<std::atomic<std::uint64_t>, 3> words{};
  detail::guest_options options;
  options.executes = make_host_backend({.devices = 1});
  options.words = words;
  detail::guest_backend guest{std::move(options)};
  EXPECT_EQ(guest.find_word(0), nullptr);
  EXPECT_EQ(guest.find_word(1), words.data());
  EXPECT_EQ(guest.find_word(3), &words[2]);
  EXPECT_EQ(guest.find_word(4), nullptr);
  EXPECT_EQ(guest.find_word(UINT32_MAX), nullptr);
}

TEST_F(WorkerRequests, RanksThatTheParentDrivesAreNotClosedByTheirWorkers) {
  EXPECT_TRUE(is_ok(all_.abort(must(build()))));
  EXPECT_TRUE(workers_->was_asked(0, control::abort));
  EXPECT_FALSE(workers_->was_asked(0, control::close));
}

} // namespace
} // namespace troupe::testing
