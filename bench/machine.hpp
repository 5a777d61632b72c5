/// Where a benchmark ran.
#pragma once

#include <troupe/world.hpp>

#include <nlohmann/json.hpp>

#include <string>

namespace bench {

/// Devices, driver, CPUs and the variables that NCCL and CUDA read.
nlohmann::ordered_json describe_machine(const troupe::world& world);

/// One line of it.
std::string summary(const nlohmann::ordered_json& machine);

} // namespace bench
