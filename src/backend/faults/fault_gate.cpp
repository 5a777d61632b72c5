#include "backend/faults/fault_gate.hpp"

#include "foundation/log.hpp"

#include <new>

namespace troupe::detail {

gate_words::~gate_words() {
  for (auto* page : pages_)
    if (auto err = of_.deallocate_pinned(page))
      log(log_level::warning, "cannot free the host memory of a fault plan", err);
}

caf::expected<gate_words::place> gate_words::take() noexcept {
  std::lock_guard lock{mutex_};
  if (free_.empty()) {
    auto page = of_.allocate_pinned(page_words * sizeof(std::uint64_t));
    if (!page)
      return page.error();
    pages_.push_back(*page);
    auto* first = static_cast<std::atomic<std::uint64_t>*>(*page);
    for (std::size_t i = 0; i < page_words; ++i)
      free_.push_back(new (first + i) std::atomic<std::uint64_t>{0});
  }
  auto* word = free_.back();
  free_.pop_back();
  return place{word, word->load(std::memory_order_relaxed) + 1};
}

void gate_words::give_back(const place& x) noexcept {
  x.word->store(x.value, std::memory_order_release);
  std::lock_guard lock{mutex_};
  free_.push_back(x.word);
}

} // namespace troupe::detail
