/// A connection between two hosts that are far from each other.
#pragma once

#include "foundation/file_descriptor.hpp"
#include "net/socket.hpp"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <thread>
#include <vector>

namespace troupe::testing {

/// Forwards connections from a port of its own, as a network with this round trip does: the first
/// bytes arrive with the connection, one and a half round trips after the call that makes it, and
/// all later bytes half a round trip after they were sent.
class delayed_wire {
public:
  using clock = std::chrono::steady_clock;

  /// `port`: a port of this machine's 127.0.0.1.
  delayed_wire(std::uint16_t port, clock::duration round_trip);
  ~delayed_wire();
  delayed_wire(const delayed_wire&) = delete;
  delayed_wire& operator=(const delayed_wire&) = delete;

  std::uint16_t port() const noexcept { return address_.port; }

private:
  struct chunk {
    clock::time_point due;
    std::vector<std::byte> bytes; ///< none: the end
  };
  struct direction {
    int from = -1;
    int to = -1;
    bool ended = false;
    std::deque<chunk> on_the_way;
  };
  struct connection {
    detail::file_descriptor near;
    detail::file_descriptor far; ///< empty until `connects_at`
    clock::time_point connects_at;
    direction there;
    direction back;
  };

  void run();
  int poll_ms(clock::time_point now) const;
  void take(direction& x) const;
  /// Returns false if the connection is over.
  static bool deliver(direction& x, clock::time_point now);

  detail::socket_address target_;
  detail::socket_address address_;
  const clock::duration round_trip_;
  detail::file_descriptor listener_;
  std::atomic<bool> stop_{false};
  std::list<connection> connections_; // used by the thread only
  std::thread thread_;
};

} // namespace troupe::testing
