/// Messages, with file descriptors, between two processes of one host.
#pragma once

#include "foundation/file_descriptor.hpp"
#include "foundation/system_call.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace troupe::detail {

/// Result of `message_socket::receive`.
struct received {
  enum class kind : std::uint8_t {
    message,
    end,        ///< the peer has closed its end, or has ended
    interrupted ///< `interrupt` was called on this side
  };

  kind what = kind::message;
  std::size_t size_bytes = 0;
  /// All are close-on-exec. Empty if this process has no room for all of them: a caller that needs
  /// them reports that.
  std::vector<file_descriptor> descriptors;
  std::size_t refused = 0; ///< extra descriptors beyond the number asked for; they were closed
};

/// Returns the descriptors of a message that has one or none. The result refers to `x`.
inline std::span<const int> descriptors_of(const std::optional<int>& x) noexcept {
  return x ? std::span<const int>{&*x, 1} : std::span<const int>{};
}

/// One end of a connection that preserves message boundaries.
/// @thread one receives, one sends and any interrupts, at the same time
class message_socket {
public:
  /// Linux accepts no more per message.
  static constexpr std::size_t most_descriptors = 253;

  /// Creates both ends of a connection.
  static caf::expected<std::pair<message_socket, message_socket>> pair();

  /// Takes over an end that this process was started with.
  /// @errors errc::invalid_argument: it is no such end; it stays as it was
  static caf::expected<message_socket> adopt(int end);

  /// Sends a message. Blocks while the peer has too many unread ones. The sender keeps its
  /// descriptors.
  /// @errors errc::unavailable: the peer has ended, or the socket was interrupted;
  ///         errc::invalid_argument: no byte, or too many descriptors; errc::out_of_range: too many
  ///         bytes; errc::deadline_exceeded. Nothing was sent.
  [[nodiscard]] caf::error send(std::span<const std::byte> bytes,
                                std::span<const int> descriptors = {}, time_limit until = no_limit);

  /// Waits for a message and writes it to the start of `into`.
  /// @errors errc::out_of_range: the message did not fit and is lost; the next can be received.
  ///         errc::deadline_exceeded.
  caf::expected<received> receive(std::span<std::byte> into, std::size_t descriptors = 0,
                                  time_limit until = no_limit);

  /// Makes running calls of `receive` and `send` return, and later calls return without waiting.
  /// The peer does not notice.
  /// @thread any; a signal handler too
  void interrupt() const noexcept { interrupt_.signal(); }

  /// Returns true if the peer has ended or closed its end. Unread messages may still be there.
  /// @thread any
  bool is_at_end() const noexcept;

  /// Returns the descriptor, to be polled for the end (POLLRDHUP) by threads that do not receive.
  int native() const noexcept { return end_.get(); }

private:
  message_socket(file_descriptor end, wake_up interrupt) noexcept
      : end_(std::move(end)), interrupt_(std::move(interrupt)) {}

  enum class wait_result : std::uint8_t { ready, interrupted, late };
  caf::expected<wait_result> wait(short events, time_limit until) const;

  file_descriptor end_;
  wake_up interrupt_;
};

} // namespace troupe::detail
