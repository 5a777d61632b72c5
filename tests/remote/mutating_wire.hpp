/// A member in the middle, which changes the frames between an agent and its parent.
#pragma once

#include "net/frame_link.hpp"
#include "net/socket.hpp"
#include "net/tls_stream.hpp"
#include "remote/certificates.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <vector>

namespace troupe::testing {

/// Listens in place of the parent, with its certificate, and forwards each connection with the
/// certificate of the agent. Some frames are flipped, cut, extended, repeated, dropped, delayed, or
/// get another kind, channel, size or extreme numbers. Commands and content on their way to the
/// agent stay whole: a worker believes the addresses of its program.
class mutating_wire {
public:
  /// @param port of the parent, at 127.0.0.1
  /// @param name of the agent
  mutating_wire(test_authority& authority, const std::string& name, std::uint16_t port,
                std::uint64_t seed);
  ~mutating_wire();
  mutating_wire(const mutating_wire&) = delete;
  mutating_wire& operator=(const mutating_wire&) = delete;

  std::uint16_t port() const noexcept { return address_.port; }
  /// From now on all frames are forwarded as they are.
  void be_honest() {
    honest_.store(true);
    hang_up();
  }
  /// Closes all connections; the agent connects again.
  void hang_up() { hangs_up_.store(true); }
  /// Returns the number of frames that were changed, dropped, delayed or added so far.
  std::uint64_t mutated() const noexcept { return mutated_; }
  std::uint64_t connections() const noexcept { return accepted_; }

private:
  struct frame {
    detail::frame_head head;
    std::vector<std::byte> body;
  };
  struct end {
    detail::tls_stream stream;
    std::vector<std::byte> came; ///< not forwarded yet
    std::vector<std::byte> out;  ///< not sent yet
    std::vector<frame> delayed;
  };
  struct connection {
    end agent;
    end parent;
  };

  void run();
  void accept();
  bool serve(connection& x);
  /// Reads from one end and queues frames for the other one. Returns false if an end is over.
  bool forward(end& from, end& to, bool to_agent);
  static bool send(end& x);
  void pass_on(frame x, end& from, end& to);
  void spoil(frame& x);
  void mutate(frame& x, std::vector<frame>& more, end& from);
  std::uint64_t any(std::uint64_t below) { return random_() % below; }

  std::shared_ptr<detail::tls_context> as_parent_;
  std::shared_ptr<detail::tls_context> as_agent_;
  detail::socket_address target_;
  detail::socket_address address_;
  detail::file_descriptor listener_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> honest_{false};
  std::atomic<bool> hangs_up_{false};
  std::atomic<std::uint64_t> mutated_{0};
  std::atomic<std::uint64_t> accepted_{0};
  std::mt19937_64 random_; // used by the thread, as those below
  std::list<connection> connections_;
  std::thread thread_;
};

} // namespace troupe::testing
