#include "collective/allocate_all_operation.hpp"

#include "lane/lane.hpp"
#include "operation/buffer.hpp"
#include "operation/device_state.hpp"
#include <troupe/gpu_ref.hpp>

#include <algorithm>

namespace troupe::detail {

allocate_all_operation::allocate_all_operation(const std::vector<std::shared_ptr<lane>>& lanes,
                                               rank_set absent, dtype type, std::size_t count,
                                               bool zeroed)
    : operation_of("allocate", lanes.size() - absent.size()), type_(type), count_(count),
      zeroed_(zeroed) {
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

caf::expected<issue_outcome> allocate_all_operation::issue(part& p, lane& on) {
  auto bytes = count_ * size_of(type_);
  // An empty buffer still has an address of its own.
  auto memory = on.device().allocate(std::max<std::size_t>(bytes, 1), on.stream(p));
  if (!memory)
    return memory.error();
  value.refs[static_cast<std::size_t>(p.rank)] =
      any_gpu_ref{on.state().make_buffer(*memory, bytes), type_, 0, count_};
  if (zeroed_ && bytes != 0) {
    std::byte zero{};
    if (auto error = on.device().fill(*memory, {&zero, 1}, bytes, on.stream(p)); error)
      return error;
  }
  return issue_outcome::enqueued;
}

} // namespace troupe::detail
