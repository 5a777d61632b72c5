#include "foundation/spin.hpp"
#include <troupe/detail/completion.hpp>

#include <string>
#include <utility>

namespace troupe::detail {

namespace {
thread_local const char* non_blocking_thread = nullptr;
}

void forbid_blocking(const char* thread_kind) noexcept { non_blocking_thread = thread_kind; }

bool may_block() noexcept { return non_blocking_thread == nullptr; }

no_blocking_scope::no_blocking_scope(const char* thread_kind) noexcept
    : before_(std::exchange(non_blocking_thread, thread_kind)) {}

no_blocking_scope::~no_blocking_scope() { non_blocking_thread = before_; }

caf::error check_may_block() noexcept {
  if (may_block())
    return {};
  return make_error(errc::would_block, std::string{"a blocking wait on "} + non_blocking_thread +
                                           " would block other work; use then() or a message");
}

completion::~completion() = default;

bool completion::spin() const noexcept {
  return spin_until([this] { return completed(); }, client_spin());
}

void completion::wait() noexcept {
  if (spin())
    return;
  std::unique_lock lock{mutex_};
  waited_for_.store(true);
  condition_.wait(lock, [this] { return completed_.load(); });
}

bool completion::wait_until(clock::time_point until) noexcept {
  if (clock::now() >= until)
    return completed();
  if (spin())
    return true;
  std::unique_lock lock{mutex_};
  waited_for_.store(true);
  return condition_.wait_until(lock, until, [this] { return completed_.load(); });
}

void completion::on_answer(std::function<void()> listener) {
  {
    std::lock_guard lock{mutex_};
    waited_for_.store(true);
    if (!completed_.load()) {
      listeners_.push_back(std::move(listener));
      return;
    }
  }
  listener();
}

bool completion::answer(caf::error error) noexcept {
  if (claimed_.exchange(true))
    return false;
  before_answer(error);
  error_ = std::move(error);
  completed_.store(true);
  after_answer();
  if (waited_for_.load()) {
    std::vector<std::function<void()>> listeners;
    {
      std::lock_guard lock{mutex_};
      listeners.swap(listeners_);
      condition_.notify_all();
    }
    for (auto& f : listeners)
      f();
  }
  return true;
}

std::shared_ptr<completion> refused(caf::error why) {
  auto result = std::make_shared<completion>();
  result->answer(std::move(why));
  return result;
}

} // namespace troupe::detail
