/// Memory as tensors of other libraries, without their types (troupe/dlpack.hpp).
#pragma once

#include <troupe/device.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

struct CUstream_st;

namespace troupe::detail {

/// The properties of a DLPack tensor. @source DLPack, "C API": `DLTensor`
struct foreign_tensor {
  void* data = nullptr;
  std::int32_t device_type = 0;
  std::int32_t device_id = 0;
  std::int32_t dimensions = 0;
  std::uint8_t type_code = 0;
  std::uint8_t type_bits = 0;
  std::uint16_t type_lanes = 0;
  const std::int64_t* shape = nullptr;
  const std::int64_t* strides = nullptr; ///< @units elements; null: dense, in row-major order
  std::uint64_t byte_offset = 0;
  bool read_only = false;
};

/// Memory of a device that a foreign tensor uses while `hold` exists.
struct lent_tensor {
  std::shared_ptr<void> hold = {};
  void* data = nullptr;
  std::int32_t device_type = 0;
  std::int32_t device_id = 0;
};

/// The fields of a DLPack data type.
struct foreign_type {
  std::uint8_t code = 0;
  std::uint8_t bits = 0;
};
foreign_type foreign_type_of(dtype x) noexcept;
/// Returns the type with one lane; none if there is none of that kind.
std::optional<dtype> from_foreign_type(foreign_type x) noexcept;

/// Returns an error if a tensor of this version cannot be read.
caf::error check_tensor_version(std::uint32_t major, std::uint32_t minor);

/// Returns an error if `shape` does not have as many elements as `ref`, if it is not empty.
caf::error check_tensor_shape(const std::vector<std::int64_t>& shape, const any_gpu_ref& ref);

/// Hands memory over to a foreign tensor. Blocks.
caf::expected<lent_tensor> lend_tensor(const device& from, const any_gpu_ref& ref, access_mode mode,
                                       std::optional<CUstream_st*> stream, request_options options);

/// Takes over the memory of a foreign tensor. `free` is called when nothing uses the memory any
/// more, never on a lane; not called after an error.
caf::expected<any_gpu_ref> adopt_tensor(const device& to, const foreign_tensor& x,
                                        std::optional<CUstream_st*> stream,
                                        std::function<void()> free);

} // namespace troupe::detail
