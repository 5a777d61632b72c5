#include "worker/child/worker_service.hpp"

#include "foundation/other_processes.hpp"
#include "foundation/spin.hpp"
#include "foundation/start_thread.hpp"
#include "foundation/system_call.hpp"
#include "operation/device_state.hpp"

#include <algorithm>
#include <future>
#include <system_error>
#include <utility>

namespace troupe::detail {

namespace {

using clock = std::chrono::steady_clock;

/// With work in flight, no completion signals and no spinning.
constexpr std::chrono::microseconds poll_interval{50};
constexpr std::chrono::milliseconds doze{100};
/// How many events the query of one settles at most.
constexpr std::size_t most_at_once = 8;

} // namespace

worker_service::worker_service(std::shared_ptr<backend> executes, link_area& area,
                               service_options options)
    : executes_(std::move(executes)), area_(area), options_(std::move(options)),
      progress_(options_.progress != nullptr ? *options_.progress : unseen_progress_),
      ring_(area.words, area.commands), state_(std::make_shared<device_state>(0, options_.device)),
      events_(link_area::event_count) {
  state_->publish();
  state_->end_of_lane(); // no lane collects released memory
}

worker_service::~worker_service() {
  std::unique_lock lock{mutex_};
  jobs_over_.wait(lock, [this] { return jobs_ == 0; });
}

void worker_service::stop() noexcept {
  stopped_.store(true);
  ring_.wake_reader();
}

caf::error worker_service::open() noexcept {
  try {
    ends_.emplace();
  } catch (const std::system_error& e) {
    return system_failure("pthread_create", e.code().value(), "no thread to end ranks");
  }
  auto device = executes_->open(options_.device);
  if (!device)
    return device.error();
  device_ = std::move(*device);
  signals_ = device_->signals_completion();
  device_->set_completion_signal([this] {
    completed_.store(true, std::memory_order_release);
    ring_.wake_reader();
  });
  return {};
}

void worker_service::run() noexcept {
  while (!stopped_.load(std::memory_order_relaxed)) {
    bool worked = execute_some();
    worked |= poll();
    worked |= run_asked();
    idle(worked);
  }
  // Jobs may use the device, or wait for this thread.
  for (std::unique_lock lock{mutex_}; jobs_ != 0;) {
    lock.unlock();
    run_asked();
    lock.lock();
    jobs_over_.wait_for(lock, doze / 10, [this] { return jobs_ == 0; });
  }
  while (!graphs_.empty())
    drop_graph(graphs_.begin()->first);
}

void worker_service::fault(const caf::error& why) noexcept {
  stopped_.store(true);
  options_.on_fault(why);
}

// -- events

bool worker_service::poll() noexcept {
  if (signals_ && !completed_.exchange(false, std::memory_order_acq_rel))
    return false;
  bool worked = false;
  work_progress::mark busy{progress_, static_cast<std::uint32_t>(own_call::query)};
  free_retired();
  for (auto& [id, stream] : streams_)
    for (auto done = done_in(stream); done != 0; done = done_in(stream))
      for (worked = true; done != 0; --done)
        tell_first_done(stream);
  return worked;
}

/// Tells the parent that the first event of the stream is done.
void worker_service::tell_first_done(service_stream& stream) noexcept {
  auto& x = stream.in_flight.front();
  if (x.of != 0 && has_error(x.of))
    area_.communicator_errors.fetch_add(1, std::memory_order_release);
  before_telling_another_process();
  // A later record of the event may have been done before this one, in another stream.
  if (area_.done[x.event].load(std::memory_order_relaxed) < x.record)
    area_.done[x.event].store(x.record, std::memory_order_release);
  not_in_flight(x);
  stream.in_flight.pop_front();
}

/// Returns how many of the stream's first events are done, as far as two queries can tell.
std::size_t worker_service::done_in(const service_stream& stream) noexcept {
  const auto& all = stream.in_flight;
  const auto is_done = [&](const outstanding& x) {
    if (stopped_.load(std::memory_order_relaxed))
      return false;
    const auto done = device_->query(x.native);
    if (!done)
      fault(done.error()); // the state of events is unknown from now on
    return done && *done;
  };
  const auto few = std::min(all.size(), most_at_once);
  if (few > 1 && is_done(all[few - 1]))
    return few;
  return !all.empty() && is_done(all.front()) ? 1 : 0;
}

/// Returns true on an asynchronous error. The rank may end with work in a stream.
bool worker_service::has_error(communicator_key key) {
  std::lock_guard lock{mutex_};
  auto i = communicators_.find(key);
  return i != communicators_.end() && i->second.front()->asynchronous_error();
}

void worker_service::not_in_flight(const outstanding& x) noexcept {
  auto& event = events_[x.event];
  if (event.native.native == x.native.native)
    event.in_flight = false;
  else
    spare_events_.push_back(x.native);
}

void worker_service::idle(bool worked) noexcept {
  const bool busy = !retired_.empty() || std::any_of(streams_.begin(), streams_.end(), [](auto& x) {
    return !x.second.in_flight.empty();
  });
  const auto now = options_.spin.count() != 0 || worked ? clock::now() : clock::time_point{};
  if (worked)
    awake_until_ = now + options_.spin;
  const bool polls = busy && !signals_;
  if (options_.spin.count() != 0 && (polls || now < awake_until_)) {
    pause();
    return;
  }
  if (worked)
    return;
  ring_.wait_for_command(polls ? std::chrono::nanoseconds{poll_interval} : doze, [this] {
    return stopped_.load(std::memory_order_relaxed) || completed_.load(std::memory_order_acquire) ||
           any_asked_.load(std::memory_order_acquire);
  });
}

// -- jobs and calls for the driving thread

void worker_service::begin_job() noexcept {
  std::lock_guard lock{mutex_};
  ++jobs_;
}

void worker_service::end_job() noexcept {
  std::lock_guard lock{mutex_};
  if (--jobs_ == 0)
    jobs_over_.notify_all();
}

caf::error worker_service::run_job(std::function<void()> job) {
  begin_job();
  auto error = start_detached_thread(
      [this, job = std::move(job)] {
        job();
        end_job();
      },
      "for a request, in the worker");
  if (error)
    end_job();
  return error;
}

void worker_service::run_job(const control_head& head, std::function<void()> job) {
  if (auto error = run_job(std::move(job)))
    answer(head, error);
}

void worker_service::run_job_or_here(const std::function<void()>& job) {
  if (run_job(job))
    job();
}

bool worker_service::run_asked() noexcept {
  if (!any_asked_.load(std::memory_order_acquire))
    return false;
  std::vector<std::function<void()>> all;
  {
    std::lock_guard lock{asked_mutex_};
    all.swap(asked_);
    any_asked_.store(false, std::memory_order_relaxed);
  }
  work_progress::mark busy{progress_, static_cast<std::uint32_t>(own_call::asked)};
  for (auto& f : all)
    f();
  return true;
}

caf::error worker_service::on_device(std::function<caf::error()> f) {
  std::promise<caf::error> result;
  auto done = result.get_future();
  post_to_device([&] { result.set_value(f()); });
  return done.get();
}

void worker_service::post_to_device(std::function<void()> f) {
  {
    std::lock_guard lock{asked_mutex_};
    asked_.push_back(std::move(f));
    any_asked_.store(true, std::memory_order_release);
  }
  ring_.wake_reader();
}

} // namespace troupe::detail
