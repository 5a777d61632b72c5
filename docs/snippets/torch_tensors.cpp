// PyTorch tensors (libtorch) and memory of the library, without a copy: a tensor for each rank is
// summed in place, and memory of the library is computed with as a tensor. On virtual devices the
// tensors are on the CPU.

#include "checks.hpp"
#include <troupe/dlpack.hpp>
#include <troupe/troupe.hpp>

#include <caf/actor_system.hpp>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <iostream>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/DLConvertor.h>
#include <torch/torch.h>

namespace {

// [stream]
/// PyTorch's current stream for a tensor; none on the CPU.
std::optional<CUstream_st*> stream_of(const torch::Tensor& x) {
  if (!x.is_cuda())
    return std::nullopt;
  const auto stream = c10::impl::VirtualGuardImpl{c10::DeviceType::CUDA}.getStream(x.device());
  return static_cast<CUstream_st*>(stream.native_handle());
}
// [stream]

// [handle]
/// The memory of a contiguous tensor as a handle, which keeps the tensor alive. Requests on it wait
/// for what PyTorch has put into its stream so far.
caf::expected<troupe::gpu_ref<float>> handle_of(const troupe::device& where,
                                                const torch::Tensor& x) {
  troupe::dlpack_ptr tensor{at::toDLPackVersioned(x)};
  return troupe::from_dlpack<float>(where, std::move(tensor), {.stream = stream_of(x)});
}
// [handle]

// [tensor]
/// Memory as a tensor, whose last copy gives it back. Until then requests on it are refused.
caf::expected<torch::Tensor> tensor_of(const troupe::device& where,
                                       const troupe::gpu_ref<float>& ref,
                                       std::vector<std::int64_t> shape,
                                       std::optional<CUstream_st*> stream) {
  auto tensor = troupe::to_dlpack(where, ref, {.stream = stream, .shape = std::move(shape)});
  if (!tensor)
    return tensor.error();
  return at::fromDLPackVersioned(tensor->release());
}
// [tensor]

/// Sums a tensor of each rank in place. Returns the number of wrong elements.
caf::expected<std::int64_t> sum_tensors(const troupe::world& world,
                                        const std::vector<torch::Tensor>& tensors) {
  auto want = torch::zeros_like(tensors[0], torch::kCPU); // PyTorch's own sum
  for (auto& x : tensors)
    want += x.cpu();
  // [sum]
  std::vector<troupe::gpu_ref<float>> refs;
  for (std::size_t rank = 0; rank < world.size(); ++rank) {
    auto ref = handle_of(world.device_of(rank), tensors[rank]);
    if (!ref)
      return ref.error();
    refs.push_back(std::move(*ref));
  }
  if (auto done = world.all_reduce(refs).wait(); !done) // then PyTorch may use them in any stream
    return done.error();
  // [sum]
  std::int64_t wrong = 0;
  for (auto& x : tensors)
    wrong += torch::isclose(x.cpu(), want).logical_not().sum().item<std::int64_t>();
  return wrong;
}

/// PyTorch computes 2 x + 1 in the library's memory. Returns the number of wrong elements.
caf::expected<std::int64_t> compute_with_torch(const troupe::device& where,
                                               std::optional<CUstream_st*> stream) {
  auto ref = where.allocate<float>(600);
  if (!ref)
    return ref.error();
  // [compute]
  where.fill(*ref, 3.0f); // no wait: the tensor comes after it
  {
    auto x = tensor_of(where, *ref, {20, 30}, stream);
    if (!x)
      return x.error();
    x->mul_(2).add_(1);
  } // the tensor is gone: the download waits for PyTorch's stream
  auto result = where.download(*ref);
  // [compute]
  if (!result)
    return result.error();
  std::int64_t wrong = 0;
  for (auto x : *result)
    wrong += x != 7.0f;
  return wrong;
}

} // namespace

int main(int argc, char** argv) {
  return snippets::run_with_devices(argc, argv, [](caf::actor_system& sys) {
    using snippets::check, snippets::must;
    const auto list = must(troupe::list_devices(sys));
    const auto world = must(troupe::world::open(sys, {.devices = list.ordinals}));
    torch::manual_seed(1);
    std::vector<torch::Tensor> tensors;
    for (int ordinal : list.ordinals) {
      const auto where = list.backend == "cuda"
                             ? torch::Device{torch::kCUDA, static_cast<c10::DeviceIndex>(ordinal)}
                             : torch::Device{torch::kCPU};
      tensors.push_back(torch::rand({1000, 100}, where));
    }
    const auto wrong = must(sum_tensors(world, tensors));
    const auto others = must(compute_with_torch(world.device_of(0), stream_of(tensors[0])));
    std::cout << "backend " << list.backend << ", " << world.size() << " ranks: " << wrong
              << " wrong elements in the tensors, " << others << " in the library's memory\n";
    check(wrong + others == 0, "elements");
  });
}
