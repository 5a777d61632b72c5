/// Handles to device memory.
#pragma once

#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace troupe {

namespace detail {
class buffer;
} // namespace detail

/// The serialized form of a handle. It names memory, and is resolved in the process of that memory.
struct gpu_token {
  std::uint64_t node =
      0; ///< identifies the owner of the device: one actor system's devices in one process
  std::int32_t device = -1;
  std::uint64_t buffer = 0;
  std::uint64_t generation = 0;
  dtype type = dtype::uint8;
  std::uint64_t offset = 0; ///< @units bytes from the start of the buffer
  std::uint64_t count = 0;  ///< @units elements

  friend bool operator==(const gpu_token&, const gpu_token&) = default;
};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, gpu_token& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::gpu_token", field("node", x.node), field("device", x.device),
                        field("buffer", x.buffer), field("generation", x.generation),
                        field("type", x.type), field("offset", x.offset), field("count", x.count));
}

/// A copyable handle to `count` elements of device memory, with the element type known at run time:
/// the form in messages. Copies share the memory, which is freed after the last handle is gone and
/// the last operation is over. Handles can be dropped on any thread and outlive the actor system.
/// @thread any; one handle object (not its copies) needs a lock, as a standard library value does
class any_gpu_ref {
public:
  any_gpu_ref() = default;

  /// Internal.
  any_gpu_ref(std::shared_ptr<detail::buffer> memory, dtype type, std::size_t offset,
              std::size_t count)
      : memory_(std::move(memory)), offset_(offset), count_(count), type_(type) {}

  explicit operator bool() const noexcept { return memory_ != nullptr; }

  dtype type() const noexcept { return type_; }
  std::size_t count() const noexcept { return count_; }
  std::size_t size_bytes() const noexcept { return count_ * size_of(type_); }
  /// Returns the ordinal of the device; -1 without memory.
  int device() const noexcept;
  /// Returns the generation of the device to which the memory belongs; 0 without memory.
  std::uint64_t generation() const noexcept;

  /// Returns true without memory, and once the device was reset, shut down or lost.
  bool stale() const noexcept;

  /// Returns the address in device memory, for a kernel that the caller launches in order
  /// (`launch`, `acquire`).
  /// @errors errc::stale_ref, also without memory; errc::skipped: a request that would have written
  ///         the memory did not run; errc::indeterminate: an operation that writes it has failed
  ///         (reported at the latest when that operation is over); errc::invalid_argument: called
  ///         in a launch that has not declared the memory
  caf::expected<void*> access() const;

  /// Returns a part of the memory.
  /// @shape  `count` elements from element `first` on
  /// @errors errc::out_of_range
  caf::expected<any_gpu_ref> slice(std::size_t first, std::size_t count) const;

  /// Returns the same bytes as elements of another type.
  /// @errors errc::shape_mismatch: the size is not a multiple of the element size, or the address
  ///         is not aligned to it; errc::invalid_argument: there is no such type
  caf::expected<any_gpu_ref> reinterpret(dtype type) const;

  gpu_token token() const noexcept;

  /// Returns a handle to the memory that `token` names.
  /// @errors errc::stale_ref: the token is forged or of another process, or its memory is gone
  static caf::expected<any_gpu_ref> resolve(const gpu_token& token);

  /// Internal.
  const std::shared_ptr<detail::buffer>& memory() const noexcept { return memory_; }
  std::size_t offset() const noexcept { return offset_; }

  friend bool operator==(const any_gpu_ref&, const any_gpu_ref&) = default;

private:
  std::shared_ptr<detail::buffer> memory_;
  std::size_t offset_ = 0; // bytes
  std::size_t count_ = 0;
  dtype type_ = dtype::uint8;
};

/// Returns a handle to the memory that `token` names, or a stale handle if it cannot be resolved
/// here. Handles travel as tokens.
any_gpu_ref resolve_or_stale(const gpu_token& token);

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, any_gpu_ref& x) {
  return detail::inspect_as<gpu_token>(
      f, x, [](const any_gpu_ref& ref) { return ref.token(); },
      [](const gpu_token& token) { return resolve_or_stale(token); });
}

/// A handle to elements of type `T`.
template <element T> class gpu_ref {
public:
  gpu_ref() = default;

  /// @errors errc::shape_mismatch: `ref` has another type
  static caf::expected<gpu_ref> from(any_gpu_ref ref) {
    if (ref.type() != dtype_v<T>)
      return make_error(errc::shape_mismatch, "the buffer holds " +
                                                  std::string{to_string(ref.type())} + ", not " +
                                                  std::string{to_string(dtype_v<T>)});
    gpu_ref result;
    result.ref_ = std::move(ref);
    return result;
  }

  explicit operator bool() const noexcept { return static_cast<bool>(ref_); }
  operator const any_gpu_ref&() const noexcept { return ref_; }
  const any_gpu_ref& any() const noexcept { return ref_; }

  std::size_t count() const noexcept { return ref_.count(); }
  std::size_t size_bytes() const noexcept { return ref_.size_bytes(); }
  int device() const noexcept { return ref_.device(); }
  std::uint64_t generation() const noexcept { return ref_.generation(); }
  bool stale() const noexcept { return ref_.stale(); }

  /// Same as `any_gpu_ref::access`.
  caf::expected<T*> access() const {
    auto address = ref_.access();
    if (!address)
      return address.error();
    return static_cast<T*>(*address);
  }

  /// Same as `any_gpu_ref::slice`.
  caf::expected<gpu_ref> slice(std::size_t first, std::size_t count) const {
    auto part = ref_.slice(first, count);
    if (!part)
      return part.error();
    return from(std::move(*part));
  }

  /// Same as `any_gpu_ref::reinterpret`.
  template <element U> caf::expected<gpu_ref<U>> reinterpret() const {
    auto ref = ref_.reinterpret(dtype_v<U>);
    if (!ref)
      return ref.error();
    return gpu_ref<U>::from(std::move(*ref));
  }

  friend bool operator==(const gpu_ref&, const gpu_ref&) = default;

private:
  any_gpu_ref ref_;
};

namespace detail {

template <class T> inline constexpr bool is_ref = false;
template <> inline constexpr bool is_ref<any_gpu_ref> = true;
template <element T> inline constexpr bool is_ref<gpu_ref<T>> = true;

template <class R>
using ref_in = std::remove_cvref_t<decltype(*std::data(std::declval<const R&>()))>;

} // namespace detail

/// Several handles in order: a vector, array or span of `any_gpu_ref`s, or of `gpu_ref`s of one
/// type.
template <class R>
concept ref_range =
    requires(const R& refs) { std::size(refs); } && detail::is_ref<detail::ref_in<R>>;

/// The same, which may be used beside the handles `As`: of the same static type, or without one.
template <class R, class As>
concept ref_range_like = ref_range<R> && (std::is_same_v<detail::ref_in<R>, detail::ref_in<As>> ||
                                          std::is_same_v<detail::ref_in<R>, any_gpu_ref> ||
                                          std::is_same_v<detail::ref_in<As>, any_gpu_ref>);

/// Returns the handles without their static type, for the messages of troupe/collective.hpp and the
/// lists of a launch: `all_reduce{.send = any(grads)}`. A single handle converts implicitly.
template <ref_range R> std::vector<any_gpu_ref> any(const R& refs) {
  return {std::data(refs), std::data(refs) + std::size(refs)};
}

inline const std::vector<any_gpu_ref>& any(const std::vector<any_gpu_ref>& refs) noexcept {
  return refs;
}

} // namespace troupe
