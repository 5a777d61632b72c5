// A worker that gets ranks for its programs. No program is registered in this binary.

#include "foundation/process_note.hpp"
#include "support/eventually.hpp"
#include "support/expect.hpp"
#include "support/no_threads.hpp"
#include "worker/child/kept_buffers.hpp"
#include "worker/child/program_host.hpp"

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {
namespace {

using detail::communicator_key;
using detail::program_note;
using namespace std::chrono_literals;

class ProgramHost : public ::testing::Test {
protected:
  static constexpr communicator_key key = 5;
  static constexpr std::uint64_t number = 7;

  detail::program_options options() {
    detail::program_options result;
    result.guest.executes = executes_;
    result.guest.with = std::make_shared<detail::shared_device>();
    result.guest.on_gone = [this](communicator_key x) {
      std::lock_guard lock{mutex_};
      gone_.push_back(x);
    };
    result.guest.on_fault = [](const caf::error& why) { ADD_FAILURE() << describe(why); };
    result.guest.tell = [this](std::span<const std::byte> bytes) {
      auto note = detail::program_note_of(detail::content_of(bytes));
      EXPECT_TRUE(note);
      std::lock_guard lock{mutex_};
      if (note)
        told_.push_back(std::move(*note));
      changed_.notify_all();
      return caf::error{};
    };
    return result;
  }

  communicator_ranks build() {
    const local_rank mine{0, 0};
    return must(executes_->build(must(executes_->make_communicator_id()), 1, {&mine, 1}));
  }
  caf::error hand_over() { return hand_over(build(), number, key); }
  caf::error hand_over(communicator_ranks rank, std::uint64_t of, communicator_key as) {
    program_note note;
    note.what = program_note::kind::adopt;
    note.world = of;
    note.rank = 0;
    note.ranks = 1;
    note.view.phase = world_phase::ready;
    note.view.epoch = 1;
    note.view.members = {{0, 0, 1}};
    note.program = "unregistered";
    return host_.take(as, std::move(rank), to_bytes(note));
  }
  void stop() {
    program_note note;
    note.what = program_note::kind::stop;
    note.world = number;
    host_.received(detail::make_note(detail::note_kind::program, to_bytes(note)));
  }
  std::vector<communicator_key> gone() {
    std::lock_guard lock{mutex_};
    return gone_;
  }
  caf::error wait_ended(std::uint64_t of = number) {
    std::unique_lock lock{mutex_};
    auto is_end = [of](auto& x) { return x.what == program_note::kind::ended && x.world == of; };
    auto i = told_.end();
    EXPECT_TRUE(changed_.wait_for(lock, 20s, [&] {
      i = std::find_if(told_.begin(), told_.end(), is_end);
      return i != told_.end();
    }));
    return i == told_.end() ? caf::error{} : i->why;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<communicator_key> gone_;
  std::vector<program_note> told_;
  const std::shared_ptr<backend> executes_ = make_host_backend({.devices = 1});
  detail::program_host host_{options()};
};

// An error here would end the worker, and the memory of all worlds with it.
TEST_F(ProgramHost, WithoutProgramsSaysSo) {
  EXPECT_TRUE(is_ok(hand_over()));
  EXPECT_TRUE(has_code(wait_ended(), errc::invalid_argument));
  EXPECT_TRUE(gone().empty()); // the rank stays in the world
}

TEST_F(ProgramHost, WithoutAThreadForAProgramSaysSo) {
  EXPECT_TRUE(is_ok(hand_over())); // the state that all worlds share exists
  EXPECT_TRUE(has_code(wait_ended(), errc::invalid_argument));
  auto rank = build();
  {
    const no_threads held;
    EXPECT_TRUE(is_ok(hand_over(std::move(rank), number + 1, key + 1)));
  }
  EXPECT_TRUE(has_code(wait_ended(number + 1), errc::unavailable));
}

// The other ranks are closed first: the abort of one would let their work end with wrong results.
TEST_F(ProgramHost, ARankThatIsClosedEndsWhenThatIsAllowed) {
  EXPECT_TRUE(is_ok(hand_over()));
  host_.close(key);
  EXPECT_FALSE(eventually([this] { return !gone().empty(); }, 100ms));
  host_.allow_end(key);
  EXPECT_TRUE(eventually([this] { return gone() == std::vector{key}; }));
  host_.close(key); // it is gone
}

// The parent sends both from different threads, so they may arrive in either order.
TEST_F(ProgramHost, EndsTheRankOfAWorldThatWasStopped) {
  stop();
  EXPECT_TRUE(is_ok(hand_over()));
  EXPECT_EQ(gone(), std::vector{key});
  EXPECT_TRUE(told_.empty());
}

// -- named buffers

/// A process whose parent answers as the test says.
class KeptBuffersOfAProcess : public ::testing::Test {
protected:
  using kind = program_note::kind;

  /// Begins to ask for a buffer, and waits for the request.
  std::future<errc> keep(const std::string& name) {
    auto result = std::async(std::launch::async, [this, name] {
      const auto got = kept_->keep(name, dtype::float32, 10);
      return got ? errc{} : code_of(got.error()).value_or(errc::internal);
    });
    std::unique_lock lock{mutex_};
    EXPECT_TRUE(changed_.wait_for(lock, 20s, [&] { return request_.name == name; }));
    return result;
  }
  void answer(kind what, std::uint64_t number) {
    auto reply = request_;
    reply.what = what;
    reply.number = number;
    reply.why = make_error(errc::overloaded, "the test wants it");
    kept_->answered(std::move(reply));
  }
  static bool is_done(const std::future<errc>& x) {
    return x.wait_for(0s) == std::future_status::ready;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  program_note request_;
  std::atomic<int> claims_{0};
  const std::shared_ptr<detail::kept_buffers> kept_ =
      std::make_shared<detail::kept_buffers>(detail::kept_buffers::options{
          100,
          [this](program_note x) {
            std::lock_guard lock{mutex_};
            request_ = std::move(x);
            changed_.notify_all();
            return caf::error{};
          },
          [this](const gpu_token&) {
            ++claims_;
            return std::make_shared<detail::operation_of<any_gpu_ref>>("claim", 0);
          }});
};

TEST_F(KeptBuffersOfAProcess, TakeRepliesToTheirRequestAlone) {
  auto result = keep("weights");
  EXPECT_EQ(request_.what, kind::keep);
  EXPECT_EQ(request_.number, 101u);
  answer(kind::not_kept, 100);
  EXPECT_FALSE(is_done(result));
  answer(kind::not_kept, 101);
  EXPECT_EQ(result.get(), errc::overloaded);
}

TEST_F(KeptBuffersOfAProcess, WaitForNoReplyAfterTheEnd) {
  auto result = keep("weights");
  kept_->end();
  EXPECT_EQ(result.get(), errc::unavailable);
  EXPECT_TRUE(has_code(kept_->keep("weights", dtype::float32, 10), errc::unavailable));
}

TEST_F(KeptBuffersOfAProcess, WaitForNoClaimAfterTheEnd) {
  auto result = keep("weights");
  answer(kind::kept, 101);
  EXPECT_TRUE(eventually([this] { return claims_ == 1; }));
  EXPECT_FALSE(is_done(result));
  kept_->end();
  EXPECT_EQ(result.get(), errc::unavailable);
}

} // namespace
} // namespace troupe::testing
