/// The owner of a file descriptor.
#pragma once

#include <troupe/error.hpp>

#include <utility>

namespace troupe::detail {

class file_descriptor {
public:
  file_descriptor() noexcept = default;
  explicit file_descriptor(int native) noexcept : native_(native) {}
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
  int native_ = -1;
};

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
