/// The end of handles of actors on threads that are not CAF's.
#pragma once

#include <troupe/detail/caf_compat.hpp>

#include <caf/all.hpp>

#include <utility>

namespace troupe::detail {

/// Drops a handle. If it is the last one of an actor that has not ended, the actor ends with it,
/// but on a thread of the pool, which its system waits for: CAF still uses the system after it has
/// counted the actor as ended, and the system may be gone then.
inline void let_go(caf::strong_actor_ptr x) noexcept {
  const auto* who = dynamic_cast<caf::local_actor*>(caf::actor_cast<caf::abstract_actor*>(x));
  while (x) {
    auto count = x->strong_refs.load();
    while (count > 1)
      if (x->strong_refs.compare_exchange_weak(count, count - 1)) {
        static_cast<void>(x.release());
        return;
      }
    if (who == nullptr || has_ended(*who))
      return;
    // The actor ignores a response that it does not wait for. It has its own handle in there.
    enqueue_response(x, x, caf::message_id{}, caf::message{}, nullptr);
  }
}

} // namespace troupe::detail
