/// Measures how late results arrive.
#pragma once

#include <troupe/pending.hpp>

#include <chrono>
#include <functional>
#include <thread>
#include <utility>

namespace troupe::testing {

/// Runs continuations on the completing thread, so that a test sees the time of completion.
class inline_executor final : public executor {
public:
  void post(std::function<void()> task) override { task(); }
};

/// Calls `f(result, late)` on the completing thread. Call this directly after the request for `x`.
/// `late` is the time past the deadline, which is `limit` from now. If the result is there before
/// this call, `f` runs on the calling thread, and the time of completion is unknown. Then the
/// result counts as not late, even if the calling thread waited long for a processor.
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
