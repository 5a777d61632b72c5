/// Actors of programs in workers, whose exceptions are reported with their text.
#pragma once

#include <troupe/detail/user_call.hpp>
#include <troupe/error.hpp>
#include <troupe/worker_program.hpp>

#include <caf/actor.hpp>
#include <caf/actor_system.hpp>
#include <caf/behavior.hpp>
#include <caf/blocking_actor.hpp>
#include <caf/event_based_actor.hpp>
#include <caf/spawn_options.hpp>

#include <exception>
#include <type_traits>
#include <utility>

namespace troupe {

namespace detail {

inline caf::error program_threw(const std::exception_ptr& x) {
  return make_error(errc::unavailable, "the program's actor threw: " + exception_text(x));
}

} // namespace detail

/// Spawns the actor of one rank (`program_factory`) as `place.system.spawn<Options>(body)` does. If
/// an exception leaves the actor, `program_ended` and the replies to later messages contain its
/// text. CAF 0.17 alone loses the text.
/// @param body takes a caf::blocking_actor*, or a caf::event_based_actor* and returns its behavior
template <caf::spawn_options Options = caf::no_spawn_options, class F>
caf::actor spawn_program(const program_place& place, F body) {
  if constexpr (std::is_invocable_v<F&, caf::blocking_actor*>) {
    return place.system.spawn<Options>([body = std::move(body)](caf::blocking_actor* self) mutable {
      try {
        body(self);
      } catch (...) {
        self->fail_state(detail::program_threw(std::current_exception()));
      }
    });
  } else {
    return place.system.spawn<Options>(
        [body = std::move(body)](caf::event_based_actor* self) mutable -> caf::behavior {
          self->set_exception_handler(
              [](std::exception_ptr& x) -> caf::error { return detail::program_threw(x); });
          return body(self);
        });
  }
}

} // namespace troupe
