/// A pool of workers that are child processes of this process.
#pragma once

#include "worker/parent/open_count.hpp"
#include "worker/parent/worker_command.hpp"
#include "worker/parent/worker_pool.hpp"
#include "worker/parent/worker_process.hpp"
#include "worker/parent/worker_slot.hpp"
#include <troupe/worker.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

namespace troupe::detail {

class process_pool final : public worker_pool, public std::enable_shared_from_this<process_pool> {
public:
  /// Starts the first device's worker, which reports the number of devices.
  /// `lends`: this process has `device_slabs` for the devices, from which it lends to programs
  /// @errors errc::unavailable: it cannot be started, or there is no device
  static caf::expected<std::shared_ptr<process_pool>> create(worker_backend_options options,
                                                             bool lends = true);
  ~process_pool() override;

  int device_count() const noexcept override { return static_cast<int>(slots_.size()); }
  caf::expected<std::shared_ptr<worker_link>>
  provide(int ordinal, const std::stop_token& stop = {}) noexcept override;
  std::shared_ptr<worker_link> current(int ordinal) const noexcept override {
    return slot_of(ordinal).current();
  }
  caf::error provide_spare(int ordinal, const std::stop_token& stop = {}) noexcept override;
  std::shared_ptr<worker_link> spare(int ordinal) const noexcept override {
    return slot_of(ordinal).spare();
  }
  caf::error move_to_spare(int ordinal, const worker_link& spare) noexcept override;
  void release(int ordinal) noexcept override;
  bool reaches(int from, int to) const noexcept override;

private:
  /// A worker's process. It exists as long as a reference to its link.
  struct life;
  struct running {
    std::shared_ptr<worker_link> link;
    std::shared_ptr<life> of;
    std::thread receiver;
    int devices = 0;                    ///< number of the host's devices
    std::vector<std::uint64_t> reaches; ///< as `worker_description::reaches`
  };

  process_pool(worker_backend_options options, worker_command command, bool lends)
      : worker_pool(std::make_shared<shared_segments>(), options.cuda.keep_freed),
        options_(std::move(options)), command_(std::move(command)), lends_(lends) {}
  worker_options process_options() const;
  caf::expected<running> start(int ordinal, const std::stop_token& stop = {});
  void wait_for_ends(const std::stop_token& stop) noexcept;
  /// Sends a started worker its settings. `limit`: for its answer
  caf::error set_up(running& x, std::chrono::nanoseconds limit);
  /// Starts a worker as a spare.
  caf::expected<running> start_warm(int ordinal, const std::stop_token& stop) noexcept;
  void end(running& x, const caf::error& why) noexcept;
  /// Lets the worker end by itself, as far as it does in time.
  void end_in_order(running& x, const caf::error& why) noexcept;
  void end_all(std::vector<running> lost) noexcept;
  /// Does the same on a thread of its own, because it waits for processes to be gone.
  void end_soon(std::vector<running> lost) noexcept;
  /// Ends the former worker of a device that has moved to its spare, on a thread of its own.
  void end_former(running former) noexcept;
  worker_slot<running>& slot_of(int ordinal) const noexcept {
    return *slots_[static_cast<std::size_t>(ordinal)];
  }

  const worker_backend_options options_;
  const worker_command command_;
  const bool lends_; ///< as `worker_setup::lends`
  std::vector<std::unique_ptr<worker_slot<running>>> slots_;
  std::vector<std::uint64_t> reaches_; ///< of the first worker; empty: nothing can be direct
  const std::shared_ptr<open_count> ends_ = std::make_shared<open_count>(); ///< of lost processes
};

} // namespace troupe::detail
