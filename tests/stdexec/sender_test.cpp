// Requests as senders of stdexec.

#include "support/manual_executor.hpp"
#include "support/world_fixture.hpp"
#include <troupe/stdexec.hpp>

#include <gtest/gtest.h>
#include <stdexec/execution.hpp>

#include <cstdint>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

class Senders : public ::testing::Test {
protected:
  test_system sys_{{.devices = 1}};
  device gpu_ = sys_.open();
  gpu_ref<std::int32_t> number_ = must(gpu_.allocate<std::int32_t>(1, true));
  gate hold_;
};

TEST_F(Senders, CompleteWithTheValue) {
  std::vector<std::int32_t> result(1);
  auto work = as_sender(gpu_.fill(number_, 4)) |
              stdexec::let_value([&] { return as_sender(gpu_.download(number_, result)); }) |
              stdexec::then([&] { return result[0]; });
  auto [x] = stdexec::sync_wait(std::move(work)).value();
  EXPECT_EQ(x, 4);
  auto [ref, again] =
      stdexec::sync_wait(stdexec::when_all(as_sender(gpu_.allocate(dtype::float32, 3)),
                                           as_sender(gpu_.allocate(dtype::int8, 5))))
          .value();
  EXPECT_EQ(ref.count() + again.count(), 8u);
}

TEST_F(Senders, CompleteWithTheError) {
  auto work = as_sender(gpu_.allocate(dtype::float32, std::size_t{1} << 60)) |
              stdexec::then([](any_gpu_ref) { return caf::error{}; }) |
              stdexec::upon_error([](auto why) {
                if constexpr (std::is_same_v<decltype(why), caf::error>)
                  return why;
                else
                  return caf::error{}; // an exception of what is in between
              });
  auto [why] = stdexec::sync_wait(std::move(work)).value();
  EXPECT_TRUE(has_code(why, errc::out_of_memory));
}

TEST_F(Senders, AreStopped) {
  auto held = hold_.hold_stream(gpu_, {}, {number_});
  stdexec::inplace_stop_source stop;
  auto behind = gpu_.fill(number_, 1);
  std::thread stops{[&] { stop.request_stop(); }};
  auto work = stdexec::write_env(as_sender(behind),
                                 stdexec::prop{stdexec::get_stop_token, stop.get_token()});
  EXPECT_FALSE(stdexec::sync_wait(std::move(work)).has_value());
  stops.join();
  EXPECT_TRUE(has_code(behind.wait(), errc::cancelled));
  EXPECT_FALSE(held.ready());
  hold_.open();
}

/// Notes the thread on which it is called.
struct noting_receiver {
  using receiver_concept = stdexec::receiver_t;
  std::thread::id* ran;

  void set_value() && noexcept { *ran = std::this_thread::get_id(); }
  void set_error(const caf::error&) && noexcept {}
  void set_stopped() && noexcept {}
};

TEST_F(Senders, CompleteOnTheirExecutor) {
  manual_executor where;
  std::thread::id ran;
  auto held = hold_.hold_stream(gpu_, {}, {number_});
  auto operation = stdexec::connect(as_sender(held, where), noting_receiver{&ran});
  stdexec::start(operation);
  hold_.open();
  must(held.wait());
  EXPECT_EQ(ran, std::thread::id{});
  where.run_one();
  EXPECT_EQ(ran, std::this_thread::get_id());
}

} // namespace

} // namespace troupe::testing
