/// What tells a process of another's death within a tenth of a millisecond.
#pragma once

#include <troupe/error.hpp>

#include <atomic>
#include <cstdint>
#include <optional>
#include <type_traits>

#include <linux/futex.h>
#include <sys/types.h>

namespace troupe::detail {

/// How a life line came to its end.
enum class life_end : std::uint8_t {
  died,   ///< the thread that held it is no more, and most likely its process
  let_go, ///< on purpose
  stopped ///< not at its end: the waiter was told to stop, or cannot wait
};

/// A robust mutex in shared memory: one thread of a process holds it, and when the kernel ends that
/// thread, it marks the word and wakes who waits, before it tears down the memory and the files of
/// the process. That is why this is so much quicker than the end of a socket or of a process.
///
/// The kernel's interface is used directly, not through pthread_mutex_t. That would keep pointers
/// of the holder in memory that the other process can overwrite, and a wait for it cannot be ended
/// by somebody else. Here there is one word, and what the other process may write into it harms
/// nobody. For the holding thread this replaces the C library's list of robust mutexes: it must
/// lock none by pthread.
/// @source Linux, Documentation/locking/robust-futex-ABI.rst
class life_line {
public:
  /// Holds a life line, from its construction to its destruction, both on the same thread. Meant
  /// for a thread that does little else, and is never inside a call that no signal can interrupt.
  class holder {
  public:
    explicit holder(life_line& line) noexcept;
    ~holder(); ///< lets go
    holder(const holder&) = delete;
    holder& operator=(const holder&) = delete;

    /// @errors errc::unavailable: the system refused it; nothing is held
    [[nodiscard]] caf::error error() const;

  private:
    life_line& line_;
    int errno_ = 0;
    robust_list_head* previous_ = nullptr;
    robust_list entry_{};
    robust_list_head head_{};
  };

  /// Somebody holds it, or did.
  bool was_held() const noexcept { return word_.load(std::memory_order_acquire) != 0; }

  /// None while it is held. It must have been.
  std::optional<life_end> end() const noexcept {
    return end_of(word_.load(std::memory_order_acquire));
  }

  /// Returns at its end. It must have been held, and nobody else may wait.
  /// `stop`: see `wake`
  life_end wait_for_end(const std::atomic<bool>& stop) const noexcept;

  /// For who has set `stop`: makes the waiter look at it.
  void wake() const noexcept;

private:
  using word = std::uint32_t;
  static_assert(std::atomic<word>::is_always_lock_free &&
                sizeof(std::atomic<word>) == sizeof(word));

  static std::optional<life_end> end_of(word x) noexcept;

  /// 0: never held. As the kernel wants it: the thread's number while it is held, and
  /// FUTEX_OWNER_DIED afterwards. FUTEX_WAITERS alone: let go.
  std::atomic<word> word_{0};
};

static_assert(std::is_standard_layout_v<life_line>);

} // namespace troupe::detail
