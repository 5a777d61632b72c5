#include "remote/host_session.hpp"

#include "foundation/fair_limit.hpp"
#include "foundation/log.hpp"
#include "foundation/option_check.hpp"
#include "foundation/peer_text.hpp"
#include "net/socket.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace troupe::detail {

namespace {

/// Returns the failure in `why`, never without a detail.
failure with_detail(const caf::error& why) {
  auto result = failure_of(why).value_or(failure{});
  if (result.detail.empty())
    result.detail = describe(why);
  return result;
}

/// Returns the error for all devices of a lost host.
caf::error lost_host(const std::string& name, const caf::error& why) {
  auto f = with_detail(why);
  f.detail = "the host " + name + " is lost: " + f.detail;
  f.code = errc::worker_lost;
  return make_error(std::move(f));
}

/// Returns the names in a certificate as one text.
std::string list_of(const std::vector<std::string>& names) {
  std::string result;
  for (auto& x : names)
    result += (result.empty() ? "" : ", ") + x;
  return names.empty() ? "no name" : peer_text(result, most_peer_name);
}

caf::error of_device(int device, const caf::error& why) {
  auto f = failure_of(why).value_or(failure{});
  f.device = device;
  return make_error(std::move(f));
}

} // namespace

caf::expected<std::shared_ptr<host_session>>
host_session::start(std::shared_ptr<tls_context> context, file_descriptor socket,
                    const socket_address& address, const limits& how_long, owner to) {
  auto stream = tls_stream::create(std::move(context), std::move(socket), to_string(address));
  if (!stream)
    return stream.error();
  std::shared_ptr<host_session> result{new host_session{std::move(to), how_long, address}};
  frame_link::options how;
  how.most_bytes = most_frame_bytes;
  frame_link::listener listener{std::bind_front(&host_session::received, result.get()),
                                std::bind_front(&host_session::ended, result.get())};
  if (auto error = frame_link::start(result->link_, std::move(*stream), how, std::move(listener)))
    return error;
  return result;
}

host_session::~host_session() { stop(); }

void host_session::stop() noexcept {
  if (link_)
    link_->stop();
}

std::optional<stranger> host_session::as_stranger() const noexcept {
  if (phase_.load() != phase::stranger)
    return std::nullopt;
  return stranger{address_, link_->is_authenticated() ? stranger_stage::authenticated
                                                      : stranger_stage::handshake};
}

bool host_session::turn_away(const char* why) noexcept {
  auto was = phase::stranger;
  if (!phase_.compare_exchange_strong(was, phase::over))
    return false;
  link_->end(make_error(errc::unavailable, to_string(address_) + " is turned away: " + why));
  return true;
}

log_kind host_session::kind_of_line() const noexcept {
  if (!name_.empty())
    return log_kind::members;
  return link_->has_certificate() ? log_kind::certificates : log_kind::strangers;
}

// -- received frames

caf::error host_session::received(const frame_head& head, std::span<const std::byte> body) {
  if (refused_)
    return {}; // the refusal is on its way
  const auto kind = static_cast<host_frame>(head.kind);
  switch (phase_.load()) {
  case phase::stranger:
    return take_hello(kind == host_frame::hello ? body : std::span<const std::byte>{});
  case phase::greeted:
    if (kind == host_frame::ready)
      return take_ready(body);
    if (kind == host_frame::refused)
      return make_error(errc::unavailable,
                        name_ + " cannot join: " + peer_text(wire_reader{body}.get<std::string>()));
    break;
  case phase::joined:
    if (kind == host_frame::started || kind == host_frame::released)
      return take_answer(head.channel, body);
    if (kind == host_frame::told) {
      wire_reader reader{body};
      const auto device = reader.get<std::int32_t>();
      if (!reader.ok())
        break;
      to_.told(*this, device, reader.rest());
      return {};
    }
    // A channel that has ended here may still be in use there.
    if (auto relay = find(head.channel))
      return relay->received(kind, body);
    return {};
  case phase::over:
    return {};
  }
  return make_error(errc::unavailable, link_->peer() + " sent an unexpected message");
}

caf::error host_session::refuse(const caf::error& why) {
  refused_ = true;
  const auto text = with_detail(why).detail;
  link_->send_last(number(host_frame::refused), packed(std::string_view{text}).bytes(),
                   make_error(errc::unavailable, link_->peer() + " is refused: " + text));
  return {};
}

caf::error host_session::take_hello(std::span<const std::byte> body) {
  auto name = read_host_hello(body);
  if (!name)
    return refuse(name.error());
  if (const auto names = link_->peer_names(); std::ranges::find(names, *name) == names.end())
    return refuse(make_error(errc::unavailable,
                             "its certificate is for " + list_of(names) + ", not for " + *name));
  auto what = to_.greet(*this, *name);
  if (!what)
    return refuse(what.error());
  name_ = std::move(*name);
  auto was = phase::stranger;
  if (!phase_.compare_exchange_strong(was, phase::greeted))
    return {}; // it is turned away
  silence_limit_ = std::chrono::nanoseconds{what->silence_limit_ns};
  link_->expect(limits_.join);
  return link_->send(number(host_frame::welcome), 0, {packed(*what).bytes()});
}

caf::error host_session::take_ready(std::span<const std::byte> body) {
  wire_reader reader{body};
  const auto devices = reader.get<std::int32_t>();
  constexpr int most_devices = 1024;
  if (!reader.ok() || devices <= 0 || devices > most_devices)
    return make_error(errc::unavailable, name_ + " has an invalid number of devices");
  phase_.store(phase::joined);
  link_->admit(silence_limit_);
  if (auto error = to_.joined(*this, devices))
    return refuse(error);
  return {};
}

caf::error host_session::take_answer(std::uint64_t to, std::span<const std::byte> body) {
  auto question = take_question(to);
  if (question.empty()) // given up meanwhile, or never asked
    return to <= last_channel_
               ? caf::error{}
               : make_error(errc::unavailable, name_ + " answers a request that was not made");
  unanswered_.store(0);
  wire_reader reader{body};
  auto error = reader.get<caf::error>();
  question.mapped().set_value(
      reader.ok() ? error : make_error(errc::unavailable, "an answer that cannot be parsed"));
  return {};
}

void host_session::ended(const caf::error& why) {
  const auto was = phase_.exchange(phase::over);
  std::map<std::uint64_t, std::weak_ptr<worker_relay>> relays;
  question_map questions;
  const auto lost = was == phase::joined ? lost_host(name_, why) : why;
  {
    std::lock_guard lock{mutex_};
    why_ = lost;
    relays.swap(relays_);
    questions.swap(questions_);
  }
  to_.ended(*this, lost); // before a lane asks for another worker
  for (auto& [channel, weak] : relays)
    if (auto relay = weak.lock())
      relay->link()->lose(of_device(relay->link()->device(), lost));
  for (auto& [channel, question] : questions)
    question.set_value(lost);
}

host_session::question_map::node_type host_session::take_question(std::uint64_t channel) {
  std::lock_guard lock{mutex_};
  return questions_.extract(channel);
}

std::shared_ptr<worker_relay> host_session::find(std::uint64_t channel) {
  std::lock_guard lock{mutex_};
  auto i = relays_.find(channel);
  return i != relays_.end() ? i->second.lock() : nullptr;
}

// -- requests

caf::error host_session::ask(std::uint64_t channel, host_frame kind,
                             std::span<const std::byte> body, const char* what,
                             std::chrono::nanoseconds limit, const std::stop_token& stop) noexcept {
  std::future<caf::error> answer;
  {
    std::lock_guard lock{mutex_};
    if (why_)
      return why_;
    answer = questions_[channel].get_future();
  }
  if (auto error = link_->send(number(kind), channel, {body})) {
    std::lock_guard lock{mutex_};
    questions_.erase(channel);
    return why_ ? why_ : error;
  }
  const std::stop_callback on_stop{
      stop,
      [this, channel] { give_up(channel, make_error(errc::unavailable, "it was released")); }};
  for (fair_limit left{limit}; answer.wait_until(left.next()) != std::future_status::ready;)
    if (left.over()) { // what follows answers
      const auto why =
          make_error(errc::unavailable, name_ + " has not answered a request to " + what +
                                            " a worker within " + text_of(limit));
      if (unanswered_.fetch_add(1) != 0)
        link_->end(why);
      give_up(channel, why);
      break;
    }
  return answer.get();
}

void host_session::give_up(std::uint64_t channel, const caf::error& why) noexcept {
  auto question = take_question(channel);
  if (question.empty()) // answered meanwhile
    return;
  // If the connection is over, no work goes on at its other end.
  static_cast<void>(link_->send(number(host_frame::give_up), channel, {}));
  question.mapped().set_value(why);
}

caf::expected<std::shared_ptr<worker_relay>>
host_session::start_worker(int device, int ordinal, bool spare,
                           const std::stop_token& stop) noexcept {
  const auto channel = ++last_channel_;
  auto relay = worker_relay::create(ordinal, channel, name_, link_, limits_.request);
  if (!relay)
    return relay.error();
  {
    std::lock_guard lock{mutex_};
    if (why_)
      return why_;
    std::erase_if(relays_, [](const auto& x) { return x.second.expired(); });
    relays_.emplace(channel, *relay);
  }
  const start_args what{device, spare};
  const auto limit = spare ? 3 * limits_.start : limits_.start; // after its device's worker; warm
  if (auto error = ask(channel, host_frame::start, bytes_of(what), "start", limit, stop))
    return error;
  if (auto error = (*relay)->begin()) {
    static_cast<void>(link_->send(number(host_frame::give_up), channel, {})); // or it is over
    return error;
  }
  return *relay;
}

void host_session::release(int device) noexcept {
  const std::int32_t what = device;
  if (auto error =
          ask(++last_channel_, host_frame::release, bytes_of(what), "end", limits_.release))
    log(log_level::debug, "a host ended before its worker was released", error, log_kind::members);
}

} // namespace troupe::detail
