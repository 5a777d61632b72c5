// Workers, their parent, and the end of either. Workers are child processes that execute the test
// binary anew.

#include "support/control_timer.hpp"
#include "support/entries_of.hpp"
#include "support/log_lines.hpp"
#include "worker/worker_support.hpp"
#include <troupe/version.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <memory>
#include <sstream>
#include <thread>
#include <tuple>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

namespace troupe::testing {
namespace {

using detail::end_cause;
using detail::file_descriptor;
using detail::message_socket;
using detail::noticed_by;
using detail::received;
using detail::worker_hello;
using detail::worker_parent;
using detail::worker_process;

// -- in the workers

/// Blocks until the process is killed.
[[noreturn]] void stay() {
  while (true)
    ::pause();
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in{text};
  return {std::istream_iterator<std::string>{in}, {}};
}

/// Returns the socket of a worker that does not attach as it should.
message_socket raw_socket() {
  const auto last = std::string_view{main_arguments().back()};
  return must(
      message_socket::adopt(std::stoi(std::string{last.substr(detail::worker_flag.size())})));
}

std::string open_descriptors() {
  std::vector<int> all;
  for (const auto& x : std::filesystem::directory_iterator{"/proc/self/fd"})
    all.push_back(std::stoi(x.path().filename()));
  std::sort(all.begin(), all.end());
  std::string result;
  for (const int x : all) // the last one belongs to the iterator
    result += std::to_string(x) + " ";
  return result;
}

/// Returns signals that end or stop a process by default and do not report a fault of the process.
std::vector<int> signals_of_programs() {
  return {SIGHUP,    SIGINT,    SIGQUIT, SIGUSR1, SIGUSR2,  SIGPIPE, SIGALRM,
          SIGTERM,   SIGSTKFLT, SIGTSTP, SIGTTIN, SIGTTOU,  SIGXCPU, SIGXFSZ,
          SIGVTALRM, SIGPROF,   SIGIO,   SIGPWR,  SIGRTMIN, SIGRTMAX};
}

/// Returns the blocked signals and the signals with their default action, except those that a
/// sanitizer handles.
std::string states_of_signals() {
  std::string result;
  sigset_t blocked;
  if (::sigprocmask(SIG_BLOCK, nullptr, &blocked) != 0)
    return "unknown";
  for (int x = 1; x < NSIG; ++x) {
    if (::sigismember(&blocked, x) == 1)
      result += "blocked " + std::to_string(x) + " ";
    struct sigaction action{};
    const bool may_be_taken = x == SIGBUS || x == SIGFPE || x == SIGSEGV;
    if (!may_be_taken && x != SIGKILL && x != SIGSTOP && ::sigaction(x, nullptr, &action) == 0 &&
        action.sa_handler == SIG_DFL)
      result += "default " + std::to_string(x) + " ";
  }
  return result;
}

/// Returns the expected states in a worker.
std::string states_in_a_worker() {
  std::string result;
  for (const int x : {SIGILL, SIGTRAP, SIGABRT, SIGCHLD, SIGCONT, SIGURG, SIGWINCH, SIGSYS})
    result += "default " + std::to_string(x) + " ";
  return result;
}

/// Returns the targets of the standard streams.
std::string standard_streams() {
  std::string result;
  for (const auto* x : {"/proc/self/fd/0", "/proc/self/fd/1", "/proc/self/fd/2"}) {
    std::error_code code;
    const auto what = std::filesystem::read_symlink(x, code).string();
    result += code ? "none " : what + " ";
  }
  return result;
}

/// Executes the text orders that its parent sends.
int obey() {
  const auto descriptors = open_descriptors();
  auto parent = std::make_unique<worker_parent>(must(worker_parent::attach(main_arguments())));
  auto& socket = parent->socket();
  while (auto order = receive_note(socket)) {
    const auto words = words_of(order->text);
    const auto& verb = words.at(0);
    if (verb == "return")
      return 0;
    if (verb == "exit")
      std::exit(std::stoi(words.at(1)));
    if (verb == "abort") {
      const rlimit no_dump{};
      if (::setrlimit(RLIMIT_CORE, &no_dump) != 0)
        return 6;
      std::abort();
    }
    if (verb == "report") {
      parent->report_failure(-5, "device 3: " + words.at(1));
      parent->report_failure(6, "a second report");
      ::_exit(9);
    }
    if (verb == "let_go") {
      parent.reset();
      stay();
    }
    if (verb == "hang_up") {
      if (::shutdown(socket.native(), SHUT_WR) != 0)
        return 2;
      stay();
    }
    if (verb == "scribble") { // overwrites the whole page
      auto* page = parent->area().data() - detail::worker_page::size_bytes;
      std::memset(page, std::stoi(words.at(1)), detail::worker_page::size_bytes);
      stay();
    }
    if (verb == "id")
      send_note(socket, std::to_string(::getpid()));
    else if (verb == "descriptors")
      send_note(socket, descriptors);
    else if (verb == "signals")
      send_note(socket, states_of_signals());
    else if (verb == "streams")
      send_note(socket, standard_streams());
    else if (verb == "environment")
      send_note(socket, std::getenv("TROUPE_WORKER") != nullptr ? "a worker's" : "an ordinary one");
    else if (verb == "add") { // adds 1 to all bytes of the area and to the progress
      for (auto& x : parent->area())
        x = static_cast<std::byte>(std::to_integer<int>(x) + 1);
      parent->progress().count += 1;
      parent->progress().call = 77;
      send_note(socket, "added");
    } else if (verb == "write") { // to the descriptor that was passed
      if (::write(order->descriptors.at(0).get(), "w", 1) != 1)
        return 3;
      send_note(socket, "written");
    } else if (verb == "pass") { // a new descriptor
      file_descriptor file{::memfd_create("passed", MFD_CLOEXEC)};
      if (::write(file.get(), "from the worker", 15) != 15)
        return 4;
      const int native = file.get();
      send_note(socket, "passed", {&native, 1});
    } else
      return 5;
  }
  stay(); // at the end of the socket the library ends the process
}

TROUPE_CHILD(Obedient) { return obey(); }

/// Signals arrive while a program is being loaded.
TROUPE_CHILD(GetsSignalsBeforeItAttaches) {
  for (const int x : signals_of_programs())
    if (::kill(::getpid(), x) != 0)
      return 7;
  return obey();
}

TROUPE_CHILD(NeverSaysHello) { stay(); }
TROUPE_CHILD(ExitsAtOnce) { return 3; }
TROUPE_CHILD(DiesAtOnce) { return std::raise(SIGKILL); }

TROUPE_CHILD(ClosesItsSocket) {
  {
    auto closed = raw_socket();
  }
  stay();
}

TROUPE_CHILD(SaysGarbage) {
  auto socket = raw_socket();
  send_note(socket, "garbage");
  stay();
}

TROUPE_CHILD(SaysTooMuch) {
  auto socket = raw_socket();
  send_note(socket, std::string(10'000, 'x'));
  stay();
}

TROUPE_CHILD(SaysHelloOnly) {
  auto socket = raw_socket();
  must(socket.send(detail::make_hello().bytes()));
  stay();
}

TROUPE_CHILD(SaysHalfAHello) {
  auto socket = raw_socket();
  const auto hello = detail::make_hello();
  must(socket.send(hello.bytes().first(hello.bytes().size() / 2)));
  stay();
}

worker_hello hello_of(const char* version, std::uint32_t protocol) {
  auto result = detail::make_hello();
  result.version = {};
  std::copy_n(version, std::strlen(version), result.version.data());
  result.protocol = protocol;
  return result;
}

TROUPE_CHILD(HasAnotherVersion) {
  auto socket = raw_socket();
  must(socket.send(hello_of("99.1.2", 1).bytes()));
  stay();
}

/// Attaches after SIGCONT.
TROUPE_CHILD(StopsBeforeItAttaches) {
  if (std::raise(SIGSTOP) != 0)
    return 1;
  auto parent = worker_parent::attach(main_arguments());
  if (!parent)
    return 2;
  stay();
}

/// Reports through a pipe that its parent has ended. `returns`: true if the listener returns.
int tells_of_its_parent(bool returns) {
  auto pipe = std::make_shared<std::promise<int>>();
  auto known = pipe->get_future().share();
  detail::worker_parent_options options;
  options.on_gone = [known, returns] {
    if (::write(known.get(), "g", 1) != 1)
      std::perror("write");
    if (!returns)
      stay();
  };
  auto parent = must(worker_parent::attach(main_arguments(), std::move(options)));
  const auto order = receive_note(parent.socket());
  pipe->set_value(order->descriptors.at(0).get());
  send_note(parent.socket(), "ready");
  stay();
}

TROUPE_CHILD(TellsOfItsParent) { return tells_of_its_parent(true); }
TROUPE_CHILD(HangsWithoutItsParent) { return tells_of_its_parent(false); }

/// A worker that has workers of its own. It executes orders too.
TROUPE_CHILD(Middle) {
  static witness seen; // static: some orders end the process without destroying it
  static std::vector<worker_process> workers;
  static auto parent = must(worker_parent::attach(main_arguments()));
  auto& socket = parent.socket();
  while (auto order = receive_note(socket)) {
    const auto words = words_of(order->text);
    if (words.at(0) == "start") { // arguments: scenario, number, stuck limit in ms
      std::vector<file_descriptor> watches;
      std::vector<int> passed;
      for (int i = 0; i < std::stoi(words.at(2)); ++i) {
        auto options = worker_of(words.at(1));
        options.stuck_limit = std::chrono::milliseconds{std::stoi(words.at(3))};
        workers.push_back(must(worker_process::start(std::move(options), seen.listener())));
        if (!order->descriptors.empty()) {
          const int pipe = order->descriptors.front().get();
          answer(workers.back().socket(), "take", {&pipe, 1});
        }
        watches.push_back(watch_of(workers.back().id()));
        passed.push_back(watches.back().get());
      }
      send_note(socket, "started " + std::to_string(workers.back().id()), passed);
    } else if (words.at(0) == "fork") { // a process with copies of all descriptors
      const auto id = ::fork();
      if (id == 0)
        stay();
      const auto watch = watch_of(id);
      const int passed = watch.get();
      send_note(socket, "forked", {&passed, 1});
    } else if (words.at(0) == "ends") {
      send_note(socket, std::to_string(seen.counts().first));
    } else if (words.at(0) == "exit") {
      new std::vector<worker_process>(std::move(workers)); // they are never destroyed
      std::exit(0);
    } else if (words.at(0) == "_exit") {
      ::_exit(0);
    }
  }
  return 1;
}

// -- resources of this process

struct belongings {
  std::size_t descriptors = entries_of("/proc/self/fd");
  std::size_t threads = entries_of("/proc/self/task");
  std::size_t shared_mappings = 0;
  bool has_children = false;

  belongings() {
    std::ifstream maps{"/proc/self/maps"};
    for (std::string line; std::getline(maps, line);)
      shared_mappings += line.find("memfd:troupe") != std::string::npos ? 1 : 0;
    siginfo_t info{};
    has_children = ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
  }
  bool within(const belongings& x) const {
    return descriptors <= x.descriptors && threads <= x.threads &&
           shared_mappings <= x.shared_mappings && has_children <= x.has_children;
  }
};

std::ostream& operator<<(std::ostream& out, const belongings& x) {
  return out << x.descriptors << " descriptors, " << x.threads << " threads, " << x.shared_mappings
             << " shared mappings" << (x.has_children ? ", children" : "");
}

/// For EXPECT_TRUE. Waits, since a joined thread may still be listed for a moment.
::testing::AssertionResult has_only(const belongings& wanted) {
  const auto until = clock::now() + patience;
  belongings now;
  while (!now.within(wanted) && clock::now() < until) {
    std::this_thread::yield();
    now = {};
  }
  if (now.within(wanted))
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "there are " << now << "; there were " << wanted;
}

struct pipe_ends {
  file_descriptor read;
  file_descriptor write;
};

pipe_ends make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0)
    throw std::runtime_error("pipe2");
  return {file_descriptor{ends[0]}, file_descriptor{ends[1]}};
}

std::string why_not_started(const detail::worker_options& options) {
  witness seen;
  const belongings before;
  const auto result = worker_process::start(options, seen.listener());
  if (result)
    return "it was started";
  EXPECT_TRUE(has_code(result, errc::unavailable));
  EXPECT_TRUE(has_only(before));
  EXPECT_EQ(seen.counts(), std::pair(std::size_t{0}, std::size_t{0}));
  return describe(result.error());
}

void expect_words(const std::string& text, const std::vector<std::string>& wanted) {
  for (const auto& x : wanted)
    EXPECT_NE(text.find(x), std::string::npos) << x << " is not in: " << text;
}

struct times {
  std::vector<clock::duration> all;

  void print(const char* what) {
    std::sort(all.begin(), all.end());
    std::printf("%s: median %.3f ms, maximum %.3f ms (%zu times)\n", what, ms(median()),
                ms(all.back()), all.size());
  }
  clock::duration median() const { return all[all.size() / 2]; }
};

// -- start and end

TEST(WorkerProcess, EightWorkersStartAndEndInOrder) {
  constexpr std::size_t count = 8;
  const belongings before;
  {
    std::array<witness, count> seen;
    std::vector<worker_process> workers;
    std::vector<std::string> ids;
    times starts;
    for (auto& x : seen) {
      const auto begin = clock::now();
      workers.push_back(must(worker_process::start(worker_of("Obedient"), x.listener())));
      starts.all.push_back(clock::now() - begin);
    }
    starts.print("from the start to the hello");
    for (auto& x : workers)
      ids.push_back(answer(x.socket(), "id").text);
    for (std::size_t i = 0; i < count; ++i)
      EXPECT_EQ(ids[i], std::to_string(workers[i].id()));
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_FALSE(workers[i].end());
      send_note(workers[i].socket(), "return");
      const auto end = seen[i].wait_end();
      EXPECT_EQ(end.cause, end_cause::let_go);
      EXPECT_EQ(end.noticed, noticed_by::life_line);
      EXPECT_FALSE(end.report);
      EXPECT_EQ(seen[i].wait_exit().status, 0);
      EXPECT_EQ(workers[i].wait_exit(clock::now())->status, 0);
      for (std::size_t j = i + 1; j < count; ++j)
        EXPECT_FALSE(workers[j].end()) << "it was not asked to";
    }
    workers.clear();
    for (auto& x : seen)
      EXPECT_EQ(x.counts(), once_each);
  }
  EXPECT_TRUE(has_only(before));
}

TEST(WorkerProcess, AKillIsNoticedAtOnceAndToldOnce) {
  constexpr int rounds = 40;
  control_timer control;
  times noticed;
  times reaped;
  for (int i = 0; i < rounds; ++i) {
    witness seen;
    auto worker = must(worker_process::start(worker_of("Obedient"), seen.listener()));
    EXPECT_FALSE(worker.has_ended());
    const auto begin = clock::now();
    ASSERT_EQ(::kill(worker.id(), SIGKILL), 0);
    EXPECT_FALSE(receive_note(worker.socket()));
    EXPECT_TRUE(worker.has_ended()) << "who sees the end of a socket of its finds it at its end";
    const auto end = seen.wait_end();
    noticed.all.push_back(end.when - begin);
    EXPECT_EQ(end.cause, end_cause::died);
    EXPECT_EQ(end.noticed, noticed_by::life_line);
    const auto how = seen.wait_exit();
    reaped.all.push_back(clock::now() - begin);
    EXPECT_EQ(how.signal, SIGKILL);
    EXPECT_EQ(how.status, -1);
    EXPECT_TRUE(is_ok(worker.kill())) << "nothing is there";
    {
      auto destroyed = std::move(worker);
    }
    EXPECT_EQ(seen.counts(), once_each);
  }
  noticed.print("from the kill to the notice");
  reaped.print("from the kill to the exit status");
  EXPECT_LT(noticed.median(), 5ms + control.worst());
  EXPECT_LT(noticed.all.back(), 100ms + 4 * control.worst());
}

TEST(WorkerProcess, TheOwnerKills) {
  witness seen;
  auto worker = must(worker_process::start(worker_of("Obedient"), seen.listener()));
  EXPECT_TRUE(is_ok(worker.kill()));
  EXPECT_EQ(seen.wait_end().cause, end_cause::killed);
  EXPECT_EQ(seen.wait_exit().signal, SIGKILL);
  EXPECT_EQ(worker.end()->cause, end_cause::killed);
}

TEST(WorkerProcess, HowItEndedIsTold) {
  for (const auto& [order, status, signal] :
       {std::tuple{"exit 42", 42, 0}, std::tuple{"abort", -1, SIGABRT}}) {
    witness seen;
    auto worker = must(worker_process::start(worker_of("Obedient"), seen.listener()));
    send_note(worker.socket(), order);
    EXPECT_EQ(seen.wait_end().cause, end_cause::died) << order;
    const auto how = seen.wait_exit();
    EXPECT_EQ(how.status, status) << order;
    EXPECT_EQ(how.signal, signal) << order;
  }
}

TEST(WorkerProcess, ItsReportIsTold) {
  for (const std::size_t size : {20u, 2000u}) {
    witness seen;
    auto worker = must(worker_process::start(worker_of("Obedient"), seen.listener()));
    const auto text = "device 3: " + std::string(size, 'x');
    send_note(worker.socket(), "report " + std::string(size, 'x'));
    const auto end = seen.wait_end();
    ASSERT_TRUE(end.report);
    EXPECT_EQ(end.report->code, -5);
    EXPECT_EQ(end.report->text, text.substr(0, 1008));
    EXPECT_EQ(seen.wait_exit().status, 9);
  }
}

TEST(WorkerProcess, WhoLetsGoAndStaysIsKilled) {
  for (const auto& [order, cause] :
       {std::pair{"let_go", end_cause::let_go}, std::pair{"hang_up", end_cause::hung_up}}) {
    witness seen;
    auto options = worker_of("Obedient");
    options.exit_limit = 100ms;
    auto worker = must(worker_process::start(std::move(options), seen.listener()));
    send_note(worker.socket(), order);
    const auto end = seen.wait_end();
    EXPECT_EQ(end.cause, cause);
    EXPECT_EQ(seen.wait_exit().signal, SIGKILL);
    EXPECT_GE(clock::now() - end.when, 100ms);
    EXPECT_EQ(seen.counts(), once_each);
  }
}

TEST(WorkerProcess, WhoOverwritesThePageHarmsNobody) {
  for (const int byte : {0x00, 0x01, 0x02, 0x40, 0x80, 0xff}) {
    witness seen;
    auto options = worker_of("Obedient");
    options.area_bytes = 1;
    options.exit_limit = 100ms;
    auto worker = must(worker_process::start(std::move(options), seen.listener()));
    send_note(worker.socket(), "scribble " + std::to_string(byte));
    if (byte == 0x01 || byte == 0x02 ||
        byte == 0x80) { // its life line is broken, and nothing reports that
      std::array<std::byte, 8> bytes;
      EXPECT_TRUE(has_code(worker.socket().receive(bytes, 0, clock::now() + 200ms),
                           errc::deadline_exceeded));
      EXPECT_EQ(seen.counts().first, 0u);
      ASSERT_EQ(::kill(worker.id(), SIGKILL), 0);
      EXPECT_NE(seen.wait_end().noticed, noticed_by::life_line);
    }
    EXPECT_FALSE(seen.wait_end().report);
    seen.wait_exit();
    {
      auto destroyed = std::move(worker);
    }
    EXPECT_EQ(seen.counts(), once_each) << byte;
  }
}

// -- resources of a worker

TEST(WorkerProcess, HasTheAreaAndTheProgress) {
  auto options = worker_of("Obedient");
  options.area_bytes = 1 << 20;
  auto worker = must(worker_process::start(std::move(options)));
  ASSERT_EQ(worker.area().size(), std::size_t{1} << 20);
  for (std::size_t i = 0; i < worker.area().size(); ++i)
    worker.area()[i] = static_cast<std::byte>(i);
  worker.progress().count = 5;
  answer(worker.socket(), "add");
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < worker.area().size(); ++i)
    wrong += worker.area()[i] == static_cast<std::byte>(i + 1) ? 0 : 1;
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(worker.progress().count, 6u);
  EXPECT_EQ(worker.progress().call, 77u);
}

TEST(WorkerProcess, PassesDescriptorsBothWays) {
  auto worker = must(worker_process::start(worker_of("Obedient")));
  auto pipe = make_pipe();
  const int passed = pipe.write.get();
  answer(worker.socket(), "write", {&passed, 1});
  EXPECT_TRUE(is_ready(pipe.read, 0ms));
  const auto back = answer(worker.socket(), "pass");
  ASSERT_EQ(back.descriptors.size(), 1u);
  std::array<char, 32> text{};
  EXPECT_EQ(::pread(back.descriptors[0].get(), text.data(), text.size(), 0), 15);
  EXPECT_STREQ(text.data(), "from the worker");
}

TEST(WorkerProcess, InheritsNothingElse) {
  file_descriptor inheritable{::open("/dev/null", O_RDONLY)}; // NOLINT(*-cloexec-*)
  ASSERT_GE(inheritable.get(), 3);
  sigset_t blocked;
  sigset_t before;
  ASSERT_EQ(::sigemptyset(&blocked), 0);
  ASSERT_EQ(::sigaddset(&blocked, SIGUSR1), 0);
  ASSERT_EQ(::pthread_sigmask(SIG_BLOCK, &blocked, &before), 0);
  auto* const handler = std::signal(SIGPIPE, SIG_IGN);
  auto worker = worker_process::start(worker_of("Obedient"));
  EXPECT_NE(std::signal(SIGPIPE, handler), SIG_ERR);
  ASSERT_EQ(::pthread_sigmask(SIG_SETMASK, &before, nullptr), 0);
  ASSERT_TRUE(worker) << describe(worker.error());
  EXPECT_EQ(answer(worker->socket(), "descriptors").text, "0 1 2 3 4 "); // 4: the iterator
  EXPECT_EQ(answer(worker->socket(), "signals").text, states_in_a_worker());
  EXPECT_EQ(answer(worker->socket(), "environment").text, "an ordinary one");
}

// -- signals for the program

TEST(WorkerProcess, IsInAProcessGroupOfItsOwn) {
  auto worker = must(worker_process::start(worker_of("Obedient")));
  EXPECT_EQ(::getpgid(worker.id()), worker.id());
  EXPECT_EQ(::getsid(worker.id()), ::getsid(0));
}

TEST(WorkerProcess, SignalsOfTheProgramNeitherEndNorStopIt) {
  for (const auto* scenario : {"Obedient", "GetsSignalsBeforeItAttaches"}) {
    witness seen;
    auto worker = must(worker_process::start(worker_of(scenario), seen.listener()));
    for (const int x : signals_of_programs()) {
      ASSERT_EQ(::kill(worker.id(), x), 0);
      ASSERT_EQ(answer(worker.socket(), "id").text, std::to_string(worker.id()))
          << scenario << ", signal " << x;
    }
    EXPECT_EQ(seen.counts().first, 0u);
  }
}

TROUPE_CHILD(SignalsItsGroup) {
  if (::setpgid(0, 0) != 0)
    return 1;
  witness seen;
  std::vector<worker_process> workers;
  for (int i = 0; i < 2; ++i)
    workers.push_back(must(worker_process::start(worker_of("Obedient"), seen.listener())));
  for (const int x : signals_of_programs()) {
    struct sigaction own{};
    own.sa_handler = [](int) {};
    own.sa_flags = SA_RESTART;
    if (::sigaction(x, &own, nullptr) != 0 || ::kill(0, x) != 0)
      return 2;
    for (auto& worker : workers)
      EXPECT_EQ(answer(worker.socket(), "id").text, std::to_string(worker.id())) << x;
  }
  EXPECT_EQ(seen.counts().first, 0u);
  return 0;
}

TEST(WorkerProcess, SignalsOfTheWholeGroupReachTheProgramAlone) {
  const auto child = run_child("SignalsItsGroup", patience);
  EXPECT_EQ(child.status, 0) << to_string(child);
}

// -- standard streams

TROUPE_CHILD(HasNoStandardStreams) {
  for (const int x : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::close(x) != 0)
      return 1;
  auto worker = must(worker_process::start(worker_of("Obedient")));
  tell("own", standard_streams());
  tell("streams", answer(worker.socket(), "streams").text);
  tell("descriptors", answer(worker.socket(), "descriptors").text);
  return 0;
}

TROUPE_CHILD(KeepsItsStandardStreams) {
  for (const int x : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(x, F_SETFD, FD_CLOEXEC) != 0)
      return 1;
  auto worker = must(worker_process::start(worker_of("Obedient")));
  tell("streams", answer(worker.socket(), "streams").text);
  tell("descriptors", answer(worker.socket(), "descriptors").text);
  return 0;
}

TEST(WorkerProcess, HasStandardStreamsWhereItsParentHasNone) {
  for (const auto* scenario : {"HasNoStandardStreams", "KeepsItsStandardStreams"}) {
    const auto child = run_child(scenario, patience);
    EXPECT_EQ(child.status, 0) << to_string(child);
    EXPECT_EQ(child.value("streams"), "/dev/null /dev/null /dev/null ") << scenario;
    EXPECT_EQ(child.value("descriptors"), "0 1 2 3 4 ") << scenario;
    if (child.was_told("own")) {
      EXPECT_EQ(child.value("own"), "none none none ") << "a descriptor of the library's";
    }
  }
}

// -- stuck workers

TEST(WorkerProcess, AStoppedWorkerIsStuck) {
  control_timer control;
  witness seen;
  auto options = worker_of("Obedient");
  options.stuck_limit = 400ms;
  auto worker = must(worker_process::start(std::move(options), seen.listener()));
  const auto begin = clock::now();
  ASSERT_EQ(::kill(worker.id(), SIGSTOP), 0);
  const auto end = seen.wait_end();
  EXPECT_EQ(end.cause, end_cause::stuck);
  std::printf("stuck was noticed after %.0f ms, %s\n", ms(end.when - begin),
              std::string{to_string(end.noticed)}.c_str());
  EXPECT_GE(end.when - begin, 300ms);
  EXPECT_LE(end.when - begin, 1s + 10 * control.worst());
  EXPECT_EQ(seen.wait_exit().signal, SIGKILL);
  {
    auto destroyed = std::move(worker);
  }
  EXPECT_EQ(seen.counts(), once_each);
}

TEST(WorkerProcess, AWorkerThatBeatsIsNotStuck) {
  witness seen;
  auto options = worker_of("Obedient");
  options.stuck_limit = 800ms;
  auto worker = must(worker_process::start(std::move(options), seen.listener()));
  std::array<std::byte, 8> bytes;
  EXPECT_TRUE(
      has_code(worker.socket().receive(bytes, 0, clock::now() + 1800ms), errc::deadline_exceeded));
  EXPECT_EQ(seen.counts().first, 0u);
}

TEST(WorkerProcess, NobodyIsStuckWhenBothStoodStill) {
  auto middle = must(worker_process::start([] {
    auto options = worker_of("Middle");
    options.stuck_limit = 0ms;
    return options;
  }()));
  const auto started = answer(middle.socket(), "start Obedient 1 800");
  const auto worker = static_cast<pid_t>(std::stoi(words_of(started.text).at(1)));
  ASSERT_EQ(::kill(middle.id(), SIGSTOP), 0);
  ASSERT_EQ(::kill(worker, SIGSTOP), 0);
  EXPECT_FALSE(is_ready(started.descriptors.at(0), 2000ms)) << "no process reads it";
  ASSERT_EQ(::kill(worker, SIGCONT), 0);
  ASSERT_EQ(::kill(middle.id(), SIGCONT), 0);
  EXPECT_FALSE(is_ready(started.descriptors.at(0), 1200ms));
  EXPECT_EQ(answer(middle.socket(), "ends").text, "0");
}

// -- the end of the parent

/// ThreadSanitizer delays the end of a process by a second.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::chrono::seconds gone_bound{10};
#else
constexpr std::chrono::seconds gone_bound{1};
#endif

TEST(WorkerParent, NoWorkerIsLeftAloneHoweverItsParentEnds) {
  for (const auto* how : {"SIGKILL", "exit", "_exit"}) {
    control_timer control;
    times gone;
    for (int i = 0; i < 5; ++i) {
      auto middle = must(worker_process::start(worker_of("Middle")));
      const auto started = answer(middle.socket(), "start Obedient 4 1000");
      ASSERT_EQ(started.descriptors.size(), 4u);
      for (auto& x : started.descriptors)
        ASSERT_FALSE(is_ready(x, 0ms));
      const auto begin = clock::now();
      if (how == std::string{"SIGKILL"}) {
        ASSERT_EQ(::kill(middle.id(), SIGKILL), 0);
      } else {
        send_note(middle.socket(), how);
      }
      for (auto& x : started.descriptors)
        EXPECT_TRUE(is_ready(x, patience)) << how;
      gone.all.push_back(clock::now() - begin);
    }
    gone.print((std::string{"all four are gone after "} + how).c_str());
    EXPECT_LT(gone.median(), gone_bound + 4 * control.worst()) << how;
  }
}

TEST(WorkerParent, AStoppedWorkerEndsWithItsParent) {
  auto middle = must(worker_process::start(worker_of("Middle")));
  const auto started = answer(middle.socket(), "start Obedient 1 0");
  const auto worker = static_cast<pid_t>(std::stoi(words_of(started.text).at(1)));
  ASSERT_EQ(::kill(worker, SIGSTOP), 0);
  ASSERT_EQ(::kill(middle.id(), SIGKILL), 0);
  EXPECT_TRUE(is_ready(started.descriptors.at(0), patience));
  static_cast<void>(::syscall(SYS_pidfd_send_signal, started.descriptors.at(0).get(), SIGKILL,
                              nullptr, 0)); // has no effect unless the test has failed
}

/// Returns the number of a stopped child of `parent`, after it has stopped; -1: there is none.
pid_t stopped_child(pid_t parent) {
  for (const auto until = clock::now() + patience; clock::now() < until; std::this_thread::yield())
    for (const auto& x : std::filesystem::directory_iterator{"/proc"}) {
      std::ifstream in{x.path() / "stat"};
      std::string text;
      if (!std::getline(in, text) || text.rfind(')') == std::string::npos)
        continue;
      const auto rest = words_of(text.substr(text.rfind(')') + 1));
      if (rest.at(0) == "T" && rest.at(1) == std::to_string(parent))
        return std::stoi(text);
    }
  return -1;
}

/// Adopts what a worker's parent leaves. So the worker's process group is not orphaned, and the
/// kernel does not continue it.
TROUPE_CHILD(AdoptsAStoppedWorker) {
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0)
    return 1;
  auto middle = must(worker_process::start(worker_of("Middle")));
  send_note(middle.socket(), "start StopsBeforeItAttaches 1 1000");
  const auto worker = stopped_child(middle.id());
  if (worker < 0)
    return 2;
  const auto watch = watch_of(worker);
  EXPECT_TRUE(is_ok(middle.kill()));
  EXPECT_TRUE(middle.wait_exit(clock::now() + patience));
  EXPECT_TRUE(is_ready(watch, patience));
  static_cast<void>(::syscall(SYS_pidfd_send_signal, watch.get(), SIGKILL, nullptr,
                              0)); // has no effect unless the test has failed
  return 0;
}

TEST(WorkerParent, ParentDiesBeforeItsWorkerAttaches) {
  const auto child = run_child("AdoptsAStoppedWorker", 4 * patience);
  EXPECT_EQ(child.status, 0) << to_string(child);
}

TEST(WorkerParent, TheLifeLineTellsWhatTheSocketDoesNot) {
  witness seen;
  auto middle = must(worker_process::start(worker_of("Middle"), seen.listener()));
  const auto started = answer(middle.socket(), "start Obedient 4 1000");
  const auto forked = answer(middle.socket(), "fork"); // keeps all sockets open
  ASSERT_EQ(::kill(middle.id(), SIGKILL), 0);
  EXPECT_EQ(seen.wait_end().noticed, noticed_by::life_line);
  for (auto& x : started.descriptors)
    EXPECT_TRUE(is_ready(x, patience));
  EXPECT_FALSE(is_ready(forked.descriptors.at(0), 0ms));
  EXPECT_EQ(::syscall(SYS_pidfd_send_signal, forked.descriptors.at(0).get(), SIGKILL, nullptr, 0),
            0);
  EXPECT_TRUE(is_ready(forked.descriptors.at(0), patience));
}

TEST(WorkerParent, ItsEndIsToldOnceAndThenTheWorkerEnds) {
  for (const auto* scenario : {"TellsOfItsParent", "HangsWithoutItsParent"}) {
    auto middle = must(worker_process::start(worker_of("Middle")));
    auto pipe = make_pipe();
    const int passed = pipe.write.get();
    const auto started =
        answer(middle.socket(), "start " + std::string{scenario} + " 4 1000", {&passed, 1});
    pipe.write.reset();
    EXPECT_TRUE(is_ok(middle.kill()));
    for (auto& x : started.descriptors)
      EXPECT_TRUE(is_ready(x, patience)) << scenario;
    std::array<char, 16> told{};
    EXPECT_EQ(::read(pipe.read.get(), told.data(), told.size()), 4) << scenario;
  }
}

TEST(WorkerParent, DestroyedWhileWorkersRun) {
  std::array<witness, 4> seen;
  const belongings before;
  {
    std::vector<worker_process> workers;
    std::vector<file_descriptor> watches;
    for (auto& x : seen) {
      workers.push_back(must(worker_process::start(worker_of("Obedient"), x.listener())));
      watches.push_back(watch_of(workers.back().id()));
    }
    const auto begin = clock::now();
    workers.clear();
    std::printf("four are destroyed in %.1f ms\n", ms(clock::now() - begin));
    for (auto& x : watches)
      EXPECT_TRUE(is_ready(x, 0ms));
  }
  for (auto& x : seen) {
    EXPECT_EQ(x.counts(), once_each);
    EXPECT_EQ(x.wait_end().cause, end_cause::killed);
    EXPECT_EQ(x.wait_exit().signal, SIGKILL);
  }
  EXPECT_TRUE(has_only(before));
}

TEST(WorkerParent, DestroyedInItsListener) {
  const belongings before;
  for (const bool at_its_end : {true, false}) {
    std::optional<worker_process> worker;
    std::promise<void> begun;
    std::promise<void> gone;
    std::atomic<int> late = 0;
    const auto destroy = [&](const auto&) {
      begun.get_future().wait();
      worker.reset();
      gone.set_value();
    };
    detail::worker_listener listener{destroy, [&](const auto&) { ++late; }};
    if (!at_its_end)
      listener = {{}, destroy};
    worker = must(worker_process::start(worker_of("Obedient"), std::move(listener)));
    ASSERT_EQ(::kill(worker->id(), SIGKILL), 0);
    begun.set_value();
    EXPECT_EQ(gone.get_future().wait_for(patience), std::future_status::ready);
    EXPECT_TRUE(has_only(before));
    EXPECT_EQ(late, 0);
  }
}

TEST(WorkerParent, DestroyedWithoutPatience) {
  const log_lines lines; // starts the log's thread
  const belongings before;
  for (int i = 0; i < 20; ++i) {
    auto seen = std::make_unique<witness>();
    {
      auto options = worker_of("Obedient");
      options.destroy_limit = 0ms;
      auto worker = must(worker_process::start(std::move(options), seen->listener()));
    }
    EXPECT_LE(seen->counts().first, 1u);
    seen.reset(); // no listener is called later
  }
  EXPECT_TRUE(has_only(before)) << "what is left, ends by itself";
}

TEST(WorkerParent, SomebodyElseTakesTheStatus) {
  const auto child = run_child("IgnoresChildren", patience);
  EXPECT_EQ(child.status, 0) << to_string(child);
  EXPECT_EQ(child.signal, 0) << to_string(child);
}

TROUPE_CHILD(IgnoresChildren) {
  if (std::signal(SIGCHLD, SIG_IGN) == SIG_ERR)
    return 1;
  witness seen;
  auto worker = must(worker_process::start(worker_of("Obedient"), seen.listener()));
  EXPECT_TRUE(is_ok(worker.kill()));
  EXPECT_EQ(seen.wait_end().cause, end_cause::killed);
  EXPECT_EQ(seen.wait_exit().status, -1);
  EXPECT_EQ(seen.wait_exit().signal, 0);
  EXPECT_EQ(to_string(seen.wait_exit()), "an unknown status");
  return 0;
}

// -- no leaks

TEST(WorkerProcess, AHundredCyclesLeaveNothing) {
  const auto cycle = [](int i) {
    witness seen;
    auto options = worker_of("Obedient");
    options.area_bytes = 1 << 16;
    auto worker = must(worker_process::start(std::move(options), seen.listener()));
    if (i % 2 == 0) {
      EXPECT_TRUE(is_ok(worker.kill()));
    }
  };
  cycle(0);
  const belongings before;
  EXPECT_EQ(before.shared_mappings, 0u);
  EXPECT_FALSE(before.has_children);
  for (int i = 0; i < 100; ++i)
    cycle(i);
  EXPECT_TRUE(has_only(before));
}

// -- failed starts

TEST(WorkerStart, NoProgram) {
  auto options = worker_of("Obedient");
  options.program = "/no/such/worker";
  expect_words(why_not_started(options), {"/no/such/worker", "No such file", "execve"});
  options.program = "/etc/passwd";
  expect_words(why_not_started(options), {"/etc/passwd", "Permission denied"});
  options.program = "/etc";
  expect_words(why_not_started(options), {"/etc", "Permission denied"});
}

TEST(WorkerStart, NoProgramThatCanRun) {
  const auto path =
      std::filesystem::temp_directory_path() / ("troupe_no_program_" + std::to_string(::getpid()));
  std::ofstream{path} << "this is no program\n";
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  auto options = worker_of("Obedient");
  options.program = path;
  expect_words(why_not_started(options), {path, "Exec format error"});
  std::filesystem::remove(path);
}

TEST(WorkerStart, AProgramThatEndsAtOnce) {
  expect_words(why_not_started(worker_of("ExitsAtOnce")),
               {"/proc/self/exe", "before its hello arrived", "status 3"});
  expect_words(why_not_started(worker_of("DiesAtOnce")), {"before its hello arrived", "signal 9"});
  auto options = worker_of("Obedient");
  options.program = "/bin/false";
  expect_words(why_not_started(options), {"/bin/false", "before its hello arrived", "status 1"});
}

TEST(WorkerStart, AProgramThatNeverSaysHello) {
  auto options = worker_of("NeverSaysHello");
  options.hello_limit = 300ms;
  const auto begin = clock::now();
  expect_words(why_not_started(options), {"/proc/self/exe", "sent no hello within 300 ms"});
  EXPECT_GE(clock::now() - begin, 300ms);
  options = worker_of("ClosesItsSocket");
  options.exit_limit = 100ms;
  expect_words(why_not_started(options), {"closed its connection", "was killed"});
}

TEST(WorkerStart, AProgramThatSaysSomethingElse) {
  for (const auto* x : {"SaysGarbage", "SaysTooMuch"})
    expect_words(why_not_started(worker_of(x)), {"/proc/self/exe", "does not speak troupe"});
  expect_words(why_not_started(worker_of("SaysHalfAHello")), {"was built otherwise"});
  expect_words(why_not_started(worker_of("SaysHelloOnly")), {"without a life line"});
}

TEST(WorkerStart, AnotherVersion) {
  expect_words(why_not_started(worker_of("HasAnotherVersion")),
               {"/proc/self/exe", "99.1.2", version_string});
}

TEST(WorkerStart, OptionsThatCannotBeRight) {
  const auto refused = [](auto change) {
    auto options = worker_of("Obedient");
    change(options);
    return has_code(worker_process::start(std::move(options)), errc::invalid_argument);
  };
  EXPECT_TRUE(refused([](auto& x) { x.program.clear(); }));
  EXPECT_TRUE(refused([](auto& x) { x.hello_limit = 0ms; }));
  EXPECT_TRUE(refused([](auto& x) { x.beat_period = 0ms; }));
  EXPECT_TRUE(refused([](auto& x) { x.stuck_limit = -1ms; }));
  EXPECT_TRUE(refused([](auto& x) { x.stuck_limit = x.beat_period; }));
  EXPECT_TRUE(refused([](auto& x) { x.exit_limit = -1ms; }));
  EXPECT_TRUE(refused([](auto& x) { x.destroy_limit = -1ms; }));
  EXPECT_TRUE(refused([](auto& x) { x.area_bytes = ~std::size_t{0}; }));
}

// -- attaching without a real parent; the worker's side runs in this process

/// A worker's descriptor and the parent's end of its socket.
struct meeting {
  meeting() {
    auto ends = must(message_socket::pair());
    parent.emplace(std::move(ends.first));
    worker_end = file_descriptor{::fcntl(ends.second.native(), F_DUPFD_CLOEXEC, 0)};
  }

  caf::expected<worker_parent> attach() {
    auto flag = std::string{detail::worker_flag} + std::to_string(worker_end.release());
    std::array<char*, 1> arguments{flag.data()};
    return worker_parent::attach(arguments, {.hello_limit = patience});
  }

  /// Returns the error that the parent receives.
  std::string refusal() {
    std::array<std::byte, 4096> bytes;
    const auto got = must(parent->receive(bytes));
    const auto hello = detail::read_hello(std::span{bytes}.first(got.size_bytes), "the worker");
    return hello ? "" : describe(hello.error());
  }

  std::optional<message_socket> parent;
  file_descriptor worker_end;
};

TEST(WorkerAttach, WithoutAParent) {
  std::string program = "program";
  for (const auto* text :
       {"--troupe-worker=", "--troupe-worker=x", "--troupe-worker=-1", "--troupe-worker=3x",
        "--troupe-worker=1", "--troupe-worker=1000000", "--something-else=3"}) {
    std::string argument = text;
    std::array<char*, 2> arguments{program.data(), argument.data()};
    EXPECT_TRUE(has_code(worker_parent::attach(arguments), errc::invalid_argument)) << text;
    EXPECT_EQ(worker_parent::is_worker(arguments), argument.starts_with(detail::worker_flag));
  }
  EXPECT_GE(::fcntl(STDOUT_FILENO, F_GETFD), 0) << "it was closed";
}

TEST(WorkerAttach, TheParentIsGone) {
  meeting x;
  x.parent.reset();
  const auto result = x.attach();
  EXPECT_TRUE(has_code(result, errc::unavailable));
  expect_words(describe(result.error()), {"parent ended"});
}

TEST(WorkerAttach, TheParentSaysNothing) {
  meeting x;
  auto flag = std::string{detail::worker_flag} + std::to_string(x.worker_end.release());
  std::array<char*, 1> arguments{flag.data()};
  EXPECT_TRUE(
      has_code(worker_parent::attach(arguments, {.hello_limit = 20ms}), errc::deadline_exceeded));
}

TEST(WorkerAttach, TheParentSaysGarbage) {
  const belongings before;
  const auto whole = detail::make_hello();
  auto of_another_kind = whole;
  of_another_kind.magic += 1;
  auto with_another_page = whole;
  with_another_page.page_bytes += 64;
  const std::string long_text(5000, 'x');
  for (const auto& [bytes, sentence] :
       {std::pair{std::as_bytes(std::span{std::string_view{"garbage"}}), "no hello"},
        std::pair{std::as_bytes(std::span{std::string_view{long_text}}), "5000 bytes"},
        std::pair{whole.bytes().first(100), "built otherwise"},
        std::pair{of_another_kind.bytes(), "no hello"},
        std::pair{with_another_page.bytes(), "built otherwise"},
        std::pair{whole.bytes(), "no shared memory"}}) {
    meeting x;
    must(x.parent->send(bytes));
    const auto result = x.attach();
    ASSERT_FALSE(result);
    expect_words(describe(result.error()), {sentence});
    expect_words(x.refusal(), {"the worker refuses", sentence});
  }
  EXPECT_TRUE(has_only(before));
}

TEST(WorkerAttach, TheParentHasAnotherVersion) {
  for (const auto& hello : {hello_of("99.1.2", 1), hello_of(version_string, 99)}) {
    meeting x;
    must(x.parent->send(hello.bytes()));
    const auto result = x.attach();
    EXPECT_TRUE(has_code(result, errc::unavailable));
    expect_words(describe(result.error()), {"the parent has version", "99", version_string});
    expect_words(x.refusal(), {"the worker refuses", "99"});
  }
}

TEST(WorkerAttach, TheSharedMemoryIsNotAsItWasSaid) {
  const belongings before;
  {
    auto memory = must(detail::shared_memory::create(4096));
    auto hello = detail::make_hello();
    hello.beat_period_ns = 5'000'000;
    const int passed = memory.descriptor();
    for (const auto& [area, sentence] : {std::pair{std::uint64_t{4096}, "4096 bytes instead"},
                                         std::pair{~std::uint64_t{0}, "malformed"},
                                         std::pair{std::uint64_t{0}, "does not hold"}}) {
      meeting x;
      hello.area_bytes = area;
      must(x.parent->send(hello.bytes(), {&passed, 1}));
      const auto result = x.attach();
      ASSERT_FALSE(result);
      expect_words(describe(result.error()), {sentence});
      expect_words(x.refusal(), {"the worker refuses", sentence});
    }
  }
  EXPECT_TRUE(has_only(before));
}

} // namespace
} // namespace troupe::testing
