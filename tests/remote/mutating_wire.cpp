#include "remote/mutating_wire.hpp"

#include "remote/messages.hpp"
#include "support/expect.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include <poll.h>

namespace troupe::testing {

namespace {

using detail::host_frame;
using detail::tls_context;
using detail::tls_stream;

/// One in so many frames is changed.
constexpr std::uint64_t share = 8;
/// The longest interval at which the thread checks its flags.
constexpr int tick_ms = 20;

bool stays_whole(std::uint32_t kind) {
  return kind == detail::number(host_frame::command) || kind == detail::number(host_frame::content);
}

void append(std::vector<std::byte>& to, std::span<const std::byte> what) {
  to.insert(to.end(), what.begin(), what.end());
}

} // namespace

mutating_wire::mutating_wire(test_authority& authority, const std::string& name, std::uint16_t port,
                             std::uint64_t seed)
    : as_parent_(must(tls_context::create(authority.issue("parent"), tls_context::side::parent))),
      as_agent_(must(tls_context::create(authority.issue(name), tls_context::side::agent))),
      target_(must(detail::address_from_string("127.0.0.1"))), address_(target_),
      listener_(must(detail::listen_at(address_))), random_(seed) {
  target_.port = port;
  thread_ = std::thread{[this] { run(); }};
}

mutating_wire::~mutating_wire() {
  stop_.store(true);
  thread_.join();
}

void mutating_wire::run() {
  while (!stop_.load()) {
    std::vector<pollfd> wanted{{listener_.get(), POLLIN, 0}};
    for (auto& x : connections_)
      for (auto* y : {&x.agent, &x.parent})
        wanted.push_back({y->stream.native(),
                          static_cast<short>(y->out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
    ::poll(wanted.data(), wanted.size(), tick_ms);
    if (wanted[0].revents != 0)
      accept();
    if (hangs_up_.exchange(false))
      connections_.clear();
    connections_.remove_if([this](connection& x) { return !serve(x); });
  }
}

void mutating_wire::accept() {
  auto near = detail::accept_from(listener_);
  if (!near)
    return;
  auto far =
      detail::connect_to(target_, std::chrono::steady_clock::now() + std::chrono::seconds{5});
  if (!far)
    return;
  ++accepted_;
  connections_.push_back(
      {{must(tls_stream::create(as_parent_, std::move(near), "the agent")), {}, {}, {}},
       {must(tls_stream::create(as_agent_, std::move(*far), "the parent")), {}, {}, {}}});
}

bool mutating_wire::serve(connection& x) {
  return forward(x.agent, x.parent, false) && forward(x.parent, x.agent, true) && send(x.agent) &&
         send(x.parent);
}

bool mutating_wire::forward(end& from, end& to, bool to_agent) {
  std::array<std::byte, 65536> some;
  for (bool more = true; more;) {
    std::size_t got = 0;
    const auto outcome = from.stream.read(some, got);
    if (outcome == tls_stream::outcome::failed)
      return false;
    more = outcome == tls_stream::outcome::done;
    append(from.came, std::span{some}.first(got));
  }
  while (from.came.size() >= sizeof(detail::frame_head)) {
    frame x;
    std::memcpy(&x.head, from.came.data(), sizeof x.head);
    const auto size = sizeof x.head + x.head.size;
    if (from.came.size() < size)
      break;
    const auto begin = from.came.begin();
    x.body.assign(begin + sizeof x.head, begin + static_cast<std::ptrdiff_t>(size));
    from.came.erase(begin, begin + static_cast<std::ptrdiff_t>(size));
    if (honest_ || (to_agent && stays_whole(x.head.kind)) || any(share) != 0)
      pass_on(std::move(x), from, to);
    else {
      std::vector<frame> more;
      mutate(x, more, from);
      for (auto& y : more)
        pass_on(std::move(y), from, to);
    }
  }
  return true;
}

/// Frames that were delayed follow behind this one.
void mutating_wire::pass_on(frame x, end& from, end& to) {
  auto delayed = std::exchange(from.delayed, {});
  delayed.insert(delayed.begin(), std::move(x));
  for (auto& y : delayed) {
    append(to.out, detail::bytes_of(y.head));
    append(to.out, y.body);
  }
}

/// Changes, cuts or extends the body.
void mutating_wire::spoil(frame& x) {
  constexpr std::array<std::uint64_t, 8> extremes{
      0, 1, 0x7fff'ffff, 0xffff'ffff, 1ULL << 32, 1ULL << 62, (1ULL << 63) - 1, ~0ULL};
  switch (any(4)) {
  case 0: // some bits
    for (auto n = any(3); !x.body.empty() && n < 3; ++n)
      x.body[any(x.body.size())] ^= static_cast<std::byte>(1 << any(8));
    break;
  case 1:
    x.body.resize(any(x.body.size() + 1));
    break;
  case 2:
    for (auto n = any(40); n != 0; --n)
      x.body.push_back(static_cast<std::byte>(any(256)));
    break;
  default:
    for (std::size_t at = 0; at + 8 <= x.body.size(); at += 8)
      if (any(4) == 0)
        std::memcpy(x.body.data() + at, &extremes[any(extremes.size())], 8);
  }
  x.head.size = static_cast<std::uint32_t>(x.body.size());
}

/// Adds to `more` what is sent in place of `x`: mostly `x` itself, too, so that the work goes on.
/// Most changes end the connection, which takes long. Those that may not are made several times.
void mutating_wire::mutate(frame& x, std::vector<frame>& more, end& from) {
  if (any(64) != 0) // else the other side may wait for it, up to its limits
    more.push_back(x);
  const auto before = more.size();
  const auto what = any(24);
  if (what < 7) { // frames of channels that are not in use, most likely
    for (auto n = any(10) + 1; n != 0; --n) {
      auto& y = more.emplace_back(x);
      y.head.channel = any(2) == 0 ? any(64) : random_();
      spoil(y);
    }
  } else if (what < 14) { // signs of life, with a body
    for (auto n = any(10) + 1; n != 0; --n) {
      auto& y = more.emplace_back(x);
      y.head.kind = detail::number(host_frame::beat);
      spoil(y);
    }
  } else if (what < 16)
    more.insert(more.end(), any(10) + 1, x);
  else if (what < 20)
    spoil(more.emplace_back(x));
  else if (what == 20)
    more.emplace_back(x).head.kind = static_cast<std::uint32_t>(any(22));
  else if (what == 21) // from here on, the other side sees other frames
    more.emplace_back(x).head.size = static_cast<std::uint32_t>(random_());
  else { // none, or later
    ++mutated_;
    if (what == 22)
      from.delayed.push_back(std::move(x));
  }
  mutated_ += more.size() - before;
}

bool mutating_wire::send(end& x) {
  while (!x.out.empty()) {
    std::size_t sent = 0;
    const auto outcome = x.stream.write(x.out, sent);
    if (outcome == tls_stream::outcome::failed)
      return false;
    if (outcome != tls_stream::outcome::done)
      return true;
    x.out.erase(x.out.begin(), x.out.begin() + static_cast<std::ptrdiff_t>(sent));
  }
  return true;
}

} // namespace troupe::testing
