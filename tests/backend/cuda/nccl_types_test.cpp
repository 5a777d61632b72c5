#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/nccl_types.hpp"
#include <troupe/dtype.hpp>

#include <nccl.h>

#include <gtest/gtest.h>

#include <iterator>
#include <map>

namespace troupe::testing {

TEST(NcclTypes, MapEveryDtype) {
  const std::map<dtype, ncclDataType_t> want = {
      {dtype::int8, ncclInt8},
      {dtype::uint8, ncclUint8},
      {dtype::int32, ncclInt32},
      {dtype::uint32, ncclUint32},
      {dtype::int64, ncclInt64},
      {dtype::uint64, ncclUint64},
      {dtype::float16, ncclFloat16},
      {dtype::bfloat16, ncclBfloat16},
      {dtype::float32, ncclFloat32},
      {dtype::float64, ncclFloat64},
      {dtype::float8_e4m3, ncclFloat8e4m3},
      {dtype::float8_e5m2, ncclFloat8e5m2},
  };
  ASSERT_EQ(want.size(), std::size(real_dtypes));
  ASSERT_EQ(want.size(), static_cast<std::size_t>(ncclNumTypes));
  for (const auto& [type, native] : want)
    EXPECT_EQ(detail::to_nccl(type), native) << to_string(type);
}

TEST(NcclTypes, MapEveryOperation) {
  const std::map<reduce_op, ncclRedOp_t> want = {{reduce_op::sum, ncclSum},
                                                 {reduce_op::prod, ncclProd},
                                                 {reduce_op::min, ncclMin},
                                                 {reduce_op::max, ncclMax},
                                                 {reduce_op::avg, ncclAvg}};
  ASSERT_EQ(want.size(), std::size(all_reduce_ops));
  ASSERT_EQ(want.size(), static_cast<std::size_t>(ncclNumOps));
  for (const auto& [op, native] : want)
    EXPECT_EQ(detail::to_nccl(op), native) << to_string(op);
}

TEST(NcclVersion, ReadsAsPeopleWriteIt) {
  EXPECT_EQ(detail::nccl_version_text(22809), "2.28.9");
  EXPECT_EQ(detail::nccl_version_text(21805), "2.18.5");
  EXPECT_EQ(detail::nccl_version_text(2708), "2.7.8");
}

} // namespace troupe::testing
