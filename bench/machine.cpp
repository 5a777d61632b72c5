#include "machine.hpp"

#include "contestant.hpp"

#include <caf/all.hpp>

#if TROUPE_HAS_CUDA
#include <nccl.h>
#endif

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>
#include <thread>

#include <unistd.h>

namespace bench {

namespace {

std::string first_line_with(const char* file, std::string_view word) {
  std::ifstream in{file};
  for (std::string line; std::getline(in, line);)
    if (line.find(word) != std::string::npos)
      return line;
  return {};
}

std::string cpu_model() {
  const auto line = first_line_with("/proc/cpuinfo", "model name");
  const auto colon = line.find(": ");
  return colon == std::string::npos ? "" : line.substr(colon + 2);
}

/// Returns the word of digits and dots in the line "NVRM version: ... 580.95.05 Release ...".
std::string driver_version() {
  std::istringstream line{first_line_with("/proc/driver/nvidia/version", "NVRM version")};
  for (std::string word; line >> word;)
    if (word.find('.') != std::string::npos &&
        word.find_first_not_of("0123456789.") == std::string::npos)
      return word;
  return {};
}

} // namespace

nlohmann::ordered_json describe_machine(const std::vector<troupe::device>& devices) {
  nlohmann::ordered_json result;
  for (auto& device : devices) {
    const auto stats = device.stats().wait();
    result["devices"].push_back(
        {{"ordinal", device.ordinal()}, {"name", stats ? stats->name : "unknown"}});
  }
  result["driver"] = driver_version();
#if TROUPE_HAS_CUDA
  int version = 0;
  if (const auto code = ncclGetVersion(&version); code != ncclSuccess)
    fail(std::string{"ncclGetVersion: "} + ncclGetErrorString(code));
  result["nccl"] = std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) +
                   "." + std::to_string(version % 100);
#endif
  result["cpus"] = std::thread::hardware_concurrency();
  result["cpu"] = cpu_model();
  auto& variables = result["environment"] = nlohmann::ordered_json::object();
  for (auto** x = environ; *x != nullptr; ++x) {
    const std::string_view variable{*x};
    const auto equals = variable.find('=');
    if (equals != std::string_view::npos &&
        (variable.starts_with("NCCL_") || variable.starts_with("CUDA_VISIBLE") ||
         variable.starts_with("CUDA_MODULE")))
      variables[std::string{variable.substr(0, equals)}] = std::string{variable.substr(equals + 1)};
  }
  return result;
}

nlohmann::ordered_json describe_machine(const troupe::world& world) {
  std::vector<troupe::device> devices;
  for (std::size_t rank = 0; rank < world.size(); ++rank)
    devices.push_back(world.device_of(rank));
  return describe_machine(devices);
}

std::string summary(const nlohmann::ordered_json& machine) {
  auto& devices = machine.at("devices");
  auto text = std::to_string(devices.size()) + " x " +
              devices.front().at("name").get<std::string>() + "; " +
              std::to_string(machine.at("cpus").get<unsigned>()) + " CPUs (" +
              machine.at("cpu").get<std::string>() + ")";
  if (const auto driver = machine.at("driver").get<std::string>(); !driver.empty())
    text += "; driver " + driver;
  if (machine.contains("nccl"))
    text += "; NCCL " + machine.at("nccl").get<std::string>();
  return text;
}

} // namespace bench
