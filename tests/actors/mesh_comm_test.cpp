// Collectives over host memory, one handle per rank.

#include "support/world_fixture.hpp"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

namespace troupe::testing {
namespace {

constexpr std::size_t chunk_bytes = 4096;

/// Runs `f(rank)` in one thread for each rank.
void on_ranks(std::size_t ranks, const std::function<void(std::size_t)>& f) {
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks; ++i)
    threads.emplace_back([&f, i] { f(i); });
  for (auto& x : threads)
    x.join();
}

enum class memory_kind : std::uint8_t { pageable, pinned };

/// Host memory of one kind, in the form that calls take.
class host_memory {
public:
  host_memory(memory_kind kind, const device& on, std::span<const std::byte> content) {
    buffer_ = kind == memory_kind::pinned && !content.empty()
                  ? must(on.allocate_pinned(content.size()))
                  : host_buffer{content.size()};
    std::copy(content.begin(), content.end(), buffer_.writable().begin());
    direct_ = buffer_.pinned();
  }

  host_source source() const {
    return direct_ ? host_source{buffer_} : host_source{buffer_.bytes()};
  }
  host_target target() const {
    return direct_ ? host_target{buffer_} : host_target{buffer_.writable()};
  }
  std::span<const std::byte> bytes() const { return buffer_.bytes(); }

private:
  host_buffer buffer_;
  bool direct_ = false;
};

std::vector<std::byte> poisoned(std::size_t size) {
  std::vector<std::byte> result(size);
  poison(result);
  return result;
}

/// Makes the call of one rank, by kind.
pending<void> call(const mesh_comm& mine, const collective_spec& spec, const host_memory& send,
                   const host_memory& recv, const mesh_options& options) {
  switch (spec.what) {
  case collective_kind::all_reduce:
    return mine.all_reduce(send.source(), recv.target(), spec.type, spec.op, options);
  case collective_kind::all_gather:
    return mine.all_gather(send.source(), recv.target(), spec.type, options);
  case collective_kind::reduce_scatter:
    return mine.reduce_scatter(send.source(), recv.target(), spec.type, spec.op, options);
  default:
    throw std::runtime_error("no such call");
  }
}

constexpr collective_kind mesh_kinds[] = {collective_kind::all_reduce, collective_kind::all_gather,
                                          collective_kind::reduce_scatter};

/// Runs one collective on all of `ranks` and checks the result on each.
void expect_right(const std::vector<mesh_comm>& ranks, collective_spec spec, memory_kind kind,
                  const mesh_options& options = {}) {
  spec.ranks = static_cast<int>(ranks.size());
  const auto sends = random_sends(spec);
  on_ranks(ranks.size(), [&](std::size_t i) {
    auto r = must(ranks[i].rank(options.group));
    const auto& input = sends[static_cast<std::size_t>(r)];
    auto bytes = send_count(spec, r) * size_of(spec.type);
    host_memory send{kind, ranks[i].where(), std::span{input}.first(bytes)};
    const auto before = poisoned(recv_count(spec, r) * size_of(spec.type));
    host_memory recv{kind, ranks[i].where(), before};
    EXPECT_TRUE(is_ok(answer_of(call(ranks[i], spec, send, recv, options))));
    auto found = check_collective(spec, r, sends, before, recv.bytes());
    EXPECT_TRUE(found) << to_string(spec.what) << " of " << spec.count << ' '
                       << to_string(spec.type) << ", rank " << r << ": " << to_string(found);
    EXPECT_TRUE(std::ranges::equal(send.bytes(), std::span{input}.first(bytes)));
  });
}

class MeshComm : public ::testing::Test {
protected:
  void open(int ranks, mesh_config config = {}, world_config of_world = {}) {
    system.emplace(system_options{.devices = ranks, .faults = plan});
    all.emplace(system->open_world(std::move(of_world)));
    config.chunk_bytes = std::min(config.chunk_bytes, chunk_bytes);
    mesh = must(mesh_comm::open(*all, std::move(config)));
  }

  /// Expects that a sum over all ranks is correct, so the ranks' calls still match.
  void expect_works(std::uint64_t seed = 77) {
    expect_right(
        mesh,
        {.what = collective_kind::all_reduce, .type = dtype::int32, .count = 5000, .seed = seed},
        memory_kind::pageable);
  }

  std::shared_ptr<fault_plan> plan = std::make_shared<fault_plan>();
  std::optional<test_system> system;
  std::optional<world> all;
  std::vector<mesh_comm> mesh;
};

// -- verbs

struct mesh_case {
  int ranks;
  memory_kind kind;
};

class MeshCollectives : public MeshComm, public ::testing::WithParamInterface<mesh_case> {};

INSTANTIATE_TEST_SUITE_P(RanksAndMemory, MeshCollectives,
                         ::testing::Values(mesh_case{1, memory_kind::pageable},
                                           mesh_case{2, memory_kind::pageable},
                                           mesh_case{2, memory_kind::pinned},
                                           mesh_case{3, memory_kind::pinned},
                                           mesh_case{4, memory_kind::pageable}),
                         [](const auto& x) {
                           return std::to_string(x.param.ranks) +
                                  (x.param.kind == memory_kind::pinned ? "Pinned" : "Pageable");
                         });

TEST_P(MeshCollectives, EveryVerbAndType) {
  const auto [ranks, kind] = GetParam();
  TROUPE_NEEDS_DEVICES(ranks);
  open(ranks);
  std::uint64_t seed = 0;
  for (auto what : mesh_kinds)
    for (auto type : real_dtypes) {
      // Less than one chunk, and several chunks.
      for (std::size_t count : {std::size_t{37}, 3 * chunk_bytes / size_of(type) + 5})
        expect_right(
            mesh,
            {.what = what, .type = type, .count = count, .op = reduce_op::max, .seed = ++seed},
            kind);
    }
}

TEST_P(MeshCollectives, EveryOperation) {
  const auto [ranks, kind] = GetParam();
  TROUPE_NEEDS_DEVICES(ranks);
  open(ranks);
  std::uint64_t seed = 0;
  for (auto what : {collective_kind::all_reduce, collective_kind::reduce_scatter})
    for (auto op : all_reduce_ops)
      if (op != reduce_op::premul_sum)
        expect_right(
            mesh, {.what = what, .type = dtype::float32, .count = 2500, .op = op, .seed = ++seed},
            kind);
}

TEST_P(MeshCollectives, AllSizes) {
  const auto [ranks, kind] = GetParam();
  TROUPE_NEEDS_DEVICES(ranks);
  open(ranks);
  constexpr std::size_t chunk = chunk_bytes / 4;
  for (auto what : mesh_kinds)
    for (std::size_t count : {std::size_t{0}, std::size_t{1}, chunk - 1, chunk, chunk + 1,
                              4 * chunk, 4 * chunk + 1, 11 * chunk - 7})
      expect_right(mesh, {.what = what, .type = dtype::int32, .count = count, .seed = count + 1},
                   kind);
}

TEST_P(MeshCollectives, InPlace) {
  const auto [ranks, kind] = GetParam();
  TROUPE_NEEDS_DEVICES(ranks);
  open(ranks);
  for (auto what : mesh_kinds) {
    collective_spec spec{.what = what, .type = dtype::int64, .count = 1500, .ranks = ranks};
    const auto sends = random_sends(spec);
    on_ranks(mesh.size(), [&, kind = kind](std::size_t i) {
      auto r = static_cast<int>(i);
      auto block = spec.count * size_of(spec.type);
      bool gathers = what == collective_kind::all_gather;
      bool reduces_all = what == collective_kind::all_reduce;
      auto content = poisoned(reduces_all ? block : block * mesh.size());
      std::copy(sends[i].begin(), sends[i].end(),
                content.begin() + static_cast<std::ptrdiff_t>(gathers ? i * block : 0));
      host_buffer whole{content.size()};
      if (kind == memory_kind::pinned) {
        whole = must(mesh[i].where().allocate_pinned(content.size()));
      }
      std::ranges::copy(content, whole.writable().begin());
      auto part = reduces_all ? whole : must(whole.slice(i * block, block));
      auto source = [&](const host_buffer& x) {
        return x.pinned() ? host_source{x} : host_source{x.bytes()};
      };
      auto target = [&](const host_buffer& x) {
        return x.pinned() ? host_target{x} : host_target{x.writable()};
      };
      auto done = reduces_all ? mesh[i].all_reduce(target(whole), spec.type)
                  : gathers   ? mesh[i].all_gather(source(part), target(whole), spec.type)
                              : mesh[i].reduce_scatter(source(whole), target(part), spec.type);
      EXPECT_TRUE(is_ok(answer_of(done)));
      auto got = gathers ? whole.bytes() : part.bytes();
      auto found = check_collective(spec, r, sends, poisoned(got.size()), got);
      EXPECT_TRUE(found) << to_string(what) << ", rank " << i << ": " << to_string(found);
    });
  }
}

TEST_P(MeshCollectives, Broadcast) {
  const auto [ranks, kind] = GetParam();
  TROUPE_NEEDS_DEVICES(ranks);
  open(ranks);
  for (int root = 0; root < ranks; ++root)
    for (auto type : real_dtypes)
      for (std::size_t count : {1, 1000, 20'001}) {
        const auto content = random_bytes(count * size_of(type), count + 7);
        on_ranks(mesh.size(), [&, kind = kind](std::size_t i) {
          host_memory memory{kind, mesh[i].where(),
                             static_cast<int>(i) == root ? content : poisoned(content.size())};
          EXPECT_TRUE(is_ok(answer_of(mesh[i].broadcast(memory.target(), type, root))));
          EXPECT_TRUE(std::ranges::equal(memory.bytes(), content)) << "rank " << i;
        });
      }
}

TEST_P(MeshCollectives, MessagesOfAllRanksToAll) {
  const auto [ranks, kind] = GetParam();
  TROUPE_NEEDS_DEVICES(ranks);
  open(ranks);
  const auto n = mesh.size();
  auto content = [&](std::size_t from, std::size_t to, std::size_t k) {
    return random_bytes(8 * (1 + 900 * k + from), 1000 * from + 10 * to + k);
  };
  on_ranks(n, [&, kind = kind](std::size_t i) {
    // Makes all calls before it waits for any of them.
    std::vector<host_memory> memory;
    std::vector<std::vector<std::byte>> want;
    std::vector<pending<void>> all_done;
    for (std::size_t other = 0; other < n; ++other)
      for (std::size_t k = 0; k < 4 && other != i; ++k) {
        want.push_back(content(i, other, k));
        memory.emplace_back(kind, mesh[i].where(), want.back());
        all_done.push_back(
            mesh[i].send(memory.back().source(), dtype::float64, static_cast<int>(other)));
        want.push_back(content(other, i, k));
        memory.emplace_back(kind, mesh[i].where(), poisoned(want.back().size()));
        all_done.push_back(
            mesh[i].recv(memory.back().target(), dtype::float64, static_cast<int>(other)));
      }
    for (auto& x : all_done)
      EXPECT_TRUE(is_ok(answer_of(x)));
    for (std::size_t k = 0; k < want.size(); ++k)
      EXPECT_TRUE(std::ranges::equal(memory[k].bytes(), want[k]));
  });
}

TEST_P(MeshCollectives, BarrierWaitsForAll) {
  const auto [ranks, kind] = GetParam();
  TROUPE_NEEDS_DEVICES(ranks);
  open(ranks);
  std::atomic<int> here = 0;
  on_ranks(mesh.size(), [&](std::size_t i) {
    for (int round = 1; round <= 20; ++round) {
      ++here;
      EXPECT_TRUE(is_ok(answer_of(mesh[i].barrier())));
      EXPECT_GE(here, round * static_cast<int>(mesh.size()));
    }
  });
}

// By then the barrier's channel has memory of the other collectives.
TEST_P(MeshCollectives, BarriersAmongOthers) {
  const auto [ranks, kind] = GetParam();
  TROUPE_NEEDS_DEVICES(ranks);
  open(ranks);
  for (std::uint64_t round = 0; round < 3; ++round) {
    expect_works(round);
    on_ranks(mesh.size(), [&](std::size_t i) { EXPECT_TRUE(is_ok(answer_of(mesh[i].barrier()))); });
  }
}

TEST_F(MeshComm, AsksWithoutWaiting) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  constexpr std::size_t calls = 20;
  on_ranks(mesh.size(), [&](std::size_t i) {
    std::vector<std::vector<std::int32_t>> data;
    for (std::size_t k = 0; k < calls; ++k)
      data.emplace_back(3000, static_cast<std::int32_t>(100 * i + k));
    std::vector<pending<void>> done;
    for (auto& x : data)
      done.push_back(mesh[i].all_reduce(std::as_writable_bytes(std::span{x}), dtype::int32));
    for (std::size_t k = 0; k < calls; ++k) {
      EXPECT_TRUE(is_ok(answer_of(done[k])));
      EXPECT_EQ(data[k], std::vector<std::int32_t>(3000, static_cast<std::int32_t>(100 + 2 * k)));
    }
  });
}

TEST_F(MeshComm, KeepsItsBuffers) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  expect_works();
  const auto memory = plan->add({fault::slow, verb::allocate, any_device, 1, forever});
  const auto pinned = plan->add({fault::slow, verb::allocate_pinned, any_device, 1, forever});
  for (std::uint64_t i = 0; i < 10; ++i)
    expect_works(i);
  EXPECT_EQ(plan->injected_by(memory), 0u);
  EXPECT_EQ(plan->injected_by(pinned), 0u);
}

// -- groups

TEST_F(MeshComm, GroupsByName) {
  TROUPE_NEEDS_DEVICES(4);
  system.emplace(system_options{.devices = 4});
  all.emplace(system->open_world());
  auto groups = must(all->split("row", {0, 0, 1, 1}));
  auto columns = must(all->split("column", {0, 1, 0, 1}, {1, 1, 0, 0}));
  std::move(columns.begin(), columns.end(), std::back_inserter(groups));
  mesh = must(mesh_comm::open(*all, {.groups = groups, .chunk_bytes = chunk_bytes}));
  EXPECT_EQ(must(mesh[2].rank("row")), 0);
  EXPECT_EQ(must(mesh[2].rank("row/1")), 0);
  EXPECT_EQ(must(mesh[2].rank("column")), 0);
  EXPECT_EQ(must(mesh[0].rank("column/0")), 1);
  EXPECT_EQ(must(mesh[2].rank("")), 2);
  EXPECT_EQ(must(mesh[2].size("row")), 2u);
  EXPECT_EQ(mesh[2].size(), 4u);
  EXPECT_TRUE(has_code(mesh[2].rank("row/0"), errc::invalid_argument));
  EXPECT_TRUE(has_code(mesh[2].size("nothing"), errc::invalid_argument));
  // All groups at the same time, with several threads per rank.
  std::vector<std::thread> threads;
  for (std::uint64_t k = 0; k < 4; ++k) {
    threads.emplace_back([&, k] {
      constexpr std::size_t members[][2] = {{0, 1}, {2, 3}, {0, 2}, {1, 3}};
      std::vector<mesh_comm> pair{mesh[members[k][0]], mesh[members[k][1]]};
      for (std::uint64_t i = 0; i < 10; ++i)
        for (auto what : mesh_kinds)
          expect_right(pair,
                       {.what = what, .type = dtype::float32, .count = 3001, .seed = 100 * k + i},
                       i % 2 == 0 ? memory_kind::pageable : memory_kind::pinned,
                       {.group = k < 2 ? "row" : "column"});
    });
  }
  threads.emplace_back([&] {
    for (std::uint64_t i = 0; i < 10; ++i)
      expect_works(i);
  });
  for (auto& x : threads)
    x.join();
}

TEST_F(MeshComm, RefusesGroupsThatCannotBe) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  auto halves = must(all->split("half", {0, 1}));
  EXPECT_TRUE(has_code(mesh_comm::open(halves[0], {.groups = {*all}}), errc::invalid_argument));
  auto same = must(all->split("half", {0, 1}));
  halves.push_back(same[0]);
  EXPECT_TRUE(has_code(mesh_comm::open(*all, {.groups = halves}), errc::invalid_argument));
  EXPECT_TRUE(has_code(mesh_comm::open(*all, {.chunk_bytes = 15}), errc::invalid_argument));
  for (std::size_t chunks : {std::size_t{0}, std::size_t{1025}, SIZE_MAX})
    EXPECT_TRUE(has_code(mesh_comm::open(*all, {.chunks = chunks}), errc::invalid_argument));
}

// -- bad input

TEST_F(MeshComm, ChecksSizesAtOnce) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  std::vector<std::byte> memory(64);
  std::span<std::byte> bytes{memory};
  auto& mine = mesh[0];
  const auto refused = [](const pending<void>& x) {
    return x.ready() ? has_code(answer_of(x), errc::invalid_argument)
                     : ::testing::AssertionFailure() << "it was not refused at once";
  };
  EXPECT_TRUE(refused(mine.all_reduce(bytes.first(7), dtype::float32)));
  EXPECT_TRUE(refused(mine.all_reduce(bytes.first(8), bytes.subspan(8, 16), dtype::float32)));
  EXPECT_TRUE(refused(mine.all_reduce(bytes.first(8), bytes.subspan(4, 8), dtype::float32)));
  EXPECT_TRUE(refused(mine.all_gather(bytes.first(8), bytes.subspan(8, 8), dtype::float32)));
  EXPECT_TRUE(refused(mine.all_gather(bytes.first(8), bytes.subspan(4, 16), dtype::float32)));
  EXPECT_TRUE(refused(mine.all_gather(bytes.first(6), bytes.subspan(8, 12), dtype::float32)));
  EXPECT_TRUE(refused(mine.reduce_scatter(bytes.first(8), bytes.subspan(8, 8), dtype::float32)));
  EXPECT_TRUE(refused(mine.reduce_scatter(bytes.first(12), bytes.subspan(16, 6), dtype::uint8,
                                          reduce_op::premul_sum)));
  EXPECT_TRUE(refused(mine.broadcast(bytes, dtype::int8, 2)));
  EXPECT_TRUE(refused(mine.broadcast(bytes, dtype::int8, -1)));
  EXPECT_TRUE(refused(mine.send(bytes, dtype::int8, 0)));
  EXPECT_TRUE(refused(mine.send(bytes, dtype::int8, 2)));
  EXPECT_TRUE(refused(mine.recv(bytes.first(3), dtype::float16, 1)));
  EXPECT_TRUE(refused(mine.barrier({.group = "nothing"})));
  expect_works(); // no refused call counts
}

// -- failures

TEST_F(MeshComm, AMismatchIsNamedToAllAndTheyStayInStep) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  for (int round = 0; round < 3; ++round) {
    // Rank 0 has more chunks than the others.
    on_ranks(mesh.size(), [&](std::size_t i) {
      std::vector<std::byte> memory((i == 0 ? 7 : 2) * chunk_bytes);
      auto answer = answer_of(mesh[i].all_reduce(std::span{memory}, dtype::int32));
      ASSERT_TRUE(has_code(answer, errc::collective_mismatch));
      EXPECT_NE(describe(error_of(answer)).find("where rank"), std::string::npos);
    });
    expect_works();
    on_ranks(mesh.size(), [&](std::size_t i) {
      std::vector<std::byte> memory(3 * chunk_bytes);
      auto bytes = std::span{memory};
      auto answer = answer_of(i == 0 ? mesh[i].all_reduce(bytes, dtype::float32)
                                     : mesh[i].broadcast(bytes, dtype::float32, 0));
      EXPECT_TRUE(has_code(answer, errc::collective_mismatch));
    });
    expect_works();
    on_ranks(mesh.size(), [&](std::size_t i) {
      std::vector<std::byte> memory((i == 0 ? 6 : 1) * chunk_bytes);
      auto bytes = std::span{memory};
      auto answer = answer_of(i == 0 ? mesh[i].send(bytes, dtype::float32, 1)
                                     : mesh[i].recv(bytes, dtype::float32, 0));
      EXPECT_TRUE(has_code(answer, errc::collective_mismatch));
    });
    on_ranks(mesh.size(), [&](std::size_t i) {
      std::vector<std::int32_t> memory(3 * chunk_bytes, i == 0 ? 5 : 0);
      auto bytes = std::as_writable_bytes(std::span{memory});
      EXPECT_TRUE(is_ok(answer_of(i == 0 ? mesh[i].send(bytes, dtype::int32, 1)
                                         : mesh[i].recv(bytes, dtype::int32, 0))));
      EXPECT_EQ(memory, std::vector<std::int32_t>(3 * chunk_bytes, 5));
    });
  }
}

// INV-1: one rank does not call. Calls that wait behind it have their own deadlines.
TEST_F(MeshComm, DeadlineOfWhatWaitsForARank) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  std::vector<std::byte> memory(5 * chunk_bytes, std::byte{7});
  auto bytes = std::span{memory};
  stopwatch watch;
  auto first = mesh[0].all_reduce(bytes, dtype::int32, reduce_op::sum, {.deadline = 2s});
  auto behind = mesh[0].all_reduce(bytes, dtype::int32, reduce_op::sum, {.deadline = 50ms});
  EXPECT_TRUE(has_code(answer_of(behind), errc::deadline_exceeded));
  EXPECT_FALSE(first.ready());
  EXPECT_TRUE(has_code(answer_of(first), errc::deadline_exceeded));
  EXPECT_LT(watch.elapsed(), at_once);
  EXPECT_EQ(memory, std::vector<std::byte>(memory.size(), std::byte{7}));
  // The late rank's calls get the error with which the calls failed for all ranks.
  std::vector<std::byte> late(memory.size());
  for (int i = 0; i < 2; ++i)
    EXPECT_TRUE(has_code(answer_of(mesh[1].all_reduce(std::span{late}, dtype::int32)),
                         errc::deadline_exceeded));
  expect_works();
}

TEST_F(MeshComm, Cancel) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  std::vector<std::byte> memory(5 * chunk_bytes);
  auto bytes = std::span{memory};
  auto first = mesh[0].all_reduce(bytes, dtype::int32);
  auto behind = mesh[0].all_reduce(bytes, dtype::int32);
  behind.cancel();
  EXPECT_TRUE(has_code(answer_of(behind), errc::cancelled));
  first.cancel();
  EXPECT_TRUE(has_code(answer_of(first), errc::cancelled));
  std::vector<std::byte> late(memory.size());
  for (int i = 0; i < 2; ++i)
    EXPECT_TRUE(
        has_code(answer_of(mesh[1].all_reduce(std::span{late}, dtype::int32)), errc::cancelled));
  expect_works();
}

// INV-4: the library does not access memory of a completed call.
TEST_F(MeshComm, LeavesSpansAloneOnceAnswered) {
  TROUPE_HOST_ONLY("a fault plan");
  open(2);
  expect_works();
  plan->add({fault::hang, verb::collective, 0});
  on_ranks(mesh.size(), [&](std::size_t i) {
    auto memory = std::make_unique<std::vector<std::byte>>(20 * chunk_bytes, std::byte{1});
    auto answer = answer_of(
        mesh[i].all_reduce(std::span{*memory}, dtype::int32, reduce_op::sum, {.deadline = 500ms}));
    EXPECT_TRUE(has_code(answer, errc::deadline_exceeded));
    memory.reset(); // a sanitizer reports later accesses
  });
  plan->release();
  expect_works();
}

TEST_F(MeshComm, ACommunicatorThatEndsIsOneCauseForAll) {
  TROUPE_HOST_ONLY("a fault plan");
  open(3);
  expect_works();
  for (auto kind : {fault::fail, fault::not_issued}) {
    world_feed feed{*system, all->actor()};
    plan->add({kind, verb::collective, 1, 3});
    std::vector<std::string> causes(mesh.size());
    on_ranks(mesh.size(), [&](std::size_t i) {
      std::vector<std::byte> memory(20 * chunk_bytes);
      auto answer = answer_of(
          mesh[i].all_reduce(std::span{memory}, dtype::int32, reduce_op::sum, {.deadline = 300ms}));
      EXPECT_FALSE(answer);
      causes[i] = describe(error_of(answer));
    });
    for (auto& x : causes)
      EXPECT_EQ(x, causes[0]);
    plan->disarm();
    plan->release();
    if (kind == fault::fail) {
      feed.until(world_phase::ready, 2);
      expect_works();
    }
  }
}

// INV-7: a root waits only for the other ranks, one of which fails after the root's part is done.
TEST_F(MeshComm, AFailureBehindTheRootsPartEndsTheCallForTheRootToo) {
  TROUPE_HOST_ONLY("a fault plan");
  for (auto what : {verb::asynchronous_error, verb::copy}) { // the communicator; the download
    plan = std::make_shared<fault_plan>();
    open(2);
    expect_works();
    plan->add({.kind = fault::block, .on = verb::record, .device = 1});
    plan->add({.kind = fault::fail, .on = what, .device = 1});
    std::vector<std::vector<std::byte>> memory(4, std::vector<std::byte>(chunk_bytes / 2));
    std::vector<pending<void>> first;
    std::vector<pending<void>> next;
    for (std::size_t i = 0; i < 2; ++i) {
      first.push_back(mesh[i].broadcast(std::span{memory[i]}, dtype::int8, 0));
      next.push_back(mesh[i].all_reduce(std::span{memory[i + 2]}, dtype::int32));
    }
    ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience)); // after the collective
    EXPECT_FALSE(must(first[0].wait_for(50ms)));
    plan->release();
    auto why = error_of(answer_of(first[0]));
    EXPECT_EQ(plan->injected(fault::fail), 1u);
    EXPECT_NE(describe(why).find("injected"), std::string::npos) << describe(why);
    EXPECT_EQ(describe(error_of(answer_of(first[1]))), describe(why));
    for (auto& x : next) // on the next communicator
      EXPECT_TRUE(is_ok(answer_of(x)));
    expect_works();
    mesh.clear();
    all.reset();
    system.reset();
  }
}

TEST_F(MeshComm, CallsOfRanksInItsWorldGoOnBesideIt) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  auto refs = must(all->allocate<std::int32_t>(100));
  on_ranks(mesh.size(), [&](std::size_t i) {
    must(answer_of(mesh[i].where().fill(refs[i], 1)));
    for (std::int32_t k = 0; k < 50; ++k) {
      std::vector<std::int32_t> memory(3000, k);
      auto over_host = mesh[i].all_reduce(std::as_writable_bytes(std::span{memory}), dtype::int32);
      EXPECT_TRUE(is_ok(answer_of(all->rank(i).all_reduce(refs[i], refs[i], reduce_op::max))));
      EXPECT_TRUE(is_ok(answer_of(over_host)));
      EXPECT_EQ(memory, std::vector<std::int32_t>(3000, 2 * k));
    }
    EXPECT_TRUE(holds(mesh[i].where(), refs[i], std::vector<std::int32_t>(100, 1)));
  });
}

TEST_F(MeshComm, RanksThatMeanDifferentMemberships) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  auto now = all->status().membership;
  on_ranks(mesh.size(), [&](std::size_t i) {
    std::vector<std::byte> memory(5 * chunk_bytes);
    std::span bytes{memory};
    auto with = [&](std::uint64_t x) {
      return answer_of(mesh[i].all_reduce(bytes, dtype::int32, reduce_op::sum, {.membership = x}));
    };
    EXPECT_TRUE(has_code(with(now + i), errc::membership_changed));
    EXPECT_TRUE(has_code(with(now + 1), errc::membership_changed));
    EXPECT_TRUE(is_ok(with(i == 0 ? 0 : now)));
  });
}

TEST_F(MeshComm, AResetTakesItsBuffersAndItGoesOn) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  world_feed feed{*system, all->actor()};
  expect_works();
  EXPECT_EQ(must(answer_of(mesh[1].where().reset())), 2u);
  feed.until(world_phase::ready, 2);
  expect_works();
}

TEST_F(MeshComm, AResetUnderLoad) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  world_feed feed{*system, all->actor()};
  std::atomic<bool> stop = false;
  std::atomic<int> right = 0;
  std::thread resets{[&] {
    for (std::uint64_t epoch = 1; epoch <= 5; ++epoch) {
      for (int before = right; right == before;)
        right.wait(before);
      EXPECT_TRUE(is_ok(answer_of(mesh[1].where().reset())));
      feed.until(world_phase::ready, epoch + 1); // another reset before would be a part of this one
    }
    stop = true;
  }};
  on_ranks(mesh.size(), [&](std::size_t i) {
    // The ranks agree on when to stop.
    for (bool last = false; !last;) {
      std::vector<std::int32_t> memory(9000, static_cast<std::int32_t>(i + 1));
      auto done =
          answer_of(mesh[i].all_reduce(std::as_writable_bytes(std::span{memory}), dtype::int32));
      if (done) {
        EXPECT_EQ(memory, std::vector<std::int32_t>(9000, 3)); // INV-12
        ++right;
        right.notify_all();
      }
      std::int32_t ends = stop ? 1 : 0;
      auto agreed = answer_of(mesh[i].all_reduce(std::as_writable_bytes(std::span{&ends, 1}),
                                                 dtype::int32, reduce_op::min));
      last = agreed && ends == 1;
    }
  });
  resets.join();
  expect_works();
}

TEST_F(MeshComm, AHandleThatIsGone) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  std::vector<std::byte> memory(5 * chunk_bytes);
  auto waiting = mesh[0].all_reduce(std::span{memory}, dtype::int32);
  mesh.pop_back();
  auto why = answer_of(waiting);
  ASSERT_TRUE(has_code(why, errc::unavailable));
  EXPECT_EQ(failure_of(error_of(why))->rank, 1);
  EXPECT_TRUE(has_code(answer_of(mesh[0].barrier()), errc::unavailable));
}

TEST_F(MeshComm, TheLastCopyAnswersEverything) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  std::vector<std::byte> memory(5 * chunk_bytes);
  std::vector<pending<void>> waiting;
  for (int i = 0; i < 3; ++i)
    waiting.push_back(mesh[0].all_reduce(std::span{memory}, dtype::int32));
  mesh.clear();
  for (auto& x : waiting)
    EXPECT_TRUE(has_code(answer_of(x), errc::unavailable));
}

TEST_F(MeshComm, AWorldThatEnded) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  expect_works();
  world_feed feed{*system, all->actor()};
  EXPECT_TRUE(is_ok(ask<void>(*system, all->actor(), shutdown{})));
  feed.until(world_phase::shut_down);
  on_ranks(mesh.size(), [&](std::size_t i) {
    std::vector<std::byte> memory(5 * chunk_bytes);
    EXPECT_TRUE(has_code(answer_of(mesh[i].all_reduce(std::span{memory}, dtype::int32)),
                         errc::unavailable));
  });
}

/// Waits on a thread that must not block.
class waiting_actor : public detail::actor_base<> {
public:
  waiting_actor(caf::actor_config& cfg, pending<void> x, std::function<void(caf::error)> tell)
      : actor_base(cfg), pending_(std::move(x)), tell_(std::move(tell)) {}

  caf::behavior make_behavior() override {
    tell_(error_of(pending_.wait()));
    return {};
  }

private:
  pending<void> pending_;
  std::function<void(caf::error)> tell_;
};

// INV-5
TEST_F(MeshComm, DoesNotBlockAnActor) {
  TROUPE_NEEDS_DEVICES(2);
  open(2);
  auto waiting = mesh[0].barrier();
  flag told;
  caf::error got;
  system->get().spawn<waiting_actor>(waiting, [&](caf::error why) {
    got = std::move(why);
    told.set();
  });
  ASSERT_TRUE(told.wait());
  EXPECT_TRUE(has_code(got, errc::would_block));
  EXPECT_TRUE(is_ok(answer_of(mesh[1].barrier())));
  EXPECT_TRUE(is_ok(answer_of(waiting)));
}

} // namespace
} // namespace troupe::testing
