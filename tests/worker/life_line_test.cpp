// A life line between two threads. The tests of workers cover life lines between processes.

#include "support/expect.hpp"
#include "worker/protocol/life_line.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <future>
#include <new>
#include <thread>

namespace troupe::testing {
namespace {

using detail::life_end;
using detail::life_line;

/// Waits for the end of a life line on a thread of its own.
class waiter {
public:
  explicit waiter(const life_line& line)
      : line_(line),
        result_(std::async(std::launch::async, [this] { return line_.wait_for_end(stop_); })) {}

  bool waits_still() {
    return result_.wait_for(std::chrono::seconds{0}) != std::future_status::ready;
  }
  life_end result() { return result_.get(); }
  void stop() {
    stop_ = true;
    line_.wake();
  }

private:
  const life_line& line_;
  std::atomic<bool> stop_{false};
  std::future<life_end> result_;
};

/// Holds a line until end() is called.
class holding_thread {
public:
  enum class way { lets_go, dies };

  explicit holding_thread(life_line& line)
      : thread_([this, &line, end = end_.get_future()]() mutable {
          // Constructed in place: a dying thread runs no destructor, and its holder exists until
          // the end.
          auto* holder = new (place_) life_line::holder{line};
          held_.set_value(!holder->error());
          if (end.get() == way::lets_go)
            holder->~holder();
        }) {}

  bool is_held() { return held_.get_future().get(); }
  void end(way x) {
    end_.set_value(x);
    thread_.join();
  }

private:
  alignas(life_line::holder) std::byte place_[sizeof(life_line::holder)];
  std::promise<bool> held_;
  std::promise<way> end_;
  std::thread thread_;
};

TEST(LifeLine, TellsWhoDiedFromWhoLetGo) {
  for (const auto way : {holding_thread::way::lets_go, holding_thread::way::dies}) {
    life_line line;
    EXPECT_FALSE(line.was_held());
    holding_thread holder{line};
    ASSERT_TRUE(holder.is_held());
    EXPECT_TRUE(line.was_held());
    waiter waits{line};
    EXPECT_TRUE(waits.waits_still());
    holder.end(way);
    const auto wanted = way == holding_thread::way::dies ? life_end::died : life_end::let_go;
    EXPECT_EQ(waits.result(), wanted);
    EXPECT_TRUE(line.was_held());
    std::atomic<bool> never{false};
    EXPECT_EQ(line.wait_for_end(never), wanted) << "who comes later";
  }
}

TEST(LifeLine, AWaiterCanBeStopped) {
  life_line line;
  holding_thread holder{line};
  ASSERT_TRUE(holder.is_held());
  for (int i = 0; i < 100; ++i) {
    waiter waits{line};
    waits.stop();
    EXPECT_EQ(waits.result(), life_end::stopped);
  }
  holder.end(holding_thread::way::lets_go);
}

TEST(LifeLine, AThreadHoldsOneAfterAnother) {
  std::thread{[] {
    for (int i = 0; i < 3; ++i) {
      life_line line;
      std::atomic<bool> never{false};
      {
        life_line::holder holder{line};
        EXPECT_TRUE(is_ok(holder.error()));
      }
      EXPECT_EQ(line.wait_for_end(never), life_end::let_go);
    }
  }}.join();
}

} // namespace
} // namespace troupe::testing
