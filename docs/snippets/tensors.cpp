// Memory as DLPack tensors, and tensors as memory, with a library that this program only plays.

#include "checks.hpp"
#include <troupe/dlpack.hpp>
#include <troupe/troupe.hpp>

#include <caf/actor_system.hpp>

#include <cstddef>
#include <cstdint>
#include <iostream>
#include <memory>
#include <utility>
#include <vector>

namespace {

/// The other library has an array on the CPU, and gives it away as a tensor.
class array_of_other {
public:
  explicit array_of_other(std::vector<float> x) : data_(std::move(x)) {}

  static DLManagedTensor* give(std::unique_ptr<array_of_other> x) {
    x->shape_ = static_cast<std::int64_t>(x->data_.size());
    auto& tensor = x->tensor_;
    tensor.dl_tensor.data = x->data_.data();
    tensor.dl_tensor.device = {kDLCPU, 0};
    tensor.dl_tensor.ndim = 1;
    tensor.dl_tensor.dtype = {kDLFloat, 32, 1};
    tensor.dl_tensor.shape = &x->shape_;
    tensor.manager_ctx = x.get();
    tensor.deleter = [](DLManagedTensor* self) {
      delete static_cast<array_of_other*>(self->manager_ctx);
    };
    return &x.release()->tensor_;
  }

private:
  std::vector<float> data_;
  std::int64_t shape_ = 0;
  DLManagedTensor tensor_{};
};

/// The other library's function that computes with a tensor, and then drops it.
void doubles(troupe::dlpack_ptr tensor) {
  auto* data = static_cast<float*>(tensor->dl_tensor.data);
  for (std::int64_t i = 0; i < tensor->dl_tensor.shape[0]; ++i)
    data[i] *= 2;
}

caf::expected<std::size_t> exchange(const troupe::device& device) {
  DLManagedTensor* theirs =
      array_of_other::give(std::make_unique<array_of_other>(std::vector<float>(1000, 3)));
  // [import]
  auto ref = troupe::from_dlpack<float>(device, theirs); // the tensor's own memory
  if (!ref)
    return ref.error();
  // [import]
  // [export]
  auto tensor = troupe::to_dlpack(device, *ref); // waits for what was requested before
  if (!tensor)
    return tensor.error();
  doubles(std::move(*tensor)); // when it drops the tensor, requests go on
  // [export]
  auto result = device.download(*ref);
  if (!result)
    return result.error();
  std::size_t wrong = 0;
  for (auto x : *result)
    wrong += x != 6.0f;
  return wrong;
}

} // namespace

int main(int argc, char** argv) {
  return snippets::run_with_devices(argc, argv, [](caf::actor_system& sys) {
    using snippets::check, snippets::must;
    const auto device = must(troupe::device::open(sys, 0));
    const auto wrong = must(exchange(device));
    std::cout << wrong << " wrong elements\n";
    check(wrong == 0, "elements");
  });
}
