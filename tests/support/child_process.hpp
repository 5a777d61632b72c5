/// Child processes for scenarios that end their process or may never end. A child executes the test
/// binary anew, so its effects on CUDA and on the process stay in the child.
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

/// The scenario that a child runs. Its result is the exit status of the child, unless an
/// expectation failed or it threw.
using child_scenario = int (*)();

/// Registers a scenario. Called before main. @return true
bool register_child(const char* name, child_scenario run);

/// For the main function: runs the scenario if this process was started as a child.
std::optional<int> run_as_child(int argc, char** argv);

/// Returns the first argument with which a test binary runs this scenario.
std::string child_argument(const std::string& scenario);

/// In a child: returns the arguments of its main function.
std::span<char* const> main_arguments();

/// In a child: sends a pair to the parent. `key` has no blank, and neither has a line break.
void tell(std::string_view key, std::string_view value = {});
/// Sends the current time. All processes use the same clock.
void tell_time(std::string_view key);

/// The state in which a child ended.
struct child_end {
  bool in_time = false; ///< false: it exceeded its limit and was killed
  int status = -1;      ///< -1: a signal ended it
  int signal = 0;
  std::string out;
  std::string err;
  std::vector<std::pair<std::string, std::string>> told; ///< pairs that the child sent, in order
  std::chrono::steady_clock::time_point begun;
  std::chrono::steady_clock::time_point over; ///< time at which the process had ended

  bool was_told(std::string_view key) const;
  /// @throws std::runtime_error if the child did not send `key`, with all that is known of the
  ///         child; so do the functions below
  std::string value(std::string_view key) const;
  std::vector<std::string> values(std::string_view key) const;
  std::chrono::steady_clock::time_point time(std::string_view key) const;
  /// Returns the time from the one sent with `key` to the end.
  std::chrono::nanoseconds since(std::string_view key) const { return over - time(key); }
};

/// Returns all that is known of the child, for failure messages.
std::string to_string(const child_end& x);

/// A child that runs beside the test. The destructor kills it unless wait() was called.
class running_child {
public:
  /// Starts a scenario. `environment` adds variables, as "NAME=value".
  /// @throws std::runtime_error if the scenario is not registered or a system call fails; the
  ///         functions below throw if a system call fails
  explicit running_child(const std::string& scenario,
                         const std::vector<std::string>& environment = {});
  ~running_child();
  running_child(const running_child&) = delete;
  running_child& operator=(const running_child&) = delete;

  /// Blocks until the child has sent `key`. Returns false if it has not after `limit` or has ended.
  bool wait_told(std::string_view key, std::chrono::nanoseconds limit);
  /// Returns the latest value that the child sent with `key`.
  /// @throws std::runtime_error if the child has sent none
  std::string told(std::string_view key) const;
  /// Sends SIGSTOP and blocks until the child is stopped.
  void stop();
  void go_on();
  void kill();
  /// Blocks until the child has ended. After `limit` it kills the child.
  child_end wait(std::chrono::nanoseconds limit);

private:
  struct state;
  std::unique_ptr<state> state_;
};

/// Returns the numbers of this process's standard streams that are open and do not lead to
/// /dev/null, each followed by a blank.
std::string open_streams();

/// Runs a scenario for at most `limit`. `environment` adds variables, as "NAME=value".
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
