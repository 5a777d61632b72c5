#include "foundation/error_text.hpp"
#include "operation/admission_lock.hpp"
#include "operation/buffer.hpp"
#include "operation/device_state.hpp"
#include "operation/launch_call.hpp"
#include <troupe/gpu_ref.hpp>

#include <cstdint>
#include <string>

namespace troupe {

namespace {

caf::error stale_error(int device, std::uint64_t generation, const char* why) {
  return make_error(
      {.code = errc::stale_ref, .detail = why, .device = device, .generation = generation});
}

caf::error stale_error(const any_gpu_ref& ref) {
  return stale_error(ref.device(), ref.generation(),
                     ref ? "the device was reset or lost after the allocation"
                         : "the handle has no memory");
}

/// Checks whether a range may be read. In a launch, the failure of a later writer has no effect;
/// that of an earlier one fails the launch itself. Memory that the launch has not declared is not
/// in order with it.
caf::error check_content(const detail::buffer& memory, std::size_t begin, std::size_t end) {
  if (detail::callable_scope::covers(memory, begin, end))
    return memory.check_determinate(begin, end);
  if (detail::callable_scope::refuses(memory) || detail::host_function_scope::refuses(memory))
    return make_error({.code = errc::invalid_argument,
                       .detail = "the launch reads or writes a buffer that is in none of its lists",
                       .device = memory.home().ordinal(),
                       .generation = memory.generation()});
  detail::admission_lock lock;
  return memory.check_readable(lock, begin, end);
}

} // namespace

int any_gpu_ref::device() const noexcept { return memory_ ? memory_->home().ordinal() : -1; }

std::uint64_t any_gpu_ref::generation() const noexcept {
  return memory_ ? memory_->generation() : 0;
}

bool any_gpu_ref::stale() const noexcept { return !memory_ || memory_->stale(); }

caf::expected<void*> any_gpu_ref::access() const {
  if (stale())
    return stale_error(*this);
  if (auto error = check_content(*memory_, offset_, offset_ + size_bytes()); error)
    return error;
  return static_cast<void*>(memory_->address() + offset_);
}

caf::expected<any_gpu_ref> any_gpu_ref::slice(std::size_t first, std::size_t count) const {
  if (first > count_ || count > count_ - first)
    return make_error(errc::out_of_range, std::to_string(count) + " elements from element " +
                                              std::to_string(first) + " on; there are " +
                                              std::to_string(count_));
  return any_gpu_ref{memory_, type_, offset_ + first * size_of(type_), count};
}

caf::expected<any_gpu_ref> any_gpu_ref::reinterpret(dtype type) const {
  if (!is_dtype(type))
    return make_error(errc::invalid_argument, detail::unknown_dtype(type));
  auto size = size_of(type);
  auto address = memory_ ? reinterpret_cast<std::uintptr_t>(memory_->address()) + offset_ : 0;
  if (size_bytes() % size != 0 || address % size != 0)
    return make_error(errc::shape_mismatch,
                      std::to_string(size_bytes()) + " bytes at offset " + std::to_string(offset_) +
                          " are not whole elements of " + std::string{to_string(type)});
  return any_gpu_ref{memory_, type, offset_, size_bytes() / size};
}

gpu_token any_gpu_ref::token() const noexcept {
  if (!memory_)
    return {};
  return {memory_->home().node(),
          memory_->home().ordinal(),
          memory_->id(),
          memory_->generation(),
          type_,
          offset_,
          count_};
}

caf::expected<any_gpu_ref> any_gpu_ref::resolve(const gpu_token& token) {
  auto refuse = [&](const char* reason) {
    return stale_error(token.device, token.generation, reason);
  };
  auto device = detail::find_device(token.node, token.device);
  if (!device)
    return refuse("the token names a device that does not exist here");
  auto memory = device->find_buffer(token.buffer);
  if (!memory)
    return refuse("the token names memory that was freed");
  if (memory->generation() != token.generation || memory->stale())
    return refuse("the token names memory from before a reset of the device");
  // Check every field of the token: the sender may have written anything.
  auto size = size_of(token.type);
  if (!is_dtype(token.type) || token.offset % size != 0 || token.offset > memory->size_bytes() ||
      token.count > (memory->size_bytes() - token.offset) / size)
    return refuse("the token reaches outside the memory that it names");
  return any_gpu_ref{std::move(memory), token.type, token.offset, token.count};
}

any_gpu_ref resolve_or_stale(const gpu_token& token) {
  auto ref = any_gpu_ref::resolve(token);
  return ref ? std::move(*ref) : any_gpu_ref{};
}

} // namespace troupe
