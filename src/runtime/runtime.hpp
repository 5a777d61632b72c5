/// The data side of one actor system: its devices' lanes, the one order of all operations, the
/// deadline_watch, and threads for blocking work. It knows no actors.
#pragma once

#include "admission/admission.hpp"
#include "admission/deadline_watch.hpp"
#include "foundation/background.hpp"
#include "lane/lane.hpp"
#include "operation/operation.hpp"
#include "runtime/handovers.hpp"
#include "runtime/retry_queue.hpp"
#include <troupe/backend.hpp>
#include <troupe/runtime_options.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace troupe::detail {

class flight_recorder;
class memory_exchange;

/// A part of a runtime that belongs to a module above. @thread any
class runtime_listener {
public:
  /// A note about memory arrived from the process that has device `ordinal`.
  virtual void on_memory_note(int ordinal, std::span<const std::byte> note) {
    static_cast<void>(ordinal);
    static_cast<void>(note);
  }
  /// Devices closed because of `why`: their memory is gone, or the process that had it, or both.
  virtual void on_devices_closed(const caf::error& why) { static_cast<void>(why); }
  /// All work of lost processes that had device `ordinal` is over. Only if its memory was to be
  /// kept.
  virtual void on_lost_work_over(int ordinal) { static_cast<void>(ordinal); }
  /// A communicator, a device or the runtime has ended because of `why`.
  virtual void on_end(const caf::error& why) noexcept { static_cast<void>(why); }
  /// The runtime closes: no more notes are sent to other processes.
  virtual void on_close() noexcept {}

protected:
  ~runtime_listener() = default;
};

class runtime final : public lane_owner, public std::enable_shared_from_this<runtime> {
public:
  runtime(std::shared_ptr<troupe::backend> backend, const lane_options& options);
  ~runtime() override;

  /// Answers all requests and ends all lanes. Stuck threads are abandoned, and keep what they need.
  void close() noexcept;

  troupe::backend& backend() const noexcept { return *backend_; }
  int device_count() const noexcept { return static_cast<int>(slots_.size()); }
  deadline_watch& deadlines() noexcept { return deadlines_; }
  background& workers() noexcept { return workers_; }
  /// Adds the parts of the modules above, and their listeners. Before the runtime is used
  /// (`make_runtime`).
  void add_parts(std::shared_ptr<memory_exchange> memory, std::shared_ptr<flight_recorder> recorder,
                 std::vector<runtime_listener*> listeners);
  flight_recorder& recorder() noexcept { return *recorder_; }
  memory_exchange& memory() noexcept { return *memory_; }
  /// Tells the listeners that a communicator, a device or the runtime has ended.
  void note_end(const caf::error& why) noexcept;
  /// Identifies the devices of this actor system in tokens.
  std::uint64_t node() const noexcept { return node_; }

  /// Returns the lane of a device, and starts it at the first call.
  /// @errors errc::invalid_argument: no such ordinal; errc::unavailable
  caf::expected<std::shared_ptr<lane>> lane_of(int ordinal);
  /// The same for several devices; if one of them does not exist, none is started.
  caf::expected<std::vector<std::shared_ptr<lane>>> lanes_of(std::span<const int> ordinals);
  /// Returns the lanes that were started, in the order of their devices.
  std::vector<std::shared_ptr<lane>> lanes();

  /// Admits `op`; a refusal becomes its answer. May block, as `room` says.
  void start(const std::shared_ptr<operation>& op, room_policy room = room_policy::wait);
  /// The same for a user's request.
  void start(const std::shared_ptr<operation>& op, const request_options& options);
  admission& admissions() noexcept { return *admission_; }
  /// Makes `x`, which a loss has ended, again: at the end of that loss, or soon.
  void retry(std::shared_ptr<retryable> x);

  /// Begins the next generation of the device (INV-8). Answers when that is ready.
  std::shared_ptr<operation_of<std::uint64_t>> reset(int ordinal, clock::time_point deadline);
  /// Moves the device to its spare, with its memory. Answers with its next incarnation.
  std::shared_ptr<operation_of<std::uint64_t>> hand_over(int ordinal, clock::time_point deadline);
  handovers& moves() noexcept { return moves_; }
  /// Shuts the device down; it has no next generation.
  void shut_down(int ordinal, const caf::error& why);

  /// Notes that the answer of `op` goes to a mailbox, so that it comes before the actors end.
  void reply_to_actor(operation& op) noexcept;
  /// Called when a root of the actors begins and ends. It ends with the last handle; the next one
  /// begins another. When the last root ends, all requests that reply to mailboxes are answered.
  void begin_replies() noexcept { roots_.fetch_add(1); }
  void end_replies() noexcept;

  /// Calls `f`, on any thread, with the ordinal of each lost device and the reason, and without one
  /// when that device is back or will not come back, as long as `who` exists.
  void watch_losses(std::weak_ptr<void> who, std::function<void(int, const caf::error&)> f);

  /// Sends a note (`process_note`) to the process that has a device.
  /// @errors errc::not_supported: the device is in this process; errc::worker_lost
  caf::error tell(int ordinal, std::span<const std::byte> note) noexcept {
    return backend_->tell(ordinal, note);
  }
  /// Sets `f`, which is called on any thread with the notes of such processes about programs.
  void hear_programs(std::function<void(int ordinal, std::span<const std::byte> what)> f);

  /// Communicators hold the devices that they run on: a reset waits for them to end.
  void hold(int ordinal) noexcept;
  void unhold(int ordinal) noexcept;

  /// Ends all use of devices: CUDA is unusable in this process, or a lane is stuck for ever.
  /// Answers all requests with `why`, or the first cause if there was one, and returns that cause.
  caf::error end_everything(const caf::error& why) noexcept;
  /// The same for a sticky fault, detected at `seen`. Its origin is the device that was at work, if
  /// there was only one; else it is unknown.
  caf::error end_with_fault(const std::string& seen, const caf::error& why) noexcept;
  bool ended() const noexcept { return ended_.load(std::memory_order_acquire); }

  caf::error on_fault(lane& where, const caf::error& why) noexcept override;
  void on_device_failed(lane& where, const caf::error& why) noexcept override;
  void on_device_lost(lane& where) noexcept override;
  void on_device_back(lane& where) noexcept override;
  void on_memory_lost(lane& where, const caf::error& why) noexcept override;
  void run_later(std::function<void()> job) override { workers_.run(std::move(job)); }
  void on_lost_process(lane& where, lost_process x, const caf::error& why) noexcept override;
  void on_moved(lane& where, const caf::error& why) noexcept override;

private:
  caf::error check_ordinal(int x) const;

  struct slot {
    std::shared_ptr<lane> worker;
    int holders = 0;
    bool reset_wanted = false;
    bool stop_wanted = false;
    std::deque<lost_process> lost{}; ///< whose work is not over yet
    bool watches_lost = false;       ///< a thread or a timer is in `watch_lost`
  };

  void make_again();
  void make_again_at(clock::time_point when);
  void refuse_retries();
  void end_loss();
  void watch_lost(int ordinal);
  void tell_watchers(int ordinal, const caf::error& why);
  bool is_written_by_peers(const part& p) const; // under slots_mutex_
  bool end_lost(slot& s);

  void watch_reset(const std::shared_ptr<lane>& worker, std::uint64_t generation,
                   const std::shared_ptr<operation_of<std::uint64_t>>& answer);
  struct noted_loss;
  std::optional<noted_loss> note_lost(lane& where);
  static void note_lost_work(device_state& state, lost_process& x, const caf::error& why);
  std::vector<std::shared_ptr<operation>> users_of(int ordinal, bool only_with_memory);
  void fail_users_of(int ordinal, const caf::error& why, bool only_with_memory);
  void act_on_quiet(slot& s); // under slots_mutex_
  void hear(int ordinal, std::span<const std::byte> note);
  void note_closed(const caf::error& why);
  struct note_gate;

  const std::shared_ptr<troupe::backend> backend_;
  const lane_options options_;
  const std::uint64_t node_;
  std::mutex slots_mutex_;
  std::vector<slot> slots_;
  std::atomic<bool> ended_{false};
  std::mutex end_mutex_;
  caf::error end_cause_;      // under end_mutex_
  std::atomic<int> roots_{0}; ///< whose actors have mailboxes
  bool closed_ = false;       // under slots_mutex_
  std::mutex losses_mutex_;
  std::vector<std::pair<std::weak_ptr<void>, std::function<void(int, const caf::error&)>>> losses_;
  deadline_watch deadlines_;
  const std::shared_ptr<admission> admission_ = std::make_shared<admission>(deadlines_);
  retry_queue retries_{*admission_};
  std::atomic<bool> retries_soon_{false};
  background workers_;
  handovers moves_{*this};
  std::shared_ptr<memory_exchange> memory_;
  std::mutex notes_mutex_;
  std::function<void(int, std::span<const std::byte>)> on_program_note_;
  const std::shared_ptr<note_gate> gate_;
  bool hears_ = false; // under slots_mutex_
  std::shared_ptr<flight_recorder> recorder_;
  std::vector<runtime_listener*> listeners_;
};

} // namespace troupe::detail
