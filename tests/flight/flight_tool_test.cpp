/// The output of `troupe-flight` for the file of another program.
#include "flight/flight_support.hpp"
#include "support/folder.hpp"
#include "support/hostile_text.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <sstream>
#include <string>
#include <tuple>
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

TEST(FlightTool, RefusesAnotherForm) {
  folder where;
  const std::string part = "/devices/0/operations/0";
  const json nothing;
  const json element{{"access", "r"}, {"buffer", 1}, {"begin", 0}, {"end", 4}};
  json many;
  for (int i = 0; i < 101; ++i)
    many["member" + std::to_string(i)] = i;
  for (auto& [at, value, text] : std::vector<std::tuple<std::string, json, std::string>>{
           {"/devices", 17, R"("devices" is 17, and not an array)"},
           {"/devices", {{"device", 1}}, R"("devices" is an object, and not an array)"},
           {"/devices", {17}, "an array has 17 in place of an object"},
           {"/devices/0/operations", nothing, R"("operations" is null, and not an array)"},
           {"/worlds", {{1, 2}}, "an array has [] in place of an object"},
           {"/cause", {1}, R"("cause" is an array, and not an object)"},
           {"/cause/parts/0", 1, R"("parts" is 1, and not a text)"},
           {"/cause/parts", json(4097, "done"), R"("cause" has more than 4096 parts)"},
           {part + "/refs", json(65, element), "an operation has more than 64 refs"},
           {part + "/rank", {0}, R"("rank" is an array, and not a whole number)"},
           {part + "/verb", nothing, R"("verb" is null, and not a text)"},
           {part, many, "an object has more than 100 members"},
           {part, json::object(), R"("operation" is missing)"}}) {
    auto record = record_with("text");
    record[json::json_pointer{at}] = value;
    const auto told = run_tool(where.write("record.json", dump(record)));
    EXPECT_EQ(told.status, 1) << at;
    EXPECT_THAT(told.output, HasSubstr("record.json is no right flight record: " + text)) << at;
  }
}

TEST(FlightTool, IgnoresWhatItDoesNotKnow) {
  folder where;
  const auto record = record_with("text");
  const auto expected = run_tool(where.write("record.json", dump(record)));
  ASSERT_EQ(expected.status, 0) << expected.output;
  const json unknown{{"operations", json::array({1, {{"refs", 2}}})}, {"rank", -5}};
  auto more = record;
  for (auto* object : {"", "/cause", "/worlds/0", "/devices/0", "/devices/0/operations/0",
                       "/devices/0/operations/0/refs/0"})
    for (auto* name : {"a", "zoo"})
      more[json::json_pointer{std::string{object} + "/" + name}] = unknown;
  EXPECT_EQ(run_tool(where.write("record.json", dump(more))).output, expected.output);
  EXPECT_EQ(run_tool("/dev/stdin < " + where.file("record.json")).output, expected.output);
}

/// Returns a record of about 10 MB.
std::string large_record() {
  constexpr std::size_t size = std::size_t{10} << 20;
  auto record = record_with("text");
  auto& parts = record["devices"][0]["operations"];
  auto part = parts[0];
  part["over"] = 1;
  part["state"] = "done";
  const auto one = dump(part);
  std::string all = one;
  while (all.size() < size)
    all += "," + one;
  const std::string mark = "parts";
  parts = json::array({mark});
  auto text = dump(record);
  return text.replace(text.find('"' + mark + "\"]"), mark.size() + 2, all);
}

TEST(FlightTool, TakesLittleMemoryForALargeFile) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer needs more address space than the limit allows";
#endif
  folder where;
  const auto path = where.write("record.json", large_record());
  const auto told = run_tool(path, "ulimit -v 60000; ");
  EXPECT_EQ(told.status, 0) << told.output;
  const auto trace_file = where.file("trace.json");
  const auto traced = run_tool(path + " --trace " + trace_file, "ulimit -v 120000; ");
  EXPECT_EQ(traced.status, 0) << traced.output;
  EXPECT_EQ(traced.output, told.output);
  EXPECT_GT(std::filesystem::file_size(trace_file), std::size_t{5} << 20);
  const auto refused = run_tool(path, "ulimit -v 20000; ");
  EXPECT_EQ(refused.status, 1);
  EXPECT_EQ(refused.output, "troupe-flight: there is not enough memory for " + path + "\n");
}

TEST(FlightTool, RefusesFilesThatAreTooLarge) {
  folder where;
  const auto path = where.write("record.json", "");
  std::filesystem::resize_file(path, (std::uintmax_t{1} << 30) + 1); // takes no room
  const auto told = run_tool(path);
  EXPECT_EQ(told.status, 1);
  EXPECT_EQ(told.output, "troupe-flight: " + path +
                             " is too large: 1073741825 bytes; the limit is 1073741824 bytes\n");
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
