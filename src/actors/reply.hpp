/// From operations to mailboxes.
#pragma once

#include "core/operations.hpp"
#include <troupe/detail/caf_compat.hpp>

#include <caf/all.hpp>

#include <memory>
#include <utility>

namespace troupe::detail {

/// The caller's reply comes from whatever thread answers `op`, straight into the requester's
/// mailbox.
template <class Self, class T>
auto reply_when_answered(Self* self, const std::shared_ptr<operation_of<T>>& op) {
  auto id = self->current_message_id();
  op->replies_to_actor = true;
  op->on_answer(
      [op, requester = self->current_sender(), replier = caf::strong_actor_ptr{self->ctrl()}, id] {
        if (!requester || !id.is_request())
          return;
        auto content = [&] {
          if (op->error())
            return caf::make_message(op->error());
          if constexpr (std::is_same_v<T, nothing>)
            return caf::message{};
          else
            return caf::make_message(op->value);
        }();
        enqueue_response(requester, replier, id, std::move(content));
      });
  if constexpr (std::is_same_v<T, nothing>)
    return caf::result<void>{caf::delegated<void>{}};
  else
    return caf::result<T>{caf::delegated<T>{}};
}

} // namespace troupe::detail
