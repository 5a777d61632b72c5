/// Direct collectives on GPUs, by value. The ranks share the GPUs of the machine.

#include "backend/cuda/nccl_fixture.hpp"
#include "support/expect.hpp"
#include "support/from_environment.hpp"
#include "support/gpus.hpp"
#include "support/random.hpp"
#include "support/reference.hpp"
#include <troupe/backend.hpp>
#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using kind = collective_kind;
using namespace std::chrono_literals;

constexpr kind verbs[] = {kind::all_reduce,     kind::reduce,     kind::broadcast,
                          kind::all_gather,     kind::gather,     kind::scatter,
                          kind::reduce_scatter, kind::all_to_all, kind::all_to_all_v};

void check(cudaError_t code) {
  if (code != cudaSuccess)
    throw std::runtime_error(cudaGetErrorString(code));
}

std::byte* at_byte(void* memory, std::size_t offset) {
  return static_cast<std::byte*>(memory) + offset;
}

/// Ranks with memory of their own, each driven by a thread of its own.
class DirectCollectives : public ::testing::TestWithParam<int> {
protected:
  void SetUp() override {
    TROUPE_NEEDS_GPUS(1);
    cuda_ = must(make_cuda_backend());
    members_.resize(static_cast<std::size_t>(GetParam()));
    const int devices = std::min(cuda_->device_count(), GetParam());
    for (int i = 0; i < size(); ++i) // a device is opened before it is opened beside
      where_.push_back({i, i % devices});
    for (int round = 0; round * devices < size(); ++round)
      on_threads(std::min(devices, size() - round * devices), [&](int k) {
        const int i = round * devices + k;
        of(i).open(*cuda_, k, round > 0);
        for (int peer = 0; peer < devices; ++peer) {
          must(of(i).device->enable_peer(peer));
          must(of(i).device->admit_peer(peer));
        }
      });
    build();
  }

  void TearDown() override {
    if (!cuda_)
      return;
    if (!ranks_.empty()) {
      EXPECT_TRUE(is_ok(cuda_->destroy(std::move(ranks_))));
    }
    for (auto& x : members_)
      if (x.device)
        x.close();
  }

  int size() const { return static_cast<int>(members_.size()); }
  nccl_member& of(int rank) { return members_[static_cast<std::size_t>(rank)]; }
  backend_communicator& rank(int i) { return *ranks_[static_cast<std::size_t>(i)]; }

  void build() { ranks_ = must(cuda_->build_direct(where_)); }

  void enqueue(int i, const collective_call& call) {
    must(rank(i).enqueue({&call, 1}, of(i).stream));
  }

  void expect_right(const collective_spec& spec, bool shared) {
    const auto x = completed(spec);
    const auto sends = random_sends(x);
    std::vector<check_result> results(members_.size());
    on_threads(size(), [&](int i) {
      // Any alignment, not the same on all ranks.
      const auto unit = size_of(x.type);
      const auto off = static_cast<std::size_t>(x.seed >> (4 * i) & 15) / unit * unit;
      results[static_cast<std::size_t>(i)] =
          run_checked(of(i), rank(i), x, i, sends, shared, off, x.seed % 2 == 0 ? off : 0);
    });
    for (int i = 0; i < size(); ++i)
      EXPECT_TRUE(results[static_cast<std::size_t>(i)])
          << to_string(x.what) << " of " << x.count << " " << to_string(x.type) << ", op "
          << to_string(x.op) << ", root " << x.root << ", rank " << i
          << (shared ? ", in place: " : ": ") << to_string(results[static_cast<std::size_t>(i)]);
  }

  std::shared_ptr<backend> cuda_;
  std::vector<nccl_member> members_;
  std::vector<local_rank> where_;
  communicator_ranks ranks_;
};

TEST_P(DirectCollectives, DoEveryKindWithEveryType) {
  std::mt19937_64 random{1};
  for (const auto what : verbs)
    for (const auto type : real_dtypes)
      for (const std::size_t most : {10u, 5'000u, 200'000u})
        expect_right({.what = what,
                      .type = type,
                      .count = pick(random, 1, most),
                      .ranks = size(),
                      .op = reduce_op::sum,
                      .root = static_cast<int>(pick(random, 0, members_.size() - 1)),
                      .seed = random(),
                      .kind = chance(random, 0.5) ? input_kind::any : input_kind::exact},
                     chance(random, 0.5));
}

TEST_P(DirectCollectives, DoEveryOperationWithEveryType) {
  std::mt19937_64 random{2};
  for (const auto what : {kind::all_reduce, kind::reduce, kind::reduce_scatter})
    for (const auto type : real_dtypes)
      for (int op = 0; op <= static_cast<int>(reduce_op::premul_sum); ++op)
        for (const std::size_t most : {500u, 400'000u})
          expect_right({.what = what,
                        .type = type,
                        .count = pick(random, 1, most),
                        .ranks = size(),
                        .op = static_cast<reduce_op>(op),
                        .root = static_cast<int>(pick(random, 0, members_.size() - 1)),
                        .seed = random(),
                        .kind = chance(random, 0.5) ? input_kind::any : input_kind::exact},
                       chance(random, 0.5));
}

TEST_P(DirectCollectives, DoLargeBuffers) {
  std::mt19937_64 random{3};
  for (const auto what : verbs) {
    const bool many = what != kind::all_reduce && what != kind::reduce && what != kind::broadcast;
    expect_right({.what = what,
                  .type = dtype::float32,
                  .count = (std::size_t{8} << 20) / (many ? members_.size() : 1),
                  .ranks = size(),
                  .root = size() - 1,
                  .seed = random(),
                  .kind = input_kind::exact},
                 chance(random, 0.5));
  }
}

/// Ranks run ahead of each other as far as the verbs allow, and one is held back.
TEST_P(DirectCollectives, AreRightWhereOneRankIsHeldBack) {
  constexpr std::size_t count = 1000;
  constexpr int rounds = 300;
  std::mt19937_64 random{4};
  const auto slow = static_cast<int>(pick(random, 0, members_.size() - 1));
  // In each round rank `root` broadcasts, and all sum what came so far.
  std::vector<int> roots;
  for (int i = 0; i < rounds; ++i)
    roots.push_back(static_cast<int>(pick(random, 0, members_.size() - 1)));
  on_threads(size(), [&](int i) {
    auto& self = of(i);
    must(self.device->bind());
    std::vector<std::uint32_t> mine(count * rounds);
    for (std::size_t k = 0; k < mine.size(); ++k)
      mine[k] = static_cast<std::uint32_t>(k * 7 + static_cast<std::size_t>(i) * 1'000'003);
    self.write(self.send, std::as_bytes(std::span{mine}));
    self.write(self.recv, std::as_bytes(std::span{mine}));
    for (int round = 0; round < rounds; ++round) {
      if (i == slow && round % 50 == 10)
        std::this_thread::sleep_for(20ms);
      const auto offset = static_cast<std::size_t>(round) * count * sizeof(std::uint32_t);
      enqueue(i, {.what = kind::broadcast,
                  .send = at_byte(self.send, offset),
                  .recv = at_byte(self.recv, offset),
                  .count = count,
                  .type = dtype::uint32,
                  .peer = roots[static_cast<std::size_t>(round)]});
      if (round % 3 == 2)
        enqueue(i, {.what = kind::all_reduce,
                    .send = at_byte(self.recv, offset),
                    .recv = at_byte(self.recv, offset),
                    .count = count,
                    .type = dtype::uint32});
    }
    const auto got = self.read(self.recv, mine.size() * sizeof(std::uint32_t));
    std::vector<std::uint32_t> values(mine.size());
    std::memcpy(values.data(), got.data(), got.size());
    for (std::size_t k = 0; k < values.size(); ++k) {
      const auto round = static_cast<int>(k / count);
      const auto root = static_cast<std::size_t>(roots[static_cast<std::size_t>(round)]);
      auto want = static_cast<std::uint32_t>(k * 7 + root * 1'000'003);
      if (round % 3 == 2)
        want *= static_cast<std::uint32_t>(size());
      if (values[k] != want)
        throw std::runtime_error("rank " + std::to_string(i) + ", element " + std::to_string(k) +
                                 ": " + std::to_string(values[k]) + ", not " +
                                 std::to_string(want));
    }
  });
}

/// Small and large reductions of the same elements give the same bits.
TEST_P(DirectCollectives, GiveTheSameBitsWhateverTheirSize) {
  constexpr std::size_t count = 1u << 20; // pulled
  constexpr std::size_t piece = 1u << 14; // pushed
  std::mt19937_64 random{5};
  for (const auto type : {dtype::float32, dtype::bfloat16, dtype::float16, dtype::float64})
    for (const auto op : {reduce_op::sum, reduce_op::avg}) {
      const auto x = completed({.what = kind::all_reduce,
                                .type = type,
                                .count = count,
                                .ranks = size(),
                                .op = op,
                                .seed = random()});
      const auto sends = random_sends(x);
      const auto bytes = count * size_of(type);
      std::vector<std::vector<std::byte>> whole(members_.size());
      on_threads(size(), [&](int i) {
        auto& self = of(i);
        must(self.device->bind());
        self.write(self.send, sends[static_cast<std::size_t>(i)]);
        const auto sum = [&](std::size_t first, std::size_t n) {
          enqueue(i, {.what = kind::all_reduce,
                      .send = at_byte(self.send, first * size_of(type)),
                      .recv = at_byte(self.recv, first * size_of(type)),
                      .count = n,
                      .type = type,
                      .op = op});
        };
        sum(0, count);
        whole[static_cast<std::size_t>(i)] = self.read(self.recv, bytes);
        for (std::size_t first = 0; first < count; first += piece)
          sum(first, piece);
        if (self.read(self.recv, bytes) != whole[static_cast<std::size_t>(i)])
          throw std::runtime_error("other bits in pieces");
      });
      for (auto& other : whole)
        EXPECT_EQ(other, whole.front()) << to_string(type);
    }
}

/// A rank that never comes holds the others up. They end at once when the communicator is aborted,
/// and the next one works.
TEST_P(DirectCollectives, EndAtOnceWhereARankDoesNotCome) {
  if (size() == 1)
    GTEST_SKIP() << "for several ranks";
  for (const auto what : {kind::all_reduce, kind::broadcast, kind::all_to_all, kind::barrier})
    for (const std::size_t count : {std::size_t{8}, std::size_t{1} << 20}) {
      const int missing = what == kind::broadcast ? 0 : size() - 1;
      on_threads(size(), [&](int i) {
        if (i == missing)
          return;
        must(of(i).device->bind());
        for (int k = 0; k < 20; ++k)
          enqueue(i, {.what = what,
                      .send = of(i).send,
                      .recv = of(i).recv,
                      .count = count / static_cast<std::size_t>(size()),
                      .type = dtype::float32});
        must(rank(i).mark_end(of(i).event, of(i).stream, *of(i).device));
      });
      std::this_thread::sleep_for(5ms);
      const int waiting = missing == 0 ? 1 : 0;
      must(of(waiting).device->bind());
      EXPECT_FALSE(must(of(waiting).device->query(of(waiting).event))) << to_string(what);
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_TRUE(is_ok(cuda_->abort(std::move(ranks_))));
      const auto took = std::chrono::steady_clock::now() - begin;
      EXPECT_LT(took, 20ms) << to_string(what) << " of " << count;
      RecordProperty("abort_us", std::to_string(took / 1us));
      EXPECT_TRUE(must(of(waiting).device->query(of(waiting).event))) << to_string(what);
      build();
      EXPECT_TRUE(must(of(waiting).device->query(of(waiting).event))) << "after the next build";
      expect_right({.what = kind::all_reduce,
                    .type = dtype::int32,
                    .count = 777,
                    .ranks = size(),
                    .seed = count},
                   false);
    }
}

/// The kernel of an aborted sum ends. When that of a peer begins, its memory may be in use again.
TEST_P(DirectCollectives, WriteToNoPeersMemoryAfterAnAbort) {
  if (size() == 1)
    GTEST_SKIP() << "for several ranks";
  constexpr std::size_t count = std::size_t{1} << 20;
  const int late = size() - 1;
  std::atomic<bool> may_begin{false};
  on_threads(size(), [&](int i) {
    auto& self = of(i);
    must(self.device->bind());
    self.write(self.recv, std::vector<std::byte>(count * sizeof(float), std::byte{1}));
    if (i == late)
      must(self.device->launch_host(
          self.stream,
          [](void* open) {
            while (!*static_cast<std::atomic<bool>*>(open))
              std::this_thread::sleep_for(100us);
          },
          &may_begin));
    enqueue(i, {.what = kind::all_reduce,
                .send = self.send,
                .recv = self.recv,
                .count = count,
                .type = dtype::float32});
    must(rank(i).mark_end(self.event, self.stream, *self.device));
  });
  for (auto& x : ranks_)
    x->on_closed();
  on_threads(late, [&](int i) {
    must(of(i).device->bind());
    must(of(i).device->synchronize(of(i).event));
  });
  may_begin = true;
  EXPECT_TRUE(is_ok(cuda_->abort(std::move(ranks_))));
  on_threads(size(), [&](int i) {
    auto& self = of(i);
    must(self.device->bind());
    must(self.device->synchronize(self.event));
    EXPECT_EQ(self.read(self.recv, count * sizeof(float)),
              std::vector<std::byte>(count * sizeof(float), std::byte{1}))
        << i;
  });
  build();
}

/// Other streams wait for the end of a collective alone, not for what is behind it.
TEST_P(DirectCollectives, TellTheirEndThemselves) {
  constexpr int rounds = 200;
  std::vector<std::atomic<bool>> have_copied(members_.size());
  // A device's streams share its hardware queues: a stream that waits there keeps what another rank
  // enqueues behind it. So all ranks enqueue their kernels before any stream waits for one.
  std::barrier all_enqueued(size());
  on_threads(size(), [&](int i) {
    struct at_the_end {
      std::barrier<>& ranks;
      ~at_the_end() { ranks.arrive_and_drop(); }
    } const others_go_on{all_enqueued};
    auto& self = of(i);
    must(self.device->bind());
    const auto beside = must(self.device->create_stream());
    const auto copied = must(self.device->create_event());
    std::mt19937_64 random{static_cast<std::uint64_t>(i)};
    for (int round = 1; round <= rounds; ++round) {
      // The same on all ranks.
      const std::size_t count = round % 3 == 0 ? std::size_t{1} << 20 : 1000 + std::size_t(round);
      const std::vector<std::uint32_t> mine(count, static_cast<std::uint32_t>(round + i));
      self.write(self.send, std::as_bytes(std::span{mine}));
      const collective_call sum{.what = kind::all_reduce,
                                .send = self.send,
                                .recv = self.recv,
                                .count = count,
                                .type = dtype::uint32};
      enqueue(i, sum);
      must(rank(i).mark_end(self.event, self.stream, *self.device));
      all_enqueued.arrive_and_wait();
      must(self.device->wait(beside, self.event));
      must(self.device->copy(self.pinned, self.recv, count * sizeof(std::uint32_t),
                             copy_direction::device_to_host, beside));
      must(self.device->record(copied, beside));
      if (chance(random, 0.5)) {
        must(self.device->synchronize(self.event));
        EXPECT_TRUE(must(self.device->query(self.event)));
      }
      self.wait_for(copied);
      const auto n = static_cast<std::uint32_t>(size());
      std::uint32_t ends[2];
      std::memcpy(&ends[0], self.pinned, sizeof ends[0]);
      std::memcpy(&ends[1], self.pinned + (count - 1) * sizeof ends[1], sizeof ends[1]);
      for (const auto x : ends)
        if (x != n * static_cast<std::uint32_t>(round) + n * (n - 1) / 2)
          throw std::runtime_error("round " + std::to_string(round) + ": " + std::to_string(x));
    }
    // The second of two more sums does not end before rank 0 comes, which waits until the others
    // have copied what the first one gave.
    const collective_call next{.what = kind::all_reduce,
                               .send = self.send,
                               .recv = self.recv,
                               .count = 10,
                               .type = dtype::uint32};
    enqueue(i, next);
    must(rank(i).mark_end(self.event, self.stream, *self.device));
    all_enqueued.arrive_and_wait();
    const auto limit = std::chrono::steady_clock::now() + 20s;
    while (i == 0 && !std::all_of(have_copied.begin() + 1, have_copied.end(),
                                  [](auto& x) { return x.load(); })) {
      if (std::chrono::steady_clock::now() > limit)
        throw std::runtime_error("a rank waits for more than its first sum");
      std::this_thread::yield();
    }
    enqueue(i, next);
    if (i != 0) {
      must(self.device->wait(beside, self.event));
      must(self.device->copy(self.pinned, self.recv, sizeof(std::uint32_t),
                             copy_direction::device_to_host, beside));
      must(self.device->record(copied, beside));
      self.wait_for(copied);
      have_copied[static_cast<std::size_t>(i)] = true;
    }
    self.finish();
    must(self.device->destroy_event(copied));
    must(self.device->destroy_stream(beside));
  });
}

/// Messages of one group make progress together, whatever their order, few or many.
TEST_P(DirectCollectives, PassMessagesOfAGroupInAnyOrder) {
  std::mt19937_64 random{6};
  for (const std::size_t most : {5u, 60u}) {
    struct message {
      int from;
      int to;
      std::size_t at;
      std::size_t size;
    };
    std::vector<message> all;
    std::size_t end = 0;
    for (std::size_t n = most * members_.size(); n > 0; --n) {
      all.push_back(
          {static_cast<int>(pick(random, 0, members_.size() - 1)),
           static_cast<int>(pick(random, 0, members_.size() - 1)), end,
           chance(random, 0.1) ? pick(random, 1, 2 * mib / most) : pick(random, 1, 5000)});
      end += all.back().size + pick(random, 0, 20);
    }
    std::vector<std::byte> content(end);
    for (auto& x : content)
      x = static_cast<std::byte>(random());
    on_threads(size(), [&](int i) {
      auto& self = of(i);
      must(self.device->bind());
      self.write(self.send, content);
      self.write(self.recv, std::vector<std::byte>(end));
      std::vector<collective_call> calls{{.what = kind::barrier}};
      for (auto& x : all) {
        if (x.from == i)
          calls.push_back({.what = kind::send,
                           .send = at_byte(self.send, x.at),
                           .count = x.size,
                           .peer = x.to});
        if (x.to == i)
          calls.push_back({.what = kind::recv,
                           .recv = at_byte(self.recv, x.at),
                           .count = x.size,
                           .peer = x.from});
      }
      must(rank(i).enqueue(calls, self.stream));
      const auto got = self.read(self.recv, end);
      for (auto& x : all)
        if (x.to == i && !std::equal(got.begin() + static_cast<std::ptrdiff_t>(x.at),
                                     got.begin() + static_cast<std::ptrdiff_t>(x.at + x.size),
                                     content.begin() + static_cast<std::ptrdiff_t>(x.at)))
          throw std::runtime_error("a message from " + std::to_string(x.from) + " to " +
                                   std::to_string(x.to) + " of " + std::to_string(x.size) +
                                   " bytes is wrong");
    });
  }
}

TEST_P(DirectCollectives, LeaveNoMemoryBehindInALongRun) {
  const auto cycles = number_from_environment("TROUPE_COMMUNICATOR_CYCLES", 1000);
  std::size_t before = 0;
  for (std::uint64_t i = 0; i < cycles; ++i) {
    if (i == 10) {
      must(of(0).device->bind());
      before = must(of(0).device->memory()).free_bytes;
    }
    if (i % 50 == 0)
      expect_right({.what = kind::all_reduce,
                    .type = dtype::float32,
                    .count = 1000,
                    .ranks = size(),
                    .seed = i},
                   true);
    EXPECT_TRUE(
        is_ok(i % 2 == 0 ? cuda_->abort(std::move(ranks_)) : cuda_->destroy(std::move(ranks_))));
    build();
  }
  must(of(0).device->bind());
  EXPECT_GE(must(of(0).device->memory()).free_bytes, before);
}

/// A captured collective is replayed with other inputs, and with ranks at different times.
TEST_P(DirectCollectives, AreReplayedFromGraphs) {
  constexpr std::size_t count = 3000;
  const auto replays = number_from_environment("TROUPE_GRAPH_REPLAYS", 1000);
  on_threads(size(), [&](int i) {
    auto& self = of(i);
    must(self.device->bind());
    auto* stream = static_cast<cudaStream_t>(self.stream.native);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t program = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    enqueue(i, {.what = kind::all_reduce,
                .send = self.send,
                .recv = self.recv,
                .count = count,
                .type = dtype::uint32});
    enqueue(i, {.what = kind::broadcast,
                .send = self.recv,
                .recv = at_byte(self.recv, mib),
                .count = count,
                .type = dtype::uint32,
                .peer = size() - 1});
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&program, graph, 0));
    std::mt19937_64 random{static_cast<std::uint64_t>(i)};
    std::vector<std::uint32_t> mine(count);
    for (std::uint64_t k = 0; k < replays; ++k) {
      if (chance(random, 0.02))
        std::this_thread::sleep_for(std::chrono::microseconds{pick(random, 1, 2000)});
      for (std::size_t j = 0; j < count; ++j)
        mine[j] = static_cast<std::uint32_t>(k * 31 + j + static_cast<std::size_t>(i));
      self.write(self.send, std::as_bytes(std::span{mine}));
      check(cudaGraphLaunch(program, stream));
      const auto got = self.read(at_byte(self.recv, mib), count * sizeof(std::uint32_t));
      for (std::size_t j = 0; j < count; ++j) {
        std::uint32_t x = 0;
        std::memcpy(&x, got.data() + j * sizeof x, sizeof x);
        const auto n = static_cast<std::uint32_t>(size());
        const auto want = n * static_cast<std::uint32_t>(k * 31 + j) + n * (n - 1) / 2;
        if (x != want)
          throw std::runtime_error("replay " + std::to_string(k) + ", element " +
                                   std::to_string(j) + ": " + std::to_string(x) + ", not " +
                                   std::to_string(want));
      }
    }
    check(cudaGraphExecDestroy(program));
    check(cudaGraphDestroy(graph));
  });
  expect_right(
      {.what = kind::all_reduce, .type = dtype::float32, .count = 100, .ranks = size(), .seed = 7},
      true);
}

INSTANTIATE_TEST_SUITE_P(Ranks, DirectCollectives, ::testing::Values(1, 2, 3, 4, 8));

} // namespace

} // namespace troupe::testing
