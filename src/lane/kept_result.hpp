/// The results of work that is done in another process, which may be lost.
#pragma once

#include "operation/operation.hpp"
#include <troupe/error.hpp>

namespace troupe::detail {

/// Keeps what `p`, whose work is done, has written. If nothing else of its operation is open, a
/// loss that comes from now on can no longer fail it. If it has failed, only the loss of `device`,
/// which is its own, may be the cause. The result of a collective is right only with those of the
/// other ranks.
/// @thread the lane of `p`
inline void keep_result(part& p, int device) noexcept {
  auto& op = *p.of;
  if (op.parts().size() != 1 || p.stream == stream_kind::collective || !op.has_right_result(p) ||
      op.succeed_if_last())
    return;
  if (const auto cause = failure_of(op.cause());
      cause && cause->code == errc::worker_lost && cause->device == device)
    p.delivered.store(true);
}

} // namespace troupe::detail
