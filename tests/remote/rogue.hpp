/// Members of a fleet that send arbitrary data.
#pragma once

#include "net/frame_link.hpp"
#include "net/socket.hpp"
#include "net/tls_stream.hpp"
#include "remote/messages.hpp"
#include "support/world_fixture.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <poll.h>

namespace troupe::testing {

/// Blocks until the socket has one of `events`. Returns false after `limit`.
inline bool wait_for(int socket, short events, std::chrono::milliseconds limit = 5s) {
  pollfd wanted{socket, events, 0};
  return ::poll(&wanted, 1, static_cast<int>(limit.count())) > 0;
}

inline detail::file_descriptor connect(std::uint16_t port) {
  auto address = must(detail::address_from_string("127.0.0.1"));
  address.port = port;
  return must(detail::connect_to(address, std::chrono::steady_clock::now() + patience));
}

inline std::vector<std::byte> frame_of(std::uint32_t kind, std::uint64_t channel,
                                       std::span<const std::byte> body) {
  const detail::frame_head head{static_cast<std::uint32_t>(body.size()), kind, channel};
  std::vector<std::byte> result(sizeof head + body.size());
  std::memcpy(result.data(), &head, sizeof head);
  if (!body.empty())
    std::memcpy(result.data() + sizeof head, body.data(), body.size());
  return result;
}

inline std::vector<std::byte> frame_of(detail::host_frame kind, std::uint64_t channel,
                                       std::span<const std::byte> body) {
  return frame_of(detail::number(kind), channel, body);
}

/// A member of the fleet that sends arbitrary data. Its calls block.
class rogue {
public:
  rogue(const host_identity& who, detail::tls_context::side side, detail::file_descriptor socket)
      : stream_(must(detail::tls_stream::create(must(detail::tls_context::create(who, side)),
                                                std::move(socket), "the test"))) {}

  /// Sends the bytes. Returns false if the connection has ended.
  bool say(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      std::size_t sent = 0;
      if (!proceed([&] { return stream_.write(bytes, sent); }))
        return false;
      bytes = bytes.subspan(sent);
    }
    return true;
  }
  /// Returns the next frame that is not a sign of life.
  std::optional<std::pair<detail::frame_head, std::vector<std::byte>>> hear() {
    while (true) {
      detail::frame_head head;
      if (!fill(std::as_writable_bytes(std::span{&head, 1})))
        return std::nullopt;
      std::vector<std::byte> body(head.size);
      if (!fill(body))
        return std::nullopt;
      if (head.kind != 0)
        return std::pair{head, std::move(body)};
    }
  }
  /// Shows signs of life, and gives each frame to `take`, until that returns false, the connection
  /// has ended, or `stop` is set.
  template <class F> void serve(const std::atomic<bool>& stop, F take) {
    std::vector<std::byte> came;
    std::array<std::byte, 16384> some;
    detail::frame_head head;
    while (!stop) {
      std::size_t got = 0;
      switch (stream_.read(some, got)) {
      case detail::tls_stream::outcome::done:
        came.insert(came.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(got));
        break;
      case detail::tls_stream::outcome::failed:
        return;
      default:
        wait_for(stream_.native(), POLLIN, 50ms);
        if (!say(frame_of(0, 0, {})))
          return;
      }
      while (came.size() >= sizeof head) {
        std::memcpy(&head, came.data(), sizeof head);
        if (came.size() < sizeof head + head.size)
          break;
        const std::span body{came.data() + sizeof head, head.size};
        if (head.kind != 0 && !take(head, body))
          return;
        came.erase(came.begin(),
                   came.begin() + static_cast<std::ptrdiff_t>(sizeof head + head.size));
      }
    }
  }
  /// Blocks until the other side has closed the connection.
  bool is_let_go() {
    while (hear())
      ;
    return true;
  }
  const caf::error& error() const { return stream_.error(); }

private:
  template <class F> bool proceed(F step) {
    while (true)
      switch (step()) {
      case detail::tls_stream::outcome::done:
        return true;
      case detail::tls_stream::outcome::wants_read:
        if (!wait_for(stream_.native(), POLLIN))
          return false;
        break;
      case detail::tls_stream::outcome::wants_write:
        if (!wait_for(stream_.native(), POLLOUT))
          return false;
        break;
      case detail::tls_stream::outcome::failed:
        return false;
      }
  }
  bool fill(std::span<std::byte> into) {
    while (!into.empty()) {
      std::size_t got = 0;
      if (!proceed([&] { return stream_.read(into, got); }))
        return false;
      into = into.subspan(got);
    }
    return true;
  }

  detail::tls_stream stream_;
};

inline std::vector<std::byte> hello_of(const std::string& name) {
  const auto hello = must(detail::make_host_hello(name));
  return frame_of(detail::host_frame::hello, 0, detail::bytes_of(hello));
}

} // namespace troupe::testing
