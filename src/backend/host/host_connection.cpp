#include "backend/host/host_connection.hpp"

#include "foundation/start_thread.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <string>
#include <utility>

#include <pthread.h>

namespace troupe::detail {

namespace {

/// The time limit for a connection to the hub's process.
constexpr std::chrono::seconds connect_limit{10};

/// The time that `end` waits for a send in progress.
constexpr std::chrono::milliseconds send_patience{100};

caf::error hub_gone() { return make_error(errc::nccl_error, "the process of the hub has ended"); }

caf::error hub_wrong(const char* what) {
  return make_error(errc::nccl_error, std::string{"the process of the hub sent "} + what);
}

/// Reads a frame's header, and the reason if it is an end. Returns no error if the frame is
/// `wanted`.
caf::error await(int socket, frame_kind wanted) {
  frame_header header;
  if (const std::array target{writable_bytes_of(header)}; !receive_all(socket, target))
    return hub_gone();
  if (header.kind == wanted)
    return {};
  wire_error why;
  if (header.kind != frame_kind::end || header.head_bytes != sizeof why)
    return hub_wrong("an unexpected frame");
  if (const std::array target{writable_bytes_of(why)}; !receive_all(socket, target))
    return hub_gone();
  return error_of(why).value_or(hub_wrong("an error that cannot be parsed"));
}

/// A rank that is about to join a communicator. The destructor withdraws it if it did not join.
class candidate {
public:
  /// The socket has entered `room`.
  candidate(file_descriptor socket, local_rank x, waiting_room& room) noexcept
      : socket_(std::move(socket)), rank_(x), room_(&room) {}
  candidate(candidate&&) = default;
  candidate& operator=(candidate&&) = delete;
  ~candidate() {
    if (!socket_)
      return;
    const frame_header leaves{.kind = frame_kind::leave};
    static_cast<void>(send_at_once(socket_.get(), bytes_of(leaves))); // else the hub sees the end
    const int mine = socket_.get();
    room_->leave({&mine, 1});
  }

  caf::error await(frame_kind wanted) const {
    auto err = detail::await(socket_.get(), wanted);
    auto f = failure_of(err);
    if (!f || f->code != errc::invalid_argument)
      return err;
    f->device = rank_.device; // not known to the hub
    return make_error(std::move(*f));
  }

  file_descriptor take() noexcept { return std::move(socket_); }
  int native() const noexcept { return socket_.get(); }
  int rank() const noexcept { return rank_.rank; }

private:
  file_descriptor socket_;
  local_rank rank_;
  waiting_room* room_;
};

caf::expected<candidate> knock(const hub_invitation& where, int size, local_rank x,
                               waiting_room& room) {
  auto socket = connect_to(where.hub, std::chrono::steady_clock::now() + connect_limit);
  if (!socket) {
    auto f = failure_of(socket.error()).value_or(failure{.code = errc::nccl_error});
    f.detail = "cannot connect to the hub at " + to_string(where.hub);
    return make_error(std::move(f));
  }
  if (!room.enter(socket->get()))
    return hub_gone();
  candidate result{std::move(*socket), x, room};
  const wire_hello hello{
      .secret = where.secret, .group = where.group, .size = size, .rank = x.rank};
  const std::array blocks{bytes_of(hello)};
  if (send_all(result.native(), blocks) != 0)
    return hub_gone();
  if (auto err = result.await(frame_kind::accepted))
    return err;
  return result;
}

} // namespace

bool waiting_room::enter(int socket) {
  std::lock_guard lock{mutex_};
  if (closed_)
    return false;
  sockets_.push_back(socket);
  return true;
}

bool waiting_room::leave(std::span<const int> sockets) noexcept {
  std::lock_guard lock{mutex_};
  for (auto x : sockets)
    std::erase(sockets_, x);
  return !closed_;
}

void waiting_room::close() noexcept {
  std::lock_guard lock{mutex_};
  closed_ = true;
  for (auto x : sockets_)
    shut_down_receiving(x); // they can still tell the hub that they leave
}

bool waiting_room::is_closed() const noexcept {
  std::lock_guard lock{mutex_};
  return closed_;
}

caf::expected<std::vector<std::shared_ptr<host_transport>>>
host_connection::build(const hub_invitation& where, int size, std::span<const local_rank> ranks,
                       waiting_room& room) noexcept {
  std::vector<candidate> candidates;
  candidates.reserve(ranks.size());
  for (const auto& x : ranks) {
    auto came = knock(where, size, x, room);
    if (!came)
      return std::move(came.error());
    candidates.push_back(std::move(*came));
  }
  std::vector<int> sockets;
  for (const auto& x : candidates) {
    if (auto err = x.await(frame_kind::ready))
      return err;
    sockets.push_back(x.native());
  }
  if (!room.leave(sockets)) // all at once: a complete group is not called off in part
    return hub_gone();
  std::vector<std::shared_ptr<host_transport>> result;
  for (auto& x : candidates) {
    auto made = std::make_shared<host_connection>(x.take(), size, x.rank());
    if (auto err = made->start())
      return err;
    result.push_back(std::move(made));
  }
  return result;
}

host_connection::host_connection(file_descriptor socket, int size, int rank) noexcept
    : size_(size), rank_(rank), socket_(std::move(socket)) {}

host_connection::~host_connection() {
  end(rank_left(rank_));
  close();
}

caf::error host_connection::start() noexcept {
  return start_thread(reader_, [this] { read(); }, "for a connection");
}

caf::error host_connection::announce(int rank, std::span<const host_call> calls) noexcept {
  if (auto err = check_bounds(calls, rank, size_))
    return err;
  std::lock_guard guard{mutex_};
  if (ended_)
    return why_;
  ++announced_;
  return {};
}

void host_connection::run(int, std::uint64_t sequence, std::span<const host_call> calls) noexcept {
  lock guard{mutex_};
  ++inside_;
  changed_.wait(guard, [&] { return ended_ || turn_ == sequence; });
  if (!ended_)
    make_calls(guard, calls);
  --inside_;
  --announced_;
  changed_.notify_all();
}

void host_connection::make_calls(lock& guard, std::span<const host_call> calls) noexcept {
  targets_.clear();
  for (const auto& x : calls)
    add_received(x, rank_, size_, targets_);
  const auto head = encode(calls);
  const_blocks blocks(2);
  for (const auto& x : calls)
    add_sent(x, rank_, size_, blocks);
  const frame_header header{.kind = frame_kind::calls,
                            .calls = static_cast<std::uint32_t>(calls.size()),
                            .head_bytes = head.size(),
                            .data_bytes = size_bytes_of(blocks)};
  blocks[0] = bytes_of(header);
  blocks[1] = head;
  wanted_ = true;
  static_cast<void>(send(guard, blocks)); // a reply may come even if this fails
  changed_.wait(guard, [this] { return !wanted_ || (ended_ && !receiving_); });
  if (!wanted_)
    ++turn_;
}

bool host_connection::send(lock& guard, const const_blocks& blocks) noexcept {
  changed_.wait(guard, [this] { return ended_ || !sending_; });
  if (ended_)
    return false;
  sending_ = true;
  guard.unlock();
  const int code = send_all(socket_.get(), blocks);
  guard.lock();
  sending_ = false;
  changed_.notify_all();
  if (code == 0)
    return true;
  // If the hub has ended the connection, it may have sent the reason.
  if (code != EPIPE && code != ECONNRESET) {
    end_locked(system_failure(errc::nccl_error, "sendmsg", code));
    shut_down(socket_.get()); // a partly sent frame is useless to the hub
  }
  changed_.wait(guard, [this] { return ended_.load(); });
  return false;
}

void host_connection::end(caf::error why) noexcept {
  lock guard{mutex_};
  if (ended_)
    return;
  const end_frame frame{.why = wire_of(why)};
  end_locked(std::move(why));
  ending_ = true;
  // Tell the other ranks why, but do not wait for a hub that does not read.
  if (changed_.wait_for(guard, send_patience, [this] { return !sending_; }))
    static_cast<void>(send_at_once(socket_.get(), bytes_of(frame)));
  shut_down(socket_.get());
  ending_ = false;
  changed_.notify_all();
}

void host_connection::wait_quiet() noexcept {
  {
    lock guard{mutex_};
    changed_.wait(guard, [this] { return inside_ == 0; });
  }
  close();
}

void host_connection::leave(int rank) noexcept {
  {
    lock guard{mutex_};
    if (!ended_) {
      const frame_header header{.kind = frame_kind::leave};
      static_cast<void>(send_at_once(socket_.get(), bytes_of(header))); // else the hub sees the end
      end_locked(rank_left(rank));
      shut_down(socket_.get());
    }
  }
  close();
}

void host_connection::close() noexcept {
  std::call_once(closed_, [this] {
    {
      lock guard{mutex_};
      changed_.wait(guard, [this] { return !ending_; });
    }
    if (reader_.joinable())
      reader_.join();
    socket_.reset();
  });
}

void host_connection::read() noexcept {
  pthread_setname_np(pthread_self(), "troupe.rank");
  frame_header header;
  const std::array target{writable_bytes_of(header)};
  while (receive_all(socket_.get(), target) && take(header)) {
  }
  lock guard{mutex_};
  end_locked(hub_gone());
  shut_down(socket_.get());
}

bool host_connection::take(const frame_header& header) noexcept {
  switch (header.kind) {
  case frame_kind::done:
    return take_done(header);
  case frame_kind::end:
    if (header.head_bytes == sizeof(wire_error)) {
      take_end();
      return false;
    }
    [[fallthrough]];
  default: {
    lock guard{mutex_};
    end_locked(hub_wrong("an unexpected frame"));
    return false;
  }
  }
}

bool host_connection::take_done(const frame_header& header) noexcept {
  lock guard{mutex_};
  // The sending thread may not know yet that the calls were sent, and the results may go to the
  // same memory.
  changed_.wait(guard, [this] { return ended_ || !sending_; });
  if (ended_)
    return false;
  if (!wanted_ || header.data_bytes != size_bytes_of(targets_)) {
    end_locked(hub_wrong("results of no pending call"));
    return false;
  }
  receiving_ = true;
  guard.unlock();
  const auto complete = receive_all(socket_.get(), targets_);
  guard.lock();
  receiving_ = false;
  if (complete)
    wanted_ = false;
  else
    end_locked(hub_gone());
  changed_.notify_all();
  return complete;
}

void host_connection::take_end() noexcept {
  wire_error wire;
  const std::array target{writable_bytes_of(wire)};
  auto why = receive_all(socket_.get(), target)
                 ? error_of(wire).value_or(hub_wrong("an error that cannot be parsed"))
                 : hub_gone();
  lock guard{mutex_};
  end_locked(std::move(why));
}

} // namespace troupe::detail
