#include "collective/allocate_all_operation.hpp"

#include "lane/lane.hpp"
#include "operation/buffer.hpp"
#include "operation/device_state.hpp"
#include "operation/symmetric_memory.hpp"
#include <troupe/gpu_ref.hpp>

#include <algorithm>
#include <utility>

namespace troupe::detail {

allocate_all_operation::allocate_all_operation(const std::vector<std::shared_ptr<lane>>& lanes,
                                               rank_set absent, dtype type, std::size_t count,
                                               bool zeroed,
                                               std::shared_ptr<symmetric_memory> symmetric)
    : operation_of("allocate", lanes.size() - absent.size()), type_(type), count_(count),
      zeroed_(zeroed), symmetric_(std::move(symmetric)) {
  value.refs.resize(lanes.size());
  auto next = parts().begin();
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    if (absent.contains(i))
      continue;
    auto& p = *next++;
    p.on = lanes[i].get();
    p.rank = static_cast<int>(i);
    p.stream = stream_kind::memory; // not behind kernels
  }
  of_elements(count, type);
}

caf::expected<std::shared_ptr<buffer>> allocate_all_operation::allocate(const part& p, lane& on,
                                                                        std::size_t bytes) {
  // An empty buffer still has an address of its own.
  auto size = std::max<std::size_t>(bytes, 1);
  auto memory = symmetric_ ? on.device().allocate_symmetric(size)
                           : on.device().allocate(size, on.stream(p.stream));
  if (!memory)
    return memory.error();
  if (symmetric_)
    symmetric_->add(static_cast<std::size_t>(p.rank), on.shared_state(), *memory);
  return on.state().make_buffer(*memory, bytes, {}, symmetric_);
}

caf::expected<issue_outcome> allocate_all_operation::issue(part& p, lane& on) {
  auto bytes = count_ * size_of(type_);
  auto memory = allocate(p, on, bytes);
  if (!memory)
    return memory.error();
  auto* address = (*memory)->address();
  value.refs[static_cast<std::size_t>(p.rank)] = any_gpu_ref{std::move(*memory), type_, 0, count_};
  if (zeroed_ && bytes != 0) {
    std::byte zero{};
    if (auto error = on.device().fill(address, {&zero, 1}, bytes, on.stream(p.stream)); error)
      return error;
  }
  return issue_outcome::enqueued;
}

} // namespace troupe::detail
