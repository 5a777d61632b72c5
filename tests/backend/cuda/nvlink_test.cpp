#include "backend/cuda/nvlink.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace troupe::testing {

namespace {

using detail::count_nvlinks;
using detail::nvlink_end;
using detail::pci_address;

constexpr pci_address gpu_a{0, 0x1b, 0};
constexpr pci_address gpu_b{0, 0x3d, 0};
constexpr pci_address gpu_c{1, 0x3d, 0};

/// Returns `number` links to `x`.
std::vector<nvlink_end> links_to(const pci_address& x, int number) {
  return std::vector<nvlink_end>(static_cast<std::size_t>(number), {false, x});
}

std::vector<nvlink_end> links_to_switches(int number) {
  return std::vector<nvlink_end>(static_cast<std::size_t>(number), {true, {}});
}

TEST(Nvlink, AddressesAreReadInBothForms) {
  EXPECT_EQ(pci_address::parse("0000:1b:00.0"), gpu_a);
  EXPECT_EQ(pci_address::parse("00000000:1B:00.0"), gpu_a);
  EXPECT_EQ(pci_address::parse("00000001:3D:00.0"), gpu_c);
  for (const auto* bad : {"", "1b", "0000:1b:00", "0000:1b", "zz:1b:00.0", "0000:1b:00:0"})
    EXPECT_FALSE(pci_address::parse(bad)) << bad;
}

TEST(Nvlink, CountsThoseThatLeadThere) {
  auto from = links_to(gpu_b, 4);
  const auto more = links_to(gpu_c, 2);
  from.insert(from.end(), more.begin(), more.end());
  EXPECT_EQ(count_nvlinks(from, gpu_a, links_to(gpu_a, 4), gpu_b), 4);
  EXPECT_EQ(count_nvlinks(from, gpu_a, links_to(gpu_a, 2), gpu_c), 2);
  EXPECT_EQ(count_nvlinks(from, gpu_a, links_to(gpu_b, 2), gpu_c), 0);
  EXPECT_EQ(count_nvlinks({}, gpu_a, {}, gpu_b), 0);
}

TEST(Nvlink, ASwitchConnectsAllThatAreOnIt) {
  EXPECT_EQ(count_nvlinks(links_to_switches(18), gpu_a, links_to_switches(18), gpu_b), 18);
  EXPECT_EQ(count_nvlinks(links_to_switches(18), gpu_a, links_to_switches(17), gpu_b), 17);
  EXPECT_EQ(count_nvlinks(links_to_switches(18), gpu_a, links_to(gpu_a, 2), gpu_b), 0);
}

TEST(Nvlink, WithoutNvmlNobodyKnows) {
  // PCI cannot have this address, so NVML, if it is installed, knows no GPU there.
  EXPECT_FALSE(detail::nvlinks_between("ffff:ff:1f.0", "ffff:ff:1e.0"));
  EXPECT_FALSE(detail::nvlinks_between("no address", "0000:1b:00.0"));
}

} // namespace

} // namespace troupe::testing
