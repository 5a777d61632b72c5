/// The owner of a file descriptor.
#pragma once

#include <troupe/error.hpp>

#include <cstddef>
#include <string>
#include <utility>

namespace troupe::detail {

class file_descriptor {
public:
  file_descriptor() noexcept = default;
  /// Takes ownership of the result of a system call; errno does not change. The numbers of the
  /// standard streams belong to the program, which may print while they are closed: a descriptor
  /// with such a number is replaced by another one, with close-on-exec. If the system has none
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

  /// Returns the descriptor; -1 if there is none.
  int get() const noexcept { return native_; }
  explicit operator bool() const noexcept { return native_ >= 0; }
  /// Gives up ownership: the caller closes the descriptor.
  [[nodiscard]] int release() noexcept { return std::exchange(native_, -1); }
  void reset() noexcept;

private:
  static constexpr int last_standard_stream = 2;
  static int off_standard_streams(int native) noexcept;

  int native_ = -1;
};

/// Opens /dev/null in place of each closed standard stream. Call it before another library opens
/// files: that would get the lowest free numbers, and the program's prints would go to its files.
/// @errors errc::unavailable: /dev/null cannot be opened
caf::error fill_standard_streams() noexcept;

/// Raises this process's own limit of open files by `more`, up to the system's. If that fails, it
/// logs a warning. A later call that finds no free descriptor returns an error.
void raise_descriptor_limit(std::size_t more) noexcept;

/// Returns the content of a file.
/// @errors errc::unavailable: it cannot be opened or read
caf::expected<std::string> read_file(const std::string& path);

/// An event that wakes a thread in `poll`. Once signalled, it stays signalled until it is cleared.
class wake_up {
public:
  static caf::expected<wake_up> create();

  /// Returns the descriptor to poll for input.
  int native() const noexcept { return event_.get(); }
  /// @thread any; a signal handler too
  void signal() const noexcept;
  void clear() const noexcept;

private:
  explicit wake_up(file_descriptor event) noexcept : event_(std::move(event)) {}

  file_descriptor event_;
};

} // namespace troupe::detail
