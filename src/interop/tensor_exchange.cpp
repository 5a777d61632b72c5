#include "actors/device_access.hpp"
#include "interop/lent_memory.hpp"
#include <troupe/detail/completion.hpp>
#include <troupe/detail/tensor_exchange.hpp>
#include <troupe/detail/user_call.hpp>
#include <troupe/pending.hpp>

#include <atomic>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace troupe::detail {

namespace {

/// @source DLPack, "C API": `DLDeviceType`, `DLDataTypeCode`
enum device_types : std::int32_t { on_cpu = 1, on_cuda = 2 };
enum type_codes : std::uint8_t {
  code_int = 0,
  code_uint = 1,
  code_float = 2,
  code_bfloat = 4,
  code_complex = 5,
  code_float8_e4m3 = 10, // with finite numbers and NaN only
  code_float8_e5m2 = 12,
};

/// The newest version of DLPack that this file knows.
constexpr std::uint32_t known_major = 1;

caf::error refuse(errc code, const device& where, std::string detail) {
  return make_error({.code = code, .detail = std::move(detail), .device = where.ordinal()});
}

/// Returns an error if the tensor is not in memory of `to`.
caf::error check_place(const device& to, bool runs_cuda, const foreign_tensor& x) {
  const auto number = std::to_string(x.device_type);
  if (!runs_cuda && x.device_type != on_cpu)
    return refuse(errc::invalid_argument, to,
                  "the tensor is on a DLPack device of type " + number +
                      ", but virtual devices use host memory (kDLCPU, 1)");
  if (runs_cuda && x.device_type != on_cuda)
    return refuse(errc::invalid_argument, to,
                  "the tensor is on a DLPack device of type " + number +
                      ", not on a CUDA device (kDLCUDA, 2)");
  if (runs_cuda && x.device_id != to.ordinal())
    return refuse(errc::invalid_argument, to,
                  "the tensor is on CUDA device " + std::to_string(x.device_id) +
                      ", not on device " + std::to_string(to.ordinal()));
  return {};
}

caf::expected<dtype> type_of(const device& to, const foreign_tensor& x) {
  if (x.type_lanes != 1)
    return refuse(errc::not_supported, to,
                  "elements of " + std::to_string(x.type_lanes) + " lanes: only 1 is supported");
  if (auto type = from_foreign_type({x.type_code, x.type_bits}))
    return *type;
  return refuse(errc::not_supported, to,
                "no type for elements of DLPack type code " + std::to_string(x.type_code) +
                    " with " + std::to_string(x.type_bits) + " bits");
}

/// Returns the number of elements, if they are dense and in row-major order.
caf::expected<std::size_t> count_of(const device& to, const foreign_tensor& x) {
  if (x.dimensions < 0 || (x.dimensions > 0 && x.shape == nullptr))
    return refuse(errc::invalid_argument, to, "the tensor has no shape");
  std::size_t count = 1;
  for (auto i = x.dimensions; i-- > 0;) {
    const auto extent = x.shape[i];
    if (extent < 0)
      return refuse(errc::invalid_argument, to,
                    "extent " + std::to_string(i) + " of the tensor is " + std::to_string(extent));
    if (x.strides != nullptr && extent > 1 && count != 0 &&
        x.strides[i] != static_cast<std::int64_t>(count))
      return refuse(errc::not_supported, to,
                    "stride " + std::to_string(i) + " of the tensor is " +
                        std::to_string(x.strides[i]) + ", not " + std::to_string(count) +
                        ": only dense tensors in row-major order are supported");
    if (extent != 0 && count > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max()) /
                                   static_cast<std::size_t>(extent))
      return refuse(errc::invalid_argument, to, "the tensor has too many elements");
    count *= static_cast<std::size_t>(extent);
  }
  return count;
}

} // namespace

foreign_type foreign_type_of(dtype x) noexcept {
  const auto bits = static_cast<std::uint8_t>(8 * size_of(x));
  switch (x) {
  case dtype::int8:
  case dtype::int32:
  case dtype::int64:
    return {code_int, bits};
  case dtype::uint8:
  case dtype::uint32:
  case dtype::uint64:
    return {code_uint, bits};
  case dtype::float16:
  case dtype::float32:
  case dtype::float64:
    return {code_float, bits};
  case dtype::bfloat16:
    return {code_bfloat, bits};
  case dtype::float8_e4m3:
    return {code_float8_e4m3, bits};
  case dtype::float8_e5m2:
    return {code_float8_e5m2, bits};
  case dtype::complex64:
  case dtype::complex128:
    return {code_complex, bits};
  }
  return {};
}

std::optional<dtype> from_foreign_type(foreign_type x) noexcept {
  for (auto type : all_dtypes)
    if (const auto y = foreign_type_of(type); y.code == x.code && y.bits == x.bits)
      return type;
  return std::nullopt;
}

caf::error check_tensor_version(std::uint32_t major, std::uint32_t minor) {
  if (major == known_major)
    return {};
  return make_error(errc::not_supported, "a tensor of DLPack " + std::to_string(major) + '.' +
                                             std::to_string(minor) + ": only " +
                                             std::to_string(known_major) + ".x is supported");
}

caf::error check_tensor_shape(const std::vector<std::int64_t>& shape, const any_gpu_ref& ref) {
  if (shape.empty())
    return {};
  std::uint64_t count = 1;
  std::string text;
  for (auto extent : shape) {
    text += (text.empty() ? "" : " x ") + std::to_string(extent);
    if (extent < 0 || (extent != 0 && count > std::numeric_limits<std::int64_t>::max() /
                                                  static_cast<std::uint64_t>(extent)))
      return make_error(errc::invalid_argument, "no tensor has the shape " + text);
    count *= static_cast<std::uint64_t>(extent);
  }
  if (count == ref.count())
    return {};
  return make_error(errc::shape_mismatch, "a tensor of " + text + " elements for a buffer of " +
                                              std::to_string(ref.count()));
}

caf::expected<lent_tensor> lend_tensor(const device& from, const any_gpu_ref& ref, access_mode mode,
                                       std::optional<CUstream_st*> stream,
                                       request_options options) {
  auto hold = lent_memory::lend(from, ref, mode, stream, options);
  if (!hold)
    return hold.error();
  lent_tensor result;
  result.data = (*hold)->address();
  const bool runs_cuda = device_access::core_of(from).runs_cuda();
  result.device_type = runs_cuda ? on_cuda : on_cpu;
  result.device_id = runs_cuda ? from.ordinal() : 0;
  result.hold = std::move(*hold);
  return result;
}

caf::expected<any_gpu_ref> adopt_tensor(const device& to, const foreign_tensor& x,
                                        std::optional<CUstream_st*> stream,
                                        std::function<void()> free) {
  auto& core = device_access::core_of(to);
  if (auto& why = core.why_none(); why)
    return why;
  if (auto error = check_stream(stream); error)
    return error;
  if (stream && !core.runs_cuda())
    return refuse(errc::not_supported, to, "virtual devices have no streams for users");
  if (auto error = check_place(to, core.runs_cuda(), x); error)
    return error;
  auto type = type_of(to, x);
  if (!type)
    return type.error();
  auto count = count_of(to, x);
  if (!count)
    return count.error();
  if (*count == 0 || x.data == nullptr)
    return refuse(errc::invalid_argument, to, "the tensor has no elements");
  auto* data = static_cast<std::byte*>(x.data) + x.byte_offset;
  if (reinterpret_cast<std::uintptr_t>(data) % size_of(*type) != 0)
    return refuse(errc::not_supported, to,
                  "the tensor's address is not a multiple of the size of its elements, " +
                      std::to_string(size_of(*type)));
  auto taken = std::make_shared<std::atomic<bool>>(false); // after an error, `free` is not called
  // Not on a lane: foreign code may wait for a lock (Python's).
  auto& elsewhere = callback_executor();
  auto deleter = [taken, &elsewhere, free = std::move(free)](void*) {
    if (!taken->load())
      return;
    if (may_block())
      free();
    else
      elsewhere.post([free] { call_user_or_log("the deleter of a tensor", free); });
  };
  auto ref = x.read_only ? core.adopt_read_only(data, *count, *type, std::move(deleter))
                         : core.adopt(data, *count, *type, std::move(deleter));
  if (!ref)
    return ref.error();
  if (stream)
    if (auto error = lent_memory::take(to, *ref)->give_back(stream); error)
      return error;
  taken->store(true);
  return ref;
}

} // namespace troupe::detail
