#include <troupe/detail/user_call.hpp>
#include <troupe/task.hpp>

#include <atomic>
#include <exception>
#include <utility>

namespace troupe::detail {

/// A piece of work for the executor: resumes a coroutine. If it is dropped, the run ends.
class coroutine_run::step {
public:
  step(coroutine_run& of, std::function<std::coroutine_handle<>()> next)
      : of_(of.self_), where_(of.where_), next_(std::move(next)) {}
  ~step() {
    if (disarm())
      abandon(std::move(of_));
  }
  step(const step&) = delete;
  step& operator=(const step&) = delete;

  /// From now on, it cannot run. Returns false if it has run before.
  bool disarm() noexcept { return armed_.exchange(false); }

  void run() {
    if (disarm())
      next_().resume();
  }

private:
  std::shared_ptr<coroutine_run> of_;
  std::shared_ptr<executor> where_; // it may be in `post` when the run ends
  std::function<std::coroutine_handle<>()> next_;
  std::atomic<bool> armed_{true};
};

coroutine_run::coroutine_run(std::shared_ptr<executor> where, const std::stop_token& stop)
    : where_(std::move(where)) {
  if (stop.stop_possible()) // the source is copied: this object may end in the callback
    outer_.emplace(stop, [source = stop_]() mutable {
      auto own = source;
      own.request_stop();
    });
}

coroutine_run::~coroutine_run() = default;

void coroutine_run::cancel() noexcept {
  auto source = stop_;
  source.request_stop();
}

void coroutine_run::begin(std::coroutine_handle<> root) {
  self_ = std::static_pointer_cast<coroutine_run>(shared_from_this());
  root_ = root;
  completion at_once;
  at_once.answer({});
  try {
    resume_after(at_once, [root] { return root; });
  } catch (...) { // no memory
    self_ = nullptr;
    root.destroy();
    throw;
  }
}

void coroutine_run::resume_after(completion& after, std::function<std::coroutine_handle<>()> next) {
  const auto where = where_; // the run may end before `continue_on` returns
  const auto x = std::make_shared<step>(*this, std::move(next));
  try {
    continue_on(*where, after, [x] { x->run(); });
  } catch (...) { // no memory
    if (x->disarm())
      throw;
  }
}

void coroutine_run::end(const caf::error& error) noexcept {
  const auto keep = std::exchange(self_, nullptr);
  std::exchange(root_, {}).destroy();
  where_ = nullptr; // it may keep an actor that keeps the result
  answer(error);
}

/// On the callback thread: the coroutine's objects are the user's.
void coroutine_run::abandon(std::shared_ptr<coroutine_run> what) noexcept {
  callback_executor().post([x = std::move(what)] {
    x->end(make_error(errc::cancelled, "the executor of this task has ended before the task"));
  });
}

caf::error real_error(caf::error why) noexcept {
  return why ? std::move(why)
             : make_error(errc::invalid_argument, "the task ended with an error that is none");
}

caf::error thrown_by_task() {
  return make_error(errc::unavailable,
                    "the task threw: " + exception_text(std::current_exception()));
}

} // namespace troupe::detail
