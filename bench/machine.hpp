/// The machine that a benchmark ran on.
#pragma once

#include <troupe/device.hpp>
#include <troupe/world.hpp>

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace bench {

/// Describes devices, driver, CPUs and the variables that NCCL and CUDA read.
nlohmann::ordered_json describe_machine(const std::vector<troupe::device>& devices);
nlohmann::ordered_json describe_machine(const troupe::world& world);

/// Returns the description as one line.
std::string summary(const nlohmann::ordered_json& machine);

} // namespace bench
