/// Errors: their codes, their severity and their details.
#pragma once

#include <troupe/detail/caf_compat.hpp>
#include <troupe/detail/type_ids.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace troupe {

/// The only error category of the library.
enum class errc : std::uint8_t {
  invalid_argument =
      1, ///< a request that can never be valid: ranks, device order, overlap, unknown device
  shape_mismatch,      ///< counts or dtypes that do not agree
  out_of_range,        ///< more elements than the buffer has
  stale_ref,           ///< memory of an earlier generation of its device
  indeterminate,       ///< content that a failed operation may have written in part
  skipped,             ///< content that was never written, because the request did not run
  buffer_acquired,     ///< a user's stream or another process holds the buffer
  membership_changed,  ///< the request names an older membership of the world
  collective_mismatch, ///< the ranks called different operations; nothing of them has run, unless
                       ///< the communicator has ended with it
  out_of_memory,       ///< no room on the device or in the host's pinned memory
  deadline_exceeded,   ///< not completed in time; the work may still run
  cancelled,           ///< by the requester
  overloaded,          ///< a queue is full; try again later
  unavailable,         ///< the device or world has failed, was shut down or is not ready yet
  would_block,         ///< a blocking wait on a thread that must not block
  not_supported,       ///< the backend or placement cannot do it
  launch_failed,       ///< a user's launch callable threw or returned an error
  cuda_error,          ///< a CUDA call failed; the context is healthy
  link_failed,         ///< a link between two devices failed or corrupted data
  device_reset,        ///< the device was reset while the request was pending
  device_failed,       ///< the device could not be opened
  worker_lost,         ///< the process that held the device is gone
  nccl_error,          ///< an NCCL call failed; its communicator is lost
  stalled,             ///< a collective made no progress for the stall limit
  communicator_dead,   ///< the communicator has ended; the text says why
  rank_not_issued,     ///< a rank could not issue its part after other ranks had issued theirs
  device_fault,        ///< a sticky CUDA error: CUDA is unusable in this process
  lane_stuck,          ///< a lane did not return from a call into CUDA or NCCL
  internal,            ///< a bug in the library
};

std::string_view to_string(errc x) noexcept;
TROUPE_INSPECT_ENUM(errc)

/// How far a failure reaches. A supervisor decides by this alone.
enum class severity : std::uint8_t {
  retry,        ///< nothing is lost; the request may succeed later
  operation,    ///< only this request failed
  communicator, ///< the communicator is lost; continue with another one
  device,       ///< this device's memory is lost
  process,      ///< CUDA is unusable in this process, or a lane is stuck for good
};

std::string_view to_string(severity x) noexcept;

severity severity_of(errc x) noexcept;

/// The progress of one rank's part of an operation.
enum class part_state : std::uint8_t {
  not_issued,
  issued,
  started,
  done,
  uninvolved, ///< the rank has no part in it
};

std::string_view to_string(part_state x) noexcept;
TROUPE_INSPECT_ENUM(part_state)

/// The details of a failure; every error of the library has them as its context.
/// @invariant a field that does not apply is -1, 0 or empty
struct failure {
  errc code = errc::internal;
  std::string detail = {};      ///< one sentence from the place of the failure
  std::string verb = {};        ///< "all_reduce", "upload", ...
  std::string api = {};         ///< the native function, such as "ncclAllReduce"
  std::string native_name = {}; ///< the native code's name, such as "ncclUnhandledCudaError"
  std::int32_t native_code = 0; ///< the native code
  std::int32_t device = -1;     ///< ordinal
  std::int32_t rank = -1;
  std::uint64_t operation = 0; ///< number of the operation
  std::uint64_t epoch = 0;     ///< epoch of the world
  std::uint64_t generation = 0;
  std::vector<part_state> parts = {}; ///< one per rank, if an operation had several
  /// For `indeterminate` and `skipped`: the code of the request that failed first (`cause_of`). For
  /// `worker_lost`: what its worker reported.
  errc cause = errc::internal;
};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, failure& x) {
  using detail::field;
  return detail::fields(
      f, x, "troupe::failure", field("code", x.code), field("detail", x.detail),
      field("verb", x.verb), field("api", x.api), field("native_name", x.native_name),
      field("native_code", x.native_code), field("device", x.device), field("rank", x.rank),
      field("operation", x.operation), field("epoch", x.epoch), field("generation", x.generation),
      field("parts", x.parts), field("cause", x.cause));
}

/// Returns one sentence: what failed, where, and why.
std::string to_string(const failure& x);

caf::error make_error(failure x);
caf::error make_error(errc code, std::string detail);

/// Returns the failure in `e`; none if `e` is not an error of the library.
std::optional<failure> failure_of(const caf::error& e);

/// Returns the code of `e`; none if `e` is not an error of the library.
std::optional<errc> code_of(const caf::error& e) noexcept;

/// Returns the code of `e`. If it is `indeterminate` or `skipped`, returns the code of the request
/// that failed first, and left behind what this one would have read. So the last answer of a chain
/// of requests tells why the chain failed. None if `e` is not an error of the library.
std::optional<errc> cause_of(const caf::error& e);

/// Returns the severity of `e`; none if `e` is not an error of the library.
std::optional<severity> severity_of(const caf::error& e) noexcept;

/// Returns a readable sentence for any error, of the library or of CAF.
std::string describe(const caf::error& e);

} // namespace troupe

TROUPE_ERROR_ENUM(troupe::errc, "troupe")
