/// The shared state of a device: its phase, the lives of its memory and of its process, and the
/// buffers in its memory.
#pragma once

#include "operation/admission_lock.hpp"
#include <troupe/device_status.hpp>
#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace troupe::detail {

class buffer;
class lane;
struct borrowed_memory;

/// A device of one actor system. It outlives its lane while a handle to its memory exists.
class device_state : public std::enable_shared_from_this<device_state> {
public:
  device_state(std::uint64_t node, int ordinal) : node_(node), ordinal_(ordinal) {}
  ~device_state();
  device_state(const device_state&) = delete;
  device_state& operator=(const device_state&) = delete;

  std::uint64_t node() const noexcept { return node_; }
  int ordinal() const noexcept { return ordinal_; }

  /// Returns the generation whose memory may be used now; 0 if there is none.
  std::uint64_t live_generation() const noexcept {
    return live_generation_.load(std::memory_order_acquire);
  }
  /// Returns the present generation, or the last one.
  std::uint64_t generation() const noexcept { return generation_.load(std::memory_order_acquire); }
  /// As `device::incarnation`, while the device is ready; 0 if it is not.
  std::uint64_t live_incarnation() const noexcept {
    return live_incarnation_.load(std::memory_order_acquire);
  }
  /// Returns the present incarnation, or the last one.
  std::uint64_t incarnation() const noexcept {
    return incarnation_.load(std::memory_order_acquire);
  }
  device_phase phase() const noexcept { return phase_.load(std::memory_order_acquire); }
  /// Returns why the device is in its phase; no error if it is healthy.
  caf::error reason() const;

  /// Registers a watcher, which sees every change once and in order, and the present state first.
  /// It must not block, throw, or call this object. The result is the `id` for `unwatch`.
  std::uint64_t watch(std::function<void(const device_changed&)> watcher);
  void unwatch(std::uint64_t id) noexcept;

  /// Returns how many holds user streams (`acquire`) and other processes (`claim`) have on buffers.
  int acquired() const noexcept { return acquired_.load(); }
  void change_acquired(int by) noexcept { acquired_.fetch_add(by); }

  /// Keeps the memory for work on another device's lane, until `end_loan`. Under the admission
  /// lock: if the device is closed already, that lane sees it and does not issue the work.
  void lend() noexcept { loans_.fetch_add(1); }
  void end_loan() noexcept;
  bool is_lent() const noexcept;

  /// Makes handles stale and enters `phase` (INV-8: first step).
  void close(device_phase phase, const caf::error& why);
  /// Notes that the process that had the device is gone. Its memory may be kept: handles stay as
  /// they are.
  void lose_process(const caf::error& why);
  /// Begins a new generation, whose memory is ready (INV-8: last step).
  void publish();
  /// After `lose_process` or `leave_process`: the memory of this generation is ready again, in
  /// another process.
  void resume();
  /// Notes that the device, which is ready and has no work, is about to be in another process.
  /// Watchers are told when it is there.
  void leave_process() noexcept;
  /// After `leave_process`: the device is ready where it was. For watchers nothing has changed.
  void stay_in_process() noexcept;
  /// Returns whether the operation with this position may have work in a process that is lost, and
  /// whose work may still use memory that was kept, or that of other devices.
  bool is_lost(locked, std::uint64_t position) const noexcept {
    return position <= lost_until_ && position > lost_work_over_until_;
  }
  /// Returns whether such operations may exist.
  bool has_lost_work(locked) const noexcept { return has_lost_work(); }
  /// Returns whether they may exist on any device of the program.
  static bool any_has_lost_work(locked) noexcept { return with_lost_work_.load() != 0; }
  /// Returns the position of the last operation that may have work in a lost process.
  std::uint64_t lost_until(locked) const noexcept { return lost_until_; }
  /// Notes that the operations up to this position are of a lost process.
  void set_lost_until(locked, std::uint64_t position) noexcept {
    set_lost_work(std::max(position, lost_until_), lost_work_over_until_);
  }
  /// Notes that all work of the lost process is over that had operations up to this position.
  void set_lost_work_over(locked, std::uint64_t until) noexcept {
    set_lost_work(lost_until_, std::max(lost_work_over_until_, until));
  }
  /// Reports that an attempt to open the device failed.
  void report_failed_attempt(const caf::error& why);

  /// Memory that a handle has released, for the lane to take.
  struct released {
    void* address;
    std::uint64_t generation;
    std::function<void(void*)> deleter;
  };
  void release(released memory) noexcept;
  std::vector<released> take_released() noexcept;
  /// Passes memory that is not of the pool to its deleter.
  void hand_back(released memory) const noexcept;
  bool has_released() const noexcept { return has_released_.load(std::memory_order_acquire); }
  /// Ends the lane's part. From now on the thread that drops the last handle calls the deleter.
  void end_of_lane() noexcept;
  /// Stops giving memory back: deleters are kept, and not called. For a device whose work may go on
  /// without any means to know when it ends.
  void keep_memory() noexcept { keeps_memory_.store(true); }
  /// Sets the function that is called when there is something for the lane.
  void set_wake(std::function<void()> wake);

  std::shared_ptr<buffer> make_buffer(void* address, std::size_t size_bytes,
                                      std::function<void(void*)> deleter = {},
                                      bool has_no_peers = false);
  std::shared_ptr<buffer> make_buffer(borrowed_memory memory);
  std::shared_ptr<buffer> find_buffer(std::uint64_t id) const;
  /// Returns whether a handle refers to memory that its process lends.
  bool has_borrowed() const;
  void forget_buffer(std::uint64_t id) noexcept;

private:
  void change(device_phase phase, const caf::error& why); // under mutex_
  bool has_ended() const noexcept;                        // under mutex_
  bool has_lost_work() const noexcept { return lost_until_ != lost_work_over_until_; }
  void set_lost_work(std::uint64_t until, std::uint64_t over_until) noexcept;
  void begin_incarnation(); // under mutex_
  std::shared_ptr<buffer> noted(std::shared_ptr<buffer> x);

  static std::atomic<int> with_lost_work_; ///< number of devices

  const std::uint64_t node_;
  const int ordinal_;
  std::atomic<std::uint64_t> live_generation_{0};
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<std::uint64_t> live_incarnation_{0};
  std::atomic<std::uint64_t> incarnation_{0};
  std::uint64_t lost_until_ = 0;           ///< under the admission lock, as the next one
  std::uint64_t lost_work_over_until_ = 0; ///< never more than `lost_until_`
  std::atomic<device_phase> phase_{device_phase::opening};
  std::atomic<int> acquired_{0};
  std::atomic<int> loans_{0};
  mutable std::mutex mutex_;
  caf::error last_reason_;
  std::uint64_t next_watcher_ = 0;
  std::vector<std::pair<std::uint64_t, std::function<void(const device_changed&)>>> watchers_;

  mutable std::mutex buffers_mutex_;
  std::atomic<std::uint64_t> next_buffer_{1};
  std::unordered_map<std::uint64_t, std::weak_ptr<buffer>> buffers_;

  std::mutex released_mutex_;
  std::vector<released> released_;
  std::atomic<bool> has_released_{false};
  std::atomic<bool> keeps_memory_{false};
  bool lane_ended_ = false;
  std::function<void()> wake_;
};

/// Finds a device of this process by node and ordinal, for `gpu_token`.
std::shared_ptr<device_state> find_device(std::uint64_t node, int ordinal);
void register_device(const std::shared_ptr<device_state>& device);

} // namespace troupe::detail
