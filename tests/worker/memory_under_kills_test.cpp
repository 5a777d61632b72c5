// The memory of devices whose workers and spares are killed at random moments. A model knows what
// each buffer must hold: the result of each request that succeeded, and where one failed, a mark or
// the content of one of the last requests.
//
// TROUPE_CHAOS_SEED=n selects the seed.

#include "support/from_environment.hpp"
#include "support/random.hpp"
#include "support/topology_fixture.hpp"
#include "worker/handover_fixture.hpp"
#include "worker/known_memory.hpp"
#include <troupe/bytes.hpp>
#include <troupe/launch.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <thread>

namespace troupe::testing {

namespace {

using clock = std::chrono::steady_clock;

constexpr const char* write_value = "MemoryUnderKills.write_value";
constexpr request_options once{};
constexpr request_options always{.max_retries = 1'000'000};

/// Workers run the same program, so the launch is registered there too.
[[maybe_unused]] const bool registered = [] {
  must(register_launch(write_value, [](launch_context& context, auto, auto writes, auto argument) {
    auto* to = static_cast<std::uint32_t*>(must(writes.front().access()));
    return context.run_on_host(
        [=, n = writes.front().count(), value = must(from_bytes<std::uint32_t>(argument))] {
          std::fill_n(to, n, value);
        });
  }));
  return true;
}();

/// A random moment is the only thing that it waits for.
void pause_for(std::chrono::microseconds time) {
  const auto until = clock::now() + time;
  while (clock::now() < until)
    std::this_thread::yield();
}

class MemoryUnderKills : public ::testing::Test {
protected:
  static constexpr std::size_t buffers = 4; ///< of each device

  void SetUp() override {
    const auto seed = number_from_environment("TROUPE_CHAOS_SEED", 1);
    std::printf("TROUPE_CHAOS_SEED=%llu\n", static_cast<unsigned long long>(seed));
    random_.seed(seed);
    system_ = std::make_unique<test_system>(
        system_options{.devices = ranks_, .wrap = [this](std::shared_ptr<backend>) {
                         worker_backend_options options{.backend = on_cuda() ? "cuda" : "host",
                                                        .host = {.devices = ranks_}};
                         options.cuda.keep_freed = {}; // slabs come and go
                         return must(make_worker_backend(options));
                       }});
    world_config config;
    config.limits.standby = standby_policy::full;
    config.limits.restarts = 1'000'000;
    config.limits.restart_backoff = {};
    world_ = system_->open_world(config);
    for (std::size_t rank = 0; rank < world_.size(); ++rank) {
      for (auto* to : {&plain_, &retried_})
        for (std::size_t i = 0; i < buffers; ++i)
          to->emplace_back(world_.device_of(rank), size_, ++last_value_);
      for (auto* to : {&data_, &sums_, &retried_sums_})
        to->emplace_back(world_.device_of(rank), size_, ++last_value_);
    }
  }

  // -- requests

  void write(known_memory& to, const request_options& options) {
    const auto value = ++last_value_;
    const auto& on = to.where();
    if (chance(random_, 0.2))
      to.note_write(value, on.upload(to.memory(), host_buffer{elements(size_, value)}, options));
    else if (on_cuda()) // where a function on the host cannot write
      to.note_write(value, on.fill(to.memory(), value, options));
    else
      to.note_write(value, on.launch(write_value, to_bytes(value), {}, {to.memory()}, options));
  }

  /// Half of the requests are made again.
  void write_some(std::size_t rank, std::size_t n) {
    for (; n != 0; --n) {
      const auto which = rank * buffers + pick(random_, 0, buffers - 1);
      chance(random_, 0.5) ? write(plain_[which], once) : write(retried_[which], always);
    }
  }

  static std::vector<gpu_ref<std::uint32_t>> memory_of(const std::deque<known_memory>& all) {
    std::vector<gpu_ref<std::uint32_t>> result;
    for (auto& x : all)
      result.push_back(x.memory());
    return result;
  }

  void sum_up(std::deque<known_memory>& to, const request_options& options) {
    std::uint32_t sum = 0;
    for (auto& x : data_)
      sum += x.expected();
    const auto done = world_.all_reduce(memory_of(data_), memory_of(to), reduce_op::sum, options);
    for (auto& x : to)
      x.note_write(sum, done);
  }

  // -- kills

  void kill(std::int64_t process) {
    killed_.insert(process);
    ++kills_;
    static_cast<void>(::kill(static_cast<pid_t>(process), SIGKILL)); // it may have ended
  }
  void kill_worker_of(std::size_t rank) {
    struck_.insert(rank);
    kill(process_of(rank));
  }
  void strike_all() {
    for (std::size_t rank = 0; rank < world_.size(); ++rank)
      struck_.insert(rank);
  }

  /// Returns the process of a device that is not known to be killed. Blocks until there is one.
  std::int64_t process_of(std::size_t rank) {
    std::int64_t result = 0;
    EXPECT_TRUE(eventually([&] {
      const auto stats = answer_of(world_.device_of(rank).stats());
      result = stats ? stats->worker_pid : 0;
      return stats && !killed_.contains(result);
    }));
    return result;
  }
  std::set<std::int64_t> workers() {
    std::set<std::int64_t> result;
    for (std::size_t rank = 0; rank < world_.size(); ++rank)
      result.insert(process_of(rank));
    return result;
  }
  std::vector<std::int64_t> spares() {
    const auto used = workers();
    std::vector<std::int64_t> result;
    for (auto x : children())
      if (!used.contains(x) && !killed_.contains(x))
        result.push_back(x);
    return result;
  }

  // -- checks

  void until_prepared() {
    EXPECT_TRUE(eventually([&] {
      const auto now = world_.status();
      return now.phase == world_phase::ready && now.standby_ready;
    }));
  }

  /// Checks all memory when the losses so far are known.
  void check() {
    EXPECT_TRUE(eventually([&] { // their ends are known
      return std::ranges::none_of(children(), [&](auto x) { return killed_.contains(x); });
    }));
    workers();
    killed_.clear(); // other processes may get their numbers
    const auto if_struck = [](bool struck) {
      return struck ? lost_writes::any : lost_writes::none;
    };
    for (std::size_t i = 0; i < plain_.size(); ++i)
      plain_[i].check(if_struck(struck_.contains(i / buffers)));
    for (auto& x : sums_)
      x.check(if_struck(!struck_.empty()));
    for (auto* kind : {&retried_, &retried_sums_})
      for (auto& x : *kind)
        x.check(lost_writes::none);
    for (auto& x : data_)
      x.check(lost_writes::none);
    for (std::size_t rank = 0; rank < world_.size(); ++rank)
      EXPECT_EQ(world_.device_of(rank).generation(), 1u);
    struck_.clear();
  }

  /// After it, a sum must be right without being made again.
  void check_sum() {
    sum_up(retried_sums_, always);
    check();
    sum_up(sums_, once);
    check();
  }

  const int ranks_ = on_cuda() ? 2 : 3;
  const std::size_t size_ = on_cuda() ? std::size_t{1} << 22 : count; ///< elements of a buffer
  std::mt19937_64 random_;
  std::unique_ptr<test_system> system_;
  world world_;
  std::deque<known_memory> plain_; ///< requests that write these are not made again
  std::deque<known_memory> retried_;
  std::deque<known_memory> data_; ///< nothing writes these; one for each rank, as of the following
  std::deque<known_memory> sums_;
  std::deque<known_memory> retried_sums_;
  std::uint32_t last_value_ = 0;
  std::set<std::int64_t> killed_; ///< since the last check
  std::size_t kills_ = 0;         ///< so far
  std::set<std::size_t> struck_;  ///< ranks whose processes were killed since the last check
};

/// Work of the lost process, also what it had only queued, writes nothing after new requests did.
TEST_F(MemoryUnderKills, KeepsWhatIsWrittenAfterALoss) {
  for (int round = 0; round < 5 && !HasFailure(); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    until_prepared();
    const auto lost = pick(random_, 0, world_.size() - 1);
    const auto process = process_of(lost);
    for (std::size_t i = 0; i < 200; ++i)
      write(plain_[lost * buffers + i % buffers], once);
    sum_up(sums_, once); // is written by other devices, too
    pause_for(std::chrono::microseconds{pick(random_, 0, 4000)});
    struck_.insert(lost);
    kill(process);
    EXPECT_TRUE(eventually([&] { // what comes before the loss is known fails with it
      std::vector<pending<void>> fills;
      for (auto* kind : {&plain_, &sums_})
        for (auto& x : *kind)
          if (x.where().ordinal() == world_.device_of(lost).ordinal()) {
            fills.push_back(x.where().fill(x.memory(), ++last_value_));
            x.note_write(last_value_, fills.back());
          }
      return std::ranges::all_of(fills, [](auto& x) { return !error_of(answer_of(x)); });
    }));
    check();
    for (const auto until = clock::now() + 1s; clock::now() < until && !HasFailure();)
      for (auto* kind : {&plain_, &retried_, &sums_})
        for (auto& x : *kind)
          EXPECT_TRUE(x.is_right());
  }
}

/// The second kill hits the spare that has just taken over. The world waits for a new worker.
TEST_F(MemoryUnderKills, OutlivesTwoKillsWithinATenthOfASecond) {
  const int wanted = on_cuda() ? 5 : 20;
  int quick = 0;
  for (int round = 0; round < 10 * wanted && quick < wanted && !HasFailure(); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    until_prepared();
    const auto rank = pick(random_, 0, world_.size() - 1);
    const auto before = world_.device_of(rank).incarnation();
    const auto process = process_of(rank);
    write_some(rank, pick(random_, 0, 20));
    const auto begin = clock::now();
    kill(process);
    kill_worker_of(rank);
    quick += clock::now() - begin < 100ms ? 1 : 0;
    write_some(rank, pick(random_, 0, 20));
    check_sum();
    EXPECT_EQ(world_.device_of(rank).incarnation(), before + 2);
  }
  EXPECT_EQ(quick, wanted);
}

/// While a device gets new slabs, and others map them.
TEST_F(MemoryUnderKills, IsRightWhileSlabsAppear) {
  constexpr std::size_t large = std::size_t{9} << 20; // a slab has room for one
  const auto links = open_topology(*system_);
  const int rounds = on_cuda() ? 10 : 20;
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const auto lost = pick(random_, 0, world_.size() - 1);
    const auto process = process_of(lost);
    struck_.insert(lost);
    killed_.insert(process);
    std::jthread killer{[=, time = std::chrono::microseconds{pick(random_, 0, 30'000)}] {
      pause_for(time);
      static_cast<void>(::kill(static_cast<pid_t>(process), SIGKILL));
    }};
    std::vector<std::vector<gpu_ref<std::uint32_t>>> all; // by rank
    std::vector<pending<void>> copies;
    std::vector<pending<collective_done>> sums;
    const auto is_loss = [](const caf::error& why) {
      return !why || cause_of(why) == errc::worker_lost
                 ? ::testing::AssertionSuccess()
                 : ::testing::AssertionFailure() << describe(why);
    };
    for (int i = 0; i < 2; ++i) {
      std::vector<gpu_ref<std::uint32_t>> fresh;
      for (std::size_t rank = 0; rank < world_.size(); ++rank) {
        auto x = world_.device_of(rank).allocate<std::uint32_t>(large);
        if (x)
          fresh.push_back(*x);
        else
          EXPECT_TRUE(rank == lost && is_loss(x.error())) << describe(x.error());
      }
      if (fresh.size() != world_.size())
        continue;
      copies.push_back(links.copy(fresh.back(), fresh.front()));
      sums.push_back(world_.all_reduce(fresh, reduce_op::sum));
      all.push_back(std::move(fresh));
    }
    killer.join();
    for (auto& x : copies)
      EXPECT_TRUE(is_loss(error_of(answer_of(x))));
    for (auto& x : sums)
      EXPECT_TRUE(is_loss(error_of(answer_of(x))));
    check();
    for (auto& fresh : all) {
      std::uint32_t sum = 0;
      for (std::size_t rank = 0; rank < world_.size(); ++rank) {
        EXPECT_FALSE(fresh[rank].stale());
        must(answer_of(world_.device_of(rank).fill(fresh[rank], ++last_value_)));
        sum += last_value_;
      }
      EXPECT_TRUE(eventually([&] { return world_.status().phase == world_phase::ready; }));
      must(answer_of(world_.all_reduce(fresh, reduce_op::sum)));
      must(answer_of(world_.device_of(0).fill(fresh.front(), ++last_value_)));
      must(answer_of(links.copy(fresh.back(), fresh.front())));
      for (std::size_t rank = 0; rank < world_.size(); ++rank)
        EXPECT_TRUE(
            holds(world_.device_of(rank), fresh[rank],
                  elements(large, rank != 0 && rank + 1 != world_.size() ? sum : last_value_)));
    }
    check();
  }
}

/// The next process is killed while the spare of the one before is prepared.
TEST_F(MemoryUnderKills, OutlivesKillsWhileSparesStart) {
  const int rounds = on_cuda() ? 10 : 60;
  const std::size_t start_us = on_cuda() ? 1'500'000 : 30'000;
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const auto rank = pick(random_, 0, world_.size() - 1);
    write_some(rank, pick(random_, 0, 20));
    kill_worker_of(rank);
    write_some(rank, pick(random_, 0, 20));
    check();
    pause_for(std::chrono::microseconds{pick(random_, 0, start_us)});
  }
  check_sum();
}

/// Nothing is lost with a spare, not even a request, and another one comes.
TEST_F(MemoryUnderKills, LosesNothingWithItsSpares) {
  const int rounds = on_cuda() ? 5 : 30;
  const std::size_t start_us = on_cuda() ? 1'500'000 : 10'000;
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    until_prepared();
    const auto before = world_.status();
    const auto in_use = workers();
    auto idle = spares();
    ASSERT_EQ(idle.size(), world_.size());
    if (chance(random_, 0.5))
      idle.resize(1);
    for (auto x : idle) {
      write_some(pick(random_, 0, world_.size() - 1), pick(random_, 0, 20));
      kill(x);
      sum_up(sums_, once);
    }
    if (chance(random_, 0.5)) { // a spare that starts
      EXPECT_TRUE(eventually([&] { return spares().size() == world_.size(); }));
      pause_for(std::chrono::microseconds{pick(random_, 0, start_us)});
      const auto starting = spares();
      kill(starting[pick(random_, 0, starting.size() - 1)]);
    }
    check(); // no request may have failed
    EXPECT_TRUE(eventually([&] { return spares().size() == world_.size(); }));
    until_prepared();
    EXPECT_EQ(workers(), in_use);
    EXPECT_EQ(world_.status().members, before.members);
    EXPECT_EQ(world_.status().membership, before.membership);
    if (round % 3 == 0) { // they are what they seem
      const auto rank = pick(random_, 0, world_.size() - 1);
      const auto ready = spares();
      kill_worker_of(rank);
      EXPECT_EQ(std::ranges::count(ready, process_of(rank)), 1);
      check_sum();
    }
  }
}

/// Kills of workers and spares, alone and together, and planned handovers among them.
TEST_F(MemoryUnderKills, HoldsInAnyMixOfKillsAndHandovers) {
  const int rounds = on_cuda() ? 20 : 150;
  int moves = 0;
  std::size_t earlier = 0; ///< how many kills there were before the last round
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    if (chance(random_, 0.5))
      until_prepared();
    std::vector<pending<std::uint64_t>> handovers;
    std::map<std::size_t, bool> moving;
    const auto before = kills_;
    const auto events = pick(random_, 1, 3);
    const auto with_sum = pick(random_, 0, 2);
    for (std::size_t i = 0; i < events; ++i) {
      const auto rank = pick(random_, 0, world_.size() - 1);
      write_some(rank, pick(random_, 0, 20));
      if (chance(random_, 0.3))
        sum_up(sums_, once);
      if (i == with_sum) // one: it is not made again if a later one has written elsewhere
        sum_up(retried_sums_, always);
      switch (pick(random_, 0, 3)) {
      case 0:
      case 1:
        if (std::exchange(moving[rank], true))
          break; // one at a time
        handovers.push_back(world_.device_of(rank).hand_over());
        break;
      case 2:
        kill_worker_of(rank);
        break;
      default:
        if (const auto all = spares(); !all.empty()) {
          if (events != 1) // it may be about to take over, or do so before its end is known
            strike_all();
          kill(all[pick(random_, 0, all.size() - 1)]);
        }
      }
      write_some(rank, pick(random_, 0, 20));
      if (chance(random_, 0.5))
        pause_for(std::chrono::microseconds{pick(random_, 0, 5000)});
    }
    for (auto& x : handovers) {
      const auto moved = answer_of(x, 2 * patience);
      EXPECT_TRUE(moved || (kills_ != before && (has_code(moved, errc::worker_lost) ||
                                                 has_code(moved, errc::unavailable))))
          << describe(error_of(moved));
      moves += moved ? 1 : 0;
    }
    if (!handovers.empty() && kills_ != earlier)
      strike_all(); // perhaps to a spare whose end was not known yet
    earlier = before;
    check();
  }
  EXPECT_GT(moves, rounds / 10); // else the test shows little
  check_sum();
}

} // namespace

} // namespace troupe::testing
