/// The socket where a parent listens for agents of other hosts.
#pragma once

#include "net/socket.hpp"
#include "net/tls_identity.hpp"
#include "remote/host_session.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <poll.h>

namespace troupe::detail {

/// One thread accepts connections and removes ended ones. The number and the time of strangers are
/// limited (`stranger_limits`). Until its first message is here, a stranger costs only a
/// descriptor.
/// @thread any
class host_gate {
public:
  /// @param to see `host_session::owner`
  /// @errors errc::invalid_argument: not the numeric address of one host; errc::unavailable
  static caf::expected<std::unique_ptr<host_gate>>
  start(const remote_hosts& where, const host_session::limits& how_long, host_session::owner to);
  /// Ends all connections.
  ~host_gate();
  host_gate(const host_gate&) = delete;
  host_gate& operator=(const host_gate&) = delete;

  std::uint16_t port() const noexcept { return address_.port; }

private:
  using clock = std::chrono::steady_clock;

  /// A connection without a session.
  struct caller {
    file_descriptor socket;
    socket_address from;
    clock::time_point since;
    stranger_stage at = stranger_stage::silent; ///< or `waiting`
  };
  /// The state of a caller's first message. `none`: the connection is over.
  enum class hello : std::uint8_t { incomplete, complete, invalid, none };

  host_gate(std::unique_ptr<tls_identity> identity, file_descriptor listener, wake_up wake,
            socket_address address, const host_session::limits& how_long,
            host_session::owner to) noexcept
      : identity_(std::move(identity)), listener_(std::move(listener)), wake_(std::move(wake)),
        address_(address), how_long_(how_long), to_(std::move(to)) {}

  void run() noexcept;
  /// Waits for connections, for first messages, or for the next end of a limit.
  void wait() noexcept;
  clock::time_point next_limit(clock::time_point now) const noexcept;
  void remove_ended() noexcept;
  void accept_all() noexcept;
  /// Accepts a connection. Returns false if there is none.
  bool accept() noexcept;
  /// Turns a caller away if there are too many of this stage.
  void limit_callers(stranger_stage at) noexcept;
  /// Marks callers whose first message is complete. Closes connections that use no TLS or take too
  /// long.
  void look_at_callers() noexcept;
  static hello look_at_hello(const caller& x) noexcept;
  /// Begins the sessions of callers whose turn it is.
  void begin_sessions() noexcept;
  /// Returns whether one more handshake may begin. May turn another one away for it.
  bool has_room(const socket_address& next) noexcept;
  void begin_session(caller x) noexcept;

  const std::unique_ptr<tls_identity> identity_; ///< used by the thread
  const file_descriptor listener_;
  const wake_up wake_;
  const socket_address address_;
  const host_session::limits how_long_;
  const host_session::owner to_;
  std::atomic<bool> stop_{false};
  // used by the thread
  clock::time_point accept_from_{};    ///< set after a failed accept, or after many at once
  clock::time_point turn_away_from_{}; ///< set after a session was turned away for another one
  std::vector<caller> callers_;        ///< oldest first
  std::list<std::shared_ptr<host_session>> sessions_;
  std::vector<pollfd> wanted_; ///< the listener, `wake_`, then the callers
  std::minstd_rand random_;
  std::thread thread_;
};

} // namespace troupe::detail
