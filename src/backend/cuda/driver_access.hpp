/// Says whether the driver may still be called.
#pragma once

#include <troupe/error.hpp>

#include <atomic>
#include <memory>

namespace troupe::detail {

/// Shared by all objects that one backend made. Ends once and for good (`backend::abandon`).
/// @thread any
class driver_access {
public:
  bool ended() const noexcept { return ended_.load(std::memory_order_relaxed); }
  /// Ends access. Returns false if it had already ended.
  bool end() noexcept { return !ended_.exchange(true); }

  /// Returns errc::device_fault once access has ended.
  [[nodiscard]] caf::error check(int device) const noexcept {
    if (!ended()) [[likely]]
      return {};
    return refusal(device);
  }

private:
  static caf::error refusal(int device) noexcept;

  std::atomic<bool> ended_{false};
};

using shared_driver_access = std::shared_ptr<driver_access>;

} // namespace troupe::detail
