#include "backend/host/host_stream.hpp"

#include "foundation/other_processes.hpp"
#include "foundation/start_thread.hpp"
#include <troupe/error.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
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

caf::error device_closed() {
  return make_error(errc::nccl_error, "the device of a rank was closed");
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

void stream_progress::wait(std::uint64_t position, const std::atomic<bool>& cancelled) noexcept {
  std::unique_lock lock{mutex_};
  advanced_.wait(lock, [&] { return reached(position) || cancelled; });
}

void stream_progress::interrupt() noexcept {
  std::lock_guard lock{mutex_};
  advanced_.notify_all();
}

void host_event::set(stream_position x) noexcept {
  std::lock_guard lock{mutex_};
  recorded_ = std::move(x);
}

stream_position host_event::get() const noexcept {
  std::lock_guard lock{mutex_};
  return recorded_;
}

host_stream::host_stream(std::shared_ptr<const std::function<void()>> completed) noexcept
    : completed_(std::move(completed)) {}

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

void host_stream::cancel() noexcept {
  std::shared_ptr<host_transport> transport;
  std::shared_ptr<stream_progress> progress;
  {
    std::lock_guard lock{mutex_};
    cancelled_ = true;
    transport = serving_;
    progress = waiting_for_;
  }
  if (transport)
    transport->end(device_closed());
  if (progress)
    progress->interrupt();
  close();
}

bool host_stream::finished() const noexcept {
  std::lock_guard lock{mutex_};
  return finished_;
}

void host_stream::join() noexcept {
  if (!thread_.joinable())
    return;
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach(); // the thread owns what it needs
  else
    thread_.join();
}

caf::error host_stream::start() noexcept {
  if (closed_)
    return make_error(errc::invalid_argument, "the stream is destroyed");
  if (thread_.joinable())
    return {};
  return start_thread(thread_, [self = shared_from_this()] { self->run(); }, "for a stream");
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
  std::unique_lock lock{mutex_};
  for (;;) {
    while (queued_.empty() && !closed_) {
      idle_ = true;
      wake_.wait(lock);
    }
    if (queued_.empty())
      break;
    running_.swap(queued_);
    lock.unlock();
    for (auto& command : running_)
      execute(command);
    running_.clear();
    lock.lock();
  }
  finished_ = true;
}

void host_stream::execute(stream_command& command) noexcept {
  struct visitor {
    host_stream& self;
    void operator()(const copy_command& x) const noexcept {
      if (!self.cancelled_ && x.size_bytes > 0)
        std::memmove(x.target, x.source, x.size_bytes);
    }
    void operator()(const fill_command& x) const noexcept {
      if (!self.cancelled_)
        fill(x);
    }
    void operator()(const call_command& x) const noexcept {
      if (!self.cancelled_)
        x.function(x.argument);
    }
    void operator()(const free_command& x) const noexcept { std::free(x.memory); }
    void operator()(const record_command& x) const noexcept {
      self.progress_->advance(x.position);
      if (*self.completed_)
        (*self.completed_)();
    }
    void operator()(const wait_command& x) const noexcept { self.wait(x.until); }
    void operator()(const wait_word_command& x) const noexcept {
      // Another process writes the word, and has no signal that works with every backend.
      while (!self.cancelled_ && x.word->load(std::memory_order_acquire) < x.at_least)
        std::this_thread::sleep_for(std::chrono::microseconds{20});
      after_hearing_from_another_process();
    }
    void operator()(const collective_command& x) const noexcept { self.serve(x); }
  };
  std::visit(visitor{*this}, command);
}

void host_stream::wait(const stream_position& until) noexcept {
  if (until.reached())
    return;
  {
    std::lock_guard lock{mutex_};
    waiting_for_ = until.progress;
  }
  until.progress->wait(until.position, cancelled_);
  std::lock_guard lock{mutex_};
  waiting_for_.reset();
}

void host_stream::serve(const collective_command& command) noexcept {
  {
    std::lock_guard lock{mutex_};
    serving_ = command.transport;
  }
  if (cancelled_)
    command.transport->end(device_closed());
  command.transport->run(command.rank, command.sequence, command.calls);
  std::lock_guard lock{mutex_};
  serving_.reset();
}

} // namespace troupe::detail
