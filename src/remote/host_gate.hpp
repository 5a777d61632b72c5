/// The socket where a parent listens for agents of other hosts.
#pragma once

#include "net/socket.hpp"
#include "remote/host_session.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <thread>

namespace troupe::detail {

/// One thread accepts connections and removes ended ones. The number and the time of strangers are
/// limited: if there are too many, the next one replaces the oldest.
/// @thread any
class host_gate {
public:
  /// @param to see `host_session::owner`
  /// @errors errc::invalid_argument: not the numeric address of one host; errc::unavailable
  static caf::expected<std::unique_ptr<host_gate>> start(const remote_hosts& where,
                                                         host_session::owner to);
  /// Ends all connections.
  ~host_gate();
  host_gate(const host_gate&) = delete;
  host_gate& operator=(const host_gate&) = delete;

  std::uint16_t port() const noexcept { return address_.port; }

private:
  using clock = std::chrono::steady_clock;

  host_gate(std::shared_ptr<tls_context> context, file_descriptor listener, wake_up wake,
            socket_address address, host_session::owner to) noexcept
      : context_(std::move(context)), listener_(std::move(listener)), wake_(std::move(wake)),
        address_(address), to_(std::move(to)) {}

  void run() noexcept;
  void accept() noexcept;
  /// Turns away a stranger if there are too many.
  void make_room() noexcept;

  const std::shared_ptr<tls_context> context_;
  const file_descriptor listener_;
  const wake_up wake_;
  const socket_address address_;
  const host_session::owner to_;
  std::atomic<bool> stop_{false};
  clock::time_point accept_from_{};                   ///< of the thread: set after a failed accept
  std::list<std::shared_ptr<host_session>> sessions_; ///< of the thread; oldest first
  std::thread thread_;
};

} // namespace troupe::detail
