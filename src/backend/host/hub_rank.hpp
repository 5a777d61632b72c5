/// A rank of another process, on the hub's side.
#pragma once

#include "backend/host/host_group.hpp"
#include "backend/host/host_wire.hpp"

#include <caf/error.hpp>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace troupe::detail {

/// Makes a rank's calls in the group, and sends the results to the rank.
/// @thread the hub's, which also reads from the socket
class hub_rank {
public:
  /// `stopped` is called on another thread when `finished` becomes true, or the group ends.
  hub_rank(std::shared_ptr<host_group> group, int rank, int socket, std::function<void()> stopped);
  /// Blocks until the thread has ended. Called after `finished`, or after the socket is shut down
  /// and the group has ended.
  ~hub_rank();
  hub_rank(const hub_rank&) = delete;
  hub_rank& operator=(const hub_rank&) = delete;

  /// @errors errc::nccl_error: no thread can be started
  [[nodiscard]] caf::error start() noexcept;

  /// Returns false if earlier calls are not done.
  [[nodiscard]] bool make_calls(std::unique_ptr<remote_calls> calls) noexcept;

  /// Notes that the rank needs no more replies.
  void leave() noexcept;
  /// Wakes the thread, which tells the rank why the group has ended.
  void tell_end() noexcept;

  /// Returns true when nothing more is sent.
  bool finished() const noexcept;

private:
  void run() noexcept;
  /// Returns false if the connection is lost, or the group has ended.
  bool make(const remote_calls& calls) noexcept;

  const std::shared_ptr<host_group> group_;
  const int rank_;
  const int socket_;
  const std::function<void()> stopped_;
  std::uint64_t sequence_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<remote_calls> calls_;
  bool making_calls_ = false;
  bool left_ = false;
  bool finished_ = false;
  std::thread thread_;
};

} // namespace troupe::detail
