#include "backend/cuda/nccl_types.hpp"

#include <cstddef>
#include <iterator>

namespace troupe::detail {

namespace {

/// In the order of `dtype`.
constexpr ncclDataType_t types[] = {ncclInt8,    ncclUint8,   ncclInt32,      ncclUint32,
                                    ncclInt64,   ncclUint64,  ncclFloat16,    ncclBfloat16,
                                    ncclFloat32, ncclFloat64, ncclFloat8e4m3, ncclFloat8e5m2};
static_assert(std::size(types) == std::size(real_dtypes));

/// In the order of `reduce_op`.
constexpr ncclRedOp_t operations[] = {ncclSum, ncclProd, ncclMin, ncclMax, ncclAvg};
static_assert(std::size(operations) == std::size(all_reduce_ops));

} // namespace

ncclDataType_t to_nccl(dtype type) noexcept {
  const auto i = static_cast<std::size_t>(type);
  return i < std::size(types) ? types[i] : ncclNumTypes;
}

ncclRedOp_t to_nccl(reduce_op op) noexcept {
  const auto i = static_cast<std::size_t>(op);
  return i < std::size(operations) ? operations[i] : ncclNumOps;
}

} // namespace troupe::detail
