#include "backend/cuda/nvlink.hpp"

#include "foundation/never_destroyed.hpp"

#include <algorithm>
#include <charconv>
#include <vector>

#include <dlfcn.h>

namespace troupe::detail {

std::optional<pci_address> pci_address::parse(std::string_view text) noexcept {
  pci_address result;
  auto number = [&](unsigned& x, char end) {
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), x, 16);
    const auto length = static_cast<std::size_t>(rest - text.data());
    if (error != std::errc{} || length >= text.size() || *rest != end)
      return false;
    text.remove_prefix(length + 1);
    return true;
  };
  if (!number(result.domain, ':') || !number(result.bus, ':') || !number(result.device, '.'))
    return std::nullopt;
  return result;
}

int count_nvlinks(std::span<const nvlink_end> from, const pci_address& from_address,
                  std::span<const nvlink_end> to, const pci_address& to_address) noexcept {
  const auto leading_to = [](std::span<const nvlink_end> ends, const pci_address& x) {
    return std::count_if(ends.begin(), ends.end(),
                         [&](const nvlink_end& e) { return !e.is_switch && e.gpu == x; });
  };
  const auto to_switches = [](std::span<const nvlink_end> ends) {
    return std::count_if(ends.begin(), ends.end(), [](const nvlink_end& e) { return e.is_switch; });
  };
  const auto direct = std::min(leading_to(from, to_address), leading_to(to, from_address));
  return static_cast<int>(direct != 0 ? direct : std::min(to_switches(from), to_switches(to)));
}

namespace {

/// The used part of NVML, whose header may be missing. Names and layouts follow its ABI.
/// @source NVML API reference, "NvLink Methods", "Device Queries"
struct nvml_pci_info {
  char bus_id_legacy[16];
  unsigned domain;
  unsigned bus;
  unsigned device;
  unsigned pci_device_id;
  unsigned pci_subsystem_id;
  char bus_id[32];
};
using nvml_device = void*;
constexpr int nvml_success = 0;
constexpr int nvml_enabled = 1;
constexpr unsigned nvml_most_links = 18;
constexpr int nvml_remote_gpu = 0;
constexpr int nvml_remote_switch = 2;

/// Loaded once and never unloaded, since other code in the process may use it.
class nvml {
public:
  nvml() noexcept {
    library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr)
      return;
    int (*init)() = nullptr;
    load(init, "nvmlInit_v2");
    load(handle_, "nvmlDeviceGetHandleByPciBusId_v2");
    load(state_, "nvmlDeviceGetNvLinkState");
    load(remote_pci_, "nvmlDeviceGetNvLinkRemotePciInfo_v2");
    load(remote_type_, "nvmlDeviceGetNvLinkRemoteDeviceType");
    usable_ = init != nullptr && handle_ != nullptr && state_ != nullptr &&
              remote_pci_ != nullptr && init() == nvml_success;
  }

  /// Returns the ends of a GPU's active links.
  std::optional<std::vector<nvlink_end>> links_of(const std::string& pci_id) const {
    nvml_device device = nullptr;
    if (!usable_ || handle_(pci_id.c_str(), &device) != nvml_success)
      return std::nullopt;
    std::vector<nvlink_end> result;
    for (unsigned link = 0; link < nvml_most_links; ++link) {
      int state = 0;
      if (state_(device, link, &state) == nvml_success && state == nvml_enabled)
        result.push_back(end_of(device, link));
    }
    return result;
  }

private:
  template <class F> void load(F& function, const char* name) noexcept {
    function = reinterpret_cast<F>(dlsym(library_, name));
  }

  /// Returns the end of a link. In virtual machines a switch may have no address, or one without a
  /// device.
  nvlink_end end_of(nvml_device device, unsigned link) const {
    nvml_pci_info pci{};
    const bool has_address = remote_pci_(device, link, &pci) == nvml_success;
    int type = -1;
    if (remote_type_ == nullptr || remote_type_(device, link, &type) != nvml_success)
      type = -1;
    nvml_device found = nullptr;
    const bool is_gpu = type == nvml_remote_gpu || (type != nvml_remote_switch && has_address &&
                                                    handle_(pci.bus_id, &found) == nvml_success);
    return {!is_gpu, {pci.domain, pci.bus, pci.device}};
  }

  void* library_ = nullptr;
  bool usable_ = false;
  int (*handle_)(const char*, nvml_device*) = nullptr;
  int (*state_)(nvml_device, unsigned, int*) = nullptr;
  int (*remote_pci_)(nvml_device, unsigned, nvml_pci_info*) = nullptr;
  int (*remote_type_)(nvml_device, unsigned, int*) = nullptr;
};

} // namespace

std::optional<int> nvlinks_between(const std::string& from, const std::string& to) {
  const auto& library = never_destroyed<nvml>();
  const auto from_address = pci_address::parse(from);
  const auto to_address = pci_address::parse(to);
  if (!from_address || !to_address)
    return std::nullopt;
  const auto from_links = library.links_of(from);
  const auto to_links = library.links_of(to);
  if (!from_links || !to_links)
    return std::nullopt;
  return count_nvlinks(*from_links, *from_address, *to_links, *to_address);
}

} // namespace troupe::detail
