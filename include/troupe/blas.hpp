/// Matrix products: the component `blas`. Not part of troupe/troupe.hpp.
#pragma once

#include <troupe/device.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/pending.hpp>
#include <troupe/recording.hpp>

#include <complex>
#include <cstdint>
#include <string_view>
#include <vector>

namespace troupe::blas {

/// How a stored matrix is used.
enum class transpose : std::uint8_t {
  none,
  transposed,
  conjugated, ///< transposed, with conjugate elements
};
std::string_view to_string(transpose x) noexcept;

/// A function that is applied to each element of the result.
enum class activation : std::uint8_t {
  none,
  relu,
  gelu,          ///< with tanh: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
  relu_gradient, ///< multiplied by the derivative of `relu`, which `auxiliary` tells
  gelu_gradient, ///< the same for `gelu`
};
std::string_view to_string(activation x) noexcept;

/// How products of float32 are computed.
enum class precision : std::uint8_t {
  standard, ///< in float32
  tf32,     ///< from factors rounded to 10 bits behind the point, where the GPU has that
};
std::string_view to_string(precision x) noexcept;

/// A matrix, or the first one of a batch, in row-major order: element (i, j) is at i * leading + j.
/// `Memory`: `any_gpu_ref`, or `buffer_name` in a recorded step.
template <class Memory> struct basic_matrix {
  Memory memory = {};
  std::uint64_t rows = 0; ///< as it is stored
  std::uint64_t columns = 0;
  transpose op = transpose::none;
  std::uint64_t leading = 0;      ///< elements from one row to the next; 0: as many as columns
  std::uint64_t batch_stride = 0; ///< elements from one matrix to the next; 0: they are adjacent
};
using matrix = basic_matrix<any_gpu_ref>;
using named_matrix = basic_matrix<buffer_name>;

/// Options of a matrix product. Vectors have an element for each column of the result.
template <class Memory> struct basic_matmul_options {
  std::complex<double> alpha = 1.0; ///< real, unless the result is complex
  std::complex<double> beta = 0.0;
  /// Is added, times `beta`. Without memory: the result's own former content.
  basic_matrix<Memory> c = {};
  std::uint64_t batches = 1;
  /// A vector that is added to each row, before `function`. Its type is that of the result; for
  /// products of float8 it is float16 where the result is, else bfloat16.
  Memory bias = {};
  activation function = activation::none;
  /// Written by `relu` and `gelu` if it is there, read by their gradients. For `gelu` a matrix of
  /// the bias's type: the values before it. For `relu` bits, of uint8: bit i * auxiliary_leading
  /// + j tells whether the value (i, j) was not negative.
  Memory auxiliary = {};
  std::uint64_t auxiliary_leading =
      0; ///< 0: the columns of the result, for `relu` rounded up to 128
  /// A vector of the bias's type that gets the sum over all rows of the result, of a gradient.
  Memory bias_gradient = {};
  /// One float32 each, by which float8 matrices are multiplied; without memory: 1.
  Memory a_scale = {};
  Memory b_scale = {};
  Memory d_scale = {};
  precision compute = precision::standard;
  /// The same bits each time and on each device of one kind, whatever else runs.
  bool deterministic = false;
};
using matmul_options = basic_matmul_options<any_gpu_ref>;
using named_matmul_options = basic_matmul_options<buffer_name>;

/// Computes d = function(alpha * op(a) * op(b) + beta * c + bias), with a number of products for
/// batches. It is a launch of the library "troupe.blas" that overlaps (`request_options::overlap`).
///
/// Types of a, b, and d and c: all float64, complex64 or complex128; all float32; float16 or
/// bfloat16, with d of the same or of float32; int8, with d of int32; float8_e4m3 or float8_e5m2,
/// not both of the latter, with d of bfloat16, float16 or float32, or of float8 with c of bfloat16.
/// Narrow numbers are added in float32. On the host backend all is computed in the type of d or in
/// float32, by the system's BLAS if the library was built with one.
///
/// @shape  op(a): rows x inner, op(b): inner x columns, d and c: rows x columns. d and what else is
///         written overlap nothing else, except that c may be d. What is between the rows of a
///         matrix counts as part of it.
/// @errors errc::shape_mismatch: sizes or types that do not fit together; errc::out_of_range: a
///         buffer is too small; errc::invalid_argument: overlap, strides, options that exclude each
///         other, or an alpha or beta of integers that is no int32; errc::not_supported: types, or
///         what the library has no algorithm for, such as float8 with other transposes than of b
///         alone on Hopper; errc::out_of_memory: no room for the workspace; errc::unavailable:
///         cuBLASLt could not be loaded; errc::cuda_error: a call of it failed; those of `launch`.
///         Only out_of_memory and cuda_error can leave d indeterminate.
/// @source cuBLASLt 13, `cublasLtMatmul`
pending<void> matmul(const device& on, const matrix& a, const matrix& b, const matrix& d,
                     const matmul_options& what = {}, request_options options = {});

/// The same for a batch of matrices at any addresses: all of `a` are alike, as are those of `b`, of
/// `d`, and of `c`, which may be empty. `what.c`, `what.batches` and vectors are not for it. Scales
/// are for each matrix of the list.
/// @errors also errc::shape_mismatch: different numbers, or matrices that are not alike
pending<void> matmul(const device& on, const std::vector<matrix>& a, const std::vector<matrix>& b,
                     const std::vector<matrix>& d, const matmul_options& what = {},
                     const std::vector<matrix>& c = {}, request_options options = {});

/// Returns the request as a message, for actors and for devices of other processes.
/// @errors as `matmul`, as far as they can be known without the device
caf::expected<launch> matmul_message(const matrix& a, const matrix& b, const matrix& d,
                                     const matmul_options& what = {}, request_options options = {});

/// Records the product on the device of each rank, or of one rank.
/// @errors of `world::record` and of the step
void matmul(recording& to, const named_matrix& a, const named_matrix& b, const named_matrix& d,
            const named_matmul_options& what = {});
void matmul(const rank_recording& to, const named_matrix& a, const named_matrix& b,
            const named_matrix& d, const named_matmul_options& what = {});

/// Lets products that are repeated with the same memory be launched without cuBLASLt, in this
/// process. To be called before the first product, and before `worker_main`, so that workers do so
/// as well. Off at first: the second run of a product is captured, and meanwhile CUDA refuses to
/// synchronize the device in other threads (cudaErrorStreamCaptureUnsupported).
/// @source CUDA programming guide, "Prohibited and Unhandled Operations" of stream capture
void replay_kernels(bool on = true) noexcept;

/// Chooses the algorithm for such a product and loads its kernel, so that the first `matmul` of
/// this shape neither waits nor loads code while a collective runs. Runs it once in the stream's
/// workspace, which grows by the size of the largest matrix, with its batch. The memory of the
/// matrices must be readable, and does not change.
/// @errors as `matmul`
pending<void> prepare(const device& on, const matrix& a, const matrix& b, const matrix& d,
                      const matmul_options& what = {}, request_options options = {});

} // namespace troupe::blas
