/// Frames of limited size over one connection between hosts, and signs of life when there are no
/// frames.
#pragma once

#include "foundation/fair_limit.hpp"
#include "net/tls_stream.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace troupe::detail {

/// The header of a frame.
struct frame_head {
  std::uint32_t size = 0; ///< of the body, in bytes
  std::uint32_t kind = 0; ///< 0: a sign of life, without a body
  std::uint64_t channel = 0;
};

/// One thread does all work on the socket. An unknown peer gets no further than the handshake. No
/// peer makes this side allocate more than the largest frame.
/// @thread any
class frame_link {
public:
  struct options {
    std::size_t most_bytes = 0; ///< of a frame's body
    /// From the start until the call of `admit`, or of `expect`.
    std::chrono::nanoseconds admission_limit = std::chrono::seconds{5};
  };

  /// Both are called on the link's thread, and must not block.
  struct listener {
    /// Handles a frame. An error ends the link.
    std::function<caf::error(const frame_head&, std::span<const std::byte>)> received;
    /// The last call, with the reason.
    std::function<void(const caf::error&)> ended;
  };

  /// Sets `into` before the first call of the listener.
  /// @errors errc::unavailable: no thread can be started, or no event created
  static caf::error start(std::shared_ptr<frame_link>& into, tls_stream stream, options how,
                          listener to);
  /// Called after `stop`, or on a thread other than the link's.
  ~frame_link();
  frame_link(const frame_link&) = delete;
  frame_link& operator=(const frame_link&) = delete;

  /// Gives the peer this long from now until the call of `admit`. @thread the link's
  void expect(std::chrono::nanoseconds limit) noexcept;
  /// Accepts the peer: from now on its silence is limited, not the time since the start. The same
  /// limit holds for a time in which it reads nothing of what is sent.
  void admit(std::chrono::nanoseconds silence_limit) noexcept;
  /// Returns whether each side has shown the other a valid certificate.
  bool is_authenticated() const noexcept { return authenticated_.load(); }
  /// Returns whether the peer has shown a certificate, right or wrong. On the link's thread.
  bool has_certificate() const noexcept { return stream_.has_certificate(); }

  enum class patience : std::uint8_t {
    none, ///< for small frames that are rare, or answers
    room  ///< waits while much is queued; never on a link's thread
  };

  /// Queues a frame. Frames are sent in the order in which they are queued.
  /// @errors the reason why the link is over; errc::out_of_range: the frame is too large
  [[nodiscard]] caf::error send(std::uint32_t kind, std::uint64_t channel,
                                std::initializer_list<std::span<const std::byte>> body,
                                patience wait = patience::none) noexcept;
  /// Ends the link with this reason, which `listener::ended` soon gets.
  void end(const caf::error& why) noexcept { end_with(end_, why); }
  /// Same, when all queued frames and this one are sent.
  void send_last(std::uint32_t kind, std::span<const std::byte> body,
                 const caf::error& why) noexcept;
  /// Ends the link. Blocks until all callbacks have returned. Not called on the link's thread.
  void stop() noexcept;

  /// Returns the peer's address and certificate subject. On the link's thread, after a frame came.
  std::string peer() const;
  /// Returns the names in its certificate. The same.
  std::vector<std::string> peer_names() const { return stream_.peer_names(); }

private:
  using clock = std::chrono::steady_clock;

  frame_link(tls_stream stream, options how, listener to, wake_up wake) noexcept
      : stream_(std::move(stream)), options_(how), to_(std::move(to)), wake_(std::move(wake)) {}

  void end_with(std::optional<caf::error>& reason, const caf::error& why) noexcept;
  void run() noexcept;
  caf::error serve();
  /// Waits for the socket or a wake-up, until `until`.
  caf::error wait(clock::time_point until);
  caf::error read();
  caf::error take(std::size_t got);
  caf::error write();
  /// Takes all queued frames for writing. Returns why the link must end, or none.
  caf::error refill();

  /// Returns why the peer's time is over, or none. `left`: how much of it is left.
  caf::error check_limits(clock::time_point now, std::chrono::nanoseconds& left) const;

  tls_stream stream_; // used by the thread
  const options options_;
  const listener to_;
  const wake_up wake_;
  std::atomic<std::int64_t> silence_limit_ns_{0}; ///< 0: not admitted
  std::atomic<bool> authenticated_{false};
  // used by the thread
  clock::time_point expected_from_{}; ///< it is to be admitted within `admission_limit_` of this
  std::chrono::nanoseconds admission_limit_{options_.admission_limit};
  clock::time_point heard_{};
  running_time time_{std::chrono::milliseconds{50}};
  clock::time_point told_{};
  short wanted_ = 0; ///< events that the last read and write wait for
  frame_head head_;
  bool in_body_ = false;
  std::vector<std::byte> body_;
  std::size_t filled_ = 0; ///< bytes of the head, or of the body
  std::vector<std::byte> writing_;
  std::size_t written_ = 0;

  std::mutex mutex_;
  std::condition_variable room_;
  std::vector<std::byte> queue_;       ///< frames
  std::optional<caf::error> end_;      ///< requested end
  std::optional<caf::error> last_end_; ///< requested end when all is sent
  caf::error why_;
  bool over_ = false;

  std::thread thread_;
};

} // namespace troupe::detail
