/// The causes for which devices lost their memory or their process, kept after the devices are
/// ready again.
#pragma once

#include "operation/device_watches.hpp"
#include <troupe/error.hpp>

#include <memory>
#include <vector>

namespace troupe::detail {

/// For owners of memory that their callers do not know. To such a caller `stale_ref`, `skipped` or
/// `indeterminate` tells nothing, but the cause of the loss does.
/// @thread any
class device_losses {
public:
  explicit device_losses(std::vector<std::shared_ptr<device_state>> devices);

  /// Returns `why`, or, if that follows from a loss of one of the devices, the last loss of it.
  caf::error cause_of(const caf::error& why) const;

private:
  struct loss;
  struct watched {
    std::shared_ptr<device_state> device;
    std::shared_ptr<loss> last;
  };

  std::vector<watched> all_;
  device_watches watches_;
};

} // namespace troupe::detail
