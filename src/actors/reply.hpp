/// Answers of operations to mailboxes.
#pragma once

#include "actors/answer_spinner.hpp"
#include "actors/let_go.hpp"
#include "operation/operation.hpp"
#include "runtime/runtime.hpp"
#include <troupe/detail/caf_compat.hpp>
#include <troupe/request.hpp>

#include <caf/all.hpp>

#include <memory>
#include <type_traits>
#include <utility>

namespace troupe::detail {

template <class T>
using reply_of = caf::result<std::conditional_t<std::is_same_v<T, nothing>, void, T>>;

/// Puts the answer of `op` into the requester's mailbox, on the thread that answers `op`. `replier`
/// is the sender of the answer, if it is an actor; `keep` lives until then. `owner`: null for an
/// operation that has failed already.
template <class T>
void reply_when_answered(runtime* owner, const std::shared_ptr<operation_of<T>>& op,
                         const reply_address& to, const caf::strong_actor_ptr& replier,
                         std::shared_ptr<const void> keep) {
  if (owner != nullptr)
    owner->reply_to_actor(*op);
  op->on_answer([op, to, replier, keep = std::move(keep)]() mutable {
    if (!to.requester || !to.id.is_request())
      return;
    auto content = [&] {
      if (op->error())
        return caf::make_message(op->error());
      if constexpr (std::is_same_v<T, nothing>)
        return caf::message{};
      else
        return caf::make_message(op->value);
    }();
    enqueue_response(to.requester, replier, to.id, std::move(content), to.spinner);
    let_go(std::move(to.requester));
  });
  if (to.spinner != nullptr && !op->completed())
    to.spinner->wake();
}

/// Same for the message that `self` is handling.
template <class Self, class T>
reply_of<T> reply_when_answered(Self* self, runtime* owner,
                                const std::shared_ptr<operation_of<T>>& op) {
  reply_when_answered(owner, op, {self->current_sender(), self->current_message_id(), nullptr},
                      caf::strong_actor_ptr{self->ctrl()}, nullptr);
  return caf::delegated<std::conditional_t<std::is_same_v<T, nothing>, void, T>>{};
}

} // namespace troupe::detail
