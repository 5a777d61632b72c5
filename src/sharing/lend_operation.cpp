#include "sharing/lend_operation.hpp"

#include "foundation/spin.hpp"
#include "lane/lane.hpp"
#include "operation/admission_lock.hpp"
#include "operation/buffer.hpp"
#include "operation/use_of.hpp"

namespace troupe::detail {

memory_lease::~memory_lease() { memory_->give_back(admission_lock{}, mode_); }

lend_operation::lend_operation(const char* verb, any_gpu_ref ref, access_mode mode)
    : operation_of(verb, 1), ref_(std::move(ref)), mode_(mode) {
  parts()[0].stream = stream_kind::lend; // it may wait for a long time
  add_use(use_of(ref_, reads(mode), writes(mode)));
}

caf::error lend_operation::on_admit(locked lock, queue_bound) {
  ref_.memory()->take(lock, mode_);
  return {};
}

/// The stream waits for earlier work. Without any, the claim finishes now, and waits for no other.
caf::expected<issue_outcome> lend_operation::issue(part& p, lane&) {
  return lane::nothing_before(p) ? issue_outcome::finished : issue_outcome::enqueued;
}

void lend_operation::on_leave(locked lock) noexcept { ref_.memory()->give_back(lock, mode_); }

/// It counts as a write, which clears the indeterminate or skipped ranges that were there before.
/// But lending writes nothing, so they are marked again.
void lend_operation::on_success() noexcept {
  unreadable_ = unreadable_before(*ref_.memory());
  for (auto& x : unreadable_)
    ref_.memory()->mark(x);
}

void lend_operation::on_settled() noexcept {
  if (is_removed()) // `on_leave` has given it back
    return;
  while (!completed()) // another thread is about to answer
    pause();
  if (!error())
    return;
  ref_.memory()->give_back(admission_lock{}, mode_);
}

} // namespace troupe::detail
