/// What a program's command line changes.

#include "actors/system.hpp"
#include "support/eventually.hpp"
#include "support/parsed_config.hpp"
#include "support/world_fixture.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

TEST(Options, BoundWhatADeviceTakes) {
  parsed_config cfg{{"--troupe.devices=1", "--troupe.in-flight=3", "--troupe.queue=4",
                     "--troupe.completion=host_func", "--troupe.spin=50",
                     "--troupe.client-spin=60"}};
  caf::actor_system system{cfg};
  EXPECT_EQ(all_devices(system).size(), 1U);
  auto d = must(device::open(system, 0));
  auto ref = must(d.allocate<std::int32_t>(1));
  gate stream;
  std::vector<pending<void>> all{stream.hold_stream(d)};
  const auto accepted = [&] { // what is behind the bound is refused at once
    auto x = d.fill(ref, 1, {.room = room_policy::refuse});
    if (!x.ready())
      all.push_back(x);
    return all.size();
  };
  EXPECT_TRUE(eventually([&] { return accepted() == 3 + 4; }));
  EXPECT_TRUE(has_code(answer_of(d.fill(ref, 1, {.room = room_policy::refuse})), errc::overloaded));
  stream.open();
  for (auto& x : all)
    EXPECT_TRUE(is_ok(answer_of(x)));
}

TEST(Options, ThatSayNothingAreRefusedWithWhatThereIs) {
  for (auto* x : {"completion", "backend", "placement"}) {
    parsed_config cfg{{"--troupe." + std::string{x} + "=nonsense"}};
    caf::actor_system system{cfg};
    auto opened = device::open(system, 0);
    ASSERT_TRUE(has_code(opened, errc::invalid_argument)) << x;
    EXPECT_NE(describe(opened.error()).find("not nonsense"), std::string::npos)
        << describe(opened.error());
  }
}

/// A program that has said nothing of a backend.
std::vector<std::string> lines_of_a_plain_program(log_level level, device_list& list) {
  std::vector<std::string> lines;
  std::mutex mutex;
  set_log_sink([&](const log_line& x) {
    std::lock_guard lock{mutex};
    if (x.level == level)
      lines.emplace_back(x.text);
  });
  {
    config cfg;
    caf::actor_system system{cfg};
    list = must(list_devices(system));
    list = must(list_devices(system)); // which says nothing more
  }
  set_log_sink({});
  return lines;
}

TEST(Options, WhyThereIsNoCudaIsSaidOnce) {
  for (auto level : {log_level::info, log_level::warning}) {
    device_list list;
    auto lines = lines_of_a_plain_program(level, list);
    std::size_t said = 0;
    for (auto& x : lines)
      said += list.reason.empty() ? 0 : x.find(list.reason) != std::string::npos;
    const auto why = make_error(errc::unavailable, list.reason);
    const bool expected = list.backend == "host" && detail::level_without_cuda(why) == level;
    EXPECT_EQ(said, expected ? 1U : 0U);
    EXPECT_EQ(list.backend == "host", !list.reason.empty());
  }
}

TEST(Options, ABrokenDriverIsAWarning) {
  auto level_of = [](errc code, const char* detail, const char* name) {
    failure x;
    x.code = code;
    x.detail = detail;
    x.api = "cudaGetDeviceCount";
    x.native_name = name;
    return detail::level_without_cuda(make_error(std::move(x)));
  };
  const auto no_driver = "this program has CUDA 13.0, and there is no driver";
  const auto old_driver = "this program has CUDA 13.0, the driver is for up to 12.4";
  EXPECT_EQ(level_of(errc::unavailable, no_driver, "cudaErrorInsufficientDriver"), log_level::info);
  EXPECT_EQ(level_of(errc::unavailable, old_driver, "cudaErrorNoDevice"), log_level::info);
  EXPECT_EQ(level_of(errc::not_supported, "troupe was built without CUDA", ""), log_level::info);
  EXPECT_EQ(level_of(errc::unavailable, old_driver, "cudaErrorInsufficientDriver"),
            log_level::warning);
  EXPECT_EQ(level_of(errc::unavailable, old_driver, "cudaErrorSystemNotReady"), log_level::warning);
  EXPECT_EQ(detail::level_without_cuda(make_error(errc::unavailable, "NCCL 2.10 was loaded")),
            log_level::warning);
}

} // namespace

} // namespace troupe::testing
