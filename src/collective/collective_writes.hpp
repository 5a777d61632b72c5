/// Refused calls of ranks: what they would have written, and whether they count.
#pragma once

#include "collective/rank_call.hpp"
#include "operation/skipping.hpp"
#include <troupe/collective.hpp>
#include <troupe/error.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace troupe::detail {

/// Returns whether a rank's call that is refused with `why` counts. It does not if it fails
/// validation, or names another `membership` than the world's (0: it names none).
bool counts_among_calls(const caf::error& why, std::uint64_t membership) noexcept;

/// Adds what `x` would write. `ranks`: the world's size. `first_rank`: of the first handle.
void add_writes(std::vector<use>& to, const collective_view& x, std::size_t ranks,
                std::size_t first_rank = 0);
void add_writes(std::vector<use>& to, const group& x, std::size_t ranks);
void add_writes(std::vector<use>& to, const exchange& x);

} // namespace troupe::detail
