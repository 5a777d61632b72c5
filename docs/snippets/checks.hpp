/// What the programs of the guide's snippets share: checks, and the main function.
#pragma once

#include <troupe/config.hpp>
#include <troupe/error.hpp>

#include <caf/actor_system.hpp>

#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace snippets {

inline void check(bool right, const char* what) {
  if (!right)
    throw std::runtime_error(std::string{"wrong: "} + what);
}

/// Returns the value; throws if there is an error instead.
template <class T> T must(caf::expected<T> x) {
  if (!x)
    throw std::runtime_error(troupe::describe(x.error()));
  if constexpr (!std::is_void_v<T>)
    return std::move(*x);
}

inline void must(const caf::error& why) {
  if (why)
    throw std::runtime_error(troupe::describe(why));
}

/// Runs `f` with an actor system; returns the status for main.
template <class F> int run_with_devices(int argc, char** argv, F f) {
  try {
    troupe::config cfg;
    must(cfg.parse(argc, argv));
    if (cfg.help_printed())
      return 0;
    caf::actor_system sys{cfg};
    f(sys);
  } catch (const std::exception& why) {
    std::cerr << why.what() << '\n';
    return 1;
  }
  std::cout << "every snippet did what it should\n";
  return 0;
}

} // namespace snippets
