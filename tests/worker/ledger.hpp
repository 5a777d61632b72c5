/// Workers that write down where they are started, and may be told to say nothing more.
#pragma once

#include <troupe/worker.hpp>

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include <sys/types.h>

namespace troupe::testing {

/// A folder in which workers write down their processes.
class ledger {
public:
  ledger();
  ~ledger();
  ledger(const ledger&) = delete;
  ledger& operator=(const ledger&) = delete;

  std::string folder() const { return folder_.string(); }
  /// Workers that note down where they are started: this binary, in `scenario`.
  worker_backend_options options(int devices, const std::string& scenario = "NotedWorker") const;

  /// The processes in the order of their start, at least `n`.
  std::vector<pid_t> wait(std::size_t n) const;
  /// From now on workers say hello, and nothing more; until `speak`.
  void hush() const;
  void speak() const;

private:
  std::filesystem::path folder_;
};

/// The same workers, where only the folder is known.
worker_settings noted_workers(const std::string& folder, const std::string& scenario);

/// Does nothing more.
[[noreturn]] void stay();

} // namespace troupe::testing
