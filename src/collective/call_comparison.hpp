/// Compares calls of ranks: whether they belong together, and whether symmetric kernels can run
/// them.
#pragma once

#include "collective/rank_call.hpp"

#include <cstddef>
#include <span>
#include <string>

namespace troupe::detail {

/// Returns whether two ranks' calls are the same, except memory and plans.
bool alike(const rank_call& a, const rank_call& b) noexcept;

/// Returns how two ranks' calls, made separately, differ; empty if they belong together.
std::string difference(const rank_call& a, const rank_call& b);

/// Returns whether `calls`, one of each of `ranks` ranks, can use symmetric kernels. There must be
/// one for their kind, type and operation. The data is at most `limit` bytes, and the buffers are
/// at the same place on all ranks.
/// @source NCCL 2.28.9, `ncclSymkImplemented` (src/sym_kernels.cc)
bool is_symmetric(std::span<const rank_call* const> calls, std::size_t ranks,
                  std::size_t limit) noexcept;

} // namespace troupe::detail
