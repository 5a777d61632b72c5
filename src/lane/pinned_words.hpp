/// Words in pinned memory to which work on a device writes.
#pragma once

#include <troupe/error.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace troupe::detail {

/// @thread any
class pinned_words {
public:
  static constexpr std::size_t size_bytes = 4096;

  /// @param memory of `size_bytes` bytes; `free` gives it back, on any thread
  pinned_words(void* memory, std::function<caf::error(void*)> free)
      : memory_(static_cast<std::int32_t*>(memory)), free_(std::move(free)) {
    for (auto i = size_bytes / sizeof(std::int32_t); i != 0; --i)
      unused_.push_back(memory_ + i - 1);
  }
  ~pinned_words() { static_cast<void>(free_(memory_)); } // fails only if the device is gone
  pinned_words(const pinned_words&) = delete;
  pinned_words& operator=(const pinned_words&) = delete;

  /// Returns a word that is 0, or null if there is no room.
  static std::shared_ptr<std::int32_t> take(const std::shared_ptr<pinned_words>& from) {
    std::int32_t* word = nullptr;
    {
      const std::lock_guard lock{from->mutex_};
      if (from->unused_.empty())
        return nullptr;
      word = from->unused_.back();
      from->unused_.pop_back();
    }
    *word = 0;
    return {word, [from](std::int32_t* x) {
              const std::lock_guard lock{from->mutex_};
              from->unused_.push_back(x);
            }};
  }

private:
  std::int32_t* const memory_;
  const std::function<caf::error(void*)> free_;
  std::mutex mutex_;
  std::vector<std::int32_t*> unused_;
};

} // namespace troupe::detail
