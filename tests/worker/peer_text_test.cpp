// Text that a worker writes or sends, as its parent reads it.

#include "support/expect.hpp"
#include "support/forwarding_backend.hpp"
#include "support/hostile_text.hpp"
#include "support/one_device_pool.hpp"
#include "worker/child/worker_service.hpp"
#include "worker/parent/remote_device.hpp"
#include "worker/parent/worker_link.hpp"
#include "worker/protocol/worker_page.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <span>
#include <thread>

namespace troupe::testing {
namespace {

using detail::worker_link;

TEST(PeerText, IsInTheReportOfAWorker) {
  detail::report_area area;
  area.write(-5, hostile_text(), 0);
  const auto report = area.read();
  ASSERT_TRUE(report);
  EXPECT_TRUE(report->text.starts_with(hostile_begin)) << report->text;
  EXPECT_TRUE(is_one_line(report->text, 1024));
}

TEST(PeerText, IsInTheRefusalOfAWorker) {
  auto hello = detail::make_hello();
  hello.refuse(hostile_text());
  const auto got = detail::read_hello(hello.bytes(), "the worker");
  ASSERT_FALSE(got);
  const auto text = describe(got.error());
  EXPECT_NE(text.find(hostile_begin), std::string::npos) << text;
  EXPECT_TRUE(is_one_line(text)) << text;
}

class misnamed_device final : public forwarding_device {
public:
  using forwarding_device::forwarding_device;
  caf::expected<device_properties> properties() noexcept override {
    auto result = forwarding_device::properties();
    if (result)
      result->name = result->pci_id = hostile_text().substr(0, 2000);
    return result;
  }
};

class misnamed_backend final : public forwarding_backend {
public:
  using forwarding_backend::forwarding_backend;
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<misnamed_device>(ordinal);
  }
};

class no_control final : public detail::control_sender {
public:
  caf::error send(std::span<const std::byte>, std::optional<int>) noexcept override { return {}; }
  void kill() noexcept override {}
};

TEST(PeerText, IsInTheNameOfADevice) {
  const auto area = std::make_shared<detail::link_area>();
  detail::service_options options;
  options.send = [](std::span<const std::byte>, std::optional<int>) { return caf::error{}; };
  options.on_fault = [](const caf::error& why) { ADD_FAILURE() << describe(why); };
  detail::worker_service service{std::make_shared<misnamed_backend>(make_host_backend(
                                     {.devices = 1, .bytes_per_device = 1 << 20})),
                                 *area, options};
  must(service.open());
  std::thread driver{[&] { service.run(); }};
  const auto link = std::make_shared<worker_link>(0, *area, area, std::make_unique<no_control>());
  {
    detail::remote_device device{std::make_shared<one_device_pool>(link), 0, kept_memory::none};
    must(device.bind());
    const auto got = must(device.properties());
    for (auto* name : {&got.name, &got.pci_id}) {
      EXPECT_TRUE(name->starts_with(hostile_begin)) << *name;
      EXPECT_TRUE(is_one_line(*name, 256));
    }
    link->lose(make_error(errc::worker_lost, "the test is over"));
  }
  service.stop();
  driver.join();
}

} // namespace
} // namespace troupe::testing
