// The commands for registered launches, between a device and the service of its worker. Both are in
// this process.

#include "support/expect.hpp"
#include "support/forwarding_backend.hpp"
#include "support/one_device_pool.hpp"
#include "worker/parent/remote_device.hpp"
#include "worker/worker_in_process.hpp"
#include <troupe/launch.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {
namespace {

using detail::command;
using detail::launch_request;
using detail::shared_place;
using detail::worker_link;
using namespace std::chrono_literals;

constexpr const char* judged = "troupe.testing.commands.judged";
constexpr const char* plain = "troupe.testing.commands.plain";

std::atomic<int> enqueued{0};
std::atomic<int> prepared{0};

caf::error count_enqueued(launch_context&, std::span<const launch_memory>,
                          std::span<const launch_memory>, std::span<const std::byte>) {
  ++enqueued;
  return {};
}
caf::error count_prepared(launch_context&, std::span<const launch_memory>,
                          std::span<const launch_memory>, std::span<const std::byte>) {
  ++prepared;
  return {};
}

[[maybe_unused]] const bool registered = [] {
  must(register_launch(judged, library_launch{.enqueue = count_enqueued,
                                              .prepare = count_prepared,
                                              .judge = [](std::int32_t) { return caf::error{}; }}));
  must(register_launch(plain, library_launch{.enqueue = count_enqueued}));
  return true;
}();

/// A worker that takes no command.
std::shared_ptr<worker_link> hanging_worker(std::chrono::nanoseconds limit) {
  const auto area = std::make_shared<detail::link_area>();
  auto result =
      std::make_shared<worker_link>(0, *area, area, std::make_unique<to_service>(nullptr));
  result->set_request_limit(limit);
  return result;
}

class LaunchCommands : public WorkerInProcess {
protected:
  LaunchCommands()
      : WorkerInProcess(make_host_backend({.devices = 1, .bytes_per_device = 1 << 20})) {}
};

/// The worker lets a library write to the word of a verdict.
TEST_F(LaunchCommands, AreCheckedForTheirVerdicts) {
  detail::shared_segments segments;
  auto* memory = must(segments.create(4096));
  const auto word = must(segments.place_of(memory, 4, *link_));
  const auto stream = must(link_->ask(command::create_stream)).get<detail::stream_id>();
  const auto ask = [&](command what, const char* name, std::vector<shared_place> verdict) {
    detail::wire_writer request;
    request.put(launch_request{name, {}, {}, {}, stream, std::move(verdict)});
    const auto done = link_->ask_bytes(what, request.bytes());
    return done ? caf::error{} : done.error();
  };
  enqueued = prepared = 0;
  EXPECT_TRUE(is_ok(ask(command::launch, judged, {word})));
  EXPECT_TRUE(is_ok(ask(command::launch, plain, {})));
  EXPECT_TRUE(is_ok(ask(command::prepare_launch, judged, {})));
  EXPECT_EQ(enqueued, 2);
  EXPECT_EQ(prepared, 1);
  EXPECT_TRUE(ask(command::launch, judged, {})); // there is nothing to write to
  EXPECT_TRUE(ask(command::launch, plain, {word}));
  EXPECT_TRUE(ask(command::launch, judged, {word, word}));
  EXPECT_TRUE(ask(command::prepare_launch, judged, {word}));
  for (const std::uint64_t offset : {1, 2, 3, 4093, 4094, 4096})
    EXPECT_TRUE(ask(command::launch, judged, {{word.segment, offset}})) << offset;
  EXPECT_TRUE(ask(command::launch, judged, {{word.segment + 1, 0}}));
  EXPECT_EQ(enqueued, 2);
  EXPECT_EQ(prepared, 1);
  EXPECT_FALSE(link_->lost()) << describe(link_->loss());
  must(segments.remove(memory));
}

/// The spare prepares launches in advance. If it hangs, the device's lane does not wait for it.
TEST_F(LaunchCommands, AHangingSpareHoldsUpNoLane) {
  constexpr auto limit = 1s;
  const auto spare = hanging_worker(limit);
  detail::remote_device device{std::make_shared<one_device_pool>(link_, spare), 0,
                               kept_memory::none};
  must(device.bind());
  const auto stream = must(device.create_stream());
  prepared = 0;
  for (int i = 0; i < 20; ++i) { // together they do not fit into the ring
    const std::vector<std::byte> arguments(200'000, static_cast<std::byte>(i));
    must(device.prepare_registered({.name = judged, .arguments = arguments}, stream));
  }
  EXPECT_EQ(prepared, 20);
  EXPECT_FALSE(spare->lost()) << describe(spare->loss());
  must(device.destroy_stream(stream));
}

} // namespace
} // namespace troupe::testing
