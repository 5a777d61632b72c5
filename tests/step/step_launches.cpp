#include "step/step_launches.hpp"

#include "support/expect.hpp"
#include <troupe/launch.hpp>
#include <troupe/typed_launch.hpp>

#ifdef TROUPE_HAS_CUDA
#include "step/step_kernels.hpp"
#include <troupe/cuda_error.hpp>
#endif

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <thread>

namespace troupe::testing {

namespace {

caf::error enqueue_affine(launch_context& context, const affine& f,
                          std::span<const std::uint32_t> from, std::span<std::uint32_t> to) {
#ifdef TROUPE_HAS_CUDA
  if (auto* stream = context.cuda_stream(); stream != nullptr)
    return troupe::error_of(launch_step_affine(to, from, f.factor, f.term, stream));
#endif
  return context.run_on_host([f, from, to] {
    for (std::size_t i = 0; i < to.size(); ++i)
      to[i] = f(from[i]);
  });
}

caf::error enqueue_delay(launch_context& context, const std::uint32_t& most) {
  thread_local std::minstd_rand random{7};
  const std::chrono::microseconds time{random() % (most + 1)};
#ifdef TROUPE_HAS_CUDA
  if (auto* stream = context.cuda_stream(); stream != nullptr)
    return troupe::error_of(launch_step_delay(time, stream));
#endif
  return context.run_on_host([time] { std::this_thread::sleep_for(time); });
}

caf::error enqueue_wait([[maybe_unused]] launch_context& context,
                        [[maybe_unused]] std::span<const std::uint32_t> us) {
#ifdef TROUPE_HAS_CUDA
  if (auto* stream = context.cuda_stream(); stream != nullptr)
    return troupe::error_of(launch_step_wait(us.data(), stream));
#endif
  return make_error(errc::not_supported, "for GPUs");
}

#ifdef TROUPE_HAS_CUDA
/// Loads the kernels before the device is ready, so that no collective waits for that.
caf::expected<std::unique_ptr<library_state>> load_kernels(launch_context& context) {
  if (context.cuda_stream() == nullptr)
    return std::unique_ptr<library_state>{};
  if (auto error = troupe::error_of(load_step_kernels()); error)
    return error;
  return std::make_unique<library_state>();
}
#endif

/// Workers run the same program, so the launches are registered there too.
[[maybe_unused]] const bool registered = [] {
  must(register_launch(affine_launch, typed_launch(enqueue_affine), repetition::replays));
  must(register_launch(delay_launch, typed_launch(enqueue_delay)));
  must(register_launch(wait_launch, typed_launch(enqueue_wait), repetition::replays));
#ifdef TROUPE_HAS_CUDA
  must(register_library("StepLaunches", load_kernels));
#endif
  return true;
}();

} // namespace

} // namespace troupe::testing
