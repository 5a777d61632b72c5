/// Operations on the links between devices.
#pragma once

#include "operation/device_state.hpp"
#include "operation/operation.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace troupe::detail {

/// Findings of a device about its peers, and what it enabled for them.
struct peer_findings {
  struct peer {
    bool can_access = false;
    caf::error enabled;  ///< why it could not enable access to the peer
    caf::error admitted; ///< why it could not give the peer access to its pool
  };

  std::uint64_t generation = 0;
  std::uint64_t incarnation = 0;
  std::vector<peer> peers; ///< in the order of the request
};

/// Enables access from a device to others, and theirs to its pool, where possible. Idempotent.
class connect_peers_operation final : public operation_of<peer_findings> {
public:
  /// `on_found` is called on the lane with the findings, before the answer is visible.
  connect_peers_operation(std::vector<int> peers,
                          std::function<void(const peer_findings&)> on_found);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  bool bounded() const noexcept override { return false; }

protected:
  void on_success() noexcept override { on_found_(value); }
  void on_settled() noexcept override { on_found_ = nullptr; }

private:
  const std::vector<int> peers_;
  std::function<void(const peer_findings&)> on_found_;
};

/// A copy over the link of the device whose lane has it, to or from memory of another device. The
/// other device has no part in it, but keeps its memory until this is over.
class peer_copy_operation : public operation_of<nothing> {
public:
  /// `by`: ordinal of the device of `target` or `source`. `times`: how often to copy, to measure.
  peer_copy_operation(const any_gpu_ref& target, const any_gpu_ref& source, int by,
                      std::size_t times = 1);

  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  void on_part_done(part& p) noexcept override;
  void on_part_over(part& p) noexcept override;
  caf::error on_failed_work(part& p, caf::error why) noexcept override;
  bool borrows_from(int device) const noexcept override { return device == lender_->ordinal(); }

  /// When the lane began to issue it, and when the lane saw it done. Valid after success.
  clock::time_point issued_at() const noexcept { return issued_at_; }
  clock::time_point done_at() const noexcept { return done_at_; }

protected:
  void on_submit(locked) override;
  /// Called when a copy failed because of the link.
  virtual void on_link_failed(const caf::error& why) noexcept { static_cast<void>(why); }
  std::size_t size() const noexcept { return size_; }
  device_state& lender() const noexcept { return *lender_; }

private:
  std::byte* const target_;
  const std::byte* const source_;
  const std::size_t size_;
  const int target_device_;
  const int source_device_;
  const std::size_t times_;
  const std::shared_ptr<device_state> lender_;
  bool lent_ = false;
  clock::time_point issued_at_{};
  clock::time_point done_at_{};
};

inline std::byte* address_of(const any_gpu_ref& ref) {
  return ref.memory()->address() + ref.offset();
}

/// Returns `why`, the error of a copy, as errc::link_failed if the link may be the cause.
caf::error as_link_failure(const caf::error& why, int source_device, int target_device);

} // namespace troupe::detail
