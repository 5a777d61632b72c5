// Consecutive small copies over one link: one call and one event for all of them.

#include "device/operations.hpp"
#include "lane/lane.hpp"
#include "support/core_fixture.hpp"
#include "support/forwarding_backend.hpp"
#include "topology/peer_operations.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using detail::connect_peers_operation;
using detail::peer_copy_operation;
using detail::peer_findings;

/// Calls that a device received, and the faults to inject.
struct copy_calls {
  std::mutex mutex;
  std::vector<std::size_t> sizes; ///< number of copies in each call
  const void* wrong_target = nullptr;
  std::atomic<int> events{0};
  std::atomic<void*> stream{nullptr}; ///< of the last call
  std::atomic<void*> event{nullptr};  ///< the last event recorded in `stream`
  std::atomic<bool> work_fails{false};

  void note(std::size_t copies) {
    std::lock_guard lock{mutex};
    sizes.push_back(copies);
  }
  std::vector<std::size_t> all() {
    std::lock_guard lock{mutex};
    return sizes;
  }
};

class counting_device final : public forwarding_device {
public:
  counting_device(std::unique_ptr<backend_device> inner, copy_calls& calls)
      : forwarding_device(std::move(inner)), calls_(calls) {}

  caf::error copy_peer(void* to, int to_device, const void* from, int from_device,
                       std::size_t size_bytes, stream_view on) noexcept override {
    if (to == calls_.wrong_target)
      return make_error(errc::cuda_error, "a wrong target");
    calls_.note(1);
    return inner_->copy_peer(to, to_device, from, from_device, size_bytes, on);
  }
  caf::error copy_peers(std::span<const peer_copy> copies, stream_view on) noexcept override {
    // The order is free. If one copy fails, the copies before it are done.
    for (std::size_t i = copies.size(); i-- > 0;) {
      auto& x = copies[i];
      if (x.target == calls_.wrong_target)
        return make_error(errc::cuda_error, "one of them has a wrong target");
      if (auto error = inner_->copy_peer(x.target, x.target_device, x.source, x.source_device,
                                         x.size_bytes, on))
        return error;
    }
    calls_.note(copies.size());
    calls_.stream = on.native;
    return {};
  }
  caf::error record(event_view event, stream_view on) noexcept override {
    ++calls_.events;
    if (on.native == calls_.stream)
      calls_.event = event.native;
    return inner_->record(event, on);
  }
  caf::expected<bool> query(event_view event) noexcept override {
    if (event.native == calls_.event && calls_.work_fails.exchange(false))
      return make_error(errc::cuda_error, "the work failed");
    return inner_->query(event);
  }

private:
  copy_calls& calls_;
};

class counting_backend final : public forwarding_backend {
public:
  counting_backend() : forwarding_backend(make_host_backend({.devices = 2})) {}
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<counting_device>(ordinal, calls.at(static_cast<std::size_t>(ordinal)));
  }

  std::array<copy_calls, 2> calls;
};

/// Blocks the lane of device 0 while a test enqueues copies.
class CopyRun : public ::testing::Test {
protected:
  using copies = std::vector<std::shared_ptr<peer_copy_operation>>;
  static constexpr std::size_t number = 5;
  static constexpr std::size_t size = 1000;
  static constexpr std::size_t long_size = detail::lane::small_copy_bytes + 1;

  CopyRun() {
    for (int i : {0, 1}) {
      auto op = std::make_shared<connect_peers_operation>(std::vector{1 - i},
                                                          [](const peer_findings&) {});
      start(op, i);
      must(answer_of(op));
    }
    for (std::size_t i = 0; i < number; ++i) {
      here_.push_back(filled(0, size, static_cast<int>(i) + 1));
      there_.push_back(filled(1, size, static_cast<int>(i) + 101));
    }
    long_ = filled(0, long_size, 3);
    auto holder = std::make_shared<detail::launch_operation>(
        lane_.on_lane(), std::vector<any_gpu_ref>{}, std::vector<any_gpu_ref>{});
    start(holder, 0);
    lane_.wait_reached();
    calls().events = 0;
  }

  template <class Op> void start(const std::shared_ptr<Op>& op, int device) {
    op->parts()[0].on = system_.lane(device).get();
    op->deadline = detail::clock::now() + patience;
    system_.runtime()->start(op);
  }
  any_gpu_ref filled(int device, std::size_t bytes, int value) {
    auto ref = allocate_bytes(system_.device(device), bytes);
    must(answer_of(system_.device(device).fill(ref, static_cast<std::uint8_t>(value), {})));
    return ref;
  }
  /// Enqueues the copy on the lane of device 0.
  std::shared_ptr<peer_copy_operation> copy(const any_gpu_ref& target, const any_gpu_ref& source) {
    auto op = std::make_shared<peer_copy_operation>(target, source, 0);
    start(op, 0);
    return op;
  }
  copies copy_all() {
    copies result;
    for (std::size_t i = 0; i < number; ++i)
      result.push_back(copy(there_[i], here_[i]));
    return result;
  }
  /// Downloads the bytes of `x`, ordered behind the copies.
  std::vector<std::byte> content(const any_gpu_ref& x) {
    std::vector<std::byte> result(x.size_bytes());
    must(answer_of(system_.device(x.device()).download(x, borrow(result), {})));
    return result;
  }
  static std::vector<std::byte> bytes(std::size_t number, std::size_t value) {
    return std::vector<std::byte>(number, static_cast<std::byte>(value));
  }
  copy_calls& calls() { return backend_->calls[0]; }
  /// The operation that blocks the lane records an event too.
  int events_of_copies() { return calls().events - 1; }

  std::shared_ptr<counting_backend> backend_ = std::make_shared<counting_backend>();
  core_system system_{{.backend = backend_}};
  gate lane_;
  std::vector<any_gpu_ref> here_;
  std::vector<any_gpu_ref> there_;
  any_gpu_ref long_;
};

TEST_F(CopyRun, IsOneCallAndOneEvent) {
  auto all = copy_all();
  lane_.open();
  for (std::size_t i = 0; i < number; ++i) {
    EXPECT_TRUE(is_ok(answer_of(all[i])));
    EXPECT_EQ(content(there_[i]), bytes(size, i + 1));
  }
  EXPECT_EQ(calls().all(), std::vector<std::size_t>{number});
  EXPECT_EQ(events_of_copies(), 1);
}

TEST_F(CopyRun, ACopyAloneGoesAtOnce) {
  lane_.open();
  for (std::size_t i = 0; i < number; ++i)
    EXPECT_TRUE(is_ok(answer_of(copy(there_[i], here_[i]))));
  EXPECT_EQ(calls().all(), std::vector<std::size_t>(number, 1));
  EXPECT_EQ(events_of_copies(), static_cast<int>(number));
}

TEST_F(CopyRun, ALongCopyIsNoneOfIt) {
  auto longer = allocate_bytes(system_.device(1), long_size);
  auto first = copy(there_[0], here_[0]);
  auto second = copy(there_[1], here_[1]);
  auto third = copy(longer, long_);
  auto last = copy(there_[2], here_[2]);
  lane_.open();
  for (auto& op : {first, second, third, last})
    EXPECT_TRUE(is_ok(answer_of(op)));
  EXPECT_EQ(calls().all(), (std::vector<std::size_t>{2, 1, 1}));
  EXPECT_EQ(content(longer), bytes(long_size, 3));
}

TEST_F(CopyRun, WhatBuildsOnOneOfItComesAfterIt) {
  auto first = copy(there_[0], here_[0]);
  auto second = copy(there_[1], here_[1]);
  auto over = copy(there_[0], here_[2]); // this copy determines the result
  auto back = copy(here_[3], there_[1]); // reads the result of `second`
  auto again = copy(there_[4], here_[3]);
  lane_.open();
  for (auto& op : {first, second, over, back, again})
    EXPECT_TRUE(is_ok(answer_of(op)));
  EXPECT_EQ(calls().all(), (std::vector<std::size_t>{2, 2, 1}));
  EXPECT_EQ(content(there_[0]), bytes(size, 3));
  EXPECT_EQ(content(here_[3]), bytes(size, 2));
  EXPECT_EQ(content(there_[4]), bytes(size, 2));
}

// For memory of the lane's own device, only the stream keeps the copies in order.
TEST_F(CopyRun, KeepsTheOrderOfWhatIsWrittenHere) {
  auto first = copy(here_[0], there_[0]);
  auto second = copy(here_[0], there_[1]); // this copy determines the result
  auto reader = copy(there_[2], here_[1]);
  auto writer = copy(here_[1], there_[3]); // `reader` reads the content from before
  lane_.open();
  for (auto& op : {first, second, reader, writer})
    EXPECT_TRUE(is_ok(answer_of(op)));
  EXPECT_EQ(calls().all(), (std::vector<std::size_t>{1, 2, 1}));
  EXPECT_EQ(events_of_copies(), 1);
  EXPECT_EQ(content(here_[0]), bytes(size, 102));
  EXPECT_EQ(content(there_[2]), bytes(size, 2));
  EXPECT_EQ(content(here_[1]), bytes(size, 104));
}

TEST_F(CopyRun, WorkElsewhereWaitsForOneInTheMiddle) {
  auto all = copy_all();
  std::vector<std::byte> seen(size);
  auto reader = system_.device(1).download(there_[2], borrow(seen), {});
  auto writer = system_.device(0).fill(here_[3], std::uint8_t{77}, {});
  lane_.open();
  EXPECT_TRUE(is_ok(answer_of(reader)));
  EXPECT_TRUE(is_ok(answer_of(writer)));
  for (auto& op : all)
    EXPECT_TRUE(is_ok(answer_of(op)));
  EXPECT_EQ(seen, bytes(size, 3));
  EXPECT_EQ(content(there_[3]), bytes(size, 4));
  EXPECT_EQ(content(here_[3]), bytes(size, 77));
}

TEST_F(CopyRun, GoesOnWithoutOneThatIsTakenBack) {
  auto all = copy_all();
  all[1]->cancel();
  EXPECT_TRUE(has_code(answer_of(all[1]), errc::cancelled));
  lane_.open();
  for (std::size_t i : {0, 2, 3, 4}) {
    EXPECT_TRUE(is_ok(answer_of(all[i])));
    EXPECT_EQ(content(there_[i]), bytes(size, i + 1));
  }
  EXPECT_EQ(content(there_[1]), bytes(size, 102));
}

TEST_F(CopyRun, OneThatIsWrongFailsAlone) {
  calls().wrong_target = there_[2].memory()->address();
  auto all = copy_all();
  lane_.open();
  EXPECT_TRUE(has_code(answer_of(all[2]), errc::link_failed));
  for (std::size_t i : {0, 1, 3, 4}) {
    EXPECT_TRUE(is_ok(answer_of(all[i])));
    EXPECT_EQ(content(there_[i]), bytes(size, i + 1));
  }
  std::vector<std::byte> half_written(size);
  EXPECT_TRUE(has_code(answer_of(system_.device(1).download(there_[2], borrow(half_written), {})),
                       errc::indeterminate));
}

TEST_F(CopyRun, AllOfItFailWithTheirWork) {
  auto all = copy_all();
  calls().work_fails = true;
  lane_.open();
  for (auto& op : all)
    EXPECT_TRUE(has_code(answer_of(op), errc::link_failed));
  EXPECT_TRUE(is_ok(answer_of(copy(there_[0], here_[0]))));
  EXPECT_EQ(content(there_[0]), bytes(size, 1));
}

} // namespace

} // namespace troupe::testing
