#include "record_file.hpp"

#include "record.hpp"

#include <cerrno>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace flight {

namespace {

[[noreturn]] void throw_unreadable(const std::string& path, int code) {
  throw bad_record("cannot read " + path + ": " + std::generic_category().message(code));
}

int open_file(const std::string& path) {
  const int result = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (result < 0)
    throw_unreadable(path, errno);
  return result;
}

} // namespace

record_file::record_file(std::string path) : path_(std::move(path)), native_(open_file(path_)) {
  struct stat about{};
  const bool is_known = ::fstat(native_, &about) == 0;
  const int code = errno;
  try {
    if (!is_known)
      throw_unreadable(path_, code);
    if (S_ISREG(about.st_mode))
      check_size(static_cast<std::uint64_t>(about.st_size), true);
  } catch (...) {
    ::close(native_);
    throw;
  }
}

record_file::~record_file() { ::close(native_); } // nothing was written

record_file::int_type record_file::underflow() {
  auto size = ::read(native_, piece_.data(), piece_.size());
  while (size < 0 && errno == EINTR)
    size = ::read(native_, piece_.data(), piece_.size());
  if (size < 0)
    throw_unreadable(path_, errno);
  if (size == 0)
    return traits_type::eof();
  read_ += static_cast<std::uint64_t>(size);
  check_size(read_, false);
  setg(piece_.data(), piece_.data(), piece_.data() + size);
  return traits_type::to_int_type(piece_.front());
}

void record_file::check_size(std::uint64_t size, bool is_whole) const {
  if (size > most_file)
    throw bad_record(path_ + " is too large: " + (is_whole ? "" : "at least ") +
                     std::to_string(size) + " bytes; the limit is " + std::to_string(most_file) +
                     " bytes");
}

} // namespace flight
