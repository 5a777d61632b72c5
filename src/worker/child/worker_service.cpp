#include "worker/child/worker_service.hpp"

#include "foundation/log.hpp"
#include "foundation/other_processes.hpp"
#include "foundation/spin.hpp"
#include "foundation/start_thread.hpp"
#include "operation/buffer.hpp"
#include "operation/device_state.hpp"
#include "operation/launch_call.hpp"
#include <troupe/launch.hpp>

#include <algorithm>
#include <future>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

using clock = std::chrono::steady_clock;

/// Number of commands between two looks at events.
constexpr int batch = 32;
/// With work in flight, no completion signals and no spinning.
constexpr std::chrono::microseconds poll_interval{50};
constexpr std::chrono::milliseconds doze{100};
/// Resources that a spare prepares: a lane's streams, and memory.
constexpr std::size_t warm_streams = 8;
constexpr std::size_t warm_bytes = std::size_t{32} << 20;

void* at(std::uint64_t address) noexcept { return reinterpret_cast<void*>(address); }

caf::error malformed() { return make_error(errc::internal, "a command could not be read"); }

caf::error no_such(const char* what) {
  return make_error(errc::internal, std::string{"the worker has no such "} + what);
}

/// The context of a registered launch in a worker.
class service_context final : public launch_context {
public:
  service_context(backend_device& on, int ordinal, stream_view stream,
                  const std::function<void(const caf::error&)>& on_fault)
      : on_(on), ordinal_(ordinal), stream_(stream), on_fault_(on_fault) {}

  int device() const noexcept override { return ordinal_; }
  CUstream_st* cuda_stream() const noexcept override {
    return on_.runs_cuda() ? static_cast<CUstream_st*>(stream_.native) : nullptr;
  }
  caf::error run_on_host(std::function<void()> f) override {
    auto kept = std::make_unique<host_call>(std::move(f), on_fault_);
    auto error = on_.launch_host(
        stream_,
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
    host_call(std::function<void()> f, const std::function<void(const caf::error&)>& fault)
        : function(std::move(f)), on_fault(fault) {}
    std::function<void()> function;
    std::function<void(const caf::error&)> on_fault;
  };

  backend_device& on_;
  int ordinal_;
  stream_view stream_;
  const std::function<void(const caf::error&)>& on_fault_;
};

} // namespace

worker_service::worker_service(std::shared_ptr<backend> executes, link_area& area,
                               service_options options)
    : executes_(std::move(executes)), area_(area), options_(std::move(options)),
      progress_(options_.progress != nullptr ? *options_.progress : unseen_progress_),
      ring_(area.words, area.commands), state_(std::make_shared<device_state>(0, options_.device)),
      events_(link_area::event_count) {
  state_->publish();
  state_->end_of_lane(); // no lane collects released memory
}

worker_service::~worker_service() {
  std::unique_lock lock{mutex_};
  jobs_over_.wait(lock, [this] { return jobs_ == 0; });
}

void worker_service::stop() noexcept {
  stopped_.store(true);
  ring_.wake_reader();
}

caf::error worker_service::open() noexcept {
  auto device = executes_->open(options_.device);
  if (!device)
    return device.error();
  device_ = std::move(*device);
  signals_ = device_->signals_completion();
  device_->set_completion_signal([this] {
    completed_.store(true, std::memory_order_release);
    ring_.wake_reader();
  });
  return {};
}

void worker_service::run() noexcept {
  while (!stopped_.load(std::memory_order_relaxed)) {
    bool worked = execute_some();
    worked |= poll();
    worked |= run_asked();
    idle(worked);
  }
  // Jobs may use the device, or wait for this thread.
  for (std::unique_lock lock{mutex_}; jobs_ != 0;) {
    lock.unlock();
    run_asked();
    lock.lock();
    jobs_over_.wait_for(lock, doze / 10, [this] { return jobs_ == 0; });
  }
}

// -- commands

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

void worker_service::fault(const caf::error& why) noexcept {
  stopped_.store(true);
  options_.on_fault(why);
}

void worker_service::reply(std::uint64_t number, const caf::error& error,
                           const wire_writer& result) noexcept {
  wire_writer all;
  put(all, error);
  const auto head = all.bytes();
  auto more = result.bytes();
  if (error)
    more = {};
  if (head.size() + more.size() > area_.reply.size()) {
    wire_writer instead;
    return reply(number, make_error(errc::internal, "the reply is too long"), instead);
  }
  std::copy(head.begin(), head.end(), area_.reply.begin());
  std::copy(more.begin(), more.end(),
            area_.reply.begin() + static_cast<std::ptrdiff_t>(head.size()));
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

caf::expected<stream_view> worker_service::native(stream_id id) {
  auto* x = find_stream(id);
  if (x == nullptr)
    return no_such("stream");
  return x->native;
}

std::byte* worker_service::host_address(const shared_place& x, std::size_t size_bytes) {
  std::lock_guard lock{mutex_};
  auto i = segments_.find(x.segment);
  if (i == segments_.end())
    return nullptr;
  auto bytes = i->second.bytes();
  return x.offset <= bytes.size() && size_bytes <= bytes.size() - x.offset ? bytes.data() + x.offset
                                                                           : nullptr;
}

caf::error worker_service::serve(command what, wire_reader& body, wire_writer& result) {
  auto on = [this](stream_id id, auto f) -> caf::error {
    auto stream = native(id);
    return stream ? f(*stream) : stream.error();
  };
  auto address = [&](caf::expected<void*> x) {
    if (!x)
      return x.error();
    result.put(reinterpret_cast<std::uint64_t>(*x));
    return caf::error{};
  };
  switch (what) {
  case command::bind: {
    if (auto error = device_->bind())
      return error;
    auto properties = device_->properties();
    if (!properties)
      return properties.error();
    put(result, *properties);
    return {};
  }
  case command::warm:
    return warm();
  case command::memory: {
    auto memory = device_->memory();
    if (!memory)
      return memory.error();
    result.put(*memory);
    return {};
  }
  case command::open_memory:
    return std::exchange(memory_ready_, false) ? caf::error{} : device_->open_memory();
  case command::close_memory:
    return device_->close_memory();
  case command::allocate: {
    const auto x = body.get<allocate_args>();
    return on(x.stream, [&](stream_view s) { return address(device_->allocate(x.size_bytes, s)); });
  }
  case command::deallocate: {
    const auto x = body.get<deallocate_args>();
    return on(x.stream, [&](stream_view s) { return device_->deallocate(at(x.address), s); });
  }
  case command::allocate_symmetric:
    return address(device_->allocate_symmetric(body.get<std::uint64_t>()));
  case command::stop:
    stopped_.store(true);
    return {};
  case command::enqueue:
  case command::register_window:
  case command::deregister_window:
  case command::asynchronous_error:
    return serve_communicator(what, body);
  default:
    return serve_stream(what, body, result);
  }
}

caf::error worker_service::serve_stream(command what, wire_reader& body, wire_writer& result) {
  auto on = [this](stream_id id, auto f) -> caf::error {
    auto stream = native(id);
    return stream ? f(*stream) : stream.error();
  };
  switch (what) {
  case command::create_stream: {
    auto made = create_stream();
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
  case command::wait_word: {
    const auto x = body.get<wait_word_args>();
    auto* word = host_address(x.word, sizeof(std::uint64_t));
    if (word == nullptr || x.word.offset % sizeof(std::uint64_t) != 0)
      return no_such("host memory");
    return on(x.stream, [&](stream_view s) {
      return device_->wait_word(s, reinterpret_cast<const std::atomic<std::uint64_t>*>(word),
                                x.at_least);
    });
  }
  case command::copy: {
    const auto x = body.get<copy_args>();
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
  case command::fill: {
    const auto x = body.get<fill_args>();
    if (x.pattern_bytes > sizeof x.pattern)
      return malformed();
    return on(x.stream, [&](stream_view s) {
      return device_->fill(at(x.target), std::span{x.pattern, x.pattern_bytes}, x.count, s);
    });
  }
  case command::launch:
    return launch(body);
  default:
    return malformed();
  }
}

caf::expected<stream_view> worker_service::create_stream() {
  if (ready_streams_.empty())
    return device_->create_stream();
  const auto result = ready_streams_.back();
  ready_streams_.pop_back();
  return result;
}

/// Creates resources in advance: calls for them block while the driver ends the last process.
caf::error worker_service::warm() {
  if (programs_ != nullptr)
    if (auto error = programs_->warm())
      return error;
  if (auto error = device_->bind())
    return error;
  if (auto error = device_->open_memory())
    return error;
  memory_ready_ = true;
  for (std::size_t i = 0; i < warm_streams; ++i) {
    auto stream = device_->create_stream();
    if (!stream)
      return stream.error();
    ready_streams_.push_back(*stream);
  }
  // Temporary: events of a stream that has allocated cost more.
  auto stream = device_->create_stream();
  if (!stream)
    return stream.error();
  const auto on = *stream;
  auto memory = device_->allocate(warm_bytes, on);
  if (!memory)
    return memory.error();
  auto event = device_->create_event();
  if (!event)
    return event.error();
  const std::byte zero[4] = {};
  auto* half = static_cast<std::byte*>(*memory) + warm_bytes / 2;
  auto error = device_->fill(*memory, zero, warm_bytes / sizeof zero, on);
  if (!error)
    error = device_->copy(half, *memory, warm_bytes / 2, copy_direction::device_to_device, on);
  if (auto end = device_->deallocate(*memory, on); end && !error)
    error = std::move(end); // the pool keeps the memory
  if (!error)
    error = device_->record(*event, on);
  if (!error)
    error = device_->synchronize(*event);
  if (auto end = device_->destroy_event(*event); end && !error)
    error = std::move(end);
  if (auto end = device_->destroy_stream(on); end && !error)
    error = std::move(end);
  return error;
}

caf::error worker_service::record(const record_args& x) {
  auto* stream = find_stream(x.stream);
  if (stream == nullptr || x.event >= events_.size())
    return no_such("stream or event");
  auto& event = events_[x.event];
  if (event.native.native == nullptr || event.in_flight) {
    if (spare_events_.empty()) {
      auto made = device_->create_event();
      if (!made)
        return made.error();
      spare_events_.push_back(*made);
    }
    event.native = spare_events_.back(); // the previous one is listed in `in_flight`
    spare_events_.pop_back();
  }
  if (auto error = device_->record(event.native, stream->native))
    return error;
  event.in_flight = true;
  stream->in_flight.push_back({x.event, x.number, stream->last, event.native});
  return {};
}

caf::error worker_service::launch(wire_reader& body) {
  const auto x = get_launch(body);
  if (!body.ok())
    return malformed();
  auto function = find_launch(x.name);
  if (!function)
    return make_error(errc::invalid_argument,
                      "no launch is registered in the worker as \"" + x.name + "\"");
  auto refs = [this](const std::vector<launch_memory>& all) {
    std::vector<any_gpu_ref> result;
    for (auto& y : all)
      result.emplace_back(state_->make_buffer(y.address, y.count * size_of(y.type), [](void*) {}),
                          y.type, 0, y.count);
    return result;
  };
  auto stream = native(x.stream);
  if (!stream)
    return stream.error();
  service_context context{*device_, options_.device, *stream, options_.on_fault};
  return call_launch_on(*device_, x.name, 0, [&] {
    return function(context, refs(x.reads), refs(x.writes), x.arguments);
  });
}

/// Returns the rank, which is valid until the parent ends it: after the last call on it.
backend_communicator* worker_service::find(communicator_key key) {
  std::lock_guard lock{mutex_};
  auto i = communicators_.find(key);
  return i != communicators_.end() ? i->second.front().get() : nullptr;
}

/// Returns true on an asynchronous error. The rank may end with work in a stream.
bool worker_service::has_error(communicator_key key) {
  std::lock_guard lock{mutex_};
  auto i = communicators_.find(key);
  return i != communicators_.end() && i->second.front()->asynchronous_error();
}

caf::error worker_service::serve_communicator(command what, wire_reader& body) {
  auto with = [this](communicator_key key, auto f) {
    auto* rank = find(key);
    return rank != nullptr ? f(*rank)
                           : make_error(errc::communicator_dead, "its communicator has ended");
  };
  switch (what) {
  case command::enqueue:
    return enqueue(body);
  case command::register_window: {
    const auto x = body.get<window_args>();
    return with(x.communicator, [&](auto& rank) {
      auto stream = native(x.stream);
      return stream ? rank.register_window(at(x.address), x.size_bytes, *stream) : stream.error();
    });
  }
  case command::deregister_window: {
    const auto x = body.get<window_args>();
    return with(x.communicator, [&](auto& rank) { return rank.deregister_window(at(x.address)); });
  }
  default:
    return with(body.get<communicator_key>(), [](auto& rank) { return rank.asynchronous_error(); });
  }
}

caf::error worker_service::enqueue(wire_reader& body) {
  const auto x = body.get<enqueue_args>();
  auto* stream = find_stream(x.stream);
  auto* rank = find(x.communicator);
  if (rank == nullptr)
    return make_error(errc::communicator_dead, "its communicator has ended");
  if (stream == nullptr || x.calls == 0)
    return malformed();
  // The calls point into `received`, so its elements must not move.
  std::deque<received_call> received;
  std::vector<collective_call> calls;
  for (std::uint32_t i = 0; i < x.calls; ++i) {
    if (!get(body, received.emplace_back()))
      return malformed();
    calls.push_back(received.back().call);
  }
  stream->last = x.communicator;
  std::lock_guard lock{device_lock_->driving};
  return rank->enqueue(calls, stream->native);
}

// -- events

bool worker_service::poll() noexcept {
  if (signals_ && !completed_.exchange(false, std::memory_order_acq_rel))
    return false;
  bool worked = false;
  work_progress::mark busy{progress_, static_cast<std::uint32_t>(own_call::query)};
  free_retired();
  for (auto& [id, stream] : streams_)
    while (!stream.in_flight.empty()) {
      auto& x = stream.in_flight.front();
      auto done = device_->query(x.native);
      if (!done) {
        fault(done.error()); // the state of events is unknown from now on
        return true;
      }
      if (!*done)
        break;
      if (x.of != 0 && has_error(x.of))
        area_.communicator_errors.fetch_add(1, std::memory_order_release);
      before_telling_another_process();
      // A later record of the event may have been done before this one, in another stream.
      if (area_.done[x.event].load(std::memory_order_relaxed) < x.record)
        area_.done[x.event].store(x.record, std::memory_order_release);
      not_in_flight(x);
      stream.in_flight.pop_front();
      worked = true;
    }
  return worked;
}

void worker_service::not_in_flight(const outstanding& x) noexcept {
  auto& event = events_[x.event];
  if (event.native.native == x.native.native)
    event.in_flight = false;
  else
    spare_events_.push_back(x.native);
}

void worker_service::idle(bool worked) noexcept {
  const bool busy = std::any_of(streams_.begin(), streams_.end(),
                                [](auto& x) { return !x.second.in_flight.empty(); });
  const auto now = options_.spin.count() != 0 || worked ? clock::now() : clock::time_point{};
  if (worked)
    awake_until_ = now + options_.spin;
  const bool polls = busy && !signals_;
  if (options_.spin.count() != 0 && (polls || now < awake_until_)) {
    pause();
    return;
  }
  if (worked)
    return;
  ring_.wait_for_command(polls ? std::chrono::nanoseconds{poll_interval} : doze, [this] {
    return stopped_.load(std::memory_order_relaxed) || completed_.load(std::memory_order_acquire) ||
           any_asked_.load(std::memory_order_acquire);
  });
}

// -- requests by the socket

caf::error worker_service::run_job(std::function<void()> job) {
  {
    std::lock_guard lock{mutex_};
    ++jobs_;
  }
  auto over = [this] {
    std::lock_guard lock{mutex_};
    if (--jobs_ == 0)
      jobs_over_.notify_all();
  };
  auto error = start_detached_thread(
      [over, job = std::move(job)] {
        job();
        over();
      },
      "for a request, in the worker");
  if (error)
    over();
  return error;
}

void worker_service::run_job(const control_head& head, std::function<void()> job) {
  if (auto error = run_job(std::move(job)))
    answer(head, error);
}

bool worker_service::run_asked() noexcept {
  if (!any_asked_.load(std::memory_order_acquire))
    return false;
  std::vector<std::function<void()>> all;
  {
    std::lock_guard lock{asked_mutex_};
    all.swap(asked_);
    any_asked_.store(false, std::memory_order_relaxed);
  }
  work_progress::mark busy{progress_, static_cast<std::uint32_t>(own_call::asked)};
  for (auto& f : all)
    f();
  return true;
}

caf::error worker_service::on_device(std::function<caf::error()> f) {
  std::promise<caf::error> result;
  auto done = result.get_future();
  {
    std::lock_guard lock{asked_mutex_};
    asked_.push_back([&] { result.set_value(f()); });
    any_asked_.store(true, std::memory_order_release);
  }
  ring_.wake_reader();
  return done.get();
}

void worker_service::answer(const control_head& head, const caf::error& error,
                            std::span<const std::byte> result) noexcept {
  wire_writer message;
  message.put(head);
  put(message, error);
  if (!error)
    message.put_bytes(result);
  options_.send(message.bytes());
  if (severity_of(error) == severity::process)
    fault(error);
}

void worker_service::received(std::span<const std::byte> message,
                              std::optional<file_descriptor> descriptor) noexcept {
  after_hearing_from_another_process();
  wire_reader reader{message};
  const auto head = reader.get<control_head>();
  if (!reader.ok())
    return fault(make_error(errc::internal, "a message of the parent's could not be read"));
  serve_control(head, message.subspan(sizeof head), std::move(descriptor));
}

void worker_service::serve_control(const control_head& head, std::span<const std::byte> body,
                                   std::optional<file_descriptor> descriptor) {
  wire_reader reader{body};
  switch (head.kind) {
  case control::set_up:
    break; // only valid as the first message
  case control::peer_link: {
    const auto from = reader.get<std::int32_t>();
    const auto to = reader.get<std::int32_t>();
    if (!reader.ok())
      break;
    return run_job(head, [this, head, from, to] {
      auto link = executes_->link(from, to);
      if (!link)
        return answer(head, link.error());
      wire_writer result;
      put(result, *link);
      answer(head, {}, result.bytes());
    });
  }
  case control::hand_over: {
    const auto key = reader.get<communicator_key>();
    const auto what = reader.get_bytes();
    if (!reader.ok())
      break;
    return answer(head, hand_over(key, what));
  }
  case control::tell:
    if (programs_ != nullptr)
      programs_->received(body);
    return answer(head, {});
  case control::told:
    break; // only sent by workers
  case control::make_communicator_id: {
    auto id = executes_->make_communicator_id();
    if (!id)
      return answer(head, id.error());
    return answer(head, {}, bytes_of(*id));
  }
  case control::build: {
    const auto what = reader.get<build_args>();
    if (!reader.ok() || what.rank < 0 || what.rank >= what.size)
      break;
    return run_job(head, [this, head, what] {
      communicator_key key = 0;
      auto error = build(what, key);
      answer(head, error, bytes_of(key));
    });
  }
  case control::call_off: {
    const auto id = reader.get<communicator_id>();
    if (!reader.ok())
      break;
    executes_->call_off(id);
    return answer(head, {});
  }
  case control::abort:
  case control::destroy: {
    const auto key = reader.get<communicator_key>();
    if (!reader.ok())
      break;
    return run_job(head, [this, head, key] { answer(head, end(head.kind, key)); });
  }
  case control::map: {
    const auto what = reader.get<map_args>();
    if (!reader.ok())
      break;
    return answer(head, map(what, std::move(descriptor)));
  }
  case control::unmap: {
    const auto segment = reader.get<std::uint64_t>();
    if (!reader.ok())
      break;
    return answer(head, unmap(segment));
  }
  }
  answer(head, malformed());
}

caf::error worker_service::build(const build_args& what, communicator_key& key) {
  const local_rank mine{what.rank, what.device};
  auto ranks = executes_->build(what.id, what.size, {&mine, 1});
  if (!ranks)
    return ranks.error();
  if (ranks->size() != 1)
    return make_error(errc::internal, "the build did not give exactly the requested rank");
  // On this thread: the one that drives the device has work of other communicators.
  stream_view stream;
  auto error = on_device([&] {
    auto made = device_->create_stream();
    if (!made)
      return made.error();
    stream = *made;
    return caf::error{};
  });
  if (!error)
    error = ranks->front()->connect(stream, connect_scope::everything);
  if (stream.native != nullptr)
    if (auto end = on_device([&] { return device_->destroy_stream(stream); }); end && !error)
      error = std::move(end);
  if (error) {
    if (auto end = executes_->abort(std::move(*ranks)))
      log(log_level::warning, "the end of a communicator gave an error", end);
    return error;
  }
  std::lock_guard lock{mutex_};
  key = ++last_communicator_;
  communicators_.emplace(key, std::move(*ranks));
  return {};
}

caf::error worker_service::end(control how, communicator_key key) {
  communicator_ranks owner;
  {
    std::unique_lock lock{mutex_};
    if (handed_over_.contains(key)) {
      lock.unlock();
      programs_->give_back(key);
      lock.lock();
      one_gone_.wait(lock, [&] { return !handed_over_.contains(key); });
    }
    if (gone_.erase(key) != 0)
      return {};
    auto i = communicators_.find(key);
    if (i == communicators_.end())
      return no_such("communicator");
    owner = std::move(i->second);
    communicators_.erase(i);
  }
  auto error = how == control::abort ? executes_->abort(std::move(owner))
                                     : executes_->destroy(std::move(owner));
  return error;
}

caf::error worker_service::hand_over(communicator_key key, std::span<const std::byte> what) {
  communicator_ranks rank;
  {
    std::lock_guard lock{mutex_};
    auto i = communicators_.find(key);
    if (i == communicators_.end())
      return no_such("communicator");
    if (programs_ == nullptr)
      return make_error(errc::not_supported, "the worker has no programs");
    rank = std::move(i->second);
    communicators_.erase(i);
    handed_over_.insert(key);
  }
  return programs_->take(key, std::move(rank), what);
}

void worker_service::gone(communicator_key key) noexcept {
  std::lock_guard lock{mutex_};
  handed_over_.erase(key);
  gone_.insert(key);
  one_gone_.notify_all();
}

caf::error worker_service::map(const map_args& what, std::optional<file_descriptor> descriptor) {
  if (!descriptor)
    return make_error(
        errc::unavailable,
        "no file descriptor arrived with the memory; the worker may have reached its limit");
  {
    std::lock_guard lock{mutex_};
    if (segments_.contains(what.segment))
      return make_error(errc::invalid_argument, "the memory is mapped already");
  }
  auto memory = shared_memory::attach(std::move(*descriptor), what.size_bytes);
  if (!memory)
    return memory.error();
  memory->close_descriptor(); // descriptors are scarce
  if (auto error = device_->register_pinned(memory->bytes().data(), memory->bytes().size()))
    return error;
  std::lock_guard lock{mutex_};
  segments_.emplace(what.segment, std::move(*memory)); // no conflict: messages come one at a time
  return {};
}

caf::error worker_service::unmap(std::uint64_t segment) {
  std::shared_ptr<shared_memory> gone;
  {
    std::lock_guard lock{mutex_};
    auto i = segments_.find(segment);
    if (i == segments_.end())
      return no_such("host memory");
    gone = std::make_shared<shared_memory>(std::move(i->second));
    segments_.erase(i);
  }
  // Does not wait: it may take as long as the work in the streams.
  std::lock_guard lock{asked_mutex_};
  asked_.push_back([this, gone] {
    if (auto error = retire(gone))
      fault(error);
  });
  any_asked_.store(true, std::memory_order_release);
  ring_.wake_reader();
  return {};
}

caf::error worker_service::retire(std::shared_ptr<shared_memory> memory) {
  auto& x = retired_.emplace_back(retired_segment{std::move(memory), {}});
  for (auto& [id, stream] : streams_) {
    auto event = device_->create_event();
    if (!event)
      return event.error();
    x.passed.push_back(*event);
    if (auto error = device_->record(*event, stream.native))
      return error;
  }
  free_retired();
  return {};
}

void worker_service::free_retired() noexcept {
  while (!retired_.empty()) {
    auto& x = retired_.front();
    for (auto& event : x.passed) {
      auto done = device_->query(event);
      if (!done)
        return fault(done.error());
      if (!*done)
        return;
    }
    for (auto& event : x.passed)
      if (auto error = device_->destroy_event(event))
        return fault(error);
    auto unregister = [this, memory = x.memory] {
      if (auto error = device_->unregister_pinned(memory->bytes().data()))
        log(log_level::warning, "host memory could not be unregistered", error);
    };
    if (run_job(unregister)) // on a job's thread: it may wait for the device
      unregister();
    retired_.pop_front();
  }
}

} // namespace troupe::detail
