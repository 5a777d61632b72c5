/// A connection between two hosts that can be cut.
#pragma once

#include "foundation/file_descriptor.hpp"
#include "net/socket.hpp"

#include <atomic>
#include <cstdint>
#include <list>
#include <string>
#include <thread>

namespace troupe::testing {

/// Forwards connections from a port of its own until it is cut. Then no data passes in either
/// direction, and neither side is notified.
class test_wire {
public:
  /// `port`: a port of this machine's 127.0.0.1.
  explicit test_wire(std::uint16_t port);
  ~test_wire();
  test_wire(const test_wire&) = delete;
  test_wire& operator=(const test_wire&) = delete;

  std::uint16_t port() const noexcept { return address_.port; }
  /// Cuts all connections. Returns when no data passes any more.
  void cut();
  /// Forwards new connections again. The old ones stay cut.
  void mend() { is_cut_.store(false); }

private:
  struct connection {
    detail::file_descriptor from;
    detail::file_descriptor to;
    bool cut = false;
  };

  void run();
  static bool pass_on(int from, int to);

  detail::socket_address target_;
  detail::socket_address address_;
  detail::file_descriptor listener_;
  std::atomic<bool> is_cut_{false};
  std::atomic<bool> stop_{false};
  std::atomic<std::uint64_t> rounds_{0};
  std::list<connection> connections_; // used by the thread only
  std::thread thread_;
};

} // namespace troupe::testing
