#include "remote/agent_worker.hpp"

#include <chrono>
#include <optional>
#include <utility>

namespace troupe::detail {

namespace {

/// The polling interval: the worker sends no signal when an event is done.
constexpr std::chrono::microseconds look_interval{20};
/// The limit of queued bytes. A lane and most other callers wait for replies, so no correct parent
/// reaches it.
constexpr std::size_t most_queued_bytes = std::size_t{8} << 20;

caf::error malformed(const char* what) {
  return make_error(errc::unavailable,
                    std::string{"the parent sent "} + what + " that cannot be read");
}

} // namespace

agent_worker::agent_worker(std::uint64_t channel, int device, std::shared_ptr<worker_link> link,
                           std::shared_ptr<frame_link> to)
    : channel_(channel), device_(device), link_(std::move(link)), to_(std::move(to)),
      watcher_([this](const std::stop_token& stop) { watch(stop); }) {}

agent_worker::~agent_worker() {
  if (!commands_.is_idle() || !requests_.is_idle())
    link_->give_up(make_error(errc::unavailable, "the parent released the worker"));
}

void agent_worker::begin() {
  link_->on_loss([to = to_, channel = channel_](const caf::error& why) {
    // If the send fails, the parent has lost the worker by itself.
    static_cast<void>(to->send(number(host_frame::lost), channel, {packed(why).bytes()}));
  });
}

caf::error agent_worker::received(host_frame kind, std::span<const std::byte> body) {
  switch (kind) {
  case host_frame::command:
    if (body.size() < sizeof(command_head))
      return malformed("a command");
    return post(commands_, &agent_worker::execute, body);
  case host_frame::request:
    if (body.size() < sizeof(control_head))
      return malformed("a request");
    return post(requests_, &agent_worker::serve, body);
  // No work in a stream uses these bytes now. The host memory of a copy stays unchanged until the
  // copy is done, or its stream waits for a word, which comes after the content.
  case host_frame::content:
    return segments_.take_content(body) ? caf::error{} : malformed("content");
  case host_frame::word: {
    wire_reader reader{body};
    const auto x = reader.get<word_args>();
    return reader.ok() ? take_word(x) : malformed("a word");
  }
  default:
    return malformed("a frame of a channel");
  }
}

caf::error agent_worker::post(serial_thread& to, job what, std::span<const std::byte> body) {
  if (queued_bytes_.fetch_add(body.size()) > most_queued_bytes)
    return make_error(errc::unavailable, "the parent sends more commands than it waits for");
  to.post([this, what, message = std::vector<std::byte>{body.begin(), body.end()}] {
    (this->*what)(message);
    queued_bytes_.fetch_sub(message.size());
  });
  return {};
}

caf::error agent_worker::take_word(const word_args& x) {
  const auto segment = segments_.find(x.word.segment);
  if (!segment)
    return {}; // it could not be made, which its users report
  const auto bytes = part_of(*segment, x.word, sizeof(std::uint64_t));
  if (bytes.empty() || x.word.offset % sizeof(std::uint64_t) != 0)
    return malformed("a word");
  raise_to(*reinterpret_cast<std::atomic<std::uint64_t>*>(bytes.data()), x.value);
  return {};
}

// -- commands

void agent_worker::execute(const std::vector<std::byte>& frame) {
  wire_reader reader{frame};
  const auto head = reader.get<command_head>();
  switch (static_cast<command>(head.kind)) {
  case command::record: {
    const auto x = reader.get<record_args>();
    if (reader.ok() && x.event < link_area::event_count)
      return record(x);
    break;
  }
  case command::skip:
  case command::stop: // the worker is released instead
    break;
  default:
    return ask(head, reader.rest());
  }
}

void agent_worker::record(const record_args& x) {
  if (link_->tell(command::record, x))
    return; // it is lost, which `on_loss` reports
  outstanding more{{x.event, x.number}, {}};
  if (auto i = downloads_.find(x.stream); i != downloads_.end()) {
    more.downloads = std::move(i->second);
    downloads_.erase(i);
  }
  {
    std::lock_guard lock{mutex_};
    outstanding_.push_back(std::move(more));
  }
  changed_.notify_all();
}

void agent_worker::ask(const command_head& head, std::span<const std::byte> body) {
  const auto what = static_cast<command>(head.kind);
  auto reply = link_->ask_bytes(what, body);
  if (link_->lost())
    return;
  if (reply && what == command::copy)
    note_copy(wire_reader{body}.get<copy_args>());
  if (what == command::destroy_stream)
    downloads_.erase(wire_reader{body}.get<stream_id>());
  if (head.wants_reply == 0)
    return;
  const auto error = packed(reply ? caf::error{} : reply.error());
  // If the connection is over, everything here ends.
  static_cast<void>(to_->send(number(host_frame::reply), channel_,
                              {bytes_of(head.number), error.bytes(),
                               reply ? reply->rest() : std::span<const std::byte>{}}));
}

void agent_worker::note_copy(const copy_args& x) {
  if (x.direction != copy_direction::device_to_host || x.size_bytes == 0)
    return;
  if (auto segment = segments_.find(x.host.segment))
    downloads_[x.stream].push_back({std::move(segment), x.host, x.size_bytes});
}

// -- requests

void agent_worker::serve(const std::vector<std::byte>& message) {
  wire_reader reader{message};
  const auto head = reader.get<control_head>();
  const auto body = std::span{message}.subspan(sizeof head);
  const auto answer = answerer_of(head);
  switch (head.kind) {
  case control::check_build:
  case control::build:
  case control::close:
  case control::abort:
  case control::destroy: // they take their time, and the parent has a limit for it
    return link_->request(head.kind, body, std::nullopt, answer);
  case control::map:
    return answer(map(reader.get<map_args>()));
  case control::unmap:
    segments_.remove(reader.get<std::uint64_t>());
    break;
  default:
    break;
  }
  answer(link_->request(head.kind, body));
}

/// The answer is the one that a worker itself would send.
worker_link::reply_handler agent_worker::answerer_of(const control_head& head) const {
  return [to = to_, channel = channel_, head](const worker_reply& x) {
    const auto message = x ? answer_to(head, {}, x->bytes) : answer_to(head, x.error());
    static_cast<void>(to->send(number(host_frame::answer), channel, {message.bytes()}));
  };
}

/// Makes the segment's own memory on this host. Content is exchanged with the parent's memory when
/// it is used.
worker_reply agent_worker::map(const map_args& what) {
  auto memory = shared_memory::create(what.size_bytes);
  if (!memory)
    return memory.error();
  const auto kept = segments_.add(what.segment, std::move(*memory));
  auto mapped = link_->request(control::map, what, kept->descriptor());
  if (!mapped)
    segments_.remove(what.segment);
  return mapped;
}

// -- done events

void agent_worker::watch(const std::stop_token& stop) {
  for (std::unique_lock lock{mutex_};;) {
    changed_.wait(lock, stop, [this] { return !outstanding_.empty(); });
    if (stop.stop_requested())
      return;
    auto done = take_done(outstanding_, [this](const auto& x) {
      return link_->done_word(x.what.event).load(std::memory_order_acquire) >= x.what.record;
    });
    lock.unlock();
    if (link_->lost()) // all events count as done then
      return;
    if (done.empty())
      std::this_thread::sleep_for(look_interval);
    else if (!tell_done(done))
      return;
    lock.lock();
  }
}

bool agent_worker::tell_done(std::vector<outstanding>& done) {
  // Read first: the worker notes an error before it reports events as done.
  const auto errors = link_->communicator_errors();
  std::vector<done_event> events;
  for (auto& x : done) {
    for (auto& y : x.downloads)
      if (send_content(*to_, channel_, *y.keep, y.from, y.size_bytes))
        return false;
    events.push_back(x.what);
  }
  return !to_->send(number(host_frame::done), channel_,
                    {bytes_of(errors), std::as_bytes(std::span{events})});
}

} // namespace troupe::detail
