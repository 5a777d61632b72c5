/// Where ranks of several processes meet: a socket that listens, and a group for each communicator.
#pragma once

#include "host_wire.hpp"
#include "socket.hpp"
#include <troupe/backend.hpp>

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

/// Takes in ranks that know the secret, and runs their calls in an ordinary `host_group`: one
/// thread listens and reads for all, and each rank has one that makes its calls.
/// @thread any
class host_hub {
public:
  /// @errors errc::invalid_argument: not the numeric address of one host; errc::unavailable: nobody
  ///         can listen there, or there is no thread
  static caf::expected<std::unique_ptr<host_hub>> start(const std::string& address) noexcept;

  /// Ends all its communicators.
  ~host_hub();
  host_hub(const host_hub&) = delete;
  host_hub& operator=(const host_hub&) = delete;

  /// Invites the ranks of one more communicator.
  hub_invitation invite() noexcept;
  /// Is it one of its own?
  bool has_invited(const hub_invitation& x) const noexcept;
  /// A communicator that it has invited to, and which is not whole yet, never will be.
  void call_off(std::uint64_t group) noexcept;

private:
  using clock = std::chrono::steady_clock;

  struct meeting;

  /// What a guest is to send next.
  enum class stage : std::uint8_t {
    hello,
    header,
    head,
    data,
    nothing, ///< what comes is dropped, up to the end
    over     ///< it has ended its side
  };

  /// A connection, of a stranger until it has said the secret.
  struct guest {
    explicit guest(file_descriptor x) noexcept;
    guest(const guest&) = delete;
    guest& operator=(const guest&) = delete;
    ~guest();

    file_descriptor socket;
    stage next = stage::hello;
    mutable_blocks targets; ///< what is to be filled; `filled` is the first that is not
    std::size_t filled = 0;
    wire_hello hello;
    frame_header header;
    std::vector<std::byte> head;
    std::unique_ptr<remote_calls> calls;
    clock::time_point until = clock::time_point::max(); ///< then it is cut off
    std::shared_ptr<meeting> met;                       ///< none: a stranger, or one that is to go
    std::unique_ptr<hub_rank> rank;                     ///< from when all ranks are there
    bool heard = false;                                 ///< what it sent first, if anything
    bool left = false;                                  ///< in good order
    bool told = false;                                  ///< its rank knows that the group has ended
  };

  host_hub(file_descriptor listener, wake_up wake, socket_address address);

  void run() noexcept;
  /// Blocks until there is something to do, and takes in what comes.
  void serve() noexcept;
  int patience(clock::time_point now) const noexcept;
  void accept() noexcept;
  /// Does what its time or its rank asks for. False: it is to go.
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
  /// The guest has ended its side, or the connection is lost.
  void lost(guest& x) noexcept;
  void leave(guest& x) noexcept;
  /// The group ends, for what the rank said.
  void end(guest& x) noexcept;
  void misbehaved(guest& x, const char* how) noexcept;

  caf::error join(guest& x);
  void open(meeting& x) noexcept;
  void call_off_unwanted() noexcept;
  /// Ends it before all ranks have come.
  void call_off(meeting& x, const caf::error& why) noexcept;
  void remember(std::uint64_t group, const caf::error& why);
  /// Sends it away with the reason.
  void dismiss(guest& x, const caf::error& why) noexcept;
  /// Waits for the end of its side, for a while.
  void see_out(guest& x) noexcept;
  /// It belongs to no communicator any more.
  void part(guest& x) noexcept;

  file_descriptor listener_;
  wake_up wake_;
  socket_address address_;
  std::array<std::byte, 32> secret_{};
  std::atomic<std::uint64_t> next_{1};
  std::atomic<bool> stopping_{false};
  std::mutex unwanted_mutex_;
  std::vector<std::uint64_t> unwanted_; ///< groups that are to be called off

  // Only of the thread.
  bool stopped_ = false;
  clock::time_point accept_from_{}; ///< there were too many files
  std::list<guest> guests_;
  std::map<std::uint64_t, std::shared_ptr<meeting>>
      meetings_;                                   ///< by number; not those that are over
  std::map<std::uint64_t, caf::error> called_off_; ///< by number; the last ones

  std::thread thread_;
};

} // namespace troupe::detail
