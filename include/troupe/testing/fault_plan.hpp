/// Fault injection: a decorator over any backend. A plan has a seed: the same plan injects faults
/// into the same calls, however the threads run.
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

/// The calls that can get a fault: the functions of a backend, its devices and its communicators.
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
  launch_host, ///< also a registered launch of a device in a worker process
  enable_peer,
  build,
  connect,
  collective, ///< a collective of any kind, or a group of them
  asynchronous_error,
  abort,
  destroy,
  link,
  admit_peer,
  copy_peer,
};

std::string_view to_string(verb x) noexcept;

enum class fault : std::uint8_t {
  /// The call does nothing and returns an error. `abort` and `destroy` do their work all the same.
  fail,
  /// As `fail`, with `errc::out_of_memory`.
  out_of_memory,
  /// A collective call returns success, but the rank never takes part: its stream stands still
  /// until the communicator is aborted. Errors report its part as `started`, because the lane has
  /// begun it. For other verbs as `hang`.
  not_issued,
  /// The stream stands still before the call's work, until `release`, or until the communicator of
  /// the call is aborted. For verbs without a stream as `block`.
  hang,
  /// The stream stands still for `delay` before the call's work. For verbs without a stream, the
  /// thread does. On a device in a worker process, the time counts from the call, or from the
  /// moment when everything that the plan delays before it on the stream has continued.
  slow,
  /// The calling thread blocks until `release`; then the call continues.
  block,
  /// A sticky fault: this call and all later ones on every device return `errc::device_fault`. All
  /// streams and threads that stood still continue. Each device's completion signal is called, so
  /// that waiting threads notice.
  poison,
  /// A copy on a device or between devices returns success, but one byte of the target stays as it
  /// was; the seed selects the byte. Has no effect on other verbs.
  corrupt,
};

std::string_view to_string(fault x) noexcept;

inline constexpr int any_device = -1;
inline constexpr std::uint64_t forever = std::numeric_limits<std::uint64_t>::max();

/// The calls that get a fault. Calls of `on` are counted for each device, from the moment when the
/// rule is added. For `build`, `abort` and `destroy`, which concern many devices, `any_device`
/// counts the calls themselves.
struct fault_rule {
  fault kind = fault::fail;
  verb on = verb::collective;
  int device = any_device;
  std::uint64_t first = 1;          ///< the first call that can get the fault, counted from 1
  std::uint64_t times = 1;          ///< maximum number of faults for each device
  double probability = 1;           ///< of a fault, for each call from `first` on
  std::chrono::nanoseconds delay{}; ///< for `slow`
  std::optional<errc> error = {};   ///< for `fail`; none: one that suits the verb
  /// The other device: only calls that name it count and get the fault (`enable_peer`,
  /// `admit_peer`, `copy_peer`, `link`).
  int peer = any_device;
};

/// The rules, the faults that they have injected, and the means to release what they hold.
/// @thread any
class fault_plan {
public:
  explicit fault_plan(std::uint64_t seed = 0, const std::vector<fault_rule>& rules = {});
  fault_plan(const fault_plan&) = delete;
  fault_plan& operator=(const fault_plan&) = delete;
  ~fault_plan();

  /// Adds a rule and returns its number. The rules of the constructor are numbered from 0. If
  /// several rules match one call, the one with the lowest number applies.
  std::size_t add(const fault_rule& rule);

  /// Disables all rules that exist now. Streams and threads that stand still remain so.
  void disarm() noexcept;

  /// Releases everything that hangs, is slow or is blocked now, except `fault::not_issued`.
  void release() noexcept;

  /// Injects a sticky fault from outside, as if a kernel had failed.
  void poison() noexcept;
  bool poisoned() const noexcept;

  /// Returns the number of injected faults: of all, of a kind, of a rule.
  std::uint64_t injected() const noexcept;
  std::uint64_t injected(fault kind) const noexcept;
  std::uint64_t injected_by(std::size_t rule) const noexcept;

  /// Blocks until `count` faults of `kind` were injected; returns false after `limit`.
  bool wait_injected(fault kind, std::uint64_t count,
                     std::chrono::nanoseconds limit) const noexcept;

private:
  friend std::shared_ptr<backend> with_faults(std::shared_ptr<backend>,
                                              const std::shared_ptr<fault_plan>&);

  std::shared_ptr<detail::fault_injector> injector_;
};

/// Returns `inner` with the faults of `plan`; several backends can share a plan. Closing a device
/// releases its own streams.
std::shared_ptr<backend> with_faults(std::shared_ptr<backend> inner,
                                     const std::shared_ptr<fault_plan>& plan);

} // namespace troupe::testing
