/// What collectives must give, computed by other means than the library does: bit patterns are
/// decoded by a slow decoder of its own, sums and products are formed in `long double` or exact
/// integer arithmetic, and a tolerance is derived from the roundings that a collective may make in
/// any order of the ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace troupe {

enum class dtype : std::uint8_t;
enum class reduce_op : std::uint8_t;

} // namespace troupe

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

/// Compares elements bit for bit: for copies.
check_result check_equal(dtype type, std::span<const std::byte> want,
                         std::span<const std::byte> output);

/// The number that the lowest bits of `pattern` stand for in a floating-point type, by the
/// definition of the format; infinities and NaNs as such.
long double decode(dtype type, std::uint64_t pattern);

/// The bits of the finite number of the type that is nearest to `x`, ties to even; beyond the
/// largest finite number, what the type's conversion gives (infinity; for the 8-bit types the
/// largest finite number). The sign of a zero is that of `x`.
/// @shape `x` is exact; not a NaN
std::uint64_t encode_nearest(dtype type, long double x);

} // namespace troupe::testing
