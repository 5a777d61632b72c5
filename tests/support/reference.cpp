#include "reference.hpp"

#include <troupe/backend.hpp>
#include <troupe/dtype.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ios>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

__extension__ using int128 = __int128;
__extension__ using uint128 = unsigned __int128;

// Formats.

struct format {
  int width;
  int exponent_bits;
  int mantissa_bits;
  std::uint64_t max_finite; // pattern of the largest finite number
  bool infinity;            // the next pattern is an infinity

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int min_exponent() const { return 1 - bias(); } // of normal numbers
  std::uint64_t sign_bit() const { return std::uint64_t{1} << (width - 1); }
  std::uint64_t mantissa_mask() const { return (std::uint64_t{1} << mantissa_bits) - 1; }
  std::uint64_t pattern_mask() const { return sign_bit() | (sign_bit() - 1); }

  /// Returns the number of a pattern without sign, as if there were no infinities and NaNs.
  long double magnitude(std::uint64_t pattern) const {
    const auto field = static_cast<int>(pattern >> mantissa_bits);
    const std::uint64_t fraction = pattern & mantissa_mask();
    const std::uint64_t integer = field == 0 ? fraction : fraction | (mantissa_mask() + 1);
    return std::ldexp(static_cast<long double>(integer),
                      std::max(field, 1) - bias() - mantissa_bits);
  }

  long double largest() const { return magnitude(max_finite); }
  long double smallest() const { return magnitude(1); }
  long double smallest_normal() const { return std::ldexp(1.0L, min_exponent()); }
  /// Returns the largest relative error of rounding to nearest.
  long double unit_roundoff() const { return std::ldexp(1.0L, -mantissa_bits - 1); }
};

const format* format_of(dtype type) {
  static constexpr format f16{16, 5, 10, 0x7bff, true};
  static constexpr format bf16{16, 8, 7, 0x7f7f, true};
  static constexpr format f32{32, 8, 23, 0x7f7fffff, true};
  static constexpr format f64{64, 11, 52, 0x7fefffffffffffff, true};
  static constexpr format e4m3{8, 4, 3, 0x7e, false};
  static constexpr format e5m2{8, 5, 2, 0x7b, true};
  switch (type) {
  case dtype::float16:
    return &f16;
  case dtype::bfloat16:
    return &bf16;
  case dtype::float32:
    return &f32;
  case dtype::float64:
    return &f64;
  case dtype::float8_e4m3:
    return &e4m3;
  case dtype::float8_e5m2:
    return &e5m2;
  default:
    return nullptr;
  }
}

bool saturates(dtype type) { return type == dtype::float8_e4m3 || type == dtype::float8_e5m2; }

bool is_signed(dtype type) {
  return type == dtype::int8 || type == dtype::int32 || type == dtype::int64;
}

std::uint64_t load_pattern(const std::byte* memory, std::size_t size) {
  std::uint64_t r = 0;
  for (std::size_t i = 0; i < size; ++i)
    r |= std::to_integer<std::uint64_t>(memory[i]) << (8 * i);
  return r;
}

void store_pattern(std::byte* memory, std::size_t size, std::uint64_t pattern) {
  for (std::size_t i = 0; i < size; ++i)
    memory[i] = static_cast<std::byte>(pattern >> (8 * i));
}

/// Decodes elements of one type fast: with a table or with processor instructions.
class decoder {
public:
  explicit decoder(dtype type) : type_{type} {
    if (const std::size_t bits = 8 * size_of(type); bits <= 16) {
      table_.resize(std::size_t{1} << bits);
      for (std::size_t i = 0; i < table_.size(); ++i)
        table_[i] = decode(type, i);
    }
  }

  long double operator()(std::uint64_t pattern) const {
    switch (type_) {
    case dtype::float32:
      return std::bit_cast<float>(static_cast<std::uint32_t>(pattern));
    case dtype::float64:
      return std::bit_cast<double>(pattern);
    default:
      return table_[pattern];
    }
  }

private:
  dtype type_;
  std::vector<long double> table_;
};

const decoder& decoder_of(dtype type) {
  static const decoder f16{dtype::float16};
  static const decoder bf16{dtype::bfloat16};
  static const decoder f32{dtype::float32};
  static const decoder f64{dtype::float64};
  static const decoder e4m3{dtype::float8_e4m3};
  static const decoder e5m2{dtype::float8_e5m2};
  switch (type) {
  case dtype::float16:
    return f16;
  case dtype::bfloat16:
    return bf16;
  case dtype::float32:
    return f32;
  case dtype::float8_e4m3:
    return e4m3;
  case dtype::float8_e5m2:
    return e5m2;
  default:
    return f64;
  }
}

// Integers.

/// The integers of a type, as residues modulo 2^bits.
struct integer_range {
  int bits;
  bool negative;

  int128 modulus() const { return int128{1} << bits; }
  uint128 residue(int128 x) const {
    return static_cast<uint128>((x % modulus() + modulus()) % modulus());
  }
  std::uint64_t product(std::uint64_t a, std::uint64_t b) const {
    return static_cast<std::uint64_t>(uint128{a} * b % static_cast<uint128>(modulus()));
  }
  int128 value(uint128 residue) const {
    const auto x = static_cast<int128>(residue);
    return negative && x >= modulus() / 2 ? x - modulus() : x;
  }
};

std::uint64_t expected_integer(const integer_range& range, reduce_op op,
                               const std::vector<std::uint64_t>& patterns) {
  const auto n = static_cast<int128>(patterns.size());
  int128 sum = 0;
  uint128 product = 1;
  int128 least = range.value(patterns[0]);
  int128 greatest = least;
  for (const std::uint64_t pattern : patterns) {
    const int128 x = range.value(pattern);
    sum += x;
    product = product * pattern % static_cast<uint128>(range.modulus());
    least = std::min(least, x);
    greatest = std::max(greatest, x);
  }
  const int128 wrapped = range.value(range.residue(sum));
  const int128 quotient = (wrapped < 0 ? -wrapped : wrapped) / n;
  switch (op) {
  case reduce_op::sum:
  case reduce_op::premul_sum:
    return static_cast<std::uint64_t>(range.residue(sum));
  case reduce_op::prod:
    return static_cast<std::uint64_t>(product);
  case reduce_op::min:
    return static_cast<std::uint64_t>(range.residue(least));
  case reduce_op::max:
    return static_cast<std::uint64_t>(range.residue(greatest));
  case reduce_op::avg:
    return static_cast<std::uint64_t>(range.residue(wrapped < 0 ? -quotient : quotient));
  }
  return 0;
}

// Floating-point numbers.

/// The accepted values of one element.
struct expectation {
  enum class rule : std::uint8_t {
    anything,      // some order of the ranks overflows
    nan,           //
    number,        // `value`; the sign of a zero is ignored
    same_bits,     // `value` with its sign
    within,        // at most `tolerance` away from `value`
    nearest_number // the number of the type nearest to `value`
  };
  rule kind = rule::anything;
  long double value = 0;
  long double tolerance = 0;
};

using rule = expectation::rule;

/// The accepted values for collectives of floating-point numbers. Computes in `long double`: its 64
/// bits hold the sum or product of two elements of up to 31 bits precisely enough that rounding it
/// to their type gives the nearest number.
/// @source S. A. Figueroa, When is double rounding innocuous?, SIGNUM Newsletter 30 (1995)
class float_rules {
public:
  float_rules(dtype type, reduce_op op, std::size_t ranks, input_kind kind)
      : f_{*format_of(type)}, op_{op}, n_{static_cast<long double>(ranks)},
        power_of_two_{(ranks & (ranks - 1)) == 0}, exact_{kind == input_kind::exact},
        nearest_{ranks == 2 && type != dtype::float64}, saturates_{saturates(type)},
        own_error_{n_ * std::numeric_limits<long double>::epsilon()},
        growth_{std::pow(1 + f_.unit_roundoff(), n_ - 1)},
        shrinkage_{std::pow(1 - f_.unit_roundoff(), n_ - 1)},
        factor_{decode(type, encode_nearest(type, 1 / n_))},
        product_is_nearest_{ranks == 1 && type != dtype::float64} {}

  /// For `premul_sum`, `xs` are the products.
  expectation operator()(const std::vector<long double>& xs) const {
    if (op_ == reduce_op::min || op_ == reduce_op::max)
      return extreme(xs);
    if (std::ranges::any_of(xs, [](long double x) { return std::isnan(x); }))
      return {rule::nan};
    if (std::ranges::any_of(xs, [](long double x) { return std::isinf(x); }))
      return {};
    switch (op_) {
    case reduce_op::sum:
      return sum(xs);
    case reduce_op::prod:
      return product(xs);
    case reduce_op::premul_sum:
      return sum_of_products(xs);
    default:
      return average(xs);
    }
  }

private:
  expectation extreme(const std::vector<long double>& xs) const {
    std::optional<long double> best;
    for (const long double x : xs)
      if (!std::isnan(x) && (!best || (op_ == reduce_op::min ? x < *best : x > *best)))
        best = x;
    if (!best)
      return {rule::nan};
    if (std::isinf(*best) && saturates_)
      return {};
    return {rule::number, *best};
  }

  expectation sum(const std::vector<long double>& xs) const {
    const auto [total, magnitudes] = totals(xs);
    if (exact_)
      return {rule::same_bits, total};
    if (magnitudes * growth_ > f_.largest())
      return {};
    if (nearest_)
      return {rule::nearest_number, total};
    return {rule::within, total, magnitudes * (growth_ - 1 + own_error_)};
  }

  expectation product(const std::vector<long double>& xs) const {
    long double r = 1;
    // The magnitudes of all partial products lie between `low` and `high`.
    long double low = 1;
    long double high = 1;
    for (const long double x : xs) {
      r *= x;
      low *= std::min(std::fabs(x), 1.0L);
      high *= std::max(std::fabs(x), 1.0L);
    }
    if (exact_)
      return {rule::same_bits, r};
    if (high * growth_ > f_.largest())
      return {};
    if (nearest_)
      return {rule::nearest_number, r};
    const bool underflow = low * shrinkage_ < f_.smallest_normal();
    const long double lost = underflow ? (n_ - 1) * f_.smallest() / 2 * high * growth_ : 0;
    return {rule::within, r, std::fabs(r) * (growth_ - 1 + own_error_) + lost};
  }

  expectation sum_of_products(const std::vector<long double>& xs) const {
    const auto [total, magnitudes] = totals(xs);
    if (exact_)
      return {rule::same_bits, total};
    const long double growth = growth_ * (1 + f_.unit_roundoff());
    if (magnitudes * growth > f_.largest())
      return {};
    if (product_is_nearest_)
      return {rule::nearest_number, total};
    return {rule::within, total,
            magnitudes * (growth - 1 + own_error_) + underflow(xs, 1) * growth_};
  }

  expectation average(const std::vector<long double>& xs) const {
    const auto [total, magnitudes] = totals(xs);
    const long double mean = total / n_;
    if (exact_ && power_of_two_)
      return {rule::same_bits, mean};
    const long double growth = power_of_two_ ? growth_ : growth_ * (1 + f_.unit_roundoff());
    if (magnitudes * factor_ * growth > f_.largest())
      return {};
    const long double relative =
        factor_ * (growth - 1) + std::fabs(factor_ - 1 / n_) + own_error_ / n_;
    return {rule::within, mean, magnitudes * relative + underflow(xs, factor_) * growth_};
  }

  /// Returns the largest error from rounding subnormal products of `xs` and `factor`.
  long double underflow(const std::vector<long double>& xs, long double factor) const {
    const auto subnormal = [&](long double x) {
      return std::fabs(x) * factor < f_.smallest_normal();
    };
    return static_cast<long double>(std::ranges::count_if(xs, subnormal)) * f_.smallest() / 2;
  }

  static std::pair<long double, long double> totals(const std::vector<long double>& xs) {
    std::pair r{xs[0], std::fabs(xs[0])}; // not 0 + xs[0], which would lose the sign of -0
    for (std::size_t i = 1; i < xs.size(); ++i) {
      r.first += xs[i];
      r.second += std::fabs(xs[i]);
    }
    return r;
  }

  const format& f_;
  reduce_op op_;
  long double n_;
  bool power_of_two_;
  bool exact_;
  bool nearest_;
  bool saturates_;
  long double own_error_; // relative error of sums in long double
  long double growth_;    // n-1 roundings up
  long double shrinkage_; // n-1 roundings down
  long double factor_;    // 1/n, rounded
  bool product_is_nearest_;
};

bool satisfies(const expectation& want, dtype type, std::uint64_t pattern, long double got) {
  switch (want.kind) {
  case rule::anything:
    return true;
  case rule::nan:
    return std::isnan(got);
  case rule::number:
    return got == want.value;
  case rule::same_bits:
    return got == want.value && std::signbit(got) == std::signbit(want.value);
  case rule::within:
    return std::fabs(got - want.value) <= want.tolerance;
  case rule::nearest_number:
    return pattern == encode_nearest(type, want.value);
  }
  return false;
}

// Text.

std::string show(dtype type, std::uint64_t pattern) {
  std::ostringstream out;
  out.precision(17);
  if (format_of(type))
    out << static_cast<double>(decode(type, pattern));
  else if (is_signed(type)) {
    const int unused = 64 - 8 * static_cast<int>(size_of(type));
    out << (static_cast<std::int64_t>(pattern << unused) >> unused);
  } else
    out << pattern;
  out << " (0x" << std::hex << pattern << ')';
  return out.str();
}

std::string show(const expectation& want) {
  std::ostringstream out;
  out.precision(17);
  if (want.kind == rule::nan)
    out << "a NaN";
  else if (want.kind == rule::nearest_number)
    out << "the number nearest to " << static_cast<double>(want.value);
  else
    out << static_cast<double>(want.value);
  if (want.kind == rule::within)
    out << " +- " << static_cast<double>(want.tolerance);
  return out.str();
}

void note_wrong(check_result& r, std::size_t index, std::string got, std::string want) {
  if (r.wrong++ == 0) {
    r.first = index;
    r.got = std::move(got);
    r.want = std::move(want);
  }
}

// Inputs.

std::uint64_t mix(std::uint64_t x) { // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// Random numbers for one element. Each call returns the next one.
class dice {
public:
  dice(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) noexcept
      : state_{mix(mix(mix(seed) ^ stream) ^ index)} {}

  std::uint64_t next() noexcept { return state_ = mix(state_); }
  std::uint64_t below(std::uint64_t n) noexcept { return next() % n; }
  int between(int low, int high) noexcept {
    return low + static_cast<int>(below(static_cast<std::uint64_t>(high - low) + 1));
  }
  bool one_in(std::uint64_t n) noexcept { return below(n) == 0; }

private:
  std::uint64_t state_;
};

std::uint64_t random_integer(dtype type, reduce_op op, dice& d) {
  const int width = 8 * static_cast<int>(size_of(type));
  const std::uint64_t mask = ~std::uint64_t{0} >> (64 - width);
  const std::uint64_t sign_bit = std::uint64_t{1} << (width - 1);
  if (d.one_in(16))
    return std::array{std::uint64_t{0}, mask, sign_bit, sign_bit - 1}[d.below(4)];
  const std::uint64_t x = d.next() & mask;
  // Even factors would soon make every product 0.
  return op == reduce_op::prod && !d.one_in(8) ? x | 1 : x;
}

/// Returns a pattern without sign of this exponent, or of a subnormal if the exponent is too small.
std::uint64_t random_magnitude(const format& f, int exponent, dice& d) {
  const int field = std::max(exponent - f.min_exponent() + 1, 0);
  const std::uint64_t x =
      (static_cast<std::uint64_t>(field) << f.mantissa_bits) | (d.next() & f.mantissa_mask());
  return std::min(x, f.max_finite);
}

/// Returns integer * 2^exponent, which must be representable, as a pattern without sign.
std::uint64_t compose(const format& f, std::uint64_t integer, int exponent) {
  if (integer == 0)
    return 0;
  const int lowest = f.min_exponent() - f.mantissa_bits;
  while (integer > 2 * f.mantissa_mask() + 1 || exponent < lowest) {
    assert((integer & 1) == 0);
    integer >>= 1;
    ++exponent;
  }
  while (integer <= f.mantissa_mask() && exponent > lowest) {
    integer <<= 1;
    --exponent;
  }
  if (integer <= f.mantissa_mask())
    return integer; // subnormal
  return (static_cast<std::uint64_t>(exponent - lowest + 1) << f.mantissa_bits) |
         (integer & f.mantissa_mask());
}

/// Properties of an input that are the same for all its elements.
struct float_plan {
  const format& f;
  reduce_op op;
  input_kind kind;
  int rank;
  int ranks;
  int highest;                 // sums of kind `any`: the largest exponent
  int contributors;            // products: number of ranks whose factors are not +-1
  std::uint64_t terms = 0;     // exact sums: number of ranks whose terms are not 0
  std::uint64_t multiples = 0; // exact sums: a term is at most this multiple of a power of two
  int scale = 0;               // exact: a later factor may be 1/2^scale
};

float_plan plan(const input_spec& spec) {
  const format& f = *format_of(spec.type);
  const auto ranks = static_cast<std::uint64_t>(spec.ranks);
  const long double growth = std::pow(1 + f.unit_roundoff(), static_cast<long double>(ranks));
  const int max_exponent = std::ilogb(f.largest());
  float_plan p{.f = f,
               .op = spec.op,
               .kind = spec.kind,
               .rank = spec.rank,
               .ranks = spec.ranks,
               .highest = std::ilogb(f.largest() / (static_cast<long double>(ranks) * growth)) - 1,
               .contributors = std::min(max_exponent, -f.min_exponent()) * 2 / 3};
  p.terms = 2 * (f.mantissa_mask() + 1);
  if (spec.op == reduce_op::avg && (ranks & (ranks - 1)) == 0)
    p.scale = std::ilogb(static_cast<double>(ranks));
  if (spec.op == reduce_op::premul_sum) { // factors from 1/2 to 2; for exact input 1/2 or 1
    --p.highest;
    p.scale = 1;
    p.terms /= 2;
  }
  p.multiples = std::max<std::uint64_t>(p.terms / ranks, 1);
  return p;
}

/// `shared` gives the same numbers on all ranks.
std::uint64_t random_float(const float_plan& p, std::uint64_t index, dice& d, dice& shared) {
  const format& f = p.f;
  const auto place =
      (static_cast<std::uint64_t>(p.rank) + index) % static_cast<std::uint64_t>(p.ranks);
  const int lowest = f.min_exponent() - f.mantissa_bits; // exponent of the smallest subnormal
  const std::uint64_t sign = d.one_in(2) ? f.sign_bit() : 0;
  switch (p.op) {
  case reduce_op::min:
  case reduce_op::max: {
    const std::uint64_t x = d.next() & (f.sign_bit() - 1);
    return sign | (x > f.max_finite ? x & (x >> 1) : x);
  }
  case reduce_op::sum:
  case reduce_op::premul_sum:
  case reduce_op::avg: {
    if (p.kind == input_kind::any) {
      const int top = shared.between(std::min(lowest, p.highest), p.highest);
      return sign | random_magnitude(f, top - d.between(0, f.mantissa_bits + 2), d);
    }
    const int highest = std::ilogb(f.largest()) - f.mantissa_bits - 1 - p.scale;
    const int exponent = shared.between(lowest, highest);
    const std::uint64_t integer = place < p.terms ? d.below(p.multiples + 1) : 0;
    return sign | compose(f, integer, exponent + p.scale);
  }
  case reduce_op::prod: {
    const bool contributes = place < static_cast<std::uint64_t>(p.contributors);
    if (p.kind == input_kind::any)
      return sign | (contributes ? random_magnitude(f, d.between(-1, 0), d) : compose(f, 1, 0));
    const std::uint64_t power = compose(f, 1, contributes ? d.between(-1, 1) : 0);
    const bool odd =
        shared.below(static_cast<std::uint64_t>(p.ranks)) == static_cast<std::uint64_t>(p.rank);
    return sign | power | (odd ? d.next() & f.mantissa_mask() : 0);
  }
  }
  return 0;
}

// Outputs.

/// `factors` is for `premul_sum`.
check_result check_elements(dtype type, reduce_op op,
                            std::span<const std::span<const std::byte>> inputs,
                            std::span<const std::byte> factors, std::span<const std::byte> output,
                            input_kind kind) {
  check_result r;
  const std::size_t size = size_of(type);
  const std::size_t count = output.size() / size;
  if (std::ranges::any_of(inputs, [&](auto x) { return x.size() != output.size(); })) {
    note_wrong(r, 0, std::to_string(output.size()) + " bytes", "as many as each input has");
    return r;
  }
  std::vector<std::uint64_t> patterns(inputs.size());
  std::vector<std::uint64_t> multipliers;
  for (std::size_t at = 0; at < factors.size(); at += size)
    multipliers.push_back(load_pattern(factors.data() + at, size));
  const auto load = [&](std::size_t i) {
    for (std::size_t rank = 0; rank < inputs.size(); ++rank)
      patterns[rank] = load_pattern(inputs[rank].data() + i * size, size);
    return load_pattern(output.data() + i * size, size);
  };
  if (!format_of(type)) {
    const integer_range range{8 * static_cast<int>(size), is_signed(type)};
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t got = load(i);
      for (std::size_t rank = 0; rank < multipliers.size(); ++rank)
        patterns[rank] = range.product(patterns[rank], multipliers[rank]);
      if (const std::uint64_t want = expected_integer(range, op, patterns); got != want)
        note_wrong(r, i, show(type, got), show(type, want));
    }
    return r;
  }
  const decoder& value = decoder_of(type);
  const float_rules rules{type, op, inputs.size(), kind};
  std::vector<long double> xs(inputs.size());
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t got = load(i);
    for (std::size_t rank = 0; rank < xs.size(); ++rank)
      xs[rank] = value(patterns[rank]);
    for (std::size_t rank = 0; rank < multipliers.size(); ++rank)
      xs[rank] *= value(multipliers[rank]);
    const expectation want = rules(xs);
    if (want.kind == rule::anything)
      ++r.undetermined;
    else if (!satisfies(want, type, got, value(got)))
      note_wrong(r, i, show(type, got), show(want));
  }
  return r;
}

// Collectives.

/// A block that one rank sends to another.
/// @units elements
struct block {
  std::size_t from;
  std::size_t to;
  std::size_t count;
};

/// Returns the block that `rank` receives from `source` in a collective that does not reduce.
block moved(const collective_spec& x, std::size_t source, std::size_t rank) {
  const auto root = static_cast<std::size_t>(x.root);
  switch (x.what) {
  case collective_kind::broadcast:
    return {0, 0, source == root ? x.count : 0};
  case collective_kind::scatter:
    return {rank * x.count, 0, source == root ? x.count : 0};
  case collective_kind::gather:
    return {0, source * x.count, rank == root ? x.count : 0};
  case collective_kind::all_gather:
    return {0, source * x.count, x.count};
  case collective_kind::all_to_all:
    return {rank * x.count, source * x.count, x.count};
  case collective_kind::all_to_all_v:
    return {x.plans[source].send_offsets[rank], x.plans[rank].recv_offsets[source],
            x.plans[source].send_counts[rank]};
  default:
    return {0, 0, 0};
  }
}

/// Returns offsets for blocks of `counts` elements, in random order and with gaps.
std::vector<std::size_t> random_offsets(const std::vector<std::size_t>& counts, dice& d) {
  std::vector<std::size_t> order(counts.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[d.below(i)]);
  std::vector<std::size_t> r(counts.size());
  std::size_t at = 0;
  for (const std::size_t i : order) {
    at += d.below(4);
    r[i] = at;
    at += counts[i];
  }
  return r;
}

std::vector<exchange_plan> random_plans(const collective_spec& x) {
  const auto n = static_cast<std::size_t>(x.ranks);
  std::vector<exchange_plan> r(n);
  dice d{x.seed, n, x.count};
  for (std::size_t from = 0; from < n; ++from)
    for (std::size_t to = 0; to < n; ++to) {
      const std::size_t count = d.one_in(4) ? 0 : d.below(x.count + 1);
      r[from].send_counts.push_back(count);
      r[to].recv_counts.push_back(count);
    }
  for (exchange_plan& plan : r) {
    plan.send_offsets = random_offsets(plan.send_counts, d);
    plan.recv_offsets = random_offsets(plan.recv_counts, d);
  }
  return r;
}

std::size_t end_of(const std::vector<std::size_t>& counts,
                   const std::vector<std::size_t>& offsets) {
  std::size_t r = 0;
  for (std::size_t i = 0; i < counts.size(); ++i)
    if (counts[i] > 0)
      r = std::max(r, offsets[i] + counts[i]);
  return r;
}

} // namespace

// Public functions.

long double decode(dtype type, std::uint64_t pattern) {
  const format& f = *format_of(type);
  const std::uint64_t magnitude = pattern & (f.sign_bit() - 1);
  long double x = f.magnitude(magnitude);
  if (magnitude > f.max_finite)
    x = f.infinity && magnitude == f.max_finite + 1 ? std::numeric_limits<long double>::infinity()
                                                    : std::numeric_limits<long double>::quiet_NaN();
  return pattern & f.sign_bit() ? -x : x;
}

std::uint64_t encode_nearest(dtype type, long double x) {
  const format& f = *format_of(type);
  const long double magnitude = std::fabs(x);
  const std::uint64_t sign = std::signbit(x) ? f.sign_bit() : 0;
  const decoder& value = decoder_of(type);
  // Finds the largest number that is not above `magnitude`.
  std::uint64_t below = 0;
  std::uint64_t above = f.max_finite + 1;
  while (above - below > 1) {
    const std::uint64_t middle = below + (above - below) / 2;
    (value(middle) <= magnitude ? below : above) = middle;
  }
  const long double down = magnitude - value(below);
  const long double up = f.magnitude(above) - magnitude;
  const bool take_above = up < down || (up == down && above % 2 == 0);
  if (take_above && above > f.max_finite)
    return sign | (saturates(type) ? f.max_finite : f.max_finite + 1);
  return sign | (take_above ? above : below);
}

void poison(std::span<std::byte> memory) noexcept { std::ranges::fill(memory, std::byte{0xff}); }

void fill_random(const input_spec& spec, std::span<std::byte> memory) {
  constexpr std::uint64_t all_ranks = ~std::uint64_t{0};
  const std::size_t size = size_of(spec.type);
  const std::size_t count = memory.size() / size;
  const auto fill = [&](auto random) {
    for (std::size_t i = 0; i < count; ++i) {
      dice d{spec.seed, static_cast<std::uint64_t>(spec.rank), i};
      store_pattern(memory.data() + i * size, size, random(i, d));
    }
  };
  if (!format_of(spec.type))
    return fill([&](std::size_t, dice& d) { return random_integer(spec.type, spec.op, d); });
  const float_plan p = plan(spec);
  fill([&](std::size_t i, dice& d) {
    dice shared{spec.seed, all_ranks, i};
    return random_float(p, i, d, shared);
  });
}

std::vector<std::vector<std::byte>> random_inputs(input_spec spec, std::size_t count) {
  std::vector<std::vector<std::byte>> r(static_cast<std::size_t>(spec.ranks));
  for (spec.rank = 0; spec.rank < spec.ranks; ++spec.rank) {
    auto& input = r[static_cast<std::size_t>(spec.rank)];
    input.resize(count * size_of(spec.type));
    fill_random(spec, input);
  }
  return r;
}

std::vector<std::byte> random_factors(input_spec spec) {
  const std::size_t size = size_of(spec.type);
  const format* f = format_of(spec.type);
  std::vector<std::byte> r(static_cast<std::size_t>(spec.ranks) * size);
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(spec.ranks); ++rank) {
    dice d{mix(spec.seed), rank, 0};
    std::uint64_t pattern = 0;
    if (!f)
      pattern = random_integer(spec.type, reduce_op::sum, d);
    else if (spec.kind == input_kind::exact)
      pattern = compose(*f, 1, d.between(-1, 0));
    else
      pattern = random_magnitude(*f, d.between(-2, 0), d);
    if (f && d.one_in(2))
      pattern |= f->sign_bit();
    store_pattern(r.data() + rank * size, size, pattern);
  }
  return r;
}

std::string to_string(const check_result& x) {
  if (x.wrong == 0)
    return "all elements right";
  return std::to_string(x.wrong) + " wrong elements, the first at index " +
         std::to_string(x.first) + ": got " + x.got + ", want " + x.want;
}

check_result check(dtype type, reduce_op op, std::span<const std::span<const std::byte>> inputs,
                   std::span<const std::byte> output, input_kind kind) {
  if (inputs.size() == 1)
    return check_equal(type, inputs[0], output);
  return check_elements(type, op, inputs, {}, output, kind);
}

check_result check_premul_sum(dtype type, std::span<const std::span<const std::byte>> inputs,
                              std::span<const std::byte> factors, std::span<const std::byte> output,
                              input_kind kind) {
  assert(factors.size() == inputs.size() * size_of(type));
  return check_elements(type, reduce_op::premul_sum, inputs, factors, output, kind);
}

check_result check(dtype type, reduce_op op, const std::vector<std::vector<std::byte>>& inputs,
                   std::span<const std::byte> output, input_kind kind) {
  const std::vector<std::span<const std::byte>> views(inputs.begin(), inputs.end());
  return check(type, op, views, output, kind);
}

check_result check_equal(dtype type, std::span<const std::byte> want,
                         std::span<const std::byte> output) {
  check_result r;
  if (want.size() != output.size()) {
    note_wrong(r, 0, std::to_string(output.size()) + " bytes",
               std::to_string(want.size()) + " bytes");
    return r;
  }
  const std::size_t size = size_of(type);
  for (std::size_t i = 0; i < want.size() / size; ++i) {
    const std::uint64_t x = load_pattern(want.data() + i * size, size);
    const std::uint64_t got = load_pattern(output.data() + i * size, size);
    if (x != got)
      note_wrong(r, i, show(type, got), show(type, x));
  }
  return r;
}

collective_spec completed(collective_spec x) {
  if (x.what == collective_kind::all_to_all_v)
    x.plans = random_plans(x);
  if (reduces(x.what) && x.op == reduce_op::premul_sum)
    x.factors = random_factors(
        {.type = x.type, .op = x.op, .seed = x.seed, .ranks = x.ranks, .kind = x.kind});
  return x;
}

collective_call call_of(const collective_spec& x, int rank, const void* send, void* recv) {
  const auto r = static_cast<std::size_t>(rank);
  return {.what = x.what,
          .send = send,
          .recv = recv,
          .count = x.count,
          .type = x.type,
          .op = x.op,
          .peer = x.root,
          .factor = x.factors.empty() ? nullptr : x.factors.data() + r * size_of(x.type),
          .plan = x.plans.empty() ? nullptr : &x.plans[r]};
}

std::size_t send_count(const collective_spec& x, int rank) {
  const auto n = static_cast<std::size_t>(x.ranks);
  switch (x.what) {
  case collective_kind::all_reduce:
  case collective_kind::reduce:
  case collective_kind::all_gather:
  case collective_kind::gather:
    return x.count;
  case collective_kind::broadcast:
    return rank == x.root ? x.count : 0;
  case collective_kind::scatter:
    return rank == x.root ? n * x.count : 0;
  case collective_kind::reduce_scatter:
  case collective_kind::all_to_all:
    return n * x.count;
  case collective_kind::all_to_all_v: {
    const exchange_plan& plan = x.plans[static_cast<std::size_t>(rank)];
    return end_of(plan.send_counts, plan.send_offsets);
  }
  default:
    return 0;
  }
}

std::size_t recv_count(const collective_spec& x, int rank) {
  const auto n = static_cast<std::size_t>(x.ranks);
  switch (x.what) {
  case collective_kind::all_reduce:
  case collective_kind::broadcast:
  case collective_kind::reduce_scatter:
  case collective_kind::scatter:
    return x.count;
  case collective_kind::reduce:
    return rank == x.root ? x.count : 0;
  case collective_kind::gather:
    return rank == x.root ? n * x.count : 0;
  case collective_kind::all_gather:
  case collective_kind::all_to_all:
    return n * x.count;
  case collective_kind::all_to_all_v: {
    const exchange_plan& plan = x.plans[static_cast<std::size_t>(rank)];
    return end_of(plan.recv_counts, plan.recv_offsets);
  }
  default:
    return 0;
  }
}

std::optional<shared_placement> in_place(const collective_spec& x, int rank) {
  const std::size_t own = static_cast<std::size_t>(rank) * x.count;
  switch (x.what) {
  case collective_kind::all_reduce:
    return shared_placement{};
  case collective_kind::reduce:
  case collective_kind::broadcast:
    return rank == x.root ? std::optional{shared_placement{}} : std::nullopt;
  case collective_kind::all_gather:
    return shared_placement{.send_at = own};
  case collective_kind::gather:
    return rank == x.root ? std::optional{shared_placement{.send_at = own}} : std::nullopt;
  case collective_kind::reduce_scatter:
    return shared_placement{.recv_at = own};
  case collective_kind::scatter:
    return rank == x.root ? std::optional{shared_placement{.recv_at = own}} : std::nullopt;
  default:
    return std::nullopt;
  }
}

std::vector<std::vector<std::byte>> random_sends(const collective_spec& x) {
  const std::size_t size = size_of(x.type);
  if (reduces(x.what))
    return random_inputs(
        {.type = x.type, .op = x.op, .seed = x.seed, .ranks = x.ranks, .kind = x.kind},
        send_count(x, 0));
  std::vector<std::vector<std::byte>> r(static_cast<std::size_t>(x.ranks));
  for (int rank = 0; rank < x.ranks; ++rank) {
    auto& send = r[static_cast<std::size_t>(rank)];
    send.resize(send_count(x, rank) * size);
    for (std::size_t at = 0; at < send.size(); at += size)
      store_pattern(send.data() + at, size,
                    dice{x.seed, static_cast<std::uint64_t>(rank), at}.next());
  }
  return r;
}

check_result check_collective(const collective_spec& x, int rank,
                              const std::vector<std::vector<std::byte>>& sends,
                              std::span<const std::byte> before, std::span<const std::byte> after) {
  const std::size_t size = size_of(x.type);
  const auto r = static_cast<std::size_t>(rank);
  const std::size_t received = recv_count(x, rank) * size;
  if (before.size() != after.size() || after.size() < received) {
    check_result bad;
    note_wrong(bad, 0, std::to_string(after.size()) + " bytes",
               std::to_string(before.size()) + " bytes, at least " + std::to_string(received));
    return bad;
  }
  if (!reduces(x.what)) {
    std::vector<std::byte> want(before.begin(), before.end());
    for (std::size_t source = 0; source < sends.size(); ++source) {
      const block b = moved(x, source, r);
      if (b.count > 0)
        std::memcpy(want.data() + b.to * size, sends[source].data() + b.from * size,
                    b.count * size);
    }
    return check_equal(x.type, want, after);
  }
  if (received > 0) {
    const std::size_t first = x.what == collective_kind::reduce_scatter ? r * received : 0;
    std::vector<std::span<const std::byte>> inputs;
    inputs.reserve(sends.size());
    for (const auto& send : sends)
      inputs.push_back(std::span{send}.subspan(first, received));
    const auto output = after.first(received);
    auto result = x.op == reduce_op::premul_sum
                      ? check_premul_sum(x.type, inputs, x.factors, output, x.kind)
                      : check(x.type, x.op, inputs, output, x.kind);
    if (!result)
      return result;
  }
  auto rest = check_equal(x.type, before.subspan(received), after.subspan(received));
  rest.first += received / size;
  return rest;
}

} // namespace troupe::testing
