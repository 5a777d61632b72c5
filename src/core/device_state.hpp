/// What everybody may know of a device: which life it is in, and who lives in its memory.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/device_status.hpp>
#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>

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
class symmetric_memory;
struct borrowed_memory;

/// A device of one actor system. Outlives its lane, as long as a handle to its memory does.
class device_state : public std::enable_shared_from_this<device_state> {
public:
  device_state(std::uint64_t node, int ordinal) : node_(node), ordinal_(ordinal) {}

  std::uint64_t node() const noexcept { return node_; }
  int ordinal() const noexcept { return ordinal_; }

  /// The generation whose memory may be used now; 0 while there is none.
  std::uint64_t live_generation() const noexcept {
    return live_generation_.load(std::memory_order_acquire);
  }
  /// The generation that is, or was last.
  std::uint64_t generation() const noexcept { return generation_.load(std::memory_order_acquire); }
  device_phase phase() const noexcept { return phase_.load(std::memory_order_acquire); }
  /// Why it is in this phase; none while all is well.
  caf::error reason() const;

  /// Watchers see every change once and in order; a new one sees the present first. `watcher` must
  /// not block, not throw and not come back here. The result ends it.
  std::uint64_t watch(std::function<void(const device_changed&)> watcher);
  void unwatch(std::uint64_t id) noexcept;

  /// How often user streams (`acquire`) and other processes (`claim`) hold buffers.
  int acquired() const noexcept { return acquired_.load(); }
  void change_acquired(int by) noexcept { acquired_.fetch_add(by); }

  /// Work that comes to another device's lane uses its memory, which stays until that is over.
  /// Under the lock of the order: if it is closed already, that lane sees so and does not issue it.
  void lend() noexcept { loans_.fetch_add(1); }
  /// The same; false, and nothing is lent, if it is closed.
  bool lend_if_live() noexcept;
  void end_loan() noexcept;
  bool is_lent() const noexcept;

  /// Handles become stale; what is next is `phase`. (INV-8: first step)
  void close(device_phase phase, const caf::error& why);
  /// A new generation is in place: memory can be had. (INV-8: last step)
  void publish();
  /// The device did not come up.
  void report_failed_attempt(const caf::error& why);

  /// Where lanes and handles meet. The lane takes these entries when it comes by.
  struct released {
    void* address;
    std::uint64_t generation;
    std::function<void(void*)> deleter;
  };
  void release(released memory) noexcept;
  std::vector<released> take_released() noexcept;
  /// Gives foreign memory to its deleter.
  void hand_back(released memory) const noexcept;
  bool has_released() const noexcept { return has_released_.load(std::memory_order_acquire); }
  /// From now on nobody comes by: foreign memory is handed back by whoever drops its last handle.
  void end_of_lane() noexcept;
  /// From now on no memory is given back: its deleters are kept, and not called.
  /// For a device whose work may go on though nobody can know of it any more.
  void keep_memory() noexcept { keeps_memory_.store(true); }
  /// Calls `wake` when there is something for the lane.
  void set_wake(std::function<void()> wake);

  std::shared_ptr<buffer> make_buffer(void* address, std::size_t size_bytes,
                                      std::function<void(void*)> deleter = {},
                                      std::shared_ptr<symmetric_memory> symmetric = {});
  std::shared_ptr<buffer> make_buffer(borrowed_memory memory);
  std::shared_ptr<buffer> find_buffer(std::uint64_t id) const;
  void forget_buffer(std::uint64_t id) noexcept;

private:
  void change(device_phase phase, const caf::error& why); // under mutex_
  std::shared_ptr<buffer> noted(std::shared_ptr<buffer> x);

  const std::uint64_t node_;
  const int ordinal_;
  std::atomic<std::uint64_t> live_generation_{0};
  std::atomic<std::uint64_t> generation_{0};
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

/// Devices of this process by node and ordinal, for `gpu_token`.
std::shared_ptr<device_state> find_device(std::uint64_t node, int ordinal);
void register_device(const std::shared_ptr<device_state>& device);

} // namespace troupe::detail
