#include "host_stream.hpp"

#include <troupe/error.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include <pthread.h>

namespace troupe::detail {

namespace {

void fill(const fill_command& x) noexcept {
  auto* target = static_cast<std::byte*>(x.target);
  if (x.pattern_bytes == 1) {
    std::memset(target, std::to_integer<int>(x.pattern.front()), x.count);
    return;
  }
  const auto size_bytes = x.count * x.pattern_bytes;
  if (size_bytes == 0)
    return;
  std::memcpy(target, x.pattern.data(), x.pattern_bytes);
  for (auto done = x.pattern_bytes; done < size_bytes;) {
    const auto more = std::min(done, size_bytes - done);
    std::memcpy(target + done, target, more);
    done += more;
  }
}

} // namespace

bool stream_progress::reached(std::uint64_t position) const noexcept {
  return reached_.load(std::memory_order_acquire) >= position;
}

void stream_progress::advance(std::uint64_t position) noexcept {
  {
    std::lock_guard lock{mutex_};
    reached_.store(position, std::memory_order_release);
  }
  advanced_.notify_all();
}

void stream_progress::wait(std::uint64_t position) noexcept {
  std::unique_lock lock{mutex_};
  advanced_.wait(lock, [&] { return reached(position); });
}

void host_event::set(stream_position x) noexcept {
  std::lock_guard lock{mutex_};
  recorded_ = std::move(x);
}

stream_position host_event::get() const noexcept {
  std::lock_guard lock{mutex_};
  return recorded_;
}

host_stream::host_stream(const std::function<void()>& completed) noexcept : completed_(completed) {}

host_stream::~host_stream() {
  close();
  if (thread_.joinable())
    thread_.join();
}

caf::error host_stream::enqueue(stream_command command) noexcept {
  std::unique_lock lock{mutex_};
  if (auto err = start())
    return err;
  push(std::move(lock), std::move(command));
  return {};
}

caf::expected<stream_position> host_stream::record() noexcept {
  std::unique_lock lock{mutex_};
  if (auto err = start())
    return err;
  stream_position result{progress_, ++recorded_};
  push(std::move(lock), record_command{result.position});
  return result;
}

void host_stream::close() noexcept {
  {
    std::lock_guard lock{mutex_};
    closed_ = true;
    if (!thread_.joinable())
      finished_ = true;
  }
  wake_.notify_one();
}

bool host_stream::finished() const noexcept {
  std::lock_guard lock{mutex_};
  return finished_;
}

caf::error host_stream::start() noexcept {
  if (closed_)
    return make_error(errc::invalid_argument, "the stream is destroyed");
  if (thread_.joinable())
    return {};
  try {
    thread_ = std::thread{[this] { run(); }};
  } catch (const std::system_error& e) {
    return make_error(errc::unavailable, std::string{"no thread for a stream: "} + e.what());
  }
  return {};
}

void host_stream::push(std::unique_lock<std::mutex> lock, stream_command&& command) noexcept {
  queued_.push_back(std::move(command));
  const auto wake = std::exchange(idle_, false);
  lock.unlock();
  if (wake)
    wake_.notify_one();
}

void host_stream::run() noexcept {
  pthread_setname_np(pthread_self(), "troupe.stream");
  std::vector<stream_command> batch;
  std::unique_lock lock{mutex_};
  for (;;) {
    while (queued_.empty() && !closed_) {
      idle_ = true;
      wake_.wait(lock);
    }
    if (queued_.empty())
      break;
    batch.swap(queued_);
    lock.unlock();
    for (auto& command : batch)
      execute(command);
    batch.clear();
    lock.lock();
  }
  finished_ = true;
}

void host_stream::execute(stream_command& command) noexcept {
  struct visitor {
    host_stream& self;
    void operator()(copy_command& x) const noexcept {
      if (x.size_bytes > 0)
        std::memmove(x.target, x.source, x.size_bytes);
    }
    void operator()(fill_command& x) const noexcept { fill(x); }
    void operator()(call_command& x) const noexcept { x.function(x.argument); }
    void operator()(free_command& x) const noexcept { std::free(x.memory); }
    void operator()(record_command& x) const noexcept {
      self.progress_->advance(x.position);
      if (self.completed_)
        self.completed_();
    }
    void operator()(wait_command& x) const noexcept { x.until.progress->wait(x.until.position); }
    void operator()(all_reduce_command& x) const noexcept {
      x.group->all_reduce(x.rank, x.sequence, x.part);
    }
  };
  std::visit(visitor{*this}, command);
}

} // namespace troupe::detail
