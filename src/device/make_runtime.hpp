/// A runtime with all its parts.
#pragma once

#include "runtime/runtime.hpp"
#include <troupe/backend.hpp>
#include <troupe/runtime_options.hpp>

#include <memory>

namespace troupe::detail {

/// @throws std::system_error: the system gives no thread for the deadline_watch
std::shared_ptr<runtime> make_runtime(std::shared_ptr<troupe::backend> backend,
                                      const lane_options& options,
                                      flight_record_options record = {});

} // namespace troupe::detail
