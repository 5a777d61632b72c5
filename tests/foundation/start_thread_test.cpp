// Threads that nothing waits for.

#include "foundation/background.hpp"
#include "foundation/fair_limit.hpp"
#include "foundation/start_thread.hpp"
#include "support/no_threads.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include <dlfcn.h>
#include <pthread.h>

namespace troupe::detail {

namespace {

std::atomic<int> detached_others{0};

} // namespace

} // namespace troupe::detail

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) // these have their own
/// Counts the threads of this program that another one detaches.
extern "C" int pthread_detach(pthread_t x) {
  static const auto original =
      reinterpret_cast<int (*)(pthread_t)>(::dlsym(RTLD_NEXT, "pthread_detach"));
  if (::pthread_equal(x, ::pthread_self()) == 0)
    ++troupe::detail::detached_others;
  return original(x);
}
#endif

namespace troupe::detail {

namespace {

/// Returns whether the calling thread is detached.
bool is_detached() {
  pthread_attr_t x;
  int state = PTHREAD_CREATE_JOINABLE;
  EXPECT_EQ(::pthread_getattr_np(::pthread_self(), &x), 0);
  EXPECT_EQ(::pthread_attr_getdetachstate(&x, &state), 0);
  EXPECT_EQ(::pthread_attr_destroy(&x), 0);
  return state == PTHREAD_CREATE_DETACHED;
}

TEST(StartThread, IsDetached) {
  std::promise<bool> told;
  ASSERT_FALSE(start_detached_thread([&] { told.set_value(is_detached()); }, "for the test"));
  EXPECT_TRUE(told.get_future().get());
}

// To detach a thread while it ends accesses memory that it may have given back.
TEST(StartThread, DetachesNoOtherThread) {
  const int before = detached_others;
  std::promise<void> done;
  ASSERT_FALSE(start_detached_thread([&] { done.set_value(); }, "for the test"));
  done.get_future().get();
  {
    background jobs;
    jobs.run([] {});
    fair_limit limit{std::chrono::seconds{60}};
    EXPECT_TRUE(jobs.wait_idle(limit));
  }
  leave_thread(std::thread{[] {}});
  EXPECT_EQ(detached_others, before);
}

TEST(StartThread, EndsItsWorkOnTheThread) {
  std::promise<std::thread::id> ended;
  auto owned =
      std::shared_ptr<void>{nullptr, [&](void*) { ended.set_value(std::this_thread::get_id()); }};
  std::promise<std::thread::id> ran;
  ASSERT_FALSE(start_detached_thread(
      [&ran, owned = std::move(owned)] { ran.set_value(std::this_thread::get_id()); },
      "for the test"));
  EXPECT_EQ(ended.get_future().get(), ran.get_future().get());
}

TEST(StartThread, ReportsThatThereIsNone) {
  const testing::no_threads none;
  const auto why = start_detached_thread([] {}, "for the test");
  EXPECT_NE(to_string(why).find("no thread for the test"), std::string::npos) << to_string(why);
}

TEST(StartThread, LeavesAThreadThatRuns) {
  std::promise<void> end;
  std::promise<bool> detached;
  leave_thread(std::thread{[&, wait = end.get_future()] {
    wait.wait();
    detached.set_value(is_detached());
  }});
  end.set_value();
  EXPECT_FALSE(detached.get_future().get()); // another thread joins it
}

TEST(StartThread, LeavesItself) {
  std::promise<std::thread> itself;
  std::promise<bool> detached;
  std::thread own{[&, x = itself.get_future()]() mutable {
    leave_thread(x.get());
    detached.set_value(is_detached());
  }};
  itself.set_value(std::move(own));
  EXPECT_TRUE(detached.get_future().get());
}

} // namespace

} // namespace troupe::detail
