// Files at names at which something may be.

#include "foundation/system_call.hpp"
#include "foundation/write_file.hpp"
#include "support/folder.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

namespace troupe::testing {
namespace {

namespace fs = std::filesystem;
using detail::replace_file;

using names = std::set<std::string>;

TEST(WriteFile, WritesForItsOwnerAlone) {
  folder where;
  const auto path = where.file("file");
  const auto before = ::umask(0);
  EXPECT_FALSE(replace_file(path, "content"));
  ::umask(before);
  EXPECT_EQ(mode_of(path), S_IFREG | 0600U);
  EXPECT_EQ(content(path), "content");
  EXPECT_FALSE(replace_file(path, ""));
  EXPECT_EQ(content(path), "");
  EXPECT_EQ(where.names(), names{"file"});
}

TEST(WriteFile, ReplacesALinkAndLeavesItsTarget) {
  folder where;
  const auto target = where.write("target", "precious");
  for (auto& link : {where.file("link"), where.file("dangling")}) {
    fs::create_symlink(link == where.file("link") ? target : where.file("missing"), link);
    EXPECT_FALSE(replace_file(link, "content"));
    EXPECT_TRUE(S_ISREG(mode_of(link)));
    EXPECT_EQ(content(link), "content");
  }
  EXPECT_EQ(content(target), "precious");
  EXPECT_EQ(where.names(), (names{"target", "link", "dangling"}));
}

TEST(WriteFile, LeavesWhatIsNoFile) {
  folder where;
  make_fifo(where.file("fifo"));
  fs::create_symlink(where.file("fifo"), where.file("to_fifo"));
  fs::create_symlink("/dev/null", where.file("to_device"));
  fs::create_symlink("/proc/self/fd/1", where.file("like_stdout"));
  const auto before = where.names();
  for (auto& name : before) {
    const auto path = where.file(name);
    const auto mode = mode_of(path);
    const auto why = replace_file(path, "content"); // a FIFO without a reader
    ASSERT_TRUE(why) << name;
    EXPECT_EQ(to_string(*why), "it is not a regular file") << name;
    EXPECT_EQ(mode_of(path), mode) << name;
  }
  EXPECT_EQ(where.names(), before);
  EXPECT_TRUE(replace_file("/dev/null", "content"));
  EXPECT_TRUE(S_ISCHR(mode_of("/dev/null")));
}

TEST(WriteFile, SaysWhichCallFailed) {
  folder where;
  auto why = replace_file(where.file("missing/file"), "content");
  ASSERT_TRUE(why);
  EXPECT_EQ(why->api, std::string_view{"mkostemps"});
  EXPECT_EQ(why->code, ENOENT);
  EXPECT_EQ(to_string(*why), "No such file or directory");
  fs::create_directory(where.file("folder"));
  why = replace_file(where.file("folder"), "content");
  ASSERT_TRUE(why);
  EXPECT_EQ(why->api, std::string_view{"rename"});
  EXPECT_EQ(why->code, EISDIR);
  EXPECT_EQ(where.names(), names{"folder"});
}

TEST(WriteFile, KeepsTheOldFileIfThereIsNoRoom) {
  folder where;
  const auto path = where.write("file", "old");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  {
    const detail::no_file_size_signal guard;
    auto small = before;
    small.rlim_cur = 10;
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
    const auto why = replace_file(path, std::string(1000, 'x'));
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
    ASSERT_TRUE(why);
    EXPECT_EQ(why->api, std::string_view{"write"});
    EXPECT_EQ(why->code, EFBIG);
  }
  EXPECT_EQ(content(path), "old");
  EXPECT_EQ(where.names(), names{"file"});
}

TEST(WriteFile, IsWholeWhileOthersWriteIt) {
  constexpr std::size_t size = 10'000;
  folder where;
  const auto path = where.file("file");
  ASSERT_FALSE(replace_file(path, std::string(size, '?')));
  std::atomic<int> failures = 0;
  std::vector<std::jthread> writers;
  for (int i = 0; i < 20; ++i)
    writers.emplace_back([&, i] {
      for (int k = 0; k < 20; ++k)
        failures += replace_file(path, std::string(size, static_cast<char>('a' + i))) ? 1 : 0;
    });
  for (int k = 0; k < 200; ++k) {
    const auto got = content(path);
    ASSERT_EQ(got, std::string(size, got.empty() ? '?' : got.front()));
  }
  writers.clear(); // joins them
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(where.names(), names{"file"});
}

} // namespace
} // namespace troupe::testing
