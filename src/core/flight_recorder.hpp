/// Writes down what the lanes remember, when something ended or somebody asks.
#pragma once

#include "core/flight_json.hpp"
#include <troupe/detail/completion.hpp>
#include <troupe/runtime_options.hpp>

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

namespace troupe::detail {

struct nothing;
class runtime;
template <class T> class operation_of;

/// @thread any
class flight_recorder {
public:
  flight_recorder(runtime& owner, flight_record_options options)
      : owner_(owner), options_(std::move(options)) {}

  /// A communicator, a device or everything ended because of `cause`: if a path is configured and
  /// this cause was not written before, a thread of its own writes it.
  void on_end(const caf::error& cause) noexcept;

  /// Writes to `path`, on a thread of its own.
  std::shared_ptr<operation_of<nothing>> write(const std::string& path, clock::time_point deadline);

  flight_snapshot take() const;

  /// Waits until no record of this process is being written because something ended; false if that
  /// was not so until then.
  static bool wait_written(clock::time_point until);

private:
  /// Where the record of `cause` goes; empty: nowhere.
  std::string file_for(const caf::error& cause);

  runtime& owner_;
  const flight_record_options options_;
  std::mutex mutex_;
  std::size_t written_ = 0;
  std::deque<std::string> causes_; // that were written, the last ones
};

} // namespace troupe::detail
