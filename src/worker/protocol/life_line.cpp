#include "worker/protocol/life_line.hpp"

#include "foundation/log.hpp"
#include "foundation/system_call.hpp"

#include <cerrno>
#include <climits>
#include <ctime>

#include <sys/syscall.h>
#include <unistd.h>

namespace troupe::detail {

namespace {

/// Maximum delay until a waiter sees `stop` if `wake` came just before it began to wait.
constexpr timespec look_again_after{0, 100'000'000};

/// Always set, so that the kernel wakes the waiter although the waiter never writes the word.
constexpr std::uint32_t wakes_waiter = FUTEX_WAITERS;

} // namespace

life_line::holder::holder(life_line& line) noexcept : line_(line) {
  std::size_t size = 0;
  if (::syscall(SYS_get_robust_list, 0, &previous_, &size) != 0) {
    errno_ = errno;
    return;
  }
  head_.list.next = &entry_;
  entry_.next = &head_.list;
  head_.futex_offset = static_cast<long>(reinterpret_cast<std::uintptr_t>(&line_.word_) -
                                         reinterpret_cast<std::uintptr_t>(&entry_));
  if (::syscall(SYS_set_robust_list, &head_, sizeof head_) != 0) {
    errno_ = errno;
    return;
  }
  // The entry is in the robust list already, so no death can go unnoticed.
  line_.word_.store(static_cast<word>(::gettid()) | wakes_waiter, std::memory_order_release);
}

life_line::holder::~holder() {
  if (errno_ != 0)
    return;
  line_.word_.store(wakes_waiter, std::memory_order_release);
  line_.wake();
  if (::syscall(SYS_set_robust_list, previous_, sizeof *previous_) != 0)
    log(log_level::error, "a life line",
        system_failure("set_robust_list", errno,
                       "cannot unregister the thread's list of robust locks"));
}

caf::error life_line::holder::error() const {
  return errno_ == 0 ? caf::error{}
                     : system_failure("set_robust_list", errno_, "cannot hold a life line");
}

std::optional<life_end> life_line::end_of(word x) noexcept {
  if ((x & FUTEX_OWNER_DIED) != 0)
    return life_end::died;
  return (x & FUTEX_TID_MASK) == 0 ? std::optional{life_end::let_go} : std::nullopt;
}

life_end life_line::wait_for_end(const std::atomic<bool>& stop) const noexcept {
  while (true) {
    const auto seen = word_.load(std::memory_order_acquire);
    if (const auto end = end_of(seen))
      return *end;
    if (stop.load())
      return life_end::stopped;
    if (::syscall(SYS_futex, &word_, FUTEX_WAIT, seen, &look_again_after, nullptr, 0) != 0 &&
        errno != EAGAIN && errno != ETIMEDOUT && errno != EINTR) {
      log(log_level::error, "a life line",
          system_failure("futex", errno, "cannot wait for its end"));
      return life_end::stopped;
    }
  }
}

void life_line::wake() const noexcept {
  if (::syscall(SYS_futex, &word_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0) < 0)
    log(log_level::error, "a life line", system_failure("futex", errno, "cannot wake its waiter"));
}

} // namespace troupe::detail
