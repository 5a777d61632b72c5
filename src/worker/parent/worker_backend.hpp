/// Backend of a parent whose GPUs are in worker processes.
#pragma once

#include "worker/parent/worker_pool.hpp"
#include <troupe/backend.hpp>
#include <troupe/worker.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace troupe::detail {

class worker_backend final : public backend {
public:
  /// `name`: of the backend in the workers.
  /// `limits`: `call_limit` and `build_limit` are used
  worker_backend(std::shared_ptr<worker_pool> pool, std::string name,
                 const worker_settings& limits = {});

  std::string_view name() const noexcept override { return name_; }
  int device_count() const noexcept override { return pool_->device_count(); }
  device_place place_of(int ordinal) const { return pool_->place_of(ordinal); }
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override;
  caf::expected<peer_link> link(int from, int to) noexcept override;
  /// Returns an id that `build` ignores. `build` lets the worker of the first rank create the real
  /// one, because that must live as long as the communicator.
  caf::expected<communicator_id> make_communicator_id() noexcept override;
  /// @errors also errc::worker_lost: a worker is gone, and the other ranks are aborted
  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override;
  std::shared_ptr<const void> keep_for_peers(int ordinal, const void* memory,
                                             std::size_t size_bytes) noexcept override;
  std::shared_ptr<const shared_word> take_word(int ordinal, std::uint64_t value) noexcept override;
  bool can_be_direct(std::span<const int> ordinals) const noexcept override;
  caf::expected<communicator_ranks>
  build_direct(std::span<const local_rank> ranks) noexcept override;
  caf::error provide_spare(int ordinal) noexcept override;
  caf::error prepare_move(int ordinal) noexcept override;
  caf::error tell(int ordinal, std::span<const std::byte> what) noexcept override;
  void set_listener(
      std::function<void(int ordinal, std::span<const std::byte> what)> f) noexcept override {
    pool_->set_listener(std::move(f));
  }
  bool is_current(const backend_communicator& rank, int ordinal) const noexcept override;
  caf::error abort(communicator_ranks ranks) noexcept override {
    return end(control::abort, ranks);
  }
  caf::error destroy(communicator_ranks ranks) noexcept override {
    return end(control::destroy, ranks);
  }
  /// Kills the worker of the device.
  bool give_up(int ordinal, const caf::error& why) noexcept override;

private:
  caf::error end(control how, const communicator_ranks& ranks) noexcept;
  caf::error check(int ordinal) const;
  /// Returns the workers of ranks.
  /// @errors errc::invalid_argument: no such ordinals; errc::worker_lost: one has no worker
  caf::expected<std::vector<std::shared_ptr<worker_link>>>
  links_of(std::span<const local_rank> ranks) const;
  /// Makes the memory of a rank of a direct communicator (`direct_member::memory`).
  caf::expected<std::shared_ptr<shared_slab>> make_direct_memory(int ordinal, worker_link& in);
  /// Maps the memory of other devices in the spare of a device, as in its worker.
  caf::error admit_spare(int ordinal, const std::shared_ptr<worker_link>& spare);

  const std::shared_ptr<worker_pool> pool_;
  const std::string name_;
  const std::chrono::nanoseconds call_limit_;
  const std::chrono::nanoseconds build_limit_;
  const kept_memory keep_memory_;
  /// Workers build one communicator at a time, all in the same order. Each connects it beside other
  /// work, and two builds at a time could wait for each other.
  std::mutex building_;
};

} // namespace troupe::detail
