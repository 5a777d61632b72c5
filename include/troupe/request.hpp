/// Requests of actors: admitted when they are made, with the reply in the actor's mailbox.
#pragma once

#include <troupe/detail/caf_compat.hpp>
#include <troupe/device.hpp>
#include <troupe/nccl_world.hpp>
#include <troupe/p2p_topology.hpp>
#include <troupe/step.hpp>
#include <troupe/topology.hpp>
#include <troupe/world.hpp>
#include <troupe/world_rank.hpp>

#include <caf/actor.hpp>

#include <algorithm>
#include <chrono>
#include <type_traits>
#include <utility>
#include <variant>

namespace troupe {

namespace detail {

/// A request to a device.
using device_request =
    std::variant<const allocate*, const upload*, const download*, const fill*, const copy*,
                 const accept*, const launch*, const launch_callable*, const offer*, const claim*,
                 const stats*, const reset*, const hand_over*>;
/// A request to a world.
using world_request =
    std::variant<const all_reduce*, const reduce*, const broadcast*, const all_gather*,
                 const reduce_scatter*, const all_to_all*, const all_to_all_v*, const gather*,
                 const scatter*, const send_recv*, const barrier*, const group*, const rank_local*,
                 const exchange*, const allocate_all*, const run_step*>;
/// A request to a topology.
using topology_request = std::variant<const verify_links*, const measure_links*, const copy*,
                                      const copy_batch*, const replicate*, const distribute*>;

template <class Request, class Requests>
concept one_of = std::is_constructible_v<Requests, const Request*>;

class answer_spinner;

/// The destination of the reply to a request.
struct reply_address {
  caf::strong_actor_ptr requester;
  caf::message_id id;                ///< of the request
  answer_spinner* spinner = nullptr; ///< spins until the reply arrives; null: none does
};

/// Returns the spinner for replies to actors of the pool; null outside the pool's threads.
answer_spinner* find_spinner(caf::actor_system& sys);

/// Admits a request on the calling thread. Returns false, without any effect, if `to` is in another
/// process, has ended, or does not take such requests.
bool admit(const caf::actor& to, const device_request& what, const reply_address& answer);
bool admit(const caf::actor& to, const world_request& what, const reply_address& answer);
bool admit(const caf::actor& to, const topology_request& what, const reply_address& answer);
void admit(const device& to, const device_request& what, const reply_address& answer);
void admit(const world& to, const world_request& what, const reply_address& answer);
void admit(const topology& to, const topology_request& what, const reply_address& answer);
/// The same for `copy`, which devices and topologies take.
bool admit(const caf::actor& to, const copy& what, const reply_address& answer);

/// Ends a device, world or topology of this process for every later request.
void close(const caf::actor& to);

/// Returns CAF's own time-out for a request. It is far behind the deadline, because the library
/// itself replies in time.
inline std::chrono::nanoseconds patience_for(std::chrono::nanoseconds deadline) {
  return 2 * std::min<std::chrono::nanoseconds>(deadline, as_good_as_never) +
         std::chrono::seconds{10};
}

template <class Self> reply_address address_of(const Self& self, answer_spinner* spinner) {
  auto& who = *self;
  return {caf::strong_actor_ptr{who.ctrl()}, new_request_id(self), spinner};
}

/// Calls `admit` with the destination of the reply, on behalf of `self`. An event-based actor never
/// waits for room.
template <class Self, class Admit> auto admit_for(const Self& self, Admit admit) {
  if constexpr (is_blocking_actor<Self>) {
    return admit(address_of(self, nullptr));
  } else {
    no_blocking_scope scope{"an actor"};
    return admit(address_of(self, find_spinner(self->system())));
  }
}

template <class Request> void set_deadline(Request& what, std::chrono::nanoseconds deadline) {
  if constexpr (requires { what.options.deadline; }) // other requests complete at once
    what.options.deadline = deadline;
}

/// Admits a request to a facade and returns the response handle. Only the request's own deadline
/// limits it: a CAF timer for each request would cost more than the rest of the request.
template <class Self, class Facade, class Request>
auto ask_facade(const Self& self, const Facade& to, Request what,
                std::chrono::nanoseconds deadline) {
  set_deadline(what, deadline);
  caf::message_id id;
  admit_for(self, [&](const reply_address& answer) {
    id = answer.id;
    admit(to, &what, answer);
  });
  return response_to(self, id);
}

/// Returns the call of one rank as a message.
template <class Call> rank_local as_rank_local(int rank, Call call) {
  rank_local result;
  result.rank = rank;
  if constexpr (requires { call.options; })
    result.options = call.options;
  result.call = std::move(call);
  return result;
}

inline exchange as_rank_local(int rank, exchange call) {
  call.rank = rank;
  return call;
}

} // namespace detail

/// Sends `what` to a world, device or topology without asking for a reply: `subscribe`,
/// `watch_generation`, `program_message`, `shutdown`. CAF's own function for it differs by version.
/// `Self`: a pointer to the sending actor, or a `caf::scoped_actor`.
template <class Self, class Message>
void tell(const Self& self, const caf::actor& to, Message what) {
  if constexpr (std::is_same_v<Message, shutdown>)
    detail::close(to); // later requests of the sender come after it
  detail::send(self, to, std::move(what));
}

/// Requests `what` from a world, device or topology, for an actor and with a deadline. Requests
/// that one actor makes by this function take effect in the order in which it makes them, whatever
/// their receivers are. Each is admitted on the calling thread; its reply arrives in the actor's
/// mailbox. (A request that is sent by CAF's own functions, or to another process, is admitted when
/// its receiver handles it. It is ordered only with other messages to the same address.)
///
/// `Self`: a pointer to the requesting actor, or a `caf::scoped_actor`. `deadline` replaces the one
/// in `what.options`. If a queue is full, a blocking actor waits for room (`room_policy`); requests
/// of other actors are queued up to a second limit. The reply comes later, so even a request that
/// is invalid by itself leaves the ranges that it would have written skipped.
///
/// Returns CAF's own response handle: `.then(f, on_error)` or `.await(f, on_error)` in event-based
/// actors, `.receive(f, on_error)` in blocking ones. If the receiver had ended before, `on_error`
/// may get an error of CAF (`caf::sec`): `code_of` returns none, and `describe` returns its text.
template <class Self, class Request>
auto request(const Self& self, const caf::actor& to, Request what,
             std::chrono::nanoseconds deadline) {
  detail::set_deadline(what, deadline);
  constexpr bool direct = detail::one_of<Request, detail::device_request> ||
                          detail::one_of<Request, detail::world_request> ||
                          detail::one_of<Request, detail::topology_request>;
  if constexpr (direct) {
    caf::message_id id;
    const bool admitted = detail::admit_for(self, [&](const detail::reply_address& answer) {
      id = answer.id;
      if constexpr (std::is_same_v<Request, copy>)
        return detail::admit(to, what, answer);
      else
        return detail::admit(to, &what, answer);
    });
    if (admitted)
      return detail::response_to(self, id);
  }
  return detail::request(self, to, detail::patience_for(deadline), std::move(what));
}

/// The same for a world; also for calls of ranks (`rank_local`, `exchange`).
template <class Self, class Request>
auto request(const Self& self, const world& to, Request what, std::chrono::nanoseconds deadline) {
  if constexpr (detail::one_of<Request, detail::world_request>) {
    return detail::ask_facade(self, to, std::move(what), deadline);
  } else {
    return request(self, to.actor(), std::move(what), deadline);
  }
}

/// The same for a device.
template <class Self, detail::one_of<detail::device_request> Request>
auto request(const Self& self, const device& to, Request what, std::chrono::nanoseconds deadline) {
  return detail::ask_facade(self, to, std::move(what), deadline);
}

/// The same for a topology.
template <class Self, detail::one_of<detail::topology_request> Request>
auto request(const Self& self, const topology& to, Request what,
             std::chrono::nanoseconds deadline) {
  return detail::ask_facade(self, to, std::move(what), deadline);
}

/// Makes a call of one rank, as `world_rank::run` does. `what` is `all_reduce` or another verb,
/// with at most the rank's own handle in each list, `collective`, or `exchange`, whose `rank` is
/// ignored. Works in programs in workers, too.
template <class Self, class Call>
  requires std::is_convertible_v<Call, collective> || std::is_same_v<Call, exchange>
auto request(const Self& self, const world_rank& to, Call what, std::chrono::nanoseconds deadline) {
  return request(self, to.whole(), detail::as_rank_local(to.index(), std::move(what)), deadline);
}

} // namespace troupe
