#include "remote/delayed_wire.hpp"

#include "support/expect.hpp"

#include <algorithm>
#include <array>
#include <span>

#include <poll.h>

namespace troupe::testing {

namespace {

/// The longest interval at which the thread checks its flag.
constexpr std::chrono::milliseconds tick{5};

} // namespace

delayed_wire::delayed_wire(std::uint16_t port, clock::duration round_trip)
    : target_(must(detail::address_from_string("127.0.0.1"))), address_(target_),
      round_trip_(round_trip), listener_(must(detail::listen_at(address_))) {
  target_.port = port;
  thread_ = std::thread{[this] { run(); }};
}

delayed_wire::~delayed_wire() {
  stop_.store(true);
  thread_.join();
}

void delayed_wire::take(direction& x) const {
  std::array<std::byte, 65536> bytes;
  const auto got = detail::receive_some(x.from, bytes);
  if (got < 0)
    return;
  x.ended = got == 0;
  x.on_the_way.push_back({clock::now() + round_trip_ / 2, {bytes.begin(), bytes.begin() + got}});
}

bool delayed_wire::deliver(direction& x, clock::time_point now) {
  for (; !x.on_the_way.empty() && x.on_the_way.front().due <= now; x.on_the_way.pop_front()) {
    const auto& bytes = x.on_the_way.front().bytes;
    const std::array<std::span<const std::byte>, 1> all{bytes};
    if (bytes.empty() || detail::send_all(x.to, all) != 0)
      return false;
  }
  return true;
}

int delayed_wire::poll_ms(clock::time_point now) const {
  auto next = now + tick;
  for (auto& x : connections_) {
    if (!x.far)
      next = std::min(next, x.connects_at);
    else
      for (auto* y : {&x.there, &x.back})
        if (!y->on_the_way.empty())
          next = std::min(next, y->on_the_way.front().due);
  }
  return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(next - now).count());
}

void delayed_wire::run() {
  while (!stop_.load()) {
    std::vector<pollfd> wanted{{listener_.get(), POLLIN, 0}};
    std::vector<direction*> of;
    for (auto& x : connections_)
      for (auto* y : {&x.there, &x.back})
        if (x.far && !y->ended) {
          wanted.push_back({y->from, POLLIN, 0});
          of.push_back(y);
        }
    ::poll(wanted.data(), wanted.size(), poll_ms(clock::now()));
    for (std::size_t i = 0; i < of.size(); ++i)
      if (wanted[1 + i].revents != 0)
        take(*of[i]);
    const auto now = clock::now();
    if (wanted[0].revents != 0)
      if (auto near = detail::accept_from(listener_))
        connections_.push_back({std::move(near), {}, now + 3 * round_trip_ / 2, {}, {}});
    std::erase_if(connections_, [&](connection& x) {
      if (!x.far && x.connects_at <= now) {
        auto far = detail::connect_to(target_, now + std::chrono::seconds{5});
        if (!far)
          return true;
        x.far = std::move(*far);
        x.there = {x.near.get(), x.far.get(), false, {}};
        x.back = {x.far.get(), x.near.get(), false, {}};
        take(x.there); // sent with the connection
        for (auto& y : x.there.on_the_way)
          y.due = now;
      }
      return x.far && (!deliver(x.there, now) || !deliver(x.back, now));
    });
  }
}

} // namespace troupe::testing
