// A user's kernel between two all-reduces. The host does not wait in between: the library orders
// the three operations by their memory. On the host backend a function replaces the kernel.

#include <troupe/troupe.hpp>

#if TROUPE_HAS_CUDA
#include "kernel_between.hpp"
#include <troupe/cuda_error.hpp>
#endif

#include <caf/all.hpp>

#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

namespace {

constexpr std::size_t count = 1 << 20;
constexpr float factor = 2;

/// Enqueues the kernel, on the device's lane, which must not block.
caf::error scale(troupe::launch_context& context, const troupe::gpu_ref<float>& data) {
  auto x = data.access();
  if (!x)
    return x.error();
#if TROUPE_HAS_CUDA
  if (context.cuda_stream() != nullptr)
    return troupe::error_of(launch_scale(*x, count, factor, context.cuda_stream()));
#endif
  return context.run_on_host([x = *x] {
    for (std::size_t i = 0; i < count; ++i)
      x[i] = x[i] * factor + static_cast<float>(i % 7);
  });
}

caf::error run(const troupe::world& world) {
  auto data = world.allocate<float>(count);
  if (!data)
    return data.error();
  const auto n = world.size();
  for (std::size_t r = 0; r < n; ++r)
    world.device_of(r).fill((*data)[r], static_cast<float>(r + 1));
  const auto first = world.all_reduce(*data);
  std::vector<troupe::pending<void>> kernels;
  for (std::size_t r = 0; r < n; ++r) {
    auto& ref = (*data)[r];
    kernels.push_back(world.device_of(r).launch(
        [ref](troupe::launch_context& context) { return scale(context, ref); }, {ref}, {ref}));
  }
  const auto second = world.all_reduce(*data);

  // All of it is in flight; now check the results.
  if (auto done = first.wait(); !done)
    return done.error();
  for (auto& kernel : kernels)
    if (auto done = kernel.wait(); !done)
      return done.error();
  if (auto done = second.wait(); !done)
    return done.error();
  const auto sum = static_cast<float>(n * (n + 1)) / 2;
  std::size_t wrong = 0;
  for (std::size_t r = 0; r < n; ++r) {
    auto result = world.device_of(r).download((*data)[r]);
    if (!result)
      return result.error();
    for (std::size_t i = 0; i < count; ++i)
      wrong += (*result)[i] != static_cast<float>(n) * (sum * factor + static_cast<float>(i % 7));
  }
  std::printf("%zu ranks, %zu elements each: %zu wrong\n", n, count, wrong);
  return wrong == 0 ? caf::error{}
                    : troupe::make_error(troupe::errc::internal,
                                         "wrong elements: " + std::to_string(wrong));
}

int report(const caf::error& why) {
  std::fprintf(stderr, "%s\n", troupe::describe(why).c_str());
  return 1;
}

} // namespace

int main(int argc, char** argv) {
  troupe::config cfg;
  if (auto error = cfg.parse(argc, argv))
    return report(error);
  if (cfg.help_printed())
    return 0;
  caf::actor_system sys{cfg};
  auto world = troupe::world::open(sys, {.devices = troupe::all_devices(sys)});
  if (!world)
    return report(world.error());
  if (auto error = run(*world))
    return report(error);
  return 0;
}
