#include "remote/host_gate.hpp"

#include "foundation/log.hpp"
#include "foundation/start_thread.hpp"
#include "foundation/system_call.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>
#include <utility>

#include <sys/resource.h>

namespace troupe::detail {

namespace {

/// The pause after an error of poll or accept.
constexpr std::chrono::milliseconds pause{100};
/// After this many connections at once the thread rests for a moment, so that a flood of them
/// leaves the processor to others.
constexpr int most_at_once = 64;
constexpr std::chrono::milliseconds rest{2};
/// The limit from the connection until its first message.
constexpr std::chrono::seconds hello_limit{5};
/// One session in this time is turned away for another one, since each costs a thread and a key.
constexpr std::chrono::milliseconds turn{2};
constexpr std::size_t largest_hello = 17 << 10;
constexpr auto too_many = "too many connections have not joined yet";

/// Returns how many descriptors the process may have.
std::size_t descriptor_limit() noexcept {
  rlimit result{};
  return ::getrlimit(RLIMIT_NOFILE, &result) == 0 ? static_cast<std::size_t>(result.rlim_cur) : 0;
}

void refuse(file_descriptor socket, const socket_address& from, const std::string& why) noexcept {
  close_at_once(std::move(socket));
  log(log_level::warning, "a connection was refused",
      make_error(errc::unavailable, to_string(from) + " " + why), log_kind::strangers);
}

} // namespace

caf::expected<std::unique_ptr<host_gate>> host_gate::start(const remote_hosts& where,
                                                           const host_session::limits& how_long,
                                                           host_session::owner to) {
  auto identity = tls_identity::create(where.identity, tls_context::side::parent);
  if (!identity)
    return identity.error();
  auto address = address_from_string(where.listen_address);
  if (!address)
    return address.error();
  address->port = where.port;
  auto listener = listen_at(*address);
  if (!listener)
    return listener.error();
  auto wake = wake_up::create();
  if (!wake)
    return wake.error();
  std::unique_ptr<host_gate> result{new host_gate{std::move(*identity), std::move(*listener),
                                                  std::move(*wake), *address, how_long,
                                                  std::move(to)}};
  if (auto error = start_thread(
          result->thread_, [self = result.get()] { self->run(); }, "to listen for hosts"))
    return error;
  return result;
}

host_gate::~host_gate() {
  stop_.store(true);
  wake_.signal();
  if (thread_.joinable())
    thread_.join();
  for (auto& x : sessions_)
    x->stop();
}

void host_gate::run() noexcept {
  while (!stop_.load()) {
    remove_ended();
    wait();
    look_at_callers();
    begin_sessions();
    accept_all();
  }
}

host_gate::clock::time_point host_gate::next_limit(clock::time_point now) const noexcept {
  auto result = now >= accept_from_ ? no_limit : accept_from_;
  if (callers_.empty())
    return result;
  result = std::min(result, callers_.front().since + hello_limit);
  const bool any_waits =
      std::ranges::any_of(callers_, [](auto& x) { return x.at == stranger_stage::waiting; });
  return any_waits ? std::min(result, turn_away_from_) : result;
}

void host_gate::wait() noexcept {
  const auto now = clock::now();
  wanted_.clear();
  wanted_.push_back({now >= accept_from_ ? listener_.get() : -1, POLLIN, 0});
  wanted_.push_back({wake_.native(), POLLIN, 0});
  for (auto& x : callers_) {
    const bool is_silent = x.at == stranger_stage::silent;
    wanted_.push_back({x.socket.get(), static_cast<short>(is_silent ? POLLIN | POLLRDHUP : 0), 0});
  }
  if (::poll(wanted_.data(), wanted_.size(), poll_limit(next_limit(now))) < 0) {
    for (auto& x : wanted_)
      x.revents = 0;
    if (errno == EINTR)
      return;
    log(log_level::error, "hosts cannot join",
        system_failure("poll", errno, "cannot wait for connections"), log_kind::members);
    accept_from_ = now + pause;
  }
  if (wanted_[1].revents != 0)
    wake_.clear();
}

void host_gate::remove_ended() noexcept {
  sessions_.remove_if([](auto& x) {
    const bool over = x->is_over();
    if (over)
      x->stop();
    return over;
  });
}

// -- before the first message

void host_gate::accept_all() noexcept {
  if (wanted_[0].revents == 0)
    return;
  for (int i = 0; i < most_at_once; ++i)
    if (!accept())
      return;
  accept_from_ = clock::now() + rest;
}

bool host_gate::accept() noexcept {
  auto socket = accept_from(listener_);
  const int code = errno;
  if (socket) {
    const auto from = other_end(socket);
    if (from && wake_at(socket.get(), tls_record_head) == 0) { // else it has ended
      callers_.push_back({std::move(socket), *from, clock::now()});
      limit_callers(stranger_stage::silent);
    }
    return true;
  }
  if (code == EAGAIN || code == EWOULDBLOCK)
    return false;
  if ((code == EMFILE || code == ENFILE) && !callers_.empty()) {
    auto& oldest = callers_.front();
    refuse(std::move(oldest.socket), oldest.from, "is turned away: no file descriptor is free");
    callers_.erase(callers_.begin());
    return true;
  }
  log(log_level::warning, "a host could not join",
      system_failure("accept", code, "its connection was not accepted"), log_kind::strangers);
  accept_from_ = clock::now() + pause;
  return false;
}

void host_gate::limit_callers(stranger_stage at) noexcept {
  std::vector<stranger> present;
  for (auto& x : callers_)
    present.push_back({x.from, x.at});
  const auto i = find_surplus(present, at, limits_of(at, descriptor_limit()), random_);
  if (!i)
    return;
  const auto gone = callers_.begin() + static_cast<std::ptrdiff_t>(*i);
  refuse(std::move(gone->socket), gone->from, std::string{"is turned away: "} + too_many);
  callers_.erase(gone);
}

void host_gate::look_at_callers() noexcept {
  const auto now = clock::now();
  std::size_t now_waiting = 0;
  for (std::size_t i = 0; i < callers_.size(); ++i) {
    auto& x = callers_[i];
    const auto events = wanted_[2 + i].revents;
    auto what = events != 0 ? look_at_hello(x) : hello::incomplete;
    if (what == hello::incomplete && (events & (POLLRDHUP | POLLHUP | POLLERR)) != 0)
      what = hello::none; // no more comes
    if (what == hello::complete) {
      x.at = stranger_stage::waiting;
      ++now_waiting;
    } else if (what == hello::none) {
      x.socket.reset();
    } else if (what == hello::invalid) {
      refuse(std::move(x.socket), x.from, "does not use TLS");
    } else if (now >= x.since + hello_limit) {
      refuse(std::move(x.socket), x.from, "has not begun a handshake within 5 s");
    }
  }
  std::erase_if(callers_, [](const caller& x) { return !x.socket; });
  for (; now_waiting != 0; --now_waiting)
    limit_callers(stranger_stage::waiting);
}

host_gate::hello host_gate::look_at_hello(const caller& x) noexcept {
  if (x.at == stranger_stage::waiting) // poll has told of its end
    return hello::none;
  std::array<std::byte, largest_hello> bytes;
  const auto got = look_at(x.socket.get(), bytes);
  if (got < 0)
    return hello::incomplete;
  if (static_cast<std::size_t>(got) < tls_record_head)
    return hello::none;
  const auto size = size_of_hello(std::span{bytes}.first<tls_record_head>());
  if (!size)
    return hello::invalid;
  if (static_cast<std::size_t>(got) >= *size)
    return wake_at(x.socket.get(), 1) == 0 ? hello::complete : hello::none;
  return wake_at(x.socket.get(), *size) == 0 ? hello::incomplete : hello::none;
}

// -- with a session

void host_gate::begin_sessions() noexcept {
  for (auto& x : callers_) {
    if (clock::now() < turn_away_from_)
      break;
    if (x.at == stranger_stage::waiting && has_room(x.from))
      begin_session(std::exchange(x, {}));
  }
  std::erase_if(callers_, [](const caller& x) { return !x.socket; });
}

bool host_gate::has_room(const socket_address& next) noexcept {
  std::vector<stranger> present;
  std::vector<host_session*> sessions;
  for (auto& x : sessions_)
    if (const auto as = x->as_stranger()) {
      present.push_back(*as);
      sessions.push_back(x.get());
    }
  const auto who = [&](stranger_stage at) {
    return find_surplus(present, at, limits_of(at, descriptor_limit()), random_);
  };
  if (const auto i = who(stranger_stage::authenticated))
    sessions[*i]->turn_away(too_many); // or it has just become known
  present.push_back({next, stranger_stage::handshake});
  const auto i = who(stranger_stage::handshake);
  if (!i)
    return true;
  turn_away_from_ = clock::now() + turn;
  return *i != sessions.size() && sessions[*i]->turn_away(too_many); // else `next` itself waits
}

void host_gate::begin_session(caller x) noexcept {
  auto owner = to_;
  owner.ended = [this](host_session& who, const caf::error& why) {
    to_.ended(who, why);
    wake_.signal();
  };
  auto session = host_session::start(identity_->current(), std::move(x.socket), x.from, how_long_,
                                     std::move(owner));
  if (!session)
    return log(log_level::warning, "a connection was refused", session.error(),
               log_kind::strangers);
  sessions_.push_back(std::move(*session));
}

} // namespace troupe::detail
