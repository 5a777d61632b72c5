#include "interop/lent_memory.hpp"

#include "actors/answer.hpp"
#include "actors/device_access.hpp"
#include "foundation/log.hpp"
#include "operation/admission_lock.hpp"
#include "operation/buffer.hpp"

#include <cstdint>
#include <utility>

namespace troupe::detail {

namespace {

/// `cudaStreamPerThread`
/// @source CUDA runtime API, driver_types.h
constexpr std::uintptr_t per_thread_stream = 2;

/// Python's number for "no order" is no stream.
/// @source Python array API standard, `__dlpack__`
constexpr auto no_stream = static_cast<std::uintptr_t>(-1);

} // namespace

caf::error check_stream(const foreign_stream& stream) {
  const auto number = stream ? reinterpret_cast<std::uintptr_t>(*stream) : 0;
  if (number == no_stream)
    return make_error(errc::invalid_argument, "-1 is not a stream");
  if (number != per_thread_stream)
    return {};
  return make_error(errc::not_supported,
                    "cudaStreamPerThread is another stream on the thread of the device: use a "
                    "stream that the program has created, or the legacy default stream");
}

caf::expected<std::shared_ptr<lent_memory>>
lent_memory::lend(const device& on, const any_gpu_ref& ref, access_mode mode, foreign_stream stream,
                  request_options options) {
  if (auto refused = check_may_block(); refused)
    return refused;
  if (auto error = check_stream(stream); error)
    return error;
  auto& core = device_access::core_of(on);
  auto done =
      answer(stream ? core.acquire(ref, mode, *stream, options) : core.lend(ref, mode, options))
          .wait();
  if (!done)
    return done.error();
  auto result = std::make_shared<lent_memory>(on, ref, mode, stream);
  if (!stream)
    result->note_granted();
  return result;
}

std::shared_ptr<lent_memory> lent_memory::take(const device& on, const any_gpu_ref& ref) {
  auto result = std::make_shared<lent_memory>(on, ref, access_mode::read_write, std::nullopt);
  {
    admission_lock lock;
    ref.memory()->take(lock, access_mode::read_write);
  }
  result->note_granted();
  return result;
}

/// As after `acquire`: `release` can give it back.
void lent_memory::note_granted() const noexcept {
  admission_lock lock;
  auto& memory = *ref_.memory();
  ++memory.granted(lock, mode_);
  if (writes(mode_)) {
    memory.granted_begin = ref_.offset();
    memory.granted_end = ref_.offset() + ref_.size_bytes();
  }
}

std::byte* lent_memory::address() const noexcept {
  return ref_.memory()->address() + ref_.offset();
}

lent_memory::~lent_memory() {
  if (!held_)
    return;
  auto error = give_back(stream_);
  if (error && !ref_.stale())
    log(log_level::warning, "foreign code gave memory of a device back too late", error);
}

caf::error lent_memory::give_back(foreign_stream stream) noexcept {
  if (!std::exchange(held_, false))
    return {};
  auto& core = device_access::core_of(on_);
  if (!stream || !core.runs_cuda()) {
    give_back_now();
    return {};
  }
  auto released = core.release(ref_, mode_, *stream, {});
  // If the request is refused, the memory remains held: work in the stream may still use it.
  return released->completed() ? released->error() : caf::error{};
}

void lent_memory::give_back_now() const noexcept {
  admission_lock lock;
  auto& memory = *ref_.memory();
  auto& granted = memory.granted(lock, mode_);
  if (granted == 0)
    return; // the program has released it itself
  --granted;
  memory.give_back(lock, mode_);
  if (mode_ == access_mode::write) // all of it is valid from now on
    memory.mark_overwritten(ref_.offset(), ref_.offset() + ref_.size_bytes());
}

} // namespace troupe::detail
