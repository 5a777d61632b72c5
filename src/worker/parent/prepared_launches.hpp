/// The launches of libraries that the worker of a device has prepared.
#pragma once

#include "worker/protocol/protocol.hpp"
#include <troupe/launch_memory.hpp>

#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

namespace troupe::detail {

class worker_link;

/// Returns what a library may look at when it prepares `what`: its memory is at other addresses of
/// the same alignment. For no stream.
launch_request as_prepared(const registered_call& what);
/// Returns whether `x` is `as_prepared(what)`.
bool prepares(const launch_request& x, const registered_call& what) noexcept;

/// Remembers the last launches that were prepared, so that each spare prepares them in advance.
/// @thread any
class prepared_launches {
public:
  static constexpr std::size_t most = 256;

  /// @param x a `launch_request` as it is sent
  void add(std::vector<std::byte> x);
  /// Prepares them in a worker that has no device lane yet. What it cannot prepare is logged.
  /// @errors errc::worker_lost
  caf::error prepare_in(worker_link& spare) const;

private:
  mutable std::mutex mutex_;
  std::deque<std::vector<std::byte>> all_; // the last one was prepared last
};

} // namespace troupe::detail
