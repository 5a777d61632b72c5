/// Writes the records of the lanes to a file, after a failure or on request.
#pragma once

#include "flight/flight_json.hpp"
#include "runtime/runtime.hpp"
#include <troupe/detail/completion.hpp>
#include <troupe/runtime_options.hpp>

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

namespace troupe::detail {

/// @thread any
class flight_recorder final : public runtime_listener {
public:
  flight_recorder(runtime& owner, flight_record_options options)
      : owner_(owner), options_(std::move(options)) {}

  /// Called when a communicator, a device or the runtime has ended because of `cause`. If a path is
  /// configured and this cause was not written before, a thread of its own writes a record.
  void on_end(const caf::error& cause) noexcept override;

  /// Writes a record to `path`, on a thread of its own.
  std::shared_ptr<operation_of<nothing>> write(const std::string& path, clock::time_point deadline);

  flight_snapshot take() const;

  /// Blocks until this process writes no record of an end. Returns false if `until` comes first.
  static bool wait_written(clock::time_point until);

private:
  /// Returns the file for the record of `cause`; empty if none is to be written.
  std::string file_for(const caf::error& cause);

  runtime& owner_;
  const flight_record_options options_;
  std::mutex mutex_;
  std::size_t written_ = 0;
  std::deque<std::string> causes_; // the last ones that were written
};

} // namespace troupe::detail
