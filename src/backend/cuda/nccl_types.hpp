/// The library's types and operations as NCCL's.
#pragma once

#include <troupe/dtype.hpp>

#include <nccl.h>

namespace troupe::detail {

/// Returns ncclNumTypes, which NCCL refuses, for an unknown type.
ncclDataType_t to_nccl(dtype type) noexcept;
/// Returns ncclNumOps, which NCCL refuses, for an unknown operation, and for reduce_op::premul_sum:
/// that one is created for each call.
ncclRedOp_t to_nccl(reduce_op op) noexcept;

} // namespace troupe::detail
