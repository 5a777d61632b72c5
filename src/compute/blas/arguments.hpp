/// The arguments of a matrix product as they travel.
#pragma once

#include <troupe/blas.hpp>
#include <troupe/launch_memory.hpp>

#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace troupe::blas {

/// Where the elements of a batch of matrices lie.
struct layout {
  std::uint64_t rows = 0; ///< as stored
  std::uint64_t columns = 0;
  std::uint64_t leading = 0;
  std::uint64_t batch_stride = 0;
  dtype type = dtype::float32;
  transpose op = transpose::none;
  std::array<std::uint8_t, 6> unused{};

  std::uint64_t used_rows() const noexcept { return op == transpose::none ? rows : columns; }
  std::uint64_t used_columns() const noexcept { return op == transpose::none ? columns : rows; }
  bool operator==(const layout&) const = default;
};

/// The optional memory of a product, in the order of the request's lists.
enum class extra : std::uint8_t { bias, auxiliary, bias_gradient, a_scale, b_scale, d_scale };
inline constexpr std::size_t extras = 6;

/// All of a product but its memory. No padding: it is compared and sent as bytes. The types are set
/// from the memory when it is received.
struct product {
  layout a, b, c, d;
  std::uint64_t batches = 1;
  std::uint64_t auxiliary_leading = 0;
  double alpha[2] = {1, 0}; ///< real and imaginary part
  double beta[2] = {0, 0};
  // Flags, 0 or 1. A `bool` must not have other values, and these come from outside.
  std::array<std::uint8_t, extras> has{};
  activation function = activation::none;
  precision compute = precision::standard;
  std::uint8_t deterministic = 0;
  std::uint8_t reads_c = 0;
  std::uint8_t by_address = 0; ///< each matrix of the batch is a handle of its own
  std::uint8_t only_prepares = 0;
  std::array<std::uint8_t, 4> unused{};

  bool has_extra(extra x) const noexcept { return has[static_cast<std::size_t>(x)] != 0; }
  std::uint64_t rows() const noexcept { return d.rows; }
  std::uint64_t columns() const noexcept { return d.columns; }
  std::uint64_t inner() const noexcept { return a.used_columns(); }
  /// Returns how many handles each matrix has.
  std::size_t handles() const noexcept {
    return by_address ? static_cast<std::size_t>(batches) : 1;
  }
  /// Returns whether the auxiliary has bits: that of `relu`.
  bool has_bits() const noexcept {
    return function == activation::relu || function == activation::relu_gradient;
  }
  bool writes_auxiliary() const noexcept {
    return function == activation::relu || function == activation::gelu;
  }
  /// Returns whether the request writes that memory.
  bool writes(extra x) const noexcept {
    return !only_prepares &&
           (x == extra::bias_gradient || (x == extra::auxiliary && writes_auxiliary()));
  }
  /// Returns the type of the bias and of the auxiliary of `gelu`.
  dtype bias_type() const noexcept {
    return size_of(a.type) != 1 || d.type == dtype::int32 ? d.type
           : d.type == dtype::float16                     ? dtype::float16
                                                          : dtype::bfloat16;
  }
};
static_assert(sizeof(layout) == 40 && sizeof(product) == 4 * sizeof(layout) + 2 * 8 + 4 * 8 + 16);

/// The memory of a product.
struct product_memory {
  std::span<const launch_memory> a, b, c, d; ///< c: empty if it is not read
  std::array<const launch_memory*, extras> more{};

  const launch_memory* operator[](extra x) const noexcept {
    return more[static_cast<std::size_t>(x)];
  }
};

/// Divides the memory of a request. None if the lists do not have the handles of the product.
std::optional<product_memory> divide(const product& x, std::span<const launch_memory> reads,
                                     std::span<const launch_memory> writes) noexcept;

/// Checks what can be known without a device.
/// @errors as `matmul`
caf::error check(const product& x, const product_memory& memory);

/// Returns how many elements of a buffer a matrix of that layout needs, with its batch.
/// @errors errc::out_of_range: more than can be counted
caf::expected<std::uint64_t> extent_of(const layout& x, std::uint64_t batches);

/// Returns how many elements of that memory the product uses.
/// @errors errc::out_of_range: more than can be counted
caf::expected<std::uint64_t> extent_of(const product& x, extra which);

} // namespace troupe::blas
