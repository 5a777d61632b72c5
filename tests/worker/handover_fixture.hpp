/// Devices in workers that are handed over to their spares.
#pragma once

#include "support/eventually.hpp"
#include "support/forwarding_backend.hpp"
#include "support/worker_losses.hpp"
#include <troupe/worker.hpp>

#include <gtest/gtest.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

namespace troupe::testing {

using elements = std::vector<std::uint32_t>;

inline constexpr std::size_t count = std::size_t{1} << 14;

inline elements counted(std::uint32_t from) {
  elements result(count);
  std::iota(result.begin(), result.end(), from);
  return result;
}

inline gpu_ref<std::uint32_t> filled(const device& on, const elements& content) {
  auto result = must(on.allocate<std::uint32_t>(content.size()));
  must(answer_of(on.upload(result, host_buffer{content})));
  return result;
}

inline std::int64_t worker_of(const device& x) { return must(answer_of(x.stats())).worker_pid; }

inline bool is_there(std::int64_t process) {
  return ::kill(static_cast<pid_t>(process), 0) == 0 || errno != ESRCH;
}

inline void kill_now(std::int64_t process) {
  ASSERT_EQ(::kill(static_cast<pid_t>(process), SIGKILL), 0);
}

/// Calls of the test around the move of a device, on its lane.
struct around_moves {
  std::function<void()> before = [] {};
  std::function<void()> after = [] {};
  bool loses_memory = false;
};

/// Returns the processes that this one has started and that have not been reaped.
inline std::set<std::int64_t> children() {
  std::set<std::int64_t> result;
  for (const auto& x : std::filesystem::directory_iterator{"/proc/self/task"}) {
    std::ifstream in{x.path() / "children"};
    for (std::int64_t id = 0; in >> id;)
      result.insert(id);
  }
  return result;
}

class seen_device : public forwarding_device {
public:
  seen_device(std::unique_ptr<backend_device> inner, std::shared_ptr<around_moves> seen)
      : forwarding_device(std::move(inner)), seen_(std::move(seen)) {}
  caf::error move_to_spare() noexcept override {
    seen_->before();
    auto error = inner_->move_to_spare();
    seen_->after();
    return error;
  }
  caf::error take_over() noexcept override {
    return seen_->loses_memory ? make_error(errc::out_of_memory, "on purpose")
                               : inner_->take_over();
  }

private:
  std::shared_ptr<around_moves> seen_;
};

class seen_backend : public forwarding_backend {
public:
  seen_backend(std::shared_ptr<backend> inner, std::shared_ptr<around_moves> seen)
      : forwarding_backend(std::move(inner)), seen_(std::move(seen)) {}
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<seen_device>(ordinal, seen_);
  }

private:
  std::shared_ptr<around_moves> seen_;
};

class HandoverTest : public ::testing::Test {
protected:
  void start(int devices = 2, kept_memory keeps = kept_memory::after_end) {
    system_ = std::make_unique<test_system>(system_options{
        .devices = devices, .wrap = [=, this](std::shared_ptr<backend>) {
          return std::make_shared<behind_doors>(
              std::make_shared<seen_backend>(make_workers(devices, keeps), moves_), ways_);
        }});
    device_ = system_->open(0);
  }

  world open_with_spares() {
    world_config config;
    config.limits.standby = standby_policy::full;
    return system_->open_world(config);
  }

  std::shared_ptr<doors> ways_ = std::make_shared<doors>();
  std::shared_ptr<around_moves> moves_ = std::make_shared<around_moves>();
  std::unique_ptr<test_system> system_;
  device device_;
};

} // namespace troupe::testing
