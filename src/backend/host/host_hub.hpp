/// The meeting point of ranks of several processes: a listening socket, and a group for each
/// communicator.
#pragma once

#include "backend/host/host_wire.hpp"
#include "net/socket.hpp"

#include <caf/error.hpp>
#include <caf/expected.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace troupe::detail {

class hub_rank;

/// Accepts ranks that know the secret, and runs their calls in an ordinary `host_group`. One thread
/// listens and reads for all ranks; each rank has a thread that makes its calls.
/// @thread any
class host_hub {
public:
  /// @errors errc::invalid_argument: not the numeric address of one host; errc::unavailable: the
  ///         hub cannot listen there, or no thread can be started
  static caf::expected<std::unique_ptr<host_hub>> start(const std::string& address) noexcept;

  /// Ends all its communicators.
  ~host_hub();
  host_hub(const host_hub&) = delete;
  host_hub& operator=(const host_hub&) = delete;

  /// Returns an invitation for the ranks of a new communicator.
  hub_invitation invite() noexcept;
  /// Returns whether this hub made the invitation.
  bool has_invited(const hub_invitation& x) const noexcept;
  /// Cancels a communicator of this hub, unless all its ranks are connected.
  void call_off(std::uint64_t group) noexcept;

private:
  using clock = std::chrono::steady_clock;

  struct meeting;

  /// The next part that a guest must send.
  enum class stage : std::uint8_t {
    hello,
    header,
    head,
    data,
    nothing, ///< input is dropped up to its end
    over     ///< the guest has closed its side
  };

  /// A connection: a stranger until it has sent the secret.
  struct guest {
    explicit guest(file_descriptor x) noexcept;
    guest(const guest&) = delete;
    guest& operator=(const guest&) = delete;
    ~guest();

    file_descriptor socket;
    stage next = stage::hello;
    mutable_blocks targets; ///< blocks to fill; the first `filled` are full
    std::size_t filled = 0;
    wire_hello hello;
    frame_header header;
    std::vector<std::byte> head;
    std::unique_ptr<remote_calls> calls;
    clock::time_point until = clock::time_point::max(); ///< then the hub closes the connection
    std::shared_ptr<meeting> met;                       ///< null: a stranger, or a leaving guest
    std::unique_ptr<hub_rank> rank;                     ///< set once all ranks are connected
    bool heard = false;                                 ///< its first input, if any, was read
    bool left = false;                                  ///< the rank has left in good order
    bool told = false;                                  ///< its rank knows that the group has ended
  };

  host_hub(file_descriptor listener, wake_up wake, socket_address address);

  void run() noexcept;
  /// Blocks until there is work, and reads the input.
  void serve() noexcept;
  int patience(clock::time_point now) const noexcept;
  void accept() noexcept;
  /// Handles the guest's time limit and its rank. Returns false if the guest must be removed.
  bool look_after(guest& x) noexcept;
  void stop_all() noexcept;

  void read(guest& x) noexcept;
  void take_in(guest& x) noexcept;
  void take_hello(guest& x) noexcept;
  void take_header(guest& x) noexcept;
  void take_head(guest& x) noexcept;
  void take_data(guest& x) noexcept;
  void expect(guest& x, stage next, mutable_blocks targets) noexcept;
  void expect_header(guest& x) noexcept;
  /// Handles a guest that has closed its side, or whose connection is lost.
  void lost(guest& x) noexcept;
  void leave(guest& x) noexcept;
  /// Ends the group with the error that the rank has sent.
  void end(guest& x) noexcept;
  void misbehaved(guest& x, const char* how) noexcept;

  caf::error join(guest& x);
  void open(meeting& x) noexcept;
  void call_off_unwanted() noexcept;
  /// Ends a communicator before all ranks have connected.
  void call_off(meeting& x, const caf::error& why) noexcept;
  void remember(std::uint64_t group, const caf::error& why);
  /// Refuses a guest and sends it the reason.
  void dismiss(guest& x, const caf::error& why) noexcept;
  /// Waits for a limited time until the guest closes its side.
  void see_out(guest& x) noexcept;
  /// Removes the guest from its communicator.
  void part(guest& x) noexcept;

  file_descriptor listener_;
  wake_up wake_;
  socket_address address_;
  std::array<std::byte, 32> secret_{};
  std::atomic<std::uint64_t> next_{1};
  std::atomic<bool> stopping_{false};
  std::mutex unwanted_mutex_;
  std::vector<std::uint64_t> unwanted_; ///< groups that must be called off

  // Used by the thread only.
  bool stopped_ = false;
  clock::time_point accept_from_{}; ///< later than now after too many open files
  std::list<guest> guests_;
  std::map<std::uint64_t, std::shared_ptr<meeting>> meetings_; ///< by number; without ended ones
  std::map<std::uint64_t, caf::error> called_off_;             ///< by number; the last ones only

  std::thread thread_;
};

} // namespace troupe::detail
