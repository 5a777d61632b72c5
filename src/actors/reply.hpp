/// From operations to mailboxes.
#pragma once

#include "core/operations.hpp"
#include "core/runtime.hpp"
#include <troupe/detail/caf_compat.hpp>

#include <caf/all.hpp>

#include <memory>
#include <type_traits>
#include <utility>

namespace troupe::detail {

template <class T>
using reply_of = caf::result<std::conditional_t<std::is_same_v<T, nothing>, void, T>>;

/// The caller's reply comes from whatever thread answers `op`, straight into the requester's
/// mailbox.
template <class Self, class T>
reply_of<T> reply_when_answered(Self* self, runtime& owner,
                                const std::shared_ptr<operation_of<T>>& op) {
  auto id = self->current_message_id();
  owner.reply_to_actor(*op);
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
  return caf::delegated<std::conditional_t<std::is_same_v<T, nothing>, void, T>>{};
}

} // namespace troupe::detail
