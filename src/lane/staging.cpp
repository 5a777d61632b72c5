#include "lane/staging.hpp"

#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include "foundation/start_thread.hpp"
#include "lane/lane.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <tuple>
#include <utility>

namespace troupe::detail {

namespace {

/// Up to this size a copy on the lane takes less time than a handover to the stager's thread.
constexpr std::size_t inline_bytes = std::size_t{32} << 10;

caf::error revoked() {
  return make_error(errc::cancelled, "its requester had an answer before its memory was read");
}

} // namespace

// -- host_range

bool host_range::copy_to(std::byte* target, std::size_t offset, std::size_t size) noexcept {
  std::lock_guard lock{mutex_};
  if (revoked_)
    return false;
  std::memcpy(target, memory_.data() + offset, size);
  return true;
}

bool host_range::copy_from(const std::byte* source, std::size_t offset, std::size_t size) noexcept {
  std::lock_guard lock{mutex_};
  if (revoked_)
    return false;
  std::memcpy(memory_.data() + offset, source, size);
  return true;
}

std::shared_ptr<host_range> host_range::again() {
  std::lock_guard lock{mutex_};
  return owner_.size_bytes() != 0 ? std::make_shared<host_range>(owner_)
                                  : std::make_shared<host_range>(memory_);
}

void host_range::revoke() noexcept {
  if (!borrowed_)
    return;
  std::lock_guard lock{mutex_};
  revoked_ = true;
}

void host_range::let_go() noexcept {
  host_buffer owner;
  std::lock_guard lock{mutex_};
  revoked_ = true;
  memory_ = {};
  std::swap(owner, owner_);
}

// -- stager

stager::~stager() {
  {
    std::lock_guard lock{mutex_};
    stop_ = true;
  }
  condition_.notify_one();
  if (thread_.joinable())
    thread_.join();
}

void stager::post(std::function<void()> job) {
  std::unique_lock lock{mutex_};
  if (!thread_.joinable())
    if (auto error = start_thread(thread_, [this] { run(); }, "to copy host memory")) {
      lock.unlock();
      static std::atomic<bool> is_told{false}; // log once: each copy tries again
      if (!is_told.exchange(true))
        log(log_level::warning, "a lane copies host memory itself", error);
      job();
      wake_();
      return;
    }
  jobs_.push_back(std::move(job));
  lock.unlock();
  condition_.notify_one();
}

void stager::run() {
  forbid_blocking("a copying thread");
  std::unique_lock lock{mutex_};
  while (true) {
    condition_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    if (jobs_.empty())
      return;
    auto job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    wake_();
    lock.lock();
  }
}

// -- staging_ring

caf::expected<std::byte*> staging_ring::take(std::size_t size) {
  if (memory_ == nullptr) {
    auto memory = device_.allocate_pinned(size_);
    if (!memory)
      return memory.error();
    memory_ = static_cast<std::byte*>(*memory);
  }
  use_what_is_over();
  std::size_t begin = begin_;
  if (!pieces_.empty()) {
    auto head = pieces_.back().end;
    auto tail = pieces_.front().begin;
    if (head > tail) { // used: [tail, head)
      if (end_ - head >= size)
        begin = head;
      else if (tail - begin_ > size)
        begin = begin_;
      else
        return static_cast<std::byte*>(nullptr);
    } else if (tail - head > size) {
      begin = head;
    } else {
      return static_cast<std::byte*>(nullptr);
    }
  }
  pieces_.push_back({begin, begin + size});
  return memory_ + begin;
}

void staging_ring::give_back(const std::byte* memory) noexcept {
  if (device_.loss()) // the lost process may still write to it
    return;
  auto begin = static_cast<std::size_t>(memory - memory_);
  for (auto& x : pieces_)
    if (x.begin == begin)
      x.in_use = false;
  while (!pieces_.empty() && !pieces_.front().in_use)
    pieces_.pop_front();
}

bool staging_ring::leave(std::function<bool()> is_over) {
  use_what_is_over();
  left_pieces fresh{{}, std::move(is_over)};
  for (auto& x : std::exchange(pieces_, {}))
    fresh.ranges.emplace_back(x.begin, x.end);
  if (fresh.ranges.empty())
    return true;
  left_.push_back(std::move(fresh));
  std::vector<std::pair<std::size_t, std::size_t>> all{{size_, size_}};
  for (auto& x : left_)
    all.insert(all.end(), x.ranges.begin(), x.ranges.end());
  std::ranges::sort(all);
  begin_ = end_ = 0;
  std::size_t free_from = 0;
  for (auto [begin, end] : all) {
    if (begin > free_from && begin - free_from > end_ - begin_)
      std::tie(begin_, end_) = std::pair{free_from, begin};
    free_from = std::max(free_from, end);
  }
  return end_ - begin_ >= size_ / 2;
}

/// The ring grows to all of its memory again when nothing is left to a lost process.
void staging_ring::use_what_is_over() {
  if (left_.empty())
    return;
  std::erase_if(left_, [](auto& x) { return x.is_over(); });
  if (left_.empty()) {
    begin_ = 0;
    end_ = size_;
  }
}

caf::error staging_ring::close() noexcept {
  if (memory_ == nullptr)
    return {};
  return device_.deallocate_pinned(std::exchange(memory_, nullptr));
}

std::function<void()> staging_ring::let_go() {
  auto deleter = device_.pinned_deleter();
  if (memory_ == nullptr || !deleter)
    return nullptr;
  return [memory = std::exchange(memory_, nullptr), free = std::move(deleter)] {
    if (auto error = free(memory))
      log(log_level::warning, "pinned memory of a lane was not freed", error);
  };
}

// -- transfer

struct transfer::piece {
  enum class stage : std::uint8_t { in_host_copy, host_copied, in_stream, refused };

  std::byte* staged = nullptr;
  std::size_t offset = 0;
  std::size_t size = 0;
  event_view event;
  std::atomic<stage> at{stage::in_host_copy};
};

transfer::transfer(direction way, std::shared_ptr<host_range> host, std::byte* device_memory)
    : way_(way), host_(std::move(host)), device_(device_memory), size_(host_->size()) {}

transfer::~transfer() = default;

caf::expected<issue_outcome> transfer::proceed(lane& on) {
  if (auto* direct = host_->pinned(); direct != nullptr) {
    enqueued_ = size_;
    auto error = way_ == direction::upload
                     ? on.device().copy(device_, direct, size_, copy_direction::host_to_device,
                                        on.stream(stream_kind::upload))
                     : on.device().copy(direct, device_, size_, copy_direction::device_to_host,
                                        on.stream(stream_kind::download));
    if (error)
      return error;
    return issue_outcome::enqueued;
  }
  return way_ == direction::upload ? proceed_upload(on) : proceed_download(on);
}

caf::expected<issue_outcome> transfer::proceed_upload(lane& on) {
  keep_first(error_, reap(on));
  while (auto p = take_piece(on.upload_ring())) {
    auto copy = [p, host = host_] {
      p->at.store(host->copy_to(p->staged, p->offset, p->size) ? piece::stage::host_copied
                                                               : piece::stage::refused,
                  std::memory_order_release);
    };
    if (p->size <= inline_bytes)
      copy();
    else
      on.copier().post(std::move(copy));
  }
  bool copying = false;
  for (auto& p : pieces_) {
    auto at = p->at.load(std::memory_order_acquire);
    copying |= at == piece::stage::in_host_copy;
    if (copying)
      continue;
    if (at == piece::stage::refused && !error_)
      error_ = revoked();
    if (at != piece::stage::host_copied || error_)
      continue;
    auto error = on.device().copy(device_ + p->offset, p->staged, p->size,
                                  copy_direction::host_to_device, on.stream(stream_kind::upload));
    if (!error)
      error = mark(on, *p, stream_kind::upload);
    if (error)
      error_ = std::move(error);
    else
      enqueued_ += p->size;
  }
  if (copying)
    return issue_outcome::continues;
  if (error_)
    return error_;
  return all_enqueued() ? issue_outcome::enqueued : issue_outcome::continues;
}

caf::expected<issue_outcome> transfer::proceed_download(lane& on) {
  keep_first(error_, reap(on));
  while (auto p = take_piece(on.download_ring())) {
    p->at.store(piece::stage::in_stream, std::memory_order_relaxed);
    auto error = on.device().copy(p->staged, device_ + p->offset, p->size,
                                  copy_direction::device_to_host, on.stream(stream_kind::download));
    if (!error)
      error = mark(on, *p, stream_kind::download);
    if (error) {
      error_ = std::move(error);
      p->at.store(piece::stage::refused, std::memory_order_relaxed);
      break;
    }
    enqueued_ += p->size;
  }
  if (!pieces_.empty())
    return issue_outcome::continues;
  if (error_)
    return error_;
  return taken_ == size_ ? issue_outcome::finished : issue_outcome::continues;
}

std::shared_ptr<transfer::piece> transfer::take_piece(staging_ring& ring) {
  if (error_ || taken_ == size_)
    return nullptr;
  const auto size = std::min(ring.piece_limit(), size_ - taken_);
  auto staged = ring.take(size);
  if (!staged)
    error_ = staged.error();
  if (error_ || *staged == nullptr)
    return nullptr;
  auto p = pieces_.emplace_back(std::make_shared<piece>());
  p->staged = *staged;
  p->offset = taken_;
  p->size = size;
  taken_ += size;
  return p;
}

caf::error transfer::mark(lane& on, piece& p, stream_kind stream) {
  auto event = on.mark(stream);
  if (!event)
    return event.error();
  p.event = *event;
  p.at.store(piece::stage::in_stream, std::memory_order_release);
  return {};
}

caf::error transfer::reap(lane& on) {
  caf::error result;
  auto& ring = way_ == direction::upload ? on.upload_ring() : on.download_ring();
  // Downloads: hand pieces that arrived to the copying thread, in order.
  if (way_ == direction::download)
    for (auto& p : pieces_) {
      if (p->at.load(std::memory_order_acquire) != piece::stage::in_stream)
        continue;
      auto done = on.device().query(p->event);
      if (done && !*done)
        break;
      on.retire(std::exchange(p->event, {}));
      if (!done) {
        result = done.error();
        p->at.store(piece::stage::refused, std::memory_order_relaxed);
        continue;
      }
      p->at.store(piece::stage::in_host_copy, std::memory_order_relaxed);
      auto copy = [p, host = host_] {
        p->at.store(host->copy_from(p->staged, p->offset, p->size) ? piece::stage::host_copied
                                                                   : piece::stage::refused,
                    std::memory_order_release);
      };
      if (p->size <= inline_bytes)
        copy();
      else
        on.copier().post(std::move(copy));
    }
  while (!pieces_.empty()) {
    auto& p = *pieces_.front();
    auto at = p.at.load(std::memory_order_acquire);
    if (at == piece::stage::in_host_copy ||
        (at == piece::stage::host_copied && way_ == direction::upload))
      break;
    if (at == piece::stage::refused && way_ == direction::upload)
      result = revoked();
    if (at == piece::stage::in_stream) {
      if (way_ == direction::download)
        break;
      auto done = on.device().query(p.event);
      if (!done)
        result = done.error();
      else if (!*done)
        break;
    }
    on.retire(std::exchange(p.event, {}));
    ring.give_back(p.staged);
    pieces_.pop_front();
  }
  return result;
}

void transfer::finish(lane& on) noexcept {
  auto& ring = way_ == direction::upload ? on.upload_ring() : on.download_ring();
  for (auto& p : pieces_) {
    on.retire(std::exchange(p->event, {}));
    ring.give_back(p->staged);
  }
  pieces_.clear();
}

} // namespace troupe::detail
