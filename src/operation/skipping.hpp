/// Skipped ranges: a request that does not run leaves the ranges that it would have written
/// skipped, and reading them fails.
#pragma once

#include "operation/operation.hpp"
#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace troupe::detail {

/// Returns whether `why` says that a request is wrong by itself. If its requester sees that as soon
/// as the call returns, nothing is skipped.
bool fails_validation(const caf::error& why) noexcept;

/// Adds a use that writes all of `ref`, unless it has no memory.
void add_write(std::vector<use>& to, const any_gpu_ref& ref);
/// The same for each of `refs`.
void add_writes(std::vector<use>& to, std::span<const any_gpu_ref> refs);
/// Marks as skipped what the request of this number would have written: it was refused with `why`.
void mark_skipped(std::span<const use> writes, const caf::error& why, std::uint64_t number);

/// Returns the result of a request that is refused with `why` before it became an operation. Unless
/// it fails validation, the ranges that `writes` adds to a list are skipped.
template <class T, class Writes>
std::shared_ptr<operation_of<T>> refused_and_skipped(const char* verb, caf::error why,
                                                     std::uint64_t retry_of, Writes writes) {
  auto result = refused_operation<T>(verb, std::move(why));
  if (fails_validation(result->error()))
    return result;
  std::vector<use> all;
  writes(all);
  mark_skipped(all, result->error(), retry_of != 0 ? retry_of : result->number());
  return result;
}

} // namespace troupe::detail
