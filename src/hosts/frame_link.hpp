/// Frames of a bounded size over one connection between hosts, and signs of life when there are
/// none.
#pragma once

#include "core/fair_limit.hpp"
#include "hosts/tls_stream.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

namespace troupe::detail {

/// Stands before each frame.
struct frame_head {
  std::uint32_t size = 0; ///< of the body, in bytes
  std::uint32_t kind = 0; ///< 0: a sign of life, without a body
  std::uint64_t channel = 0;
};

/// One thread does all that concerns the socket. A peer that this side does not know gets no
/// further than the handshake, and none makes this side allocate more than the largest frame.
/// @thread any
class frame_link {
public:
  struct options {
    std::size_t most_bytes = 0; ///< of a frame's body
    /// From the start until somebody calls `admit`.
    std::chrono::nanoseconds admission_limit = std::chrono::seconds{5};
    /// A peer from which nothing comes for so long is taken for lost.
    std::chrono::nanoseconds silence_limit = std::chrono::seconds{3};
  };

  /// Both are called on the link's thread, and must not block.
  struct listener {
    /// An error ends the link.
    std::function<caf::error(const frame_head&, std::span<const std::byte>)> received;
    /// The last call, and why.
    std::function<void(const caf::error&)> ended;
  };

  /// @errors errc::unavailable: the system refuses a thread or an event
  static caf::expected<std::shared_ptr<frame_link>> start(tls_stream stream, options how,
                                                          listener to);
  /// After `stop`, or on another thread than the link's.
  ~frame_link();
  frame_link(const frame_link&) = delete;
  frame_link& operator=(const frame_link&) = delete;

  /// The peer is welcome: from now on its silence counts, and no longer the time since the start.
  void admit(std::chrono::nanoseconds silence_limit) noexcept;

  enum class patience : std::uint8_t {
    none, ///< for what is small, and rare or an answer
    room  ///< waits while much is queued; never on a link's thread
  };

  /// Queues a frame; it is sent before those that are queued later.
  /// @errors why the link is over
  [[nodiscard]] caf::error send(std::uint32_t kind, std::uint64_t channel,
                                std::initializer_list<std::span<const std::byte>> body,
                                patience wait = patience::none) noexcept;
  /// Ends it with this reason; `listener::ended` hears of it soon.
  void end(const caf::error& why) noexcept;
  /// The same when all is sent that is queued.
  void end_when_sent(const caf::error& why) noexcept;
  /// Ends it, and returns when nobody is called any more. Not on the link's thread.
  void stop() noexcept;

  /// Address and certificate of the peer. On the link's thread, when something was received.
  std::string peer() const;

private:
  using clock = std::chrono::steady_clock;

  frame_link(tls_stream stream, options how, listener to, wake_up wake) noexcept
      : stream_(std::move(stream)), options_(how), to_(std::move(to)), wake_(std::move(wake)) {}

  void run() noexcept;
  caf::error serve();
  /// Waits for the socket or a wake-up, not past `until`, nor for long.
  caf::error wait(short events, clock::time_point until);
  caf::error shake_hands();
  caf::error read();
  caf::error take(std::size_t got);
  caf::error write();
  /// More to write, if there is; or why it is over.
  caf::error refill();
  caf::error judge_time(clock::time_point now);
  /// When a limit will be over that counts from `since` on.
  clock::time_point end_of(std::chrono::nanoseconds limit, clock::time_point since) const noexcept;

  tls_stream stream_; // of the thread
  const options options_;
  const listener to_;
  const wake_up wake_;
  std::atomic<std::int64_t> silence_limit_ns_{0}; ///< 0: not admitted
  clock::time_point begun_{};
  clock::time_point heard_{};
  running_time time_{std::chrono::milliseconds{50}};
  clock::time_point told_{};
  short wanted_ = 0; ///< what the last attempts to read or to write wait for
  frame_head head_;
  bool in_body_ = false;
  std::vector<std::byte> body_;
  std::size_t filled_ = 0; ///< of the head, or of the body
  std::vector<std::byte> writing_;
  std::size_t written_ = 0;

  std::mutex mutex_;
  std::condition_variable room_;
  std::deque<std::vector<std::byte>> queue_;
  std::size_t queued_bytes_ = 0;
  std::optional<caf::error> end_;      ///< somebody wants it
  std::optional<caf::error> last_end_; ///< the same, when all is sent
  caf::error why_;
  bool over_ = false;

  std::thread thread_;
};

} // namespace troupe::detail
