#include "remote/host_gate.hpp"

#include "foundation/log.hpp"
#include "foundation/start_thread.hpp"
#include "foundation/system_call.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include <poll.h>

namespace troupe::detail {

namespace {

constexpr std::ptrdiff_t most_strangers = 64;
/// The pause after an error of poll or accept.
constexpr std::chrono::milliseconds pause{100};

} // namespace

caf::expected<std::unique_ptr<host_gate>> host_gate::start(const remote_hosts& where,
                                                           host_session::owner to) {
  auto context = tls_context::create(where.identity, tls_context::side::parent);
  if (!context)
    return context.error();
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
  std::unique_ptr<host_gate> result{new host_gate{std::move(*context), std::move(*listener),
                                                  std::move(*wake), *address, std::move(to)}};
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

void host_gate::make_room() noexcept {
  if (std::ranges::count_if(sessions_, [](auto& x) { return x->is_stranger(); }) < most_strangers)
    return;
  // From the oldest on; a stranger may just have become known.
  static_cast<void>(std::ranges::find_if(
      sessions_, [](auto& x) { return x->turn_away("too many connections have not joined yet"); }));
}

void host_gate::run() noexcept {
  while (!stop_.load()) {
    sessions_.remove_if([](auto& x) {
      const bool over = x->is_over();
      if (over)
        x->stop();
      return over;
    });
    const auto now = clock::now();
    const bool listens = now >= accept_from_;
    std::array<pollfd, 2> wanted{
        {{listens ? listener_.get() : -1, POLLIN, 0}, {wake_.native(), POLLIN, 0}}};
    const auto until = listens ? no_limit : accept_from_;
    if (::poll(wanted.data(), wanted.size(), poll_limit(until)) < 0 && errno != EINTR) {
      log(log_level::error, "hosts cannot join",
          system_failure("poll", errno, "cannot wait for connections"));
      accept_from_ = now + pause;
    }
    if (wanted[1].revents != 0)
      wake_.clear();
    if (wanted[0].revents != 0)
      accept();
  }
}

void host_gate::accept() noexcept {
  auto socket = accept_from(listener_);
  if (!socket) {
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      log(log_level::warning, "a host could not join",
          system_failure("accept", errno, "its connection was not accepted"));
      accept_from_ = clock::now() + pause;
    }
    return;
  }
  make_room();
  auto owner = to_;
  owner.ended = [this](host_session& x, const caf::error& why) {
    to_.ended(x, why);
    wake_.signal();
  };
  auto session = host_session::start(context_, std::move(socket), std::move(owner));
  if (!session)
    return log(log_level::warning, "a connection was refused", session.error());
  sessions_.push_back(std::move(*session));
}

} // namespace troupe::detail
