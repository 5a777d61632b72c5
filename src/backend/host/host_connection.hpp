/// The connection of one rank to a hub, where the ranks of its communicator meet.
#pragma once

#include "backend/host/host_transport.hpp"
#include "backend/host/host_wire.hpp"
#include "net/socket.hpp"

#include <caf/error.hpp>
#include <caf/expected.hpp>

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace troupe::detail {

/// Sockets of local ranks that wait for ranks of other processes. @thread any
class waiting_room {
public:
  /// Returns false if the room is closed.
  bool enter(int socket);
  /// Removes sockets before they are closed. Returns false if the room was closed.
  bool leave(std::span<const int> sockets) noexcept;
  /// Ends the wait of all ranks inside: they receive no more from the hub, which may be gone
  /// without a message.
  void close() noexcept;
  bool is_closed() const noexcept;

private:
  mutable std::mutex mutex_;
  std::vector<int> sockets_;
  bool closed_ = false;
};

/// The ranks of a communicator, as one of them sees them over a connection to the hub.
///
/// Once the communicator has ended, no function waits longer than `send_patience` for a process
/// that does not respond.
class host_connection final : public host_transport {
public:
  /// Connects ranks of this process to a hub. Blocks until all ranks of all processes are
  /// connected, or `room` is closed.
  /// @shape  size: at most `most_ranks`
  /// @errors errc::invalid_argument: ranks disagree about the size, or a rank is taken;
  ///         errc::nccl_error: the hub or the process of a rank is gone or cannot be reached;
  ///         errc::unavailable: no thread can be started; any: the room was closed
  static caf::expected<std::vector<std::shared_ptr<host_transport>>>
  build(const hub_invitation& where, int size, std::span<const local_rank> ranks,
        waiting_room& room) noexcept;

  host_connection(file_descriptor socket, int size, int rank) noexcept;
  ~host_connection() override;
  host_connection(const host_connection&) = delete;
  host_connection& operator=(const host_connection&) = delete;

  int size() const noexcept override { return size_; }
  caf::error announce(int rank, std::span<const host_call> calls) noexcept override;
  void run(int rank, std::uint64_t sequence, std::span<const host_call> calls) noexcept override;
  void end(caf::error why) noexcept override;
  void wait_quiet() noexcept override;
  void leave(int rank) noexcept override;

private:
  /// Starts the thread that reads from the hub.
  caf::error start() noexcept;
  void read() noexcept;
  /// Returns false if the connection is over.
  bool take(const frame_header& header) noexcept;
  bool take_done(const frame_header& header) noexcept;
  void take_end() noexcept;

  /// Sends while no other thread does. Returns false if the communicator has ended.
  bool send(lock& guard, const const_blocks& blocks) noexcept;
  void make_calls(lock& guard, std::span<const host_call> calls) noexcept;
  /// Joins the thread, and closes the socket; after `end`, or when the hub has ended the
  /// connection.
  void close() noexcept;

  const int size_;
  const int rank_;
  file_descriptor socket_;
  std::thread reader_;
  std::once_flag closed_;

  std::uint64_t turn_ = 0; ///< sequence number of the next calls
  mutable_blocks targets_; ///< of the calls in progress
  bool wanted_ = false;    ///< the calls are made, and the hub has not reported them done
  bool sending_ = false;
  bool receiving_ = false; ///< into `targets_`
  bool ending_ = false;    ///< a thread is in `end`
};

} // namespace troupe::detail
