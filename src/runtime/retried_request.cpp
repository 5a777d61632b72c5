#include "runtime/retried_request.hpp"

#include "foundation/error_text.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

/// Returns `why` with `text` behind its own.
caf::error with_text(const caf::error& why, const std::string& text) {
  auto x = failure_of(why);
  if (!x)
    return why;
  x->detail += x->detail.empty() ? text : "; " + text;
  return make_error(std::move(*x));
}

/// Returns whether the call that issues some part has begun. It may have ended the process.
bool was_issued(const operation& x) noexcept {
  return std::ranges::any_of(x.parts(), [](const part& p) {
    switch (p.at.load(std::memory_order_acquire)) {
    case part::state::queued:
    case part::state::skipped:
    case part::state::dropped:
      return false;
    case part::state::issuing:
    case part::state::issued:
    case part::state::started:
    case part::state::done:
      return true;
    }
    return false;
  });
}

} // namespace

caf::error check_no_retries(std::string_view verb, const request_options& options) {
  if (options.max_retries == 0)
    return {};
  return refusal(verb, errc::not_supported,
                 "max_retries is " + std::to_string(options.max_retries) +
                     ": such a request cannot be made again");
}

void request_attempts::start(const std::shared_ptr<operation>& first) {
  number_ = options_.retry_of != 0 ? options_.retry_of : first->number();
  first->set_retries(record_);
  owner_->start(first, options_);
  auto& x = request();
  x.admitted_at = clock::now().time_since_epoch().count();
  owner_->deadlines().add(x);
  on_admitted(first);
  if (x.completed())
    owner_->deadlines().remove(x);
}

std::shared_ptr<operation> request_attempts::next_attempt() {
  {
    std::lock_guard lock{mutex_};
    if (ended_ || request().completed())
      return nullptr;
    stage_ = stage::making; // an early end waits: memory of the requester may be used from now on
  }
  auto result = make();
  if (!result)
    return nullptr;
  result->deadline = request().deadline;
  result->set_retry_of(number_);
  result->set_retries(record_);
  return result;
}

/// Also called for a first attempt that was refused: it has its answer.
void request_attempts::on_admitted(const std::shared_ptr<operation>& attempt) {
  std::optional<early_end> ended;
  {
    std::lock_guard lock{mutex_};
    stage_ = stage::attempted;
    attempt_ = attempt;
    ended = ended_;
  }
  if (ended || request().completed())
    end_attempt(*attempt, ended.value_or(early_end::expired));
  attempt->on_answer([self = self(), x = attempt.get()] { self->on_answer_of(*x); });
}

void request_attempts::end_attempt(operation& attempt, early_end how) noexcept {
  if (how == early_end::cancelled)
    attempt.cancel();
  else
    attempt.expire();
}

void request_attempts::on_refused(const caf::error& why) {
  request().answer(loss_ ? with_text(loss_, "not made again: " + describe(why)) : why);
}

void request_attempts::on_answer_of(const operation& attempt) {
  const auto& why = attempt.error();
  if (!why) {
    if (!request().answer({}))
      end();
    return;
  }
  if (was_issued(attempt))
    ++issued_;
  if (request().completed() || !may_go_on(why)) {
    if (!request().answer(final_error(why)))
      end();
    return;
  }
  if (!loss_ && !record_->is_deferred())
    loss_ = why;
  {
    std::lock_guard lock{mutex_};
    stage_ = stage::waiting;
    attempt_.reset();
  }
  owner_->retry(self());
}

bool request_attempts::may_go_on(const caf::error& why) const noexcept {
  return code_of(why) == errc::worker_lost && issued_ <= options_.max_retries &&
         record_->has_loss_since(owner_->admissions().losses());
}

caf::error request_attempts::final_error(const caf::error& why) const {
  if (code_of(why) == errc::worker_lost && issued_ > options_.max_retries)
    return with_text(why, "not made again: it was issued " + std::to_string(issued_) + " times");
  return loss_ ? with_text(why, "it was made again after a loss") : why;
}

void request_attempts::end_early(early_end how, failure why) noexcept {
  std::shared_ptr<operation> attempt;
  {
    std::lock_guard lock{mutex_};
    ended_ = how;
    if (stage_ == stage::making)
      return; // `on_admitted` ends it
    attempt = attempt_;
  }
  if (attempt && !attempt->completed())
    end_attempt(*attempt, how);
  if (request().completed())
    return;
  why.operation = number_;
  why.detail += "; it waited to be made again after a loss, and does not run";
  request().answer(make_error(std::move(why)));
}

std::shared_ptr<operation> request_attempts::last_attempt() const {
  std::lock_guard lock{mutex_};
  return attempt_;
}

void request_attempts::end() noexcept {
  owner_->deadlines().remove(request());
  record_->close();
  std::shared_ptr<operation> gone;
  std::lock_guard lock{mutex_};
  gone.swap(attempt_);
}

} // namespace troupe::detail
