/// The service of a worker: drives its device for the parent.
#pragma once

#include "foundation/background.hpp"
#include "operation/library_states.hpp"
#include "worker/child/guest_backend.hpp"
#include "worker/protocol/command_ring.hpp"
#include "worker/protocol/protocol.hpp"
#include "worker/protocol/shared_memory.hpp"
#include "worker/protocol/worker_page.hpp"
#include <troupe/backend.hpp>
#include <troupe/launch.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace troupe::detail {

class device_state;

struct service_options {
  int device = 0;                    ///< ordinal
  work_progress* progress = nullptr; ///< calls of the driving thread; may be null
  std::chrono::nanoseconds spin{0};  ///< after the last work, before it sleeps
  /// Sends a reply to the parent, with a descriptor if there is one. @thread any
  std::function<caf::error(std::span<const std::byte>, std::optional<int> descriptor)> send;
  /// Called when the device's work is lost for good and the process must end. Does not return, or
  /// ends `run`.
  std::function<void(const caf::error&)> on_fault;
};

class worker_service {
public:
  worker_service(std::shared_ptr<backend> executes, link_area& area, service_options options);
  ~worker_service();

  /// Sets the site that gets ranks which are handed over. To be called before `open`; `x` outlives
  /// this.
  void set_programs(program_site& x) noexcept { programs_ = &x; }
  /// Returns the lock that is held during each call on a communicator of the device.
  const std::shared_ptr<shared_device>& device_lock() const noexcept { return device_lock_; }
  /// Notes that nothing is left of a rank that was handed over. @thread any
  void gone(communicator_key key) noexcept;

  /// Opens the device. To be called before `run` and `received`.
  /// @errors errc::invalid_argument: there is no such device; errc::unavailable: also without a
  ///         thread to end ranks
  caf::error open() noexcept;
  /// Executes commands until the parent sends `command::stop` or `stop` is called.
  void run() noexcept;
  /// @thread any
  void stop() noexcept;

  /// Handles a message of the parent, with its descriptor. A malformed message is a fault.
  /// @thread one at a time
  void received(std::span<const std::byte> message,
                std::optional<file_descriptor> descriptor) noexcept;

private:
  struct outstanding {
    std::uint64_t event;
    std::uint64_t record;
    communicator_key of; ///< 0: none
    event_view native;
  };
  /// If recorded again while the last record is in flight, it gets another native event.
  struct service_event {
    event_view native;
    bool in_flight = false;
  };
  struct service_stream {
    stream_view native;
    std::deque<outstanding> in_flight;
    communicator_key last = 0;   ///< communicator with the latest work
    communicator_key at_end = 0; ///< the one whose work is at the end of the stream; 0: none
  };

  bool execute_some() noexcept;
  void execute(const command_head& head, std::span<const std::byte> body) noexcept;
  caf::error serve(command what, wire_reader& body, wire_writer& result);
  caf::error serve_stream(command what, wire_reader& body, wire_writer& result);
  caf::error bind();
  caf::error warm();
  caf::error warm_events_in(stream_view stream);
  caf::error warm_memory(stream_view stream);
  /// Returns a native event that is not in use.
  caf::expected<event_view> take_event();
  caf::error record(const record_args& x);
  /// Records an event behind the work that is in a stream.
  caf::error record(event_view event, const service_stream& stream);
  caf::error wait_word(const wait_word_args& x);
  caf::error copy(const copy_args& x);
  caf::error open_memory();
  caf::error launch(command what, wire_reader& body);
  caf::error launch(command what, const launch_request& x, stream_view stream,
                    std::int32_t* verdict);
  caf::error load_code(const launch_request& x, stream_view stream);
  caf::error launch(const registered_launch& function, launch_context& context,
                    const launch_request& x);
  caf::error enqueue(const enqueue_args& x, wire_reader& calls, step_position where);
  caf::error enqueue_in_step(wire_reader& body);
  template <class F> caf::error on_rank(communicator_key key, service_stream& stream, F f);
  caf::error serve_graph(command what, wire_reader& body);
  caf::error record_graph(const graph_args& x, wire_reader& commands);
  caf::error serve_recorded(wire_reader& commands);
  caf::error replay(const replay_args& x);
  void drop_graph(graph_id x) noexcept;
  bool poll() noexcept;
  /// Frees memory when all work that is in the streams now is done.
  void retire(std::function<void()> free);
  caf::error record_in_all(std::vector<event_view>& events);
  void free_retired() noexcept;
  std::size_t done_in(const service_stream& stream) noexcept;
  void tell_first_done(service_stream& stream) noexcept;
  void not_in_flight(const outstanding& x) noexcept;
  void idle(bool worked) noexcept;
  void reply(std::uint64_t number, const caf::error& error, const wire_writer& result) noexcept;
  void fault(const caf::error& why) noexcept;

  service_stream* find_stream(stream_id id) noexcept;
  /// Calls `f` with the native stream.
  template <class F> caf::error on(stream_id id, F f);
  /// Calls `f` with the rank, which is valid until the parent ends it: after the last call on it.
  template <class F> caf::error with(communicator_key key, F f);
  backend_communicator* mark(communicator_key key) noexcept;
  void unmark() noexcept;
  bool has_error(communicator_key key);
  std::byte* host_address(const shared_place& x, std::size_t size_bytes);
  template <class T> T* word_at(const shared_place& x);

  void serve_control(const control_head& head, std::span<const std::byte> body,
                     std::optional<file_descriptor> descriptor);
  /// Reads the arguments of a request and calls `f` with them. Answers if they cannot be read.
  template <class T, class F> void with_arguments(const control_head& head, wire_reader& body, F f);
  /// Does the same on a thread of its own, and answers with what `f` returns.
  template <class T, class F> void answer_in_job(const control_head& head, wire_reader& body, F f);
  /// Does the same for a request that ends a rank, and needs no new thread.
  template <class T, class F> void answer_in_end(const control_head& head, wire_reader& body, F f);
  void answer(const control_head& head, const caf::error& error,
              std::span<const std::byte> result = {}) noexcept;
  template <class T> void answer(const control_head& head, const caf::expected<T>& result) noexcept;
  /// Makes a slab, and answers with its descriptor.
  void make_slab(const control_head& head, const slab_args& what);
  caf::error map_slab(const slab_args& what, const std::optional<file_descriptor>& descriptor);
  /// Unmaps a slab when the present work in all streams is done, and answers then.
  void drop_slab(const control_head& head, const slab_args& what);
  /// Passes the reply to a request of the programs on.
  caf::error take_reply(wire_reader& body);
  caf::expected<communicator_key> build(const build_args& what);
  caf::expected<communicator_key> join_direct(const join_args& what);
  /// Keeps the rank that was built until the parent ends it.
  caf::expected<communicator_key> keep(communicator_ranks rank);
  void close(communicator_key key);
  caf::error end(control how, communicator_key key);
  caf::error hand_over(communicator_key key, std::span<const std::byte> what);
  bool is_handed_over(communicator_key key);
  caf::error map(const map_args& what, std::optional<file_descriptor> descriptor);
  caf::error unmap(std::uint64_t segment);
  void begin_job() noexcept;
  void end_job() noexcept;
  /// Runs `job` on a thread of its own.
  /// @errors errc::unavailable: no thread could be started
  caf::error run_job(std::function<void()> job);
  /// Does the same, and sends an error as the reply.
  void run_job(const control_head& head, std::function<void()> job);
  /// Does the same; on this thread if there is no other one.
  void run_job_or_here(const std::function<void()>& job);
  /// Runs `f` on the thread that drives the device, and waits for it. @thread a job's
  caf::error on_device(std::function<caf::error()> f);
  /// Does not wait for it. @thread any
  void post_to_device(std::function<void()> f);
  bool run_asked() noexcept;

  const std::shared_ptr<backend> executes_;
  link_area& area_;
  const service_options options_;
  work_progress unseen_progress_;
  work_progress& progress_;
  command_ring ring_;
  std::unique_ptr<backend_device> device_;
  library_states libraries_;
  program_site* programs_ = nullptr;
  const std::shared_ptr<shared_device> device_lock_ = std::make_shared<shared_device>();
  std::shared_ptr<device_state> state_; ///< for the handles of registered launches
  std::atomic<bool> stopped_{false};
  std::atomic<bool> completed_{false}; ///< set by the backend's completion signal
  bool signals_ = false;
  std::chrono::steady_clock::time_point awake_until_{};
  std::optional<device_properties> properties_; ///< once the device is bound
  bool memory_ready_ = false;                   ///< opened in advance
  std::vector<stream_view> ready_streams_;      ///< created in advance
  std::unordered_map<graph_id, graph_view> graphs_;
  std::unordered_map<stream_id, service_stream> streams_;
  stream_id last_stream_ = 0;
  std::vector<service_event> events_;    ///< by number
  std::vector<event_view> spare_events_; ///< native events that are not in use
  struct retired_memory {
    std::function<void()> free;
    std::vector<event_view> passed; ///< one for each stream
  };
  std::deque<retired_memory> retired_;

  std::mutex asked_mutex_;
  std::vector<std::function<void()>> asked_; ///< for the thread that drives the device
  std::atomic<bool> any_asked_{false};

  std::mutex mutex_;
  std::condition_variable jobs_over_;
  std::size_t jobs_ = 0;
  /// For requests that end ranks: a rank that does not end holds up its device. No other request
  /// uses its spare thread, since a build may wait for another rank for ever.
  std::optional<background> ends_;
  communicator_key last_communicator_ = 0;
  std::unordered_map<communicator_key, communicator_ranks> communicators_; ///< of one rank each
  std::set<communicator_key> handed_over_;                                 ///< and not gone yet
  std::set<communicator_key> gone_;  ///< handed over, and gone before the parent's request
  communicator_key marked_ = 0;      ///< the rank in use by the driving thread; 0: none
  std::condition_variable one_gone_; ///< of these, or not used any more
  std::map<std::uint64_t, shared_memory> segments_;
};

inline caf::error malformed() { return make_error(errc::internal, "a command could not be read"); }

inline caf::error no_such(const char* what) {
  return make_error(errc::internal, std::string{"the worker has no such "} + what);
}

/// Writes the value of `x`, or returns its error.
template <class T> caf::error put_result(wire_writer& to, const caf::expected<T>& x) {
  if (!x)
    return x.error();
  to.put(*x);
  return {};
}

} // namespace troupe::detail
