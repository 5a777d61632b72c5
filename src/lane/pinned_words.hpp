/// Words in pinned memory to which work on a device writes.
#pragma once

#include <troupe/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <ranges>
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
    for (auto i = count; i != 0; --i)
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
      from->forget_what_is_over();
      auto& unused = from->unused_;
      const auto last = std::ranges::find_if(unused | std::views::reverse, [&](auto* x) {
        return std::ranges::none_of(from->left_,
                                    [&](auto& y) { return y.which[from->index_of(x)]; });
      });
      if (last == unused.rend())
        return nullptr;
      word = *last;
      unused.erase(std::next(last).base());
    }
    *word = 0;
    return {word, [from](std::int32_t* x) {
              const std::lock_guard lock{from->mutex_};
              from->unused_.push_back(x);
            }};
  }

  /// Leaves the words that are taken to a lost process, which may still write to them until
  /// `is_over` returns true: they are not given out again before that.
  void leave(std::function<bool()> is_over) {
    const std::lock_guard lock{mutex_};
    forget_what_is_over();
    if (unused_.size() == count)
      return;
    std::vector<bool> taken(count, true);
    for (auto* x : unused_)
      taken[index_of(x)] = false;
    left_.push_back({std::move(taken), std::move(is_over)});
  }

private:
  static constexpr std::size_t count = size_bytes / sizeof(std::int32_t);

  struct left_words {
    std::vector<bool> which; ///< by index
    std::function<bool()> is_over;
  };

  /// Needs the lock.
  void forget_what_is_over() {
    std::erase_if(left_, [](auto& x) { return x.is_over(); });
  }
  std::size_t index_of(const std::int32_t* x) const noexcept {
    return static_cast<std::size_t>(x - memory_);
  }

  std::int32_t* const memory_;
  const std::function<caf::error(void*)> free_;
  std::mutex mutex_;
  std::vector<std::int32_t*> unused_;
  std::vector<left_words> left_;
};

} // namespace troupe::detail
