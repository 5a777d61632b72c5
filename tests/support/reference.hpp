/// Reference results of collectives, computed by other means than the library uses. A separate,
/// slow decoder decodes bit patterns. Sums and products are computed in `long double` or in exact
/// integer arithmetic. A tolerance is derived from the roundings that a collective may make in any
/// order of the ranks.
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

/// Sets all bits: a NaN in every floating-point type, -1 or the largest number as an integer.
void poison(std::span<std::byte> memory) noexcept;

enum class input_kind : std::uint8_t {
  /// Magnitudes for which no order of the ranks overflows; subnormals are included. The result is
  /// within the tolerance of the roundings. With many ranks the tolerance is as large as the
  /// numbers: from 7 ranks for sums of float8_e5m2, from 13 ranks for float8_e4m3.
  any,
  /// Every partial result is representable in every order, so the result is exact bit for bit. For
  /// `avg` of floating-point numbers this holds only if the number of ranks is a power of two.
  exact,
};

/// The input of one rank.
struct input_spec {
  dtype type;
  reduce_op op;
  std::uint64_t seed = 1;
  int rank = 0;
  int ranks = 1;
  input_kind kind = input_kind::any;
};

/// Fills `memory` with elements that suit the operation. The same `spec` gives the same elements.
/// Integers wrap around for `sum`, `prod` and `avg`. There are no infinities and no NaNs.
void fill_random(const input_spec& spec, std::span<std::byte> memory);

/// Returns one vector of `count` elements for each rank. `spec.rank` is not used.
std::vector<std::vector<std::byte>> random_inputs(input_spec spec, std::size_t count);

/// Returns the ranks' factors for `premul_sum`: one element for each rank, contiguous. Integers
/// have any value. Floating-point numbers have magnitudes from 1/4 to 2, or 1/2 or 1 for
/// `input_kind::exact`. `spec.rank` is not used.
std::vector<std::byte> random_factors(input_spec spec);

/// The result of a comparison of an output with the expected values.
struct check_result {
  std::size_t wrong = 0; // elements
  /// Elements for which some order of the ranks overflows: any value is accepted.
  std::size_t undetermined = 0;
  std::size_t first = 0; // index of the first wrong element
  std::string got;       // the first wrong element
  std::string want;

  explicit operator bool() const noexcept { return wrong == 0; }
};

/// Returns one sentence for the failure message of a test.
std::string to_string(const check_result& x);

/// Compares each element of `output` with `op` over the ranks' inputs.
///
/// - Integers: bit for bit.
/// - One rank: bit for bit, a copy.
/// - `min`, `max`: bit for bit one of the inputs. NaNs are ignored; zeros are equal.
/// - `sum`, `prod` of `input_kind::exact`, and `avg` of it over a power of two: bit for bit.
/// - `sum`, `prod` of two ranks: bit for bit the nearest number, ties to even. Not for float64,
///   where the exact value would need more bits than `long double` has.
/// - All other cases: within `n-1` roundings of the type for any order of the ranks. `avg` adds the
///   rounding of 1/n and of the products with it. With u half the distance from 1 to the next
///   number, a sum may differ by ((1+u)^(n-1) - 1) times the sum of the magnitudes.
/// - Inputs that are infinite, or that overflow in some order: any value is accepted.
///
/// @source N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2
check_result check(dtype type, reduce_op op, std::span<const std::span<const std::byte>> inputs,
                   std::span<const std::byte> output, input_kind kind = input_kind::any);
check_result check(dtype type, reduce_op op, const std::vector<std::vector<std::byte>>& inputs,
                   std::span<const std::byte> output, input_kind kind = input_kind::any);

/// Compares each element of `output` with the sum over the ranks of input times factor.
///
/// - Integers, and `input_kind::exact`: bit for bit.
/// - One rank: bit for bit the nearest number (not for float64).
/// - All other cases: as for `sum`, with one more rounding for each product.
///
/// @shape factors: one element for each rank, as `random_factors` returns them
check_result check_premul_sum(dtype type, std::span<const std::span<const std::byte>> inputs,
                              std::span<const std::byte> factors, std::span<const std::byte> output,
                              input_kind kind = input_kind::any);

/// Compares elements bit for bit. For collectives that only copy.
check_result check_equal(dtype type, std::span<const std::byte> want,
                         std::span<const std::byte> output);

// Collectives, as defined at `collective_kind` and `collective_call`.

/// A collective as all its ranks call it. Not for send and recv.
struct collective_spec {
  collective_kind what;
  dtype type;
  std::size_t count = 0; ///< for all_to_all_v: the largest count between two ranks
  int ranks = 1;
  reduce_op op = reduce_op::sum;
  int root = 0;
  std::uint64_t seed = 1;
  input_kind kind = input_kind::any;
  std::vector<exchange_plan> plans; ///< for all_to_all_v, by rank
  std::vector<std::byte> factors;   ///< for premul_sum: one element for each rank
};

/// Returns `x` with random plans and factors, if it needs them. In the plans some ranks exchange
/// nothing, and the blocks are in any order with gaps between them.
collective_spec completed(collective_spec x);

/// Returns the call of one rank, which points into `x`. `send` and `recv` may be null.
collective_call call_of(const collective_spec& x, int rank, const void* send, void* recv);

/// Returns the number of elements in the rank's `send` or `recv`; 0 if the rank has no such buffer.
std::size_t send_count(const collective_spec& x, int rank);
std::size_t recv_count(const collective_spec& x, int rank);

/// Offsets of a rank's buffers in one memory block that both use.
/// @units elements
struct shared_placement {
  std::size_t send_at = 0;
  std::size_t recv_at = 0;
};

/// Returns the offsets for a call in place, or none if a buffer is missing or overlap is not
/// allowed.
std::optional<shared_placement> in_place(const collective_spec& x, int rank);

/// Returns each rank's `send`: as `random_inputs` for a collective that reduces, else any bits.
std::vector<std::vector<std::byte>> random_sends(const collective_spec& x);

/// Compares a rank's `recv` with the expected content: by `check` or `check_premul_sum` if the
/// collective reduces, else bit for bit. Elements that the collective must not write are compared
/// with their previous content.
/// @shape sends: as `random_sends` returns them; before, after: the rank's `recv` before and after
///        the collective, of equal size, whole elements; there may be more memory behind them
check_result check_collective(const collective_spec& x, int rank,
                              const std::vector<std::vector<std::byte>>& sends,
                              std::span<const std::byte> before, std::span<const std::byte> after);

/// Returns the number that the lowest bits of `pattern` represent in a floating-point type, by the
/// definition of the format. Infinities and NaNs are returned as such.
long double decode(dtype type, std::uint64_t pattern);

/// Returns the bits of the finite number of the type that is nearest to `x`, ties to even. Beyond
/// the largest finite number it returns the result of the type's conversion: infinity, or for the
/// 8-bit types the largest finite number. The sign of a zero is the sign of `x`.
/// @shape `x` is exact; not a NaN
std::uint64_t encode_nearest(dtype type, long double x);

} // namespace troupe::testing
