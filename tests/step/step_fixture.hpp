/// A world for tests of steps.
#pragma once

#include "support/forwarding_backend.hpp"
#include "support/world_fixture.hpp"
#include <troupe/troupe.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

using element = std::uint32_t;
using row = std::vector<element>;
using rows = std::vector<row>;
using refs = std::vector<gpu_ref<element>>;

inline constexpr std::size_t count = 12;

/// Lets all steps run as their requests, also on GPUs.
class backend_without_graphs final : public forwarding_backend {
public:
  explicit backend_without_graphs(std::shared_ptr<backend> inner)
      : forwarding_backend(std::move(inner)) {}
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<device>(ordinal);
  }

private:
  class device final : public forwarding_device {
  public:
    using forwarding_device::forwarding_device;
    bool records_graphs() const noexcept override { return false; }
  };
};

inline std::shared_ptr<backend> without_graphs(std::shared_ptr<backend> inner) {
  return std::make_shared<backend_without_graphs>(std::move(inner));
}

class Step : public ::testing::Test {
protected:
  explicit Step(system_options options = {.devices = 3, .wrap = without_graphs},
                const world_config& config = {})
      : system_(std::move(options)), w_(system_.open_world(config)) {}

  void SetUp() override { TROUPE_NEEDS_DEVICES(2); }

  refs allocate(std::size_t n = count) { return must(w_.allocate<element>(n)); }
  refs filled(element value, std::size_t n = count) {
    auto result = allocate(n);
    must(answer_of(w_.fill(result, value)));
    return result;
  }
  rows random_rows(std::size_t n = count) {
    rows result(w_.size(), row(n));
    for (auto& x : result)
      for (auto& y : x)
        y = static_cast<element>(random_());
    return result;
  }
  rows same(element value, std::size_t n = count) const { return rows(w_.size(), row(n, value)); }
  rows content(const refs& x) { return must(w_.download(x)); }
  int last() const { return static_cast<int>(w_.size()) - 1; }

  test_system system_;
  world w_;
  std::mt19937_64 random_{7};
};

inline std::string text_of(const caf::error& x) { return describe(x); }

} // namespace troupe::testing
