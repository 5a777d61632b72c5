// Devices that are handed over to their spares while clients and programs go on.

#include "support/random.hpp"
#include "support/topology_fixture.hpp"
#include "worker/handover_fixture.hpp"
#include "worker/program_fixture.hpp"
#include <troupe/bytes.hpp>
#include <troupe/worker_program.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

/// Clients that make requests without a pause, and check every result and every element.
class clients {
public:
  clients() = default;
  ~clients() { end(); }
  clients(const clients&) = delete;
  clients& operator=(const clients&) = delete;

  /// Calls `round` with 1, 2, ... on a thread of its own until the end.
  void add(std::function<void(std::uint32_t)> round) {
    threads_.emplace_back([this, round = std::move(round), rounds = &rounds_.emplace_back(0)] {
      for (std::uint32_t i = 1; !stop_ && !::testing::Test::HasFailure(); ++i) {
        round(i);
        ++*rounds;
      }
    });
  }
  /// Returns whether each of them has done more rounds than at the last call.
  bool all_went_on() {
    bool result = true;
    std::vector<std::uint64_t> now(rounds_.begin(), rounds_.end());
    last_.resize(now.size());
    for (std::size_t i = 0; i < now.size(); ++i)
      result &= now[i] > last_[i];
    if (result)
      last_ = std::move(now);
    return result;
  }
  void end() {
    stop_ = true;
    threads_.clear();
  }

private:
  std::atomic<bool> stop_{false};
  std::deque<std::atomic<std::uint64_t>> rounds_; ///< done, by client
  std::vector<std::uint64_t> last_;
  std::vector<std::jthread> threads_;
};

void succeeds(const pending<void>& x) { EXPECT_TRUE(is_ok(answer_of(x))); }
void succeeds(const pending<collective_done>& x) { EXPECT_TRUE(is_ok(answer_of(x))); }

/// Writes to memory of one device in all ways, many requests at a time.
void write_memory(clients& to, const device& on) {
  auto all = std::make_shared<std::vector<gpu_ref<std::uint32_t>>>();
  for (int i = 0; i < 4; ++i)
    all->push_back(filled(on, elements(count)));
  to.add([on, all](std::uint32_t round) {
    auto& x = *all;
    std::vector<pending<void>> requests;
    requests.push_back(on.fill(x[0], round));
    requests.push_back(on.copy(x[1], x[0]));
    requests.push_back(on.upload(x[2], host_buffer{counted(round)}));
    requests.push_back(on_cuda() ? on.copy(x[3], x[2]) : launch_copy(on, x[3], x[2]));
    elements got(count);
    requests.push_back(on.download(x[3], std::span{got}));
    auto fresh = on.allocate<std::uint32_t>(count);
    EXPECT_TRUE(is_ok(fresh));
    requests.push_back(on.copy(x[3], x[1]));
    for (auto& request : requests)
      succeeds(request);
    EXPECT_EQ(got, counted(round));
    EXPECT_TRUE(holds(on, x[3], elements(count, round)));
    EXPECT_TRUE(is_ok(answer_of(on.stats())));
  });
}

/// Sums over all ranks, and messages between the last two.
void add_up(clients& to, const world& over) {
  const auto n = static_cast<std::uint32_t>(over.size());
  const auto data = must(over.allocate<std::uint32_t>(count));
  const auto sums = must(over.allocate<std::uint32_t>(count));
  to.add([=](std::uint32_t round) {
    for (std::uint32_t rank = 0; rank < n; ++rank)
      succeeds(over.device_of(rank).fill(data[rank], round + rank));
    const auto sum = over.all_reduce(data, sums, reduce_op::sum);
    const auto again = over.all_reduce(sums, reduce_op::max);
    const auto sent =
        over.send_recv(static_cast<int>(n - 2), data[n - 2], static_cast<int>(n - 1), data[n - 1]);
    succeeds(sum);
    succeeds(again);
    succeeds(sent);
    for (std::uint32_t rank = 0; rank < n; ++rank)
      EXPECT_TRUE(
          holds(over.device_of(rank), sums[rank], elements(count, n * round + n * (n - 1) / 2)));
    EXPECT_TRUE(holds(over.device_of(n - 1), data[n - 1], elements(count, round + n - 2)));
  });
}

/// Calls of single ranks, many at a time.
void call_by_ranks(clients& to, const world& over) {
  const auto n = static_cast<std::uint32_t>(over.size());
  const auto data = must(over.allocate<std::uint32_t>(64));
  to.add([=](std::uint32_t round) {
    std::vector<pending<collective_done>> calls;
    for (std::uint32_t rank = 0; rank < n; ++rank)
      succeeds(over.device_of(rank).fill(data[rank], round));
    for (int k = 0; k < 3; ++k)
      for (std::uint32_t rank = 0; rank < n; ++rank)
        calls.push_back(over.rank(rank).all_reduce(data[rank], reduce_op::sum));
    for (auto& x : calls)
      succeeds(x);
    for (std::uint32_t rank = 0; rank < n; ++rank)
      EXPECT_TRUE(holds(over.device_of(rank), data[rank], elements(64, n * n * n * round)));
  });
}

/// Copies from each device to the next one.
void copy_around(clients& to, const topology& links, const world& over) {
  const auto n = over.size();
  const auto data = must(over.allocate<std::uint32_t>(count));
  to.add([=](std::uint32_t round) {
    succeeds(over.device_of(0).fill(data[0], round));
    std::vector<pending<void>> copies;
    for (std::size_t i = 1; i < n; ++i)
      copies.push_back(links.copy(data[i], data[i - 1]));
    copies.push_back(links.replicate(data[n - 1], {data.begin(), data.end() - 1}));
    for (auto& x : copies)
      succeeds(x);
    for (std::size_t i = 0; i < n; ++i)
      EXPECT_TRUE(holds(over.device_of(i), data[i], elements(count, round)));
  });
}

class HandoverUnderLoad : public HandoverTest {
protected:
  /// Hands devices over, in turns, while `busy` goes on.
  void hand_over_often(clients& busy, int times, int devices) {
    std::vector<std::uint64_t> lives(static_cast<std::size_t>(devices), 1);
    for (int i = 0; i < times && !HasFailure(); ++i) {
      EXPECT_TRUE(eventually([&] { return busy.all_went_on() || HasFailure(); }));
      const auto which = static_cast<std::size_t>(i % devices);
      const auto d = system_->open(static_cast<int>(which));
      const auto moved = answer_of(d.hand_over());
      ASSERT_TRUE(is_ok(moved)) << "handover " << i;
      EXPECT_EQ(*moved, ++lives[which]);
      EXPECT_EQ(d.generation(), 1u);
    }
    EXPECT_TRUE(eventually([&] { return busy.all_went_on() || HasFailure(); }));
  }

  const int ranks_ = on_cuda() ? 2 : 3;
  const int times_ = on_cuda() ? 10 : 100; // a worker with a GPU takes a second to start
};

TEST_F(HandoverUnderLoad, FailsNoRequestOfADevice) {
  start(1);
  auto kept = filled(device_, counted(7));
  clients busy;
  for (int i = 0; i < 2; ++i)
    write_memory(busy, device_);
  hand_over_often(busy, times_, 1);
  busy.end();
  EXPECT_TRUE(holds(device_, kept, counted(7)));
}

/// The handovers do not count as restarts of the world.
TEST_F(HandoverUnderLoad, FailsNoRequestOfAWorldWithStandbys) {
  start(ranks_);
  const auto w = open_with_spares();
  const auto links = open_topology(*system_);
  const auto before = w.status();
  std::vector<gpu_ref<std::uint32_t>> kept;
  for (std::size_t i = 0; i < w.size(); ++i)
    kept.push_back(filled(w.device_of(i), counted(static_cast<std::uint32_t>(i))));
  clients busy;
  write_memory(busy, w.device_of(1));
  add_up(busy, w);
  call_by_ranks(busy, w);
  copy_around(busy, links, w);
  hand_over_often(busy, times_, ranks_);
  busy.end();
  for (std::size_t i = 0; i < w.size(); ++i)
    EXPECT_TRUE(holds(w.device_of(i), kept[i], counted(static_cast<std::uint32_t>(i))));
  const auto after = w.status();
  EXPECT_EQ(after.membership, before.membership);
  EXPECT_GE(after.epoch, before.epoch + static_cast<std::uint64_t>(times_));
  for (auto& x : after.members)
    EXPECT_EQ(x.incarnation, w.device_of(static_cast<std::size_t>(x.rank)).incarnation());
}

TEST_F(HandoverUnderLoad, FailsNoRequestOfAWorldWithoutStandbys) {
  start(ranks_);
  world_config config;
  config.limits.restarts = 0;
  const auto w = system_->open_world(config);
  clients busy;
  add_up(busy, w);
  call_by_ranks(busy, w);
  hand_over_often(busy, times_ / 5, ranks_);
}

TEST_F(HandoverUnderLoad, MovesAllDevicesAtATime) {
  start(ranks_);
  const auto w = open_with_spares();
  const auto links = open_topology(*system_, quick_config(true));
  clients busy;
  add_up(busy, w);
  copy_around(busy, links, w);
  for (std::uint64_t life = 2; life < 5 && !HasFailure(); ++life) {
    EXPECT_TRUE(eventually([&] { return busy.all_went_on() || HasFailure(); }));
    std::vector<pending<std::uint64_t>> moved;
    for (std::size_t i = 0; i < w.size(); ++i)
      moved.push_back(w.device_of(i).hand_over());
    for (auto& x : moved)
      EXPECT_EQ(must(answer_of(x, 2 * patience)), life);
  }
}

/// Kills workers while devices are handed over: the ordinary loss follows, and all other memory is
/// kept.
TEST_F(HandoverUnderLoad, IsALossLikeAnyOtherIfAWorkerIsKilledMeanwhile) {
  start(2);
  world_config config;
  config.limits.standby = standby_policy::full;
  config.limits.restarts = 1'000'000;
  config.limits.restart_backoff = 1ms; // doubles
  config.limits.restart_window = 1s;
  const auto w = system_->open_world(config);
  std::vector<gpu_ref<std::uint32_t>> kept;
  for (std::size_t i = 0; i < w.size(); ++i)
    kept.push_back(filled(w.device_of(i), counted(static_cast<std::uint32_t>(i))));
  std::mt19937_64 random{1};
  int ended = 0;
  const int rounds = on_cuda() ? 8 : 40;
  // Beside other work, the moments may be wrong for some time.
  for (int round = 0; (round < rounds || ended == 0) && !HasFailure(); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const auto d = w.device_of(pick(random, 0, 1));
    EXPECT_TRUE(eventually([&] { return w.status().standby_ready; }));
    const auto processes = children();
    auto moved = d.hand_over();
    const auto until =
        std::chrono::steady_clock::now() + std::chrono::microseconds{pick(random, 0, 4000)};
    while (std::chrono::steady_clock::now() < until)
      std::this_thread::yield();
    auto victim = processes.begin();
    std::advance(victim, static_cast<std::ptrdiff_t>(pick(random, 0, processes.size() - 1)));
    static_cast<void>(::kill(static_cast<pid_t>(*victim), SIGKILL)); // it may have ended
    const auto result = answer_of(moved);
    EXPECT_TRUE(result || has_code(result, errc::worker_lost) ||
                has_code(result, errc::unavailable));
    ended += result ? 0 : 1;
    for (std::size_t i = 0; i < w.size(); ++i) {
      EXPECT_TRUE(eventually([&] { return works(w.device_of(i)) == true; }));
      EXPECT_TRUE(holds(w.device_of(i), kept[i], counted(static_cast<std::uint32_t>(i))));
      EXPECT_EQ(w.device_of(i).generation(), 1u);
    }
    EXPECT_TRUE(eventually([&] { return works(w) == true; }));
  }
}

/// A report of a program in a worker.
struct sign {
  std::int32_t rank = -1;
  std::uint32_t sums = 0; ///< that were right; 0: it has begun
};

[[maybe_unused]] const bool programs_registered = [] {
  // Adds up until it gets a message, and checks each sum.
  must(register_program("Handover.sums", [](const program_place& place) {
    return place.system.spawn([place](caf::blocking_actor* self) {
      const sign begun{place.rank.index(), 0};
      const auto data = place.rank.where().allocate<std::uint32_t>(64);
      if (!data || place.report(to_bytes(begun)))
        return self->fail_state(make_error(errc::internal, "a program could not begin"));
      std::uint32_t right = 0;
      for (bool over = false; !over;) {
        self->receive([&](const program_message&) { over = true; },
                      caf::after(std::chrono::seconds(0)) >> [] {});
        const request_options now{.membership = place.rank.status().membership};
        place.rank.where().fill(*data, static_cast<std::uint32_t>(place.rank.index() + 1));
        if (!place.rank.all_reduce(*data, reduce_op::sum, now).wait())
          continue; // the other rank begins anew
        const auto n = static_cast<std::uint32_t>(place.rank.size());
        const auto got = place.rank.where().download(*data);
        if (!got || *got != elements(64, n * (n + 1) / 2))
          return self->fail_state(make_error(errc::internal, "a wrong sum"));
        static_cast<void>(place.report(to_bytes(sign{place.rank.index(), ++right})));
      }
    });
  }));
  // Offers memory, and claims what it gets tokens of, until it gets an empty message.
  must(register_program("Handover.lends", [](const program_place& place) {
    return place.system.spawn([place](caf::blocking_actor* self) {
      const auto own = place.rank.where().allocate<std::uint32_t>(64);
      const auto token = own ? place.rank.where().offer(*own) : own.error();
      const auto refused = place.rank.where().hand_over().wait(); // the device is the parent's
      if (!token || code_of(error_of(refused)) != errc::not_supported ||
          place.report(to_bytes(*token)))
        return self->fail_state(make_error(errc::internal, "a program could not begin"));
      any_gpu_ref claimed;
      for (;;)
        self->receive([&](const program_message& x) {
          claimed = {};
          if (!x.bytes.empty())
            claimed = must(place.rank.where()
                               .claim(must(from_bytes<gpu_token>(x.bytes)), access_mode::read)
                               .wait());
          static_cast<void>(place.report({1}));
        });
    });
  }));
  return true;
}();

class HandoverOfPrograms : public ProgramsTest {
protected:
  void start(const char* program, int devices) {
    world_limits limits;
    limits.standby = standby_policy::full;
    ProgramsTest::start(devices, {.name = program}, limits);
  }
  device open() { return system_->open(0); }
  std::vector<sign> signs() const {
    std::vector<sign> result;
    for (auto& x : reports_)
      result.push_back(must(from_bytes<sign>(x.bytes)));
    return result;
  }
  /// Returns how often the program of a rank has begun.
  std::ptrdiff_t begun(std::int32_t rank) const {
    const auto all = signs();
    return std::ranges::count_if(all, [&](auto& x) { return x.rank == rank && x.sums == 0; });
  }
};

/// The program of the device begins anew. The other one remains, and both go on.
TEST_F(HandoverOfPrograms, BeginsTheProgramAnew) {
  start("Handover.sums", 2);
  ASSERT_TRUE(until([this] { return reports_.size() > 20 && view_.standby_ready; }));
  auto membership = view_.membership;
  for (std::ptrdiff_t round = 1; round < 4; ++round) {
    const auto moved = answer_of(open().hand_over());
    ASSERT_TRUE(is_ok(moved));
    EXPECT_EQ(*moved, static_cast<std::uint64_t>(round + 1));
    ASSERT_TRUE(until([&] { return begun(0) == round + 1 && view_.membership > membership; }));
    membership = view_.membership;
    ASSERT_TRUE(until_more_reports(20));
    EXPECT_EQ(begun(1), 1);
  }
}

TEST_F(HandoverOfPrograms, IsRefusedWhileMemoryIsLent) {
  start("Handover.lends", 1);
  ASSERT_TRUE(until([this] { return reports_.size() == 1 && view_.standby_ready; }));
  const auto d = open();
  auto borrowed = must(answer_of(d.claim(must(from_bytes<gpu_token>(reports_[0].bytes)))));
  EXPECT_TRUE(has_code(answer_of(d.hand_over()), errc::buffer_acquired));
  EXPECT_FALSE(borrowed.stale());
  borrowed = {};
  auto lent = filled(d, counted(1));
  const auto token = must(d.offer(lent));
  detail::send(*self_, actor_, program_message{0, to_bytes(token)});
  ASSERT_TRUE(until_more_reports(1));
  EXPECT_TRUE(has_code(answer_of(d.hand_over()), errc::buffer_acquired));
  EXPECT_EQ(d.incarnation(), 1u);
  detail::send(*self_, actor_, program_message{0, {}});
  ASSERT_TRUE(until_more_reports(1));
  caf::expected<std::uint64_t> moved = 0;
  EXPECT_TRUE(eventually([&] { // the memory is given back
    moved = answer_of(d.hand_over());
    return code_of(error_of(moved)) != errc::buffer_acquired;
  }));
  EXPECT_EQ(must(std::move(moved)), 2u);
  EXPECT_TRUE(holds(d, lent, counted(1)));
}

} // namespace

} // namespace troupe::testing
