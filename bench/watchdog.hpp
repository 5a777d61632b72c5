/// Ends a benchmark that hangs.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace bench {

/// Ends the process with exit status 3 when `limit` is over, and names the current step.
class watchdog {
public:
  explicit watchdog(std::chrono::seconds limit);
  ~watchdog();
  watchdog(const watchdog&) = delete;
  watchdog& operator=(const watchdog&) = delete;

  /// Sets the name of the step that begins.
  void enter(std::string step);

private:
  using clock = std::chrono::steady_clock;

  void watch();

  const std::chrono::seconds limit_;
  const clock::time_point end_;
  std::mutex mutex_;
  std::condition_variable condition_;
  bool over_ = false;
  std::string step_ = "start";
  clock::time_point since_ = clock::now();
  std::thread thread_;
};

} // namespace bench
