/// Memory that is lent to another process.
#pragma once

#include "operation/operation.hpp"
#include <troupe/gpu_ref.hpp>
#include <troupe/launch.hpp>

#include <memory>
#include <utility>
#include <vector>

namespace troupe::detail {

/// Lets another process use a buffer, until this object is destroyed.
class memory_lease {
public:
  /// Takes over the buffer from a `lend_operation` that succeeded.
  memory_lease(std::shared_ptr<buffer> memory, access_mode mode) noexcept
      : memory_(std::move(memory)), mode_(mode) {}
  ~memory_lease();
  memory_lease(const memory_lease&) = delete;
  memory_lease& operator=(const memory_lease&) = delete;

private:
  const std::shared_ptr<buffer> memory_;
  const access_mode mode_;
};

/// Finishes when no earlier work uses the memory. If it succeeds, the requester holds the buffer,
/// for another process (`memory_lease`) or for foreign code of this one, until it gives it back.
/// Indeterminate or skipped ranges stay so.
class lend_operation final : public operation_of<nothing> {
public:
  /// `verb`: the request for which the memory is lent; of static lifetime.
  lend_operation(const char* verb, any_gpu_ref ref, access_mode mode);
  bool marks_skipped() const noexcept override { return false; }
  caf::error on_admit(locked lock, queue_bound bound) override;
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  const any_gpu_ref& ref() const noexcept { return ref_; }
  access_mode mode() const noexcept { return mode_; }
  /// Returns the indeterminate or skipped ranges of the memory, if it is lent for writing.
  const std::vector<buffer::unreadable_range>& unreadable() const noexcept { return unreadable_; }

protected:
  void on_leave(locked lock) noexcept override;
  void on_success() noexcept override;
  void on_settled() noexcept override;

private:
  const any_gpu_ref ref_;
  const access_mode mode_;
  std::vector<buffer::unreadable_range> unreadable_;
};

} // namespace troupe::detail
