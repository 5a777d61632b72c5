/// The plan of a matrix product for cuBLASLt: its descriptors and its algorithm.
#pragma once

#include "compute/blas/arguments.hpp"
#include "compute/blas/lt_functions.hpp"

#include <array>
#include <cstddef>
#include <memory>
#include <string>

namespace troupe::blas {

/// Returns the error of a function of cuBLASLt; none for success.
caf::error lt_error(const lt_functions& lt, cublasStatus_t code, const char* api);

/// Largest alignment that algorithms make use of. @units bytes
inline constexpr std::size_t largest_alignment = 256;
/// The alignment that deterministic products rely on. @units bytes
inline constexpr std::size_t common_alignment = 16;
/// Algorithms that need more workspace are not chosen.
/// @source cuBLAS 13, "cublasSetWorkspace": 32 MiB for Hopper
inline constexpr std::size_t most_workspace_bytes = std::size_t{32} << 20;

/// The least alignment of the addresses of a, b, c and d.
using alignments = std::array<std::uint32_t, 4>;
alignments alignments_of(const product& x, const product_memory& memory) noexcept;

class lt_plan {
public:
  /// Chooses the algorithm.
  /// @errors errc::not_supported: there is none; errc::cuda_error
  static caf::expected<std::shared_ptr<lt_plan>> make(const lt_functions& lt,
                                                      cublasLtHandle_t handle, const product& x,
                                                      const alignments& aligned);
  explicit lt_plan(const lt_functions& lt) : lt_(lt) {}
  ~lt_plan();
  lt_plan(const lt_plan&) = delete;
  lt_plan& operator=(const lt_plan&) = delete;

  std::size_t workspace_bytes() const noexcept { return workspace_bytes_; }
  /// Returns about how much memory it takes.
  std::size_t size_bytes() const noexcept;

  /// Sets the addresses of what the product needs besides its matrices.
  caf::error set_addresses(const product& x, const product_memory& memory) const;
  /// Enqueues the product with these addresses, in the order of cuBLASLt. In a batch by address,
  /// they are those of arrays of addresses.
  caf::error enqueue(cublasLtHandle_t handle, const product& x, const void* a, const void* b,
                     const void* c, void* d, void* workspace, cudaStream_t stream) const;

private:
  caf::error describe(const product& x);
  caf::error describe_function(const product& x);
  caf::error add_layout(cublasLtMatrixLayout_t& to, const layout& of, const product& x);
  caf::error choose(cublasLtHandle_t handle, const product& x, const alignments& aligned);
  caf::error choose_with(cublasLtHandle_t handle, cublasLtMatmulPreference_t preference,
                         const product& x, const alignments& aligned);
  template <class T> caf::error set(cublasLtMatmulDescAttributes_t what, const T& value) const {
    return lt_error(lt_, lt_.cublasLtMatmulDescSetAttribute(what_, what, &value, sizeof value),
                    "cublasLtMatmulDescSetAttribute");
  }

  const lt_functions& lt_;
  cublasLtMatmulDesc_t what_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr; // in the order of cuBLASLt: of b
  cublasLtMatrixLayout_t b_ = nullptr;
  cublasLtMatrixLayout_t c_ = nullptr;
  cublasLtMatrixLayout_t d_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_{};
  std::size_t workspace_bytes_ = 0;
};

} // namespace troupe::blas
