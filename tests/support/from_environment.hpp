/// Parameters of a test run, from environment variables.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace troupe::testing {

inline std::uint64_t number_from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

} // namespace troupe::testing
