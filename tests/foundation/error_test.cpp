/// Codes, severities, and the text of a failure.
#include "foundation/error_text.hpp"
#include "support/expect.hpp"
#include <troupe/error.hpp>

#include <caf/pec.hpp>
#include <caf/sec.hpp>

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace troupe {

namespace {

/// Expected severities, independent of the library's own table.
const std::map<errc, std::pair<std::string, severity>> table{
    {errc::invalid_argument, {"invalid_argument", severity::operation}},
    {errc::shape_mismatch, {"shape_mismatch", severity::operation}},
    {errc::out_of_range, {"out_of_range", severity::operation}},
    {errc::stale_ref, {"stale_ref", severity::operation}},
    {errc::skipped, {"skipped", severity::operation}},
    {errc::indeterminate, {"indeterminate", severity::operation}},
    {errc::buffer_acquired, {"buffer_acquired", severity::retry}},
    {errc::membership_changed, {"membership_changed", severity::retry}},
    {errc::collective_mismatch, {"collective_mismatch", severity::communicator}},
    {errc::out_of_memory, {"out_of_memory", severity::operation}},
    {errc::deadline_exceeded, {"deadline_exceeded", severity::operation}},
    {errc::cancelled, {"cancelled", severity::operation}},
    {errc::overloaded, {"overloaded", severity::retry}},
    {errc::unavailable, {"unavailable", severity::operation}},
    {errc::would_block, {"would_block", severity::operation}},
    {errc::not_supported, {"not_supported", severity::operation}},
    {errc::launch_failed, {"launch_failed", severity::operation}},
    {errc::cuda_error, {"cuda_error", severity::operation}},
    {errc::link_failed, {"link_failed", severity::operation}},
    {errc::device_reset, {"device_reset", severity::device}},
    {errc::device_failed, {"device_failed", severity::device}},
    {errc::worker_lost, {"worker_lost", severity::device}},
    {errc::nccl_error, {"nccl_error", severity::communicator}},
    {errc::stalled, {"stalled", severity::communicator}},
    {errc::communicator_dead, {"communicator_dead", severity::communicator}},
    {errc::rank_not_issued, {"rank_not_issued", severity::communicator}},
    {errc::device_fault, {"device_fault", severity::process}},
    {errc::lane_stuck, {"lane_stuck", severity::process}},
    {errc::internal, {"internal", severity::operation}},
};

failure full() {
  failure x;
  x.code = errc::nccl_error;
  x.detail = "the link is down";
  x.verb = "all_reduce";
  x.api = "ncclAllReduce";
  x.native_name = "ncclSystemError";
  x.native_code = 2;
  x.device = 3;
  x.rank = 5;
  x.operation = 17;
  x.epoch = 7;
  x.generation = 4;
  x.parts = {part_state::not_issued, part_state::issued, part_state::started, part_state::done};
  x.cause = errc::worker_lost;
  return x;
}

void expect_same(const failure& a, const failure& b) {
  EXPECT_EQ(a.code, b.code);
  EXPECT_EQ(a.detail, b.detail);
  EXPECT_EQ(a.verb, b.verb);
  EXPECT_EQ(a.api, b.api);
  EXPECT_EQ(a.native_name, b.native_name);
  EXPECT_EQ(a.native_code, b.native_code);
  EXPECT_EQ(a.device, b.device);
  EXPECT_EQ(a.rank, b.rank);
  EXPECT_EQ(a.operation, b.operation);
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.generation, b.generation);
  EXPECT_EQ(a.parts, b.parts);
  EXPECT_EQ(a.cause, b.cause);
}

TEST(Error, HasATextAndASeverityForEachCode) {
  std::set<std::string> texts;
  for (auto& [code, expected] : table) {
    EXPECT_EQ(to_string(code), expected.first);
    EXPECT_EQ(severity_of(code), expected.second) << expected.first;
    EXPECT_EQ(severity_of(make_error(code, "why")), expected.second) << expected.first;
    texts.insert(std::string{to_string(code)});
  }
  EXPECT_EQ(texts.size(), table.size());
  for (int i = 0; i < 256; ++i) { // no other code has a name
    const auto code = static_cast<errc>(i);
    EXPECT_EQ(to_string(code) != "unknown", table.contains(code)) << i;
  }
  EXPECT_EQ(table.size(), static_cast<std::size_t>(errc::internal));
  EXPECT_EQ(severity_of(caf::error{}), std::nullopt);
  EXPECT_EQ(severity_of(caf::make_error(caf::sec::request_receiver_down)), std::nullopt);
}

TEST(Error, NamesSeveritiesAndParts) {
  EXPECT_EQ(to_string(severity::retry), "retry");
  EXPECT_EQ(to_string(severity::operation), "operation");
  EXPECT_EQ(to_string(severity::communicator), "communicator");
  EXPECT_EQ(to_string(severity::device), "device");
  EXPECT_EQ(to_string(severity::process), "process");
  EXPECT_EQ(to_string(part_state::not_issued), "not issued");
  EXPECT_EQ(to_string(part_state::issued), "issued");
  EXPECT_EQ(to_string(part_state::started), "started");
  EXPECT_EQ(to_string(part_state::done), "done");
}

TEST(Error, TellsAllFieldsInOneSentence) {
  EXPECT_EQ(to_string(full()),
            "all_reduce #17: nccl_error (rank 5, device 3, generation 4, epoch 7): the link is "
            "down; ncclAllReduce gave "
            "ncclSystemError (2); ranks: 0 not issued, 1 issued, 2 started, 3 done");
}

TEST(Error, TellsOnlyTheFieldsThatApply) {
  EXPECT_EQ(to_string(failure{}), "internal");
  failure x;
  x.code = errc::out_of_memory;
  x.device = 0;
  EXPECT_EQ(to_string(x), "out_of_memory (device 0)");
  x.verb = "allocate";
  x.detail = "no room";
  EXPECT_EQ(to_string(x), "allocate: out_of_memory (device 0): no room");
  x.api = "cudaMallocAsync";
  x.native_code = 2;
  EXPECT_EQ(to_string(x), "allocate: out_of_memory (device 0): no room; cudaMallocAsync gave 2");
}

// INV-10
TEST(Error, KeepsEveryField) {
  const auto told = failure_of(make_error(full()));
  ASSERT_TRUE(told);
  expect_same(*told, full());
  EXPECT_EQ(describe(make_error(full())), to_string(full()));
  for (auto& [code, expected] : table) {
    const auto e = make_error(code, "text");
    EXPECT_EQ(code_of(e), code);
    EXPECT_EQ(failure_of(e)->code, code);
    EXPECT_EQ(failure_of(e)->detail, "text");
  }
}

TEST(Error, TellsTheCause) {
  EXPECT_EQ(cause_of(make_error(full())), errc::nccl_error);
  for (auto code : {errc::indeterminate, errc::skipped})
    EXPECT_EQ(cause_of(make_error({.code = code, .cause = errc::worker_lost})), errc::worker_lost);
  EXPECT_EQ(cause_of(caf::error{}), std::nullopt);
  EXPECT_EQ(cause_of(caf::error{caf::sec::request_timeout}), std::nullopt);
}

TEST(Error, KnowsItsOwnFromOthers) {
  EXPECT_FALSE(code_of(caf::error{}));
  EXPECT_FALSE(failure_of(caf::error{}));
  EXPECT_EQ(describe(caf::error{}), "success");
  const caf::error foreign{caf::sec::request_timeout};
  EXPECT_FALSE(code_of(foreign));
  EXPECT_FALSE(failure_of(foreign));
  EXPECT_NE(describe(foreign).find("request_timeout"), std::string::npos);
}

TEST(Error, SaysWhatErrorsOfCafMean) {
  const auto text = [](auto code, auto... context) {
    return describe(caf::make_error(code, std::move(context)...));
  };
  EXPECT_EQ(text(caf::pec::not_an_option, std::string{"--troupe.devcies=2"}),
            "command line: --troupe.devcies=2: the option is unknown");
  EXPECT_EQ(text(caf::pec::missing_argument, std::string{"--troupe.devices"}),
            "command line: --troupe.devices: the option needs a value");
  for (auto code :
       {caf::pec::type_mismatch, caf::pec::unexpected_character, static_cast<caf::pec>(15)})
    EXPECT_EQ(text(code, std::string{"--troupe.devices=two"}),
              "command line: --troupe.devices=two: the value is malformed or of another type");
  EXPECT_EQ(text(caf::pec::integer_overflow, std::string{"--troupe.devices=99"}),
            "command line: --troupe.devices=99: the number is too large");
  EXPECT_EQ(text(caf::pec::unexpected_eof),
            "command line or configuration file: the value is malformed or of another type");
  EXPECT_EQ(text(caf::sec::unexpected_message),
            "the actor does not understand this message (unexpected_message)");
  EXPECT_EQ(text(caf::sec::request_receiver_down), "the actor has ended (request_receiver_down)");
  EXPECT_EQ(text(caf::sec::request_timeout), "the actor did not respond in time (request_timeout)");
  // A code without a text of the library has CAF's text.
  EXPECT_NE(text(caf::sec::no_context).find("no_context"), std::string::npos);
}

TEST(Error, CanDoWithoutAContext) {
  const caf::error bare{errc::stalled};
  const auto told = failure_of(bare);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->code, errc::stalled);
  EXPECT_TRUE(told->detail.empty());
  EXPECT_EQ(describe(bare), "stalled");
}

TEST(Error, FirstOfSeveralIsKept) {
  caf::error first;
  detail::keep_first(first, {});
  EXPECT_FALSE(first);
  detail::keep_first(first, make_error(errc::stalled, "one"));
  detail::keep_first(first, make_error(errc::internal, "two"));
  detail::keep_first(first, {});
  EXPECT_EQ(describe(first), "stalled: one");
}

} // namespace

} // namespace troupe
