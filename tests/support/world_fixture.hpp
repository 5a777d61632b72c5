/// An actor system with devices, and helpers for its tests. The devices are of the host backend, or
/// of CUDA where there are GPUs. TROUPE_TEST_BACKEND=host|cuda selects the backend. Without it, the
/// tests use CUDA if the machine has GPUs or if TROUPE_REQUIRE_GPUS is set.
#pragma once

#include "support/expect.hpp"
#include "support/gate.hpp"
#include "support/gpus.hpp"
#include "support/launches.hpp"
#include "support/reference.hpp"
#include <troupe/testing/fault_plan.hpp>
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace troupe::testing {

using namespace std::chrono_literals;

/// Every request without a defect is answered within this time, also under sanitizers.
inline constexpr std::chrono::seconds patience{30};
/// Limit for "at once", also under sanitizers. It is far below every default deadline.
inline constexpr std::chrono::seconds at_once{10};

/// Returns true if this run tests the CUDA backend.
bool on_cuda();
/// Returns true if the devices of this run live in worker processes.
bool in_workers();
/// Returns the policy of this run's worlds.
collectives_policy collectives_of_run();

/// Options of a test's actor system.
struct system_options {
  int devices = 2;                              ///< upper bound: there may be fewer GPUs
  std::shared_ptr<fault_plan> faults = nullptr; ///< injects faults into the backend
  /// Wraps the backend. The faults are injected outside of this wrapper.
  std::function<std::shared_ptr<backend>(std::shared_ptr<backend>)> wrap = {};
  lane_options lanes = {};
  std::size_t bytes_per_device = std::size_t{1} << 30; ///< host backend
  std::chrono::nanoseconds device_deadline = patience;
  flight_record_options flight_record = {};
  std::vector<host_link> links = {}; ///< host backend
};

/// A configuration, an actor system and its devices.
class test_system {
public:
  explicit test_system(system_options options = {});

  caf::actor_system& get() noexcept { return system_; }
  operator caf::actor_system&() noexcept { return system_; }

  const std::vector<int>& ordinals() const noexcept { return ordinals_; }
  int devices() const noexcept { return static_cast<int>(ordinals_.size()); }
  /// Returns an ordinal that does not exist.
  int no_device() const noexcept { return all_; }

  device open(int ordinal = 0) { return must(device::open(system_, ordinal, patience)); }

  /// Opens a world over all of the test's devices, unless `config` names devices.
  caf::expected<world> try_open_world(world_config config = {});
  world open_world(world_config config = {}) { return must(try_open_world(std::move(config))); }
  caf::actor spawn_world(world_config config = {});

  /// Returns the actor of a device, which may not be ready yet.
  caf::actor device_actor(int ordinal = 0);
  caf::actor root();

private:
  config config_;
  caf::actor_system system_;
  std::vector<int> ordinals_;
  int all_ = 0;
  std::shared_ptr<void> lease_; // keeps the root actor alive after the first call of root()
};

template <class T>::testing::AssertionResult is_ok(const caf::expected<T>& x) {
  return x ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << describe(x.error());
}

template <class T> caf::error error_of(const caf::expected<T>& x) {
  return x ? caf::error{} : x.error();
}

/// Returns the result of the request. The test fails here if no result arrives within `limit`.
template <class T>
caf::expected<T> answer_of(const pending<T>& x, std::chrono::nanoseconds limit = patience) {
  auto answered =
      must(x.wait_for(std::chrono::duration_cast<std::chrono::steady_clock::duration>(limit)));
  if (!answered)
    throw std::runtime_error("a request has no answer");
  return x.result();
}

/// Accepts the bytes of `ref` as they are: a skipped request on them leaves no mark.
inline void accept_bytes(const device& on, const any_gpu_ref& ref) {
  EXPECT_TRUE(is_ok(answer_of(on.accept(ref))));
}
inline void accept_bytes(test_system& system, const any_gpu_ref& ref) {
  accept_bytes(system.open(ref.device()), ref);
}

/// Sends a message and returns the result.
template <class T, class Message>
caf::expected<T> ask(caf::actor_system& sys, const caf::actor& to, Message what) {
  caf::scoped_actor self{sys};
  return detail::ask<T>(self, to, patience, std::move(what));
}

/// Measures how long a request takes that must be completed at once.
class stopwatch {
public:
  std::chrono::nanoseconds elapsed() const { return std::chrono::steady_clock::now() - begin_; }

private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// An event that happens once, on any thread.
class flag {
public:
  void set();
  bool is_set() const;
  /// Blocks until the flag is set. Returns false if it is not set within `limit`.
  bool wait(std::chrono::nanoseconds limit = patience) const;

private:
  mutable std::mutex mutex_;
  mutable std::condition_variable condition_;
  bool set_ = false;
};

/// Counts the calls that start work. It does so with rules in the fault plan that change nothing.
/// Rules that are added to the plan later do not apply to these calls.
class launch_spy {
public:
  explicit launch_spy(std::shared_ptr<fault_plan> plan);
  std::uint64_t launched() const;

private:
  std::shared_ptr<fault_plan> plan_;
  std::vector<std::size_t> rules_;
};

// -- memory

std::vector<std::byte> random_bytes(std::size_t size, std::uint64_t seed);

/// Uploads, and fails the test if the upload fails.
void put(const device& to, const any_gpu_ref& target, std::span<const std::byte> bytes);
/// Downloads into poisoned memory. The result has no value if the download failed.
caf::expected<std::vector<std::byte>> get(const device& from, const any_gpu_ref& source);

template <class T> std::span<const std::byte> bytes_of(const std::vector<T>& x) {
  return std::as_bytes(std::span{x});
}

/// For EXPECT_TRUE: the device memory has this content.
::testing::AssertionResult holds(const device& from, const any_gpu_ref& source,
                                 std::span<const std::byte> want);
template <class T>
::testing::AssertionResult holds(const device& from, const any_gpu_ref& source,
                                 const std::vector<T>& want) {
  return holds(from, source, bytes_of(want));
}

std::vector<device> devices_of(const world& over);

/// The ranks' send buffers, and the inputs that they hold.
struct collective_data {
  input_spec spec;
  std::vector<std::vector<std::byte>> inputs;
  std::vector<any_gpu_ref> send;
};

collective_data prepare(const world& over, const input_spec& spec, std::size_t count);
/// For EXPECT_TRUE: every rank's `recv` holds the result.
::testing::AssertionResult reduced(const world& over, const collective_data& data,
                                   const std::vector<any_gpu_ref>& recv);
/// For EXPECT_TRUE: an all-reduce succeeds, with its allocations, uploads and downloads.
::testing::AssertionResult works(const world& over, std::uint64_t seed = 1);
/// For EXPECT_TRUE: an upload to the device and a download from it succeed.
::testing::AssertionResult works(const device& with, std::uint64_t seed = 1);
/// For EXPECT_TRUE: upload, copy within the device and download of this size succeed.
::testing::AssertionResult moves(const device& with, std::size_t size_bytes);

// -- notifications to subscribers

/// All messages of one type that an actor sends to its subscriber, in order.
template <class Message> class feed {
public:
  template <class Subscription>
  feed(caf::actor_system& sys, const caf::actor& to, Subscription what) : self_(sys) {
    detail::send(self_, to, std::move(what));
  }

  /// Receives until `f` is true of the latest message, and returns that message.
  template <class F> Message until(F f) {
    while (seen_.empty() || !f(seen_.back())) {
      bool late = false;
      self_->receive([&](const Message& x) { seen_.push_back(x); },
                     caf::after(patience) >> [&] { late = true; });
      if (late)
        throw std::runtime_error("what a test waits for was not told");
    }
    return seen_.back();
  }

  const std::vector<Message>& seen() const noexcept { return seen_; }

private:
  caf::scoped_actor self_;
  std::vector<Message> seen_;
};

class world_feed : public feed<world_status> {
public:
  world_feed(caf::actor_system& sys, const caf::actor& to) : feed(sys, to, subscribe{}) {}

  using feed::until;
  world_status until(world_phase phase, std::uint64_t from_epoch = 0) {
    return feed::until(
        [&](const world_status& x) { return x.phase == phase && x.epoch >= from_epoch; });
  }
};

class device_feed : public feed<device_changed> {
public:
  device_feed(caf::actor_system& sys, const caf::actor& to) : feed(sys, to, watch_generation{}) {}

  using feed::until;
  device_changed until(device_phase phase, std::uint64_t from_incarnation = 0) {
    return feed::until([&](const device_changed& x) {
      return x.phase == phase && x.incarnation >= from_incarnation;
    });
  }
};

class graph_feed : public feed<p2p_graph> {
public:
  graph_feed(caf::actor_system& sys, const caf::actor& to) : feed(sys, to, subscribe{}) {}
};

} // namespace troupe::testing

/// At the start of a test that needs faults or settings that only the host backend has.
#define TROUPE_HOST_ONLY(reason)                                                                   \
  do {                                                                                             \
    if (::troupe::testing::on_cuda())                                                              \
      GTEST_SKIP() << "on the host backend only: " << (reason);                                    \
  } while (false)

/// At the start of a test of behaviour that exists only if the device lives in this process.
#define TROUPE_IN_PROCESS_ONLY(reason)                                                             \
  do {                                                                                             \
    if (::troupe::testing::in_workers())                                                           \
      GTEST_SKIP() << "not with devices in worker processes: " << (reason);                        \
  } while (false)

/// At the start of a test that needs several devices.
#define TROUPE_NEEDS_DEVICES(n)                                                                    \
  do {                                                                                             \
    if (::troupe::testing::on_cuda())                                                              \
      TROUPE_NEEDS_GPUS(n);                                                                        \
  } while (false)
