#include "remote/worker_relay.hpp"

#include "foundation/start_thread.hpp"
#include "foundation/system_call.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <mutex>
#include <new>
#include <utility>

#include <fcntl.h>

namespace troupe::detail {

namespace {

constexpr std::chrono::milliseconds doze{100};
/// The polling interval for words of other workers, which send no signal.
constexpr std::chrono::microseconds look_interval{50};

caf::error malformed(const char* what) {
  return make_error(errc::unavailable, std::string{"a host sent "} + what + " that cannot be read");
}

} // namespace

/// The link's sender, with what the relay shares with it: the connection to the worker, and the
/// host memory that the worker knows.
class worker_relay::sender final : public control_sender {
public:
  /// Rings `wakes` for the relay's thread; the link keeps the bell alive.
  sender(std::uint64_t number, std::shared_ptr<frame_link> way, bell& wakes)
      : channel(number), to(std::move(way)), wakes_(wakes) {}

  caf::error send(host_frame kind, std::initializer_list<std::span<const std::byte>> body,
                  frame_link::patience wait = frame_link::patience::none) const noexcept {
    return to->send(number(kind), channel, body, wait);
  }

  /// A mapping makes a segment on the other host, too; this side keeps its own. An unmapping goes
  /// to the relay's thread, which knows whether streams still wait for words in the segment.
  caf::error send(std::span<const std::byte> message,
                  std::optional<int> descriptor) noexcept override {
    wire_reader reader{message};
    const auto head = reader.get<control_head>();
    if (head.kind == control::map) {
      if (auto error = keep(reader.get<map_args>(), descriptor))
        return error;
    } else if (head.kind == control::unmap) {
      const auto segment = reader.get<std::uint64_t>();
      {
        std::lock_guard lock{mutex};
        unmaps.push_back({segment, {message.begin(), message.end()}});
      }
      any_unmaps.store(true);
      wakes_.ring();
      return {};
    }
    auto error = send(host_frame::request, {message});
    if (error &&
        code_of(error) != errc::out_of_range) // the connection is over: all relays are lost
      return make_error(errc::worker_lost, describe(error));
    return error;
  }

  void kill() noexcept override {
    // If the connection is over, nothing is left of the worker.
    static_cast<void>(send(host_frame::give_up, {}));
  }

  const std::uint64_t channel;
  const std::shared_ptr<frame_link> to;
  segment_table segments;

  std::mutex mutex;
  std::vector<unmap_message> unmaps; ///< for the relay's thread
  std::atomic<bool> any_unmaps{false};

private:
  caf::error keep(const map_args& what, std::optional<int> descriptor) {
    if (!descriptor)
      return make_error(errc::invalid_argument, "no file descriptor arrived with the memory");
    file_descriptor own{::fcntl(*descriptor, F_DUPFD_CLOEXEC, 0)};
    if (!own)
      return make_error(errc::unavailable, "no file descriptor is free");
    auto memory = shared_memory::attach(std::move(own), what.size_bytes);
    if (!memory)
      return memory.error();
    segments.add(what.segment, std::move(*memory));
    return {};
  }

  bell& wakes_;
};

caf::expected<std::shared_ptr<worker_relay>>
worker_relay::create(int ordinal, std::uint64_t channel, std::string host,
                     std::shared_ptr<frame_link> to, std::chrono::nanoseconds request_limit) {
  // Shared, since workers of this host may have to read its words.
  auto memory = shared_memory::create((sizeof(link_area) + 4095) / 4096 * 4096);
  if (!memory)
    return as_out_of_memory(memory.error());
  auto& area = *new (memory->bytes().data()) link_area;
  std::shared_ptr<worker_relay> result{new worker_relay{
      ordinal, std::move(host), std::make_shared<shared_memory>(std::move(*memory)), area,
      std::make_unique<sender>(channel, std::move(to), area.words.to_reader)}};
  result->link_->set_request_limit(request_limit);
  return result;
}

worker_relay::worker_relay(int ordinal, std::string host, std::shared_ptr<shared_memory> memory,
                           link_area& area, std::unique_ptr<sender> other)
    : ordinal_(ordinal), host_(std::move(host)), memory_(std::move(memory)), area_(area),
      other_(*other),
      link_(std::make_shared<worker_link>(ordinal, area, memory_, std::move(other))) {}

worker_relay::~worker_relay() { end(make_error(errc::unavailable, "the worker was released")); }

caf::error worker_relay::begin() noexcept {
  if (auto error = start_thread(thread_, [this] { run(); }, "for a worker"))
    return error;
  link_->on_loss([weak = weak_from_this()](const caf::error&) {
    auto self = weak.lock();
    if (!self)
      return;
    self->stop_.store(true);
    self->area_.words.to_reader.ring();
    // The other side may not know of the loss. If the connection is over, there is nothing to tell.
    static_cast<void>(self->other_.send(host_frame::give_up, {}));
  });
  return {};
}

void worker_relay::end(const caf::error& why) noexcept {
  link_->lose(why);
  link_->wait_until_told();
  stop_.store(true);
  area_.words.to_reader.ring();
  if (thread_.joinable())
    thread_.join();
}

caf::error worker_relay::as_here(const caf::error& x, const char* before) const {
  auto f = failure_of(x).value_or(failure{});
  if (!failure_of(x))
    f.detail = describe(x);
  if (f.device >= 0 || before != nullptr)
    f.device = ordinal_;
  if (before != nullptr)
    f.detail = before + host_ + ": " + f.detail;
  return make_error(std::move(f));
}

// -- to the worker

void worker_relay::run() noexcept {
  command_ring ring{area_.words, area_.commands};
  while (!stop_.load()) {
    command_head head;
    std::span<const std::byte> body;
    caf::error error = fire_watches();
    if (!error)
      error = send_unmaps();
    if (!error && ring.peek(head, body)) {
      error = forward(head, body);
      ring.pop(head);
    } else if (!error) {
      ring.wait_for_command(watches_.empty() ? std::chrono::nanoseconds{doze} : look_interval,
                            [this] { return stop_.load() || other_.any_unmaps.load(); });
    }
    if (error)
      return; // the connection is over: its owner has lost the link
  }
}

caf::error worker_relay::forward(const command_head& head, std::span<const std::byte> body) {
  wire_reader reader{body};
  caf::error error;
  switch (static_cast<command>(head.kind)) {
  case command::copy:
    error = note_copy(reader.get<copy_args>());
    break;
  case command::wait_word:
    note_wait(reader.get<wait_word_args>());
    break;
  case command::record: {
    const auto x = reader.get<record_args>();
    if (const auto& mine = behind(x.stream); !mine.empty())
      recorded_behind_[x.event] = mine;
    else
      recorded_behind_.erase(x.event);
    break;
  }
  case command::wait_event: {
    const auto x = reader.get<wait_event_args>();
    if (const auto i = recorded_behind_.find(x.event); i != recorded_behind_.end()) {
      auto& mine = behind_[x.stream];
      for (auto number : i->second)
        if (std::ranges::find(mine, number) == mine.end())
          mine.push_back(number);
    }
    break;
  }
  case command::destroy_stream:
    behind_.erase(reader.get<stream_id>());
    break;
  default:
    break;
  }
  if (error)
    return error;
  return other_.send(host_frame::command, {bytes_of(head), body}, frame_link::patience::room);
}

/// The content that an upload reads must arrive before its stream gets there. Before a word that
/// the stream waits for, the content may not even be here.
caf::error worker_relay::note_copy(const copy_args& x) {
  if (x.direction != copy_direction::host_to_device || x.size_bytes == 0)
    return {};
  const auto& before = behind(x.stream);
  if (before.empty())
    return send_content(x.host, x.size_bytes);
  const auto more = std::make_shared<content>(content{x.host, x.size_bytes, before.size()});
  for (auto number : before)
    watches_.at(number).contents.push_back(more);
  return {};
}

void worker_relay::note_wait(const wait_word_args& x) {
  auto segment = other_.segments.find(x.word.segment);
  if (!segment)
    return; // the worker will report the missing segment
  const auto bytes = part_of(*segment, x.word, sizeof(std::uint64_t));
  if (bytes.empty())
    return;
  const auto* word = reinterpret_cast<const std::atomic<std::uint64_t>*>(bytes.data());
  watches_.emplace(++last_watch_, watch{std::move(segment), word, {x.word, x.at_least}, {}});
  behind(x.stream).push_back(last_watch_);
}

worker_relay::watch_numbers& worker_relay::behind(stream_id stream) {
  auto& result = behind_[stream];
  std::erase_if(result, [this](auto number) { return !watches_.contains(number); });
  return result;
}

/// Checks each watch alone: a word may never come, or only after the word of another watch.
caf::error worker_relay::fire_watches() {
  for (auto i = watches_.begin(); i != watches_.end();) {
    const auto& x = i->second;
    if (x.word->load(std::memory_order_acquire) < x.what.value) {
      ++i;
      continue;
    }
    for (auto& y : x.contents)
      if (--y->watches == 0)
        if (auto error = send_content(y->from, y->size_bytes))
          return error;
    if (auto error = other_.send(host_frame::word, {bytes_of(x.what)}))
      return error;
    i = watches_.erase(i);
  }
  return {};
}

/// Keeps watched segments: the other host drops a word whose segment is gone, and its stream would
/// wait forever.
caf::error worker_relay::send_unmaps() {
  if (other_.any_unmaps.exchange(false)) {
    std::lock_guard lock{other_.mutex};
    std::move(other_.unmaps.begin(), other_.unmaps.end(), std::back_inserter(unmaps_));
    other_.unmaps.clear();
  }
  for (auto i = unmaps_.begin(); i != unmaps_.end();) {
    if (is_watched(i->segment)) {
      ++i;
      continue;
    }
    other_.segments.remove(i->segment);
    if (auto error = other_.send(host_frame::request, {i->bytes}))
      return error;
    i = unmaps_.erase(i);
  }
  return {};
}

bool worker_relay::is_watched(std::uint64_t segment) const noexcept {
  return std::ranges::any_of(watches_, [segment](const auto& x) {
    const auto& y = x.second;
    return y.what.word.segment == segment ||
           std::ranges::any_of(y.contents, [&](auto& z) { return z->from.segment == segment; });
  });
}

caf::error worker_relay::send_content(const shared_place& from, std::uint64_t size_bytes) {
  const auto segment = other_.segments.find(from.segment);
  if (!segment)
    return {}; // the worker will report the missing segment
  return detail::send_content(*other_.to, other_.channel, *segment, from, size_bytes);
}

// -- from the worker

caf::error worker_relay::received(host_frame kind, std::span<const std::byte> body) noexcept {
  wire_reader reader{body};
  switch (kind) {
  case host_frame::reply:
    return take_reply(reader);
  case host_frame::answer:
    return take_answer(body);
  case host_frame::done:
    return take_done(reader);
  case host_frame::content:
    return other_.segments.take_content(body) ? caf::error{} : malformed("content");
  case host_frame::lost: {
    auto why = reader.get<caf::error>();
    if (!why)
      return malformed("a loss");
    link_->lose(as_here(why, "on host "));
    return {};
  }
  default:
    return malformed("a frame of a channel");
  }
}

caf::error worker_relay::take_reply(wire_reader& from) {
  const auto number = from.get<std::uint64_t>();
  if (!from.ok())
    return malformed("a reply");
  auto rest = from.rest();
  wire_reader reader{rest};
  wire_writer instead;
  if (auto error = reader.get<caf::error>()) {
    instead.put(as_here(error));
    rest = instead.bytes();
  }
  if (rest.size() > area_.reply.size())
    return malformed("a reply");
  if (number <= area_.replied.load(std::memory_order_relaxed))
    return malformed("a second reply to one request");
  std::copy(rest.begin(), rest.end(), area_.reply.begin());
  area_.reply_size.store(static_cast<std::uint32_t>(rest.size()), std::memory_order_relaxed);
  area_.replied.store(number, std::memory_order_release);
  area_.to_asker.ring_sleepers();
  return {};
}

caf::error worker_relay::take_answer(std::span<const std::byte> message) {
  wire_reader reader{message};
  const auto head = reader.get<control_head>();
  if (!reader.ok())
    return malformed("an answer");
  if (auto error = reader.get<caf::error>())
    link_->received(answer_to(head, as_here(error)).bytes());
  else
    link_->received(message);
  return {};
}

caf::error worker_relay::take_done(wire_reader& from) {
  area_.communicator_errors.store(from.get<std::uint64_t>(), std::memory_order_release);
  while (from.ok() && !from.rest().empty()) {
    const auto x = from.get<done_event>();
    if (!from.ok() || x.event >= area_.done.size())
      return malformed("an event");
    raise_to(area_.done[x.event], x.record); // the loss of the link may have made it larger
  }
  return from.ok() ? caf::error{} : malformed("an event");
}

} // namespace troupe::detail
