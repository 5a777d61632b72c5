#include "support/child_process.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

namespace troupe::testing {

namespace {

using clock = std::chrono::steady_clock;

constexpr std::string_view child_flag = "--troupe-child=";
constexpr int report_fd = 3;

std::span<char* const> given_arguments;

std::map<std::string, child_scenario, std::less<>>& scenarios() {
  static std::map<std::string, child_scenario, std::less<>> all;
  return all;
}

[[noreturn]] void fail(const char* call, int code) {
  throw std::runtime_error(std::string{call} + ": " + std::generic_category().message(code));
}

class pipe_end {
public:
  explicit pipe_end(int fd = -1) noexcept : fd_(fd) {}
  ~pipe_end() { close(); }
  pipe_end(const pipe_end&) = delete;
  pipe_end& operator=(const pipe_end&) = delete;
  pipe_end(pipe_end&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

  int get() const noexcept { return fd_; }
  bool is_open() const noexcept { return fd_ >= 0; }
  void close() noexcept {
    if (fd_ >= 0 && ::close(std::exchange(fd_, -1)) != 0)
      std::perror("close");
  }

private:
  int fd_;
};

struct channel {
  pipe_end read;
  pipe_end write;
};

channel make_channel() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0)
    fail("pipe2", errno);
  return {pipe_end{ends[0]}, pipe_end{ends[1]}};
}

class spawn_actions {
public:
  spawn_actions() {
    if (const int code = ::posix_spawn_file_actions_init(&native_); code != 0)
      fail("posix_spawn_file_actions_init", code);
  }
  spawn_actions(const pipe_end& out, const pipe_end& err, const pipe_end& report)
      : spawn_actions() {
    put(out, STDOUT_FILENO);
    put(err, STDERR_FILENO);
    put(report, report_fd); // last: report_fd may be the number of one of the others
  }
  ~spawn_actions() { ::posix_spawn_file_actions_destroy(&native_); }
  spawn_actions(const spawn_actions&) = delete;
  spawn_actions& operator=(const spawn_actions&) = delete;

  void put(const pipe_end& from, int to) {
    if (const int code = ::posix_spawn_file_actions_adddup2(&native_, from.get(), to); code != 0)
      fail("posix_spawn_file_actions_adddup2", code);
  }
  const posix_spawn_file_actions_t* get() const noexcept { return &native_; }

private:
  posix_spawn_file_actions_t native_{};
};

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (auto& x : texts)
    result.push_back(x.data());
  result.push_back(nullptr);
  return result;
}

std::string name_of(std::string_view variable) {
  return std::string{variable.substr(0, variable.find('='))};
}

std::vector<std::string> environment_with(const std::vector<std::string>& more) {
  std::vector<std::string> result = more;
  for (char** x = environ; *x != nullptr; ++x)
    if (std::none_of(more.begin(), more.end(),
                     [&](const auto& y) { return name_of(y) == name_of(*x); }))
      result.emplace_back(*x);
  return result;
}

/// A child process until wait() returns. Its process id is not reused before.
class process {
public:
  process(const std::string& scenario, const std::vector<std::string>& environment,
          const spawn_actions& actions) {
    std::vector<std::string> arguments{"/proc/self/exe", child_argument(scenario)};
    auto variables = environment_with(environment);
    const int code = ::posix_spawn(&id_, "/proc/self/exe", actions.get(), nullptr,
                                   pointers_to(arguments).data(), pointers_to(variables).data());
    if (code != 0)
      fail("posix_spawn", code);
    watch_ = std::thread{[this] { watch(); }};
  }

  ~process() {
    if (!watch_.joinable())
      return;
    kill();
    wait();
  }
  process(const process&) = delete;
  process& operator=(const process&) = delete;

  void kill() noexcept {
    if (::kill(id_, SIGKILL) != 0)
      std::perror("kill");
  }

  void stop() {
    siginfo_t info{};
    if (::kill(id_, SIGSTOP) != 0)
      fail("kill", errno);
    while (::waitid(P_PID, static_cast<id_t>(id_), &info, WSTOPPED) != 0)
      if (errno != EINTR)
        fail("waitid", errno);
  }

  void go_on() {
    if (::kill(id_, SIGCONT) != 0)
      fail("kill", errno);
  }

  void wait() noexcept {
    watch_.join();
    if (::waitpid(id_, &status_, 0) != id_)
      std::perror("waitpid");
  }

  int status() const noexcept { return status_; }
  clock::time_point over() const noexcept { return over_; }

private:
  void watch() noexcept {
    siginfo_t info{};
    int code = 0;
    do
      code = ::waitid(P_PID, static_cast<id_t>(id_), &info, WEXITED | WNOWAIT);
    while (code != 0 && errno == EINTR);
    if (code != 0)
      std::perror("waitid");
    over_ = clock::now();
  }

  pid_t id_ = -1;
  int status_ = 0;
  clock::time_point over_;
  std::thread watch_;
};

struct stream_of_text {
  pipe_end from;
  std::string text;

  /// Reads what is available; closes the descriptor at the end of the stream.
  void take() {
    std::array<char, 65536> buffer{};
    const auto size = ::read(from.get(), buffer.data(), buffer.size());
    if (size > 0)
      text.append(buffer.data(), static_cast<std::size_t>(size));
    else if (size == 0)
      from.close();
    else if (errno != EINTR)
      fail("read", errno);
  }
};

/// Reads all streams until all have ended or `enough` is true. Returns false at `until`.
bool read_all(std::vector<stream_of_text*> streams, clock::time_point until,
              const std::function<bool()>& enough) {
  while (!enough()) {
    std::erase_if(streams, [](const auto* x) { return !x->from.is_open(); });
    if (streams.empty())
      return true;
    const auto left = until - clock::now();
    if (left <= clock::duration::zero())
      return false;
    std::vector<pollfd> wanted;
    for (auto* x : streams)
      wanted.push_back({x->from.get(), POLLIN, 0});
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    if (::poll(wanted.data(), wanted.size(), static_cast<int>(wait)) < 0 && errno != EINTR)
      fail("poll", errno);
    for (std::size_t i = 0; i < streams.size(); ++i)
      if (wanted[i].revents != 0)
        streams[i]->take();
  }
  return true;
}

std::vector<std::pair<std::string, std::string>> parsed(const std::string& text) {
  std::vector<std::pair<std::string, std::string>> result;
  std::istringstream lines{text};
  for (std::string line; std::getline(lines, line);) {
    const auto blank = std::min(line.find(' '), line.size());
    result.emplace_back(line.substr(0, blank),
                        blank == line.size() ? std::string{} : line.substr(blank + 1));
  }
  return result;
}

} // namespace

bool register_child(const char* name, child_scenario run) {
  if (!scenarios().emplace(name, run).second) {
    std::fprintf(stderr, "two children have the name %s\n", name);
    std::abort();
  }
  return true;
}

std::string child_argument(const std::string& scenario) {
  return std::string{child_flag} + scenario;
}

std::span<char* const> main_arguments() { return given_arguments; }

std::optional<int> run_as_child(int argc, char** argv) {
  if (argc < 2 || !std::string_view{argv[1]}.starts_with(child_flag))
    return std::nullopt;
  const auto found = scenarios().find(std::string_view{argv[1]}.substr(child_flag.size()));
  if (found == scenarios().end()) {
    std::fprintf(stderr, "there is no such child: %s\n", argv[1]);
    return 125;
  }
  given_arguments = {argv, static_cast<std::size_t>(argc)};
  try {
    const int status = found->second();
    return ::testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed() ? 123 : status;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "the child threw: %s\n", e.what());
    return 124;
  }
}

void tell(std::string_view key, std::string_view value) {
  std::string line{key};
  line.append(" ").append(value).append("\n");
  for (std::string_view rest = line; !rest.empty();) {
    const auto written = ::write(report_fd, rest.data(), rest.size());
    if (written < 0 && errno != EINTR)
      fail("write", errno);
    if (written > 0)
      rest.remove_prefix(static_cast<std::size_t>(written));
  }
}

void tell_time(std::string_view key) {
  tell(key, std::to_string(clock::now().time_since_epoch().count()));
}

bool child_end::was_told(std::string_view key) const {
  return std::any_of(told.begin(), told.end(), [&](const auto& x) { return x.first == key; });
}

std::vector<std::string> child_end::values(std::string_view key) const {
  std::vector<std::string> result;
  for (auto& x : told)
    if (x.first == key)
      result.push_back(x.second);
  if (result.empty())
    throw std::runtime_error(std::string{key} + " was not told: " + to_string(*this));
  return result;
}

std::string child_end::value(std::string_view key) const { return values(key).back(); }

clock::time_point child_end::time(std::string_view key) const {
  return clock::time_point{clock::duration{std::stoll(value(key))}};
}

std::string to_string(const child_end& x) {
  std::ostringstream text;
  if (!x.in_time)
    text << "killed, as its time was over";
  else if (x.signal != 0)
    text << "ended by signal " << x.signal;
  else
    text << "ended with " << x.status;
  const std::chrono::duration<double> lived = x.over - x.begun;
  text << " after " << lived.count() << " s; it told";
  for (auto& [key, value] : x.told)
    text << "\n  " << key << ' ' << value;
  text << "\nstdout: " << x.out << "\nstderr: " << x.err;
  return text.str();
}

struct running_child::state {
  state(const std::string& scenario, const std::vector<std::string>& environment)
      : state(scenario, environment, make_channel(), make_channel(), make_channel()) {}

  state(const std::string& scenario, const std::vector<std::string>& environment, channel to_out,
        channel to_err, channel to_report)
      : begun(clock::now()),
        child(scenario, environment, {to_out.write, to_err.write, to_report.write}),
        out{std::move(to_out.read), {}}, err{std::move(to_err.read), {}},
        report{std::move(to_report.read), {}} {}

  bool read_until(clock::time_point until, const std::function<bool()>& enough) {
    return read_all({&out, &err, &report}, until, enough);
  }

  clock::time_point begun;
  process child;
  stream_of_text out;
  stream_of_text err;
  stream_of_text report;
};

running_child::running_child(const std::string& scenario,
                             const std::vector<std::string>& environment)
    : state_(std::make_unique<state>(scenario, environment)) {}

running_child::~running_child() = default;

bool running_child::wait_told(std::string_view key, std::chrono::nanoseconds limit) {
  const auto was_told = [&] {
    const auto told = parsed(state_->report.text);
    return std::any_of(told.begin(), told.end(), [&](const auto& x) { return x.first == key; });
  };
  return state_->read_until(clock::now() + limit, was_told) && was_told();
}

std::string running_child::told(std::string_view key) const {
  child_end so_far;
  so_far.told = parsed(state_->report.text);
  return so_far.value(key);
}

void running_child::stop() { state_->child.stop(); }

void running_child::go_on() { state_->child.go_on(); }

void running_child::kill() { state_->child.kill(); }

child_end running_child::wait(std::chrono::nanoseconds limit) {
  auto& x = *state_;
  child_end result;
  result.begun = x.begun;
  result.in_time = x.read_until(clock::now() + limit, [] { return false; });
  if (!result.in_time)
    x.child.kill();
  x.child.wait();
  result.over = x.child.over();
  if (WIFEXITED(x.child.status()))
    result.status = WEXITSTATUS(x.child.status());
  else if (WIFSIGNALED(x.child.status()))
    result.signal = WTERMSIG(x.child.status());
  result.out = std::move(x.out.text);
  result.err = std::move(x.err.text);
  result.told = parsed(x.report.text);
  return result;
}

std::string open_streams() {
  std::string result;
  for (const int x : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(x, F_GETFD) < 0)
      continue;
    std::array<char, 16> file{};
    const auto link = "/proc/self/fd/" + std::to_string(x);
    if (::readlink(link.c_str(), file.data(), file.size() - 1) < 0 ||
        std::string_view{file.data()} != "/dev/null")
      result += std::to_string(x) + " ";
  }
  return result;
}

child_end run_child(const std::string& scenario, std::chrono::nanoseconds limit,
                    const std::vector<std::string>& environment) {
  return running_child{scenario, environment}.wait(limit);
}

} // namespace troupe::testing
