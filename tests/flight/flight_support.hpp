/// Temporary files, and runs of `troupe-flight`.
#pragma once

#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <system_error>

#include <sys/wait.h>

namespace troupe::testing {

/// A temporary folder of the test.
class folder {
public:
  folder() {
    auto name = (std::filesystem::temp_directory_path() / "troupe-flight-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr)
      throw std::system_error(errno, std::generic_category(), name);
    path_ = name;
  }
  ~folder() {
    std::error_code ignored; // the system cleans temporary files anyway
    std::filesystem::remove_all(path_, ignored);
  }
  folder(const folder&) = delete;
  folder& operator=(const folder&) = delete;

  std::string file(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream out{file(name)};
    out << text;
    return file(name);
  }
  std::set<std::string> names() const {
    std::set<std::string> result;
    for (auto& x : std::filesystem::directory_iterator{path_})
      result.insert(x.path().filename().string());
    return result;
  }

private:
  std::filesystem::path path_;
};

inline std::string content(const std::string& path) {
  std::ifstream in{path};
  return {std::istreambuf_iterator<char>{in}, {}};
}

inline nlohmann::json read(const std::string& path) { return nlohmann::json::parse(content(path)); }

struct outcome {
  int status = -1;
  std::string output; ///< both streams
};

inline outcome run_tool(const std::string& arguments) {
  auto* pipe = popen(("'" TROUPE_FLIGHT "' " + arguments + " 2>&1").c_str(), "r");
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
