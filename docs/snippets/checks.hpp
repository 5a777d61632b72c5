/// The common part of the programs of the guide's snippets: checks, and the main function.
#pragma once

#include <troupe/config.hpp>
#include <troupe/device.hpp>
#include <troupe/error.hpp>

#include <caf/actor_system.hpp>

#include <cstdlib>
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

/// Returns the number in an environment variable; 0 if there is none.
inline int number_from_environment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : std::atoi(text);
}

/// Returns whether a test has too few GPUs (TROUPE_SNIPPETS_NEED_GPUS) and is to be skipped. Throws
/// instead if TROUPE_REQUIRE_GPUS requires that many.
inline bool lacks_gpus(caf::actor_system& sys) {
  const int needed = number_from_environment("TROUPE_SNIPPETS_NEED_GPUS");
  if (needed == 0)
    return false;
  const auto list = must(troupe::list_devices(sys));
  const int gpus = list.backend == "cuda" ? static_cast<int>(list.ordinals.size()) : 0;
  check(gpus >= needed || number_from_environment("TROUPE_REQUIRE_GPUS") < needed,
        "fewer GPUs than are required");
  return gpus < needed;
}

/// Runs `f` with an actor system; returns the status for main: 77 if the test is skipped.
template <class F> int run_with_devices(int argc, char** argv, F f) {
  try {
    troupe::config cfg;
    must(cfg.parse(argc, argv));
    if (cfg.help_printed())
      return 0;
    caf::actor_system sys{cfg};
    if (lacks_gpus(sys)) {
      std::cout << "skipped: too few GPUs\n";
      return 77;
    }
    f(sys);
  } catch (const std::exception& why) {
    std::cerr << why.what() << '\n';
    return 1;
  }
  std::cout << "every snippet did what it should\n";
  return 0;
}

} // namespace snippets
