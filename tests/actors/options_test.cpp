/// What a program's command line changes.

#include "support/eventually.hpp"
#include "support/parsed_config.hpp"
#include "support/world_fixture.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
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
    auto x = d.fill(ref, 1);
    if (!x.ready())
      all.push_back(x);
    return all.size();
  };
  EXPECT_TRUE(eventually([&] { return accepted() == 3 + 4; }));
  EXPECT_TRUE(has_code(answer_of(d.fill(ref, 1)), errc::overloaded));
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

} // namespace

} // namespace troupe::testing
