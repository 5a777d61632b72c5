/// Workers for tests: the test binary itself, in a scenario that executes text orders.
#pragma once

#include "support/child_process.hpp"
#include "support/expect.hpp"
#include "support/process_watch.hpp"
#include "worker/parent/worker_process.hpp"
#include "worker/protocol/worker_parent.hpp"

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace troupe::testing {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;

/// A test that waits longer than this has failed.
inline constexpr std::chrono::seconds patience{30};

inline double ms(clock::duration x) { return std::chrono::duration<double, std::milli>(x).count(); }

inline detail::worker_options worker_of(const std::string& scenario) {
  detail::worker_options result;
  result.program = "/proc/self/exe";
  result.arguments = {child_argument(scenario)};
  result.hello_limit = patience;
  return result;
}

struct note {
  std::string text;
  std::vector<detail::file_descriptor> descriptors;
};

inline void send_note(detail::message_socket& socket, std::string_view text,
                      std::span<const int> descriptors = {}) {
  must(socket.send(std::as_bytes(std::span{text}), descriptors, clock::now() + patience));
}

/// Returns none at the end of the stream. No limit: a worker must not end by itself.
inline std::optional<note> receive_note(detail::message_socket& socket,
                                        detail::time_limit until = detail::no_limit) {
  std::array<char, 4096> text;
  auto got = must(socket.receive(std::as_writable_bytes(std::span{text}),
                                 detail::message_socket::most_descriptors, until));
  if (got.what != detail::received::kind::message)
    return std::nullopt;
  return note{{text.data(), got.size_bytes}, std::move(got.descriptors)};
}

inline note answer(detail::message_socket& socket, std::string_view text,
                   std::span<const int> descriptors = {}) {
  send_note(socket, text, descriptors);
  auto result = receive_note(socket, clock::now() + patience);
  if (!result)
    throw std::runtime_error("no answer to " + std::string{text});
  return std::move(*result);
}

/// Records the notifications of a worker's listener.
class witness {
public:
  detail::worker_listener listener() {
    return {[this](const detail::worker_end& x) { add(ends_, x); },
            [this](const detail::worker_exit& x) { add(exits_, x); }};
  }

  detail::worker_end wait_end() { return wait(ends_); }
  detail::worker_exit wait_exit() { return wait(exits_); }
  /// Returns how many ends and exits were reported.
  std::pair<std::size_t, std::size_t> counts() {
    std::lock_guard lock{mutex_};
    return {ends_.size(), exits_.size()};
  }

private:
  template <class T> void add(std::vector<T>& to, const T& x) {
    std::lock_guard lock{mutex_};
    to.push_back(x);
    changed_.notify_all();
  }
  template <class T> T wait(const std::vector<T>& from) {
    std::unique_lock lock{mutex_};
    if (!changed_.wait_for(lock, patience, [&] { return !from.empty(); }))
      throw std::runtime_error("the listener was not called");
    return from.front();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<detail::worker_end> ends_;
  std::vector<detail::worker_exit> exits_;
};

inline constexpr std::pair<std::size_t, std::size_t> once_each{1, 1};

} // namespace troupe::testing
