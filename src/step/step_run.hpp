/// One run of a step as its requests.
#pragma once

#include "operation/operation.hpp"
#include "step/step_requests.hpp"
#include <troupe/step.hpp>

#include <atomic>
#include <cstddef>

namespace troupe::detail {

/// Collects the answers of the operations of one run, and answers when all of them have. It has no
/// part on a lane.
class step_run final : public operation_of<step_done> {
public:
  step_run() : operation_of("step", 0) {}

  /// Takes over the operations, which are admitted.
  void begin(step_operations x);

protected:
  /// The last operation first: one that is not withdrawn runs behind all that come before it.
  void end_early(early_end how) noexcept override;

private:
  void note_answer() noexcept;
  caf::error first_error() const;

  step_operations operations_;
  std::atomic<std::size_t> open_{0};
};

} // namespace troupe::detail
