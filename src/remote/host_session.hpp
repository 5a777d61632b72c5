/// The parent's side of a connection with an agent.
#pragma once

#include "foundation/log.hpp"
#include "net/frame_link.hpp"
#include "remote/messages.hpp"
#include "remote/stranger_limits.hpp"
#include "remote/worker_relay.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>

namespace troupe::detail {

/// @thread any, unless a function says otherwise
class host_session : public std::enable_shared_from_this<host_session> {
public:
  /// All functions are called on the connection's thread, and must not block.
  struct owner {
    /// An agent of this version has sent its name.
    /// @return the welcome to send, or an error to refuse the agent
    std::function<caf::expected<host_welcome>(host_session&, const std::string& name)> greet;
    /// The agent has `devices` devices, and can start their workers.
    /// @return an error to refuse the agent
    std::function<caf::error(host_session&, int devices)> joined;
    /// A program in a device's worker has sent bytes.
    std::function<void(host_session&, int device, std::span<const std::byte>)> told;
    /// The connection is over, also that of a stranger. The last call; it comes before the loss of
    /// its workers is reported.
    std::function<void(host_session&, const caf::error&)> ended;
  };

  /// How long this side waits for the agent.
  struct limits {
    std::chrono::nanoseconds join;    ///< from its name until its devices
    std::chrono::nanoseconds start;   ///< for the start of a worker
    std::chrono::nanoseconds release; ///< for the end of a worker
    std::chrono::nanoseconds request; ///< for the answer of a worker; 0: no limit
  };

  /// `address`: of the other end. @errors errc::unavailable
  static caf::expected<std::shared_ptr<host_session>> start(std::shared_ptr<tls_context> context,
                                                            file_descriptor socket,
                                                            const socket_address& address,
                                                            const limits& how, owner to);
  ~host_session();

  /// Returns the agent's name; empty for a stranger. @thread the connection's, or after `joined`
  const std::string& name() const noexcept { return name_; }
  /// Returns what a line of the log about the end of the connection is about. @thread same
  log_kind kind_of_line() const noexcept;
  /// Returns none if it is not a stranger's connection any more.
  std::optional<stranger> as_stranger() const noexcept;
  /// Ends the connection of a stranger without waiting. Returns false if it is not a stranger's.
  bool turn_away(const char* why) noexcept;
  /// Ends the connection without waiting.
  void end(const caf::error& why) noexcept { link_->end(why); }
  bool is_over() const noexcept { return phase_.load() == phase::over; }

  /// Starts a worker, or a spare. Blocks until it has started, or `stop` is requested.
  /// @param device its ordinal on its host; `ordinal`: in this process
  /// @errors errc::unavailable: it cannot be started, with the reason; errc::worker_lost: the host
  ///         is gone
  caf::expected<std::shared_ptr<worker_relay>> start_worker(int device, int ordinal, bool spare,
                                                            const std::stop_token& stop) noexcept;
  /// Ends the device's worker process in good order. Blocks.
  void release(int device) noexcept;
  /// Ends the connection. Blocks until all callbacks have returned. Not called on its thread.
  void stop() noexcept;

private:
  enum class phase : std::uint8_t { stranger, greeted, joined, over };
  using question_map = std::map<std::uint64_t, std::promise<caf::error>>; // by channel

  host_session(owner to, const limits& how, const socket_address& address) noexcept
      : to_(std::move(to)), limits_(how), address_(address) {}

  caf::error received(const frame_head& head, std::span<const std::byte> body);
  caf::error take_hello(std::span<const std::byte> body);
  caf::error take_ready(std::span<const std::byte> body);
  caf::error take_answer(std::uint64_t to, std::span<const std::byte> body);
  /// Sends the agent the reason, then ends the connection. Returns no error, since an error would
  /// end it at once.
  caf::error refuse(const caf::error& why);
  void ended(const caf::error& why);
  /// Sends a request and waits for the answer. Gives up the channel if `stop` is requested, or if
  /// there is no answer within `limit`. If that is the second time in a row, the connection ends.
  /// `what`: the request, for the error.
  caf::error ask(std::uint64_t channel, host_frame kind, std::span<const std::byte> body,
                 const char* what, std::chrono::nanoseconds limit,
                 const std::stop_token& stop = {}) noexcept;
  void give_up(std::uint64_t channel, const caf::error& why) noexcept;
  /// Removes the question, if it is open.
  question_map::node_type take_question(std::uint64_t channel);
  std::shared_ptr<worker_relay> find(std::uint64_t channel);

  const owner to_;
  const limits limits_;
  const socket_address address_;
  std::shared_ptr<frame_link> link_;
  std::string name_;
  std::chrono::nanoseconds silence_limit_{}; ///< once it has joined
  bool refused_ = false;
  std::atomic<phase> phase_{phase::stranger};
  std::atomic<std::uint64_t> last_channel_{0};
  std::atomic<int> unanswered_{0}; ///< requests in a row

  std::mutex mutex_;
  caf::error why_; ///< set when it is over
  std::map<std::uint64_t, std::weak_ptr<worker_relay>> relays_;
  question_map questions_;
};

} // namespace troupe::detail
