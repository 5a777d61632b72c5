// Workers of unusual programs: without a call of `worker_main`, without their file, or without
// standard streams.

#include "support/child_process.hpp"
#include "support/eventually.hpp"
#include "support/worker_losses.hpp"
#include <troupe/troupe.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <link.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace troupe::testing {
namespace {

/// A folder that its owner deletes.
class folder {
public:
  folder() : path_(std::filesystem::temp_directory_path() / "troupe-start-XXXXXX") {
    auto text = path_.string();
    if (::mkdtemp(text.data()) == nullptr)
      throw std::system_error(errno, std::generic_category(), "mkdtemp");
    path_ = text;
  }
  ~folder() {
    std::error_code code;
    std::filesystem::remove_all(path_, code);
  }
  folder(const folder&) = delete;
  folder& operator=(const folder&) = delete;

  std::string in(const char* name) const { return path_ / name; }

private:
  std::filesystem::path path_;
};

std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> result;
  std::ifstream in{path};
  for (std::string line; std::getline(in, line);)
    result.push_back(line);
  return result;
}

bool has(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

worker_backend_options with_workers(const char* scenario, const std::string& argument) {
  return {.backend = "host",
          .host = {.devices = 1},
          .workers = {.program = "/proc/self/exe",
                      .arguments = {child_argument(scenario), argument},
                      .start_limit = patience}};
}

// -- worker_main

void note(const std::string& text) {
  std::ofstream{main_arguments()[2], std::ios::app} << text << '\n';
}

[[noreturn]] void stay() {
  while (true)
    ::pause();
}

// If the start is not refused, each process starts the next one.

TROUPE_CHILD(ForgetsWorkerMain) {
  note("a process");
  auto workers = make_worker_backend(with_workers("ForgetsWorkerMain", main_arguments()[2]));
  note(workers ? "not refused" : describe(workers.error()));
  stay();
}

TROUPE_CHILD(ForgetsWorkerMainAndComputesItself) {
  note("a process");
  config settings;
  if (auto error = settings.parse(std::vector<std::string>{"--troupe.backend=host"}))
    return 1;
  caf::actor_system system{settings};
  auto devices = list_devices(system);
  note(devices ? "not refused" : describe(devices.error()));
  stay();
}

TEST(WorkerMain, AProgramThatForgetsItIsRefusedAtOnce) {
  for (const auto* scenario : {"ForgetsWorkerMain", "ForgetsWorkerMainAndComputesItself"}) {
    const folder place;
    const auto log = place.in("log");
    stopwatch watch;
    const auto workers = make_worker_backend(with_workers(scenario, log));
    EXPECT_LT(watch.elapsed(), patience / 2) << "it was told at once, though its worker lives on";
    ASSERT_TRUE(has_code(workers, errc::unavailable)) << scenario;
    const auto why = describe(workers.error());
    EXPECT_TRUE(has(why, "refuses") && has(why, "troupe::worker_main(argc, argv)")) << why;
    const auto lines = lines_of(log);
    ASSERT_GE(lines.size(), 1u) << scenario;
    EXPECT_EQ(std::count(lines.begin(), lines.end(), "a process"), 1) << scenario;
  }
}

TROUPE_CHILD(IgnoresWhatWorkerMainReturns) {
  note("a process");
  auto arguments = main_arguments();
  static_cast<void>(
      worker_main(static_cast<int>(arguments.size()), const_cast<char**>(arguments.data())));
  auto workers =
      make_worker_backend(with_workers("IgnoresWhatWorkerMainReturns", main_arguments()[2]));
  note(workers ? "not refused" : describe(workers.error()));
  return 0;
}

TEST(WorkerMain, AProgramThatIgnoresItsResultIsRefused) {
  const folder place;
  const auto log = place.in("log");
  {
    auto workers = must(make_worker_backend(with_workers("IgnoresWhatWorkerMainReturns", log)));
    must(workers->open(0)); // the device closes again, and its worker ends normally
  }
  std::vector<std::string> lines;
  ASSERT_TRUE(eventually([&] { return (lines = lines_of(log)).size() >= 2; }));
  EXPECT_EQ(lines[0], "a process");
  EXPECT_TRUE(has(lines[1], "was a worker")) << lines[1];
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "a process"), 1);
}

// -- the program's file

/// Arguments: the fate of the file, and the log.
TROUPE_CHILD(LosesItsFile) {
  const std::string how = main_arguments()[2];
  std::ofstream log{main_arguments()[3]};
  const auto strike = [&] {
    const auto file = std::filesystem::read_symlink("/proc/self/exe");
    std::filesystem::remove(file);
    if (how == "replaced")
      std::filesystem::copy_file("/bin/true", file);
  };
  if (how == "removed first")
    strike();
  {
    test_system system{in_worker_processes(2)};
    auto w = system.open_world();
    if (how != "kept" && how != "removed first")
      strike();
    static_cast<void>(is_lost_alone(system, w, w.size() - 1, 0)); // it checks the error
  }
  log << "lived on" << std::endl;
  return ::testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed() ? 2 : 0;
}

/// Quotes a text for a shell.
std::string quoted(const std::string& text) { return "'" + text + "'"; }

/// Runs a copy of this program and expects that it survives.
void expect_to_live_on(const std::string& loader, const std::string& how) {
  const folder place;
  const auto program = place.in("program");
  std::error_code code;
  const auto self = std::filesystem::read_symlink("/proc/self/exe");
  std::filesystem::create_hard_link(self, program, code);
  if (code)
    std::filesystem::copy_file(self, program);
  const auto log = place.in("log");
  auto line = quoted(program) + " " + child_argument("LosesItsFile") + " " + quoted(how) + " " +
              quoted(log);
  if (!loader.empty())
    line = quoted(loader) + " " + line;
  const int status = std::system(line.c_str()); // NOLINT(cert-env33-c,concurrency-mt-unsafe)
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status << " of " << line;
  EXPECT_EQ(lines_of(log), std::vector<std::string>{"lived on"}) << line;
}

TEST(WorkerProgram, IsWhatRunsWhateverBecomesOfItsFile) {
  TROUPE_NEEDS_DEVICES(2);
  for (const auto* how : {"removed", "replaced", "removed first"})
    expect_to_live_on("", how);
}

/// Returns the dynamic loader of this program.
std::string dynamic_loader() {
  std::string result;
  ::dl_iterate_phdr(
      [](dl_phdr_info* x, std::size_t, void* into) {
        for (std::size_t i = 0; i < x->dlpi_phnum; ++i)
          if (x->dlpi_phdr[i].p_type == PT_INTERP)
            *static_cast<std::string*>(into) =
                reinterpret_cast<const char*>(x->dlpi_addr + x->dlpi_phdr[i].p_vaddr);
        return 1;
      },
      &result);
  return result;
}

TEST(WorkerProgram, IsStartedByTheLoaderThatHasStartedItsParent) {
  TROUPE_NEEDS_DEVICES(2);
  const auto loader = dynamic_loader();
  ASSERT_FALSE(loader.empty());
  expect_to_live_on(loader, "kept");
}

/// A relative path refers to the folder at the start.
TROUPE_CHILD(ChangesItsFolder) {
  if (::chdir("/proc/self") != 0)
    return 1;
  auto options = with_workers("ServesAsWorker", "");
  options.workers.program = "exe";
  auto workers = must(make_worker_backend(options));
  auto device = must(workers->open(0));
  device.reset();
  if (::chdir("/") != 0)
    return 2;
  must(workers->open(0));
  return 0;
}

TROUPE_CHILD(ServesAsWorker) {
  auto arguments = main_arguments();
  return worker_main(static_cast<int>(arguments.size()), const_cast<char**>(arguments.data()))
      .value_or(99);
}

TEST(WorkerProgram, MayBeNamedByARelativePath) {
  const auto child = run_child("ChangesItsFolder", patience);
  EXPECT_EQ(child.status, 0) << to_string(child);
}

// -- standard streams

void compute_and_print() {
  test_system system{in_worker_processes(2)};
  auto w = system.open_world();
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    std::printf("a line of the program, which is no message of the library's\n");
    std::fflush(stdout); // NOLINT: it fails, as stdout is closed
    EXPECT_TRUE(works(w, seed));
    tell("open", open_streams());
  }
}

TROUPE_CHILD(PrintsIntoClosedStreams) {
  for (const int x : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::close(x) != 0)
      return 1;
  compute_and_print();
  return 0;
}

/// As a program does that becomes a daemon.
TROUPE_CHILD(ClosesItsStreamsLater) {
  test_system system{in_worker_processes(2)};
  auto w = system.open_world();
  for (const int x : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::close(x) != 0)
      return 1;
  static_cast<void>(is_lost_alone(system, w, w.size() - 1, 0)); // it checks the error
  tell("open", open_streams());
  compute_and_print();
  return 0;
}

TEST(WorkerStreams, AProgramMayCloseItsOwn) {
  TROUPE_NEEDS_DEVICES(2);
  for (const auto* scenario : {"PrintsIntoClosedStreams", "ClosesItsStreamsLater"}) {
    const auto child = run_child(scenario, 2 * patience);
    EXPECT_EQ(child.status, 0) << to_string(child);
    for (auto& x : child.values("open"))
      EXPECT_EQ(x, "") << scenario;
  }
}

// -- limits

TROUPE_CHILD(MayWriteSmallFilesOnly) {
  const rlimit small{100 << 10, 100 << 10};
  if (::setrlimit(RLIMIT_FSIZE, &small) != 0)
    return 1;
  auto workers = make_worker_backend(with_workers("ServesAsWorker", ""));
  tell("why", workers ? "none" : describe(workers.error()));
  return 0;
}

TEST(WorkerLimits, FilesThatAreTooSmallForSharedMemory) {
  const auto child = run_child("MayWriteSmallFilesOnly", patience);
  ASSERT_EQ(child.status, 0) << to_string(child);
  EXPECT_TRUE(has(child.value("why"), "shared memory") && has(child.value("why"), "too large"))
      << child.value("why");
}

} // namespace
} // namespace troupe::testing
