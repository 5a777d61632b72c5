/// What collectives must give, computed by other means than the library does: bit patterns are
/// decoded by a slow decoder of its own, sums and products are formed in `long double` or exact
/// integer arithmetic, and a tolerance is derived from the roundings that a collective may make in
/// any order of the ranks.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/dtype.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace troupe::testing {

/// Fills memory with ones: a NaN in every floating-point type, -1 or the largest number as an
/// integer.
void poison(std::span<std::byte> memory) noexcept;

enum class input_kind : std::uint8_t {
  /// All magnitudes that no order of the ranks makes overflow, subnormals too; the result is within
  /// the tolerance of the roundings. With many ranks that is as large as the numbers: for sums of
  /// float8_e5m2 from 7, of float8_e4m3 from 13.
  any,
  /// Every partial result is representable in every order, so the result is right bit for bit;
  /// `avg` of floating-point numbers only if the number of ranks is a power of two.
  exact,
};

/// Who fills memory with what.
struct input_spec {
  dtype type;
  reduce_op op;
  std::uint64_t seed = 1;
  int rank = 0;
  int ranks = 1;
  input_kind kind = input_kind::any;
};

/// Fills `memory` with elements that suit the operation; the same for the same `spec`. Integers
/// wrap for `sum`, `prod` and `avg`. No infinities, no NaNs.
void fill_random(const input_spec& spec, std::span<std::byte> memory);

/// Fills one vector of `count` elements for each rank; `spec.rank` does not matter.
std::vector<std::vector<std::byte>> random_inputs(input_spec spec, std::size_t count);

/// The ranks' factors for `premul_sum`, one element each, one behind the other: any integers;
/// floating-point numbers of magnitudes from 1/4 to 2, or, for `input_kind::exact`, 1/2 or 1.
/// `spec.rank` does not matter.
std::vector<std::byte> random_factors(input_spec spec);

/// The result of comparing an output with what it must be.
struct check_result {
  std::size_t wrong = 0; // elements
  /// Elements for which some order of the ranks overflows: anything is right.
  std::size_t undetermined = 0;
  std::size_t first = 0; // index of the first wrong element
  std::string got;       // the first wrong element
  std::string want;

  explicit operator bool() const noexcept { return wrong == 0; }
};

/// One sentence, for a test's failure message.
std::string to_string(const check_result& x);

/// Compares each element of `output` with `op` over the ranks' inputs.
///
/// - Integers: bit for bit.
/// - One rank: bit for bit, a copy.
/// - `min`, `max`: bit for bit one of the inputs; NaNs are left out; zeros are equal.
/// - `sum`, `prod` of `input_kind::exact`, and `avg` of it over a power of two: bit for bit.
/// - `sum`, `prod` of two ranks: bit for bit the nearest number, ties to even (not float64, where
///   the exact value would need more than a `long double`).
/// - Else within `n-1` roundings of the type for any order of the ranks, and for `avg` the rounding
///   of 1/n and of the products with it. With u half the distance of 1 and the next number, a sum
///   may be off by ((1+u)^(n-1) - 1) times the sum of the magnitudes.
/// - Inputs that are infinite, or that overflow in some order: anything is right.
///
/// @source N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2
check_result check(dtype type, reduce_op op, std::span<const std::span<const std::byte>> inputs,
                   std::span<const std::byte> output, input_kind kind = input_kind::any);
check_result check(dtype type, reduce_op op, const std::vector<std::vector<std::byte>>& inputs,
                   std::span<const std::byte> output, input_kind kind = input_kind::any);

/// Compares each element of `output` with the sum over the ranks of the input times the rank's
/// factor.
///
/// - Integers, and `input_kind::exact`: bit for bit.
/// - One rank: bit for bit the nearest number (not float64).
/// - Else as for `sum`, and one rounding more for each product.
///
/// @shape factors: one element for each rank, as `random_factors` gives them
check_result check_premul_sum(dtype type, std::span<const std::span<const std::byte>> inputs,
                              std::span<const std::byte> factors, std::span<const std::byte> output,
                              input_kind kind = input_kind::any);

/// Compares elements bit for bit: for copies.
check_result check_equal(dtype type, std::span<const std::byte> want,
                         std::span<const std::byte> output);

// Collectives, by the definitions at `collective_kind` and `collective_call`.

/// A collective as all its ranks call it; not for send and recv.
struct collective_spec {
  collective_kind what;
  dtype type;
  std::size_t count = 0; ///< of all_to_all_v: the most that two ranks exchange
  int ranks = 1;
  reduce_op op = reduce_op::sum;
  int root = 0;
  std::uint64_t seed = 1;
  input_kind kind = input_kind::any;
  std::vector<exchange_plan> plans; ///< of all_to_all_v, by rank
  std::vector<std::byte> factors;   ///< of premul_sum: one element for each rank
};

/// The same with random plans and factors, if it needs them. The plans have ranks that exchange
/// nothing, blocks in any order and gaps between them.
collective_spec completed(collective_spec x);

/// The call of one rank; null pointers where the caller gives them. It points into `x`.
collective_call call_of(const collective_spec& x, int rank, const void* send, void* recv);

/// How many elements the rank's `send` and `recv` hold; 0 where it has nothing to send or receive.
std::size_t send_count(const collective_spec& x, int rank);
std::size_t recv_count(const collective_spec& x, int rank);

/// Where a rank's buffers begin in memory that they share.
/// @units elements
struct shared_placement {
  std::size_t send_at = 0;
  std::size_t recv_at = 0;
};

/// How the rank does it in place; none if it has not both buffers, or they may not overlap.
std::optional<shared_placement> in_place(const collective_spec& x, int rank);

/// Each rank's `send`: as `random_inputs` for a collective that reduces, else any bits.
std::vector<std::vector<std::byte>> random_sends(const collective_spec& x);

/// Compares what a rank has in `recv` with what it must have: by `check` or `check_premul_sum`
/// where the collective reduces, else bit for bit; elements that it must not write with what they
/// were before.
/// @shape sends: as `random_sends` gives them; before, after: the rank's `recv` before and after
///        it, as large as each other, whole elements; there may be more behind it
check_result check_collective(const collective_spec& x, int rank,
                              const std::vector<std::vector<std::byte>>& sends,
                              std::span<const std::byte> before, std::span<const std::byte> after);

/// The number that the lowest bits of `pattern` stand for in a floating-point type, by the
/// definition of the format; infinities and NaNs as such.
long double decode(dtype type, std::uint64_t pattern);

/// The bits of the finite number of the type that is nearest to `x`, ties to even; beyond the
/// largest finite number, what the type's conversion gives (infinity; for the 8-bit types the
/// largest finite number). The sign of a zero is that of `x`.
/// @shape `x` is exact; not a NaN
std::uint64_t encode_nearest(dtype type, long double x);

} // namespace troupe::testing
