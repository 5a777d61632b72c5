/// Work on a device that blocks until a test releases it.
#pragma once

#include <troupe/device.hpp>

#include <cstdint>
#include <memory>
#include <vector>

namespace troupe::testing {

/// Work that blocks until open() is called, at the latest by the destructor. It is a launch in the
/// process of the device: a callable, or a registered launch if the device lives in a worker
/// process.
class gate {
public:
  /// For devices where this run has them.
  gate();
  /// For devices in worker processes, or in this process.
  explicit gate(bool for_workers);
  ~gate() { open(); }
  gate(const gate&) = delete;
  gate& operator=(const gate&) = delete;

  /// Blocks a stream, and the work behind it in stream order.
  pending<void> hold_stream(const device& on, std::vector<any_gpu_ref> reads = {},
                            std::vector<any_gpu_ref> writes = {},
                            request_options options = {}) const;
  /// Blocks the lane itself.
  pending<void> hold_lane(const device& on, std::vector<any_gpu_ref> reads = {},
                          std::vector<any_gpu_ref> writes = {}, request_options options = {}) const;
  /// The registered launch that blocks a stream of its device, wherever that is, with `arguments`.
  static constexpr const char* launch_name = "troupe.testing.hold_stream";
  std::vector<std::uint8_t> arguments() const;
  /// Blocks until the work has reached the gate. Returns false if it does not do so in time.
  bool wait_reached() const;
  void open() const;

  class state;

private:
  std::shared_ptr<state> state_;
  bool for_workers_;
};

} // namespace troupe::testing
