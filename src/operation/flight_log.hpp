/// The record that a lane keeps of its parts.
#pragma once

#include "operation/flight_ring.hpp"

#include <atomic>
#include <cstdint>
#include <vector>

namespace troupe::detail {

struct part;

/// Records the progress of a lane's parts. Takes no lock and allocates no memory.
/// @thread the lane; `read` and `holder`: any
class flight_log {
public:
  /// Notes that the call that issues `p` began at `now`.
  void issuing(part& p, std::uint64_t generation, std::int64_t now) noexcept;
  void issued(const part& p) noexcept;
  void started(const part& p, std::int64_t now) noexcept;
  /// Notes that `p` is over. `was_issued`: some of its work may have been issued.
  void over(part& p, bool was_issued, std::uint64_t generation, std::int64_t now) noexcept;
  /// Notes that the next part in order waits for operation `number`; 0: for none.
  void held_by(std::uint64_t number) noexcept { holder_.store(number, std::memory_order_relaxed); }

  std::vector<flight_entry> read() const { return ring_.read(); }
  std::uint64_t holder() const noexcept { return holder_.load(std::memory_order_relaxed); }

private:
  flight_ring ring_;
  std::atomic<std::uint64_t> holder_{0};
};

} // namespace troupe::detail
