/// Settled operations that are still to be freed.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

namespace troupe::detail {

class operation;

/// Freeing an operation costs a lane two microseconds, because another thread allocated and filled
/// it. A busy lane leaves it here; the next caller frees it. If no caller comes, a lane frees it
/// before it parks.
/// @thread any
class retired_operations {
public:
  /// Drops `x`: later, if no other owner is left and few operations are here; else at once.
  void add(std::shared_ptr<operation> x) noexcept;
  void free_all() noexcept {
    if (newest_.load(std::memory_order_relaxed) != nullptr)
      free_those_here();
  }

private:
  static constexpr std::size_t limit = 64;

  void free_those_here() noexcept;

  std::atomic<operation*> newest_{nullptr};
  std::atomic<std::size_t> count_{0};
};

/// The settled operations of all lanes of the process.
extern retired_operations& process_retired;

} // namespace troupe::detail
