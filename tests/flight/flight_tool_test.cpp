/// The output of `troupe-flight` for the file of another program.
#include "flight/flight_support.hpp"
#include "support/folder.hpp"
#include "support/hostile_text.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <filesystem>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using nlohmann::json;
using ::testing::HasSubstr;

/// Returns a record with an operation of a world and one of a device, all of whose texts are
/// `text`.
json record_with(const std::string& text) {
  json part{{"operation", 1}, {"verb", text},    {"part", 0},       {"rank", 0},
            {"world", 1},     {"epoch", 1},      {"generation", 1}, {"count", 1},
            {"dtype", text},  {"way", text},     {"stream", text},  {"admitted", 1},
            {"issued", 0},    {"started", 0},    {"over", 0},       {"state", "not issued"},
            {"error", text},  {"native_code", 1}};
  part["refs"] = json::array({{{"buffer", 1}, {"begin", 0}, {"end", 4}, {"access", text}}});
  auto other = part;
  other["world"] = 0;
  other["rank"] = -1;
  json device{{"device", 0},    {"generation", 1},     {"phase", text},
              {"reason", text}, {"next_waits_for", 0}, {"operations", json::array({part, other})}};
  json record{{"format", "troupe flight record"},
              {"version", 1},
              {"host", text},
              {"process", 1},
              {"time", 2},
              {"unix_time", 2}};
  record["cause"] = {{"text", text},
                     {"code", text},
                     {"time", 1},
                     {"operation", 1},
                     {"parts", json::array({text})}};
  record["worlds"] = json::array({{{"id", 1}, {"name", text}}});
  record["devices"] = json::array({device});
  return record;
}

std::string dump(const json& x) {
  return x.dump(-1, ' ', false, json::error_handler_t::replace); // not all of it is UTF-8
}

/// For EXPECT_TRUE: each line is printable, and no longer than a cause may be.
::testing::AssertionResult is_printable(const std::string& output) {
  std::istringstream lines{output};
  for (std::string line; std::getline(lines, line);)
    if (auto result = is_one_line(line, (64 << 10) + 10); !result)
      return result << " in " << line.substr(0, 3000);
  return ::testing::AssertionSuccess();
}

TEST(FlightTool, ShowsTextsOfAFileInPrintableForm) {
  folder where;
  const auto path = where.write("record.json", dump(record_with(hostile_text())));
  const auto trace_file = where.file("trace.json");
  const auto told = run_tool(path + " --trace " + trace_file);
  EXPECT_EQ(told.status, 0) << told.output.substr(0, 3000);
  EXPECT_TRUE(is_printable(told.output));
  EXPECT_THAT(told.output, HasSubstr(std::string{"cause: "} + hostile_begin));
  EXPECT_THAT(told.output, HasSubstr(std::string{"world 1 \""} + hostile_begin));
  EXPECT_THAT(told.output, HasSubstr(std::string{"device 0: "} + hostile_begin));
  const auto trace = read(trace_file).flatten();
  std::size_t texts = 0;
  for (auto& [path_in_it, x] : trace.items())
    if (x.is_string()) {
      ++texts;
      EXPECT_TRUE(is_one_line(x.get<std::string>(), 64 << 10)) << path_in_it;
    }
  EXPECT_GT(texts, 10u);
}

TEST(FlightTool, SaysInPrintableFormWhatIsWrong) {
  folder where;
  auto wrong_state = record_with("text");
  wrong_state["devices"][0]["operations"][0]["state"] = hostile_text();
  auto wrong_version = record_with("text");
  wrong_version["version"] = hostile_text();
  for (auto& content :
       {hostile_text(), '"' + hostile_text(), dump(wrong_state), dump(wrong_version)}) {
    const auto told = run_tool(where.write("record.json", content));
    EXPECT_EQ(told.status, 1);
    EXPECT_THAT(told.output, HasSubstr("troupe-flight: "));
    EXPECT_TRUE(is_printable(told.output));
  }
}

TEST(FlightTool, RefusesNumbersOutOfRange) {
  folder where;
  const std::string part = "/devices/0/operations/0/";
  for (auto& [at, value] :
       std::vector<std::pair<std::string, std::string>>{{part + "rank", "4096"},
                                                        {part + "rank", "-2"},
                                                        {part + "rank", "99999999999999"},
                                                        {part + "rank", "1e3"},
                                                        {part + "rank", "\"1\""},
                                                        {part + "operation", "-1"},
                                                        {part + "count", "18446744073709551616"},
                                                        {part + "admitted", "9223372036854775807"},
                                                        {part + "native_code", "2147483648"},
                                                        {part + "refs/0/end", "-4"},
                                                        {"/devices/0/device", "-1"},
                                                        {"/devices/0/device", "1024"},
                                                        {"/cause/time", "-1"},
                                                        {"/worlds/0/id", "null"},
                                                        {"/process", "-1"},
                                                        {"/time", "true"}}) {
    auto record = record_with("text");
    record[json::json_pointer{at}] = json::parse(value);
    const auto told = run_tool(where.write("record.json", dump(record)));
    EXPECT_EQ(told.status, 1) << at << " " << value;
    EXPECT_THAT(told.output, HasSubstr('"' + at.substr(at.rfind('/') + 1) + "\" is ")) << value;
  }
}

TEST(FlightTool, ShowsWholeRowsOfLongNames) {
  folder where;
  const std::string name(200, 'n');
  const auto told = run_tool(where.write("record.json", dump(record_with(name))));
  EXPECT_EQ(told.status, 0) << told.output;
  EXPECT_THAT(told.output, HasSubstr("     0       0  -" + std::string(38, ' ') + name +
                                     " #1 not issued, " + name + ", "));
}

TEST(FlightTool, WritesATraceForItsOwnerAlone) {
  folder where;
  const auto path = where.write("record.json", dump(record_with("text")));
  const auto trace_file = where.file("trace.json");
  const auto victim = where.write("victim", "precious");
  std::filesystem::create_symlink(victim, trace_file);
  EXPECT_EQ(run_tool(path + " --trace " + trace_file).status, 0);
  EXPECT_EQ(mode_of(trace_file), S_IFREG | 0600U);
  EXPECT_EQ(content(victim), "precious");
  make_fifo(where.file("fifo"));
  const auto told = run_tool(path + " --trace " + where.file("fifo"));
  EXPECT_EQ(told.status, 1);
  EXPECT_THAT(told.output, HasSubstr("troupe-flight: cannot write " + where.file("fifo") +
                                     ": it is not a regular file\n"));
}

} // namespace

} // namespace troupe::testing
