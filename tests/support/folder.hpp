/// Temporary files of a test.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <system_error>

#include <sys/stat.h>

namespace troupe::testing {

/// A temporary folder of the test.
class folder {
public:
  folder() {
    auto name = (std::filesystem::temp_directory_path() / "troupe-test-XXXXXX").string();
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

/// Returns the type and mode of what is at `path`, whose last link is not followed.
inline mode_t mode_of(const std::string& path) {
  struct stat there{};
  if (::lstat(path.c_str(), &there) != 0)
    throw std::system_error(errno, std::generic_category(), path);
  return there.st_mode;
}

inline void make_fifo(const std::string& path) {
  if (::mkfifo(path.c_str(), 0666) != 0)
    throw std::system_error(errno, std::generic_category(), path);
}

} // namespace troupe::testing
