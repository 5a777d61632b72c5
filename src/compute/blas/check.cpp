/// Checks of matrix products, without a device.
#include "compute/blas/arguments.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace troupe::blas {

namespace {

bool is_float8(dtype x) noexcept { return x == dtype::float8_e4m3 || x == dtype::float8_e5m2; }

caf::error refuse(errc code, std::string why) { return make_error(code, std::move(why)); }

std::string size_of_matrix(std::uint64_t rows, std::uint64_t columns) {
  return std::to_string(rows) + " x " + std::to_string(columns);
}

/// Returns whether products of these types exist, with a result of `d`.
bool fit(dtype a, dtype b, dtype d) noexcept {
  switch (a) {
  case dtype::float64:
  case dtype::float32:
  case dtype::complex64:
  case dtype::complex128:
    return b == a && d == a;
  case dtype::float16:
  case dtype::bfloat16:
    return b == a && (d == a || d == dtype::float32);
  case dtype::int8:
    return b == a && d == dtype::int32;
  case dtype::float8_e4m3:
  case dtype::float8_e5m2:
    return is_float8(b) && (a == dtype::float8_e4m3 || b == dtype::float8_e4m3) &&
           (d == dtype::bfloat16 || d == dtype::float16 || d == dtype::float32 ||
            d == dtype::float8_e4m3 || (d == dtype::float8_e5m2 && a != b));
  default:
    return false;
  }
}

bool is_int32(double x) noexcept {
  using limits = std::numeric_limits<std::int32_t>;
  return x >= limits::min() && x <= limits::max() && x == std::trunc(x);
}

caf::error check_types(const product& x) {
  const auto name = [](dtype t) { return std::string{to_string(t)}; };
  for (const auto t : {x.a.type, x.b.type, x.c.type, x.d.type})
    if (!is_dtype(t))
      return refuse(errc::invalid_argument, "there is no such element type");
  if (!fit(x.a.type, x.b.type, x.d.type))
    return refuse(errc::not_supported, "there is no product of " + name(x.a.type) + " and " +
                                           name(x.b.type) + " with a result of " + name(x.d.type));
  const auto of_c = is_float8(x.d.type) ? dtype::bfloat16 : x.d.type;
  if (x.reads_c && x.c.type != of_c)
    return refuse(errc::shape_mismatch, "c has to be of " + name(of_c));
  if (x.compute == precision::tf32 && x.a.type != dtype::float32)
    return refuse(errc::invalid_argument, "tf32 is for float32");
  if (is_float8(x.a.type) && (x.a.op != transpose::none || x.b.op != transpose::transposed))
    return refuse(errc::not_supported,
                  "products of float8 need a as it is and b transposed (Hopper)");
  if (!is_complex(x.d.type) && (x.alpha[1] != 0 || x.beta[1] != 0))
    return refuse(errc::invalid_argument, "alpha and beta are complex, and the result is not");
  if (x.d.type == dtype::int32 && !(is_int32(x.alpha[0]) && is_int32(x.beta[0])))
    return refuse(errc::invalid_argument, "alpha and beta of int32 have to be values of int32");
  return {};
}

caf::error check_enumerators(const product& x) {
  for (const auto op : {x.a.op, x.b.op, x.c.op, x.d.op})
    if (op > transpose::conjugated)
      return refuse(errc::invalid_argument, "there is no such transpose");
  if (x.function > activation::gelu_gradient || x.compute > precision::tf32)
    return refuse(errc::invalid_argument, "there is no such activation or precision");
  for (const auto flag : {x.deterministic, x.reads_c, x.by_address, x.only_prepares,
                          *std::ranges::max_element(x.has)})
    if (flag > 1)
      return refuse(errc::invalid_argument, "a flag is neither 0 nor 1");
  if (x.c.op != transpose::none || x.d.op != transpose::none)
    return refuse(errc::invalid_argument, "c and d cannot be transposed");
  return {};
}

caf::error check_shape(const product& x) {
  if (x.a.used_rows() != x.d.rows || x.b.used_columns() != x.d.columns ||
      x.a.used_columns() != x.b.used_rows())
    return refuse(errc::shape_mismatch, size_of_matrix(x.a.used_rows(), x.a.used_columns()) +
                                            " times " +
                                            size_of_matrix(x.b.used_rows(), x.b.used_columns()) +
                                            " is not " + size_of_matrix(x.d.rows, x.d.columns));
  if (x.reads_c && (x.c.rows != x.d.rows || x.c.columns != x.d.columns))
    return refuse(errc::shape_mismatch, "c has another shape than d");
  for (const auto* m : {&x.a, &x.b, &x.c, &x.d}) {
    if (m == &x.c && !x.reads_c)
      continue;
    if (m->rows == 0 || m->columns == 0)
      return refuse(errc::invalid_argument, "a matrix has no elements");
    if (m->leading < m->columns)
      return refuse(errc::invalid_argument, "rows of " + std::to_string(m->columns) +
                                                " columns cannot begin each " +
                                                std::to_string(m->leading) + " elements");
  }
  // cuBLASLt counts rows, columns and batches in 32 bits.
  constexpr std::uint64_t most = std::numeric_limits<std::int32_t>::max();
  for (const auto n : {x.d.rows, x.d.columns, x.inner(), x.batches})
    if (n > most)
      return refuse(errc::not_supported, "more than 2^31 - 1 rows, columns or batches");
  if (x.batches == 0)
    return refuse(errc::invalid_argument, "no batches");
  if (x.by_address && (x.batches == 1 || x.only_prepares))
    return refuse(errc::invalid_argument,
                  "a batch by address has several matrices, and cannot only be prepared");
  if (x.batches > 1 && !x.by_address) {
    const auto own = x.d.rows * x.d.leading - (x.d.leading - x.d.columns);
    if (x.d.batch_stride < own)
      return refuse(errc::invalid_argument, "the matrices of d overlap each other");
  }
  return {};
}

caf::error check_function(const product& x) {
  const bool is_gradient =
      x.function == activation::relu_gradient || x.function == activation::gelu_gradient;
  const bool any = x.function != activation::none || x.has_extra(extra::bias);
  if (any && (is_complex(x.d.type) || x.d.type == dtype::int32 || x.d.type == dtype::float64))
    return refuse(errc::not_supported, "bias and activations are for float32 and narrower results");
  if (is_gradient != (x.has_extra(extra::auxiliary) && !x.writes_auxiliary()))
    return refuse(errc::invalid_argument, is_gradient
                                              ? "a gradient needs the auxiliary of its activation"
                                              : "an auxiliary without activation");
  if (is_gradient && x.has_extra(extra::bias))
    return refuse(errc::invalid_argument, "a gradient has no bias");
  if (!is_gradient && x.has_extra(extra::bias_gradient))
    return refuse(errc::invalid_argument, "a bias gradient is for gradients of activations");
  if (x.by_address && (any || x.has_extra(extra::auxiliary)))
    return refuse(errc::not_supported, "bias and activations are not for batches by address");
  if (x.batches > 1 && (x.has_extra(extra::auxiliary) || x.has_extra(extra::bias_gradient)))
    return refuse(errc::not_supported, "auxiliary and bias gradient are not for batches");
  for (const auto s : {extra::a_scale, extra::b_scale, extra::d_scale})
    if (x.has_extra(s) && !is_float8(s == extra::d_scale ? x.d.type : x.a.type))
      return refuse(errc::invalid_argument, "scales are for float8");
  return {};
}

caf::error check_room(const product& x, const layout& of, std::span<const launch_memory> memory,
                      const char* name) {
  const auto wanted = extent_of(of, x.by_address ? 1 : x.batches);
  if (!wanted)
    return wanted.error();
  for (const auto& m : memory) {
    if (m.type != of.type)
      return refuse(errc::shape_mismatch, std::string{"matrices of "} + name + " of other types");
    if (m.count < *wanted)
      return refuse(errc::out_of_range, std::string{name} + " needs " + std::to_string(*wanted) +
                                            " elements, and has " + std::to_string(m.count));
  }
  return {};
}

dtype type_of(const product& x, extra which) noexcept {
  switch (which) {
  case extra::bias:
  case extra::bias_gradient:
    return x.bias_type();
  case extra::auxiliary:
    return x.has_bits() ? dtype::uint8 : x.bias_type();
  default:
    return dtype::float32;
  }
}

caf::error check_extras(const product& x, const product_memory& memory) {
  constexpr const char* names[extras] = {"the bias",    "the auxiliary", "the bias gradient",
                                         "the a_scale", "the b_scale",   "the d_scale"};
  if (x.has_extra(extra::auxiliary) &&
      (x.auxiliary_leading < x.columns() || (x.has_bits() && x.auxiliary_leading % 128 != 0)))
    return refuse(errc::invalid_argument,
                  x.has_bits() ? "rows of bits begin at multiples of 128, and have all columns"
                               : "rows of the auxiliary do not have all columns");
  for (std::size_t i = 0; i < extras; ++i) {
    const auto* m = memory.more[i];
    if (m == nullptr)
      continue;
    const auto which = static_cast<extra>(i);
    const auto wanted = extent_of(x, which);
    if (!wanted)
      return wanted.error();
    if (m->type != type_of(x, which))
      return refuse(errc::shape_mismatch, std::string{names[i]} + " has to be of " +
                                              std::string{to_string(type_of(x, which))});
    if (m->count < *wanted)
      return refuse(errc::out_of_range, std::string{names[i]} + " needs " +
                                            std::to_string(*wanted) + " elements, and has " +
                                            std::to_string(m->count));
  }
  return {};
}

/// Memory that a product uses.
struct used_bytes {
  const std::byte* begin;
  const std::byte* end;
  bool written;
};

/// Returns all memory of the product. A matrix of c that is also the one of d is left out.
std::vector<used_bytes> all_used(const product& x, const product_memory& memory) {
  std::vector<used_bytes> result;
  const auto add = [&](const launch_memory& m, bool written) {
    const auto* begin = static_cast<const std::byte*>(m.address);
    result.push_back({begin, begin + m.size_bytes(), written});
  };
  for (auto list : {memory.a, memory.b})
    for (auto& m : list)
      add(m, false);
  for (auto& m : memory.d)
    add(m, true);
  const bool has_strides = x.batches > 1 && !x.by_address;
  const bool alike = x.c.leading == x.d.leading && x.c.type == x.d.type &&
                     (!has_strides || x.c.batch_stride == x.d.batch_stride);
  for (std::size_t i = 0; i < memory.c.size(); ++i)
    if (!alike || memory.c[i].address != memory.d[i].address)
      add(memory.c[i], false);
  for (std::size_t i = 0; i < extras; ++i)
    if (memory.more[i] != nullptr)
      add(*memory.more[i], x.writes(static_cast<extra>(i)));
  return result;
}

/// Checks that nothing that is written overlaps anything else, but d may be c.
caf::error check_overlap(const product& x, const product_memory& memory) {
  auto all = all_used(x, memory);
  std::ranges::sort(all, {}, &used_bytes::begin);
  const std::byte* end = nullptr;         // of all before
  const std::byte* end_written = nullptr; // of all that is written before
  for (auto& m : all) {
    if (m.begin < (m.written ? end : end_written))
      return refuse(errc::invalid_argument,
                    "what is written overlaps what else is used; c may only be d itself");
    end = std::max(end, m.end);
    if (m.written)
      end_written = std::max(end_written, m.end);
  }
  return {};
}

} // namespace

caf::expected<std::uint64_t> extent_of(const layout& x, std::uint64_t batches) {
  std::uint64_t rows = 0;
  std::uint64_t all = 0;
  if (x.rows == 0 || batches == 0 || __builtin_mul_overflow(x.rows - 1, x.leading, &rows) ||
      __builtin_mul_overflow(batches - 1, x.batch_stride, &all) ||
      __builtin_add_overflow(rows, x.columns, &rows) || __builtin_add_overflow(all, rows, &all))
    return refuse(errc::out_of_range, "a matrix that is empty, or has more elements than memory");
  return all;
}

caf::expected<std::uint64_t> extent_of(const product& x, extra which) {
  switch (which) {
  case extra::bias:
  case extra::bias_gradient:
    return x.columns();
  case extra::auxiliary: {
    const auto leading = x.has_bits() ? x.auxiliary_leading / 8 : x.auxiliary_leading;
    return extent_of(layout{x.rows(), x.has_bits() ? leading : x.columns(), leading}, 1);
  }
  default:
    return std::uint64_t{1};
  }
}

std::optional<product_memory> divide(const product& x, std::span<const launch_memory> reads,
                                     std::span<const launch_memory> writes) noexcept {
  const auto n = x.handles();
  product_memory result;
  bool is_right = n != 0;
  const auto take = [&](std::span<const launch_memory>& from, std::size_t count) {
    is_right = is_right && from.size() >= count;
    const auto taken = is_right ? from.first(count) : from.first(0);
    from = from.subspan(taken.size());
    return taken;
  };
  result.a = take(reads, n);
  result.b = take(reads, n);
  if (x.reads_c)
    result.c = take(reads, n);
  result.d = take(x.only_prepares ? reads : writes, n);
  for (std::size_t i = 0; i < extras; ++i) {
    if (!x.has[i])
      continue;
    auto& from = x.writes(static_cast<extra>(i)) ? writes : reads;
    if (const auto m = take(from, 1); !m.empty())
      result.more[i] = m.data();
  }
  // Behind these is d once more, where rows of d do not fill it.
  return is_right && writes.empty() ? std::optional{result} : std::nullopt;
}

caf::error check(const product& x, const product_memory& memory) {
  for (auto f : {check_enumerators, check_types, check_shape, check_function})
    if (auto error = f(x))
      return error;
  const std::pair<const layout*, std::span<const launch_memory>> matrices[] = {
      {&x.a, memory.a}, {&x.b, memory.b}, {&x.c, memory.c}, {&x.d, memory.d}};
  const char* const names[] = {"a", "b", "c", "d"};
  for (std::size_t i = 0; i < std::size(matrices); ++i)
    if (auto error = check_room(x, *matrices[i].first, matrices[i].second, names[i]);
        error && !matrices[i].second.empty())
      return error;
  const auto error = check_extras(x, memory);
  return error ? error : check_overlap(x, memory);
}

} // namespace troupe::blas
