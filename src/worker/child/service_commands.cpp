/// worker_service: executes the commands in the ring.
#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include "foundation/other_processes.hpp"
#include "operation/device_state.hpp"
#include "operation/launch_call.hpp"
#include "operation/launch_registry.hpp"
#include "operation/library_states.hpp"
#include "worker/child/worker_service.hpp"
#include <troupe/launch.hpp>

#include <algorithm>
#include <utility>

namespace troupe::detail {

namespace {

/// Number of commands between two looks at events.
constexpr int batch = 32;
/// Resources that a spare prepares: a lane's streams and events, and memory.
constexpr std::size_t warm_streams = 8;
constexpr std::size_t warm_events = 64;
constexpr std::size_t warm_bytes = std::size_t{32} << 20;
constexpr std::size_t warm_host_bytes = 4096;

void* at(std::uint64_t address) noexcept { return reinterpret_cast<void*>(address); }

/// Takes a resource out of `ready`; if there is none, `make` makes one.
template <class T, class F> caf::expected<T> take(std::vector<T>& ready, F make) {
  if (ready.empty())
    return make();
  const auto result = ready.back();
  ready.pop_back();
  return result;
}

/// Lets a launch use the device and its stream. `on_fault` is called if a function that the launch
/// runs on the host throws.
class service_context final : public device_context {
public:
  service_context(backend_device& on, int ordinal, stream_view stream, library_states& libraries,
                  std::int32_t* verdict, const std::function<void(const caf::error&)>& on_fault)
      : device_context(on, ordinal, stream, libraries, verdict), on_fault_(on_fault) {}

  caf::error run_on_host(std::function<void()> f) override {
    std::unique_ptr<host_call> kept{new host_call{std::move(f), on_fault_}};
    auto error = on().launch_host(
        stream(),
        [](void* x) {
          const std::unique_ptr<host_call> mine{static_cast<host_call*>(x)};
          // The launch was already answered. A fault keeps readers from the incomplete result.
          if (auto thrown = call_launch([&] { return mine->function(), caf::error{}; }))
            mine->on_fault(thrown);
        },
        kept.get());
    if (!error)
      // The stream owns it. After a fault it ends with the process.
      static_cast<void>(kept.release());
    return error;
  }

private:
  struct host_call {
    std::function<void()> function;
    std::function<void(const caf::error&)> on_fault;
  };

  const std::function<void(const caf::error&)>& on_fault_;
};

} // namespace

bool worker_service::execute_some() noexcept {
  command_head head;
  std::span<const std::byte> body;
  bool worked = false;
  auto next = [&] {
    if (ring_.peek(head, body))
      return true;
    if (ring_.broken())
      fault(make_error(errc::internal, "the parent wrote a malformed command to the ring"));
    return false;
  };
  for (int i = 0; i < batch && !stopped_.load(std::memory_order_relaxed) && next(); ++i) {
    execute(head, body);
    ring_.pop(head);
    worked = true;
  }
  return worked;
}

void worker_service::execute(const command_head& head, std::span<const std::byte> body) noexcept {
  after_hearing_from_another_process();
  wire_reader reader{body};
  wire_writer result;
  const auto what = static_cast<command>(head.kind);
  caf::error error;
  {
    work_progress::mark busy{progress_, head.kind};
    error = serve(what, reader, result);
  }
  if (!error && !reader.ok())
    error = malformed();
  if (head.wants_reply != 0)
    reply(head.number, error, result);
  // A record has no reply. The end of the process reports its error.
  if (error && (what == command::record || severity_of(error) == severity::process))
    fault(error);
}

void worker_service::reply(std::uint64_t number, const caf::error& error,
                           const wire_writer& result) noexcept {
  wire_writer all;
  all.put(error);
  const auto head = all.bytes();
  const auto more = error ? std::span<const std::byte>{} : result.bytes();
  if (head.size() + more.size() > area_.reply.size())
    return reply(number, make_error(errc::internal, "the reply is too long"), {});
  std::copy(head.begin(), head.end(), area_.reply.begin());
  std::copy(more.begin(), more.end(),
            area_.reply.begin() + static_cast<std::ptrdiff_t>(head.size()));
  area_.workspace_changes.store(libraries_.workspace_changes(), std::memory_order_relaxed);
  area_.reply_size.store(static_cast<std::uint32_t>(head.size() + more.size()),
                         std::memory_order_relaxed);
  before_telling_another_process();
  area_.replied.store(number, std::memory_order_release);
  area_.to_asker.ring_sleepers();
}

worker_service::service_stream* worker_service::find_stream(stream_id id) noexcept {
  auto i = streams_.find(id);
  return i != streams_.end() ? &i->second : nullptr;
}

template <class F> caf::error worker_service::on(stream_id id, F f) {
  auto* x = find_stream(id);
  if (x == nullptr)
    return no_such("stream");
  x->at_end = 0;
  return f(x->native);
}

caf::error worker_service::serve(command what, wire_reader& body, wire_writer& result) {
  switch (what) {
  case command::bind: {
    auto error = bind();
    if (!error)
      result.put(bound_device{*properties_, device_->records_graphs()});
    return error;
  }
  case command::warm:
    return warm();
  case command::memory:
    return put_result(result, device_->memory());
  case command::open_memory:
    return std::exchange(memory_ready_, false) ? caf::error{} : open_memory();
  case command::close_memory:
    return libraries_.close_memory(*device_);
  case command::allocate: {
    const auto x = body.get<allocate_args>();
    return on(x.stream, [&](stream_view s) {
      return put_result(result, device_->allocate(x.size_bytes, s));
    });
  }
  case command::deallocate: {
    const auto x = body.get<deallocate_args>();
    return on(x.stream, [&](stream_view s) { return device_->deallocate(at(x.address), s); });
  }
  case command::enqueue:
    return enqueue(body.get<enqueue_args>(), body, {});
  case command::enqueue_in_step:
    return enqueue_in_step(body);
  case command::record_graph:
  case command::launch_graph:
  case command::replay:
    return serve_graph(what, body);
  case command::asynchronous_error:
    return with(body.get<communicator_key>(), [](auto& rank) { return rank.asynchronous_error(); });
  case command::can_access_peer:
    return put_result(result, device_->can_access_peer(body.get<std::int32_t>()));
  case command::stop:
    stopped_.store(true);
    return {};
  default:
    return serve_stream(what, body, result);
  }
}

caf::error worker_service::serve_stream(command what, wire_reader& body, wire_writer& result) {
  switch (what) {
  case command::create_stream: {
    auto made = take(ready_streams_, [this] { return device_->create_stream(); });
    if (!made)
      return made.error();
    streams_[++last_stream_].native = *made;
    result.put(last_stream_);
    return {};
  }
  case command::destroy_stream: {
    const auto id = body.get<stream_id>();
    return on(id, [&](stream_view s) {
      for (auto& x : find_stream(id)->in_flight)
        not_in_flight(x);
      streams_.erase(id);
      return device_->destroy_stream(s);
    });
  }
  case command::record:
    return record(body.get<record_args>());
  case command::wait_event: {
    const auto x = body.get<wait_event_args>();
    if (x.event >= events_.size())
      return no_such("event");
    const auto event = events_[x.event].native;
    if (event.native == nullptr)
      return {};
    return on(x.stream, [&](stream_view s) { return device_->wait(s, event); });
  }
  case command::wait_word:
    return wait_word(body.get<wait_word_args>());
  case command::copy:
    return copy(body.get<copy_args>());
  case command::fill: {
    const auto x = body.get<fill_args>();
    if (x.pattern_bytes > sizeof x.pattern)
      return malformed();
    return on(x.stream, [&](stream_view s) {
      return device_->fill(at(x.target), std::span{x.pattern, x.pattern_bytes}, x.count, s);
    });
  }
  case command::launch:
  case command::prepare_launch:
    return launch(what, body);
  default:
    return malformed();
  }
}

/// Returns a word that both processes have mapped; null: there is none.
template <class T> T* worker_service::word_at(const shared_place& x) {
  auto* const address = host_address(x, sizeof(T));
  return x.offset % sizeof(T) == 0 ? reinterpret_cast<T*>(address) : nullptr;
}

caf::error worker_service::wait_word(const wait_word_args& x) {
  const auto* word = word_at<std::atomic<std::uint64_t>>(x.word);
  if (word == nullptr)
    return no_such("host memory");
  return on(x.stream, [&](stream_view s) { return device_->wait_word(s, word, x.at_least); });
}

caf::error worker_service::copy(const copy_args& x) {
  auto* target = at(x.target);
  auto* source = at(x.source);
  if (x.direction > copy_direction::device_to_device)
    return malformed();
  if (x.direction != copy_direction::device_to_device && x.size_bytes > 0) {
    auto* host = host_address(x.host, x.size_bytes);
    if (host == nullptr)
      return no_such("host memory");
    (x.direction == copy_direction::host_to_device ? source : target) = host;
  }
  return on(x.stream, [&](stream_view s) {
    return device_->copy(target, source, x.size_bytes, x.direction, s);
  });
}

/// A spare has done this before: the driver takes long.
caf::error worker_service::bind() {
  if (properties_)
    return {};
  if (auto error = device_->bind())
    return error;
  auto properties = device_->properties();
  if (!properties)
    return properties.error();
  properties_ = std::move(*properties);
  return {};
}

/// Also makes what libraries keep for the device. If it fails, the parent may try again.
caf::error worker_service::open_memory() {
  auto stream = device_->create_stream();
  if (!stream)
    return stream.error();
  auto error = libraries_.open_memory(*device_, options_.device, *stream);
  const bool is_open = !error;
  keep_first(error, device_->destroy_stream(*stream));
  if (error && is_open)
    keep_first(error, libraries_.close_memory(*device_));
  return error;
}

/// Creates resources in advance: calls for them block while the driver ends the last process.
caf::error worker_service::warm() {
  if (programs_ != nullptr)
    if (auto error = programs_->warm())
      return error;
  if (auto error = bind())
    return error;
  if (auto error = open_memory())
    return error;
  memory_ready_ = true;
  for (std::size_t i = 0; i < warm_streams; ++i) {
    auto stream = device_->create_stream();
    if (!stream)
      return stream.error();
    ready_streams_.push_back(*stream);
  }
  // Temporary: events of a stream that has allocated cost more.
  const auto stream = device_->create_stream();
  if (!stream)
    return stream.error();
  auto error = warm_events_in(*stream);
  if (!error)
    error = warm_memory(*stream);
  keep_first(error, device_->destroy_stream(*stream));
  return error;
}

/// The driver makes what an event needs when it is created, or first recorded.
caf::error worker_service::warm_events_in(stream_view stream) {
  for (std::size_t i = 0; i < warm_events; ++i) {
    const auto event = device_->create_event();
    if (!event)
      return event.error();
    spare_events_.push_back(*event);
    if (auto error = device_->record(*event, stream))
      return error;
  }
  return device_->synchronize(spare_events_.back());
}

/// The driver makes what work on memory needs when there is the first of its kind.
caf::error worker_service::warm_memory(stream_view stream) {
  const auto memory = device_->allocate(warm_bytes, stream);
  if (!memory)
    return memory.error();
  const auto host = device_->allocate_pinned(warm_host_bytes);
  auto error = host ? caf::error{} : host.error();
  const std::byte zero[4] = {};
  auto* half = static_cast<std::byte*>(*memory) + warm_bytes / 2;
  const auto copy = [&](void* target, void* source, std::size_t size, copy_direction direction) {
    if (!error)
      error = device_->copy(target, source, size, direction, stream);
  };
  if (!error)
    error = device_->fill(*memory, zero, warm_bytes / sizeof zero, stream);
  copy(half, *memory, warm_bytes / 2, copy_direction::device_to_device);
  if (host) {
    copy(*host, *memory, warm_host_bytes, copy_direction::device_to_host);
    copy(*memory, *host, warm_host_bytes, copy_direction::host_to_device);
  }
  keep_first(error, device_->deallocate(*memory, stream)); // the pool keeps the memory
  if (!error)
    error = device_->record(spare_events_.back(), stream);
  if (!error)
    error = device_->synchronize(spare_events_.back());
  if (host)
    keep_first(error, device_->deallocate_pinned(*host));
  return error;
}

caf::expected<event_view> worker_service::take_event() {
  return take(spare_events_, [this] { return device_->create_event(); });
}

caf::error worker_service::record(const record_args& x) {
  auto* stream = find_stream(x.stream);
  if (stream == nullptr || x.event >= events_.size())
    return no_such("stream or event");
  auto& event = events_[x.event];
  if (event.native.native == nullptr || event.in_flight) {
    auto made = take_event();
    if (!made)
      return made.error();
    event.native = *made; // the previous one is listed in `in_flight`
  }
  if (auto error = record(event.native, *stream))
    return error;
  event.in_flight = true;
  stream->in_flight.push_back({x.event, x.number, stream->last, event.native});
  return {};
}

caf::error worker_service::record(event_view event, const service_stream& stream) {
  auto* const rank = stream.at_end != 0 ? mark(stream.at_end) : nullptr;
  if (rank == nullptr) // it may have ended since
    return device_->record(event, stream.native);
  auto error = rank->mark_end(event, stream.native, *device_);
  unmark();
  return error;
}

caf::error worker_service::launch(command what, wire_reader& body) {
  const auto x = body.get<launch_request>();
  const bool runs = what == command::launch;
  if (!body.ok() || x.verdict.size() > (runs ? 1 : 0))
    return malformed();
  std::int32_t* verdict = nullptr;
  for (auto& place : x.verdict) {
    verdict = word_at<std::int32_t>(place);
    if (verdict == nullptr)
      return no_such("host memory");
  }
  if (!runs && x.stream == 0) {
    auto stream = take(ready_streams_, [this] { return device_->create_stream(); });
    if (!stream)
      return stream.error();
    ready_streams_.push_back(*stream);
    if (auto error = launch(what, x, *stream, nullptr))
      return error;
    return load_code(x, *stream);
  }
  return on(x.stream, [&](stream_view s) { return launch(what, x, s, verdict); });
}

caf::error worker_service::launch(command what, const launch_request& x, stream_view stream,
                                  std::int32_t* verdict) {
  const bool runs = what == command::launch;
  service_context context{*device_,   options_.device, stream,
                          libraries_, verdict,         options_.on_fault};
  if (const auto library = find_library_launch(x.name)) {
    if (runs && (verdict != nullptr) != (library->judge != nullptr))
      return make_error(errc::invalid_argument,
                        "\"" + x.name + "\" has a verdict in one of the processes only");
    making_context before{*device_, options_.device, stream, libraries_};
    return call_library_on(*device_, x.name, 0, [&] {
      const auto& f = runs ? library->enqueue : library->prepare;
      auto& in = runs ? static_cast<launch_context&>(context) : before;
      return f ? f(in, x.reads, x.writes, x.arguments) : caf::error{};
    });
  }
  if (const auto function = find_launch(x.name); function && runs)
    return launch(function, context, x);
  return make_error(errc::invalid_argument,
                    "no launch is registered in the worker as \"" + x.name + "\"");
}

/// Loads the kernels of a launch that a spare has prepared. Otherwise its first run after a loss
/// would load them.
caf::error worker_service::load_code(const launch_request& x, stream_view stream) {
  const auto library = find_library_launch(x.name);
  if (!library || !replays(x.name) || !device_->records_graphs())
    return {};
  loading_context context{*device_, options_.device, stream, libraries_};
  const auto graph = device_->record_graph(stream, [&] {
    return call_library_on(*device_, x.name, 0, [&] {
      return library->enqueue(context, x.reads, x.writes, x.arguments);
    });
  });
  const auto error = graph ? device_->drop_graph(*graph) : graph.error();
  if (error && severity_of(error) != severity::process) {
    log(log_level::info, "the code of a launch is not loaded in advance", error);
    return {};
  }
  return error;
}

caf::error worker_service::launch(const registered_launch& function, launch_context& context,
                                  const launch_request& x) {
  auto refs = [this](const std::vector<launch_memory>& all) {
    std::vector<any_gpu_ref> result;
    for (auto& y : all)
      result.emplace_back(state_->make_buffer(y.address, y.size_bytes(), [](void*) {}), y.type, 0,
                          y.count);
    return result;
  };
  return call_launch_on(*device_, x.name, 0, [&] {
    return function(context, refs(x.reads), refs(x.writes), x.arguments);
  });
}

/// Returns a rank that `end` does not end before `unmark`; null: it is not there.
backend_communicator* worker_service::mark(communicator_key key) noexcept {
  const std::lock_guard lock{mutex_};
  const auto i = communicators_.find(key);
  if (i == communicators_.end())
    return nullptr;
  marked_ = key;
  return i->second.front().get();
}

void worker_service::unmark() noexcept {
  const std::lock_guard lock{mutex_};
  marked_ = 0;
  one_gone_.notify_all();
}

template <class F> caf::error worker_service::with(communicator_key key, F f) {
  auto* const rank = mark(key);
  if (rank == nullptr)
    return make_error(errc::communicator_dead, "its communicator has ended");
  auto error = f(*rank);
  unmark();
  return error;
}

caf::error worker_service::enqueue(const enqueue_args& x, wire_reader& calls, step_position where) {
  return with(x.communicator, [&](auto& rank) {
    auto* stream = find_stream(x.stream);
    if (stream == nullptr || x.calls == 0)
      return malformed();
    // The calls point into `received`, so its elements must not move.
    std::deque<received_call> received;
    std::vector<collective_call> all;
    for (std::uint32_t i = 0; i < x.calls; ++i) {
      wire_fields(calls, received.emplace_back());
      if (!calls.ok())
        return malformed();
      all.push_back(received.back().call);
    }
    return on_rank(x.communicator, *stream,
                   [&] { return rank.enqueue(all, stream->native, where); });
  });
}

caf::error worker_service::enqueue_in_step(wire_reader& body) {
  const auto x = body.get<enqueue_in_step_args>();
  auto* const reached = word_at<std::uint32_t>(x.reached);
  if (x.place == 0)
    return malformed();
  if (reached == nullptr)
    return no_such("host memory");
  return enqueue(x.what, body, {x.place, reached});
}

/// Calls `f`, which enqueues work of that communicator at the end of `stream`.
template <class F>
caf::error worker_service::on_rank(communicator_key key, service_stream& stream, F f) {
  stream.last = key;
  const std::lock_guard lock{device_lock_->driving};
  auto error = f();
  stream.at_end = error ? 0 : key;
  return error;
}

// -- graphs

caf::error worker_service::serve_graph(command what, wire_reader& body) {
  if (what == command::record_graph) {
    const auto x = body.get<graph_args>();
    return body.ok() ? record_graph(x, body) : malformed();
  }
  if (what == command::replay)
    return replay(body.get<replay_args>());
  const auto x = body.get<graph_args>();
  const auto graph = graphs_.find(x.graph);
  if (graph == graphs_.end())
    return no_such("graph");
  return on(x.stream, [&](stream_view s) { return device_->launch_graph(graph->second, s); });
}

caf::error worker_service::record_graph(const graph_args& x, wire_reader& commands) {
  if (x.graph == 0 || graphs_.contains(x.graph))
    return malformed();
  auto* const stream = find_stream(x.stream);
  if (stream == nullptr)
    return no_such("stream");
  const auto graph = device_->record_graph(stream->native, [&] {
    caf::error why;
    while (!why && !commands.at_end())
      why = serve_recorded(commands);
    return why;
  });
  if (!graph)
    return graph.error();
  stream->at_end = 0; // what it recorded is not in the stream
  graphs_.emplace(x.graph, *graph);
  return {};
}

/// Serves the next command of a graph.
caf::error worker_service::serve_recorded(wire_reader& commands) {
  const auto what = commands.get<command>();
  wire_reader body{commands.get_bytes()};
  if (!commands.ok() || !is_recordable(what))
    return malformed();
  if (what == command::launch)
    if (const auto name = wire_reader{body}.get<launch_request>().name; !replays(name))
      return make_error(errc::not_supported, "the launch \"" + name +
                                                 "\" is not registered in the worker with "
                                                 "repetition::replays");
  wire_writer no_result;
  auto error = serve(what, body, no_result);
  return error || body.ok() ? error : malformed();
}

caf::error worker_service::replay(const replay_args& x) {
  const auto graph = graphs_.find(x.what.graph);
  if (graph == graphs_.end())
    return no_such("graph");
  auto* const reached = word_at<std::uint32_t>(x.reached);
  if (reached == nullptr && x.reached.segment != 0)
    return no_such("host memory");
  return with(x.communicator, [&](auto& rank) {
    auto* const stream = find_stream(x.what.stream);
    if (stream == nullptr)
      return no_such("stream");
    return on_rank(x.communicator, *stream,
                   [&] { return rank.replay(graph->second, stream->native, *device_, reached); });
  });
}

/// Drops a graph, if there is one of that number.
void worker_service::drop_graph(graph_id x) noexcept {
  const auto graph = graphs_.find(x);
  if (graph == graphs_.end())
    return;
  if (auto error = device_->drop_graph(graph->second))
    log(log_level::warning, "a graph was not dropped", error);
  graphs_.erase(graph);
}

} // namespace troupe::detail
