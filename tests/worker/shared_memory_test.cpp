// Memory shared by two processes.

#include "support/expect.hpp"
#include "worker/parent/shared_segments.hpp"
#include "worker/protocol/shared_memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

namespace troupe::testing {
namespace {

using detail::file_descriptor;
using detail::shared_memory;

file_descriptor copy_of(const shared_memory& x) {
  return file_descriptor{::fcntl(x.descriptor(), F_DUPFD_CLOEXEC, 0)};
}

TEST(SharedMemory, IsZeroedAndSeenOnBothSides) {
  auto ours = must(shared_memory::create(10'000));
  ASSERT_EQ(ours.bytes().size(), 10'000u);
  EXPECT_TRUE(std::all_of(ours.bytes().begin(), ours.bytes().end(),
                          [](std::byte x) { return x == std::byte{0}; }));
  auto theirs = must(shared_memory::attach(copy_of(ours), 10'000));
  EXPECT_NE(ours.bytes().data(), theirs.bytes().data());
  ours.bytes()[9'999] = std::byte{1};
  theirs.bytes()[0] = std::byte{2};
  EXPECT_EQ(theirs.bytes()[9'999], std::byte{1});
  EXPECT_EQ(ours.bytes()[0], std::byte{2});
}

TEST(SharedMemory, MovesWithItsBytes) {
  auto first = must(shared_memory::create(100));
  auto* place = first.bytes().data();
  shared_memory second{std::move(first)};
  EXPECT_EQ(second.bytes().data(), place);
  auto third = must(shared_memory::create(200));
  third = std::move(second);
  EXPECT_EQ(third.bytes().data(), place);
  EXPECT_EQ(third.bytes().size(), 100u);
  third.bytes()[99] = std::byte{1};
}

TEST(SharedMemory, NobodyCanChangeItsSize) {
  auto memory = must(shared_memory::create(8192));
  EXPECT_NE(::ftruncate(memory.descriptor(), 0), 0);
  EXPECT_NE(::ftruncate(memory.descriptor(), 1 << 20), 0);
  EXPECT_NE(::fcntl(memory.descriptor(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  struct stat found{};
  ASSERT_EQ(::fstat(memory.descriptor(), &found), 0);
  EXPECT_EQ(found.st_size, 8192);
  EXPECT_EQ(found.st_mode & 0777, 0600u);
  EXPECT_EQ(::fcntl(memory.descriptor(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(SharedMemory, RefusesWhatCannotBeRight) {
  EXPECT_TRUE(has_code(shared_memory::create(0), errc::invalid_argument));
  EXPECT_TRUE(has_code(shared_memory::create(~std::size_t{0}), errc::invalid_argument));
  EXPECT_TRUE(has_code(shared_memory::create(std::size_t{1} << 62), errc::unavailable));
  auto memory = must(shared_memory::create(8192));
  EXPECT_TRUE(has_code(shared_memory::attach(copy_of(memory), 4096), errc::invalid_argument));
  EXPECT_TRUE(has_code(shared_memory::attach(copy_of(memory), 16384), errc::invalid_argument));
  EXPECT_TRUE(has_code(shared_memory::attach(copy_of(memory), 0), errc::invalid_argument));
  EXPECT_TRUE(has_code(shared_memory::attach(file_descriptor{}, 8192), errc::invalid_argument));
}

/// Prevents the process from opening more files.
class no_more_files {
public:
  no_more_files() {
    if (::getrlimit(RLIMIT_NOFILE, &before_) != 0)
      throw std::runtime_error("the limit of open files is not known");
    const file_descriptor next{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
    auto now = before_;
    now.rlim_cur = static_cast<rlim_t>(next.get());
    limit = now.rlim_cur;
    if (!next || ::setrlimit(RLIMIT_NOFILE, &now) != 0)
      throw std::runtime_error("the limit of open files cannot be set");
  }
  ~no_more_files() { EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before_), 0); }
  no_more_files(const no_more_files&) = delete;
  no_more_files& operator=(const no_more_files&) = delete;

  rlim_t limit = 0;

private:
  rlimit before_{};
};

// This is not an out-of-memory error: more free memory would not help.
TEST(SharedMemory, TooManyOpenFilesAreNoLackOfMemory) {
  detail::shared_segments segments;
  caf::error why;
  caf::error other;
  std::string text;
  {
    no_more_files full;
    text = "the process has reached its limit of " + std::to_string(full.limit) +
           " open files (RLIMIT_NOFILE)";
    const auto memory = segments.create(4096);
    why = memory ? caf::error{} : memory.error();
    const auto event = detail::wake_up::create();
    other = event ? caf::error{} : event.error();
  }
  EXPECT_TRUE(has_code(why, errc::unavailable));
  EXPECT_NE(describe(why).find(text), std::string::npos) << describe(why);
  EXPECT_TRUE(has_code(other, errc::unavailable));
  EXPECT_NE(describe(other).find(text), std::string::npos) << describe(other);
  auto* memory = must(segments.create(4096));
  EXPECT_TRUE(is_ok(segments.remove(memory)));
  EXPECT_TRUE(has_code(segments.create(std::size_t{1} << 62), errc::out_of_memory));
}

TEST(SharedMemory, RefusesMemoryThatAPeerCouldShrink) {
  file_descriptor loose{::memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  ASSERT_TRUE(loose);
  ASSERT_EQ(::ftruncate(loose.get(), 4096), 0);
  EXPECT_TRUE(has_code(shared_memory::attach(std::move(loose), 4096), errc::invalid_argument));
  file_descriptor pipe_or_file{::open("/dev/null", O_RDWR | O_CLOEXEC)};
  ASSERT_TRUE(pipe_or_file);
  EXPECT_TRUE(
      has_code(shared_memory::attach(std::move(pipe_or_file), 4096), errc::invalid_argument));
}

} // namespace
} // namespace troupe::testing
