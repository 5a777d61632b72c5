/// How late answers come.
#pragma once

#include <troupe/pending.hpp>

#include <chrono>
#include <functional>
#include <thread>
#include <utility>

namespace troupe::testing {

/// Runs continuations on the answering thread, so that the time of an answer is seen.
class inline_executor final : public executor {
public:
  void post(std::function<void()> task) override { task(); }
};

/// Calls `f(answer, late)` on the answering thread. `late` is the time after `limit` from now on:
/// `x` has just been asked for. What this thread itself finds answered was answered before, nobody
/// knows when: it is not late, however long this thread had to wait for the processor.
template <class T, class F>
void when_answered(const pending<T>& x, std::chrono::nanoseconds limit, F f) {
  using clock = std::chrono::steady_clock;
  static inline_executor here;
  x.then(here, [f = std::move(f), deadline = clock::now() + limit,
                asking = std::this_thread::get_id()](const caf::expected<T>& answer) mutable {
    f(answer,
      std::this_thread::get_id() == asking ? clock::duration::min() : clock::now() - deadline);
  });
}

} // namespace troupe::testing
