/// Memory of a device as a DLPack tensor, and DLPack tensors as memory of a device: without a copy.
/// The program provides dlpack/dlpack.h, of any version from 0.6 on. If PyTorch is in the include
/// path, its ATen/dlpack.h is used, since PyTorch needs its own version. troupe/troupe.hpp does not
/// include this header.
#pragma once

#include <troupe/detail/tensor_exchange.hpp>
#include <troupe/device.hpp>

#ifndef DLPACK_DLPACK_H_ // the program may have included another copy
#if __has_include(<ATen/dlpack.h>) && !defined(TORCH_STABLE_ONLY) && !defined(TORCH_TARGET_VERSION)
#include <ATen/dlpack.h>
#else
#include <dlpack/dlpack.h>
#endif
#endif

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace troupe {

#ifdef DLPACK_MAJOR_VERSION
using dlpack_version = DLPackVersion;
using dlpack_versioned_tensor = DLManagedTensorVersioned;
#else
/// Stands in for `DLPackVersion`, which dlpack.h has from 1.0 on.
struct dlpack_version {
  std::uint32_t major;
  std::uint32_t minor;
};
/// Stands in for `DLManagedTensorVersioned`, which dlpack.h has from 1.0 on, with its layout.
/// @source DLPack, "C API": `DLManagedTensorVersioned`
struct dlpack_versioned_tensor {
  dlpack_version version;
  void* manager_ctx;
  void (*deleter)(dlpack_versioned_tensor* self);
  std::uint64_t flags;
  DLTensor dl_tensor;
};
#endif

/// The flag of a tensor that must not be written (`DLPACK_FLAG_BITMASK_READ_ONLY`).
inline constexpr std::uint64_t dlpack_read_only = 1;

/// Calls the deleter of a tensor.
struct dlpack_deleter {
  template <class Tensor> void operator()(Tensor* x) const {
    if (x->deleter != nullptr)
      x->deleter(x);
  }
};
/// Owns a tensor; `release()` passes it on to its consumer.
using dlpack_ptr = std::unique_ptr<dlpack_versioned_tensor, dlpack_deleter>;
using dlpack_unversioned_ptr = std::unique_ptr<DLManagedTensor, dlpack_deleter>;

/// Returns the type as DLPack describes it.
inline DLDataType to_dlpack(dtype x) noexcept {
  const auto type = detail::foreign_type_of(x);
  return {type.code, type.bits, 1};
}

/// Returns the type that DLPack describes; none if there is none of that kind, as for bool, complex
/// numbers and vectors.
inline std::optional<dtype> from_dlpack(DLDataType x) noexcept {
  return x.lanes == 1 ? detail::from_foreign_type({x.code, x.bits}) : std::nullopt;
}

/// How memory is handed over to the consumer of a tensor.
struct dlpack_export {
  /// The accesses of the consumer. With `read`, requests may read the memory meanwhile, and the
  /// tensor is flagged as read-only; an unversioned tensor cannot say so.
  access_mode mode = access_mode::read_write;
  /// The stream in which the consumer works. When it drops the tensor, later requests wait for the
  /// work that is in this stream then. None: the consumer drops the tensor when its work is over.
  /// The numbers of Python's array API are values of the pointer: 1 is the legacy default stream.
  /// -1 ("no order") is refused. The stream must live as long as the tensor.
  std::optional<CUstream_st*> stream = {};
  std::vector<std::int64_t> shape = {}; ///< as many elements as the handle; empty: one dimension
  request_options options = {};
};

/// How the memory of a tensor is taken over.
struct dlpack_import {
  /// The stream in which the producer works: all requests on the memory wait for what is there now.
  /// None: the tensor is ready.
  std::optional<CUstream_st*> stream = {};
};

namespace detail {

template <class Tensor>
inline constexpr bool is_versioned_tensor = std::is_same_v<Tensor, dlpack_versioned_tensor>;

/// An exported tensor, and what its deleter frees.
template <class Tensor> struct exported_tensor {
  Tensor tensor{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  std::shared_ptr<void> hold;
};

template <class Tensor>
caf::expected<std::unique_ptr<Tensor, dlpack_deleter>>
export_tensor(const device& from, const any_gpu_ref& ref, dlpack_export how) {
  if (auto error = check_tensor_shape(how.shape, ref); error)
    return error;
  auto result = std::make_unique<exported_tensor<Tensor>>();
  auto lent = lend_tensor(from, ref, how.mode, how.stream, how.options);
  if (!lent)
    return lent.error();
  auto& x = *result;
  x.hold = std::move(lent->hold);
  x.shape = std::move(how.shape);
  if (x.shape.empty())
    x.shape.push_back(static_cast<std::int64_t>(ref.count()));
  x.strides.resize(x.shape.size());
  std::int64_t stride = 1;
  for (auto i = x.shape.size(); i-- > 0; stride *= x.shape[i])
    x.strides[i] = stride;
  auto& to = x.tensor.dl_tensor;
  to.data = lent->data;
  to.device = {static_cast<DLDeviceType>(lent->device_type), lent->device_id};
  to.ndim = static_cast<std::int32_t>(x.shape.size());
  to.dtype = to_dlpack(ref.type());
  to.shape = x.shape.data();
  to.strides = x.strides.data();
  to.byte_offset = 0;
  if constexpr (is_versioned_tensor<Tensor>) {
#ifdef DLPACK_MAJOR_VERSION
    x.tensor.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
#else
    x.tensor.version = {1, 0};
#endif
    x.tensor.flags = how.mode == access_mode::read ? dlpack_read_only : 0;
  }
  x.tensor.manager_ctx = result.get();
  x.tensor.deleter = [](Tensor* self) {
    delete static_cast<exported_tensor<Tensor>*>(self->manager_ctx);
  };
  return std::unique_ptr<Tensor, dlpack_deleter>{&result.release()->tensor};
}

template <class Tensor>
caf::expected<any_gpu_ref> import_tensor(const device& to, Tensor* tensor, dlpack_import how) {
  if (tensor == nullptr)
    return make_error(errc::invalid_argument, "there is no tensor");
  foreign_tensor x;
  if constexpr (is_versioned_tensor<Tensor>) {
    // The fields behind the deleter are where they are only in a version that is known.
    if (auto error = check_tensor_version(tensor->version.major, tensor->version.minor); error)
      return error;
    x.read_only = (tensor->flags & dlpack_read_only) != 0;
  }
  const auto& from = tensor->dl_tensor;
  x.data = from.data;
  x.device_type = static_cast<std::int32_t>(from.device.device_type);
  x.device_id = from.device.device_id;
  x.dimensions = from.ndim;
  x.type_code = from.dtype.code;
  x.type_bits = from.dtype.bits;
  x.type_lanes = from.dtype.lanes;
  x.shape = from.shape;
  x.strides = from.strides;
  x.byte_offset = from.byte_offset;
  return adopt_tensor(to, x, how.stream, [tensor] { dlpack_deleter{}(tensor); });
}

/// Returns whether the fields behind the version are where they are expected.
template <class Tensor> bool has_known_version(const Tensor& x) {
  if constexpr (is_versioned_tensor<Tensor>)
    return !check_tensor_version(x.version.major, x.version.minor);
  else
    return true;
}

} // namespace detail

/// Hands the memory of `ref`, on device `from`, over to the consumer of the tensor. Blocks until
/// all earlier requests on it are over; what any stream does with it from then on comes after them.
/// Until the consumer calls the tensor's deleter, which it may do on any thread:
/// - the memory, the device and the actor system are kept alive; `~actor_system` waits;
/// - requests that conflict with `dlpack_export::mode` get errc::buffer_acquired, on any part of
///   the buffer of which `ref` may be a slice, as do resets of the device.
/// Without `dlpack_export::stream`, the consumer calls the deleter when its work is over: nothing
/// waits for its streams then.
/// A tensor of a virtual device is in host memory (kDLCPU).
/// @errors those of `device::acquire`, such as errc::indeterminate: an earlier request that writes
///         the memory has failed; errc::shape_mismatch; errc::not_supported: the device is in
///         another process, a stream for a virtual device, or `cudaStreamPerThread`;
///         errc::would_block
inline caf::expected<dlpack_ptr> to_dlpack(const device& from, const any_gpu_ref& ref,
                                           dlpack_export how = {}) {
  return detail::export_tensor<dlpack_versioned_tensor>(from, ref, std::move(how));
}

/// The same as a tensor without a version, for consumers from before DLPack 1.0.
inline caf::expected<dlpack_unversioned_ptr>
to_dlpack_unversioned(const device& from, const any_gpu_ref& ref, dlpack_export how = {}) {
  return detail::export_tensor<DLManagedTensor>(from, ref, std::move(how));
}

/// Takes the memory of a tensor over, as `device::adopt` does: the handle refers to the tensor's
/// own memory, in one dimension. The tensor's deleter is called once, when nothing uses the memory
/// any more: on the thread that drops the last handle, or, as that is mostly a lane, on the
/// callback thread, perhaps after the end of the actor system. When not at all, `device::adopt`
/// says. After an error the tensor is still the caller's. Writing requests on a read-only tensor
/// get errc::buffer_acquired. For work that the producer puts into its stream later on, use
/// `device::acquire` and `device::release`.
/// @errors errc::invalid_argument: no elements, or they do not lie on this device;
///         errc::not_supported: another type of elements, not dense in row-major order, or an
///         unknown version; errc::unavailable: the device is not ready
inline caf::expected<any_gpu_ref> from_dlpack(const device& to, dlpack_versioned_tensor* tensor,
                                              dlpack_import how = {}) {
  return detail::import_tensor(to, tensor, how);
}

/// The same for a tensor without a version.
inline caf::expected<any_gpu_ref> from_dlpack(const device& to, DLManagedTensor* tensor,
                                              dlpack_import how = {}) {
  return detail::import_tensor(to, tensor, how);
}

/// The same for a tensor that its pointer owns; after an error it still does.
template <class Tensor>
caf::expected<any_gpu_ref> from_dlpack(const device& to,
                                       std::unique_ptr<Tensor, dlpack_deleter>&& tensor,
                                       dlpack_import how = {}) {
  auto ref = detail::import_tensor(to, tensor.get(), how);
  if (ref)
    static_cast<void>(tensor.release());
  return ref;
}

/// The same for elements of type `T`.
/// @errors errc::shape_mismatch: other elements; the deleter is not called
template <element T, class Tensor>
caf::expected<gpu_ref<T>> from_dlpack(const device& to, Tensor&& tensor, dlpack_import how = {}) {
  if (tensor && detail::has_known_version(*tensor)) // else the import says so
    if (const auto type = from_dlpack(tensor->dl_tensor.dtype); type && *type != dtype_v<T>)
      return make_error(errc::shape_mismatch, "the tensor holds " + std::string{to_string(*type)} +
                                                  ", not " + std::string{to_string(dtype_v<T>)});
  auto ref = from_dlpack(to, std::forward<Tensor>(tensor), how);
  if (!ref)
    return ref.error();
  return gpu_ref<T>::from(std::move(*ref));
}

} // namespace troupe
