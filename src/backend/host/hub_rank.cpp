#include "backend/host/hub_rank.hpp"

#include "foundation/start_thread.hpp"
#include "net/socket.hpp"

#include <array>
#include <string>
#include <utility>

#include <pthread.h>

namespace troupe::detail {

hub_rank::hub_rank(std::shared_ptr<host_group> group, int rank, int socket,
                   std::function<void()> stopped)
    : group_(std::move(group)), rank_(rank), socket_(socket), stopped_(std::move(stopped)) {}

hub_rank::~hub_rank() {
  if (thread_.joinable())
    thread_.join();
}

caf::error hub_rank::start() noexcept {
  auto error = start_thread(thread_, [this] { run(); }, "for a rank");
  if (!error)
    return {};
  finished_ = true;
  auto f = failure_of(error).value_or(failure{});
  f.code = errc::nccl_error;
  f.rank = rank_;
  return make_error(std::move(f));
}

bool hub_rank::make_calls(std::unique_ptr<remote_calls> calls) noexcept {
  {
    std::lock_guard guard{mutex_};
    if (making_calls_)
      return false;
    making_calls_ = true;
    calls_ = std::move(calls);
  }
  changed_.notify_one();
  return true;
}

void hub_rank::leave() noexcept {
  {
    std::lock_guard guard{mutex_};
    left_ = true;
  }
  changed_.notify_one();
}

void hub_rank::tell_end() noexcept {
  std::lock_guard guard{mutex_}; // the thread may have checked the group and not wait yet
  changed_.notify_one();
}

bool hub_rank::finished() const noexcept {
  std::lock_guard guard{mutex_};
  return finished_;
}

void hub_rank::run() noexcept {
  pthread_setname_np(pthread_self(), "troupe.hub.rank");
  std::unique_lock guard{mutex_};
  bool goes_on = true;
  while (goes_on) {
    changed_.wait(guard, [this] { return calls_ || left_ || group_->error(); });
    if (left_ || group_->error())
      break;
    const auto calls = std::move(calls_);
    guard.unlock();
    goes_on = make(*calls);
    guard.lock();
  }
  const auto tells = !left_;
  guard.unlock();
  if (const auto why = group_->error(); why && tells) {
    const end_frame frame{.why = wire_of(why)};
    const std::array blocks{bytes_of(frame)};
    static_cast<void>(send_all(socket_, blocks)); // on failure the rank is gone
  }
  guard.lock();
  finished_ = true;
  guard.unlock();
  stopped_();
}

bool hub_rank::make(const remote_calls& calls) noexcept {
  if (group_->announce(rank_, calls.calls()))
    return false;
  group_->run(rank_, sequence_++, calls.calls());
  if (group_->error()) {
    stopped_(); // so that the hub tells the other ranks
    return false;
  }
  {
    // The next calls may come as soon as the rank knows that these are done.
    std::lock_guard guard{mutex_};
    making_calls_ = false;
  }
  auto blocks = calls.received();
  const frame_header header{.kind = frame_kind::done, .data_bytes = size_bytes_of(blocks)};
  blocks.insert(blocks.begin(), bytes_of(header));
  return send_all(socket_, blocks) == 0;
}

} // namespace troupe::detail
