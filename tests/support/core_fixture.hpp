/// Helpers for tests of the core: a runtime over virtual devices, gates, and operations of the
/// tests.
#pragma once

#include "device/device_core.hpp"
#include "device/make_runtime.hpp"
#include "operation/operation.hpp"
#include "runtime/runtime.hpp"
#include "support/eventually.hpp"
#include "support/expect.hpp"
#include <troupe/backend.hpp>
#include <troupe/testing/fault_plan.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

using namespace std::chrono_literals;

/// A test that waits longer than this has failed.
inline constexpr std::chrono::seconds patience{60};

/// Blocks the threads that pass it until it is opened. The destructor opens it.
class gate {
public:
  gate() = default;
  gate(const gate&) = delete;
  gate& operator=(const gate&) = delete;
  ~gate() { open(); }

  void open() {
    std::lock_guard lock{state_->mutex};
    state_->is_open = true;
    state_->changed.notify_all();
  }
  /// Blocks until a thread has reached the gate.
  void wait_reached() {
    std::unique_lock lock{state_->mutex};
    EXPECT_TRUE(state_->changed.wait_for(lock, patience, [&] { return state_->reached; }));
  }
  /// Returns a function that passes the gate. The function may outlive the gate.
  std::function<void()> passer() const {
    return [state = state_] {
      std::unique_lock lock{state->mutex};
      state->reached = true;
      state->changed.notify_all();
      state->changed.wait(lock, [&] { return state->is_open; });
    };
  }
  /// Returns a launch whose work blocks its stream.
  launch_function in_stream() const {
    return [pass = passer()](launch_context& context) { return context.run_on_host(pass); };
  }
  /// Returns a launch that blocks the lane.
  launch_function on_lane() const {
    return [pass = passer()](launch_context&) {
      pass();
      return caf::error{};
    };
  }

private:
  struct state {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;
    bool is_open = false;
  };
  std::shared_ptr<state> state_ = std::make_shared<state>();
};

inline launch_function no_work() {
  return [](launch_context&) { return caf::error{}; };
}

inline launch_function failing_work() {
  return [](launch_context&) { return make_error(errc::invalid_argument, "on purpose"); };
}

inline launch_function host_work(std::function<void()> f) {
  return [f = std::move(f)](launch_context& context) { return context.run_on_host(f); };
}

/// Returns the operation's error. The test fails if the operation is not completed in time.
inline caf::error answer_of(const std::shared_ptr<detail::completion>& x) {
  if (!x->wait_until(detail::clock::now() + patience)) {
    ADD_FAILURE() << "no answer";
    return make_error(errc::internal, "no answer");
  }
  return x->error();
}

inline ::testing::AssertionResult settles(const detail::operation& op) {
  return eventually([&] { return op.settled(); });
}

/// Virtual devices and their runtime.
class core_system {
public:
  struct options {
    int devices = 1;
    lane_options lanes = {};
    std::shared_ptr<fault_plan> plan = nullptr;
    std::shared_ptr<troupe::backend> backend = nullptr; ///< used in place of the host backend
  };

  core_system() : core_system(options{}) {}
  explicit core_system(options x) : runtime_(make_runtime(std::move(x))) {}
  core_system(const core_system&) = delete;
  core_system& operator=(const core_system&) = delete;
  ~core_system() { runtime_->close(); }

  const std::shared_ptr<detail::runtime>& runtime() const { return runtime_; }
  detail::deadline_watch& deadlines() const { return runtime_->deadlines(); }
  std::shared_ptr<detail::lane> lane(int ordinal = 0) const {
    return must(runtime_->lane_of(ordinal));
  }
  detail::device_core device(int ordinal = 0, std::chrono::nanoseconds deadline = patience) const {
    return {runtime_, lane(ordinal), deadline};
  }

private:
  static std::shared_ptr<detail::runtime> make_runtime(options x) {
    auto backend = x.backend ? x.backend : make_host_backend({.devices = x.devices});
    return detail::make_runtime(x.plan ? with_faults(backend, x.plan) : backend, x.lanes);
  }

  std::shared_ptr<detail::runtime> runtime_;
};

inline any_gpu_ref allocate_bytes(const detail::device_core& device, std::size_t size_bytes) {
  auto op = device.allocate(size_bytes, dtype::uint8, false, {});
  must(answer_of(op));
  return op->value;
}

inline std::shared_ptr<detail::host_range> borrow(std::span<std::byte> memory) {
  return std::make_shared<detail::host_range>(memory);
}

template <class T> std::shared_ptr<detail::host_range> borrow(std::vector<T>& elements) {
  return borrow(std::as_writable_bytes(std::span{elements}));
}

/// An operation that a test defines, with one part per lane.
class probe : public detail::operation_of<detail::nothing> {
public:
  using issue_function =
      std::function<caf::expected<detail::issue_outcome>(detail::part&, detail::lane&)>;

  explicit probe(const std::vector<std::shared_ptr<detail::lane>>& lanes,
                 issue_function on_issue = {})
      : operation_of("probe", lanes.size()), on_issue_(std::move(on_issue)) {
    for (std::size_t i = 0; i < lanes.size(); ++i)
      parts()[i].on = lanes[i].get();
    deadline = detail::clock::now() + patience;
  }

  caf::expected<detail::issue_outcome> issue(detail::part& p, detail::lane& on) override {
    issued_.fetch_add(1);
    if (on_issue_)
      return on_issue_(p, on);
    return detail::issue_outcome::enqueued;
  }
  bool on_stall() noexcept override {
    stalls_.fetch_add(1);
    return true;
  }
  void on_lost_part(detail::part&, const caf::error&) noexcept override { lost_.fetch_add(1); }
  bool answer_again() { return answer({}); }

  int issued() const { return issued_.load(); }
  int stalls() const { return stalls_.load(); }
  int lost() const { return lost_.load(); }

private:
  issue_function on_issue_;
  std::atomic<int> issued_{0};
  std::atomic<int> stalls_{0};
  std::atomic<int> lost_{0};
};

} // namespace troupe::testing
