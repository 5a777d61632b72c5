/// The results that a lost process has written completely.
#pragma once

#include "operation/operation.hpp"
#include <troupe/error.hpp>

namespace troupe::detail {

/// Keeps what `p`, whose work is done, has written, if only the loss of `device`, which is its own,
/// has failed it. The result of a collective is right only with those of the other ranks.
/// @thread the lane of `p`
inline void keep_result(part& p, int device) noexcept {
  const auto cause = failure_of(p.of->cause());
  if (p.of->parts().size() == 1 && p.stream != stream_kind::collective && cause &&
      cause->code == errc::worker_lost && cause->device == device && p.of->has_right_result(p))
    p.delivered.store(true);
}

} // namespace troupe::detail
