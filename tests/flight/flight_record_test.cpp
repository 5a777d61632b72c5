/// Flight records in files, and the output of `troupe-flight`.
#include "flight/flight_support.hpp"
#include "support/folder.hpp"
#include "support/log_lines.hpp"
#include "support/world_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <filesystem>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace troupe::testing {

namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

/// Waits for the file. A background thread writes the record of a failure.
bool appears(const std::string& path) {
  for (stopwatch watch; !fs::exists(path); std::this_thread::yield())
    if (watch.elapsed() > patience)
      return false;
  return true;
}

world_config hasty() {
  world_config config;
  config.name = "training";
  config.limits.stall_limit = 100ms;
  config.limits.restart_backoff = 1ms;
  config.limits.quiet_limit = std::chrono::seconds{10};
  return config;
}

std::vector<any_gpu_ref> zeros(const world& w) {
  return must(w.allocate(dtype::float32, 1000, true));
}

/// Returns the parts of an operation, by rank.
std::map<int, json> ranks_of(const json& record, std::uint64_t operation) {
  std::map<int, json> result;
  for (auto& device : record.at("devices"))
    for (auto& x : device.at("operations"))
      if (x.at("operation") == operation)
        result[x.at("rank")] = x;
  return result;
}

std::size_t parts_in(const json& record) {
  std::size_t result = 0;
  for (auto& device : record.at("devices"))
    result += device.at("operations").size();
  return result;
}

/// The record of a world in which rank 2 does not issue an all-reduce, because its lane is blocked
/// in the launch before it.
class RankNotIssued : public ::testing::Test {
protected:
  void SetUp() override {
    TROUPE_HOST_ONLY("a fault plan");
    auto plan = std::make_shared<fault_plan>();
    test_system system{{.devices = 3, .faults = plan, .flight_record = {.path = path}}};
    auto w = system.open_world(hasty());
    auto refs = zeros(w);
    for (int i = 0; i < 5; ++i)
      must(answer_of(w.all_reduce(refs)));
    plan->add({fault::block, verb::launch_host, 2});
    auto launched = launch_nothing(w.device_of(2));
    launch = launched.number();
    ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
    auto sum = w.all_reduce(refs);
    culprit = sum.number();
    ASSERT_TRUE(has_code(answer_of(sum), errc::stalled));
    ASSERT_TRUE(appears(path)); // while the lane is blocked
    plan->release();
    ASSERT_TRUE(is_ok(answer_of(launched)));
  }

  folder where;
  std::string path = where.file("record.json");
  std::uint64_t launch = 0;
  std::uint64_t culprit = 0;
};

TEST_F(RankNotIssued, IsInTheFile) {
  EXPECT_EQ(where.names(), std::set<std::string>{"record.json"});
  auto record = read(path);
  EXPECT_EQ(record.at("format"), "troupe flight record");
  EXPECT_EQ(record.at("version"), 1);
  EXPECT_EQ(record.at("process"), getpid());
  EXPECT_EQ(record.at("cause").at("code"), "stalled");
  EXPECT_EQ(record.at("cause").at("severity"), "communicator");
  EXPECT_EQ(record.at("cause").at("operation"), culprit);
  EXPECT_EQ(record.at("cause").at("rank"), 2);
  EXPECT_EQ(record.at("cause").at("parts"), (json{"started", "started", "not issued"}));
  ASSERT_EQ(record.at("devices").size(), 3u);
  auto ranks = ranks_of(record, culprit);
  ASSERT_EQ(ranks.size(), 3u);
  for (auto& [rank, x] : ranks) {
    EXPECT_EQ(x.at("verb"), "all_reduce");
    EXPECT_EQ(x.at("count"), 1000);
    EXPECT_EQ(x.at("dtype"), "float32");
    EXPECT_EQ(x.at("epoch"), 1);
    EXPECT_EQ(x.at("generation"), 1);
    EXPECT_EQ(x.at("stream"), "collective");
    ASSERT_EQ(x.at("refs").size(), 1u);
    EXPECT_EQ(x.at("refs")[0].at("access"), "rw");
    EXPECT_EQ(x.at("refs")[0].at("end"), 4000);
    EXPECT_NE(x.at("admitted"), 0);
    EXPECT_EQ(x.at("issued") == 0, rank == 2);
    EXPECT_EQ(x.at("started") == 0, rank == 2);
  }
  EXPECT_EQ(ranks[2].at("state"), "not issued");
  auto worlds = record.at("worlds");
  ASSERT_EQ(worlds.size(), 1u);
  EXPECT_EQ(worlds[0].at("id"), ranks[0].at("world"));
  EXPECT_EQ(worlds[0].at("name"), "training");
}

TEST_F(RankNotIssued, IsNamedByTheTool) {
  auto told = run_tool(path);
  EXPECT_EQ(told.status, 0) << told.output;
  auto title = "all_reduce #" + std::to_string(culprit);
  EXPECT_THAT(told.output,
              HasSubstr("rank 2 (device 2) is behind in " + title +
                        " (1000 x float32): not issued, while ranks 0, 1 are started."));
  EXPECT_THAT(told.output, HasSubstr("cause: " + title + ": stalled"));
  EXPECT_THAT(told.output, HasSubstr("device 2 is at launch #" + std::to_string(launch) +
                                     ", which comes before it: issuing for "));
  // One row for each rank: its last completed operation and its current one.
  std::istringstream lines{told.output};
  std::size_t rows = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream cells{line};
    std::vector<std::string> row{std::istream_iterator<std::string>{cells}, {}};
    if (row.size() < 8 || row[2] != "all_reduce")
      continue;
    EXPECT_EQ(row[0], std::to_string(rows));
    EXPECT_EQ(row[1], std::to_string(rows));
    EXPECT_LT(std::stoul(row[3].substr(1)), culprit);
    EXPECT_EQ(row[6] + " " + row[7], title);
    ++rows;
  }
  EXPECT_EQ(rows, 3u) << told.output;
}

// Requirements of the Trace Event Format, and of viewers to show every event.
TEST_F(RankNotIssued, IsInTheTrace) {
  auto trace_file = where.file("trace.json");
  auto told = run_tool(path + " --trace " + trace_file);
  ASSERT_EQ(told.status, 0) << told.output;
  auto trace = read(trace_file);
  ASSERT_TRUE(trace.at("traceEvents").is_array());
  std::map<std::tuple<int, int>, std::string> threads;
  std::map<int, std::string> processes;
  std::map<std::tuple<int, int>, double> busy_until;
  std::size_t slices = 0;
  double last = 0;
  for (auto& x : trace.at("traceEvents")) {
    int process = x.at("pid");
    int thread = x.at("tid");
    ASSERT_GT(process, 0);
    ASSERT_GT(thread, 0);
    if (x.at("ph") == "M") {
      if (x.at("name") == "process_name")
        processes[process] = x.at("args").at("name");
      if (x.at("name") == "thread_name")
        threads[{process, thread}] = x.at("args").at("name");
      continue;
    }
    ASSERT_EQ(x.at("ph"), "X");
    ++slices;
    EXPECT_TRUE(x.at("name").is_string());
    EXPECT_TRUE(x.at("cat").is_string());
    double begin = x.at("ts");
    double length = x.at("dur");
    EXPECT_GE(begin, last);
    EXPECT_GE(length, 0);
    last = begin;
    auto& until = busy_until[{process, thread}];
    EXPECT_GE(begin, until);
    until = begin + length;
    EXPECT_TRUE(x.at("args").at("operation").is_number_unsigned());
    EXPECT_TRUE(x.at("args").contains("count"));
    EXPECT_TRUE(x.at("args").contains("dtype"));
    if (x.at("args").at("operation") == culprit && x.at("args").at("device") == 2) {
      EXPECT_EQ(x.at("args").at("state"), "not issued");
      EXPECT_EQ((threads[{process, thread}]), "rank 2, device 2");
      EXPECT_THAT(processes[process], HasSubstr("training"));
    }
  }
  EXPECT_EQ(slices, parts_in(read(path)));
  for (auto& [where_busy, until] : busy_until) {
    EXPECT_TRUE(processes.contains(std::get<0>(where_busy)));
    EXPECT_TRUE(threads.contains(where_busy));
  }
}

TEST(FlightRecord, IsWrittenOnRequestWhileARankHangs) {
  TROUPE_HOST_ONLY("its streams are held");
  folder where;
  test_system system{{.devices = 2}};
  world_config config;
  config.name = "a \"world\" of \xff\xc3\xa9"; // invalid UTF-8 except the last character
  auto w = system.open_world(config);
  auto refs = zeros(w);
  gate held;
  auto launched = held.hold_stream(w.device_of(1), {}, {refs[1]});
  ASSERT_TRUE(held.wait_reached());
  auto sum = w.all_reduce(refs);
  auto state_of = [&](const json& record, int rank) {
    return ranks_of(record, sum.number()).at(rank).at("state").get<std::string>();
  };
  // The lanes need time to issue it.
  auto path = where.file("record.json");
  json record;
  for (stopwatch watch; watch.elapsed() < patience;) {
    ASSERT_TRUE(is_ok(answer_of(write_flight_record(system, path))));
    record = read(path);
    if (state_of(record, 0) == "started" && state_of(record, 1) == "issued")
      break;
  }
  EXPECT_TRUE(record.at("cause").is_null());
  EXPECT_EQ(state_of(record, 0), "started");
  EXPECT_EQ(state_of(record, 1), "issued");
  EXPECT_EQ(record.at("worlds")[0].at("name"), "a \"world\" of ?\xc3\xa9");
  auto told = run_tool(path);
  EXPECT_THAT(told.output, HasSubstr("rank 1 (device 1) is behind in all_reduce #"));
  EXPECT_THAT(told.output, HasSubstr(": issued, while rank 0 is started."));
  EXPECT_THAT(told.output, HasSubstr("device 1 is at launch #" + std::to_string(launched.number()) +
                                     ", which comes before it: started for "));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(sum)));
}

// A rank that has not called blocks the others.
TEST(FlightRecord, NamesTheRankThatDidNotCall) {
  TROUPE_NEEDS_DEVICES(2);
  folder where;
  test_system system{{.devices = 3}};
  auto w = system.open_world();
  auto refs = zeros(w);
  auto last = static_cast<int>(w.size()) - 1;
  std::vector<pending<collective_done>> calls;
  for (int i = 0; i < last; ++i)
    calls.push_back(
        w.rank(static_cast<std::size_t>(i)).all_reduce(refs[static_cast<std::size_t>(i)]));
  auto path = where.file("record.json");
  ASSERT_TRUE(is_ok(answer_of(write_flight_record(system, path))));
  auto number = calls[0].number();
  auto ranks = ranks_of(read(path), number);
  ASSERT_EQ(ranks.size(), w.size());
  EXPECT_EQ(ranks[0].at("state"), "not issued");
  EXPECT_EQ(ranks[0].at("count"), 1000);
  EXPECT_EQ(ranks[last].at("state"), "not called");
  auto told = run_tool(path);
  auto rank = std::to_string(last);
  EXPECT_THAT(told.output,
              HasSubstr("rank " + rank + " (device " + rank + ") is behind in all_reduce #" +
                        std::to_string(number) + " (1000 x float32): not called, while "));
  calls[0].cancel();
  for (auto& x : calls)
    EXPECT_TRUE(has_code(answer_of(x), errc::cancelled));
  // The lanes process the cancelled operation without issuing it.
  const auto until = std::chrono::steady_clock::now() + patience;
  do {
    must(answer_of(write_flight_record(system, path)));
    ranks = ranks_of(read(path), number);
  } while (!ranks[last].contains("error") && std::chrono::steady_clock::now() < until);
  EXPECT_EQ(ranks[0].at("state"), "not issued");
  EXPECT_EQ(ranks[last].at("state"), "not called");
  EXPECT_EQ(ranks[last].at("error"), "cancelled");
}

TEST(FlightRecord, IsAMessageToo) {
  folder where;
  test_system system;
  auto w = system.open_world();
  must(answer_of(w.barrier()));
  for (auto& to : {w.actor(), must(w.device_of(0).actor())}) {
    auto path = where.file("record" + std::to_string(to.id()) + ".json");
    EXPECT_TRUE(is_ok(ask<void>(system, to, record_flight{path, {}})));
    EXPECT_EQ(read(path).at("devices").size(), w.size());
    auto told = run_tool(path);
    EXPECT_EQ(told.status, 0);
    EXPECT_THAT(told.output, HasSubstr("every recorded operation is over; no rank is behind."));
    EXPECT_TRUE(has_code(ask<void>(system, to, record_flight{}), errc::invalid_argument));
  }
}

TEST(FlightRecord, SaysWhatEachRankMoved) {
  TROUPE_NEEDS_DEVICES(2);
  folder where;
  test_system system{{.devices = 2}};
  auto w = system.open_world();
  auto of_rank = [&](std::size_t rank, std::size_t elements) {
    return must(answer_of(w.device_of(rank).allocate(dtype::int8, elements)));
  };
  std::vector<any_gpu_ref> send{of_rank(0, 3), of_rank(1, 6)};
  std::vector<any_gpu_ref> recv{of_rank(0, 5), of_rank(1, 4)};
  auto op = w.all_to_all_v(send, recv, {{1, 2}, {4, 2}});
  must(answer_of(op));
  auto path = where.file("record.json");
  ASSERT_TRUE(is_ok(answer_of(write_flight_record(system, path))));
  auto ranks = ranks_of(read(path), op.number());
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[0].at("count"), 3);
  EXPECT_EQ(ranks[1].at("count"), 6);
  for (auto& [rank, x] : ranks) {
    EXPECT_EQ(x.at("dtype"), "int8");
    EXPECT_EQ(x.at("state"), "done");
    EXPECT_LE(x.at("admitted"), x.at("issued"));
    EXPECT_LE(x.at("issued"), x.at("over"));
    ASSERT_EQ(x.at("refs").size(), 2u);
    EXPECT_EQ(x.at("refs")[0].at("access"), "r");
    EXPECT_EQ(x.at("refs")[1].at("access"), "w");
  }
}

TEST(FlightRecord, SaysWhyItCannotBeWritten) {
  folder where;
  test_system system{{.devices = 1}};
  auto path = where.file("missing/record.json");
  auto why = error_of(answer_of(write_flight_record(system, path)));
  ASSERT_TRUE(has_code(why, errc::unavailable));
  EXPECT_EQ(failure_of(why)->native_code, ENOENT);
  EXPECT_THAT(describe(why), HasSubstr(path));
  fs::create_directory(where.file("folder"));
  why = error_of(answer_of(write_flight_record(system, where.file("folder"))));
  EXPECT_EQ(failure_of(why)->native_code, EISDIR);
  EXPECT_EQ(where.names(), std::set<std::string>{"folder"}); // no partial file is left
  EXPECT_TRUE(
      has_code(answer_of(write_flight_record(system, where.file("late"), {.deadline = -1ns})),
               errc::deadline_exceeded));
  caf::actor_system_config plain;
  caf::actor_system other{plain};
  EXPECT_TRUE(has_code(answer_of(write_flight_record(other, path)), errc::invalid_argument));
}

TEST(FlightRecord, OpensNothingThatIsInItsWay) {
  folder where;
  test_system system{{.devices = 1}};
  const auto path = where.file("record.json");
  const auto victim = where.write("victim", "precious");
  for (int i = 0; i < 200; ++i) { // names that can be predicted
    const auto name = path + "." + std::to_string(getpid()) + "-" + std::to_string(i) + ".part";
    if (i % 2 == 0)
      fs::create_symlink(victim, name);
    else
      make_fifo(name);
  }
  auto names = where.names();
  for (int i = 0; i < 4; ++i)
    must(answer_of(write_flight_record(system, path)));
  EXPECT_EQ(read(path).at("format"), "troupe flight record");
  EXPECT_EQ(mode_of(path), S_IFREG | 0600U);
  EXPECT_EQ(content(victim), "precious");
  names.insert("record.json");
  EXPECT_EQ(where.names(), names);
}

TEST(FlightRecord, IsALineOfTheLogIfSomethingElseHasItsName) {
  TROUPE_HOST_ONLY("a fault plan");
  folder where;
  const auto path = where.file("record.json");
  make_fifo(path);
  log_lines lines;
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan, .flight_record = {.path = path}}};
  const auto text = "cannot write the flight record " + path + ": it is not a regular file";
  const auto why = error_of(answer_of(write_flight_record(system, path)));
  EXPECT_TRUE(has_code(why, errc::unavailable));
  EXPECT_THAT(describe(why), HasSubstr(text));
  auto w = system.open_world(hasty());
  plan->add({fault::hang, verb::collective, 1});
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(zeros(w))), errc::stalled));
  EXPECT_TRUE(lines.say("a flight record is lost: " + text));
  world_feed feed{system, w.actor()};
  feed.until(world_phase::ready, 2);
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(S_ISFIFO(mode_of(path)));
}

// One record for each cause, independent of how much it ends. The number of files is bounded.
TEST(FlightRecord, IsWrittenOncePerCause) {
  TROUPE_HOST_ONLY("a fault plan");
  folder where;
  auto path = where.file("record-%p.json");
  {
    auto plan = std::make_shared<fault_plan>();
    test_system system{{.devices = 3, .faults = plan, .flight_record = {.path = path}}};
    auto a = system.open_world();
    auto b = system.open_world();
    plan->add({fault::poison, verb::collective, 1});
    EXPECT_TRUE(has_code(answer_of(a.all_reduce(zeros(a))), errc::device_fault));
    EXPECT_FALSE(is_ok(answer_of(b.barrier())));
    device_feed feed{system, system.device_actor()};
    feed.until(device_phase::failed);
    // A record can be requested when all other requests fail.
    EXPECT_TRUE(is_ok(answer_of(write_flight_record(system, where.file("asked.json")))));
  }
  auto name = "record-" + std::to_string(getpid()) + ".json";
  EXPECT_EQ(where.names(), (std::set<std::string>{"asked.json", name}));
  EXPECT_EQ(read(where.file(name)).at("cause").at("code"), "device_fault");
  EXPECT_EQ(read(where.file("asked.json")).at("devices")[0].at("phase"), "failed");
}

TEST(FlightRecord, KeepsTheFirstAndTheLast) {
  TROUPE_HOST_ONLY("a fault plan");
  folder where;
  std::vector<std::uint64_t> stalled;
  {
    auto plan = std::make_shared<fault_plan>();
    test_system system{
        {.faults = plan, .flight_record = {.path = where.file("record.json"), .files = 2}}};
    auto w = system.open_world(hasty());
    for (int i = 0; i < 3; ++i) {
      plan->add({fault::hang, verb::collective, 1});
      auto refs = zeros(w);
      auto sum = w.all_reduce(refs);
      stalled.push_back(sum.number());
      EXPECT_TRUE(has_code(answer_of(sum), errc::stalled));
      world_feed feed{system, w.actor()};
      feed.until(world_phase::ready, static_cast<std::uint64_t>(i) + 2);
    }
  }
  EXPECT_EQ(where.names(), (std::set<std::string>{"record.json", "record.json.2"}));
  auto cause_in = [&](const char* name) {
    return read(where.file(name)).at("cause").at("operation").get<std::uint64_t>();
  };
  EXPECT_EQ(cause_in("record.json"), stalled[0]);
  EXPECT_EQ(cause_in("record.json.2"), stalled[2]);
}

TEST(FlightRecord, NamesALaneThatIsStuckInItsCall) {
  TROUPE_HOST_ONLY("a fault plan");
  TROUPE_IN_PROCESS_ONLY("there the worker of such a device is given up");
  folder where;
  {
    auto plan = std::make_shared<fault_plan>();
    test_system system{
        {.devices = 3, .faults = plan, .flight_record = {.path = where.file("record.json")}}};
    auto config = hasty();
    config.limits.quiet_limit = 50ms;
    auto w = system.open_world(config);
    world_feed feed{system, w.actor()};
    plan->add({fault::block, verb::collective, 1});
    EXPECT_TRUE(has_code(answer_of(w.all_reduce(zeros(w))), errc::stalled));
    EXPECT_TRUE(has_code(feed.until(world_phase::failed).reason, errc::lane_stuck));
    // Before the lane returns from the call.
    ASSERT_TRUE(is_ok(answer_of(write_flight_record(system, where.file("asked.json")))));
    plan->release();
  }
  EXPECT_EQ(where.names(), (std::set<std::string>{"asked.json", "record.json", "record.json.2"}));
  EXPECT_EQ(read(where.file("record.json")).at("cause").at("code"), "stalled");
  EXPECT_EQ(read(where.file("record.json.2")).at("cause").at("code"), "lane_stuck");
  for (auto* name : {"record.json", "asked.json"}) {
    auto told = run_tool(where.file(name));
    EXPECT_THAT(told.output, HasSubstr("rank 1 (device 1) is behind in all_reduce #"));
    EXPECT_THAT(told.output, HasSubstr(": issuing, while ranks 0, 2 are started."));
  }
  EXPECT_THAT(run_tool(where.file("asked.json")).output,
              HasSubstr("device 1 has been inside the call that issues it for "));
}

TEST(FlightRecord, WhatSomebodyAskedForIsNoFailure) {
  TROUPE_HOST_ONLY("its streams are held");
  folder where;
  {
    test_system system{{.flight_record = {.path = where.file("record.json")}}};
    auto w = system.open_world();
    gate held;
    auto refs = zeros(w);
    auto launched = held.hold_stream(w.device_of(1), {}, {refs[1]});
    auto sum = w.all_reduce(refs);
    auto reset = w.device_of(0).reset();
    EXPECT_TRUE(has_code(answer_of(sum), errc::device_reset));
    held.open();
    EXPECT_TRUE(is_ok(answer_of(reset)));
    EXPECT_TRUE(works(w));
  }
  EXPECT_TRUE(where.names().empty());
}

// -- files that are not flight records

TEST(FlightTool, SaysWhatIsWrong) {
  folder where;
  auto expect = [&](const std::string& arguments, const std::string& text) {
    auto told = run_tool(arguments);
    EXPECT_NE(told.status, 0) << told.output;
    EXPECT_THAT(told.output, HasSubstr(text));
    EXPECT_THAT(told.output, Not(HasSubstr("terminate")));
  };
  auto missing = where.file("missing.json");
  expect(missing, "cannot read " + missing + ": No such file or directory");
  auto text = where.write("text", "no JSON");
  expect(text, text + " is not JSON: ");
  auto empty = where.write("empty", "");
  expect(empty, empty + " is not JSON: ");
  for (auto* what : {"[]", "{}", "17", R"({"format": "something else"})"}) {
    auto other = where.write("other.json", what);
    expect(other, other + " is JSON, but no flight record of troupe");
  }
  auto newer = where.write("newer.json", R"({"format": "troupe flight record", "version": 7})");
  expect(newer, newer + " has version 7 of the form; this program reads version 1");
  auto half = where.write("half.json", R"({"format": "troupe flight record", "version": 1})");
  expect(half, half + " is no right flight record: \"host\" is missing");
  expect(where.file("."), "cannot read " + where.file(".") + ": Is a directory");
  expect("", "file is required");
}

TEST(FlightTool, RefusesWhatHasTheWrongForm) {
  folder where;
  auto path = where.file("record.json");
  {
    test_system system{{.devices = 1}};
    must(system.open().allocate<float>(1));
    must(answer_of(write_flight_record(system, path)));
  }
  auto record = read(path);
  ASSERT_FALSE(record["devices"][0]["operations"].empty());
  record["devices"][0]["operations"][0]["state"] = "asleep";
  auto wrong = where.write("wrong.json", record.dump());
  auto told = run_tool(wrong);
  EXPECT_EQ(told.status, 1);
  EXPECT_THAT(told.output, HasSubstr("\"asleep\" is no state of an operation"));
  told = run_tool(path + " --trace " + where.file("missing/trace.json"));
  EXPECT_EQ(told.status, 1);
  EXPECT_THAT(told.output, AllOf(HasSubstr("cannot write"), HasSubstr("No such file")));
}

} // namespace

} // namespace troupe::testing
