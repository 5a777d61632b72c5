/// Results of CUDA's functions as errors. For programs that are compiled with CUDA's headers;
/// `troupe/troupe.hpp` does not include it.
#pragma once

#include <troupe/error.hpp>

#include <cuda_runtime_api.h>

namespace troupe {

/// Returns none for `cudaSuccess`, otherwise an error with CUDA's name and text. For launches:
/// `return troupe::error_of(launch_my_kernel(..., context.cuda_stream()));`
/// @errors errc::launch_failed
inline caf::error error_of(cudaError_t code) {
  if (code == cudaSuccess)
    return {};
  failure why;
  why.code = errc::launch_failed;
  why.native_name = cudaGetErrorName(code);
  why.detail = cudaGetErrorString(code) + (" (" + why.native_name + ")");
  why.native_code = static_cast<std::int32_t>(code);
  return make_error(std::move(why));
}

} // namespace troupe
