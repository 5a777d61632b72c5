/// The arguments of collective calls: their checks and their sizes.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace troupe::detail {

/// Checks the calls of one rank before any of them is issued.
class call_validator {
public:
  /// @param size   of the communicator
  /// @param float8 whether float8 types can be reduced
  call_validator(const local_rank& where, int size, bool float8) noexcept
      : where_(where), size_(size), float8_(float8) {}

  /// @errors errc::invalid_argument; errc::not_supported: a float8 reduction on a device before
  ///         Hopper
  caf::error validate(std::span<const collective_call> calls, stream_view stream) const;

private:
  /// Returns the reason why a call is invalid, or null.
  const char* complaint(const collective_call& call) const noexcept;
  const char* complaint(const exchange_plan& plan, const collective_call& call) const noexcept;
  bool has_own_pairs(std::span<const collective_call> calls) const noexcept;

  const local_rank where_;
  const int size_;
  const bool float8_;
};

/// Returns whether a count is not zero.
inline bool any_count(const std::vector<std::size_t>& counts) noexcept {
  return std::ranges::any_of(counts, [](std::size_t x) { return x > 0; });
}

/// Returns whether a call has nothing to do.
inline bool is_empty(const collective_call& call) noexcept {
  switch (call.what) {
  case collective_kind::barrier:
    return false;
  case collective_kind::all_to_all_v:
    return !any_count(call.plan->send_counts) && !any_count(call.plan->recv_counts);
  default:
    return call.count == 0;
  }
}

inline std::size_t bytes_of(const collective_call& call) noexcept {
  return call.count * size_of(call.type);
}

/// Bytes that a rank sends to a peer and receives from it. Null: nothing.
struct pair_traffic {
  const void* send = nullptr;
  void* recv = nullptr;
  std::size_t send_bytes = 0;
  std::size_t recv_bytes = 0;
};

/// Returns the bytes that a call moves between `rank`, which makes it, and `peer`; none if they are
/// in place already. For collectives that do not reduce, except `barrier`.
pair_traffic traffic_between(const collective_call& call, int rank, int peer) noexcept;

} // namespace troupe::detail
