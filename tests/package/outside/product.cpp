// A matrix product on virtual devices.
#include <troupe/blas.hpp>
#include <troupe/troupe.hpp>

#include <caf/actor_system.hpp>

#include <cstdio>
#include <vector>

int fail(const caf::error& why) {
  std::fprintf(stderr, "%s\n", troupe::describe(why).c_str());
  return 1;
}

int main() {
  troupe::config cfg;
  cfg.set("troupe.backend", "host");
  caf::actor_system sys{cfg};
  auto gpu = troupe::device::open(sys, 0);
  if (!gpu)
    return fail(gpu.error());
  auto a = gpu->allocate<float>(6);
  auto b = gpu->allocate<float>(6);
  auto d = gpu->allocate<float>(4);
  if (!a || !b || !d)
    return fail(!a ? a.error() : !b ? b.error() : d.error());
  gpu->upload(*a, std::vector<float>{1, 2, 3, 4, 5, 6});
  gpu->upload(*b, std::vector<float>{1, 0, 0, 1, 1, 1});
  troupe::blas::matmul(*gpu, {*a, 2, 3}, {*b, 3, 2}, {*d, 2, 2});
  const auto got = gpu->download(*d);
  if (!got)
    return fail(got.error());
  return *got == std::vector<float>{4, 5, 10, 11} ? 0 : 2;
}
