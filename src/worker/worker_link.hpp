/// The parent's end of what it shares with one worker process.
#pragma once

#include "worker/link_area.hpp"
#include "worker/protocol.hpp"
#include <troupe/backend.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace troupe::detail {

/// How messages of `control` get to a worker. @thread any
class control_sender {
public:
  virtual ~control_sender() = default;
  /// @errors errc::deadline_exceeded: it reads none; errc::worker_lost: it has ended, and whoever
  ///         looks after it tells the link; others: this message cannot be sent
  [[nodiscard]] virtual caf::error send(std::span<const std::byte> message,
                                        std::optional<int> descriptor) noexcept = 0;
  /// Ends the worker at once, which nobody hears any more; it does not wait for who sends. Where
  /// that cannot be done, whoever looks after it does it when he finds the link lost.
  virtual void kill() noexcept {}
  /// It is known to have ended, though the link may not have been told yet.
  virtual bool has_ended() const noexcept { return false; }
};

/// What everybody is told whose device was in a worker that ended because of `cause`.
caf::error lost_worker(int device, const caf::error& cause);

/// One life of a worker: commands of the device's lane by the ring, requests of any thread by the
/// socket. Once it is lost, everything gives the error that says why, at once. Nothing that the
/// worker writes can harm: if it makes no sense, the worker is lost.
class worker_link final : public device_life, public std::enable_shared_from_this<worker_link> {
public:
  /// @param area zeroed memory that both share; `keep` keeps it
  worker_link(int device, link_area& area, std::shared_ptr<void> keep,
              std::unique_ptr<control_sender> control);

  int device() const noexcept { return device_; }
  /// How long who asks by the ring stays awake for the reply. Before the first command.
  void set_spin(std::chrono::nanoseconds x) noexcept { spin_ = x; }
  /// How long a request waits for its reply if nobody says otherwise; 0: for ever. A command waits
  /// twice as long: whoever looks after the process knows by then what it hangs in. Before the
  /// first.
  void set_request_limit(std::chrono::nanoseconds x) noexcept { request_limit_ = x; }

  /// `f` hears what the worker's programs send, on the thread that receives. Before the first.
  void set_listener(std::function<void(std::span<const std::byte>)> f) { listener_ = std::move(f); }

  // -- the lane

  /// Without a reply.
  template <wire_value T> caf::error tell(command what, const T& arguments) noexcept {
    return write(what, false, bytes_of(arguments), {}, command_limit());
  }
  /// Waits for the reply, which stays readable until the next command.
  /// @errors what the worker says; errc::worker_lost
  template <wire_value T>
  caf::expected<wire_reader> ask(command what, const T& arguments,
                                 std::span<const std::byte> more = {},
                                 std::chrono::nanoseconds limit = {}) noexcept {
    return ask_bytes(what, bytes_of(arguments), more, limit);
  }
  /// `limit`: after it the worker is given up; 0: the usual one
  caf::expected<wire_reader> ask_bytes(command what, std::span<const std::byte> first,
                                       std::span<const std::byte> more = {},
                                       std::chrono::nanoseconds limit = {}) noexcept;
  /// The same, where the reply is nothing but an error or none.
  template <wire_value T>
  caf::error run(command what, const T& arguments, std::span<const std::byte> more = {},
                 std::chrono::nanoseconds limit = {}) noexcept {
    auto reply = ask(what, arguments, more, limit);
    return reply ? caf::error{} : reply.error();
  }

  /// Numbers of events, and of their records.
  std::optional<std::uint64_t> take_event() noexcept;
  void give_back_event(std::uint64_t event) noexcept;
  std::uint64_t next_record(std::uint64_t event) noexcept { return ++records_[event]; }
  bool is_done(std::uint64_t event, std::uint64_t record) noexcept {
    const auto done = area_.done[event].load(std::memory_order_acquire);
    if (done > records_[event] && !lost())
      give_up_nonsense("what was never recorded is done");
    return done >= record;
  }

  // -- any thread

  /// How often a rank of a communicator had an error that no call gave.
  std::uint64_t communicator_errors() const noexcept {
    return area_.communicator_errors.load(std::memory_order_acquire);
  }
  const std::atomic<std::uint64_t>& done_word(std::uint64_t event) const noexcept {
    return area_.done[event];
  }

  /// Waits for the reply. A worker that does not give it within `limit` is given up; 0: none.
  /// @errors what the worker says; errc::worker_lost
  caf::expected<std::vector<std::byte>> request(control what, std::span<const std::byte> body,
                                                std::optional<int> descriptor,
                                                std::chrono::nanoseconds limit) noexcept;
  caf::expected<std::vector<std::byte>> request(control what, std::span<const std::byte> body,
                                                std::optional<int> descriptor = {}) noexcept {
    return request(what, body, descriptor, request_limit_);
  }
  template <wire_value T>
  caf::expected<std::vector<std::byte>> request(control what, const T& body,
                                                std::optional<int> descriptor = {}) noexcept {
    return request(what, bytes_of(body), descriptor);
  }
  /// The same without waiting: `then` hears of the reply, on the thread that receives, or of the
  /// loss.
  void request(control what, std::span<const std::byte> body, std::optional<int> descriptor,
               std::function<void(caf::expected<std::vector<std::byte>>)> then) noexcept;

  /// The same where nobody needs the reply: a worker that answers with an error is given up.
  /// @errors errc::invalid_argument: too long; errc::worker_lost
  caf::error send(control what, std::span<const std::byte> body) noexcept;

  /// Ends the worker, which is lost because of `why`.
  void give_up(const caf::error& why) noexcept;
  /// The same, for what it did not do within `limit`: "to ...".
  void give_up_late(std::string_view what, std::chrono::nanoseconds limit) noexcept;
  /// The same, for what it wrote.
  void give_up_nonsense(std::string_view what) noexcept;

  bool lost() const noexcept override { return lost_.load(std::memory_order_acquire); }
  bool has_ended() const noexcept override { return control_->has_ended(); }
  caf::error loss() const;
  /// `f` hears of the loss, once, perhaps at once. Returns its number.
  std::uint64_t on_loss(std::function<void(const caf::error&)> f);
  /// Who has this number need not hear of it any more; it may just be hearing.
  void forget(std::uint64_t listener) noexcept;

  // -- whoever looks after the process

  void received(std::span<const std::byte> message) noexcept;
  void lose(const caf::error& why) noexcept { lose(why, false); }
  /// The process is no more, and so has written its last; it is lost.
  void gone() noexcept;
  /// Returns when nobody is told of the loss any more; not on a thread that is.
  void wait_until_told() noexcept;

private:
  using reply_handler = std::function<void(caf::expected<std::vector<std::byte>>)>;

  caf::error write(command what, bool wants_reply, std::span<const std::byte> first,
                   std::span<const std::byte> more, std::chrono::nanoseconds limit) noexcept;
  bool wait_for_reply(command what, std::chrono::nanoseconds limit) noexcept;
  std::chrono::nanoseconds command_limit() const noexcept {
    constexpr auto most = std::chrono::nanoseconds::max();
    return request_limit_ < most / 2 ? 2 * request_limit_ : most;
  }
  void lose(const caf::error& why, bool kills) noexcept;
  void end_waiting() noexcept;
  /// What this process is told of an error of the worker's, which ends after some.
  caf::error heard(const caf::error& error) noexcept;

  const int device_;
  link_area& area_;
  const std::shared_ptr<void> keep_;
  const std::unique_ptr<control_sender> control_;
  std::chrono::nanoseconds spin_{0};
  std::chrono::nanoseconds request_limit_{0};
  std::function<void(std::span<const std::byte>)> listener_;
  command_ring ring_;
  std::uint64_t last_command_ = 0;
  std::vector<std::byte> reply_;
  std::vector<std::uint64_t> records_;
  std::vector<std::uint64_t> free_events_;

  std::atomic<bool> lost_{false};
  mutable std::mutex mutex_;
  caf::error why_;
  std::uint64_t last_request_ = 0;
  struct open_request {
    control kind{};
    reply_handler then;
  };
  std::map<std::uint64_t, open_request> open_;
  std::map<std::uint64_t, std::function<void(const caf::error&)>> on_loss_; ///< by their numbers
  std::uint64_t last_listener_ = 0;
  std::condition_variable told_;
  std::thread::id telling_; ///< who tells, if anybody does
};

} // namespace troupe::detail
