#include "remote/test_wire.hpp"

#include "support/expect.hpp"

#include <array>
#include <chrono>
#include <cstddef>
#include <vector>

#include <poll.h>
#include <sys/socket.h>

namespace troupe::testing {

namespace {

/// Interval at which the thread checks its flags.
constexpr int tick_ms = 5;

} // namespace

test_wire::test_wire(std::uint16_t port)
    : target_(must(detail::address_from_string("127.0.0.1"))), address_(target_),
      listener_(must(detail::listen_at(address_))), thread_() {
  target_.port = port;
  thread_ = std::thread{[this] { run(); }};
}

test_wire::~test_wire() {
  stop_.store(true);
  thread_.join();
}

void test_wire::cut() {
  is_cut_.store(true);
  for (const auto from = rounds_.load(); rounds_.load() < from + 2;)
    std::this_thread::yield();
}

bool test_wire::pass_on(int from, int to) {
  std::array<std::byte, 65536> bytes;
  const auto got = ::recv(from, bytes.data(), bytes.size(), 0);
  if (got <= 0)
    return false;
  const std::array<std::span<const std::byte>, 1> all{
      std::span{bytes}.first(static_cast<std::size_t>(got))};
  return detail::send_all(to, all) == 0;
}

void test_wire::run() {
  for (; !stop_.load(); rounds_.fetch_add(1)) {
    if (is_cut_.load())
      for (auto& x : connections_)
        x.cut = true;
    std::vector<pollfd> wanted{{listener_.get(), POLLIN, 0}};
    std::vector<std::list<connection>::iterator> of;
    for (auto i = connections_.begin(); i != connections_.end(); ++i) {
      if (i->cut)
        continue;
      wanted.push_back({i->from.get(), POLLIN, 0});
      wanted.push_back({i->to.get(), POLLIN, 0});
      of.push_back(i);
    }
    if (::poll(wanted.data(), wanted.size(), tick_ms) <= 0)
      continue;
    if (wanted[0].revents != 0) {
      auto from = detail::accept_from(listener_);
      auto to =
          detail::connect_to(target_, std::chrono::steady_clock::now() + std::chrono::seconds{5});
      if (from && to)
        connections_.push_back({std::move(from), std::move(*to), is_cut_.load()});
    }
    for (std::size_t i = 0; i < of.size(); ++i) {
      const auto x = of[i];
      if ((wanted[1 + 2 * i].revents != 0 && !pass_on(x->from.get(), x->to.get())) ||
          (wanted[2 + 2 * i].revents != 0 && !pass_on(x->to.get(), x->from.get())))
        connections_.erase(x);
    }
  }
}

} // namespace troupe::testing
