/// A memory resource for RMM (https://github.com/rapidsai/rmm) over the memory of a device. The
/// program provides RMM and the headers that it needs; troupe/troupe.hpp does not include this
/// header.
#pragma once

// First: RMM may bring its own libcu++.
#include <rmm/error.hpp>
#if __has_include(<rmm/mr/device_memory_resource.hpp>)
#include <rmm/mr/device_memory_resource.hpp>
#define TROUPE_RMM_HAS_BASE 1
#elif __has_include(<rmm/mr/device/device_memory_resource.hpp>)
#include <rmm/mr/device/device_memory_resource.hpp>
#define TROUPE_RMM_HAS_BASE 1
#endif

#include <troupe/detail/device_resource.hpp>

#include <cstddef>
#include <utility>

namespace troupe {

namespace detail {

struct rmm_failure {
  /// @errors throws rmm::out_of_memory, or rmm::bad_alloc for all that is not a lack of memory,
  ///         with the text of the error
  [[noreturn]] static void raise(const caf::error& why) {
    if (code_of(why) == errc::out_of_memory)
      throw rmm::out_of_memory{describe(why)};
    throw rmm::bad_alloc{describe(why)};
  }
};

} // namespace detail

/// The same as `cuda_resource` (troupe/cuda_resource.hpp), with the errors of RMM. It is passed by
/// reference wherever RMM takes a `device_async_resource_ref`. For versions of RMM that have a base
/// class of resources, `rmm::mr::device_memory_resource`, it is one.
/// @thread any, several at once; allocations only where blocking is allowed
/// @errors throws rmm::out_of_memory, rmm::bad_alloc
#ifndef TROUPE_RMM_HAS_BASE
class rmm_resource : public detail::device_resource<detail::rmm_failure> {
public:
  using device_resource::device_resource;
};
#else
class rmm_resource final : public rmm::mr::device_memory_resource {
public:
  explicit rmm_resource(device on) : resource_(std::move(on)) {}

  const device& where() const noexcept { return resource_.where(); }

private:
  void* do_allocate(std::size_t size_bytes, rmm::cuda_stream_view) override {
    return resource_.allocate_sync(size_bytes);
  }
  void do_deallocate(void* memory, std::size_t size_bytes,
                     rmm::cuda_stream_view stream) noexcept override {
    resource_.deallocate(cuda::stream_ref{stream.value()}, memory, size_bytes);
  }
  bool do_is_equal(const device_memory_resource& x) const noexcept override {
    const auto* other = dynamic_cast<const rmm_resource*>(&x);
    return other != nullptr && other->resource_ == resource_;
  }

  detail::device_resource<detail::rmm_failure> resource_;
};
#endif

} // namespace troupe
