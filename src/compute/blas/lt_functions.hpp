/// The functions of cuBLASLt, loaded at run time, and others that products on a GPU need.
#pragma once

#include "backend/cuda/fill.hpp"
#include "backend/cuda/kernel_replay.hpp"
#include <troupe/error.hpp>

#include <cublasLt.h>

/// Every function of cuBLASLt that is called.
#define TROUPE_LT_FUNCTIONS(X)                                                                     \
  X(cublasLtCreate)                                                                                \
  X(cublasLtDestroy)                                                                               \
  X(cublasLtGetStatusName)                                                                         \
  X(cublasLtMatmul)                                                                                \
  X(cublasLtMatmulAlgoGetHeuristic)                                                                \
  X(cublasLtMatmulDescCreate)                                                                      \
  X(cublasLtMatmulDescDestroy)                                                                     \
  X(cublasLtMatmulDescSetAttribute)                                                                \
  X(cublasLtMatmulPreferenceCreate)                                                                \
  X(cublasLtMatmulPreferenceDestroy)                                                               \
  X(cublasLtMatmulPreferenceSetAttribute)                                                          \
  X(cublasLtMatrixLayoutCreate)                                                                    \
  X(cublasLtMatrixLayoutDestroy)                                                                   \
  X(cublasLtMatrixLayoutSetAttribute)

namespace troupe::blas {

/// The functions by their names, as pointers.
struct lt_functions {
#define TROUPE_LT_MEMBER(name) decltype(&::name) name = nullptr;
  TROUPE_LT_FUNCTIONS(TROUPE_LT_MEMBER)
#undef TROUPE_LT_MEMBER
  // Of this library:
  decltype(&detail::launch_write_words) write_words = nullptr;
  decltype(&detail::capture_kernel) capture = nullptr;
};

/// Returns the functions; loads the library first.
/// @errors errc::unavailable: it cannot be loaded, or lacks a function
caf::expected<const lt_functions*> load_lt();

} // namespace troupe::blas
