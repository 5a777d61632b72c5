/// A flight record as text, as `troupe-flight` reads it (docs/flight-recorder.md lists the fields).
#pragma once

#include "operation/flight_ring.hpp"
#include <troupe/device_status.hpp>
#include <troupe/error.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace troupe::detail {

/// The last operations of all lanes of a process, at one moment.
struct flight_snapshot {
  struct device {
    int ordinal = 0;
    std::uint64_t generation = 0;
    device_phase phase = device_phase::opening;
    caf::error reason;        ///< why it is in this phase
    std::uint64_t holder = 0; ///< the operation that the device's next one waits for
    std::vector<flight_entry> operations;
  };

  caf::error cause; ///< none: the record was requested
  std::int64_t caused_at = 0;
  std::int64_t taken_at = 0;  ///< nanoseconds of `clock`, as all times of the entries
  std::int64_t unix_time = 0; ///< the same moment, nanoseconds since 1970
  std::string host;
  std::int64_t process = 0;
  std::vector<device> devices;
};

/// The version of the format. It grows when a reader of the old format would misread the new one.
inline constexpr int flight_format_version = 1;

std::string to_json(const flight_snapshot& x);

} // namespace troupe::detail
