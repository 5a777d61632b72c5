/// The owner of a file descriptor.
#pragma once

#include <troupe/error.hpp>

#include <string>
#include <string_view>
#include <utility>

namespace troupe::detail {

class file_descriptor {
public:
  file_descriptor() noexcept = default;
  /// Takes over what a system call has returned; errno stays as the call left it. The numbers of
  /// the standard streams belong to the program, which may print while they are closed: a
  /// descriptor with such a number gets another one, with close-on-exec. If the system has none
  /// left, the object is empty, and errno has the reason.
  explicit file_descriptor(int native) noexcept
      : native_(native < 0 || native > last_standard_stream ? native
                                                            : off_standard_streams(native)) {}
  ~file_descriptor() { reset(); }

  file_descriptor(const file_descriptor&) = delete;
  file_descriptor& operator=(const file_descriptor&) = delete;
  file_descriptor(file_descriptor&& other) noexcept : native_(other.release()) {}
  file_descriptor& operator=(file_descriptor&& other) noexcept {
    file_descriptor taken{std::move(other)};
    std::swap(native_, taken.native_);
    return *this;
  }

  /// -1: none.
  int get() const noexcept { return native_; }
  explicit operator bool() const noexcept { return native_ >= 0; }
  /// Gives it away: the caller closes it.
  [[nodiscard]] int release() noexcept { return std::exchange(native_, -1); }
  void reset() noexcept;

private:
  static constexpr int last_standard_stream = 2;
  static int off_standard_streams(int native) noexcept;

  int native_ = -1;
};

/// Opens /dev/null in place of each standard stream that is closed. To be called before another
/// library opens files: it takes the lowest free numbers, and the program's prints would go there.
/// @errors errc::unavailable: /dev/null cannot be opened
caf::error fill_standard_streams() noexcept;

/// Returns the content of a file.
/// @errors errc::unavailable: it cannot be opened or read
caf::expected<std::string> read_file(const std::string& path);

/// Writes all of `text`. False: errno has the reason.
bool write_all(int native, std::string_view text) noexcept;

/// What wakes a thread that waits in `poll`. Once signalled, it stays so until it is cleared.
class wake_up {
public:
  static caf::expected<wake_up> create();

  /// To be polled for input.
  int native() const noexcept { return event_.get(); }
  /// @thread any; a signal handler too
  void signal() const noexcept;
  void clear() const noexcept;

private:
  explicit wake_up(file_descriptor event) noexcept : event_(std::move(event)) {}

  file_descriptor event_;
};

} // namespace troupe::detail
