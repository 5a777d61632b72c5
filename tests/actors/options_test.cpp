/// Effects of a program's command line.

#include "actors/system.hpp"
#include "support/eventually.hpp"
#include "support/parsed_config.hpp"
#include "support/world_fixture.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <chrono>
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
  const auto accepted = [&] { // a request beyond the bound is refused at once
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

/// Returns the error that a program with these options gets when it lists devices.
caf::error refusal_of(std::vector<std::string> arguments) {
  parsed_config cfg{std::move(arguments)};
  caf::actor_system system{cfg};
  return error_of(list_devices(system));
}

TEST(Options, OutOfRangeAreRefusedByName) {
  for (auto& [option, range] : {
           std::pair{"troupe.devices=4294967297", "from 1 to 1024"},
           {"troupe.devices=3000000000", "from 1 to 1024"},
           {"troupe.devices=1025", "from 1 to 1024"},
           {"troupe.devices=0", "from 1 to 1024"},
           {"troupe.devices=-1", "from 1 to 1024"},
           {"troupe.in-flight=0", "from 1 to 1024"},
           {"troupe.in-flight=1025", "from 1 to 1024"},
           {"troupe.in-flight=-3", "from 1 to 1024"},
           {"troupe.keep-freed=-2", "from -1 to 86400000"},
           {"troupe.keep-freed=9223372036854775807", "from -1 to 86400000"},
           {"troupe.queue=0", "at least 1"},
           {"troupe.queue=-1", "at least 1"},
           {"troupe.spin=-1", "from 0 to 3600000000"},
           {"troupe.spin=9223372036854775807", "from 0 to 3600000000"},
           {"troupe.client-spin=-1", "from 0 to 3600000000"},
           {"troupe.client-spin=9223372036854775807", "from 0 to 3600000000"},
           {"troupe.hosts.port=65536", "from 0 to 65535"},
           {"troupe.hosts.port=-1", "from 0 to 65535"},
           {"troupe.hosts.count=0", "from 1 to 1024"},
           {"troupe.hosts.count=4294967297", "from 1 to 1024"},
           {"troupe.hosts.join-limit=0", "from 1 to 31536000"},
           {"troupe.hosts.join-limit=9223372036854775807", "from 1 to 31536000"},
           {"troupe.hosts.link-limit=-1", "from 1 to 86400000"},
           {"troupe.hosts.link-limit=9223372036854775807", "from 1 to 86400000"},
       })
    EXPECT_EQ(describe(refusal_of({"--" + std::string{option}})),
              "invalid_argument: " + std::string{option} + " is out of range: it is " + range);
  // The limits of each range are accepted.
  for (auto* option :
       {"troupe.devices=1", "troupe.devices=1024", "troupe.in-flight=1", "troupe.in-flight=1024",
        "troupe.queue=9223372036854775807", "troupe.spin=0", "troupe.client-spin=0"})
    EXPECT_TRUE(is_ok(refusal_of({"--" + std::string{option}}))) << option;
  for (auto* option :
       {"--troupe.keep-freed=-1", "--troupe.keep-freed=0", "--troupe.keep-freed=86400000"})
    EXPECT_TRUE(is_ok(refusal_of({"--troupe.backend=auto", option}))) << option;
}

TEST(Options, WithoutEffectAreRefusedByName) {
  const auto refused = [](std::vector<std::string> arguments, const char* text) {
    EXPECT_EQ(describe(refusal_of(std::move(arguments))), std::string{"invalid_argument: "} + text);
  };
  refused({"--troupe.backend=cuda", "--troupe.devices=3"},
          "troupe.devices=3 has no effect with troupe.backend=cuda: it is for virtual devices");
  refused(
      {"--troupe.keep-freed=5"},
      "troupe.keep-freed=5 has no effect with troupe.backend=host: it is for GPUs, and for devices "
      "in workers");
  refused({"--troupe.hosts.port=4711"},
          "troupe.hosts.port=4711 has no effect without troupe.hosts.listen");
  refused({"--troupe.hosts.count=2"},
          "troupe.hosts.count=2 has no effect without troupe.hosts.listen");
  refused({"--troupe.hosts.join-limit=2"},
          "troupe.hosts.join-limit=2 has no effect without troupe.hosts.listen");
  refused({"--troupe.hosts.link-limit=2"},
          "troupe.hosts.link-limit=2 has no effect without troupe.hosts.listen");
  refused({"--troupe.hosts.names=a,b"},
          "troupe.hosts.names=a,b has no effect without troupe.hosts.listen");
  refused({"--troupe.hosts.listen=127.0.0.1"},
          "troupe.hosts.listen=127.0.0.1 needs troupe.placement=worker");
}

TEST(Options, SettingsOutOfRangeAreRefusedByName) {
  const auto refused = [](auto change, const char* text) {
    parsed_config cfg{std::vector<std::string>{}};
    change(static_cast<config&>(cfg));
    caf::actor_system system{cfg};
    const auto why = error_of(list_devices(system));
    EXPECT_TRUE(has_code(why, errc::invalid_argument)) << text;
    EXPECT_NE(describe(why).find(text), std::string::npos) << describe(why);
    EXPECT_EQ(describe(error_of(device::open(system, 0))), describe(why));
  };
  refused([](auto& x) { x.lanes.in_flight_limit = 0; }, "lane_options::in_flight_limit=0 ");
  refused([](auto& x) { x.lanes.in_flight_limit = ~std::size_t{0}; },
          "lane_options::in_flight_limit=9223372036854775807 ");
  refused([](auto& x) { x.lanes.queue_limit = 0; }, "lane_options::queue_limit=0 ");
  refused([](auto& x) { x.lanes.open_attempts = 0; }, "lane_options::open_attempts=0 ");
  refused([](auto& x) { x.lanes.open_backoff = -1ms; }, "lane_options::open_backoff=-1 ms ");
  refused([](auto& x) { x.lanes.spin = -1us; }, "lane_options::spin=-1 us ");
  refused([](auto& x) { x.lanes.client_spin = std::chrono::microseconds::max(); },
          "lane_options::client_spin=9223372036854775807 us ");
  refused([](auto& x) { x.host.devices = -1; }, "host_backend_options::devices=-1 ");
  refused([](auto& x) { x.host.devices = 2'000'000'000; },
          "host_backend_options::devices=2000000000 ");
  refused([](auto& x) { x.host.links = {{.from = 0, .to = 8}}; }, "host_link to or from device=8 ");
  refused([](auto& x) { x.cuda.keep_freed = -1ms; }, "cuda_backend_options::keep_freed=-1 ms ");
  refused([](auto& x) { x.flight_record.files = 0; }, "flight_record_options::files=0 ");
  refused([](auto& x) { x.device_deadline = 0s; }, "config::device_deadline=0 s ");
  refused([](auto& x) { x.device_deadline = -1s; }, "config::device_deadline=-1 s ");
  const auto refused_in_workers = [&](auto change, const char* text) {
    refused(
        [&](auto& x) {
          x.placement = placement::worker_process;
          change(x.workers);
        },
        text);
  };
  refused_in_workers([](auto& x) { x.start_limit = 0s; }, "worker_settings::start_limit=0 s ");
  refused_in_workers([](auto& x) { x.stuck_limit = -1s; }, "worker_settings::stuck_limit=-1 s ");
  refused_in_workers([](auto& x) { x.call_limit = -1s; }, "worker_settings::call_limit=-1 s ");
  refused_in_workers([](auto& x) { x.build_limit = -1s; }, "worker_settings::build_limit=-1 s ");
}

TEST(Options, HelpIsPrintedAndTold) {
  for (auto* option : {"--help", "--long-help"}) {
    ::testing::internal::CaptureStdout();
    parsed_config cfg{{option}};
    const auto printed = ::testing::internal::GetCapturedStdout();
    EXPECT_TRUE(cfg.help_printed()) << option;
    EXPECT_NE(printed.find("--long-help"), std::string::npos) << printed;
  }
  EXPECT_FALSE(parsed_config{{"--troupe.devices=1"}}.help_printed());
  EXPECT_FALSE(config{}.help_printed());
}

TEST(Options, ThatCannotBeParsedAreTold) {
  const auto text = [](std::string argument) {
    config cfg;
    std::vector<std::string> arguments{std::move(argument)};
    return describe(cfg.parse(arguments));
  };
  EXPECT_EQ(text("--troupe.devcies=2"), "command line: --troupe.devcies=2: the option is unknown");
  EXPECT_EQ(text("--troupe.devices=two"),
            "command line: --troupe.devices=two: the value is malformed or of another type");
}

/// Runs a program that does not name a backend.
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
    list = must(list_devices(system)); // logs nothing more
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
