/// The devices of a parent whose GPUs live in worker processes, as a backend.
#pragma once

#include "worker/worker_pool.hpp"
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
  /// `name`: of what executes in the workers.
  /// `limits`: what `call_limit` and `build_limit` say
  worker_backend(std::shared_ptr<worker_pool> pool, std::string name,
                 const worker_settings& limits = {});

  std::string_view name() const noexcept override { return name_; }
  int device_count() const noexcept override { return pool_->device_count(); }
  device_place place_of(int ordinal) const { return pool_->place_of(ordinal); }
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override;
  caf::expected<peer_link> link(int from, int to) noexcept override;
  /// Means nothing: `build` lets the first rank's worker make the one that counts, since it must
  /// live as long as the communicator.
  caf::expected<communicator_id> make_communicator_id() noexcept override;
  /// @errors errc::worker_lost, too: one of the workers is gone; what the others have built, ends
  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override;
  caf::error provide_spare(int ordinal) noexcept override;
  caf::error tell(int ordinal, std::span<const std::byte> what) noexcept override;
  void set_listener(
      std::function<void(int ordinal, std::span<const std::byte> what)> f) noexcept override {
    pool_->set_listener(std::move(f));
  }
  bool is_current(const backend_communicator& rank, int ordinal) const noexcept override;
  caf::error abort(communicator_ranks ranks) noexcept override;
  caf::error destroy(communicator_ranks ranks) noexcept override;
  /// Kills its worker.
  bool give_up(int ordinal, const caf::error& why) noexcept override;

private:
  caf::error end(control how, const communicator_ranks& ranks) noexcept;
  caf::error check(int ordinal) const;

  const std::shared_ptr<worker_pool> pool_;
  const std::string name_;
  const std::chrono::nanoseconds call_limit_;
  const std::chrono::nanoseconds build_limit_;
  /// Workers build one communicator after the other, all in the same order: each connects it beside
  /// the work of others, and two at a time could wait for each other.
  std::mutex building_;
};

} // namespace troupe::detail
