#include "compute/blas/host_product.hpp"

#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#if TROUPE_HAS_BLAS
#include <cblas.h>
#endif

namespace troupe::blas {

namespace {

/// A product with its own copy of the addresses, since it runs later.
struct job {
  product what;
  std::vector<launch_memory> a, b, c, d;
  std::array<void*, extras> more{};

  void* at(extra x) const noexcept { return more[static_cast<std::size_t>(x)]; }
};

template <class T> constexpr bool is_complex_number = false;
template <class T> constexpr bool is_complex_number<std::complex<T>> = true;

/// Calls `f` with a null pointer to the C++ type of `type`, one that matrices have.
template <class F> void with_type(dtype type, F f) {
  switch (type) {
  case dtype::int8:
    return f(static_cast<std::int8_t*>(nullptr));
  case dtype::int32:
    return f(static_cast<std::int32_t*>(nullptr));
  case dtype::float16:
    return f(static_cast<float16*>(nullptr));
  case dtype::bfloat16:
    return f(static_cast<bfloat16*>(nullptr));
  case dtype::float32:
    return f(static_cast<float*>(nullptr));
  case dtype::float64:
    return f(static_cast<double*>(nullptr));
  case dtype::float8_e4m3:
    return f(static_cast<float8_e4m3*>(nullptr));
  case dtype::float8_e5m2:
    return f(static_cast<float8_e5m2*>(nullptr));
  case dtype::complex64:
    return f(static_cast<std::complex<float>*>(nullptr));
  case dtype::complex128:
    return f(static_cast<std::complex<double>*>(nullptr));
  default:
    return; // no matrix has it
  }
}

/// Converts an element to T, in which is computed, or back. No other pairs of types occur.
template <class To, class From> To converted(From x) {
  if constexpr (is_complex_number<To> != is_complex_number<From>)
    return To{};
  else if constexpr (is_complex_number<To>)
    return To(x);
  else if constexpr (std::is_arithmetic_v<To> && std::is_arithmetic_v<From>)
    return static_cast<To>(x);
  else if constexpr (std::is_arithmetic_v<To>)
    return static_cast<To>(static_cast<float>(x));
  else
    return To(static_cast<float>(x));
}

template <class T> T conjugate(T x) {
  if constexpr (is_complex_number<T>)
    return std::conj(x);
  else
    return x;
}

/// Returns matrix `i` of a batch as it is used, with its rows one behind the other.
template <class T>
std::vector<T> gathered(const layout& of, const std::vector<launch_memory>& memory, std::size_t i) {
  const auto rows = of.used_rows();
  const auto columns = of.used_columns();
  std::vector<T> result(rows * columns);
  const bool apart = memory.size() > 1;
  with_type(of.type, [&]<class E>(E*) {
    const auto* from =
        static_cast<const E*>(memory[apart ? i : 0].address) + (apart ? 0 : i * of.batch_stride);
    for (std::uint64_t r = 0; r < of.rows; ++r)
      for (std::uint64_t c = 0; c < of.columns; ++c) {
        const auto x = converted<T>(from[r * of.leading + c]);
        if (of.op == transpose::none)
          result[r * columns + c] = x;
        else
          result[c * columns + r] = of.op == transpose::conjugated ? conjugate(x) : x;
      }
  });
  return result;
}

/// Adds the products in their order, so that the bits are always the same.
template <class T>
void multiply_in_order(std::size_t m, std::size_t n, std::size_t k, const T* a, const T* b, T* to) {
  for (std::size_t i = 0; i < m; ++i)
    for (std::size_t p = 0; p < k; ++p) {
      const auto factor = a[i * k + p];
      for (std::size_t j = 0; j < n; ++j)
        to[i * n + j] += factor * b[p * n + j];
    }
}

/// Computes `to`, which is 0, as the product of dense matrices.
template <class T>
void multiply(bool in_order, std::size_t m, std::size_t n, std::size_t k, const T* a, const T* b,
              T* to) {
#if TROUPE_HAS_BLAS
  const auto rows = static_cast<int>(m);
  const auto columns = static_cast<int>(n);
  const auto inner = static_cast<int>(k);
  const T one{1};
  if (!in_order) {
    if constexpr (std::is_same_v<T, float>)
      return cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, columns, inner, one, a,
                         inner, b, columns, T{}, to, columns);
    else if constexpr (std::is_same_v<T, double>)
      return cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, columns, inner, one, a,
                         inner, b, columns, T{}, to, columns);
    const T zero{};
    if constexpr (std::is_same_v<T, std::complex<float>>)
      return cblas_cgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, columns, inner, &one, a,
                         inner, b, columns, &zero, to, columns);
    else if constexpr (std::is_same_v<T, std::complex<double>>)
      return cblas_zgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, columns, inner, &one, a,
                         inner, b, columns, &zero, to, columns);
  }
#else
  static_cast<void>(in_order);
#endif
  multiply_in_order(m, n, k, a, b, to);
}

template <class T> T number_of(const double (&x)[2]) {
  if constexpr (is_complex_number<T>)
    return {static_cast<typename T::value_type>(x[0]), static_cast<typename T::value_type>(x[1])};
  else
    return static_cast<T>(
        static_cast<std::conditional_t<std::is_integral_v<T>, std::int64_t, T>>(x[0]));
}

constexpr float root = 0.7978845608028654F; // sqrt(2 / pi)
constexpr float cubic = 0.044715F;

float gelu(float x) { return 0.5F * x * (1 + std::tanh(root * (x + cubic * x * x * x))); }

float gelu_derivative(float x) {
  const auto t = std::tanh(root * (x + cubic * x * x * x));
  return 0.5F * (1 + t) + 0.5F * x * (1 - t * t) * root * (1 + 3 * cubic * x * x);
}

/// Adds the bias to a result of float32, and applies the activation or its gradient.
void apply_function(const job& x, std::vector<float>& to) {
  const auto n = x.what.columns();
  const auto kind = x.what.function;
  auto* bits = static_cast<std::uint8_t*>(x.at(extra::auxiliary));
  with_type(x.what.bias_type(), [&]<class E>(E*) {
    const auto* bias = static_cast<const E*>(x.at(extra::bias));
    auto* before = static_cast<E*>(x.at(extra::auxiliary));
    for (std::size_t i = 0; i < to.size(); ++i) {
      auto& v = to[i];
      const auto at = i / n * x.what.auxiliary_leading + i % n;
      if (bias != nullptr)
        v += converted<float>(bias[i % n]);
      if (kind == activation::relu) {
        const auto bit = static_cast<std::uint8_t>(1U << at % 8);
        if (bits != nullptr)
          bits[at / 8] =
              static_cast<std::uint8_t>(v >= 0 ? bits[at / 8] | bit : bits[at / 8] & ~bit);
        v = v > 0 ? v : 0;
      } else if (kind == activation::gelu) {
        if (before != nullptr)
          before[at] = converted<E>(v);
        v = gelu(v);
      } else if (kind == activation::relu_gradient) {
        v = (bits[at / 8] >> at % 8 & 1) != 0 ? v : 0;
      } else if (kind == activation::gelu_gradient) {
        v *= gelu_derivative(converted<float>(before[at]));
      }
    }
    if (auto* sums = static_cast<E*>(x.at(extra::bias_gradient)))
      for (std::size_t j = 0; j < n; ++j) {
        float sum = 0;
        for (auto i = j; i < to.size(); i += n)
          sum += to[i];
        sums[j] = converted<E>(sum);
      }
  });
}

/// Computes matrix `i` of the batch in T.
template <class T> void compute(const job& x, std::size_t i) {
  const auto& what = x.what;
  const auto m = what.rows();
  const auto n = what.columns();
  std::vector<T> result(m * n);
  multiply(what.deterministic, m, n, what.inner(), gathered<T>(what.a, x.a, i).data(),
           gathered<T>(what.b, x.b, i).data(), result.data());
  auto alpha = number_of<T>(what.alpha);
  if constexpr (std::is_same_v<T, float>)
    for (const auto s : {extra::a_scale, extra::b_scale})
      if (const auto* scale = static_cast<const float*>(x.at(s)))
        alpha *= *scale;
  for (auto& v : result)
    v *= alpha;
  if (what.reads_c) {
    const auto beta = number_of<T>(what.beta);
    const auto c = gathered<T>(what.c, x.c, i);
    for (std::size_t j = 0; j < result.size(); ++j)
      result[j] += beta * c[j];
  }
  if constexpr (std::is_same_v<T, float>) {
    if (what.function != activation::none || what.has_extra(extra::bias))
      apply_function(x, result);
    if (const auto* scale = static_cast<const float*>(x.at(extra::d_scale)))
      for (auto& v : result)
        v *= *scale;
  }
  const bool apart = x.d.size() > 1;
  with_type(what.d.type, [&]<class E>(E*) {
    auto* to = static_cast<E*>(x.d[apart ? i : 0].address) + (apart ? 0 : i * what.d.batch_stride);
    for (std::size_t j = 0; j < result.size(); ++j)
      to[j / n * what.d.leading + j % n] = converted<E>(result[j]);
  });
}

template <class T> void compute_all(const job& x) {
  for (std::size_t i = 0; i < x.what.batches; ++i)
    compute<T>(x, i);
}

void compute_all(const job& x) {
  switch (x.what.a.type) {
  case dtype::float64:
    return compute_all<double>(x);
  case dtype::complex64:
    return compute_all<std::complex<float>>(x);
  case dtype::complex128:
    return compute_all<std::complex<double>>(x);
  case dtype::int8:
    return compute_all<std::uint32_t>(x); // wraps
  default:
    return compute_all<float>(x);
  }
}

} // namespace

std::function<void()> host_product(const product& x, const product_memory& memory) {
  const auto list = [](auto all) { return std::vector<launch_memory>{all.begin(), all.end()}; };
  auto result = std::make_shared<job>(
      job{x, list(memory.a), list(memory.b), list(memory.c), list(memory.d), {}});
  for (std::size_t i = 0; i < extras; ++i)
    if (memory.more[i] != nullptr)
      result->more[i] = memory.more[i]->address;
  return [result = std::move(result)] { compute_all(*result); };
}

} // namespace troupe::blas
