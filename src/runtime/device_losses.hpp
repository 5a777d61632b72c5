/// The causes for which devices lost their memory, kept after the devices are ready again.
#pragma once

#include "operation/device_state.hpp"
#include <troupe/error.hpp>

#include <cstdint>
#include <memory>
#include <vector>

namespace troupe::detail {

/// For owners of memory that their callers do not know. To such a caller `stale_ref` tells nothing,
/// but the cause of the loss does.
/// @thread any
class device_losses {
public:
  explicit device_losses(std::vector<std::shared_ptr<device_state>> devices);
  ~device_losses();
  device_losses(const device_losses&) = delete;
  device_losses& operator=(const device_losses&) = delete;

  /// Returns `why`, or, if that is `stale_ref` of one of the devices, the last loss of that device.
  caf::error cause_of(const caf::error& why) const;

private:
  struct loss;
  struct watched {
    std::shared_ptr<device_state> device;
    std::shared_ptr<loss> last; // shared: its watcher may be about to be called
    std::uint64_t watcher = 0;
  };

  std::vector<watched> all_;
};

} // namespace troupe::detail
