// cuBLASLt's matrices are in column-major order: it takes a matrix of this library for its
// transpose. So it computes transpose(d) = transpose(op(b)) * transpose(op(a)), from b and a.

#include "compute/blas/lt_plan.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace troupe::blas {

namespace {

cudaDataType_t to_cuda(dtype x) noexcept {
  switch (x) {
  case dtype::int8:
    return CUDA_R_8I;
  case dtype::int32:
    return CUDA_R_32I;
  case dtype::float16:
    return CUDA_R_16F;
  case dtype::bfloat16:
    return CUDA_R_16BF;
  case dtype::float64:
    return CUDA_R_64F;
  case dtype::float8_e4m3:
    return CUDA_R_8F_E4M3;
  case dtype::float8_e5m2:
    return CUDA_R_8F_E5M2;
  case dtype::complex64:
    return CUDA_C_32F;
  case dtype::complex128:
    return CUDA_C_64F;
  default: // `check` lets no other type pass
    return CUDA_R_32F;
  }
}

/// The types in which a product computes: of its sums, and of alpha and beta.
std::pair<cublasComputeType_t, cudaDataType_t> computes_in(const product& x) noexcept {
  switch (x.a.type) {
  case dtype::float64:
    return {CUBLAS_COMPUTE_64F, CUDA_R_64F};
  case dtype::complex64:
    return {CUBLAS_COMPUTE_32F, CUDA_C_32F};
  case dtype::complex128:
    return {CUBLAS_COMPUTE_64F, CUDA_C_64F};
  case dtype::int8:
    return {CUBLAS_COMPUTE_32I, CUDA_R_32I};
  default:
    return {x.compute == precision::tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
            CUDA_R_32F};
  }
}

/// Alpha or beta as cuBLASLt reads it.
union factor {
  float real;
  double real64;
  float complex[2];
  double complex64[2];
  std::int32_t integer;
};

factor factor_of(const product& x, const double (&value)[2]) noexcept {
  factor result{};
  switch (computes_in(x).second) {
  case CUDA_R_64F:
    result.real64 = value[0];
    break;
  case CUDA_C_32F:
    result.complex[0] = static_cast<float>(value[0]);
    result.complex[1] = static_cast<float>(value[1]);
    break;
  case CUDA_C_64F:
    result.complex64[0] = value[0];
    result.complex64[1] = value[1];
    break;
  case CUDA_R_32I:
    result.integer = static_cast<std::int32_t>(value[0]);
    break;
  default:
    result.real = static_cast<float>(value[0]);
  }
  return result;
}

cublasOperation_t to_cublas(transpose x) noexcept {
  return x == transpose::none         ? CUBLAS_OP_N
         : x == transpose::transposed ? CUBLAS_OP_T
                                      : CUBLAS_OP_C;
}

cublasLtEpilogue_t epilogue_of(const product& x) noexcept {
  const bool bias = x.has_extra(extra::bias);
  const bool auxiliary = x.has_extra(extra::auxiliary);
  const bool sums = x.has_extra(extra::bias_gradient);
  switch (x.function) {
  case activation::relu:
    return auxiliary ? (bias ? CUBLASLT_EPILOGUE_RELU_AUX_BIAS : CUBLASLT_EPILOGUE_RELU_AUX)
                     : (bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU);
  case activation::gelu:
    return auxiliary ? (bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX)
                     : (bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU);
  case activation::relu_gradient:
    return sums ? CUBLASLT_EPILOGUE_DRELU_BGRAD : CUBLASLT_EPILOGUE_DRELU;
  case activation::gelu_gradient:
    return sums ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU;
  case activation::none:
    break;
  }
  return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

/// The type of c for cuBLASLt, which wants one also where c is not read.
layout c_of(const product& x) noexcept {
  if (x.reads_c)
    return x.c;
  auto result = x.d;
  if (size_of(x.d.type) == 1)
    result.type = dtype::bfloat16;
  return result;
}

} // namespace

caf::error lt_error(const lt_functions& lt, cublasStatus_t code, const char* api) {
  if (code == CUBLAS_STATUS_SUCCESS) [[likely]]
    return {};
  failure why;
  why.code = code == CUBLAS_STATUS_NOT_SUPPORTED  ? errc::not_supported
             : code == CUBLAS_STATUS_ALLOC_FAILED ? errc::out_of_memory
                                                  : errc::cuda_error;
  why.api = api;
  why.native_name = lt.cublasLtGetStatusName(code);
  why.native_code = static_cast<std::int32_t>(code);
  why.detail = "cuBLASLt cannot do this product";
  return make_error(std::move(why));
}

alignments alignments_of(const product& x, const product_memory& memory) noexcept {
  const auto least = [&](std::span<const launch_memory> all) {
    std::uintptr_t bits = largest_alignment;
    for (auto& m : all)
      bits |= reinterpret_cast<std::uintptr_t>(m.address);
    const auto aligned = std::uint32_t{1} << std::countr_zero(bits);
    return x.deterministic ? std::min<std::uint32_t>(aligned, common_alignment) : aligned;
  };
  const auto d = least(memory.d);
  return {least(memory.a), least(memory.b), memory.c.empty() ? d : least(memory.c), d};
}

lt_plan::~lt_plan() {
  for (auto* x : {a_, b_, c_, d_})
    if (x != nullptr)
      static_cast<void>(lt_.cublasLtMatrixLayoutDestroy(x)); // frees memory of the host
  if (what_ != nullptr)
    static_cast<void>(lt_.cublasLtMatmulDescDestroy(what_));
}

std::size_t lt_plan::size_bytes() const noexcept {
  return sizeof *this + sizeof(cublasLtMatmulDescOpaque_t) +
         4 * sizeof(cublasLtMatrixLayoutOpaque_t);
}

caf::expected<std::shared_ptr<lt_plan>> lt_plan::make(const lt_functions& lt,
                                                      cublasLtHandle_t handle, const product& x,
                                                      const alignments& aligned) {
  auto result = std::make_shared<lt_plan>(lt);
  if (auto error = result->describe(x))
    return error;
  const std::pair<cublasLtMatrixLayout_t*, layout> layouts[] = {
      {&result->a_, x.b}, {&result->b_, x.a}, {&result->c_, c_of(x)}, {&result->d_, x.d}};
  for (auto& [to, of] : layouts)
    if (auto error = result->add_layout(*to, of, x))
      return error;
  if (auto error = result->choose(handle, x, aligned))
    return error;
  return result;
}

caf::error lt_plan::describe(const product& x) {
  const auto [sums, factors] = computes_in(x);
  if (auto error = lt_error(lt_, lt_.cublasLtMatmulDescCreate(&what_, sums, factors),
                            "cublasLtMatmulDescCreate"))
    return error;
  if (auto error = set(CUBLASLT_MATMUL_DESC_TRANSA, to_cublas(x.b.op)))
    return error;
  if (auto error = set(CUBLASLT_MATMUL_DESC_TRANSB, to_cublas(x.a.op)))
    return error;
  return describe_function(x);
}

caf::error lt_plan::describe_function(const product& x) {
  const auto which = epilogue_of(x);
  if (which == CUBLASLT_EPILOGUE_DEFAULT)
    return {};
  auto error = set(CUBLASLT_MATMUL_DESC_EPILOGUE, which);
  if (!error && (x.has_extra(extra::bias) || x.has_extra(extra::bias_gradient)))
    error = set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, to_cuda(x.bias_type()));
  if (!error && x.has_extra(extra::auxiliary)) {
    error =
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<std::int64_t>(x.auxiliary_leading));
    if (!error && !x.has_bits())
      error = set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, to_cuda(x.bias_type()));
  }
  return error;
}

caf::error lt_plan::add_layout(cublasLtMatrixLayout_t& to, const layout& of, const product& x) {
  constexpr const char* api = "cublasLtMatrixLayoutSetAttribute";
  if (auto error =
          lt_error(lt_,
                   lt_.cublasLtMatrixLayoutCreate(&to, to_cuda(of.type), of.columns, of.rows,
                                                  static_cast<std::int64_t>(of.leading)),
                   "cublasLtMatrixLayoutCreate"))
    return error;
  if (x.batches == 1)
    return {};
  const auto batches = static_cast<std::int32_t>(x.batches);
  if (auto error = lt_error(lt_,
                            lt_.cublasLtMatrixLayoutSetAttribute(
                                to, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batches, sizeof batches),
                            api))
    return error;
  if (x.by_address) {
    const auto mode = static_cast<std::uint32_t>(CUBLASLT_BATCH_MODE_POINTER_ARRAY);
    return lt_error(lt_,
                    lt_.cublasLtMatrixLayoutSetAttribute(to, CUBLASLT_MATRIX_LAYOUT_BATCH_MODE,
                                                         &mode, sizeof mode),
                    api);
  }
  const auto stride = static_cast<std::int64_t>(of.batch_stride);
  return lt_error(lt_,
                  lt_.cublasLtMatrixLayoutSetAttribute(
                      to, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride),
                  api);
}

caf::error lt_plan::choose(cublasLtHandle_t handle, const product& x, const alignments& aligned) {
  cublasLtMatmulPreference_t preference = nullptr;
  if (auto error = lt_error(lt_, lt_.cublasLtMatmulPreferenceCreate(&preference),
                            "cublasLtMatmulPreferenceCreate"))
    return error;
  auto error = choose_with(handle, preference, x, aligned);
  static_cast<void>(lt_.cublasLtMatmulPreferenceDestroy(preference)); // memory of the host
  return error;
}

caf::error lt_plan::choose_with(cublasLtHandle_t handle, cublasLtMatmulPreference_t preference,
                                const product& x, const alignments& aligned) {
  const auto set_preference = [&](cublasLtMatmulPreferenceAttributes_t which, const auto& value) {
    return lt_error(
        lt_, lt_.cublasLtMatmulPreferenceSetAttribute(preference, which, &value, sizeof value),
        "cublasLtMatmulPreferenceSetAttribute");
  };
  auto error =
      set_preference(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{most_workspace_bytes});
  if (!error && x.deterministic) // sums in place depend on the order in which blocks end
    error = set_preference(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                           static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE |
                                                      CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE));
  const std::pair<cublasLtMatmulPreferenceAttributes_t, std::uint32_t> least[] = {
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned[1]},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned[0]},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned[2]},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned[3]}};
  for (auto& [which, bytes] : least)
    if (!error)
      error = set_preference(which, bytes);
  if (error)
    return error;
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  const auto code = lt_.cublasLtMatmulAlgoGetHeuristic(handle, what_, a_, b_, c_, d_, preference, 1,
                                                       &found, &count);
  if (code == CUBLAS_STATUS_SUCCESS && (count == 0 || found.state != CUBLAS_STATUS_SUCCESS))
    return lt_error(lt_, CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic");
  if (code != CUBLAS_STATUS_SUCCESS)
    return lt_error(lt_, code, "cublasLtMatmulAlgoGetHeuristic");
  algorithm_ = found.algo;
  workspace_bytes_ = found.workspaceSize;
  return {};
}

caf::error lt_plan::set_addresses(const product& x, const product_memory& memory) const {
  const std::pair<extra, cublasLtMatmulDescAttributes_t> all[] = {
      {extra::bias, CUBLASLT_MATMUL_DESC_BIAS_POINTER},
      {extra::auxiliary, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER},
      {extra::bias_gradient, CUBLASLT_MATMUL_DESC_BIAS_POINTER},
      {extra::a_scale, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER},
      {extra::b_scale, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER},
      {extra::d_scale, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER}};
  for (auto& [which, attribute] : all)
    if (x.has_extra(which))
      if (auto error = set(attribute, memory[which]->address))
        return error;
  return {};
}

caf::error lt_plan::enqueue(cublasLtHandle_t handle, const product& x, const void* a, const void* b,
                            const void* c, void* d, void* workspace, cudaStream_t stream) const {
  const auto alpha = factor_of(x, x.alpha);
  const auto beta = factor_of(x, x.beta);
  // A c of another type than d must not be at d's place, also where it is not read.
  const void* const used_c = !x.reads_c && size_of(x.d.type) == 1 ? nullptr : c;
  return lt_error(lt_,
                  lt_.cublasLtMatmul(handle, what_, &alpha, a, a_, b, b_, &beta, used_c, c_, d, d_,
                                     &algorithm_, workspace, workspace_bytes_, stream),
                  "cublasLtMatmul");
}

} // namespace troupe::blas
