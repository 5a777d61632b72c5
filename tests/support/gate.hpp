/// Work on a device that stands still for as long as a test wants.
#pragma once

#include <troupe/device.hpp>

#include <memory>
#include <vector>

namespace troupe::testing {

/// Work that stands still until it is let go, at the latest by the destructor. It is a launch, made
/// where the device lives: a callable, or in a worker process a registered launch.
class gate {
public:
  gate();
  ~gate() { open(); }
  gate(const gate&) = delete;
  gate& operator=(const gate&) = delete;

  /// Holds the stream, and with it what comes behind in order.
  pending<void> hold_stream(const device& on, std::vector<any_gpu_ref> reads = {},
                            std::vector<any_gpu_ref> writes = {},
                            request_options options = {}) const;
  /// Holds the lane itself.
  pending<void> hold_lane(const device& on, std::vector<any_gpu_ref> reads = {},
                          std::vector<any_gpu_ref> writes = {}, request_options options = {}) const;
  /// False if nobody comes to the gate in time.
  bool wait_reached() const;
  void open() const;

  class state;

private:
  std::shared_ptr<state> state_;
};

} // namespace troupe::testing
