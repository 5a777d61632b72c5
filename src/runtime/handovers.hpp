/// Handovers: a device in a worker process moves to its spare, and no request fails.
#pragma once

#include "operation/admission_lock.hpp"
#include "operation/operation.hpp"
#include <troupe/error.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace troupe::detail {

class lane;
class runtime;

/// A user of devices that has objects in their processes. It leaves a device's process before the
/// device is handed over, and goes on in the next one. @thread any
class handover_listener {
public:
  /// Returns why the handover of the device cannot begin yet; none: it can.
  virtual caf::error check_handover(locked lock, int device) const = 0;
  /// The handover begins, because of `why`: nothing new may use the device's present process.
  virtual void begin_handover(locked lock, int device, const caf::error& why) = 0;
  /// Follows: ends what is left in that process, without an effect on requests.
  virtual void leave_process(int device, const caf::error& why) = 0;
  /// Returns whether nothing is at work there any more.
  virtual bool has_left(int device) const = 0;
  /// The handover is over. The device may be in the same process as before; it may be lost. Also
  /// called for a handover that had begun before this listener was added.
  virtual void end_handover(int device, const caf::error& why) = 0;

protected:
  ~handover_listener() = default;
};

/// A request for a handover. No lane sees it.
class handover_request final : public operation_of<std::uint64_t> {
public:
  explicit handover_request(int device) : operation_of("hand_over", 0), device_(device) {}

  /// Returns false if the request has ended early.
  bool begin() noexcept;
  /// Notes what the request waits for, before it begins.
  void set_obstacle(const caf::error& what);

protected:
  void end_early(early_end how) noexcept override;

private:
  const int device_;
  std::mutex early_mutex_; ///< guards the members below
  caf::error obstacle_;
  bool begun_ = false;
  bool ended_early_ = false;
};

/// The handovers of one runtime. Each goes through these steps:
/// 1. The spare is started, if there is none, and maps the memory. All worlds with the device have
///    what they need to go on at once.
/// 2. The device is away (`lane::is_away`), and the worlds leave their communicators. What is on
///    the lanes ends.
/// 3. The lane moves the device (`lane::request_move`).
/// 4. The worlds go on, and so do the requests that waited.
/// A loss, a reset or a shutdown of the device ends the handover.
/// @thread any
class handovers {
public:
  explicit handovers(runtime& owner) : owner_(owner) {}

  /// Adds a user of devices, as long as it exists.
  void add_listener(std::weak_ptr<handover_listener> x);
  /// Begins a handover of the device, which is ready, as soon as it can begin.
  std::shared_ptr<operation_of<std::uint64_t>>
  start(const std::shared_ptr<lane>& on, std::chrono::steady_clock::time_point deadline);
  /// The result of `lane::request_move`. @thread the lane
  void on_moved(int device, const caf::error& why);
  /// The device is lost, is reset or ends, because of `why`.
  void end(int device, const caf::error& why);

private:
  enum class step : std::uint8_t { prepares, waits, drains, moves };
  struct handover {
    std::shared_ptr<handover_request> request;
    std::shared_ptr<lane> on;
    std::chrono::steady_clock::time_point begun{};
    std::atomic<step> at{step::prepares};
  };
  using entry = std::shared_ptr<handover>;

  caf::error check_start(const lane& on) const;
  void prepare(const entry& x);
  void look_soon(const entry& x, std::chrono::nanoseconds pause);
  void look(const entry& x);
  void try_begin(const entry& x);
  void drain(const entry& x);
  void finish(const entry& x, const caf::error& why);
  bool take(const entry& x);
  entry find(int device);
  std::vector<std::shared_ptr<handover_listener>> listeners();

  runtime& owner_;
  std::mutex mutex_; ///< guards the members below
  std::map<int, entry> all_;
  std::vector<std::weak_ptr<handover_listener>> listeners_;
};

} // namespace troupe::detail
