/// The parent's side of the connection to one worker process.
#pragma once

#include "foundation/file_descriptor.hpp"
#include "worker/parent/open_count.hpp"
#include "worker/protocol/command_ring.hpp"
#include "worker/protocol/protocol.hpp"
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
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace troupe::detail {

/// Sends messages of `control` to a worker. @thread any
class control_sender {
public:
  virtual ~control_sender() = default;
  /// @errors errc::deadline_exceeded: the worker does not read; errc::worker_lost: it has ended,
  ///         and its supervisor tells the link; others: this message cannot be sent
  [[nodiscard]] virtual caf::error send(std::span<const std::byte> message,
                                        std::optional<int> descriptor) noexcept = 0;
  /// Ends the worker at once, without waiting for senders; its messages are ignored. If this fails,
  /// the supervisor ends it when it finds the link lost.
  virtual void kill() noexcept {}
  /// Returns true if the worker has ended. The link may not have been told yet.
  virtual bool has_ended() const noexcept { return false; }
  /// Returns the worker's process id; 0 if it is on another host.
  virtual std::int64_t pid() const noexcept { return 0; }
};

/// The answer of a worker to a request.
struct worker_answer {
  std::vector<std::byte> bytes;
  std::shared_ptr<const file_descriptor> descriptor; ///< null: none came
};
using worker_reply = caf::expected<worker_answer>;

/// A request of the programs in a worker to the parent. A worker makes one at a time.
struct worker_demand {
  control kind{}; ///< `lend` or `take_back`
  std::uint64_t number = 0;
  lent_range range;
};

/// Returns the error for users of a device whose worker ended because of `cause`.
caf::error lost_worker(int device, const caf::error& cause);
/// Returns the error for a device, or for a rank on it, that has no worker.
caf::error lost_worker(int device, std::string detail, int rank = -1);

/// One life of a worker. The device's lane sends commands through the ring, any thread requests
/// through the socket.
/// Once the worker is lost, every call returns the cause at once. Nothing that the worker writes
/// does harm: an impossible value makes it lost.
class worker_link final : public device_life, public std::enable_shared_from_this<worker_link> {
public:
  /// @param area zeroed memory that both share; `keep` keeps it
  worker_link(int device, link_area& area, std::shared_ptr<void> keep,
              std::unique_ptr<control_sender> control);

  int device() const noexcept { return device_; }
  /// Sets how long `ask` spins for the reply. To be called before the first command.
  void set_spin(std::chrono::nanoseconds x) noexcept { spin_ = x; }
  /// Sets the default limit for a request's reply; 0: none. A command waits twice as long: by then
  /// the supervisor knows the call that the worker hangs in. To be called before the first request.
  void set_request_limit(std::chrono::nanoseconds x) noexcept { request_limit_ = x; }

  /// Returns the limit for a command behind which so many bytes have to be sent, on any network.
  std::chrono::nanoseconds limit_of_copy(std::uint64_t bytes) const noexcept {
    constexpr std::chrono::nanoseconds per_byte{100}; // 10 MB/s
    constexpr auto most = std::chrono::nanoseconds::max() / 2;
    return request_limit_.count() == 0
               ? request_limit_
               : std::min(command_limit(), most) + per_byte * static_cast<std::int64_t>(bytes);
  }

  /// Sets `backend::slab_granularity` of the worker; 0, the default, if this process cannot get its
  /// descriptors. To be called before the first command.
  void set_slab_granularity(std::size_t x) noexcept { slab_granularity_ = x; }
  std::size_t slab_granularity() const noexcept { return slab_granularity_; }
  /// Sets `backend::direct_bytes` of the worker. To be called before the first command.
  void set_direct_bytes(std::size_t x) noexcept { direct_bytes_ = x; }
  std::size_t direct_bytes() const noexcept { return direct_bytes_; }

  /// Sets the receiver of messages from the worker's programs, on the receiving thread. To be
  /// called before the first message.
  void set_listener(std::function<void(std::span<const std::byte>)> f) { listener_ = std::move(f); }

  using demand_handler = std::function<void(std::shared_ptr<worker_link>, const worker_demand&)>;
  /// Sets the receiver of the requests of the worker's programs, on the receiving thread. An
  /// earlier request waits for it. The receiver calls `answer`.
  /// @thread any
  void set_demand_handler(demand_handler f);
  /// Sends the result of a request.
  /// @thread any
  void answer(const worker_demand& of, const caf::expected<lent_range>& result) noexcept;

  // -- the lane

  /// Enqueues a command without a reply.
  template <wire_value T = no_arguments>
  caf::error tell(command what, const T& arguments = {}) noexcept {
    return write(what, false, bytes_of(arguments), {}, command_limit());
  }
  /// The same if there is room at once. Returns whether it was enqueued.
  bool try_tell_bytes(command what, std::span<const std::byte> body) noexcept;
  /// Enqueues a command and waits for its reply, which is readable until the next one.
  /// @errors errors of the worker; errc::worker_lost
  template <wire_value T = no_arguments>
  caf::expected<wire_reader> ask(command what, const T& arguments = {},
                                 std::span<const std::byte> more = {},
                                 std::chrono::nanoseconds limit = {}) noexcept {
    return ask_bytes(what, bytes_of(arguments), more, limit);
  }
  /// Does the same. After `limit` the worker is given up; 0: the default.
  caf::expected<wire_reader> ask_bytes(command what, std::span<const std::byte> first,
                                       std::span<const std::byte> more = {},
                                       std::chrono::nanoseconds limit = {}) noexcept;
  /// Does the same, for a reply that is only an error or none.
  template <wire_value T = no_arguments>
  caf::error run(command what, const T& arguments = {}, std::span<const std::byte> more = {},
                 std::chrono::nanoseconds limit = {}) noexcept {
    auto reply = ask(what, arguments, more, limit);
    return reply ? caf::error{} : reply.error();
  }

  /// Calls `f`, and returns the commands that it would have sent, as `command::record_graph` has
  /// them. Each gets an empty reply at once. Launches are prepared as usual: that enqueues nothing.
  /// @errors those of `f`. A command that cannot be part of a graph gets errc::not_supported
  caf::expected<wire_writer> collect(const std::function<caf::error()>& f) noexcept;

  /// Allocates a number for an event.
  std::optional<std::uint64_t> take_event() noexcept;
  void give_back_event(std::uint64_t event) noexcept;
  std::uint64_t next_record(std::uint64_t event) noexcept { return ++records_[event]; }
  bool is_done(std::uint64_t event, std::uint64_t record) noexcept {
    const auto done = area_.done[event].load(std::memory_order_acquire);
    if (done > records_[event] && !lost())
      give_up_nonsense("an event is complete that was never recorded");
    return done >= record;
  }
  /// Returns whether the event was done when the worker was lost. Only for a lost worker.
  bool was_done(std::uint64_t event, std::uint64_t record) const noexcept {
    return done_at_loss_[event] >= record && done_at_loss_[event] <= records_[event];
  }

  /// Returns how often a workspace of libraries has changed in the worker, as of its last reply.
  std::uint64_t workspace_changes() const noexcept {
    return area_.workspace_changes.load(std::memory_order_acquire);
  }

  // -- any thread

  /// Returns the number of asynchronous errors of communicator ranks in the worker.
  std::uint64_t communicator_errors() const noexcept {
    return area_.communicator_errors.load(std::memory_order_acquire);
  }
  const std::atomic<std::uint64_t>& done_word(std::uint64_t event) const noexcept {
    return area_.done[event];
  }

  /// As `backend::take_word`. A worker of another host shares no memory with this process.
  std::shared_ptr<const shared_word> take_word(std::uint64_t value);

  /// Waits for the reply. After `limit` the worker is given up; 0: none.
  /// @errors errors of the worker; errc::worker_lost
  worker_reply request(control what, std::span<const std::byte> body, std::optional<int> descriptor,
                       std::chrono::nanoseconds limit) noexcept;
  worker_reply request(control what, std::span<const std::byte> body,
                       std::optional<int> descriptor = {}) noexcept {
    return request(what, body, descriptor, request_limit_);
  }
  template <wire_value T>
  worker_reply request(control what, const T& body, std::optional<int> descriptor = {}) noexcept {
    return request(what, bytes_of(body), descriptor);
  }
  /// Does not wait: `then` gets the reply on the receiving thread, or the loss.
  using reply_handler = std::function<void(worker_reply)>;
  void request(control what, std::span<const std::byte> body, std::optional<int> descriptor,
               reply_handler then) noexcept;

  /// Returns how long a reply may take; 0: as long as it takes.
  std::chrono::nanoseconds request_limit() const noexcept { return request_limit_; }

  /// Sends a request whose reply is not needed. A worker that replies with an error is given up.
  /// @errors errc::invalid_argument: too long; errc::worker_lost
  caf::error send(control what, std::span<const std::byte> body) noexcept;

  /// Ends the worker, which is lost because of `why`.
  void give_up(const caf::error& why) noexcept;
  /// Does the same because the worker missed `limit`. `what`: "to ..."
  void give_up_late(std::string_view what, std::chrono::nanoseconds limit) noexcept;
  /// Does the same because the worker failed at what it must not fail at. `what`: "to ..."
  void give_up_failed(std::string_view what, const caf::error& why) noexcept;
  /// Does the same for an impossible value from the worker.
  void give_up_nonsense(std::string_view what) noexcept;

  /// Counts the ranks of communicators that this process has in the worker.
  open_count& ranks() noexcept { return ranks_; }
  /// Counts those that programs drive, and the lost workers that had ranks with them. Until there
  /// are none, kernels of other devices may write to memory that the programs had.
  open_count& program_ranks() noexcept { return program_ranks_; }
  /// Another worker has the device now. Messages from the programs of this one are ignored, and
  /// later memory of other devices is not mapped there.
  void set_former() noexcept { is_former_.store(true); }
  bool is_former() const noexcept { return is_former_.load(); }

  bool lost() const noexcept override { return lost_.load(std::memory_order_acquire); }
  bool has_ended() const noexcept override { return control_->has_ended(); }
  /// As `control_sender::pid`.
  std::int64_t pid() const noexcept { return control_->pid(); }
  /// Returns why it is lost, or no error.
  caf::error loss() const;
  /// Calls `f` once, on loss; at once if it is lost already. Returns the listener's number.
  std::uint64_t on_loss(std::function<void(const caf::error&)> f);
  /// Removes the listener. A call of it may be running.
  void forget(std::uint64_t listener) noexcept;

  // -- the supervisor of the process

  void received(std::span<const std::byte> message, file_descriptor descriptor = {}) noexcept;
  void lose(const caf::error& why) noexcept { lose(why, false); }
  /// The process is gone, and all that it had begun. It may have overwritten the words of the
  /// events until then: marks all of them as done again.
  void reaped() noexcept;
  bool is_reaped() const noexcept { return is_reaped_.load(std::memory_order_acquire); }
  /// Calls `f` when the process is gone, at once if it is.
  /// @thread any
  void when_reaped(std::function<void()> f);
  /// Blocks until all listeners were told of the loss. Does not block on their thread.
  void wait_until_told() noexcept;

private:
  caf::error write(command what, bool wants_reply, std::span<const std::byte> first,
                   std::span<const std::byte> more, std::chrono::nanoseconds limit) noexcept;
  bool is_collected(command x) const noexcept {
    return collected_ != nullptr && x != command::prepare_launch;
  }
  caf::error add_collected(command what, std::span<const std::byte> first,
                           std::span<const std::byte> more);
  bool wait_for_reply(command what, std::chrono::nanoseconds limit) noexcept;
  std::chrono::nanoseconds command_limit() const noexcept {
    constexpr auto most = std::chrono::nanoseconds::max();
    return request_limit_ < most / 2 ? 2 * request_limit_ : most;
  }
  void lose(const caf::error& cause, bool kills) noexcept;
  /// Passes on a request of the worker's programs.
  void demanded(const control_head& head, wire_reader& body) noexcept;
  void give_back_word(std::uint32_t number) noexcept;
  /// Marks all events as done: streams of other devices wait for them.
  void gone() noexcept;
  /// Returns null if there is no such request.
  reply_handler take_handler(const control_head& of) noexcept;
  /// Returns the error for this process. If the error ends the worker, the link is lost.
  caf::error heard(const caf::error& error) noexcept;

  const int device_;
  link_area& area_;
  const std::shared_ptr<void> keep_;
  const std::unique_ptr<control_sender> control_;
  std::chrono::nanoseconds spin_{0};
  std::chrono::nanoseconds request_limit_{0};
  std::size_t slab_granularity_ = 0;
  std::size_t direct_bytes_ = 0;
  std::function<void(std::span<const std::byte>)> listener_;
  command_ring ring_;
  std::uint64_t last_command_ = 0;
  std::vector<std::byte> reply_;
  wire_writer* collected_ = nullptr; ///< by `collect`; null: commands are sent
  std::vector<std::uint64_t> records_;
  std::vector<std::uint64_t> done_at_loss_; ///< `link_area::done`; set before `lost_`
  std::vector<std::uint64_t> free_events_;

  open_count ranks_;
  open_count program_ranks_;
  std::atomic<bool> is_former_{false};
  std::atomic<bool> lost_{false};
  std::atomic<bool> is_reaped_{false};
  mutable std::mutex mutex_;
  std::vector<std::uint32_t> free_words_; ///< numbers: indices in `link_area::unfinished` plus 1
  caf::error why_;
  std::uint64_t last_request_ = 0;
  struct open_request {
    control kind{};
    reply_handler then;
  };
  std::map<std::uint64_t, open_request> open_;
  std::map<std::uint64_t, std::function<void(const caf::error&)>> on_loss_; ///< by number
  std::uint64_t last_listener_ = 0;
  demand_handler demand_handler_;
  bool demands_ = false;                 ///< a request of the worker's programs is not answered yet
  std::optional<worker_demand> waiting_; ///< it came before there was a handler
  std::vector<std::function<void()>> when_reaped_;
  std::condition_variable told_;
  std::thread::id telling_; ///< the thread that calls listeners, if any
};

} // namespace troupe::detail
