/// Matrix products by cuBLASLt.
#pragma once

#include "compute/blas/arguments.hpp"
#include "compute/blas/lt_functions.hpp"
#include <troupe/launch.hpp>

#include <memory>

namespace troupe::blas {

inline constexpr const char* lt_library_name = "troupe.blas";

/// Makes what the library keeps for a device: its handle and its plans. On CUDA only; null
/// elsewhere. If cuBLASLt cannot be loaded, each product fails with the reason.
caf::expected<std::unique_ptr<library_state>> make_lt_products(launch_context& context);

/// As `replay_kernels`.
void replay_products(bool on) noexcept;

/// Makes the same with functions that are loaded, and a handle, which it destroys.
std::unique_ptr<library_state> lt_products_with(const lt_functions& lt, cublasLtHandle_t handle);

/// Chooses the algorithm for a product, if that was not done yet. If it `only_prepares`, runs it
/// once in the workspace, so that its kernel is loaded.
/// @errors errc::not_supported: there is no algorithm; errc::unavailable: cuBLASLt cannot be
/// loaded,
///         or this library was loaded after the device was opened; errc::out_of_memory, cuda_error
caf::error prepare_by_lt(launch_context& context, const product& x, const product_memory& memory);

/// Enqueues a product.
/// @errors as `prepare_by_lt`
caf::error enqueue_by_lt(launch_context& context, const product& x, const product_memory& memory);

} // namespace troupe::blas
