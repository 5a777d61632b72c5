#include "support/expect.hpp"
#include <troupe/way_table.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include <unistd.h>

namespace troupe::testing {
namespace {

class WayTable : public ::testing::Test {
protected:
  ~WayTable() override { std::filesystem::remove(path_); }

  caf::expected<way_table> read(const std::string& text, std::size_t ranks) {
    std::ofstream{path_} << text;
    return read_way_table(path_, ranks);
  }

  static std::uint64_t limit(const way_table& x, collective_kind kind) {
    return x.direct_up_to[static_cast<std::size_t>(kind)];
  }

  const std::string path_ =
      std::filesystem::temp_directory_path() / ("ways." + std::to_string(getpid()));
};

TEST_F(WayTable, GivesLargeCollectivesOfMoreThanTwoRanksToNccl) {
  for (auto kind : all_collective_kinds)
    EXPECT_EQ(limit(way_table::built_in(2), kind), way_table::no_limit);
  const auto x = way_table::built_in(4);
  EXPECT_EQ(limit(x, collective_kind::broadcast), std::uint64_t{16} << 20);
  EXPECT_EQ(limit(x, collective_kind::send), way_table::no_limit);
}

TEST_F(WayTable, HasTheLinesOfItsNumberOfRanks) {
  const auto x = must(read("# a comment\n\n2 all_reduce 4096 # and one here\n"
                           "2 broadcast all\n4 all_reduce 1\n2 send 77\n",
                           2));
  EXPECT_EQ(limit(x, collective_kind::all_reduce), 4096u);
  EXPECT_EQ(limit(x, collective_kind::broadcast), way_table::no_limit);
  EXPECT_EQ(limit(x, collective_kind::gather), way_table::no_limit) << "it is not named";
  EXPECT_EQ(limit(x, collective_kind::send), 77u);
  EXPECT_EQ(limit(x, collective_kind::recv), 77u) << "both ends of a message go the same way";
}

TEST_F(WayTable, SaysWhatIsWrong) {
  for (const auto* line : {"2 all_reduce", "2 all_reduce 1 2", "two all_reduce 1",
                           "2 all_reduces 1", "2 all_reduce -1", "2 all_reduce 1k", "2 recv 1",
                           "2 all_to_all_v 1", "2 all_reduce 99999999999999999999"}) {
    const auto x = read(std::string{"2 barrier all\n"} + line + '\n', 2);
    ASSERT_TRUE(has_code(x, errc::invalid_argument)) << line;
    EXPECT_NE(describe(x.error()).find("line 2"), std::string::npos) << describe(x.error());
  }
  EXPECT_TRUE(has_code(read("2 all_reduce 1\n", 3), errc::invalid_argument));
  EXPECT_TRUE(has_code(read_way_table(path_ + ".none", 2), errc::invalid_argument));
}

} // namespace
} // namespace troupe::testing
