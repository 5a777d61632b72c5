// Communicators of the host backend with ranks in several processes. Most tests use several
// backends in one process instead: they are as separate as processes are.

#include "backend/host/host_wire.hpp"
#include "support/backend_fixture.hpp"
#include "support/child_process.hpp"
#include "support/collective_runs.hpp"
#include "support/entries_of.hpp"
#include "support/hostile_text.hpp"
#include "support/reference.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

namespace troupe {

namespace {

using namespace std::chrono_literals;
using testing::collective_run;
using testing::collectives;
using testing::entries_of;
using testing::group_run;
using testing::has_code;
using testing::is_ok;
using testing::message_run;
using testing::must;
using testing::opened_device;
using testing::random_group;
using testing::reduce_ops;
using testing::running_child;
using testing::stream_gate;
using testing::tell;

using clock = std::chrono::steady_clock;
using enum collective_kind;
using memory = collective_run::memory;

constexpr auto here = "127.0.0.1";

/// Upper bound for fast steps on a machine that is busy with other work.
constexpr std::chrono::nanoseconds patience = 20s;

/// The ranks of each backend.
using layout = std::vector<std::vector<int>>;

int ranks_of(const layout& x) {
  return std::accumulate(x.begin(), x.end(), 0, [](int sum, const auto& ranks) {
    return sum + static_cast<int>(ranks.size());
  });
}

std::string name_of(const layout& x) {
  std::string result = "Ranks";
  for (const auto& ranks : x) {
    for (const auto rank : ranks)
      result += std::to_string(rank);
    if (&ranks != &x.back())
      result += "And";
  }
  return result;
}

/// The ranks of one backend, on devices 0, 1 ...
struct party {
  party(const std::vector<int>& its_ranks, std::string listen_address)
      : host(make_host_backend({.devices = std::max(1, static_cast<int>(its_ranks.size())),
                                .bytes_per_device = std::size_t{1} << 32,
                                .listen_address = std::move(listen_address)})),
        devices(testing::open_all(*host)) {
    for (int i = 0; i < static_cast<int>(its_ranks.size()); ++i)
      ranks.push_back({its_ranks[static_cast<std::size_t>(i)], i});
  }

  std::shared_ptr<backend> host;
  std::vector<opened_device> devices;
  std::vector<local_rank> ranks;
  communicator_ranks communicator; ///< in the order of `ranks`
};

/// A communicator whose ranks are spread over several backends. The first backend has the hub.
class spread {
public:
  enum state { built, unbuilt };

  explicit spread(const layout& of, state x = built) : size_(ranks_of(of)) {
    for (const auto& ranks : of)
      parties_.push_back(std::make_unique<party>(ranks, parties_.empty() ? here : ""));
    if (x == built)
      build();
  }

  void build() { build(must(parties_.front()->host->make_communicator_id())); }

  void build(const communicator_id& id) {
    std::vector<std::thread> builders;
    std::vector<caf::error> errors(parties_.size());
    for (std::size_t i = 0; i < parties_.size(); ++i)
      builders.emplace_back([&, i] {
        auto& x = *parties_[i];
        if (x.ranks.empty())
          return;
        auto made = x.host->build(id, size_, x.ranks);
        if (made)
          x.communicator = std::move(*made);
        else
          errors[i] = made.error();
      });
    for (auto& x : builders)
      x.join();
    for (const auto& x : errors)
      must(x);
  }

  int size() const { return size_; }
  party& of(std::size_t i) { return *parties_[i]; }
  std::vector<std::unique_ptr<party>>& parties() { return parties_; }

  backend_communicator& rank(int r) { return *place_of(r).first->communicator[place_of(r).second]; }
  opened_device& device(int r) { return place_of(r).first->devices[place_of(r).second]; }

  caf::error enqueue(int r, std::span<const collective_call> calls) {
    return rank(r).enqueue(calls, device(r).stream);
  }
  caf::error enqueue(int r, const collective_call& call) { return enqueue(r, {&call, 1}); }

  void enqueue_all(collective_run& run) {
    for (int r = 0; r < size_; ++r)
      ASSERT_TRUE(is_ok(enqueue(r, run.call(r))));
  }
  void drain_all() {
    for (int r = 0; r < size_; ++r)
      device(r).drain();
  }
  void expect_alive() {
    for (int r = 0; r < size_; ++r)
      EXPECT_TRUE(is_ok(rank(r).asynchronous_error())) << "rank " << r;
  }

  /// Runs a small collective and expects correct results.
  void expect_working() {
    collective_run run{{.what = all_reduce, .type = dtype::int32, .count = 100, .ranks = size_},
                       memory::apart};
    ASSERT_NO_FATAL_FAILURE(enqueue_all(run));
    drain_all();
    expect_alive();
    ASSERT_NO_FATAL_FAILURE(run.expect_right());
  }

  caf::error abort(std::size_t i) {
    return parties_[i]->host->abort(std::exchange(parties_[i]->communicator, {}));
  }
  caf::error destroy(std::size_t i) {
    return parties_[i]->host->destroy(std::exchange(parties_[i]->communicator, {}));
  }
  void destroy_all() {
    for (std::size_t i = 0; i < parties_.size(); ++i)
      EXPECT_TRUE(is_ok(destroy(i)));
  }

private:
  std::pair<party*, std::size_t> place_of(int r) {
    for (auto& x : parties_)
      for (std::size_t i = 0; i < x->ranks.size(); ++i)
        if (x->ranks[i].rank == r)
          return {x.get(), i};
    throw std::runtime_error("no rank " + std::to_string(r));
  }

  int size_;
  std::vector<std::unique_ptr<party>> parties_;
};

/// Blocks until `so` is true. Returns false after `limit`. Polls, because there is no notification.
bool becomes(const std::function<bool()>& so, std::chrono::nanoseconds limit = patience) {
  const auto until = clock::now() + limit;
  while (!so()) {
    if (clock::now() >= until)
      return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

/// Returns the error that ends the rank's communicator.
caf::error end_of(backend_communicator& x) {
  becomes([&] { return static_cast<bool>(x.asynchronous_error()); });
  return x.asynchronous_error();
}

::testing::AssertionResult names_rank(const caf::error& e, errc code, int rank) {
  if (auto result = has_code(e, code); !result)
    return result;
  if (failure_of(e)->rank == rank)
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "wanted rank " << rank << ": " << describe(e);
}

/// Resources of the operating system that this process holds.
struct holdings {
  std::size_t files = entries_of("/proc/self/fd");
  std::size_t threads = entries_of("/proc/self/task");
  friend bool operator==(const holdings&, const holdings&) = default;
};

std::ostream& operator<<(std::ostream& to, const holdings& x) {
  return to << x.files << " files, " << x.threads << " threads";
}

/// A hub releases a rank as soon as it sees its end. A joined thread may still be listed for a
/// moment, so this waits.
void expect_to_hold(const holdings& want) {
  becomes([&] { return holdings{} == want; });
  EXPECT_EQ(holdings{}, want);
}

// -- right results

class HostTransport : public ::testing::TestWithParam<std::tuple<layout, collective_kind>> {};

const std::array layouts{layout{{0}, {1}}, layout{{}, {0, 1}, {2}}, layout{{3, 1}, {2}, {0}}};

INSTANTIATE_TEST_SUITE_P(All, HostTransport,
                         ::testing::Combine(::testing::ValuesIn(layouts),
                                            ::testing::ValuesIn(collectives)),
                         [](const auto& x) {
                           return name_of(std::get<0>(x.param)) + "_" +
                                  std::string{to_string(std::get<1>(x.param))};
                         });

TEST(HostWire, AnErrorOfAPeerIsOneLine) {
  const auto sent = detail::wire_of(
      make_error({.code = errc::nccl_error, .detail = testing::hostile_text(), .verb = "a\nb"}));
  const auto got = detail::error_of(sent);
  ASSERT_TRUE(got);
  const auto why = failure_of(*got);
  EXPECT_TRUE(why->detail.starts_with(testing::hostile_begin)) << why->detail;
  EXPECT_TRUE(testing::is_one_line(why->detail));
  EXPECT_EQ(why->verb, "a\\nb");
}

TEST_P(HostTransport, GivesEachRankWhatItMustHave) {
  const auto& [where, what] = GetParam();
  spread ranks{where};
  std::uint64_t seed = 1;
  for (const auto type : real_dtypes)
    for (const std::size_t count : {0, 1, 7, 1'000})
      for (int root = 0; root < (has_root(what) ? ranks.size() : 1); ++root)
        for (const auto place : {memory::apart, memory::in_place}) {
          ++seed;
          if (what == barrier && seed > 10)
            continue;
          collective_run run{
              {.what = what,
               .type = type,
               .count = count,
               .ranks = ranks.size(),
               .op = reduce_ops[seed % reduce_ops.size()],
               .root = root,
               .seed = seed,
               .kind = seed % 5 < 2 ? testing::input_kind::any : testing::input_kind::exact},
              place};
          ASSERT_NO_FATAL_FAILURE(ranks.enqueue_all(run));
          ranks.drain_all();
          ASSERT_NO_FATAL_FAILURE(run.expect_right());
        }
  ranks.expect_alive();
  ranks.destroy_all();
}

TEST_P(HostTransport, GivesEachRankAMillionElements) {
  const auto& [where, what] = GetParam();
  spread ranks{where};
  for (const auto type : {dtype::uint8, dtype::float32}) {
    collective_run run{{.what = what,
                        .type = type,
                        .count = std::size_t{1} << 20,
                        .ranks = ranks.size(),
                        .root = ranks.size() - 1,
                        .seed = 3},
                       type == dtype::uint8 ? memory::apart : memory::in_place};
    ASSERT_NO_FATAL_FAILURE(ranks.enqueue_all(run));
    ranks.drain_all();
    ASSERT_NO_FATAL_FAILURE(run.expect_right());
  }
  ranks.expect_alive();
  ranks.destroy_all();
}

TEST(HostTransportGroups, OfAnyPatternGetThroughAlsoOverSeveralStreams) {
  for (unsigned seed = 1; seed <= 6; ++seed) {
    std::mt19937 random{seed};
    spread ranks{layouts[seed % layouts.size()]};
    std::vector<stream_view> more;
    for (int r = 0; r < ranks.size(); ++r)
      more.push_back(must(ranks.device(r)->create_stream()));
    std::vector<group_run> groups;
    for (int i = 0; i < 60; ++i)
      groups.push_back(random_group(ranks.size(), random));
    for (int r = 0; r < ranks.size(); ++r)
      for (auto& group : groups) {
        const auto calls = group.calls(r, random);
        const auto stream =
            random() % 4 == 0 ? more[static_cast<std::size_t>(r)] : ranks.device(r).stream;
        if (!calls.empty()) {
          ASSERT_TRUE(is_ok(ranks.rank(r).enqueue(calls, stream)));
        }
      }
    for (int r = 0; r < ranks.size(); ++r) {
      auto& x = ranks.device(r);
      x.drain();
      ASSERT_TRUE(is_ok(x->record(x.end, more[static_cast<std::size_t>(r)])));
      ASSERT_TRUE(is_ok(x->synchronize(x.end)));
    }
    ranks.expect_alive();
    for (const auto& group : groups)
      ASSERT_NO_FATAL_FAILURE(group.expect_right()) << "seed " << seed;
    ranks.destroy_all();
  }
}

TEST(HostTransportGroups, EveryRankSendsToEveryRankAndToItself) {
  spread ranks{layouts[2]};
  std::mt19937 random{17};
  for (const auto type : real_dtypes)
    for (const std::size_t count : {0, 1, 1'000}) {
      group_run run;
      for (int from = 0; from < ranks.size(); ++from)
        for (int to = 0; to < ranks.size(); ++to)
          run.messages.push_back(std::make_unique<message_run>(from, to, type, count, random));
      for (int r = 0; r < ranks.size(); ++r)
        ASSERT_TRUE(is_ok(ranks.enqueue(r, run.calls(r, random))));
      ranks.drain_all();
      ASSERT_NO_FATAL_FAILURE(run.expect_right());
    }
  ranks.destroy_all();
}

TEST(HostTransportGroups, MoreThanGoesOverAConnectionIsRefused) {
  spread ranks{{{0}, {1}}};
  std::array<float, 2> some{};
  const collective_call huge{
      .send = some.data(), .recv = some.data(), .count = std::size_t{1} << 36};
  EXPECT_TRUE(has_code(ranks.enqueue(0, huge), errc::not_supported));
  const std::vector<collective_call> many(detail::most_calls + 1, {.what = barrier});
  EXPECT_TRUE(has_code(ranks.enqueue(0, many), errc::not_supported));
  ASSERT_NO_FATAL_FAILURE(ranks.expect_working());
  ranks.destroy_all();
}

// -- mismatched calls

TEST(HostTransportMismatch, IsNamedOnEveryRankAsInOneProcess) {
  const std::vector<std::pair<collective_call, collective_call>> cases{
      {{.what = all_reduce, .count = 2, .type = dtype::float32},
       {.what = broadcast, .count = 2, .type = dtype::float32}},
      {{.what = all_reduce, .count = 2, .type = dtype::float32},
       {.what = all_reduce, .count = 3, .type = dtype::float32}},
      {{.what = reduce, .count = 2, .type = dtype::int32, .peer = 0},
       {.what = reduce, .count = 2, .type = dtype::int32, .peer = 2}},
      {{.what = reduce_scatter, .count = 10'000, .type = dtype::int32},
       {.what = reduce_scatter, .count = 10'000, .type = dtype::int32, .op = reduce_op::max}},
      {{.what = barrier}, {.what = all_gather, .count = 1}}};
  for (const auto& [usual, other] : cases) {
    std::vector<std::string> texts;
    for (const auto& where : {layout{{0, 1, 2}}, layout{{0}, {1}, {2}}}) {
      spread ranks{where};
      std::vector<std::vector<std::byte>> sends(3, std::vector<std::byte>(200'000));
      auto recvs = sends;
      for (int r = 0; r < 3; ++r) {
        auto call = r == 1 ? other : usual;
        call.send = sends[static_cast<std::size_t>(r)].data();
        call.recv = recvs[static_cast<std::size_t>(r)].data();
        ASSERT_TRUE(is_ok(ranks.enqueue(r, call)));
      }
      ranks.drain_all();
      for (int r = 0; r < 3; ++r) {
        const auto err = ranks.rank(r).asynchronous_error();
        ASSERT_TRUE(names_rank(err, errc::collective_mismatch, 1));
        texts.push_back(describe(err));
        EXPECT_TRUE(has_code(ranks.enqueue(r, {.what = barrier}), errc::collective_mismatch));
      }
      EXPECT_EQ(recvs, sends); // no output is written
    }
    EXPECT_EQ(texts, std::vector<std::string>(texts.size(), texts.front()));
  }
}

TEST(HostTransportMismatch, OfAMessageIsNamed) {
  spread ranks{{{0}, {1}, {2}}};
  std::array<float, 5> some{};
  ASSERT_TRUE(is_ok(ranks.enqueue(
      0, {.what = send, .send = some.data(), .count = 4, .type = dtype::float32, .peer = 1})));
  ASSERT_TRUE(is_ok(ranks.enqueue(
      1, {.what = recv, .recv = some.data(), .count = 5, .type = dtype::float32, .peer = 0})));
  for (int r = 0; r < 3; ++r)
    EXPECT_TRUE(names_rank(end_of(ranks.rank(r)), errc::collective_mismatch, 1));
}

// -- how ranks connect

/// Connects to the hub and sends the hello of a rank that knows the id.
detail::file_descriptor knock(const communicator_id& id, int size, int rank) {
  const auto where = *detail::invitation_of(id);
  auto result = must(detail::connect_to(where.hub, clock::now() + patience));
  const detail::wire_hello hello{
      .secret = where.secret, .group = where.group, .size = size, .rank = rank};
  const std::array blocks{detail::bytes_of(hello)};
  if (const int code = detail::send_all(result.get(), blocks); code != 0)
    throw std::runtime_error("send_all: " + std::to_string(code));
  return result;
}

/// Blocks until the hub knows a rank of a communicator that has not `size` ranks. Changes nothing.
bool wait_for_a_rank(const communicator_id& id, int size) {
  return becomes([&] {
    const auto x = knock(id, size, size); // out of range
    detail::end_frame answer;
    const std::array target{detail::writable_bytes_of(answer)};
    return detail::receive_all(x.get(), target) &&
           describe(detail::error_of(answer.why).value()).find("another rank said") !=
               std::string::npos;
  });
}

TEST(HostTransportBuild, SaysWhatIsWrongAndTheOthersStillComeTogether) {
  const auto hub = make_host_backend({.devices = 2, .listen_address = here});
  const auto other = make_host_backend({.devices = 3});
  const auto id = must(hub->make_communicator_id());
  caf::expected<communicator_ranks> first{caf::error{}};
  std::thread builder{[&] {
    const local_rank mine{0, 1};
    first = hub->build(id, 2, {&mine, 1});
  }};
  const auto try_build = [&](int size, std::vector<local_rank> ranks) {
    const auto result = other->build(id, size, ranks);
    return result ? caf::error{} : result.error();
  };
  ASSERT_TRUE(wait_for_a_rank(id, 3));
  EXPECT_TRUE(has_code(try_build(3, {{1, 0}}), errc::invalid_argument));
  EXPECT_TRUE(has_code(try_build(2, {{0, 0}}), errc::invalid_argument));
  EXPECT_TRUE(has_code(try_build(2, {{2, 0}}), errc::invalid_argument));
  EXPECT_TRUE(has_code(try_build(2, {{-1, 0}}), errc::invalid_argument));
  EXPECT_TRUE(has_code(try_build(2, {{1, 3}}), errc::invalid_argument));
  EXPECT_TRUE(has_code(try_build(2, {{1, 0}, {0, 0}}), errc::invalid_argument));
  EXPECT_TRUE(has_code(try_build(0, {}), errc::invalid_argument));
  EXPECT_TRUE(has_code(try_build(5'000, {{1, 0}}), errc::not_supported));
  const local_rank last{1, 2};
  auto second = must(other->build(id, 2, {&last, 1}));
  builder.join();
  auto ranks = must(std::move(first));
  EXPECT_TRUE(is_ok(second.front()->asynchronous_error()));
  EXPECT_TRUE(is_ok(other->destroy(std::move(second))));
  EXPECT_TRUE(is_ok(hub->destroy(std::move(ranks))));
}

TEST(HostTransportBuild, FailsWhenItsHubGoes) {
  auto hub = make_host_backend({.devices = 1, .listen_address = here});
  const auto other = make_host_backend({.devices = 1});
  const auto id = must(hub->make_communicator_id());
  const local_rank mine{0, 0};
  caf::error err;
  std::thread builder{[&] {
    const auto result = other->build(id, 2, {&mine, 1});
    err = result ? caf::error{} : result.error();
  }};
  ASSERT_TRUE(wait_for_a_rank(id, 3));
  hub.reset();
  builder.join();
  EXPECT_TRUE(has_code(err, errc::nccl_error));
  const auto late = other->build(id, 2, {&mine, 1});
  EXPECT_TRUE(has_code(late, errc::nccl_error));
}

TEST(HostTransportBuild, IsCalledOffWhereItsRanksMeet) {
  const auto hub = make_host_backend({.devices = 2, .listen_address = here});
  const auto other = make_host_backend({.devices = 1});
  const auto id = must(hub->make_communicator_id());
  const auto later = must(hub->make_communicator_id());
  const local_rank mine{0, 0};
  auto waiting = std::async(std::launch::async, [&] { return other->build(id, 2, {&mine, 1}); });
  ASSERT_TRUE(wait_for_a_rank(id, 3));
  hub->call_off(id);
  EXPECT_TRUE(has_code(waiting.get(), errc::unavailable));
  const local_rank second{1, 0};
  EXPECT_TRUE(has_code(other->build(id, 2, {&second, 1}), errc::unavailable));
  hub->call_off(later); // before any rank has connected
  EXPECT_TRUE(has_code(other->build(later, 2, {&mine, 1}), errc::unavailable));
}

/// A build that a test calls off.
struct unwanted_build {
  unwanted_build(backend& x, const communicator_id& id, int size, local_rank mine)
      : result(std::async(std::launch::async, [&x, id, size, mine, this] {
          auto built = x.build(id, size, {&mine, 1});
          over = true;
          return built;
        })) {}
  /// Returns false if the build does not end within the limit.
  bool is_called_off(backend& x, const communicator_id& id) {
    return becomes([&] {
      x.call_off(id); // the build may not be waiting yet
      return over.load();
    });
  }

  std::atomic<bool> over{false};
  std::future<caf::expected<communicator_ranks>> result;
};

/// If the hub's host loses power, not even an end of the connection arrives.
TEST(HostTransportBuild, IsCalledOffWhereNothingComesOfTheHub) {
  auto at = must(detail::address_from_string(here));
  auto silent = must(detail::listen_at(at));
  detail::hub_invitation where;
  where.group = 1;
  where.hub = at;
  const auto id = detail::id_of(where);
  const auto host = make_host_backend({.devices = 1});
  unwanted_build x{*host, id, 2, {1, 0}};
  EXPECT_TRUE(x.is_called_off(*host, id));
  silent.reset(); // otherwise a build that does not end would block for ever
  EXPECT_TRUE(has_code(x.result.get(), errc::unavailable));
}

TEST(HostTransportBuild, WhoCallsItOffLeavesItsPlaceToAnother) {
  const auto hub = make_host_backend({.devices = 1, .listen_address = here});
  const auto first = make_host_backend({.devices = 1});
  const auto second = make_host_backend({.devices = 2});
  const auto id = must(hub->make_communicator_id());
  const local_rank mine{0, 0};
  auto waiting = std::async(std::launch::async, [&] { return hub->build(id, 3, {&mine, 1}); });
  unwanted_build x{*first, id, 3, {1, 0}};
  EXPECT_TRUE(x.is_called_off(*first, id));
  EXPECT_TRUE(has_code(x.result.get(), errc::unavailable));
  const std::array<local_rank, 2> others{{{1, 0}, {2, 1}}};
  auto built = must(second->build(id, 3, others));
  EXPECT_TRUE(is_ok(second->destroy(std::move(built))));
  EXPECT_TRUE(is_ok(hub->destroy(must(waiting.get()))));
}

TEST(HostTransportBuild, WhatIsWholeIsNotCalledOff) {
  const auto host = make_host_backend({.devices = 2, .listen_address = here});
  const auto id = must(host->make_communicator_id());
  const std::array<local_rank, 2> ranks{{{0, 0}, {1, 1}}};
  auto built = must(host->build(id, 2, ranks));
  host->call_off(id);
  const auto another = must(host->make_communicator_id());
  auto next = must(host->build(another, 2, ranks)); // the hub has processed the call by now
  for (auto& x : built)
    EXPECT_TRUE(is_ok(x->asynchronous_error()));
  EXPECT_TRUE(is_ok(host->destroy(std::move(built))));
  EXPECT_TRUE(is_ok(host->destroy(std::move(next))));
}

TEST(HostTransportBuild, SaysWhichAddressIsNone) {
  for (const auto* address : {"localhost", "0.0.0.0", "::", "127.0.0.1:80", "127.0.0"}) {
    const auto host = make_host_backend({.devices = 1, .listen_address = address});
    const auto id = host->make_communicator_id();
    ASSERT_TRUE(has_code(id, errc::invalid_argument)) << address;
    EXPECT_NE(failure_of(id.error())->detail.find(address), std::string::npos);
  }
  const auto host = make_host_backend({.devices = 1, .listen_address = "192.0.2.1"}); // unassigned
  const auto id = host->make_communicator_id();
  ASSERT_TRUE(has_code(id, errc::unavailable));
  EXPECT_EQ(failure_of(id.error())->native_code, EADDRNOTAVAIL);
}

TEST(HostTransportBuild, WorksOverIp6) {
  const auto host = make_host_backend({.devices = 2, .listen_address = "::1"});
  const auto id = host->make_communicator_id();
  if (!id && failure_of(id.error())->native_code == EADDRNOTAVAIL)
    GTEST_SKIP() << "this machine has no ::1";
  const std::array<local_rank, 2> ranks{{{0, 0}, {1, 1}}};
  auto built = must(host->build(must(id), 2, ranks));
  EXPECT_TRUE(is_ok(host->destroy(std::move(built))));
}

// -- ends

class HostTransportEnd : public ::testing::TestWithParam<layout> {};

INSTANTIATE_TEST_SUITE_P(All, HostTransportEnd,
                         ::testing::Values(layout{{0}, {1}, {2}}, layout{{2}, {0, 1}},
                                           layout{{}, {1}, {2, 0}}),
                         [](const auto& x) { return name_of(x.param); });

TEST_P(HostTransportEnd, AnAbortEndsItForAll) {
  spread ranks{GetParam()};
  for (std::size_t aborting = 0; aborting < GetParam().size(); ++aborting) {
    auto& mine = ranks.of(aborting).ranks;
    if (mine.empty())
      continue;
    collective_run run{{.what = all_reduce, .type = dtype::float32, .count = 20'000, .ranks = 3},
                       memory::apart};
    for (int r = 0; r < 3; ++r)
      if (r != mine.front().rank) { // so that the other ranks wait in the call
        ASSERT_TRUE(is_ok(ranks.enqueue(r, run.call(r))));
      }
    EXPECT_TRUE(is_ok(ranks.abort(aborting)));
    for (std::size_t i = 0; i < GetParam().size(); ++i) {
      for (const auto& x : ranks.of(i).communicator) {
        const auto err = end_of(*x);
        ASSERT_TRUE(has_code(err, errc::nccl_error));
        EXPECT_EQ(failure_of(err)->detail, "the communicator was aborted");
      }
    }
    ranks.drain_all();
    run.expect_untouched();
    for (std::size_t i = 0; i < GetParam().size(); ++i)
      EXPECT_TRUE(is_ok(ranks.abort(i)));
    ranks.build();
    ASSERT_NO_FATAL_FAILURE(ranks.expect_working());
  }
}

TEST_P(HostTransportEnd, AClosedDeviceEndsItForAll) {
  spread ranks{GetParam()};
  for (int r = 0; r < 3; ++r)
    if (r != 1) {
      ASSERT_TRUE(is_ok(ranks.enqueue(r, {.what = barrier})));
    }
  for (auto& x : ranks.parties())
    if (!x->ranks.empty() && x->ranks.front().rank != 1) {
      x->devices.erase(x->devices.begin()); // while the call runs
      break;
    }
  for (auto& x : ranks.parties())
    for (const auto& rank : x->communicator)
      EXPECT_TRUE(has_code(end_of(*rank), errc::nccl_error));
}

TEST_P(HostTransportEnd, MayComeAtAnyMoment) {
  std::mt19937 random{11};
  spread ranks{GetParam()};
  for (std::uint64_t i = 0; i < 20; ++i) {
    std::vector<std::unique_ptr<collective_run>> runs;
    for (auto n = 1 + random() % 4; n > 0; --n)
      runs.push_back(std::make_unique<collective_run>(
          testing::collective_spec{.what = collectives[random() % collectives.size()],
                                   .type = dtype::float32,
                                   .count = std::size_t{random() % 3 == 0 ? 300'000U : 10U},
                                   .ranks = 3,
                                   .seed = i},
          memory::apart));
    for (auto& run : runs)
      ASSERT_NO_FATAL_FAILURE(ranks.enqueue_all(*run));
    std::this_thread::sleep_for(std::chrono::microseconds{random() % 5'000}); // any moment
    std::vector<std::thread> reapers;
    for (std::size_t p = 0; p < GetParam().size(); ++p)
      if (random() % 3 != 0)
        reapers.emplace_back([&, p] { EXPECT_TRUE(is_ok(ranks.abort(p))); });
    for (auto& x : reapers)
      x.join();
    for (std::size_t p = 0; p < GetParam().size(); ++p)
      EXPECT_TRUE(is_ok(ranks.abort(p)));
    for (auto& run : runs) // a data race if a rank still uses it
      run->overwrite();
    ranks.drain_all();
    ranks.build();
  }
}

TEST(HostTransportLeave, InGoodOrderIsNoErrorOfTheOthers) {
  spread ranks{{{0}, {1}, {2}}};
  ASSERT_NO_FATAL_FAILURE(ranks.expect_working());
  // Rank 0 leaves after its message was delivered. The other ranks exchange messages later.
  std::mt19937 random{3};
  message_run before{0, 1, dtype::int32, 100, random};
  ASSERT_TRUE(is_ok(ranks.enqueue(0, before.send())));
  ASSERT_TRUE(is_ok(ranks.enqueue(1, before.recv())));
  EXPECT_TRUE(is_ok(ranks.destroy(0)));
  for (int i = 0; i < 20; ++i) {
    message_run after{1, 2, dtype::int32, 100'000, random};
    ASSERT_TRUE(is_ok(ranks.enqueue(1, after.send())));
    ASSERT_TRUE(is_ok(ranks.enqueue(2, after.recv())));
    ranks.device(1).drain();
    ranks.device(2).drain();
    EXPECT_TRUE(is_ok(ranks.rank(1).asynchronous_error()));
    EXPECT_TRUE(is_ok(ranks.rank(2).asynchronous_error()));
    after.expect_right();
  }
  before.expect_right();
  // A call that needs rank 0 can never complete.
  ASSERT_TRUE(is_ok(ranks.enqueue(1, {.what = barrier})));
  for (const int r : {1, 2})
    EXPECT_TRUE(names_rank(end_of(ranks.rank(r)), errc::nccl_error, 0));
}

TEST(HostTransportLeave, EndsWhatWaitsForTheRank) {
  spread ranks{{{0}, {1}}};
  ASSERT_TRUE(is_ok(ranks.enqueue(1, {.what = barrier})));
  EXPECT_TRUE(is_ok(ranks.destroy(0)));
  ranks.device(1).drain();
  EXPECT_TRUE(names_rank(end_of(ranks.rank(1)), errc::nccl_error, 0));
}

TEST(HostTransportLeave, WithoutOrderEndsItForAll) {
  spread ranks{{{0}, {1}, {2}}};
  ranks.of(2).communicator.clear();
  for (const int r : {0, 1}) {
    const auto err = end_of(ranks.rank(r));
    EXPECT_TRUE(names_rank(err, errc::nccl_error, 2));
    EXPECT_EQ(failure_of(err)->detail, "a rank left the communicator");
  }
}

TEST(HostTransportLeave, OfTheHubEndsItForAll) {
  spread ranks{{{}, {0}, {1}}};
  ASSERT_TRUE(is_ok(ranks.enqueue(0, {.what = barrier})));
  ranks.of(0).host.reset();
  ranks.of(0).devices.clear();
  for (const int r : {0, 1})
    EXPECT_TRUE(has_code(end_of(ranks.rank(r)), errc::nccl_error));
  ranks.device(0).drain();
}

TEST(HostTransportLeave, NothingIsLeft) {
  const holdings at_first;
  {
    const auto hub = make_host_backend({.devices = 2, .listen_address = here});
    const auto other = make_host_backend({.devices = 1});
    must(hub->make_communicator_id());
    const holdings with_hub;
    EXPECT_EQ(with_hub.threads, at_first.threads + 1);
    for (const bool in_order : {true, false, true, false}) {
      const auto id = must(hub->make_communicator_id());
      communicator_ranks mine;
      std::thread builder{[&] {
        const std::array<local_rank, 2> ranks{{{0, 0}, {2, 1}}};
        mine = must(hub->build(id, 3, ranks));
      }};
      const local_rank last{1, 0};
      auto theirs = must(other->build(id, 3, {&last, 1}));
      builder.join();
      EXPECT_GT(holdings{}.files, with_hub.files);
      for (const auto& entry : std::filesystem::directory_iterator{"/proc/self/fd"}) {
        const int fd = std::stoi(entry.path().filename());
        struct stat status{};
        if (::fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode)) {
          EXPECT_TRUE(::fcntl(fd, F_GETFD) & FD_CLOEXEC);
        }
      }
      if (in_order) {
        EXPECT_TRUE(is_ok(hub->destroy(std::move(mine))));
        EXPECT_TRUE(is_ok(other->destroy(std::move(theirs))));
      } else {
        EXPECT_TRUE(is_ok(hub->abort(std::move(mine))));
        EXPECT_TRUE(is_ok(other->abort(std::move(theirs))));
      }
      expect_to_hold(with_hub);
    }
  }
  expect_to_hold(at_first);
  { // with a communicator that outlives its hub
    const auto other = make_host_backend({.devices = 1});
    auto hub = make_host_backend({.devices = 1, .listen_address = here});
    const auto id = must(hub->make_communicator_id());
    const local_rank only{0, 0};
    auto mine = must(other->build(id, 1, {&only, 1}));
    hub.reset();
    EXPECT_TRUE(has_code(end_of(*mine.front()), errc::nccl_error));
    EXPECT_TRUE(is_ok(other->abort(std::move(mine))));
  }
  expect_to_hold(at_first);
}

// -- connections that do not belong to a rank

class HostTransportStrangers : public ::testing::Test {
protected:
  spread ranks{{{0}, {1}}};
  const detail::hub_invitation invitation =
      *detail::invitation_of(must(ranks.of(0).host->make_communicator_id()));

  detail::file_descriptor connect() const {
    return must(detail::connect_to(invitation.hub, clock::now() + patience));
  }

  static void say(const detail::file_descriptor& to, std::span<const std::byte> bytes) {
    const std::array blocks{bytes};
    static_cast<void>(detail::send_all(to.get(), blocks)); // the hub may close it at any byte
  }

  /// Returns how long the hub takes to close the connection. Ignores data that arrives before.
  static std::optional<std::chrono::nanoseconds> time_to_end(const detail::file_descriptor& x) {
    const auto begin = clock::now();
    std::array<std::byte, 4096> dropped{};
    for (;;) {
      pollfd wanted{x.get(), POLLIN, 0};
      if (::poll(&wanted, 1, 20'000) <= 0)
        return std::nullopt;
      if (detail::receive_some(x.get(), dropped) == 0)
        return clock::now() - begin;
    }
  }
};

TEST_F(HostTransportStrangers, WhoSaysNothingOrHalfIsDroppedInTime) {
  std::vector<detail::file_descriptor> silent;
  for (int i = 0; i < 5; ++i)
    silent.push_back(connect());
  const detail::wire_hello hello{.secret = invitation.secret, .group = invitation.group, .size = 1};
  say(silent[1], detail::bytes_of(hello).first(20));
  say(silent[2], detail::bytes_of(hello).first(55));
  const auto begin = clock::now();
  for (const auto& x : silent)
    ASSERT_TRUE(time_to_end(x));
  EXPECT_GT(clock::now() - begin, 1s); // it had time to send its hello
  EXPECT_LT(clock::now() - begin, 6s);
  ASSERT_NO_FATAL_FAILURE(ranks.expect_working());
}

TEST_F(HostTransportStrangers, WhoSaysNonsenseIsDroppedAtOnce) {
  std::mt19937 random{5};
  for (int i = 0; i < 50; ++i) {
    const auto x = connect();
    std::vector<std::byte> bytes(56 + random() % 10'000);
    std::ranges::generate(bytes, [&] { return static_cast<std::byte>(random()); });
    if (i % 2 == 0) {
      // A hello with a secret in which one bit is wrong.
      detail::wire_hello hello{.secret = invitation.secret, .group = invitation.group, .size = 2};
      hello.secret[random() % 32] ^= static_cast<std::byte>(1 << random() % 8);
      std::ranges::copy(detail::bytes_of(hello), bytes.begin());
    }
    say(x, bytes);
    const auto time = time_to_end(x);
    ASSERT_TRUE(time);
    EXPECT_LT(*time, 1s);
  }
  ASSERT_NO_FATAL_FAILURE(ranks.expect_working());
}

TEST_F(HostTransportStrangers, ManyCostLittle) {
  ASSERT_NO_FATAL_FAILURE(ranks.expect_working()); // so that the threads of its streams exist
  const holdings before;
  std::vector<detail::file_descriptor> all;
  for (int i = 0; i < 300; ++i)
    all.push_back(connect());
  ASSERT_NO_FATAL_FAILURE(ranks.expect_working());
  EXPECT_LE(holdings{}.files, before.files + 300 + 64);
  EXPECT_EQ(holdings{}.threads, before.threads);
  ranks.destroy_all();
  ranks.build(); // while the other connections are open
  ASSERT_NO_FATAL_FAILURE(ranks.expect_working());
}

TEST_F(HostTransportStrangers, ARankOfACommunicatorThatIsNoneIsRefused) {
  auto id = must(ranks.of(0).host->make_communicator_id());
  auto where = *detail::invitation_of(id);
  where.group += 1'000;
  const local_rank mine{0, 0};
  EXPECT_TRUE(has_code(ranks.of(1).host->build(detail::id_of(where), 1, {&mine, 1}),
                       errc::invalid_argument));
  for (const int size : {0, -1, 1'000'000'000})
    ASSERT_TRUE(time_to_end(knock(id, size, 0)));
  ASSERT_NO_FATAL_FAILURE(ranks.expect_working());
}

TEST_F(HostTransportStrangers, ARankThatMisbehavesEndsItsOwnCommunicatorOnly) {
  using detail::frame_header;
  using detail::frame_kind;
  std::vector<std::byte> nonsense(24, std::byte{0xff});
  std::vector<std::byte> fits(24); // an all_reduce of 0 int8
  const auto head = [&](frame_header x, const std::vector<std::byte>& more) {
    const auto bytes = detail::bytes_of(x);
    std::vector<std::byte> result{bytes.begin(), bytes.end()};
    result.insert(result.end(), more.begin(), more.end());
    return result;
  };
  auto far = fits;
  const std::uint64_t elements = std::uint64_t{1} << 62;
  std::memcpy(far.data() + 8, &elements, sizeof elements);
  std::vector<std::byte> bad_end(512, std::byte{0xff});
  const std::vector<std::vector<std::byte>> all{
      nonsense,
      head({.kind = frame_kind::calls, .calls = 1, .head_bytes = ~std::uint64_t{0}}, {}),
      head({.kind = frame_kind::calls, .calls = 1, .data_bytes = ~std::uint64_t{0}}, {}),
      head({.kind = frame_kind::calls, .calls = ~std::uint32_t{0}, .head_bytes = 24}, fits),
      head({.kind = frame_kind::calls, .calls = 0, .head_bytes = 24}, fits),
      head({.kind = frame_kind::calls, .calls = 2, .head_bytes = 24}, fits),
      head({.kind = frame_kind::calls, .calls = 1, .head_bytes = 24, .data_bytes = 8}, fits),
      head({.kind = frame_kind::calls, .calls = 1, .head_bytes = 24}, nonsense),
      head({.kind = frame_kind::calls, .calls = 1, .head_bytes = 24}, far),
      head({.kind = frame_kind::calls, .calls = 1, .head_bytes = 23}, fits),
      head({.kind = frame_kind::end, .head_bytes = 512}, bad_end),
      head({.kind = frame_kind::end, .head_bytes = 511}, bad_end),
      head({.kind = frame_kind::done}, {}),
      head({.kind = frame_kind::calls, .calls = 1, .head_bytes = 24}, fits), // sent twice
  };
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto id = must(ranks.of(0).host->make_communicator_id());
    const auto other = make_host_backend({.devices = 1});
    const auto bad = knock(id, 2, 1);
    const local_rank mine{0, 0};
    auto good = must(other->build(id, 2, {&mine, 1}));
    auto bytes = all[i];
    if (i + 1 == all.size())
      bytes.insert(bytes.end(), all[i].begin(), all[i].end());
    say(bad, bytes);
    ASSERT_TRUE(names_rank(end_of(*good.front()), errc::nccl_error, 1)) << "case " << i;
    ASSERT_TRUE(time_to_end(bad)) << "case " << i;
  }
  // The same before all ranks have connected.
  const auto id = must(ranks.of(0).host->make_communicator_id());
  const auto bad = knock(id, 2, 1);
  say(bad, nonsense);
  ASSERT_TRUE(time_to_end(bad));
  const local_rank mine{0, 0};
  EXPECT_TRUE(has_code(ranks.of(1).host->build(id, 2, {&mine, 1}), errc::nccl_error));
  ASSERT_NO_FATAL_FAILURE(ranks.expect_working());
}

// -- processes

/// Environment variables that a child reads.
constexpr auto id_variable = "TROUPE_TEST_ID";
constexpr auto rank_variable = "TROUPE_TEST_RANK";
constexpr auto size_variable = "TROUPE_TEST_SIZE";

std::string hex_of(const communicator_id& x) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string result;
  for (const auto byte : x.bytes) {
    result += digits[std::to_integer<std::size_t>(byte) >> 4];
    result += digits[std::to_integer<std::size_t>(byte) & 15];
  }
  return result;
}

communicator_id id_from(const std::string& hex) {
  communicator_id result;
  for (std::size_t i = 0; i < result.bytes.size(); ++i)
    result.bytes[i] = static_cast<std::byte>(std::stoul(hex.substr(2 * i, 2), nullptr, 16));
  return result;
}

std::string variable(const char* name) {
  const auto* const value = std::getenv(name);
  if (!value)
    throw std::runtime_error(std::string{name} + " is not set");
  return value;
}

/// The rank of a child, on its own device.
struct child_rank {
  child_rank() {
    const local_rank mine{rank, 0};
    communicator = must(host->build(id_from(variable(id_variable)), size, {&mine, 1}));
  }

  int rank = std::stoi(variable(rank_variable));
  int size = std::stoi(variable(size_variable));
  std::shared_ptr<backend> host = make_host_backend({.devices = 1});
  opened_device device{*host, 0};
  communicator_ranks communicator;
};

std::unique_ptr<running_child> start_rank(const char* scenario, const communicator_id& id, int size,
                                          int rank) {
  return std::make_unique<running_child>(
      scenario, std::vector{std::string{id_variable} + '=' + hex_of(id),
                            std::string{size_variable} + '=' + std::to_string(size),
                            std::string{rank_variable} + '=' + std::to_string(rank)});
}

constexpr std::size_t large = std::size_t{1} << 22;

/// Sums 1 on each rank repeatedly, and reports the error that ends it.
TROUPE_CHILD(HostTransportSums) {
  child_rank self;
  std::vector<std::int32_t> values(large);
  for (std::size_t count = 1;; count = count == 1 ? large : 1) {
    std::ranges::fill(values, 1);
    auto& rank = *self.communicator.front();
    if (testing::all_reduce(rank, values.data(), values.data(), count, dtype::int32, reduce_op::sum,
                            self.device.stream))
      break;
    self.device.drain();
    if (rank.asynchronous_error())
      break;
    if (values[count - 1] != self.size)
      throw std::runtime_error("a wrong sum: " + std::to_string(values[count - 1]));
    tell("sum");
  }
  const auto why = failure_of(self.communicator.front()->asynchronous_error());
  tell("end", why->detail);
  tell("code", to_string(why->code));
  return has_code(self.host->abort(std::move(self.communicator)), errc{}) ? 1 : 0;
}

/// Takes part in one sum, then leaves.
TROUPE_CHILD(HostTransportOneSum) {
  child_rank self;
  std::vector<std::int32_t> values(1'000, self.rank);
  must(testing::all_reduce(*self.communicator.front(), values.data(), values.data(), values.size(),
                           dtype::int32, reduce_op::sum, self.device.stream));
  self.device.drain();
  tell("sum", std::to_string(values.back()));
  must(self.communicator.front()->asynchronous_error());
  must(self.host->destroy(std::move(self.communicator)));
  return 0;
}

/// Has the hub and no rank.
TROUPE_CHILD(HostTransportHub) {
  const auto host = make_host_backend({.devices = 1, .listen_address = here});
  tell("id", hex_of(must(host->make_communicator_id())));
  std::this_thread::sleep_for(10min); // until it is killed
  return 0;
}

/// Connects and makes no call.
TROUPE_CHILD(HostTransportIdle) {
  child_rank self;
  tell("there");
  std::this_thread::sleep_for(10min); // until it is killed
  return 0;
}

/// Receives a message that is larger than all buffers on its path.
TROUPE_CHILD(HostTransportReceives) {
  child_rank self;
  std::vector<std::int32_t> values(8 * large);
  const collective_call call{
      .what = recv, .recv = values.data(), .count = values.size(), .type = dtype::int32};
  must(self.communicator.front()->enqueue({&call, 1}, self.device.stream));
  self.device.drain();
  tell("received");
  return 0;
}

/// Rank 0 of a communicator whose hub is in this process. The other ranks are children.
class HostTransportProcesses : public ::testing::Test {
protected:
  void start(const std::vector<const char*>& scenarios) {
    const int size = 1 + static_cast<int>(scenarios.size());
    const auto id = must(host->make_communicator_id());
    for (int r = 1; r < size; ++r)
      children.push_back(start_rank(scenarios[static_cast<std::size_t>(r - 1)], id, size, r));
    const local_rank mine{0, 0};
    communicator = must(host->build(id, size, {&mine, 1}));
  }

  caf::error sum(std::span<std::int32_t> values) {
    return testing::all_reduce(*communicator.front(), values.data(), values.data(), values.size(),
                               dtype::int32, reduce_op::sum, device.stream);
  }

  std::shared_ptr<backend> host = make_host_backend({.devices = 1, .listen_address = here});
  opened_device device{*host, 0};
  std::vector<std::unique_ptr<running_child>> children;
  communicator_ranks communicator;
};

TEST_F(HostTransportProcesses, SumAndLeave) {
  start({"HostTransportOneSum", "HostTransportOneSum", "HostTransportOneSum"});
  std::vector<std::int32_t> values(1'000, 100);
  ASSERT_TRUE(is_ok(sum(values)));
  device.drain();
  EXPECT_EQ(values, std::vector<std::int32_t>(1'000, 106));
  for (auto& x : children) {
    const auto end = x->wait(patience);
    ASSERT_EQ(end.status, 0) << to_string(end);
    EXPECT_EQ(end.value("sum"), "106");
  }
  // The children have left without an error.
  EXPECT_TRUE(is_ok(communicator.front()->asynchronous_error()));
  EXPECT_TRUE(is_ok(host->destroy(std::move(communicator))));
}

TEST_F(HostTransportProcesses, AKilledOneIsNamedToAllOthers) {
  std::mt19937 random{23};
  for (int i = 0; i < 6; ++i) {
    children.clear();
    start({"HostTransportSums", "HostTransportSums"});
    std::vector<std::int32_t> values(large);
    auto& rank = *communicator.front();
    std::thread killer;
    std::size_t sums = 0;
    caf::error err;
    for (std::size_t count = 1; !err; count = count == 1 ? large : 1) {
      std::ranges::fill(values, 1);
      err = sum({values.data(), count});
      if (err)
        break;
      if (i == 0 && sums == 2) { // while this rank waits in the call, the others wait too
        ASSERT_TRUE(children[1]->wait_told("sum", patience));
      }
      device.drain();
      err = rank.asynchronous_error();
      if (!err) {
        ASSERT_EQ(values[count - 1], 3);
      }
      if (++sums == 2)
        killer = std::thread{[this, wait = random() % 60] {
          std::this_thread::sleep_for(std::chrono::milliseconds{wait}); // any moment
          children[1]->kill();
        }};
    }
    killer.join();
    EXPECT_TRUE(names_rank(err, errc::nccl_error, 2));
    EXPECT_EQ(failure_of(err)->detail, "the process of rank 2 has ended");
    EXPECT_TRUE(is_ok(host->abort(std::move(communicator))));
    const auto end = children[0]->wait(patience);
    EXPECT_EQ(end.status, 0) << to_string(end);
    EXPECT_EQ(end.value("code"), "nccl_error");
    EXPECT_EQ(end.value("end"), "the process of rank 2 has ended");
  }
}

TEST_F(HostTransportProcesses, AKilledOneEndsABuild) {
  const auto id = must(host->make_communicator_id());
  const auto child = start_rank("HostTransportIdle", id, 3, 1);
  ASSERT_TRUE(wait_for_a_rank(id, 2));
  const auto other = make_host_backend({.devices = 1});
  caf::error err;
  std::thread builder{[&] {
    const local_rank mine{0, 0};
    const auto result = host->build(id, 3, {&mine, 1});
    err = result ? caf::error{} : result.error();
  }};
  child->kill();
  builder.join();
  EXPECT_TRUE(names_rank(err, errc::nccl_error, 1));
  const local_rank late{2, 0};
  EXPECT_TRUE(names_rank(other->build(id, 3, {&late, 1}).error(), errc::nccl_error, 1));
}

/// Two ranks on two backends, with the hub in a child.
class HostTransportFarHub : public ::testing::Test {
protected:
  HostTransportFarHub() {
    if (!hub.wait_told("id", patience))
      throw std::runtime_error("no hub: " + to_string(hub.wait(0s)));
    ranks.build(id_from(hub.told("id")));
  }

  running_child hub{"HostTransportHub"};
  spread ranks{{{0}, {1}}, spread::unbuilt};
};

// The hub has not read any of these connections yet: one of them may be a rank.
TEST(HostTransportBuild, MoreAtOnceThanMayBeStrangersAreHeard) {
  running_child hub{"HostTransportHub"};
  ASSERT_TRUE(hub.wait_told("id", patience)) << to_string(hub.wait(0s));
  const auto id = id_from(hub.told("id"));
  const auto where = *detail::invitation_of(id);
  hub.stop();
  const auto rank = knock(id, 2, 0);
  std::vector<detail::file_descriptor> silent;
  for (int i = 0; i < 100; ++i)
    silent.push_back(must(detail::connect_to(where.hub, clock::now() + patience)));
  hub.go_on();
  std::array<std::byte, 4096> answer{};
  pollfd wanted{rank.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&wanted, 1, 20'000), 1);
  EXPECT_GT(detail::receive_some(rank.get(), answer), 0);
}

TEST_F(HostTransportFarHub, EndsItForAllWhenItIsKilled) {
  ASSERT_NO_FATAL_FAILURE(ranks.expect_working());
  ASSERT_TRUE(is_ok(ranks.enqueue(0, {.what = barrier})));
  hub.kill();
  ranks.drain_all();
  for (int r = 0; r < 2; ++r) {
    const auto err = end_of(ranks.rank(r));
    ASSERT_TRUE(has_code(err, errc::nccl_error));
    EXPECT_EQ(failure_of(err)->detail, "the process of the hub has ended");
  }
  EXPECT_TRUE(is_ok(ranks.abort(0)));
  EXPECT_TRUE(is_ok(ranks.abort(1)));
  const local_rank mine{0, 0};
  EXPECT_TRUE(
      has_code(ranks.of(0).host->build(id_from(hub.told("id")), 2, {&mine, 1}), errc::nccl_error));
}

TEST_F(HostTransportFarHub, AnAbortDoesNotWaitForItWhenItIsStopped) {
  ASSERT_NO_FATAL_FAILURE(ranks.expect_working());
  hub.stop();
  // Larger than all buffers on the path.
  std::vector<std::vector<std::int32_t>> values(2, std::vector<std::int32_t>(8 * large));
  for (int r = 0; r < 2; ++r) {
    auto* const own = values[static_cast<std::size_t>(r)].data();
    ASSERT_TRUE(is_ok(
        ranks.enqueue(r, {.send = own, .recv = own, .count = 8 * large, .type = dtype::int32})));
  }
  const auto begin = clock::now();
  EXPECT_TRUE(is_ok(ranks.abort(0)));
  EXPECT_TRUE(is_ok(ranks.abort(1)));
  ranks.drain_all();
  EXPECT_LT(clock::now() - begin, 2s);
}

TEST_F(HostTransportProcesses, AnAbortWaitsForNoStoppedOne) {
  const holdings before;
  start({"HostTransportIdle", "HostTransportSums"});
  ASSERT_TRUE(children[0]->wait_told("there", patience));
  children[0]->stop();
  std::vector<std::int32_t> values(large, 1);
  ASSERT_TRUE(is_ok(sum(values)));
  const auto begin = clock::now();
  EXPECT_TRUE(is_ok(host->abort(std::move(communicator))));
  device.drain();
  EXPECT_LT(clock::now() - begin, 1s);
  const auto end = children[1]->wait(patience);
  // If the hub does not accept the reason in time, it only sees that the rank has left.
  EXPECT_THAT(end.value("end"),
              ::testing::AnyOf("the communicator was aborted", "the process of rank 0 has ended"))
      << to_string(end);
  EXPECT_EQ(end.value("code"), "nccl_error");
  // The hub releases the stopped rank too. The remaining threads are the hub's own, the stream's,
  // and the one that waits for the child.
  EXPECT_TRUE(becomes([&] { return holdings{}.threads <= before.threads + 3; }));
}

TEST_F(HostTransportProcesses, AHubEndsInTheMiddleOfWhatAStoppedOneReceives) {
  const holdings before;
  start({"HostTransportReceives"});
  std::vector<std::int32_t> values(8 * large, 1);
  const collective_call call{
      .what = send, .send = values.data(), .count = values.size(), .type = dtype::int32, .peer = 1};
  ASSERT_TRUE(is_ok(communicator.front()->enqueue({&call, 1}, device.stream)));
  device.drain(); // the hub has received the message and started to forward it
  children[0]->stop();
  ASSERT_FALSE(children[0]->wait_told("received", 0s));
  EXPECT_TRUE(is_ok(host->destroy(std::move(communicator))));
  const auto begin = clock::now();
  host.reset();
  device.device.reset();
  EXPECT_LT(clock::now() - begin, 3s);
  children.clear();
  expect_to_hold(before);
}

} // namespace

} // namespace troupe
