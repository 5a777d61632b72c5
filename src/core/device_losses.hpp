/// Why devices lost their memory, also once they are ready again.
#pragma once

#include "core/device_state.hpp"
#include <troupe/error.hpp>

#include <cstdint>
#include <memory>
#include <vector>

namespace troupe::detail {

/// For who keeps memory that nobody else knows: that it is stale tells his callers nothing, but why
/// does.
/// @thread any
class device_losses {
public:
  explicit device_losses(std::vector<std::shared_ptr<device_state>> devices);
  ~device_losses();
  device_losses(const device_losses&) = delete;
  device_losses& operator=(const device_losses&) = delete;

  /// `why`, or, if that is stale memory of one of the devices, the last loss of that device.
  caf::error cause_of(const caf::error& why) const;

private:
  struct loss;
  struct watched {
    std::shared_ptr<device_state> device;
    std::shared_ptr<loss> last; // its watcher may be about to be called
    std::uint64_t watcher = 0;
  };

  std::vector<watched> all_;
};

} // namespace troupe::detail
