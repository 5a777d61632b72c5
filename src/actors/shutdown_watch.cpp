#include "actors/system.hpp"
#include "foundation/log.hpp"
#include "foundation/option_check.hpp"
#include <troupe/detail/caf_compat.hpp>

#include <caf/actor_registry.hpp>
#include <caf/actor_system.hpp>

#include <algorithm>
#include <condition_variable>
#include <optional>
#include <string>
#include <utility>

#include <pthread.h>

namespace troupe::detail {

#if TROUPE_CAF_HAS_RUNNING_CONDITION && defined(__GLIBC__)

namespace {

// CAF has no hook for the end of an actor system: it stops its modules after it has waited for all
// actors. So the condition variable at which it waits is checked. It is private, but an explicit
// instantiation may name it.
std::condition_variable& running_condition(caf::actor_registry& x);

template <auto Member> struct condition_of_registry {
  friend std::condition_variable& running_condition(caf::actor_registry& x) { return x.*Member; }
};

template struct condition_of_registry<&caf::actor_registry::running_cv_>;

} // namespace

bool waits_for_actors(caf::actor_system& sys) noexcept {
  constexpr unsigned flag_bits = 3; // the rest of __wrefs is the number of waiting threads
  const auto* native = running_condition(sys.registry()).native_handle();
  return __atomic_load_n(&native->__data.__wrefs, __ATOMIC_RELAXED) >> flag_bits != 0;
}

#else

bool waits_for_actors(caf::actor_system&) noexcept { return false; }

#endif

namespace {

constexpr std::chrono::hours longest_pause{1};

class shutdown_watch : public std::enable_shared_from_this<shutdown_watch> {
public:
  shutdown_watch(deadline_watch& deadlines, std::weak_ptr<system_lease> lease,
                 std::chrono::nanoseconds patience)
      : deadlines_(deadlines), lease_(std::move(lease)), patience_(patience) {}

  void look_later() {
    constexpr int looks = 5; // before the first log line
    deadlines_.call_at(clock::now() + patience_ / looks,
                       [self = shared_from_this()] { self->look(); });
  }

private:
  void look() {
    const auto lease = lease_.lock(); // the actor system lives as long as the lease
    if (!lease)
      return;
    if (!waits_for_actors(lease->system))
      waits_since_.reset();
    else if (const auto now = clock::now(); !waits_since_) {
      waits_since_ = now;
      pause_ = patience_;
      next_line_ = now + pause_;
    } else if (now >= next_line_) {
      tell(*lease, now - *waits_since_);
      pause_ = std::min<std::chrono::nanoseconds>(2 * pause_, longest_pause);
      next_line_ = now + pause_;
    }
    look_later();
  }

  static void tell(const system_lease& lease, std::chrono::nanoseconds time) {
    std::string text;
    for (auto& x : lease.holders())
      text += (text.empty() ? "" : "; ") + x;
    using namespace std::chrono;
    const nanoseconds whole =
        time < 1s ? nanoseconds{floor<milliseconds>(time)} : floor<seconds>(time);
    log(log_level::warning, "the actor system has waited for " + text_of(whole) +
                                " for its actors to end, and still does: " + text);
  }

  deadline_watch& deadlines_; // calls this object
  const std::weak_ptr<system_lease> lease_;
  const std::chrono::nanoseconds patience_;
  std::optional<clock::time_point> waits_since_;
  std::chrono::nanoseconds pause_{};
  clock::time_point next_line_;
};

} // namespace

void watch_shutdown(deadline_watch& deadlines, std::weak_ptr<system_lease> lease,
                    std::chrono::nanoseconds patience) {
  std::make_shared<shutdown_watch>(deadlines, std::move(lease), patience)->look_later();
}

} // namespace troupe::detail
