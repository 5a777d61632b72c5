// Descriptors of the library, independent of the program's standard streams, and limits of the
// system.

#include "foundation/file_descriptor.hpp"
#include "foundation/system_call.hpp"
#include "net/socket.hpp"
#include "support/child_process.hpp"
#include "support/expect.hpp"
#include "worker/protocol/message_socket.hpp"
#include "worker/protocol/shared_memory.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

namespace troupe::testing {
namespace {

using detail::file_descriptor;
using namespace std::chrono_literals;

constexpr std::chrono::seconds patience{30};

/// Makes the library's descriptors while the standard streams are closed.
TROUPE_CHILD(MakesDescriptorsWithoutStreams) {
  for (const int x : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::close(x) != 0)
      return 1;
  const auto look = [](const char* what, int native) {
    const int flags = ::fcntl(native, F_GETFD);
    tell(what, std::to_string(native > STDERR_FILENO) +
                   (flags == FD_CLOEXEC ? " closed" : " kept") + " " + open_streams());
  };
  auto ends = must(detail::message_socket::pair());
  look("pair", ends.first.native());
  look("pair", ends.second.native());
  auto memory = must(detail::shared_memory::create(4096));
  look("memory", memory.descriptor());
  const int passed = memory.descriptor();
  const std::array<std::byte, 1> message{};
  must(ends.first.send(message, {&passed, 1}));
  std::array<std::byte, 8> into;
  auto got = must(ends.second.receive(into, 1));
  look("received", got.descriptors.at(0).get());
  auto wake = must(detail::wake_up::create());
  look("wake", wake.native());
  auto at = must(detail::address_from_string("127.0.0.1"));
  auto listener = must(detail::listen_at(at));
  look("listener", listener.get());
  auto connected = must(detail::connect_to(at, std::chrono::steady_clock::now() + patience));
  look("connected", connected.get());
  auto accepted = detail::accept_from(listener);
  look("accepted", accepted.get());
  return 0;
}

TEST(Descriptors, NoneIsAStandardStream) {
  const auto child = run_child("MakesDescriptorsWithoutStreams", patience);
  ASSERT_EQ(child.status, 0) << to_string(child);
  EXPECT_EQ(child.told.size(), 8u);
  for (auto& [what, how] : child.told)
    EXPECT_EQ(how, "1 closed ") << what;
}

TROUPE_CHILD(FillsItsStreams) {
  for (const int x : {STDIN_FILENO, STDERR_FILENO})
    if (::close(x) != 0)
      return 1;
  must(detail::fill_standard_streams());
  for (const int x : {STDIN_FILENO, STDERR_FILENO})
    if (::fcntl(x, F_GETFD) != FD_CLOEXEC)
      return 2;
  tell("open", open_streams());
  return 0;
}

TEST(Descriptors, ClosedStreamsAreFilledForOtherLibraries) {
  const auto child = run_child("FillsItsStreams", patience);
  ASSERT_EQ(child.status, 0) << to_string(child);
  EXPECT_EQ(child.value("open"), std::to_string(STDOUT_FILENO) + " "); // stdout was not closed
}

int checks_that_none_is_made() {
  errno = 0;
  const file_descriptor none{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
  if (none || errno != EMFILE)
    return 2;
  if (!open_streams().starts_with("1 2"))
    return 3;
  const auto failed = [](const auto& x) { return !x && code_of(x.error()) == errc::unavailable; };
  if (!failed(detail::message_socket::pair()) || !failed(detail::wake_up::create()) ||
      !failed(detail::shared_memory::create(4096)))
    return 4;
  return open_streams().starts_with("1 2") ? 0 : 5;
}

/// Only the numbers of the standard streams are free.
TROUPE_CHILD(HasNoOtherDescriptors) {
  tell("begun"); // not possible later
  // UBSan opens files at its first check of an error's message, and waits for ever without.
  static_cast<void>(detail::system_failure("open", EMFILE, "made before descriptors run out"));
  rlimit before{};
  if (::getrlimit(RLIMIT_NOFILE, &before) != 0)
    return 1;
  const rlimit few{3, before.rlim_max};
  if (::setrlimit(RLIMIT_NOFILE, &few) != 0 || ::close(STDIN_FILENO) != 0)
    return 1;
  const int result = checks_that_none_is_made();
  // The leak sanitizer opens files at the end. Without descriptors it would block for ever.
  return ::setrlimit(RLIMIT_NOFILE, &before) == 0 ? result : 6;
}

TEST(Descriptors, AreRefusedWhereOnlyStandardStreamsAreLeft) {
  const auto child = run_child("HasNoOtherDescriptors", patience);
  EXPECT_EQ(child.status, 0) << to_string(child);
}

// -- limits of sizes

bool is_pending(int signal) {
  sigset_t all;
  return ::sigpending(&all) == 0 && ::sigismember(&all, signal) == 1;
}

TROUPE_CHILD(MayWriteLittle) {
  const rlimit small{100, 100};
  if (::setrlimit(RLIMIT_FSIZE, &small) != 0)
    return 1;
  const auto memory = detail::shared_memory::create(4096);
  if (memory)
    return 2;
  tell("why", describe(memory.error()));
  sigset_t blocked;
  if (::pthread_sigmask(SIG_BLOCK, nullptr, &blocked) != 0 ||
      ::sigismember(&blocked, SIGXFSZ) != 0 || is_pending(SIGXFSZ))
    return 3;
  // A signal of the program itself.
  if (::sigaddset(&blocked, SIGXFSZ) != 0 ||
      ::pthread_sigmask(SIG_SETMASK, &blocked, nullptr) != 0 || ::raise(SIGXFSZ) != 0)
    return 4;
  {
    const detail::no_file_size_signal guard;
  }
  return is_pending(SIGXFSZ) ? 0 : 5;
}

TEST(Descriptors, SharedMemoryBeyondTheLimitOfFilesIsRefused) {
  const auto child = run_child("MayWriteLittle", patience);
  ASSERT_EQ(child.status, 0) << to_string(child);
  EXPECT_NE(child.value("why").find("4096 bytes of shared memory"), std::string::npos)
      << child.value("why");
  EXPECT_NE(child.value("why").find("File too large"), std::string::npos) << child.value("why");
}

} // namespace
} // namespace troupe::testing
