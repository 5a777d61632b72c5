/// One connection of an agent with its parent, as the parent sees it.
#pragma once

#include "hosts/frame_link.hpp"
#include "hosts/messages.hpp"
#include "hosts/worker_relay.hpp"

#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>

namespace troupe::detail {

/// @thread any, unless a function says otherwise
class host_session : public std::enable_shared_from_this<host_session> {
public:
  /// All are called on the connection's thread, and must not block.
  struct owner {
    /// An agent of this version has said its name.
    /// @return what it is told; an error: it is not wanted
    std::function<caf::expected<host_welcome>(const std::string& name)> greet;
    /// It brings so many devices, and can start their workers.
    /// @return an error: it is not wanted
    std::function<caf::error(host_session&, int devices)> joined;
    /// A program in the worker of a device says something.
    std::function<void(host_session&, int device, std::span<const std::byte>)> told;
    /// It is no more, or never was more than a stranger. The last call, before its workers' loss
    /// is told.
    std::function<void(host_session&, const caf::error&)> ended;
  };

  /// @errors errc::unavailable
  static caf::expected<std::shared_ptr<host_session>> start(std::shared_ptr<tls_context> context,
                                                            file_descriptor socket, owner to);
  ~host_session();

  /// The agent's; empty while it is a stranger. @thread the connection's, or after `joined`
  const std::string& name() const noexcept { return name_; }
  bool is_stranger() const noexcept { return phase_.load() == phase::stranger; }
  /// Ends the connection, if it is a stranger's, and does not wait for that. False: it is none.
  bool turn_away(const char* why) noexcept;
  bool is_over() const noexcept { return phase_.load() == phase::over; }

  /// Starts a worker, or a spare. Blocks until it is there, or `stop` wants it no more.
  /// @param device its ordinal on its host; `ordinal`: here
  /// @errors errc::unavailable: why it cannot be started; errc::worker_lost: the host is gone
  caf::expected<std::shared_ptr<worker_relay>> start_worker(int device, int ordinal, bool spare,
                                                            const std::stop_token& stop) noexcept;
  /// The device needs no worker any more: its process ends in good order. Blocks.
  void release(int device) noexcept;
  /// Ends the connection, and returns when nobody is called any more. Not on its thread.
  void stop() noexcept;

private:
  enum class phase : std::uint8_t { stranger, greeted, joined, over };

  host_session(owner to, std::string address) noexcept
      : to_(std::move(to)), address_(std::move(address)) {}

  caf::error received(const frame_head& head, std::span<const std::byte> body);
  caf::error take_hello(std::span<const std::byte> body);
  caf::error take_ready(std::span<const std::byte> body);
  caf::error take_answer(std::uint64_t to, std::span<const std::byte> body);
  /// Tells the agent why, and lets it go.
  void refuse(const caf::error& why);
  void ended(const caf::error& why);
  /// Waits for what answers `kind` on a channel, which is given up where `stop` wants it no more.
  caf::error ask(std::uint64_t channel, host_frame kind, std::span<const std::byte> body,
                 const std::stop_token& stop = {}) noexcept;
  void give_up(std::uint64_t channel) noexcept;
  std::shared_ptr<worker_relay> find(std::uint64_t channel);

  const owner to_;
  const std::string address_;
  std::shared_ptr<frame_link> link_;
  std::string name_;
  bool refused_ = false;
  std::atomic<phase> phase_{phase::stranger};

  std::mutex mutex_;
  caf::error why_; ///< it is over
  std::uint64_t last_channel_ = 0;
  std::map<std::uint64_t, std::weak_ptr<worker_relay>> relays_;
  std::map<std::uint64_t, std::promise<caf::error>> questions_;
};

} // namespace troupe::detail
