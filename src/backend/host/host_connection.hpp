/// One rank's way to a hub in some process, where the ranks of its communicator meet.
#pragma once

#include "host_transport.hpp"
#include "host_wire.hpp"
#include "socket.hpp"

#include <caf/error.hpp>
#include <caf/expected.hpp>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace troupe::detail {

/// Ranks of this process that wait for those of others, by their sockets. @thread any
class waiting_room {
public:
  /// False: it is closed.
  bool enter(int socket);
  /// Before the sockets are closed. False: who was in it has been sent away.
  bool leave(std::span<const int> sockets) noexcept;
  /// Whoever is in it hears no more of the hub, which may be gone without a word.
  void close() noexcept;
  bool is_closed() const noexcept;

private:
  mutable std::mutex mutex_;
  std::vector<int> sockets_;
  bool closed_ = false;
};

/// The ranks of a communicator, as one of them sees them over a connection to the hub.
///
/// Nothing here waits for a process that does not answer once the communicator has ended, but for
/// `send_patience`.
class host_connection final : public host_transport {
public:
  /// Connects ranks of this process to a hub; blocks until all ranks of all processes have come, or
  /// `room` is closed.
  /// @shape  size: at most `most_ranks`
  /// @errors errc::invalid_argument: another rank said another size, or a rank is taken;
  ///         errc::nccl_error: there is no hub, or it has gone, or so has the process of a rank;
  ///         errc::unavailable: no thread can be started; any: the room was closed
  static caf::expected<std::vector<std::shared_ptr<host_transport>>>
  build(const hub_invitation& where, int size, std::span<const local_rank> ranks,
        waiting_room& room) noexcept;

  host_connection(file_descriptor socket, int size, int rank) noexcept;
  ~host_connection() override;
  host_connection(const host_connection&) = delete;
  host_connection& operator=(const host_connection&) = delete;

  int size() const noexcept override { return size_; }
  caf::error register_window(int rank, const void* memory,
                             std::size_t size_bytes) noexcept override;
  caf::error deregister_window(int rank, const void* memory) noexcept override;
  host_place place_of(int rank, const void* memory, std::size_t size_bytes) const noexcept override;
  bool has_symmetric() const noexcept override;
  caf::error announce(int rank, std::span<const host_call> calls) noexcept override;
  void retract() noexcept override;
  void run(int rank, std::uint64_t sequence, std::span<const host_call> calls) noexcept override;
  caf::error error() const noexcept override;
  void end(caf::error why) noexcept override;
  void wait_quiet() noexcept override;
  void wait_idle() noexcept override;
  void leave(int rank) noexcept override;

private:
  using lock = std::unique_lock<std::mutex>;

  struct window {
    std::uint64_t number;
    const std::byte* memory;
    std::size_t size_bytes;
  };

  /// Starts to read what comes.
  caf::error start() noexcept;
  void read() noexcept;
  /// False: the connection is over.
  bool take(const frame_header& header) noexcept;
  bool take_done(const frame_header& header) noexcept;
  void take_end() noexcept;

  /// Sends as nobody else does at the same time. False: the communicator has ended.
  bool send(lock& guard, const const_blocks& blocks) noexcept;
  void make_calls(lock& guard, std::span<const host_call> calls) noexcept;
  void end_locked(caf::error why) noexcept;
  /// Joins the thread, and closes the socket; after `end`, or when the hub has ended it.
  void close() noexcept;

  const int size_;
  const int rank_;
  file_descriptor socket_;
  std::thread reader_;
  std::once_flag closed_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t turn_ = 0; ///< sequence number of the calls that are next
  mutable_blocks targets_; ///< of the calls that are being made
  bool wanted_ = false;    ///< the calls are made, and the hub has not told that they are done
  bool sending_ = false;
  bool receiving_ = false; ///< into `targets_`
  std::vector<window> windows_;
  std::uint64_t last_window_ = 0;
  bool window_wanted_ = false;
  int symmetric_ = 0; ///< symmetric calls inside `run`
  int inside_ = 0;
  std::uint64_t announced_ = 0; ///< and not yet done
  bool ending_ = false;         ///< somebody is in `end`
  std::atomic<bool> ended_{false};
  caf::error why_;
};

} // namespace troupe::detail
