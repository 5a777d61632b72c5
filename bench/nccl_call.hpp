/// Direct calls of NCCL.
#pragma once

#include "cuda_call.hpp"

#include <nccl.h>

#include <string>

namespace bench {

inline void check(ncclResult_t code, const char* call) {
  if (code != ncclSuccess)
    fail(std::string{call} + ": " + ncclGetErrorString(code) + "; " + ncclGetLastError(nullptr));
}

} // namespace bench
