/// Notification of the death of another process, within a tenth of a millisecond.
#pragma once

#include <troupe/error.hpp>

#include <atomic>
#include <cstdint>
#include <optional>
#include <type_traits>

#include <linux/futex.h>
#include <sys/types.h>

namespace troupe::detail {

/// How a life line ended.
enum class life_end : std::uint8_t {
  died,   ///< the thread that held it has ended, and most likely its process
  let_go, ///< the holder released it on purpose
  stopped ///< the line has not ended: the waiter was told to stop, or cannot wait
};

/// A robust mutex in shared memory, held by one thread of a process.
/// When the kernel ends that thread, it marks the word and wakes the waiter before it frees the
/// memory and the files of the process. So this is much faster than the end of a socket or of a
/// process.
///
/// Uses the kernel's interface instead of pthread_mutex_t. That would keep pointers of the holder
/// in memory that the other process can overwrite, and no other thread could end a wait. Here there
/// is one word, and nothing that the other process writes into it does harm. On the holding thread
/// this replaces the C library's list of robust mutexes: the thread must not lock any by pthread.
/// @source Linux, Documentation/locking/robust-futex-ABI.rst
class life_line {
public:
  /// Holds a life line from construction to destruction, on one thread, which does little else and
  /// is never in a call that no signal can interrupt.
  class holder {
  public:
    explicit holder(life_line& line) noexcept;
    ~holder(); ///< releases the line
    holder(const holder&) = delete;
    holder& operator=(const holder&) = delete;

    /// @errors errc::unavailable: the system refused; nothing is held
    [[nodiscard]] caf::error error() const;

  private:
    life_line& line_;
    int errno_ = 0;
    robust_list_head* previous_ = nullptr;
    robust_list entry_{};
    robust_list_head head_{};
  };

  /// Returns true if a thread holds the line or has held it.
  bool was_held() const noexcept { return word_.load(std::memory_order_acquire) != 0; }

  /// Returns how the line ended, or nothing while it is held. It must have been held.
  std::optional<life_end> end() const noexcept {
    return end_of(word_.load(std::memory_order_acquire));
  }

  /// Blocks until the line ends or `stop` is set (see `wake`). It must have been held, and only one
  /// thread may wait.
  life_end wait_for_end(const std::atomic<bool>& stop) const noexcept;

  /// Makes the waiter check `stop`, which is set before.
  void wake() const noexcept;

private:
  using word = std::uint32_t;
  static_assert(std::atomic<word>::is_always_lock_free &&
                sizeof(std::atomic<word>) == sizeof(word));

  static std::optional<life_end> end_of(word x) noexcept;

  /// 0: never held. While held: the thread id, as the kernel requires. After the holder's death:
  /// FUTEX_OWNER_DIED is set. Only FUTEX_WAITERS: released.
  std::atomic<word> word_{0};
};

static_assert(std::is_standard_layout_v<life_line>);

} // namespace troupe::detail
