/// Objects that take long to make are made in advance.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

namespace troupe::detail {

/// A pool of at most one object, ready for use. @thread any
template <class T> class alignas(64) object_pool {
public:
  /// Returns the object; null if there is none.
  std::shared_ptr<T> take() noexcept {
    if (!there_.load(std::memory_order_relaxed) || busy_.test_and_set(std::memory_order_acquire))
      return nullptr;
    auto result = std::move(object_);
    there_.store(false, std::memory_order_relaxed);
    busy_.clear(std::memory_order_release);
    return result;
  }

  /// Stores an object from `make` if there is none.
  template <class F> void refill(F make) {
    if (there_.load(std::memory_order_relaxed))
      return;
    auto object = make();
    if (busy_.test_and_set(std::memory_order_acquire))
      return;
    if (!there_.load(std::memory_order_relaxed)) {
      object_ = std::move(object);
      there_.store(true, std::memory_order_release);
    }
    busy_.clear(std::memory_order_release);
  }

private:
  std::shared_ptr<T> object_;
  std::atomic<bool> there_{false};
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

} // namespace troupe::detail
