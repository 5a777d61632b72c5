#include "worker/parent/worker_process.hpp"

#include "foundation/enum_name.hpp"
#include "foundation/fair_limit.hpp"
#include "foundation/log.hpp"
#include "foundation/start_thread.hpp"
#include "foundation/system_call.hpp"
#include "worker/parent/worker_spawn.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <thread>
#include <utility>

#include <poll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace troupe::detail {

namespace {

using clock = std::chrono::steady_clock;

constexpr std::chrono::nanoseconds longest_tick = std::chrono::milliseconds{100};
constexpr std::chrono::nanoseconds shortest_tick = std::chrono::milliseconds{1};
/// How long to wait for the end of a stuck worker that was killed before it is reported anyway.
constexpr std::chrono::milliseconds kill_patience{100};
constexpr auto by_pidfd = static_cast<idtype_t>(3); // P_PIDFD, which older C libraries lack

/// Older C libraries do not wrap this system call.
int kill_by_pidfd(int pidfd) noexcept {
  return static_cast<int>(::syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, nullptr, 0));
}

caf::error check(const worker_options& x) {
  const auto wrong = [](const char* what) { return make_error(errc::invalid_argument, what); };
  if (x.program.empty())
    return wrong("a worker needs a program");
  if (x.hello_limit.count() <= 0)
    return wrong("the limit for a worker's hello is not positive");
  if (x.beat_period < shortest_tick)
    return wrong("the period of a worker's beats must be at least 1 ms");
  if (x.stuck_limit.count() < 0 || (x.stuck_limit.count() > 0 && x.stuck_limit < 2 * x.beat_period))
    return wrong("the limit for a stuck worker must be at least two periods of its beats");
  if (x.call_limit.count() < 0)
    return wrong("the limit for a worker's calls is negative");
  if (x.exit_limit.count() < 0 || x.destroy_limit.count() < 0)
    return wrong("a limit for a worker's end is negative");
  if (x.area_bytes > std::size_t{1} << 62)
    return wrong("the size of a worker's shared area overflows");
  return {};
}

/// Returns the time point after `limit`, without overflow.
time_limit after(std::chrono::nanoseconds limit) {
  const auto now = clock::now();
  return limit < no_limit - now ? now + limit : no_limit;
}

/// Tracks since when a count has not changed.
class stillness {
public:
  clock::time_point look(std::uint64_t count, clock::time_point now) noexcept {
    if (count != std::exchange(count_, count) || since_ == clock::time_point{})
      since_ = now;
    return since_;
  }

private:
  std::uint64_t count_ = 0;
  clock::time_point since_;
};

} // namespace

std::string_view to_string(noticed_by x) noexcept { return enum_name(x); }

std::string to_string(const worker_exit& x) {
  if (x.signal != 0)
    return "signal " + std::to_string(x.signal);
  return x.status < 0 ? "an unknown status" : "status " + std::to_string(x.status);
}

// -- state

/// Shared with the two watching threads, so that they may outlive the owner.
class worker_process::state : public std::enable_shared_from_this<state> {
public:
  state(worker_options options, worker_listener listener, shared_memory memory,
        message_socket socket)
      : options_(std::move(options)), memory_(std::move(memory)), socket_(std::move(socket)),
        page_(begin_page(memory_)), listener_(std::move(listener)) {}

  /// Starts the worker. After an error nothing of it is left.
  caf::error start(message_socket worker_end);

  /// Kills the worker, and waits for its end.
  void finish() noexcept;

  caf::error kill(end_cause why, std::uint32_t call = 0) noexcept;

  std::optional<worker_end> end() const {
    std::lock_guard lock{mutex_};
    return end_;
  }

  std::optional<worker_exit> wait_exit(time_limit until) const {
    std::unique_lock lock{mutex_};
    wait(lock, until, [this] { return exit_.has_value(); });
    return exit_;
  }

  pid_t id() const noexcept { return id_; }
  message_socket& socket() noexcept { return socket_; }
  const shared_memory& memory() const noexcept { return memory_; }
  worker_page& page() noexcept { return page_; }

private:
  enum class phase : std::uint8_t { begun, started, failed };

  /// Avoids `wait_until` with the clock's maximum, which overflows in some libraries.
  template <class Condition>
  bool wait(std::unique_lock<std::mutex>& lock, time_limit until, Condition condition) const {
    if (until != no_limit)
      return changed_.wait_until(lock, until, condition);
    changed_.wait(lock, condition);
    return true;
  }

  caf::error begin(message_socket worker_end);
  caf::error exchange_hello();
  caf::error began_badly(std::string why, time_limit until);
  caf::error begin_watching_line();

  template <class T> void set(T& member, const T& to) noexcept {
    std::lock_guard lock{mutex_};
    member = to;
    changed_.notify_all();
  }

  // On the watching threads.
  void watch(message_socket worker_end);
  void watch_process();
  struct limit_watch;
  void enforce_limits(limit_watch& x, bool started, bool ended, clock::time_point now);
  void watch_line();
  bool reap() noexcept;
  void note_end(noticed_by by, end_cause cause);
  void note_reaped();
  /// Calls a listener without the lock. A destroying thread waits for the end of the call.
  template <class T>
  void call(std::unique_lock<std::mutex>& lock, std::function<void(const T&)>& listener, T what) {
    auto tell = std::exchange(listener, nullptr);
    is_telling_ = true;
    lock.unlock();
    if (tell)
      tell(what);
    tell = nullptr;
    lock.lock();
    is_telling_ = false;
    changed_.notify_all();
  }

  const worker_options options_;
  shared_memory memory_;
  message_socket socket_;
  worker_page& page_;
  pid_t id_ = -1;         // set before `begun_`
  file_descriptor pidfd_; // set before `begun_`

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  phase phase_ = phase::begun;
  worker_listener listener_;
  std::optional<caf::error> begun_; // why there is no process to watch, or no error
  bool is_killed_ = false;          // by this process: stuck, busy or by its owner
  end_cause why_killed_ = end_cause::killed;
  std::uint32_t call_ = 0; // of a busy worker
  std::optional<worker_end> end_;
  bool end_told_ = false;
  bool is_telling_ = false;
  std::optional<worker_exit> exit_;
  bool watch_is_over_ = false;
  bool line_is_over_ = false;

  std::atomic<bool> stop_line_{false};
  std::thread watcher_;
  std::thread line_watcher_;
};

/// Starts the process on the thread that watches it. For the kernel it is the child of a thread
/// (see `worker_parent`); this thread lives as long as the process.
caf::error worker_process::state::begin(message_socket worker_end) {
  if (auto error = start_thread(
          watcher_,
          [self = shared_from_this(), end = std::move(worker_end)]() mutable {
            self->watch(std::move(end));
          },
          "to watch a worker"))
    return error;
  std::unique_lock lock{mutex_};
  changed_.wait(lock, [this] { return begun_.has_value(); });
  return *begun_;
}

/// Returns the error for a worker that closed its socket, ended or sent no hello, with its exit if
/// that is known by `until`.
caf::error worker_process::state::began_badly(std::string why, time_limit until) {
  auto text = "the worker " + options_.name + " " + std::move(why);
  const auto how = wait_exit(until);
  text += how ? ": it ended with " + to_string(*how) : ": it was killed";
  if (const auto report = page_.report.read())
    text += "; it reported " + std::to_string(report->code) + ": " + report->text;
  else
    text += "; a worker's main begins with troupe::worker_main";
  return make_error(errc::unavailable, std::move(text));
}

caf::error worker_process::state::exchange_hello() {
  fair_limit limit{options_.hello_limit};
  auto hello = make_hello();
  hello.area_bytes = options_.area_bytes;
  hello.beat_period_ns = options_.beat_period.count();
  const int passed = memory_.descriptor();
  constexpr const char* no_hello = "closed its connection before its hello arrived";
  caf::error not_sent;
  do
    not_sent = socket_.send(hello.bytes(), {&passed, 1}, limit.next());
  while (code_of(not_sent) == errc::deadline_exceeded && !limit.over());
  // If the worker has ended, `receive` tells how. Other failures lead to a missing reply.
  if (not_sent && code_of(not_sent) != errc::unavailable)
    return not_sent;
  std::array<std::byte, 4096> answer;
  auto got = socket_.receive(answer, 0, limit.next());
  while (!got && code_of(got.error()) == errc::deadline_exceeded && !limit.over())
    got = socket_.receive(answer, 0, limit.next());
  if (!got && code_of(got.error()) == errc::deadline_exceeded) {
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(options_.hello_limit).count();
    return began_badly("sent no hello within " + std::to_string(ms) + " ms", clock::now());
  }
  if (!got)
    return make_error(errc::unavailable, "the worker " + options_.name +
                                             " does not speak troupe: " + describe(got.error()));
  if (got->what == received::kind::interrupted)
    return make_error(errc::unavailable, "the worker " + options_.name + " is not needed any more");
  if (got->what != received::kind::message)
    return began_badly(no_hello, after(options_.exit_limit));
  const auto theirs =
      read_hello(std::span{answer}.first(got->size_bytes), "the worker " + options_.name);
  if (!theirs)
    return theirs.error();
  if (!page_.worker_line.was_held())
    return make_error(errc::unavailable,
                      "the worker " + options_.name + " sent its hello without a life line");
  return {};
}

caf::error worker_process::state::begin_watching_line() {
  std::lock_guard lock{mutex_}; // the thread may report the end of the worker at once
  if (auto error = start_thread(
          line_watcher_, [self = shared_from_this()] { self->watch_line(); }, "to watch a worker"))
    return error;
  phase_ = phase::started;
  changed_.notify_all();
  return {};
}

caf::error worker_process::state::start(message_socket worker_end) {
  auto result = begin(std::move(worker_end));
  if (!result) {
    std::stop_callback stop{options_.stop, [this] { socket_.interrupt(); }};
    result = exchange_hello();
  }
  if (!result)
    result = begin_watching_line();
  if (result) {
    set(phase_, phase::failed);
    finish();
  }
  return result;
}

caf::error worker_process::state::kill(end_cause why, std::uint32_t call) noexcept {
  {
    std::lock_guard lock{mutex_};
    if (!pidfd_ || exit_)
      return {};
    if (!end_ && !std::exchange(is_killed_, true)) {
      why_killed_ = why;
      call_ = call;
    }
  }
  if (kill_by_pidfd(pidfd_.get()) != 0 && errno != ESRCH)
    return system_failure("pidfd_send_signal", errno, "cannot kill the worker " + options_.name);
  return {};
}

void worker_process::state::finish() noexcept {
  if (auto e = kill(end_cause::killed))
    log(log_level::error, "a worker", e);
  const auto here = std::this_thread::get_id();
  const bool in_listener = here == watcher_.get_id() || here == line_watcher_.get_id();
  bool wait_for_threads = !in_listener;
  if (!in_listener) {
    std::unique_lock lock{mutex_};
    const auto are_over = [this] {
      return (watch_is_over_ || !watcher_.joinable()) &&
             (line_is_over_ || !line_watcher_.joinable());
    };
    wait_for_threads = options_.destroy_limit.count() == 0
                           ? are_over()
                           : fair_limit{options_.destroy_limit}.wait(changed_, lock, are_over);
    if (!wait_for_threads)
      log(log_level::error, "the worker " + options_.name + " was killed and does not end");
  }
  worker_listener unused; // destroyed without the lock
  {
    std::unique_lock lock{mutex_};
    std::swap(unused, listener_);
    if (!in_listener)
      changed_.wait(lock, [this] { return !is_telling_; });
  }
  for (auto* x : {&watcher_, &line_watcher_})
    if (x->joinable())
      wait_for_threads ? x->join() : leave_thread(std::move(*x));
}

// -- the threads that watch

/// Starts and watches the process. Holds the parent's life line meanwhile.
void worker_process::state::watch(message_socket worker_end) {
  {
    life_line::holder line{page_.parent_line};
    auto error = line.error();
    if (!error) {
      if (auto spawned = spawn_worker(options_, worker_end.native())) {
        id_ = spawned->id;
        pidfd_ = std::move(spawned->pidfd);
      } else {
        error = std::move(spawned.error());
      }
    }
    {
      auto closed = std::move(worker_end);
    }
    set(begun_, std::optional{error});
    if (!error) {
      watch_process();
      note_reaped();
    }
  }
  set(watch_is_over_, true);
}

/// Since when the worker has stood still, and when its end is due.
struct worker_process::state::limit_watch {
  running_time time;
  stillness beats = {};
  stillness calls = {};
  time_limit kill_at = no_limit;
  time_limit report_at = no_limit; ///< of a worker that was killed
};

void worker_process::state::watch_process() {
  auto tick = longest_tick;
  for (const auto limit : {options_.stuck_limit, options_.call_limit})
    if (limit.count() != 0)
      tick = std::clamp(limit / 8, shortest_tick, tick);
  limit_watch limits{running_time{tick}};
  bool hung_up = false;
  bool waits_for_tracer = false;
  while (true) {
    bool started = false;
    bool ended = false;
    {
      std::lock_guard lock{mutex_};
      started = phase_ == phase::started;
      ended = end_.has_value();
    }
    std::array<pollfd, 2> wanted{{{waits_for_tracer ? -1 : pidfd_.get(), POLLIN, 0},
                                  {started && !hung_up ? socket_.native() : -1, POLLRDHUP, 0}}};
    const auto next_look = clock::now() + tick;
    if (::poll(wanted.data(), wanted.size(), poll_limit(next_look)) < 0 && errno != EINTR) {
      log(log_level::error, "a worker", system_failure("poll", errno, "its end may be seen late"));
      std::this_thread::sleep_for(tick);
      wanted = {};
    }
    if (wanted[0].revents != 0 || std::exchange(waits_for_tracer, false)) {
      if (reap())
        return;
      waits_for_tracer = true; // a tracer, such as a debugger, gets the status first
    }
    if ((wanted[1].revents & (POLLRDHUP | POLLHUP)) != 0) {
      hung_up = true;
      note_end(noticed_by::socket, end_cause::hung_up);
    }
    const auto now = clock::now();
    limits.time.look(next_look, now);
    enforce_limits(limits, started, ended, now);
  }
}

/// Kills a worker that is over one of its limits, and reports its end if it does not go.
void worker_process::state::enforce_limits(limit_watch& x, bool started, bool ended,
                                           clock::time_point now) {
  const auto is_over = [&](stillness& of, std::uint64_t count, std::chrono::nanoseconds limit) {
    return started && !ended && limit.count() != 0 && x.report_at == no_limit &&
           x.time.passed(of.look(count, now), now) >= limit;
  };
  if (is_over(x.beats, page_.beats.load(), options_.stuck_limit)) {
    if (auto e = kill(end_cause::stuck))
      log(log_level::error, "a stuck worker", e);
    x.report_at = now + kill_patience;
  }
  const auto progress = page_.progress.count.load(std::memory_order_acquire);
  if (is_over(x.calls, progress, options_.call_limit) && progress % 2 != 0) { // inside a call
    if (auto e = kill(end_cause::busy, page_.progress.call.load(std::memory_order_relaxed)))
      log(log_level::error, "a worker in a call", e);
    x.report_at = now + kill_patience;
  }
  if (now >= x.report_at)
    note_end(noticed_by::heartbeat, end_cause::stuck);
  if (ended && x.kill_at == no_limit)
    x.kill_at = after(options_.exit_limit);
  if (ended && now >= x.kill_at) {
    if (auto e = kill(end_cause::killed))
      log(log_level::error, "a worker that does not end", e);
    x.kill_at = after(options_.exit_limit);
  }
}

bool worker_process::state::reap() noexcept {
  siginfo_t info{};
  int code = 0;
  do
    code = ::waitid(by_pidfd, static_cast<id_t>(pidfd_.get()), &info, WEXITED | WNOHANG);
  while (code != 0 && errno == EINTR);
  worker_exit result;
  if (code != 0) // the process is gone, but other code has taken its status
    log(log_level::warning, "a worker",
        system_failure("waitid", errno, "the status of " + options_.name + " is not known"));
  else if (info.si_pid == 0)
    return false;
  else if (info.si_code == CLD_EXITED)
    result.status = info.si_status;
  else
    result.signal = info.si_status;
  set(exit_, std::optional{result});
  return true;
}

void worker_process::state::watch_line() {
  if (page_.worker_line.wait_for_end(stop_line_) != life_end::stopped)
    note_end(noticed_by::life_line, end_cause::died);
  set(line_is_over_, true);
}

/// Notes the end and calls the listener, the first time only. If the life line shows an end, that
/// is the cause.
void worker_process::state::note_end(noticed_by by, end_cause cause) {
  const auto now = clock::now();
  std::unique_lock lock{mutex_};
  if (phase_ != phase::started || end_)
    return;
  if (const auto line = page_.worker_line.end()) {
    by = noticed_by::life_line;
    cause = *line == life_end::let_go ? end_cause::let_go : end_cause::died;
  }
  const auto end = end_.emplace(
      worker_end{is_killed_ ? why_killed_ : cause, by, now, page_.report.read(), call_});
  call(lock, listener_.ended, end);
  end_told_ = true;
  changed_.notify_all();
}

void worker_process::state::note_reaped() {
  stop_line_ = true;
  page_.worker_line.wake();
  {
    std::unique_lock lock{mutex_};
    changed_.wait(lock, [this] { return phase_ == phase::started || phase_ == phase::failed; });
    if (phase_ == phase::failed)
      return;
  }
  note_end(noticed_by::process, end_cause::died);
  std::unique_lock lock{mutex_};
  changed_.wait(lock, [this] { return end_told_; });
  call(lock, listener_.reaped, *exit_);
}

// -- the owner's

caf::expected<worker_process> worker_process::start(worker_options options,
                                                    worker_listener listener) {
  if (auto e = check(options))
    return e;
  if (options.name.empty())
    options.name = options.program;
  auto memory = shared_memory::create(worker_page::size_bytes + options.area_bytes);
  if (!memory)
    return memory.error();
  auto ends = message_socket::pair();
  if (!ends)
    return ends.error();
  auto result = std::make_shared<state>(std::move(options), std::move(listener), std::move(*memory),
                                        std::move(ends->first));
  if (auto e = result->start(std::move(ends->second)))
    return e;
  return worker_process{std::move(result)};
}

worker_process::worker_process(std::shared_ptr<state> x) noexcept : state_(std::move(x)) {}

worker_process::~worker_process() {
  if (state_)
    state_->finish();
}

worker_process& worker_process::operator=(worker_process&& other) noexcept {
  auto taken = std::move(other);
  std::swap(state_, taken.state_);
  return *this;
}

pid_t worker_process::id() const noexcept { return state_->id(); }
message_socket& worker_process::socket() const noexcept { return state_->socket(); }
std::span<std::byte> worker_process::area() const noexcept { return area_of(state_->memory()); }

const shared_memory& worker_process::memory() const noexcept { return state_->memory(); }
work_progress& worker_process::progress() const noexcept { return state_->page().progress; }
caf::error worker_process::kill() const noexcept { return state_->kill(end_cause::killed); }
bool worker_process::has_ended() const noexcept {
  return state_->page().worker_line.end().has_value();
}
std::optional<worker_end> worker_process::end() const { return state_->end(); }

std::optional<worker_exit> worker_process::wait_exit(time_limit until) const {
  return state_->wait_exit(until);
}

} // namespace troupe::detail
