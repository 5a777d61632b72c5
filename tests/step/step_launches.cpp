#include "step/step_launches.hpp"

#include "support/expect.hpp"
#include <troupe/launch.hpp>
#include <troupe/typed_launch.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <thread>

namespace troupe::testing {

namespace {

caf::error enqueue_affine(launch_context& context, const affine& f,
                          std::span<const std::uint32_t> from, std::span<std::uint32_t> to) {
  return context.run_on_host([f, from, to] {
    for (std::size_t i = 0; i < to.size(); ++i)
      to[i] = f(from[i]);
  });
}

caf::error enqueue_delay(launch_context& context, const std::uint32_t& most) {
  return context.run_on_host([most = most] {
    thread_local std::minstd_rand random{7};
    std::this_thread::sleep_for(std::chrono::microseconds{random() % (most + 1)});
  });
}

/// Workers run the same program, so the launches are registered there too.
[[maybe_unused]] const bool registered = [] {
  must(register_launch(affine_launch, typed_launch(enqueue_affine)));
  must(register_launch(delay_launch, typed_launch(enqueue_delay)));
  return true;
}();

} // namespace

} // namespace troupe::testing
