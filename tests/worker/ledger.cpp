#include "worker/ledger.hpp"

#include "support/child_process.hpp"
#include "support/eventually.hpp"
#include "support/expect.hpp"
#include "worker/protocol/worker_parent.hpp"

#include <csignal>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include <unistd.h>

namespace troupe::testing {

namespace {

void note_down(const std::filesystem::path& folder) {
  std::ofstream{folder / "all", std::ios::app} << ::getpid() << std::endl;
}

TROUPE_CHILD(NotedWorker) {
  const auto arguments = main_arguments();
  const std::filesystem::path folder{arguments[2]};
  if (std::filesystem::exists(folder / "hush")) {
    auto parent = must(detail::worker_parent::attach(arguments));
    note_down(folder);
    stay();
  }
  note_down(folder);
  if (std::filesystem::exists(folder / "halt") && std::raise(SIGSTOP) != 0)
    return 1;
  return worker_main(static_cast<int>(arguments.size()), const_cast<char**>(arguments.data()))
      .value();
}

} // namespace

ledger::ledger() {
  std::string name = (std::filesystem::temp_directory_path() / "troupe-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr)
    throw std::runtime_error("mkdtemp");
  folder_ = name;
}

ledger::~ledger() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

worker_backend_options ledger::options(int devices, const std::string& scenario) const {
  worker_backend_options result;
  result.backend = "host";
  result.host.devices = devices;
  result.workers = noted_workers(folder(), scenario);
  return result;
}

std::vector<pid_t> ledger::wait(std::size_t n) const {
  std::vector<pid_t> result;
  auto all = eventually([&] {
    result.clear();
    std::ifstream in{folder_ / "all"};
    for (pid_t id = 0; in >> id;)
      result.push_back(id);
    return result.size() >= n;
  });
  if (!all)
    throw std::runtime_error("a worker was not started");
  return result;
}

void ledger::hush() const { std::ofstream{folder_ / "hush"} << "now"; }
void ledger::speak() const { std::filesystem::remove(folder_ / "hush"); }
void ledger::halt() const { std::ofstream{folder_ / "halt"} << "now"; }

worker_settings noted_workers(const std::string& folder, const std::string& scenario) {
  worker_settings result;
  result.program = "/proc/self/exe";
  result.arguments = {child_argument(scenario), folder};
  return result;
}

void stay() {
  while (true)
    ::pause();
}

} // namespace troupe::testing
