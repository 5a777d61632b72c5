/// Messages between two processes of a host, with descriptors.
#pragma once

#include "core/file_descriptor.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace troupe::detail {

using time_limit = std::chrono::steady_clock::time_point;
inline constexpr time_limit no_limit = time_limit::max();

/// What a receiver got.
struct received {
  enum class kind : std::uint8_t {
    message,
    end,        ///< the peer has closed its end, or is no more
    interrupted ///< somebody on this side wants no more
  };

  kind what = kind::message;
  std::size_t size_bytes = 0;
  /// None is inherited by a program that is started. None at all where this process has no room for
  /// all that came: whoever needs them says so.
  std::vector<file_descriptor> descriptors;
  std::size_t refused = 0; ///< descriptors that came beyond those asked for; they are closed
};

/// One end of a connection that keeps the bounds of messages.
/// @thread one receives, one sends, any interrupts, at the same time
class message_socket {
public:
  /// Linux takes no more in a message.
  static constexpr std::size_t most_descriptors = 253;

  /// Both ends.
  static caf::expected<std::pair<message_socket, message_socket>> pair();

  /// Takes over an end that this process was started with.
  /// @errors errc::invalid_argument: it is none; it is left as it was
  static caf::expected<message_socket> adopt(int end);

  /// Waits while the peer has not read enough of what was sent before. The descriptors remain the
  /// sender's, too.
  /// @errors errc::unavailable: the peer is no more, or the socket was interrupted;
  ///         errc::invalid_argument: no byte, or too many descriptors; errc::out_of_range: more
  ///         bytes than a message can have; errc::deadline_exceeded. Nothing of it is sent.
  [[nodiscard]] caf::error send(std::span<const std::byte> bytes,
                                std::span<const int> descriptors = {}, time_limit until = no_limit);

  /// Waits for a message, and puts it at the begin of `into`.
  /// @errors errc::out_of_range: the message had more bytes; it is lost, the next can be received.
  ///         errc::deadline_exceeded.
  caf::expected<received> receive(std::span<std::byte> into, std::size_t descriptors = 0,
                                  time_limit until = no_limit);

  /// Whoever waits in `receive` or `send` comes back, and whoever comes later does not wait. The
  /// peer sees nothing of it.
  /// @thread any; a signal handler too
  void interrupt() const noexcept { interrupt_.signal(); }

  /// Is the peer no more, or has it closed its end? What it has sent may still be there.
  /// @thread any
  bool is_at_end() const noexcept;

  /// To be polled for its end alone (POLLRDHUP), by threads that do not receive.
  int native() const noexcept { return end_.get(); }

private:
  message_socket(file_descriptor end, wake_up interrupt) noexcept
      : end_(std::move(end)), interrupt_(std::move(interrupt)) {}

  enum class wait_result : std::uint8_t { ready, interrupted, late };
  caf::expected<wait_result> wait(short events, time_limit until) const;

  file_descriptor end_;
  wake_up interrupt_;
};

/// What `poll` takes: milliseconds, rounded up; -1 for `no_limit`.
int poll_limit(time_limit until) noexcept;

} // namespace troupe::detail
