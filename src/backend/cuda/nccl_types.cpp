#include "backend/cuda/nccl_types.hpp"

#include <troupe/dtype.hpp>

#include <nccl.h>

namespace troupe::detail {

ncclDataType_t to_nccl(dtype type) noexcept {
  switch (type) {
  case dtype::int8:
    return ncclInt8;
  case dtype::uint8:
    return ncclUint8;
  case dtype::int32:
    return ncclInt32;
  case dtype::uint32:
    return ncclUint32;
  case dtype::int64:
    return ncclInt64;
  case dtype::uint64:
    return ncclUint64;
  case dtype::float16:
    return ncclFloat16;
  case dtype::bfloat16:
    return ncclBfloat16;
  case dtype::float32:
    return ncclFloat32;
  case dtype::float64:
    return ncclFloat64;
  case dtype::float8_e4m3:
    return ncclFloat8e4m3;
  case dtype::float8_e5m2:
    return ncclFloat8e5m2;
  }
  return ncclNumTypes; // NCCL refuses it
}

ncclRedOp_t to_nccl(reduce_op op) noexcept {
  switch (op) {
  case reduce_op::sum:
    return ncclSum;
  case reduce_op::prod:
    return ncclProd;
  case reduce_op::min:
    return ncclMin;
  case reduce_op::max:
    return ncclMax;
  case reduce_op::avg:
    return ncclAvg;
  case reduce_op::premul_sum:
    break; // created for each call
  }
  return ncclNumOps; // NCCL refuses it
}

} // namespace troupe::detail
