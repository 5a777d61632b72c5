/// The last operations of every device, written to a file on request. For records of failures see
/// `flight_record_options`; `troupe-flight` reads both.
#pragma once

#include <troupe/collective.hpp>
#include <troupe/detail/caf_compat.hpp>
#include <troupe/detail/type_ids.hpp>
#include <troupe/pending.hpp>

#include <caf/actor_system.hpp>

#include <string>

namespace troupe {

/// Sent to a device or a world: writes the last 4,096 operations of each device of its actor system
/// to `path`, a file on its machine. An existing file is replaced when the new one is complete.
/// Reply: an empty message.
/// @errors errc::invalid_argument: an empty path; errc::unavailable: the file cannot be written,
///         with the system's reason, and an existing file remains; errc::deadline_exceeded: not
///         written yet, but it will be if possible
struct record_flight {
  std::string path = {};
  request_options options = {};
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, record_flight& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::record_flight", field("path", x.path),
                        field("options", x.options));
}

/// Same as the message `record_flight`. It needs no lane, so it works while one is stuck, and after
/// a fault that ended all CUDA work.
/// @errors errc::invalid_argument, too: the system's configuration is not a `troupe::config`
pending<void> write_flight_record(caf::actor_system& sys, const std::string& path,
                                  request_options options = {});

} // namespace troupe
