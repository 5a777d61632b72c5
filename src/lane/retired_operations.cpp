#include "lane/retired_operations.hpp"

#include "operation/operation.hpp"

#include <utility>

namespace troupe::detail {

retired_operations& process_retired = *new retired_operations; // outlives every thread

void retired_operations::add(std::shared_ptr<operation> x) noexcept {
  if (!x || x.use_count() != 1 || count_.load(std::memory_order_relaxed) >= limit)
    return;
  count_.fetch_add(1, std::memory_order_relaxed);
  auto* added = x.get();
  added->self_ = std::move(x);
  added->retired_before_ = newest_.load(std::memory_order_relaxed);
  while (!newest_.compare_exchange_weak(added->retired_before_, added, std::memory_order_release,
                                        std::memory_order_relaxed)) {
  }
}

void retired_operations::free_those_here() noexcept {
  auto* x = newest_.exchange(nullptr, std::memory_order_acquire);
  std::size_t freed = 0;
  for (; x != nullptr; ++freed) {
    const auto gone = std::move(x->self_);
    x = x->retired_before_;
  }
  count_.fetch_sub(freed, std::memory_order_relaxed);
}

} // namespace troupe::detail
