/// What can go wrong, how far it reaches, and how it is told.
#pragma once

#include <troupe/detail/caf_compat.hpp>
#include <troupe/detail/type_ids.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace troupe {

/// The one error category of the library.
enum class errc : std::uint8_t {
  invalid_argument =
      1, ///< a request that can never be right: ranks, device order, overlap, unknown device
  shape_mismatch,      ///< counts or dtypes that do not agree
  out_of_range,        ///< more elements than the buffer has
  stale_ref,           ///< memory of an earlier generation of its device
  indeterminate,       ///< content that a failed operation left half-written
  skipped,             ///< content that a request which did not run would have written
  buffer_acquired,     ///< the buffer is in the hands of a user's stream or another process
  membership_changed,  ///< the request means an older membership of the world
  collective_mismatch, ///< the ranks called different operations; nothing of them has run, unless
                       ///< the communicator has ended with it
  out_of_memory,       ///< the device, or the host's pinned memory, has no room
  deadline_exceeded,   ///< no answer in time; the work may still run
  cancelled,           ///< by its requester
  overloaded,          ///< more queued than the bound; try again later
  unavailable,         ///< the device or world is failed, shut down or not yet there
  would_block,         ///< a blocking wait where blocking is forbidden
  not_supported,       ///< the backend or placement cannot do it
  launch_failed,       ///< a user's launch callable threw or returned an error
  cuda_error,          ///< a CUDA call failed; the context is healthy
  link_failed,         ///< a link between two devices failed, or brought something else
  device_reset,        ///< the device was reset while the request was there
  device_failed,       ///< the device did not come up
  worker_lost,         ///< the process that held the device is gone
  nccl_error,          ///< a NCCL call failed; its communicator is lost
  stalled,             ///< a collective made no progress for the stall limit
  communicator_dead,   ///< its communicator ended for a reason told in the text
  rank_not_issued,     ///< a rank could not issue its part after others had
  device_fault,        ///< a sticky CUDA error: CUDA is gone in this process
  lane_stuck,          ///< a lane did not come back from a call into CUDA or NCCL
  internal,            ///< a bug in the library
};

std::string_view to_string(errc x) noexcept;
TROUPE_INSPECT_ENUM(errc)

/// How far a failure reaches; the only thing that a supervisor switches on.
enum class severity : std::uint8_t {
  retry,        ///< nothing is wrong but the moment
  operation,    ///< this request failed, all else is well
  communicator, ///< retire the communicator, go on with another
  device,       ///< this device's memory is gone
  process,      ///< CUDA in this process is gone, or a lane is stuck for good
};

std::string_view to_string(severity x) noexcept;

severity severity_of(errc x) noexcept;

/// How far one rank's part of an operation has come.
enum class part_state : std::uint8_t {
  not_issued,
  issued,
  started,
  done,
  uninvolved, ///< the rank has no part in it
};

std::string_view to_string(part_state x) noexcept;
TROUPE_INSPECT_ENUM(part_state)

/// A failure in full: what an error of the library carries as its context.
/// @invariant a field that does not apply is -1, 0 or empty
struct failure {
  errc code = errc::internal;
  std::string detail = {};      ///< the one sentence that only the place of the failure knows
  std::string verb = {};        ///< "all_reduce", "upload", ...
  std::string api = {};         ///< the native function, such as "ncclAllReduce"
  std::string native_name = {}; ///< the native code's name, such as "ncclUnhandledCudaError"
  std::int32_t native_code = 0; ///< the native code
  std::int32_t device = -1;     ///< ordinal
  std::int32_t rank = -1;
  std::uint64_t operation = 0; ///< number of the operation
  std::uint64_t epoch = 0;     ///< epoch of the world
  std::uint64_t generation = 0;
  std::vector<part_state> parts = {}; ///< one per rank, where an operation had several
};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, failure& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::failure", field("code", x.code), field("detail", x.detail),
                        field("verb", x.verb), field("api", x.api),
                        field("native_name", x.native_name), field("native_code", x.native_code),
                        field("device", x.device), field("rank", x.rank),
                        field("operation", x.operation), field("epoch", x.epoch),
                        field("generation", x.generation), field("parts", x.parts));
}

/// One sentence: what failed, where, and why.
std::string to_string(const failure& x);

caf::error make_error(failure x);
caf::error make_error(errc code, std::string detail);

/// The failure in `e`; none if the error is not one of the library's.
std::optional<failure> failure_of(const caf::error& e);

/// The code of `e`; none if the error is not one of the library's.
std::optional<errc> code_of(const caf::error& e) noexcept;

/// How far `e` reaches; none if the error is not one of the library's.
std::optional<severity> severity_of(const caf::error& e) noexcept;

/// A readable sentence for any error, of the library or of CAF.
std::string describe(const caf::error& e);

} // namespace troupe

TROUPE_ERROR_ENUM(troupe::errc, "troupe")
