#include "step/step_run.hpp"

#include <ranges>
#include <utility>

namespace troupe::detail {

void step_run::begin(step_operations x) {
  operations_ = std::move(x);
  open_.store(operations_.all.size());
  if (operations_.all.empty()) {
    answer({});
    return;
  }
  const auto self = std::static_pointer_cast<step_run>(shared_from_this());
  for (auto& op : operations_.all)
    op->on_answer([self] { self->note_answer(); });
}

void step_run::end_early(early_end how) noexcept {
  const auto keep = shared_from_this(); // its last owner may end with an operation
  for (auto& op : operations_.all | std::views::reverse)
    if (how == early_end::cancelled)
      op->cancel();
    else
      op->expire();
}

void step_run::note_answer() noexcept {
  if (open_.fetch_sub(1) == 1)
    answer(first_error());
}

caf::error step_run::first_error() const {
  for (std::size_t i = 0; i < operations_.all.size(); ++i)
    if (auto& why = operations_.all[i]->error(); why)
      return operations_.in_step(i, why);
  return {};
}

} // namespace troupe::detail
