/// What a world does on its lanes: collectives, and connecting a communicator.
#pragma once

#include "core/communicator.hpp"
#include "core/operation.hpp"
#include "core/operations.hpp"
#include "core/rank_call.hpp"
#include <troupe/collective.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace troupe::detail {

class world_core;

/// One collective, message or group: a part for each rank that takes part.
class collective_operation final : public operation_of<collective_done> {
public:
  /// `calls` is sorted by rank and not empty; what its ranges refer to lives until this returns.
  collective_operation(const char* verb, std::shared_ptr<world_core> world,
                       std::vector<rank_call> calls, std::uint64_t membership);
  caf::error on_check() const override;
  caf::error on_admit() override;
  const void* waits_for() const override;
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  void on_lost_part(part& p, const caf::error& why) noexcept override;
  void on_part_done(part& p) noexcept override;
  void on_stall() noexcept override;
  const void* communicator_key() const noexcept override { return communicator_key_.load(); }

protected:
  void on_submit() override;
  void before_answer(const caf::error& error) noexcept override;

private:
  void wait_no_more() noexcept;
  void add_uses(const rank_call& call, std::size_t index);

  const std::shared_ptr<world_core> world_;
  const std::vector<rank_call> calls_;
  std::vector<std::span<const rank_call>> calls_of_; // of each part
  const std::uint64_t membership_;
  std::atomic<bool> waiting_{false}; // counts at its world
  std::shared_ptr<communicator> communicator_;
  std::atomic<const void*> communicator_key_{nullptr}; // for those who look at it while it waits
};

/// Makes all connections of a new communicator, in the order of all other work on its devices. The
/// call blocks until every rank is in it: the lanes wait for each other before they make it, so
/// that one that is busy keeps no other inside.
class connect_operation final : public operation_of<nothing> {
public:
  connect_operation(std::shared_ptr<communicator> target,
                    const std::vector<std::shared_ptr<lane>>& lanes,
                    std::chrono::nanoseconds limit);
  bool bounded() const noexcept override { return false; }
  bool holds_lane() const noexcept override { return true; }
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  caf::expected<issue_outcome> proceed(part& p, lane& on) override;
  void on_lost_part(part& p, const caf::error& why) noexcept override;
  void on_stall() noexcept override;
  const void* communicator_key() const noexcept override { return communicator_.get(); }

private:
  const std::shared_ptr<communicator> communicator_;
  std::atomic<std::size_t> arrived_{0};
};

} // namespace troupe::detail
