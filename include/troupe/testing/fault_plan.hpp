/// Faults on demand: a decorator over any backend. A plan is seeded: the same plan strikes the same
/// calls, however the threads run.
#pragma once

#include <troupe/backend.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace troupe::detail {

class fault_injector;

} // namespace troupe::detail

namespace troupe::testing {

/// What a fault can strike: the functions of a backend, its devices and its communicators.
enum class verb : std::uint8_t {
  open,
  bind,
  open_memory,
  close_memory,
  allocate,
  deallocate,
  allocate_pinned,
  create_stream,
  create_event,
  record,
  wait,
  query,
  synchronize,
  copy,
  fill,
  launch_host, ///< and a registered launch of a device in a worker process
  enable_peer,
  build,
  connect,
  collective, ///< of any kind, and a group of them
  asynchronous_error,
  abort,
  destroy,
  allocate_symmetric,
  register_window,
  deregister_window,
  link,
  admit_peer,
  copy_peer,
};

std::string_view to_string(verb x) noexcept;

enum class fault : std::uint8_t {
  /// The call does nothing and gives an error. `abort` and `destroy` do their work all the same.
  fail,
  /// As `fail`, with `errc::out_of_memory`.
  out_of_memory,
  /// A collective call that says success, but the rank never takes part: its stream stands still
  /// until the communicator is aborted. An error says `started` of its part: the lane has begun it.
  /// On other verbs as `hang`.
  not_issued,
  /// The stream stands still before the call's work, until `release`, or until the communicator
  /// that the call is for is aborted. Verbs without a stream: as `block`.
  hang,
  /// The stream stands still for `delay` before the call's work. Verbs without a stream: the call
  /// does. On a device in a worker process the time counts from the call, or from when all that the
  /// plan holds up before it on the stream has gone on.
  slow,
  /// The calling thread is stuck until `release`; then the call goes on.
  block,
  /// A sticky fault: this call and all later ones on every device give `errc::device_fault`; all
  /// that stood still goes on, and each device's completion signal is called, so that whoever waits
  /// finds out.
  poison,
  /// A copy on a device or between devices says success, but one of its bytes stays as it was in
  /// the target; the seed says which. Strikes no other verb.
  corrupt,
};

std::string_view to_string(fault x) noexcept;

inline constexpr int any_device = -1;
inline constexpr std::uint64_t forever = std::numeric_limits<std::uint64_t>::max();

/// Which calls a fault strikes. Calls of `on` are counted for each device, from when the rule is
/// there; for `build`, `abort` and `destroy`, which concern many devices, `any_device` counts the
/// calls themselves.
struct fault_rule {
  fault kind = fault::fail;
  verb on = verb::collective;
  int device = any_device;
  std::uint64_t first = 1;          ///< strikes at this call at the earliest, counted from 1
  std::uint64_t times = 1;          ///< strikes each device so often
  double probability = 1;           ///< of a strike, for each call from `first` on
  std::chrono::nanoseconds delay{}; ///< of `slow`
  std::optional<errc> error = {};   ///< of `fail`; without it, what suits the verb
  /// The other device: counts and strikes calls that name it alone (`enable_peer`, `admit_peer`,
  /// `copy_peer`, `link`).
  int peer = any_device;
};

/// The rules, the faults that they have injected, and the means to let go what they hold.
/// @thread any
class fault_plan {
public:
  explicit fault_plan(std::uint64_t seed = 0, const std::vector<fault_rule>& rules = {});
  fault_plan(const fault_plan&) = delete;
  fault_plan& operator=(const fault_plan&) = delete;
  ~fault_plan();

  /// Adds a rule and returns its number; the rules of the constructor have the numbers from 0.
  /// Where several rules strike one call, the one with the lowest number counts.
  std::size_t add(const fault_rule& rule);

  /// None of the rules that there are strikes from now on; what stands still stays so.
  void disarm() noexcept;

  /// Lets go all that hangs, is slow or is blocked now, except `fault::not_issued`.
  void release() noexcept;

  /// A sticky fault from outside, as if some kernel had failed.
  void poison() noexcept;
  bool poisoned() const noexcept;

  /// How many faults were injected: all, of a kind, by a rule.
  std::uint64_t injected() const noexcept;
  std::uint64_t injected(fault kind) const noexcept;
  std::uint64_t injected_by(std::size_t rule) const noexcept;

  /// Blocks until `count` faults of `kind` were injected; false if that takes longer than `limit`.
  bool wait_injected(fault kind, std::uint64_t count,
                     std::chrono::nanoseconds limit) const noexcept;

private:
  friend std::shared_ptr<backend> with_faults(std::shared_ptr<backend>,
                                              const std::shared_ptr<fault_plan>&);

  std::shared_ptr<detail::fault_injector> injector_;
};

/// `inner`, struck by the faults of `plan`; several backends can share a plan. A device that is
/// closed lets its own streams go.
std::shared_ptr<backend> with_faults(std::shared_ptr<backend> inner,
                                     const std::shared_ptr<fault_plan>& plan);

} // namespace troupe::testing
