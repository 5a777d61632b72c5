/// Counts what has begun and is not over.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <vector>

namespace troupe::detail {

/// @thread any
class open_count {
public:
  void begin() noexcept;
  void end() noexcept;
  bool is_none() const noexcept;
  /// Returns false if some were open all the time.
  bool wait_for_none(std::chrono::nanoseconds limit) noexcept;
  /// Calls `f` when none is open, perhaps at once.
  void when_none(std::function<void()> f);

private:
  mutable std::mutex mutex_;
  std::condition_variable none_;
  std::size_t open_ = 0;
  std::vector<std::function<void()>> then_; ///< to be called when none is open
};

} // namespace troupe::detail
