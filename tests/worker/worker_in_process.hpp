/// A device's link and the service of its worker, both in this process.
#pragma once

#include "support/expect.hpp"
#include "worker/child/worker_service.hpp"
#include "worker/parent/worker_link.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include <fcntl.h>

namespace troupe::testing {

/// Passes messages to a service of this process, if there is one.
class to_service final : public detail::control_sender {
public:
  explicit to_service(detail::worker_service* x) : service_(x) {}
  caf::error send(std::span<const std::byte> message,
                  std::optional<int> descriptor) noexcept override {
    std::optional<detail::file_descriptor> passed;
    if (descriptor)
      passed.emplace(::fcntl(*descriptor, F_DUPFD_CLOEXEC, 0));
    if (service_ != nullptr)
      service_->received(message, std::move(passed));
    return {};
  }

private:
  detail::worker_service* const service_;
};

class WorkerInProcess : public ::testing::Test {
protected:
  explicit WorkerInProcess(std::shared_ptr<backend> executes)
      : service_(std::move(executes), *area_, options()) {
    must(service_.open());
    driver_ = std::thread{[this] { service_.run(); }};
  }
  ~WorkerInProcess() override {
    link_->lose(make_error(errc::worker_lost, "the test is over"));
    service_.stop();
    driver_.join();
  }

  detail::service_options options() {
    detail::service_options result;
    result.send = [this](std::span<const std::byte> x, std::optional<int>) {
      link_->received(x);
      return caf::error{};
    };
    result.on_fault = [](const caf::error& why) { ADD_FAILURE() << describe(why); };
    return result;
  }

  const std::shared_ptr<detail::link_area> area_ = std::make_shared<detail::link_area>();
  detail::worker_service service_;
  const std::shared_ptr<detail::worker_link> link_ = std::make_shared<detail::worker_link>(
      0, *area_, area_, std::make_unique<to_service>(&service_));
  std::thread driver_;
};

} // namespace troupe::testing
