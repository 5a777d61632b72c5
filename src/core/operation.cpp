#include "core/operation.hpp"

#include "core/timekeeper.hpp"

#include <utility>

namespace troupe::detail {

namespace {
std::atomic<std::uint64_t> last_number{0};
}

operation::operation(const char* verb, std::size_t parts)
    : verb_(verb), number_(last_number.fetch_add(1, std::memory_order_relaxed) + 1), parts_(std::make_unique<part[]>(parts)), part_count_(parts),
      open_(static_cast<std::uint32_t>(parts)) {
  for (std::size_t i = 0; i < parts; ++i) {
    parts_[i].of = this;
    parts_[i].index = i;
  }
}

operation::~operation() = default;

caf::expected<issue_outcome> operation::issue(part&, lane&) {
  return make_error(errc::internal, "this operation has nothing to issue");
}

caf::expected<issue_outcome> operation::proceed(part&, lane&) {
  return make_error(errc::internal, "this operation does not issue in pieces");
}

failure operation::describe(errc code, std::string detail) const {
  failure result;
  result.code = code;
  result.detail = std::move(detail);
  result.verb = verb_;
  result.operation = number_;
  for (auto& p : parts()) {
    switch (p.at.load(std::memory_order_acquire)) {
      case part::state::queued:
      case part::state::issuing:
      case part::state::skipped: result.parts.push_back(part_state::not_issued); break;
      case part::state::issued: result.parts.push_back(part_state::issued); break;
      case part::state::started: result.parts.push_back(part_state::started); break;
      case part::state::done: result.parts.push_back(part_state::done); break;
    }
  }
  return result;
}

void operation::admitted(std::int64_t now) {
  admitted_at = now;
  self_ = std::static_pointer_cast<operation>(shared_from_this());
}

bool operation::precede(const std::shared_ptr<operation>& successor) {
  std::lock_guard lock{guard_};
  if (settled())
    return false;
  successor->open_.fetch_add(1, std::memory_order_relaxed);
  successors_.push_back(successor);
  return true;
}

bool operation::claim_issue() noexcept {
  auto expected = claim::unissued;
  return issue_claim_.compare_exchange_strong(expected, claim::issued) || expected == claim::issued;
}

bool operation::withdraw() noexcept {
  auto expected = claim::unissued;
  return issue_claim_.compare_exchange_strong(expected, claim::withdrawn);
}

void operation::cancel() noexcept {
  if (answered())
    return;
  auto keep = shared_from_this();
  auto why = make_error(describe(errc::cancelled, "taken back by its requester"));
  if (withdraw())
    fail(why);
  else
    answer(std::move(why));
}

void operation::expire() noexcept {
  if (answered())
    return;
  auto why = make_error(describe(errc::deadline_exceeded, "not done before its deadline"));
  if (withdraw())
    fail(why);
  else
    answer(std::move(why));
}

void operation::fail(const caf::error& cause) noexcept {
  // A chain of operations may be long: no recursion.
  std::vector<std::shared_ptr<operation>> open{std::static_pointer_cast<operation>(shared_from_this())};
  while (!open.empty()) {
    auto x = std::move(open.back());
    open.pop_back();
    x->withdraw();
    {
      std::lock_guard lock{x->guard_};
      if (x->failed() || x->settled())
        continue;
      x->cause_ = cause;
      x->failed_.store(true, std::memory_order_release);
      open.insert(open.end(), x->successors_.begin(), x->successors_.end());
    }
    x->answer(cause);
  }
}

void operation::part_lost(part& p, const caf::error& why) noexcept {
  lost_.store(true);
  if (any_issued())
    on_lost_part(p, why);
  if (why)
    fail(why);
}

void operation::part_started(std::int64_t now) noexcept {
  std::int64_t none = 0;
  first_started_at_.compare_exchange_strong(none, now, std::memory_order_acq_rel);
}

void operation::part_over() noexcept {
  if (open_.fetch_sub(1, std::memory_order_acq_rel) != 1)
    return;
  std::vector<std::shared_ptr<operation>> follow_up;
  settle(follow_up);
  while (!follow_up.empty()) {
    auto x = std::move(follow_up.back());
    follow_up.pop_back();
    if (x->open_.fetch_sub(1, std::memory_order_acq_rel) == 1)
      x->settle(follow_up);
  }
}

void operation::settle(std::vector<std::shared_ptr<operation>>& follow_up) noexcept {
  auto keep = std::move(self_);
  if (!failed())
    on_success(); // may fail it
  caf::error cause;
  {
    std::lock_guard lock{guard_};
    cause = cause_;
  }
  for (auto& u : uses_) {
    if (!u.writes)
      continue;
    if (!cause)
      u.memory->mark_written(u.begin, u.end);
    else if (parts_[u.part].at.load(std::memory_order_acquire) == part::state::done)
      u.memory->mark_indeterminate(u.begin, u.end, cause);
  }
  std::vector<std::shared_ptr<operation>> successors;
  {
    std::lock_guard lock{guard_};
    settled_.store(true, std::memory_order_release);
    successors.swap(successors_);
  }
  uses_.clear();
  if (kept_by_ != nullptr)
    kept_by_->remove(*this);
  if (!cause)
    answer({});
  on_settled();
  if (cause)
    for (auto& x : successors)
      x->fail(cause);
  for (auto& x : successors)
    follow_up.push_back(std::move(x));
}

} // namespace troupe::detail
