#include "net/frame_link.hpp"

#include "foundation/start_thread.hpp"
#include "foundation/system_call.hpp"
#include "foundation/wire.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <utility>

#include <poll.h>

namespace troupe::detail {

namespace {

/// @units queued bytes from which senders with `patience::room` wait
constexpr std::size_t much = std::size_t{4} << 20;
/// @units queued bytes that end the link: the peer lives, but reads nothing
constexpr std::size_t too_much = std::size_t{64} << 20;
/// Reads in a row before the thread looks for frames to send.
constexpr int reads_in_a_row = 64;
constexpr int writes_in_a_row = 16; ///< the same for writes
/// The longest interval between two beats.
constexpr std::chrono::milliseconds slowest_beat{250};

std::string in_ms(std::chrono::nanoseconds x) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(x).count()) + " ms";
}

} // namespace

caf::error frame_link::start(std::shared_ptr<frame_link>& into, tls_stream stream, options how,
                             listener to) {
  auto wake = wake_up::create();
  if (!wake)
    return wake.error();
  into.reset(new frame_link{std::move(stream), how, std::move(to), std::move(*wake)});
  auto error =
      start_thread(into->thread_, [link = into.get()] { link->run(); }, "for a connection");
  if (error)
    into.reset();
  return error;
}

frame_link::~frame_link() { stop(); }

void frame_link::stop() noexcept {
  end(make_error(errc::unavailable, "this side has ended the connection"));
  if (thread_.joinable())
    thread_.join();
}

void frame_link::expect(std::chrono::nanoseconds limit) noexcept {
  expected_from_ = clock::now();
  admission_limit_ = limit;
}

void frame_link::admit(std::chrono::nanoseconds silence_limit) noexcept {
  silence_limit_ns_.store(std::max<std::int64_t>(silence_limit.count(), 1));
  wake_.signal();
}

caf::error frame_link::send(std::uint32_t kind, std::uint64_t channel,
                            std::initializer_list<std::span<const std::byte>> body,
                            patience wait) noexcept {
  std::size_t size = 0;
  for (auto x : body)
    size += x.size();
  if (size > options_.most_bytes)
    return make_error(errc::out_of_range, "a frame of " + std::to_string(size) + " bytes");
  const frame_head head{static_cast<std::uint32_t>(size), kind, channel};
  std::unique_lock lock{mutex_};
  if (wait == patience::room)
    room_.wait(lock, [this] { return over_ || queue_.size() < much; });
  if (over_)
    return why_;
  const bool was_empty = queue_.empty();
  const auto append = [this](auto x) { queue_.insert(queue_.end(), x.begin(), x.end()); };
  append(bytes_of(head));
  std::for_each(body.begin(), body.end(), append);
  if (queue_.size() > too_much && !end_)
    end_ = make_error(errc::unavailable, "the peer does not read");
  lock.unlock();
  if (was_empty)
    wake_.signal();
  return {};
}

void frame_link::end_with(std::optional<caf::error>& reason, const caf::error& why) noexcept {
  {
    std::lock_guard lock{mutex_};
    if (!reason)
      reason = why;
  }
  wake_.signal();
}

void frame_link::send_last(std::uint32_t kind, std::span<const std::byte> body,
                           const caf::error& why) noexcept {
  const bool unsent = bool{send(kind, 0, {body})};
  end_with(unsent ? end_ : last_end_, why);
}

std::string frame_link::peer() const {
  const auto subject = stream_.peer_subject();
  return subject.empty() ? stream_.peer() : stream_.peer() + " (" + subject + ")";
}

// -- the thread

void frame_link::run() noexcept {
  auto why = serve();
  stream_.end();
  {
    std::lock_guard lock{mutex_};
    over_ = true;
    why_ = why;
    queue_ = {};
  }
  room_.notify_all();
  to_.ended(why);
}

caf::error frame_link::check_limits(clock::time_point now, std::chrono::nanoseconds& left) const {
  const auto over = [&](std::string what) {
    return make_error(errc::unavailable, std::move(what));
  };
  const std::chrono::nanoseconds silence{silence_limit_ns_.load()};
  if (silence.count() == 0) {
    left = admission_limit_ - time_.passed(expected_from_, now);
    return left.count() > 0 ? caf::error{}
                            : over(stream_.peer() + " did not " +
                                   (is_authenticated() ? "join" : "authenticate") + " within " +
                                   in_ms(admission_limit_));
  }
  left = silence - time_.passed(heard_, now);
  if (left.count() <= 0)
    return over("nothing arrived from " + stream_.peer() + " for " + in_ms(now - heard_));
  if (writing_.empty())
    return {};
  left = std::min(left, silence - time_.passed(told_, now));
  return left.count() > 0 ? caf::error{}
                          : over(stream_.peer() + " has read nothing for " + in_ms(now - told_));
}

caf::error frame_link::serve() {
  expected_from_ = heard_ = told_ = clock::now();
  while (true) {
    wanted_ = POLLIN;
    if (auto error = read())
      return error;
    if (auto error = write())
      return error;
    if (!is_authenticated() && stream_.is_authenticated())
      authenticated_.store(true);
    const auto now = clock::now();
    std::chrono::nanoseconds left{};
    if (auto error = check_limits(now, left))
      return error;
    auto until = now + std::min<std::chrono::nanoseconds>(left, slowest_beat);
    if (writing_.empty()) {
      const std::chrono::nanoseconds silence{silence_limit_ns_.load()};
      const auto limit = silence.count() != 0 ? silence : admission_limit_;
      const auto beat = std::clamp<std::chrono::nanoseconds>(
          limit / 4, std::chrono::milliseconds{1}, slowest_beat);
      if (now - told_ >= beat) {
        told_ = now;
        if (auto error = send(0, 0, {}))
          return error;
        continue;
      }
      until = std::min(until, told_ + beat);
    }
    // The system does not see bytes in TLS's own buffers: `read` has taken all of them, or is
    // called again at once.
    if (auto error = wait(wanted_ == 0 ? now : until))
      return error;
  }
}

caf::error frame_link::wait(clock::time_point until) {
  std::array<pollfd, 2> wanted{{{stream_.native(), wanted_, 0}, {wake_.native(), POLLIN, 0}}};
  if (::poll(wanted.data(), wanted.size(), poll_limit(until)) < 0 && errno != EINTR)
    return system_failure("poll", errno, "a connection with " + stream_.peer());
  if (wanted[1].revents != 0)
    wake_.clear();
  time_.look(until, clock::now());
  return {};
}

caf::error frame_link::read() {
  for (int i = 0; i < reads_in_a_row; ++i) {
    const auto target = in_body_ ? std::span{body_} : std::as_writable_bytes(std::span{&head_, 1});
    std::size_t got = 0;
    switch (stream_.read(target.subspan(filled_), got)) {
    case tls_stream::outcome::done:
      heard_ = clock::now();
      if (auto error = take(got))
        return error;
      break;
    case tls_stream::outcome::wants_read:
      return {};
    case tls_stream::outcome::wants_write:
      wanted_ = POLLOUT;
      return {};
    case tls_stream::outcome::failed:
      return stream_.error();
    }
  }
  wanted_ = 0; // there may be more
  return {};
}

caf::error frame_link::take(std::size_t got) {
  filled_ += got;
  if (!in_body_) {
    if (filled_ < sizeof head_)
      return {};
    if (head_.size > options_.most_bytes)
      return make_error(errc::unavailable,
                        peer() + " sent a frame of " + std::to_string(head_.size) +
                            " bytes: the limit is " + std::to_string(options_.most_bytes));
    filled_ = 0;
    body_.resize(head_.size);
    in_body_ = head_.size != 0;
    if (in_body_)
      return {};
  }
  if (filled_ < body_.size())
    return {};
  in_body_ = false;
  filled_ = 0;
  return head_.kind == 0 ? caf::error{} : to_.received(head_, body_);
}

caf::error frame_link::refill() {
  std::lock_guard lock{mutex_};
  if (end_)
    return *end_;
  if (written_ < writing_.size())
    return {};
  written_ = 0;
  writing_.clear();
  writing_.swap(queue_);
  room_.notify_all();
  return writing_.empty() && last_end_ ? *last_end_ : caf::error{};
}

caf::error frame_link::write() {
  for (int i = 0; i < writes_in_a_row; ++i) {
    if (auto error = refill())
      return error;
    if (writing_.empty())
      return {};
    std::size_t sent = 0;
    switch (stream_.write(std::span{writing_}.subspan(written_), sent)) {
    case tls_stream::outcome::done:
      written_ += sent;
      told_ = clock::now();
      break;
    case tls_stream::outcome::wants_read:
      return {};
    case tls_stream::outcome::wants_write:
      if (wanted_ != 0)
        wanted_ |= POLLOUT;
      return {};
    case tls_stream::outcome::failed:
      return stream_.error();
    }
  }
  wanted_ = 0; // there may be more
  return {};
}

} // namespace troupe::detail
