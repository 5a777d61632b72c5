/// The admission lock, which orders all operations of the process (INV-6).
#pragma once

#include <mutex>

namespace troupe::detail {

/// Proves that the caller holds the admission lock.
class locked {
  friend class admission_lock;
  locked() = default;
};

/// Holds the admission lock. Every later admission sees what was decided under it.
class admission_lock {
public:
  struct spin_first {};

  admission_lock() { mutex().lock(); }
  /// Spins before it blocks, as `hot_lock` does.
  explicit admission_lock(spin_first) noexcept;
  ~admission_lock() { mutex().unlock(); }
  admission_lock(const admission_lock&) = delete;
  admission_lock& operator=(const admission_lock&) = delete;

  // NOLINTNEXTLINE(google-explicit-constructor): the lock stands for its proof
  operator locked() const noexcept { return {}; }
  static std::mutex& mutex() noexcept;
};

} // namespace troupe::detail
