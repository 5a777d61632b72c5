/// The file of a flight record, as a stream of bounded length.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <streambuf>
#include <string>

namespace flight {

/// The largest file that is read. @units bytes
inline constexpr std::uint64_t most_file = std::uint64_t{1} << 30;

/// Reads a file, or what a pipe provides. The constructor and reading throw `bad_record` if the
/// file cannot be read or is too large.
class record_file : public std::streambuf {
public:
  explicit record_file(std::string path);
  ~record_file() override;
  record_file(const record_file&) = delete;
  record_file& operator=(const record_file&) = delete;

protected:
  int_type underflow() override;

private:
  void check_size(std::uint64_t size, bool is_whole) const;

  const std::string path_;
  const int native_;
  std::uint64_t read_ = 0; // bytes
  std::array<char, std::size_t{64} << 10> piece_{};
};

} // namespace flight
