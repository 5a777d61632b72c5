/// Scenarios that end their process, or may never end: each runs in a child process, which executes
/// the test binary anew, so that what it does to CUDA or to itself stays there.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace troupe::testing {

/// What a child runs; the result is what its main returns, unless an expectation failed or it
/// threw.
using child_scenario = int (*)();

/// Before main. @return true
bool register_child(const char* name, child_scenario run);

/// For the main function: in a child, runs the scenario that it was started for.
std::optional<int> run_as_child(int argc, char** argv);

/// The first argument of a test binary that runs this scenario, however it is started.
std::string child_argument(const std::string& scenario);

/// In a child: what its main function got.
std::span<char* const> main_arguments();

/// In a child: tells the parent. `key` has no blank, neither has a line break.
void tell(std::string_view key, std::string_view value = {});
/// The time now, which is the same in all processes.
void tell_time(std::string_view key);

/// What became of a child.
struct child_end {
  bool in_time = false; ///< false: it was killed
  int status = -1;      ///< -1: a signal ended it
  int signal = 0;
  std::string out;
  std::string err;
  std::vector<std::pair<std::string, std::string>> told; ///< in order
  std::chrono::steady_clock::time_point begun;
  std::chrono::steady_clock::time_point over; ///< when the process was no more

  bool was_told(std::string_view key) const;
  /// @throws std::runtime_error where it was not told, with all that is known of the child; so do
  ///         those below
  std::string value(std::string_view key) const;
  std::vector<std::string> values(std::string_view key) const;
  std::chrono::steady_clock::time_point time(std::string_view key) const;
  /// From the time that was told to the end.
  std::chrono::nanoseconds since(std::string_view key) const { return over - time(key); }
};

/// For messages of tests: all that is known.
std::string to_string(const child_end& x);

/// A child that runs beside the test. It is killed if nobody waits for it.
class running_child {
public:
  /// Starts a scenario. `environment`: more of it, as "NAME=value".
  /// @throws std::runtime_error where there is no such child, or the system refuses one; so do
  /// those
  ///         below where it refuses
  explicit running_child(const std::string& scenario,
                         const std::vector<std::string>& environment = {});
  ~running_child();
  running_child(const running_child&) = delete;
  running_child& operator=(const running_child&) = delete;

  /// Blocks until it has told `key`. False: it has not after `limit`, or is over.
  bool wait_told(std::string_view key, std::chrono::nanoseconds limit);
  /// What it told last with `key`.
  /// @throws std::runtime_error where nothing has come
  std::string told(std::string_view key) const;
  /// SIGSTOP; blocks until it is stopped.
  void stop();
  /// SIGCONT
  void go_on();
  /// SIGKILL
  void kill();
  /// Blocks until it is over; after `limit` it is killed.
  child_end wait(std::chrono::nanoseconds limit);

private:
  struct state;
  std::unique_ptr<state> state_;
};

/// Returns the numbers of this process's standard streams that lead anywhere, each with a blank:
/// they are open, and not /dev/null.
std::string open_streams();

/// Runs a scenario, for at most `limit`. `environment`: more of it, as "NAME=value".
/// @throws as `running_child`
child_end run_child(const std::string& scenario, std::chrono::nanoseconds limit,
                    const std::vector<std::string>& environment = {});

} // namespace troupe::testing

/// Defines a scenario: TROUPE_CHILD(name) { ...; return 0; }
#define TROUPE_CHILD(name)                                                                         \
  static int name();                                                                               \
  [[maybe_unused]] static const bool name##_is_registered =                                        \
      ::troupe::testing::register_child(#name, name);                                              \
  static int name()
