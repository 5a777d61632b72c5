/// Devices with the faults of a plan.
#pragma once

#include "backend/faults/fault_injector.hpp"
#include <troupe/backend.hpp>

#include <memory>

namespace troupe::detail {

/// Returns `inner` with the faults of `injector`. While the device is open, it is in `devices`.
std::unique_ptr<backend_device> make_faulty_device(std::unique_ptr<backend_device> inner,
                                                   std::shared_ptr<fault_injector> injector,
                                                   std::shared_ptr<open_devices> devices,
                                                   int ordinal);

} // namespace troupe::detail
