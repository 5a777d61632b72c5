/// Records, and runs of `troupe-flight`.
#pragma once

#include "support/folder.hpp"

#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstdio>
#include <string>
#include <system_error>

#include <sys/wait.h>

namespace troupe::testing {

inline nlohmann::json read(const std::string& path) { return nlohmann::json::parse(content(path)); }

struct outcome {
  int status = -1;
  std::string output; ///< both streams
};

/// @param before commands of the shell that runs before it
inline outcome run_tool(const std::string& arguments, const std::string& before = {}) {
  auto* pipe = popen((before + "'" TROUPE_FLIGHT "' " + arguments + " 2>&1").c_str(), "r");
  if (pipe == nullptr)
    throw std::system_error(errno, std::generic_category(), "popen");
  outcome result;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe))
    result.output += static_cast<char>(c);
  auto status = pclose(pipe);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

} // namespace troupe::testing
