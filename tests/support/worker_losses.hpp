/// Devices in worker processes, and helpers for tests that kill a worker.
#pragma once

#include "support/doors.hpp"
#include "support/launches.hpp"
#include "support/world_fixture.hpp"
#include <troupe/worker.hpp>

#include <cstddef>
#include <memory>
#include <vector>

namespace troupe::testing {

/// Makes the devices of the test's backend, each in its own worker.
inline std::shared_ptr<backend> make_workers(int devices,
                                             kept_memory keeps = kept_memory::after_end) {
  worker_backend_options options{.backend = on_cuda() ? "cuda" : "host",
                                 .host = {.devices = devices}};
  options.workers.keep_memory = keeps;
  return must(make_worker_backend(options));
}

inline system_options in_worker_processes(int devices) {
  return {.devices = devices,
          .wrap = [=](std::shared_ptr<backend>) { return make_workers(devices); }};
}

inline system_options in_worker_processes(int devices, const std::shared_ptr<doors>& ways) {
  return {.devices = devices, .wrap = [=](std::shared_ptr<backend>) {
            return std::make_shared<behind_doors>(make_workers(devices), ways);
          }};
}

/// Kills the device's worker. Returns the error that reports the loss.
inline caf::error kill_worker(const device& of) { return error_of(answer_of(launch_death(of))); }

/// Memory whose content must not change, whichever other device is lost.
class other_memory {
public:
  explicit other_memory(device on) : on_(std::move(on)), ref_(must(on_.allocate<float>(size))) {
    must(answer_of(on_.fill(ref_, content)));
  }
  /// For EXPECT_TRUE.
  ::testing::AssertionResult is_there() const {
    if (ref_.stale())
      return ::testing::AssertionFailure() << "it is stale";
    return holds(on_, ref_, std::vector<float>(size, content));
  }

private:
  static constexpr std::size_t size = 1000;
  static constexpr float content = 4;

  device on_;
  gpu_ref<float> ref_;
};

/// Kills the worker of rank `lost`. The device must come back, and rank `other` is not affected.
/// @param keeps whether the lost device keeps its memory
/// @return the error that reported the loss
inline caf::error is_lost_alone(test_system& system, const world& w, std::size_t lost,
                                std::size_t other, bool keeps = true) {
  const auto d = w.device_of(lost);
  device_feed feed{system, system.device_actor(d.ordinal())};
  const other_memory kept{w.device_of(other)};
  auto memory = must(d.allocate<float>(1000));
  const auto before = feed.until(device_phase::ready);
  auto why = kill_worker(d);
  EXPECT_EQ(code_of(why), errc::worker_lost);
  const auto now = feed.until(device_phase::ready, before.incarnation + 1);
  EXPECT_EQ(now.incarnation, before.incarnation + 1);
  EXPECT_EQ(now.generation, before.generation + (keeps ? 0 : 1));
  EXPECT_EQ(memory.stale(), !keeps);
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(kept.is_there());
  return why;
}

/// Kills a rank's worker. Expects that its spare becomes the device.
/// @param before the world's status, with its standbys ready
/// @param keeps  whether the device keeps its memory
inline void spare_takes_over(const world& w, world_feed& feed, std::size_t rank,
                             const world_status& before, bool keeps = true) {
  EXPECT_EQ(code_of(kill_worker(w.device_of(rank))), errc::worker_lost);
  const auto now = feed.until(world_phase::ready, before.epoch + 1);
  EXPECT_FALSE(now.standby_ready);
  EXPECT_EQ(now.membership, before.membership + 1);
  auto members = before.members;
  ++members[rank].incarnation;
  members[rank].generation += keeps ? 0 : 1;
  EXPECT_EQ(now.members, members);
}

} // namespace troupe::testing
