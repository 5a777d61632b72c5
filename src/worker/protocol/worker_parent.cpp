#include "worker/protocol/worker_parent.hpp"

#include "foundation/log.hpp"
#include "foundation/start_thread.hpp"
#include "foundation/system_call.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

namespace troupe::detail {

namespace {

using clock = std::chrono::steady_clock;

std::optional<std::string_view> worker_argument(worker_parent::arguments from) noexcept {
  for (const std::string_view x : from)
    if (x.starts_with(worker_flag))
      return x.substr(worker_flag.size());
  return std::nullopt;
}

/// Adopts the socket whose descriptor `text`, of a worker's argument, names.
caf::expected<message_socket> socket_named(std::string_view text) {
  int descriptor = -1;
  const auto* last = text.data() + text.size();
  if (const auto [end, error] = std::from_chars(text.data(), last, descriptor);
      error != std::errc{} || end != last || descriptor < 0)
    return make_error(errc::invalid_argument, "the argument " + std::string{worker_flag} +
                                                  std::string{text} +
                                                  " does not name a descriptor");
  return message_socket::adopt(descriptor);
}

/// The parent's hello, with its shared memory.
struct introduction {
  worker_hello hello;
  shared_memory memory;
};

caf::expected<introduction> take_hello(received got, std::span<const std::byte> bytes) {
  const auto hello = read_hello(bytes, "the parent");
  if (!hello)
    return hello.error();
  if (got.descriptors.size() != 1)
    return make_error(errc::unavailable, "the parent has passed no shared memory");
  const auto beat = std::chrono::nanoseconds{hello->beat_period_ns};
  if (beat.count() <= 0 || hello->area_bytes > std::uint64_t{1} << 62)
    return make_error(errc::unavailable, "the parent's hello is malformed");
  auto memory = shared_memory::attach(std::move(got.descriptors.front()),
                                      worker_page::size_bytes + hello->area_bytes);
  if (!memory)
    return memory.error();
  if (!page_of(*memory).parent_line.was_held())
    return make_error(errc::unavailable, "the parent does not hold its life line");
  return introduction{*hello, std::move(*memory)};
}

} // namespace

class worker_parent::state {
public:
  state(worker_parent_options options, message_socket socket, shared_memory memory, wake_up stop,
        std::chrono::nanoseconds beat_period)
      : options_(std::move(options)), socket_(std::move(socket)), memory_(std::move(memory)),
        page_(page_of(memory_)), stop_(std::move(stop)), beat_period_(beat_period) {}
  ~state();
  state(const state&) = delete;
  state& operator=(const state&) = delete;

  /// Starts the threads, and returns when the life line is held.
  caf::error begin();

  message_socket& socket() noexcept { return socket_; }
  const shared_memory& memory() const noexcept { return memory_; }
  worker_page& page() noexcept { return page_; }

private:
  void beat();
  void beat_until_stopped();
  void watch_parent();
  void stop_watching() noexcept;
  /// Ends the process. Returns only if another call is doing that already.
  void leave();
  bool is_leaving() const noexcept { return leave_at_.load() != clock::time_point::max(); }
  [[noreturn]] static void exit_now() noexcept {
    static_cast<void>(drain_log(std::chrono::milliseconds{100})); // lost if the sink is slow
    ::_exit(parent_gone_status);
  }

  const worker_parent_options options_;
  message_socket socket_;
  shared_memory memory_;
  worker_page& page_;
  wake_up stop_;
  const std::chrono::nanoseconds beat_period_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool holds_line_ = false;
  caf::error hold_error_;

  std::atomic<bool> stop_watching_{false};
  std::atomic<clock::time_point> leave_at_{clock::time_point::max()};
  std::thread beater_;
  std::thread watcher_;
};

caf::error worker_parent::state::begin() {
  constexpr const char* purpose = "to watch the parent";
  if (auto error = start_thread(beater_, [this] { beat(); }, purpose))
    return error;
  if (auto error = start_thread(watcher_, [this] { watch_parent(); }, purpose))
    return error;
  std::unique_lock lock{mutex_};
  changed_.wait(lock, [this] { return holds_line_ || hold_error_; });
  return hold_error_;
}

worker_parent::state::~state() {
  stop_.signal();
  stop_watching();
  for (auto* x : {&beater_, &watcher_})
    if (x->joinable())
      x->join();
}

void worker_parent::state::stop_watching() noexcept {
  stop_watching_ = true;
  page_.parent_line.wake();
}

void worker_parent::state::beat() {
  life_line::holder line{page_.worker_line};
  {
    std::lock_guard lock{mutex_};
    hold_error_ = line.error();
    holds_line_ = !hold_error_;
    changed_.notify_all();
  }
  if (!line.error())
    beat_until_stopped();
}

void worker_parent::state::beat_until_stopped() {
  bool hung_up = false;
  while (true) {
    page_.beats.fetch_add(1);
    std::array<pollfd, 2> wanted{
        {{stop_.native(), POLLIN, 0}, {hung_up ? -1 : socket_.native(), POLLRDHUP, 0}}};
    if (::poll(wanted.data(), wanted.size(), poll_limit(clock::now() + beat_period_)) < 0 &&
        errno != EINTR) {
      log(log_level::error, "a worker", system_failure("poll", errno, "the parent is not watched"));
      exit_now();
    }
    if (clock::now() >= leave_at_.load())
      exit_now();
    if (wanted[0].revents != 0)
      return;
    if ((wanted[1].revents & (POLLRDHUP | POLLHUP)) != 0) {
      hung_up = true;
      leave();
    }
  }
}

void worker_parent::state::watch_parent() {
  if (page_.parent_line.wait_for_end(stop_watching_) != life_end::stopped)
    leave();
  if (!is_leaving())
    return;
  std::this_thread::sleep_until(leave_at_.load()); // the other thread may hang in `on_gone`
  exit_now();
}

void worker_parent::state::leave() {
  auto none = clock::time_point::max();
  if (!leave_at_.compare_exchange_strong(none, clock::now() + options_.gone_limit))
    return;
  stop_watching(); // the other thread then ends the process if `on_gone` hangs
  if (options_.on_gone)
    options_.on_gone();
  exit_now();
}

namespace {

/// Makes the kernel kill this process when its parent ends. It was started so, but programs that
/// change their user or have capabilities lose that when they are executed.
void end_with_parent(const message_socket& socket) noexcept {
  ucred parent{};
  socklen_t size = sizeof parent;
  // Skipped if another process stands between: the parent may still be there when that one ends.
  if (::getsockopt(socket.native(), SOL_SOCKET, SO_PEERCRED, &parent, &size) != 0 ||
      parent.pid != ::getppid())
    return;
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
    log(log_level::warning, "a worker",
        system_failure("prctl(PR_SET_PDEATHSIG)", errno, "while it is stopped, it may be left"));
  else if (parent.pid != ::getppid()) // it ended before that
    ::_exit(parent_gone_status);
}

/// Lets this process outlive its parent.
void stay_without_parent() noexcept {
  if (::prctl(PR_SET_PDEATHSIG, 0) != 0)
    log(log_level::warning, "a worker",
        system_failure("prctl(PR_SET_PDEATHSIG)", errno, "it may end too early"));
}

std::atomic<bool> over_as_worker{false};

/// Ignores the program's signals that have the default action, and unblocks them all: a worker
/// starts with all of them blocked. Skips the signal numbers that the C library reserves for
/// itself: calls fail for them.
void ignore_program_signals() noexcept {
  const auto all = program_signals();
  for (int x = 1; x < NSIG; ++x) {
    struct sigaction now{};
    if (::sigismember(&all, x) != 1 || ::sigaction(x, nullptr, &now) != 0 ||
        (now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL)
      continue;
    struct sigaction ignore{};
    ignore.sa_handler = SIG_IGN;
    ::sigaction(x, &ignore, nullptr);
  }
  ::pthread_sigmask(SIG_UNBLOCK, &all, nullptr);
}

} // namespace

sigset_t program_signals() noexcept {
  sigset_t result;
  ::sigfillset(&result);
  for (const int fault : {SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS})
    ::sigdelset(&result, fault);
  for (const int without_effect : {SIGCHLD, SIGCONT, SIGURG, SIGWINCH})
    ::sigdelset(&result, without_effect);
  for (const int unstoppable : {SIGKILL, SIGSTOP})
    ::sigdelset(&result, unstoppable);
  return result;
}

void set_over_as_worker() noexcept { over_as_worker.store(true); }

caf::error refuse_in_unmet_worker() {
  if (over_as_worker.load())
    return make_error(errc::unavailable,
                      "this process was a worker: what troupe::worker_main returned is what main "
                      "has to return");
  const char* mark = std::getenv(worker_variable);
  if (mark == nullptr)
    return {};
  auto why =
      make_error(errc::unavailable,
                 "this process, " + std::to_string(::getpid()) +
                     ", was started as a worker, but its program is not one: main has to begin "
                     "with troupe::worker_main(argc, argv)");
  auto socket = socket_named(mark);
  if (!socket) // told before, or another process stands between
    return why;
  auto answer = make_hello();
  answer.refuse(describe(why));
  if (auto e = socket->send(answer.bytes(), {}, clock::now() + std::chrono::seconds{1}))
    log(log_level::warning, "cannot tell the parent why this process is not a worker", e);
  return why;
}

// -- the owner's

bool worker_parent::is_worker(arguments from) noexcept { return worker_argument(from).has_value(); }

caf::expected<worker_parent> worker_parent::attach(arguments from, worker_parent_options options) {
  const auto until = clock::now() + options.hello_limit;
  const auto named = worker_argument(from);
  if (!named)
    return make_error(errc::invalid_argument, "this process is not a worker: it has no argument " +
                                                  std::string{worker_flag});
  auto socket = socket_named(*named);
  if (!socket)
    return socket.error();
  // From here on this process is a worker. Programs that it starts are not.
  ignore_program_signals();
  if (::unsetenv(worker_variable) != 0)
    return system_failure("unsetenv", errno, "cannot unset the variable that marks workers");
  options.on_gone ? stay_without_parent() : end_with_parent(*socket);
  std::array<std::byte, 4096> bytes;
  auto got = socket->receive(bytes, 1, until);
  if (got && got->what != received::kind::message)
    return make_error(errc::unavailable, "the parent ended before its hello arrived");
  auto answer = make_hello();
  // The parent needs the reason, too.
  const auto refuse = [&](const caf::error& why) {
    answer.refuse(describe(why));
    if (auto e = socket->send(answer.bytes(), {}, until))
      log(log_level::warning, "cannot tell the parent why this worker refuses", e);
    return why;
  };
  if (!got)
    return refuse(got.error());
  const auto size = got->size_bytes;
  auto met = take_hello(std::move(*got), std::span{bytes}.first(size));
  if (!met)
    return refuse(met.error());
  auto stop = wake_up::create();
  if (!stop)
    return refuse(stop.error());
  const std::chrono::nanoseconds beat_period{met->hello.beat_period_ns};
  answer.area_bytes = met->hello.area_bytes;
  answer.beat_period_ns = met->hello.beat_period_ns;
  auto result = std::make_unique<state>(std::move(options), std::move(*socket),
                                        std::move(met->memory), std::move(*stop), beat_period);
  auto failed = result->begin();
  if (failed)
    answer.refuse(describe(failed));
  if (auto e = result->socket().send(answer.bytes(), {}, until); e && !failed)
    failed = std::move(e);
  if (failed)
    return failed;
  return worker_parent{std::move(result)};
}

worker_parent::worker_parent(std::unique_ptr<state> x) noexcept : state_(std::move(x)) {}
worker_parent::~worker_parent() = default;
worker_parent::worker_parent(worker_parent&&) noexcept = default;
worker_parent& worker_parent::operator=(worker_parent&&) noexcept = default;

message_socket& worker_parent::socket() const noexcept { return state_->socket(); }
std::span<std::byte> worker_parent::area() const noexcept { return area_of(state_->memory()); }
work_progress& worker_parent::progress() const noexcept { return state_->page().progress; }

void worker_parent::report_failure(std::int32_t code, std::string_view text,
                                   std::int32_t native_code) const noexcept {
  state_->page().report.write(code, text, native_code);
}

} // namespace troupe::detail
