// Sub-worlds: groups of a world's ranks as separate worlds.

#include "support/collective_round.hpp"
#include "support/world_fixture.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <latch>
#include <memory>
#include <optional>
#include <random>
#include <thread>

namespace troupe::testing {
namespace {

std::vector<int> ordinals_of(const world& x) {
  std::vector<int> result;
  for (auto& member : x.status().members)
    result.push_back(member.device);
  return result;
}

/// The layout of training programs: ranks of a row share tensors, and ranks of a column share
/// gradients.
struct grid {
  grid(const world& all, std::size_t width) {
    std::vector<std::int32_t> row;
    std::vector<std::int32_t> column;
    for (std::size_t i = 0; i < all.size(); ++i) {
      row.push_back(static_cast<std::int32_t>(i / width));
      column.push_back(static_cast<std::int32_t>(i % width));
    }
    rows = must(all.split("tensor", row));
    columns = must(all.split("data", column));
  }

  std::vector<world> rows;
  std::vector<world> columns;
};

/// Runs one collective of every verb and checks all its outputs.
void expect_every_verb(const world& over, std::uint64_t seed) {
  for (auto kind : round_kinds) {
    collective_spec spec{.what = kind, .type = dtype::float32, .count = 33, .seed = ++seed};
    spec.root = static_cast<int>(seed % over.size());
    round_of round{over, spec};
    EXPECT_TRUE(is_ok(answer_of(over.run(round.request())))) << to_string(kind);
    round.expect_right();
  }
  EXPECT_TRUE(is_ok(answer_of(over.barrier())));
}

// -- groups

TEST(Split, GivesAWorldForEachColor) {
  TROUPE_NEEDS_DEVICES(4);
  test_system system{{.devices = 4}};
  auto all = system.open_world({.name = "all"});
  auto groups = must(all.split("pipeline", {7, 3, 7, 3}));
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].status().name, "pipeline/3"); // by color
  EXPECT_EQ(ordinals_of(groups[0]), (std::vector{1, 3}));
  EXPECT_EQ(groups[1].status().name, "pipeline/7");
  EXPECT_EQ(ordinals_of(groups[1]), (std::vector{0, 2}));
  for (auto& x : groups) {
    EXPECT_EQ(x.status().phase, world_phase::ready);
    EXPECT_TRUE(works(x));
  }
  EXPECT_TRUE(works(all));
}

TEST(Split, OrdersRanksByKey) {
  TROUPE_NEEDS_DEVICES(4);
  test_system system{{.devices = 4}};
  auto all = system.open_world();
  auto reversed = must(all.split("reversed", {0, 0, 0, 0}, {30, 20, 10, -40}));
  ASSERT_EQ(reversed.size(), 1u);
  EXPECT_EQ(ordinals_of(reversed[0]), (std::vector{3, 2, 1, 0}));
  EXPECT_TRUE(works(reversed[0]));
  auto ties = must(all.split("ties", {0, 0, 0, 0}, {1, 0, 1, 0}));
  EXPECT_EQ(ordinals_of(ties[0]), (std::vector{1, 3, 0, 2}));
  EXPECT_TRUE(works(ties[0]));
}

TEST(Split, RanksOfANegativeColorAreInNoGroup) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{{.devices = 2}};
  auto all = system.open_world();
  auto one = must(all.split("one", {-1, 5}));
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(ordinals_of(one[0]), std::vector{1});
  EXPECT_TRUE(works(one[0]));
  EXPECT_TRUE(must(all.split("none", {-1, -1})).empty());
}

TEST(Split, SplitsWhatWasSplit) {
  TROUPE_NEEDS_DEVICES(4);
  test_system system{{.devices = 4}};
  auto all = system.open_world();
  auto halves = must(all.split("half", {0, 0, 1, 1}, {1, 0, 1, 0}));
  auto single = must(halves[1].split("single", {0, 1}));
  ASSERT_EQ(single.size(), 2u);
  EXPECT_EQ(ordinals_of(single[0]), std::vector{3}); // rank 0 of the second half
  EXPECT_EQ(ordinals_of(single[1]), std::vector{2});
  EXPECT_TRUE(works(single[0]));
}

TEST(Split, HasTheLimitsOfItsWorldOrItsOwn) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  world_config config;
  config.limits.deadline = 50ms;
  auto all = system.open_world(config);
  auto same = must(all.split("same", {0, 0}));
  world_limits patient;
  patient.stall_limit = 50ms;
  auto own = must(all.split("own", {0, 0}, {}, patient));
  auto refs = must(all.allocate(dtype::float32, 8, true));
  plan->add({fault::hang, verb::collective, 0});
  EXPECT_TRUE(has_code(answer_of(same[0].all_reduce(refs)), errc::deadline_exceeded));
  plan->release();
  plan->add({fault::not_issued, verb::collective, 0});
  EXPECT_TRUE(has_code(answer_of(own[0].all_reduce(refs)), errc::stalled));
}

struct grid_size {
  std::size_t rows;
  std::size_t columns;
};

class SplitGrid : public ::testing::TestWithParam<grid_size> {};

INSTANTIATE_TEST_SUITE_P(Sizes, SplitGrid,
                         ::testing::Values(grid_size{2, 2}, grid_size{2, 4}, grid_size{4, 2}),
                         [](const auto& x) {
                           return std::to_string(x.param.rows) + "x" +
                                  std::to_string(x.param.columns);
                         });

TEST_P(SplitGrid, EveryVerbInEveryGroup) {
  const auto [rows, columns] = GetParam();
  const auto ranks = static_cast<int>(rows * columns);
  TROUPE_NEEDS_DEVICES(ranks);
  test_system system{{.devices = ranks}};
  auto all = system.open_world();
  grid groups{all, columns};
  ASSERT_EQ(groups.rows.size(), rows);
  ASSERT_EQ(groups.columns.size(), columns);
  std::uint64_t seed = 0;
  for (auto* half : {&groups.rows, &groups.columns})
    for (auto& x : *half)
      expect_every_verb(x, seed += 100);
}

// The sum over all ranks in two steps, in the same memory.
TEST_P(SplitGrid, RowsAndThenColumnsAreAll) {
  const auto [rows, columns] = GetParam();
  const auto ranks = static_cast<int>(rows * columns);
  TROUPE_NEEDS_DEVICES(ranks);
  test_system system{{.devices = ranks}};
  auto all = system.open_world();
  grid groups{all, columns};
  const auto data = prepare(all, {.type = dtype::int64, .op = reduce_op::sum}, 1001);
  auto sum_in = [&](const world& group, std::size_t first, std::size_t step) {
    std::vector<any_gpu_ref> refs;
    for (std::size_t i = 0; i < group.size(); ++i)
      refs.push_back(data.send[first + i * step]);
    return group.all_reduce(refs);
  };
  std::vector<pending<collective_done>> done;
  for (std::size_t i = 0; i < rows; ++i)
    done.push_back(sum_in(groups.rows[i], i * columns, 1));
  for (std::size_t i = 0; i < columns; ++i)
    done.push_back(sum_in(groups.columns[i], i, columns));
  for (auto& x : done)
    EXPECT_TRUE(is_ok(answer_of(x)));
  EXPECT_TRUE(reduced(all, data, data.send));
}

// -- bad input

TEST(Split, RefusesWrongNumbersAtOnce) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto all = system.open_world();
  using numbers = std::vector<std::int32_t>;
  for (auto& [name, colors, keys] : {std::tuple{"x", numbers{}, numbers{}},
                                     {"x", {0}, {}},
                                     {"x", {0, 0, 0}, {}},
                                     {"x", {0, 0}, {1}},
                                     {"x", {0, 0}, {1, 2, 3}},
                                     {"x", {-1, -1}, {1}},
                                     {"", {0, 0}, {}}}) {
    stopwatch watch;
    auto groups = all.split(name, colors, keys);
    EXPECT_LT(watch.elapsed(), at_once);
    ASSERT_TRUE(has_code(groups, errc::invalid_argument));
    EXPECT_EQ(failure_of(error_of(groups))->verb, "split");
    EXPECT_TRUE(has_code(ask<world_split>(system, all.actor(), split{name, colors, keys, {}}),
                         errc::invalid_argument));
  }
}

TEST(Split, ChecksTheMembership) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto all = system.open_world();
  auto old = ask<world_split>(system, all.actor(), split{"x", {0, 0}, {}, {.membership = 17}});
  ASSERT_TRUE(has_code(old, errc::membership_changed));
  EXPECT_EQ(status_of(error_of(old))->membership, 1u);
}

TEST(Split, RefusesAWorldThatEnded) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto all = system.open_world();
  world_feed feed{system, all.actor()};
  EXPECT_TRUE(is_ok(ask<void>(system, all.actor(), shutdown{})));
  feed.until(world_phase::shut_down);
  EXPECT_TRUE(has_code(all.split("x", {0, 0}), errc::unavailable));
}

TEST(Split, GivesTheReasonOfTheGroupThatCannotBeBuilt) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 4, .faults = plan}};
  world_config config;
  config.limits.restarts = 1;
  config.limits.restart_backoff = 1ms;
  auto all = system.open_world(config);
  plan->add({fault::fail, verb::connect, 3, 1, forever});
  auto groups = all.split("half", {0, 0, 1, 1});
  ASSERT_TRUE(has_code(groups, errc::nccl_error));
  plan->disarm();
  EXPECT_TRUE(works(all));
  EXPECT_TRUE(is_ok(all.split("half", {0, 0, 1, 1})));
}

/// Makes a blocking call on a thread that must not block.
class splitting_actor : public detail::actor_base<> {
public:
  splitting_actor(caf::actor_config& cfg, world x, std::function<void(const caf::error&)> tell)
      : actor_base(cfg), world_(std::move(x)), tell_(std::move(tell)) {}

  caf::behavior make_behavior() override {
    tell_(error_of(world_->split("x", {0, 0})));
    world_.reset();
    return {};
  }

private:
  std::optional<world> world_;
  std::function<void(const caf::error&)> tell_;
};

// INV-5
TEST(Split, DoesNotBlockAnActor) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto all = system.open_world();
  flag told;
  caf::error got;
  system.get().spawn<splitting_actor>(all, [&](const caf::error& why) {
    got = why;
    told.set();
  });
  ASSERT_TRUE(told.wait());
  EXPECT_TRUE(has_code(got, errc::would_block));
}

// -- as a message

TEST(Split, AnswersActorsWithActors) {
  TROUPE_NEEDS_DEVICES(4);
  test_system system{{.devices = 4}};
  auto all = system.open_world();
  auto made =
      must(ask<world_split>(system, all.actor(), split{"half", {1, 0, 1, 0}, {5, 0, 4, 0}, {}}));
  ASSERT_EQ(made.groups.size(), 2u);
  EXPECT_EQ(made.groups[0].color, 0);
  EXPECT_EQ(made.groups[0].name, "half/0");
  EXPECT_EQ(made.groups[0].ranks, (std::vector<std::int32_t>{1, 3}));
  EXPECT_EQ(made.groups[1].color, 1);
  EXPECT_EQ(made.groups[1].name, "half/1");
  EXPECT_EQ(made.groups[1].ranks, (std::vector<std::int32_t>{2, 0}));
  for (auto& group : made.groups) {
    EXPECT_EQ(must(ask<world_status>(system, group.actor, get_status{})).name, group.name);
    std::vector<any_gpu_ref> refs;
    for (auto rank : group.ranks) {
      auto d = all.device_of(static_cast<std::size_t>(rank));
      refs.push_back(must(answer_of(d.allocate(dtype::int32, 100))));
      EXPECT_TRUE(is_ok(answer_of(d.fill(must(gpu_ref<std::int32_t>::from(refs.back())), rank))));
    }
    EXPECT_TRUE(is_ok(ask<collective_done>(system, group.actor, all_reduce{refs, {}})));
    for (std::size_t i = 0; i < refs.size(); ++i)
      EXPECT_TRUE(holds(all.device_of(static_cast<std::size_t>(group.ranks[i])), refs[i],
                        std::vector<std::int32_t>(100, group.ranks[0] + group.ranks[1])));
    EXPECT_TRUE(is_ok(ask<void>(system, group.actor, shutdown{})));
  }
}

TEST(Split, BuildsAllGroupsAtTheSameTime) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 4, .faults = plan}};
  auto all = system.open_world();
  plan->add({fault::block, verb::build, any_device, 1, 4});
  auto made = must(ask<world_split>(system, all.actor(), split{"each", {0, 1, 2, 3}, {}, {}}));
  EXPECT_TRUE(plan->wait_injected(fault::block, 4, patience));
  plan->release();
  for (auto& group : made.groups) {
    world_feed{system, group.actor}.until(world_phase::ready);
    caf::anon_send_exit(group.actor, caf::exit_reason::user_shutdown);
  }
}

// -- independence of worlds

TEST(SplitLife, GroupsOutliveTheirWorld) {
  TROUPE_NEEDS_DEVICES(4);
  test_system system{{.devices = 4}};
  std::vector<world> groups;
  {
    auto all = system.open_world();
    groups = must(all.split("half", {0, 0, 1, 1}));
    world_feed feed{system, all.actor()};
    EXPECT_TRUE(is_ok(ask<void>(system, all.actor(), shutdown{})));
    feed.until(world_phase::shut_down);
  }
  for (auto& x : groups) {
    EXPECT_TRUE(works(x));
    EXPECT_EQ(x.status().epoch, 1u);
  }
}

TEST(SplitLife, TheWorldOutlivesItsGroups) {
  TROUPE_NEEDS_DEVICES(4);
  test_system system{{.devices = 4}};
  auto all = system.open_world();
  auto groups = must(all.split("half", {0, 0, 1, 1}));
  groups.erase(groups.begin());
  EXPECT_TRUE(works(all));
  EXPECT_TRUE(works(groups[0]));
  EXPECT_EQ(all.status().epoch, 1u);
  EXPECT_EQ(groups[0].status().epoch, 1u);
}

TEST(SplitLife, AResetConcernsTheGroupsOfTheDevice) {
  TROUPE_NEEDS_DEVICES(4);
  test_system system{{.devices = 4}};
  auto all = system.open_world();
  auto groups = must(all.split("half", {0, 0, 1, 1}));
  world_feed of_all{system, all.actor()};
  world_feed of_group{system, groups[1].actor()};
  auto kept = prepare(groups[0], {.type = dtype::float32, .op = reduce_op::sum}, 100);
  EXPECT_EQ(must(answer_of(all.device_of(2).reset())), 2u);
  EXPECT_EQ(of_all.until(world_phase::ready, 2).membership, 2u);
  const auto again = of_group.until(world_phase::ready, 2);
  EXPECT_EQ(again.membership, 2u);
  EXPECT_EQ(again.members[0].generation, 2u);
  EXPECT_EQ(groups[0].status().epoch, 1u); // its devices were not affected
  EXPECT_EQ(groups[0].status().membership, 1u);
  EXPECT_TRUE(is_ok(answer_of(groups[0].all_reduce(kept.send))));
  EXPECT_TRUE(reduced(groups[0], kept, kept.send));
  EXPECT_TRUE(works(groups[1]));
  EXPECT_TRUE(works(all));
}

TEST(SplitLife, ADeviceThatEndsEndsItsGroupsOnly) {
  TROUPE_NEEDS_DEVICES(4);
  test_system system{{.devices = 4}};
  auto all = system.open_world();
  auto groups = must(all.split("half", {0, 0, 1, 1}));
  world_feed of_all{system, all.actor()};
  world_feed of_group{system, groups[1].actor()};
  all.device_of(3).shutdown();
  of_all.until(world_phase::failed);
  of_group.until(world_phase::failed);
  EXPECT_TRUE(works(groups[0]));
  EXPECT_TRUE(has_code(all.split("half", {0, 0, 1, 1}), errc::unavailable));
}

// -- load

/// Drives one world with random verbs, several operations in flight. Poisons the output of each
/// operation before it and downloads it afterwards, without waiting in between.
class driver {
public:
  driver(const world& over, std::uint64_t seed) : over_(over), random_(seed) {
    for (std::size_t i = 0; i < slots; ++i)
      rounds_.push_back(make_round());
  }

  /// Starts one more operation. Waits for the oldest one if enough are in flight.
  void step() {
    auto& x = *rounds_[next_++ % slots];
    settle(x);
    for (std::size_t i = 0; i < over_.size(); ++i) {
      x.moved.push_back(x.devices[i].upload(x.recv[i], x.before[i]));
    }
    x.done = over_.run(x.what);
    for (std::size_t i = 0; i < over_.size(); ++i)
      x.moved.push_back(x.devices[i].download(x.recv[i], std::span{x.after[i]}));
    ++started_;
  }

  void settle_all() {
    for (auto& x : rounds_)
      settle(*x);
  }

  std::size_t started() const { return started_; }
  std::size_t right() const { return right_; }
  const std::vector<caf::error>& errors() const { return errors_; }

private:
  static constexpr std::size_t slots = 16;

  struct round {
    collective_spec spec;
    collective what;
    std::vector<device> devices;
    std::vector<std::vector<std::byte>> sends;
    std::vector<std::vector<std::byte>> before;
    std::vector<std::vector<std::byte>> after;
    std::vector<any_gpu_ref> recv;
    std::optional<pending<collective_done>> done;
    std::vector<pending<void>> moved;
  };

  std::unique_ptr<round> make_round() {
    auto n = over_.size();
    auto pick = [&](const auto& from) { return from[random_() % std::size(from)]; };
    auto result = std::make_unique<round>();
    auto& spec = result->spec;
    spec.what = pick(round_kinds);
    spec.type = pick(std::array{dtype::int32, dtype::uint64, dtype::float32, dtype::float64});
    spec.op = pick(std::array{reduce_op::sum, reduce_op::max, reduce_op::min});
    spec.count = 1 + random_() % 40;
    spec.ranks = static_cast<int>(n);
    spec.root = static_cast<int>(random_() % n);
    spec.seed = random_();
    spec.kind = input_kind::exact;
    round_of made{over_, spec};
    result->spec = made.spec();
    result->what = made.request();
    result->sends = made.sends();
    result->recv = made.recv();
    for (std::size_t i = 0; i < n; ++i) {
      result->devices.push_back(over_.device_of(i));
      result->before.emplace_back(result->recv[i].size_bytes(), std::byte{0xa5});
      result->after.emplace_back(result->recv[i].size_bytes());
    }
    return result;
  }

  void settle(round& x) {
    if (!x.done)
      return;
    auto error = error_of(answer_of(*x.done));
    x.done.reset();
    bool moved = true;
    for (auto& m : x.moved)
      moved &= static_cast<bool>(answer_of(m));
    x.moved.clear();
    if (error) {
      errors_.push_back(error);
      return;
    }
    EXPECT_TRUE(moved);
    bool right = moved;
    for (std::size_t i = 0; i < over_.size(); ++i) {
      auto found = check_collective(x.spec, static_cast<int>(i), x.sends, x.before[i], x.after[i]);
      EXPECT_TRUE(found) << to_string(x.spec.what) << ", rank " << i << ": " << to_string(found);
      right &= static_cast<bool>(found);
    }
    right_ += right ? 1 : 0;
  }

  world over_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<round>> rounds_;
  std::size_t next_ = 0;
  std::size_t started_ = 0;
  std::size_t right_ = 0;
  std::vector<caf::error> errors_;
};

// INV-6, INV-9, INV-12: one order for all worlds, so they cannot wait for each other in a cycle.
TEST(SplitLoad, TenThousandOperationsOfOverlappingWorlds) {
  TROUPE_NEEDS_DEVICES(4);
  constexpr std::size_t wanted = 10'000;
  test_system system{{.devices = 8}};
  auto all = system.open_world();
  grid groups{all, all.size() / 2};
  std::vector<world> worlds{all, all};
  for (auto* half : {&groups.rows, &groups.columns})
    worlds.insert(worlds.end(), half->begin(), half->end());
  const auto share = wanted / worlds.size() + 1;
  std::atomic<std::size_t> right = 0;
  std::latch ready{static_cast<std::ptrdiff_t>(worlds.size())};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < worlds.size(); ++t)
    threads.emplace_back([&, t] {
      driver client{worlds[t], t + 1};
      ready.arrive_and_wait();
      while (client.started() < share)
        client.step();
      client.settle_all();
      right += client.right();
      for (auto& x : client.errors())
        ADD_FAILURE() << describe(x);
    });
  for (auto& x : threads)
    x.join();
  EXPECT_EQ(right, share * worlds.size());
  for (auto& x : worlds)
    EXPECT_EQ(x.status().epoch, 1u); // no stall
}

} // namespace
} // namespace troupe::testing
