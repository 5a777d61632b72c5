/// A program whose devices live on several hosts. This process is the parent. The agents are child
/// processes that run this binary.
#pragma once

#include "remote/certificates.hpp"
#include "support/child_process.hpp"
#include "support/eventually.hpp"
#include "support/world_fixture.hpp"
#include "worker/ledger.hpp"
#include <troupe/worker.hpp>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>
#include <unistd.h>

namespace troupe::testing {

inline std::vector<std::string> agent_environment(const std::string& name, const host_identity& who,
                                                  const std::string& parent, int devices) {
  return {"TROUPE_AGENT_NAME=" + name,
          "TROUPE_AGENT_PARENT=" + parent,
          "TROUPE_AGENT_CERT=" + who.certificate,
          "TROUPE_AGENT_KEY=" + who.key,
          "TROUPE_AGENT_AUTHORITY=" + who.authority,
          "TROUPE_AGENT_DEVICES=" + std::to_string(devices)};
}

/// Runs the agent in such a child. Returns only after an error. Records its workers if the
/// environment names a ledger.
inline int run_agent_of_environment() {
  auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string{value != nullptr ? value : ""};
  };
  tell("process", std::to_string(::getpid()));
  host_agent_options what;
  what.parent = variable("TROUPE_AGENT_PARENT");
  what.identity = {variable("TROUPE_AGENT_CERT"), variable("TROUPE_AGENT_KEY"),
                   variable("TROUPE_AGENT_AUTHORITY")};
  what.name = variable("TROUPE_AGENT_NAME");
  what.parent_name = variable("TROUPE_AGENT_PARENT_NAME");
  what.devices = std::stoi(variable("TROUPE_AGENT_DEVICES"));
  if (const auto pause = variable("TROUPE_AGENT_RETRY_MS"); !pause.empty())
    what.retry_pause = std::chrono::milliseconds{std::stoi(pause)};
  if (const auto folder = variable("TROUPE_AGENT_LEDGER"); !folder.empty())
    what.workers = noted_workers(folder, "NotedWorker");
  tell("ended", describe(run_host_agent(what)));
  return 1;
}

struct fleet_options {
  int local = 2; ///< devices of the parent; 0: none
  std::vector<std::string> names = {"alpha"};
  int devices = 2;              ///< of each host
  std::string backend = "host"; ///< or "cuda": host i of `names` has GPU i
  std::chrono::nanoseconds link_limit = std::chrono::seconds{5};
  std::chrono::nanoseconds rejoin_limit = std::chrono::seconds{10};
  std::chrono::milliseconds retry_pause{100}; ///< of the agents
  const ledger* book = nullptr;               ///< records the hosts' workers
  /// Returns the port to which agents connect, for the port on which the parent listens.
  std::function<std::uint16_t(std::uint16_t)> way = [](std::uint16_t port) { return port; };
};

/// Agents on 127.0.0.1.
class test_fleet {
public:
  explicit test_fleet(fleet_options options = {}) : options_(std::move(options)) {}

  /// For `system_options::wrap`: returns after the hosts have joined.
  std::shared_ptr<backend> open() {
    worker_backend_options how;
    how.backend = options_.backend;
    how.host.devices = std::max(options_.local, 1);
    how.hosts = hosts();
    how.hosts.on_listening = [this](std::uint16_t port) {
      listens_at_ = port;
      if (std::exchange(port_, options_.way(port)) != 0)
        return; // the agents know the port
      for (auto& name : options_.names)
        start_agent(name);
    };
    return must(make_worker_backend(std::move(how)));
  }
  system_options system() {
    return {.devices = options_.local + options_.devices * static_cast<int>(options_.names.size()),
            .wrap = [this](std::shared_ptr<backend>) { return open(); }};
  }
  remote_hosts hosts() {
    remote_hosts result;
    result.listen_address = "127.0.0.1";
    result.identity = authority_.issue("parent");
    result.names = options_.names;
    result.with_local = options_.local > 0;
    result.link_limit = options_.link_limit;
    result.rejoin_limit = options_.rejoin_limit;
    result.port = port_; // 0, unless this parent follows another one
    return result;
  }

  void start_agent(const std::string& name) { start_agent(name, authority_.issue(name)); }
  void start_agent(const std::string& name, const host_identity& who) {
    auto environment =
        agent_environment(name, who, "127.0.0.1:" + std::to_string(port_), options_.devices);
    if (options_.backend == "cuda") {
      const auto i = std::find(options_.names.begin(), options_.names.end(), name);
      environment.push_back("CUDA_VISIBLE_DEVICES=" + std::to_string(i - options_.names.begin()));
    }
    environment.push_back("TROUPE_AGENT_RETRY_MS=" + std::to_string(options_.retry_pause.count()));
    if (options_.book != nullptr)
      environment.push_back("TROUPE_AGENT_LEDGER=" + options_.book->folder());
    agents_[name] = std::make_unique<running_child>("host_agent_child", environment);
  }
  running_child& agent(const std::string& name) { return *agents_.at(name); }
  /// Returns the port to which agents connect.
  std::uint16_t port() const noexcept { return port_; }
  std::uint16_t listens_at() const noexcept { return listens_at_; }
  /// Called before `open`: the agents know this port.
  void use_port(std::uint16_t x) { port_ = x; }
  test_authority& authority() noexcept { return authority_; }

private:
  fleet_options options_;
  test_authority authority_{"fleet"};
  std::uint16_t port_ = 0;
  std::uint16_t listens_at_ = 0;
  std::map<std::string, std::unique_ptr<running_child>> agents_;
};

/// Returns the process id of a device's worker.
inline pid_t worker_of(test_system& system, int ordinal) {
  auto d = must(device::open(system, ordinal));
  auto ref = must(d.allocate<std::int32_t>(1));
  must(answer_of(d.launch("tell the process", {}, {}, {ref})));
  return must(d.download(ref)).at(0);
}

/// Returns the state of a process as /proc names it, such as 'T' if it is stopped; 0: there is
/// none.
inline char state_of(pid_t process) {
  std::ifstream from{"/proc/" + std::to_string(process) + "/stat"};
  std::string text;
  std::getline(from, text);
  const auto end = text.rfind(") ");
  return end == std::string::npos ? '\0' : text[end + 2];
}

/// Returns true if the process has ended. A zombie has ended.
inline bool is_gone(pid_t process) {
  const auto state = state_of(process);
  return state == '\0' || state == 'Z';
}

/// For EXPECT_TRUE: the process ends within `limit`.
inline ::testing::AssertionResult goes(pid_t process, std::chrono::nanoseconds limit) {
  auto went = eventually([&] { return is_gone(process); }, limit);
  return went ? went : went << ": process " << process << " is still there";
}

/// A host's connection to the parent that was cut and mended.
struct rejoined {
  std::uint64_t generation = 0; ///< of its device
  std::chrono::nanoseconds lost_after{};
  std::chrono::nanoseconds back_after{};
};

/// Expects that both sides notice the cut within the fleet's `limit`, and that the host comes back.
/// @param feed of its device `ordinal`, which has `generation`
template <class Cut, class Mend>
rejoined lose_and_rejoin(test_system& system, int ordinal, device_feed& feed,
                         std::uint64_t generation, std::chrono::nanoseconds limit, Cut cut,
                         Mend mend) {
  rejoined result;
  const auto worker = worker_of(system, ordinal);
  const stopwatch watch;
  cut();
  const auto gone = feed.until([&](const device_changed& x) {
    return x.phase != device_phase::ready || x.generation > generation;
  });
  EXPECT_NE(gone.phase, device_phase::ready);
  EXPECT_LT(watch.elapsed(), limit + at_once);
  EXPECT_TRUE(goes(worker, limit + at_once)); // the agent decides alone
  EXPECT_GE(watch.elapsed(), limit / 2);      // and did not give up too early
  result.lost_after = watch.elapsed();
  mend();
  result.generation = feed.until(device_phase::ready, generation + 1).generation;
  result.back_after = watch.elapsed();
  return result;
}

} // namespace troupe::testing
