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
  if (x.d.type == dtype::int32 &&
      (x.alpha[0] != std::trunc(x.alpha[0]) || x.beta[0] != std::trunc(x.beta[0])))
    return refuse(errc::invalid_argument, "alpha and beta of integers have to be integers");
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

caf::error check_vector(const launch_memory* m, std::uint64_t count, dtype type, const char* name) {
  if (m == nullptr)
    return {};
  if (m->type != type)
    return refuse(errc::shape_mismatch,
                  std::string{name} + " has to be of " + std::string{to_string(type)});
  if (m->count < count)
    return refuse(errc::out_of_range, std::string{name} + " needs " + std::to_string(count) +
                                          " elements, and has " + std::to_string(m->count));
  return {};
}

caf::error check_auxiliary(const product& x, const launch_memory* m) {
  if (m == nullptr)
    return {};
  const bool bits = x.function == activation::relu || x.function == activation::relu_gradient;
  if (x.auxiliary_leading < x.columns() || (bits && x.auxiliary_leading % 128 != 0))
    return refuse(errc::invalid_argument,
                  bits ? "rows of bits begin at multiples of 128, and have all columns"
                       : "rows of the auxiliary do not have all columns");
  layout of{x.rows(), bits ? x.auxiliary_leading / 8 : x.columns(),
            bits ? x.auxiliary_leading / 8 : x.auxiliary_leading};
  const auto wanted = extent_of(of, 1);
  if (!wanted)
    return wanted.error();
  return check_vector(m, *wanted, bits ? dtype::uint8 : x.bias_type(), "the auxiliary");
}

bool overlap(const launch_memory& a, const launch_memory& b) noexcept {
  const auto* x = static_cast<const std::byte*>(a.address);
  const auto* y = static_cast<const std::byte*>(b.address);
  return x < y + b.size_bytes() && y < x + a.size_bytes();
}

/// Checks that nothing that is written overlaps anything else, but d may be c.
caf::error check_overlap(const product& x, const product_memory& memory) {
  std::vector<const launch_memory*> written;
  std::vector<const launch_memory*> read;
  for (auto& m : memory.d)
    written.push_back(&m);
  for (auto list : {memory.a, memory.b})
    for (auto& m : list)
      read.push_back(&m);
  for (std::size_t i = 0; i < extras; ++i)
    if (const auto* m = memory.more[i]; m != nullptr) {
      (x.writes(static_cast<extra>(i)) ? written : read).push_back(m);
    }
  for (std::size_t i = 0; i < written.size(); ++i) {
    for (const auto* m : read)
      if (overlap(*written[i], *m))
        return refuse(errc::invalid_argument, "what is written overlaps what is read");
    for (std::size_t j = 0; j < i; ++j)
      if (overlap(*written[i], *written[j]))
        return refuse(errc::invalid_argument, "two results overlap");
  }
  for (std::size_t i = 0; i < memory.c.size(); ++i)
    for (std::size_t j = 0; j < written.size(); ++j) {
      const bool same = j == i && memory.c[i].address == written[j]->address &&
                        x.c.leading == x.d.leading && x.c.batch_stride == x.d.batch_stride &&
                        x.c.type == x.d.type;
      if (!same && overlap(memory.c[i], *written[j]))
        return refuse(errc::invalid_argument, "c overlaps the result, and is not the same matrix");
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
  // What is behind is d once more, where rows of d do not fill it.
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
  auto error = check_vector(memory[extra::bias], x.columns(), x.bias_type(), "the bias");
  if (!error)
    error =
        check_vector(memory[extra::bias_gradient], x.columns(), x.bias_type(), "the bias gradient");
  for (const auto s : {extra::a_scale, extra::b_scale, extra::d_scale})
    if (!error)
      error = check_vector(memory[s], 1, dtype::float32, "a scale");
  if (!error)
    error = check_auxiliary(x, memory[extra::auxiliary]);
  return error ? error : check_overlap(x, memory);
}

} // namespace troupe::blas
