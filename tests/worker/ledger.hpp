/// Workers that record their process ids. A test may make them hang after their hello, or stop
/// before.
#pragma once

#include <troupe/worker.hpp>

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include <sys/types.h>

namespace troupe::testing {

/// A folder in which workers record their process ids.
class ledger {
public:
  ledger();
  ~ledger();
  ledger(const ledger&) = delete;
  ledger& operator=(const ledger&) = delete;

  std::string folder() const { return folder_.string(); }
  /// Returns options for workers that record their start: this binary, running `scenario`.
  worker_backend_options options(int devices, const std::string& scenario = "NotedWorker") const;

  /// Returns the process ids in the order of their start. Blocks until there are at least `n`.
  std::vector<pid_t> wait(std::size_t n) const;
  /// From now on workers hang after their hello, until `speak`.
  void hush() const;
  void speak() const;
  /// From now on workers stop before they attach to their parent.
  void halt() const;

private:
  std::filesystem::path folder_;
};

/// Returns settings for the same workers, for code that knows only the folder.
worker_settings noted_workers(const std::string& folder, const std::string& scenario);

/// Blocks for ever.
[[noreturn]] void stay();

} // namespace troupe::testing
