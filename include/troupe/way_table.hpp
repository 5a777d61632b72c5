/// Which collectives of a world go direct, and which by NCCL.
#pragma once

#include <troupe/collective_kind.hpp>
#include <troupe/error.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

namespace troupe {

/// Which collectives go direct in a world with `collectives_policy::automatic`. The table is the
/// same for all ranks, and fixed when the world opens.
struct way_table {
  static constexpr std::uint64_t no_limit = UINT64_MAX;

  /// All go direct.
  way_table() noexcept { direct_up_to.fill(no_limit); }

  /// Returns the table for worlds of `ranks` ranks, each on a H100 or H200 of its own: all go
  /// direct on two; on more, some large ones are faster by NCCL. Measured on 2 and 4 devices.
  static way_table built_in(std::size_t ranks) noexcept;

  /// By `collective_kind`: the largest block (`count` elements) that goes direct; larger ones go by
  /// NCCL, as do all calls of a group with one of them. all_to_all_v always goes direct.
  /// @units bytes
  std::array<std::uint64_t, std::size(all_collective_kinds)> direct_up_to;
};

/// Reads the table for worlds of `ranks` ranks from a file, as `bench_all_reduce --tune` writes it.
/// Each line has a number of ranks, a `collective_kind`, and the largest block in bytes that goes
/// direct, or `all`: "2 all_reduce 67108864". `send` stands for both ends of a message; `recv` and
/// `all_to_all_v` have no lines. `#` begins a comment. Kinds that the file does not name for that
/// number of ranks go direct.
/// @errors errc::invalid_argument: the file cannot be read, a line is wrong, or none is for that
///         number of ranks
caf::expected<way_table> read_way_table(const std::string& path, std::size_t ranks);

} // namespace troupe
