/// The kernels of direct collectives on host threads, by value: ranks run ahead of each other, and
/// verbs, types, ways, sizes and alignments are random.

#include "foundation/reduction.hpp"
#include "support/emulated_ranks.hpp"
#include "support/from_environment.hpp"
#include "support/random.hpp"
#include <troupe/dtype.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace troupe::testing {

namespace {

using namespace detail::direct;
using namespace std::chrono_literals;
using bytes = std::vector<unsigned char>;

bool is_floating(dtype x) { return x >= dtype::float16; }

bool is_narrow(dtype x) { return is_floating(x) && size_of(x) < 4; }

bool is_float8(dtype x) { return x == dtype::float8_e4m3 || x == dtype::float8_e5m2; }

/// Elements of one rank whose sums and averages, with factors of up to 2, and whose products are
/// exact in the type, as are the partial results.
bytes small_elements(dtype type, std::size_t count, unsigned rank, unsigned ranks,
                     std::mt19937_64& random) {
  bytes result(count * size_of(type));
  const auto most = is_float8(type) ? 1u : 2u;
  const bool sparse = is_float8(type) && ranks > 4;
  with_type(type, [&]<class T>(T) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto x = static_cast<T>(
          sparse && (i + rank) % 2 == 0 ? 0.0F : static_cast<float>(pick(random, 0, most)));
      std::memcpy(result.data() + i * sizeof(T), &x, sizeof x);
    }
  });
  return result;
}

bytes element_of(dtype type, double x) {
  bytes result(size_of(type));
  with_type(type, [&]<class T>(T) {
    const auto value = static_cast<T>(x);
    std::memcpy(result.data(), &value, sizeof value);
  });
  return result;
}

/// A buffer that begins `off` bytes behind a multiple of 16 bytes in `memory`.
unsigned char* start_of(bytes& memory, std::size_t off) {
  auto at = reinterpret_cast<std::uintptr_t>(memory.data());
  return memory.data() + (16 - at % 16) % 16 + off;
}
bytes room_for(std::size_t size) { return bytes(size + 32); }

/// One operation: its memory, and what that has to hold afterwards.
class operation {
public:
  virtual ~operation() = default;
  virtual std::string name() const = 0;
  virtual void run(emulated_ranks& all, unsigned rank) = 0;

  std::uint8_t tag = 1;                          // of its signature
  std::vector<std::vector<bytes>> memory = {};   // by rank
  std::vector<std::vector<bytes>> expected = {}; // the same, as it is after the operation
  std::vector<std::vector<bytes>> seen = {};     // copied as soon as a rank's kernel has ended
};

/// An all_reduce, reduce or reduce_scatter.
class reduce_operation final : public operation {
public:
  reduce_operation(unsigned ranks, std::mt19937_64& random)
      : reduce_operation(ranks, random,
                         chance(random, 0.2) ? static_cast<int>(pick(random, 0, ranks - 1)) : -1) {}

  reduce_operation(unsigned ranks, std::mt19937_64& random, int root)
      : type_(real_dtypes[pick(random, 0, std::size(real_dtypes) - 1)]),
        op_(static_cast<reduce_op>(pick(random, 0, 5))), pulls_(chance(random, 0.5)),
        scatters_(root < 0 && chance(random, 0.3)), in_place_(chance(random, 0.5)), root_(root),
        count_(chance(random, 0.1) ? pick(random, 4000, 9000) : pick(random, 1, 300)),
        channels_(static_cast<unsigned>(pick(random, 1, 3))) {
    if (op_ == reduce_op::avg && is_narrow(type_) && !std::has_single_bit(ranks))
      op_ = reduce_op::sum; // its partial results would not be exact
    const auto width = size_of(type_);
    const auto in_count = scatters_ ? count_ * ranks : count_;
    const bool same = chance(random, 0.7);
    const auto offset = pick(random, 0, 16 / width - 1) * width;
    auto off = [&] { return same ? offset : pick(random, 0, 16 / width - 1) * width; };
    for (unsigned rank = 0; rank < ranks; ++rank) {
      offsets_.push_back({off(), off()});
      inputs_.push_back(small_elements(type_, in_count, rank, ranks, random));
      factors_.push_back(element_of(type_, rank % 2 == 0 ? 1.0 : 2.0));
      memory.push_back({room_for(in_count * width), room_for(count_ * width)});
      std::ranges::copy(inputs_.back(), in_of(memory, rank));
    }
    expected = memory;
    for (unsigned rank = 0; rank < ranks; ++rank)
      if (is_target(rank))
        std::ranges::copy(result_of(rank), out_of(expected, rank));
  }

  std::string name() const override {
    return std::string{to_string(type_)} + " op " + std::to_string(static_cast<int>(op_)) +
           (pulls_ ? " pull" : " push") + (scatters_ ? " scatters" : "") +
           (root_ >= 0 ? " to root" : "") + (in_place_ ? " in place" : "") + ", " +
           std::to_string(count_) + " elements, " + std::to_string(channels_) + " channels";
  }

  void run(emulated_ranks& all, unsigned rank) override {
    reduce_arguments a{};
    a.in = in_of(memory, rank);
    a.out = out_of(memory, rank);
    a.count = count_;
    for (unsigned i = 0; i < all.size(); ++i)
      a.targets |= is_target(i) ? 1u << i : 0u;
    a.scatters = scatters_;
    a.op = op_ == reduce_op::prod  ? reduction::multiply
           : op_ == reduce_op::min ? reduction::lesser
           : op_ == reduce_op::max ? reduction::greater
                                   : reduction::add;
    if (op_ == reduce_op::premul_sum) {
      a.has_factor = 1;
      std::memcpy(&a.factor, factors_[rank].data(), factors_[rank].size());
    }
    a.averages = op_ == reduce_op::avg;
    a.signature = signature_of(count_, tag);
    a.share = pulls_ ? share_of(count_, all.size(), vector_bytes / size_of(type_))
                     : share_of(packets_of(count_ * size_of(type_)), channels_);
    all.run(rank, {channels_, 1, most_ranks}, [&](const plane& p, void* shared) {
      with_type(type_, [&]<class T>(T) {
        if (pulls_)
          pull_reduce<T, 2>(p, a, *static_cast<shared_facts<T>*>(shared));
        else
          push_reduce<T>(p, a, *static_cast<shared_numbers*>(shared));
      });
    });
  }

private:
  bool is_target(unsigned rank) const { return root_ < 0 || static_cast<int>(rank) == root_; }
  unsigned char* in_of(std::vector<std::vector<bytes>>& of, unsigned rank) const {
    return start_of(of[rank][0], offsets_[rank].in);
  }
  unsigned char* out_of(std::vector<std::vector<bytes>>& of, unsigned rank) const {
    return in_place_ ? in_of(of, rank) + (scatters_ ? rank * count_ * size_of(type_) : 0)
                     : start_of(of[rank][1], offsets_[rank].out);
  }
  bytes result_of(unsigned rank) const {
    std::vector<const void*> from;
    std::vector<const void*> factors;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      from.push_back(inputs_[i].data() + (scatters_ ? rank * count_ * size_of(type_) : 0));
      factors.push_back(factors_[i].data());
    }
    bytes result(count_ * size_of(type_));
    void* to = result.data();
    detail::reduce(type_, op_, from, {&to, 1}, count_, factors);
    return result;
  }

  struct offsets {
    std::size_t in;
    std::size_t out;
  };

  const dtype type_;
  reduce_op op_;
  const bool pulls_;
  const bool scatters_;
  const bool in_place_;
  const int root_; ///< -1: all ranks get the result
  const std::size_t count_;
  const unsigned channels_;
  std::vector<offsets> offsets_;
  std::vector<bytes> inputs_;
  std::vector<bytes> factors_;
};

/// Messages between any ranks, several between some, in one launch of each rank.
class move_operation final : public operation {
public:
  move_operation(unsigned ranks, std::mt19937_64& random) : trades_(random()) {
    const bool small = chance(random, 0.5); // at most one from a rank to another
    for (auto n = pick(random, 1, 2 * ranks); n > 0; --n) {
      described x;
      x.from = static_cast<unsigned>(pick(random, 0, ranks - 1));
      x.to = static_cast<unsigned>(pick(random, 0, ranks - 1));
      x.size = chance(random, 0.1)             ? 0
               : !small && chance(random, 0.1) ? pick(random, 5000, 20000)
                                               : pick(random, 1, 700);
      x.channels = static_cast<std::uint16_t>(pick(random, 1, most_channels_here));
      x.way = !small && x.size != 0 && chance(random, 0.5) ? route::put : route::push;
      if (small && std::ranges::any_of(
                       all_, [&](auto& other) { return other.from == x.from && other.to == x.to; }))
        continue;
      x.off_in = pick(random, 0, 15);
      x.off_out = chance(random, 0.5) ? x.off_in : pick(random, 0, 15);
      all_.push_back(x);
    }
    make_memory(ranks, random);
  }

  /// A message of each rank to each other one.
  move_operation(unsigned ranks, std::mt19937_64& random, route way, std::size_t size)
      : trades_(random()) {
    for (unsigned from = 0; from < ranks; ++from)
      for (unsigned to = 0; to < ranks; ++to)
        if (from != to)
          all_.push_back(
              {.from = from, .to = to, .size = size, .channels = most_channels_here, .way = way});
    make_memory(ranks, random);
  }
  std::string name() const override {
    std::string result = "messages";
    for (auto& x : all_)
      result += " " + std::to_string(x.from) + (x.way == route::put ? "=>" : "->") +
                std::to_string(x.to) + ":" + std::to_string(x.size) + "/" +
                std::to_string(x.channels);
    return result;
  }

  void run(emulated_ranks& all, unsigned rank) override {
    move_arguments<2 * most_ranks * most_ranks> a{};
    for (auto& x : all_) {
      if (x.from == rank)
        a.list[a.count++] = message_of(start_of(memory[rank][x.in], x.off_in), x.size, x.channels,
                                       x.to, true, way_of(x), tag);
      if (x.to == rank)
        a.list[a.count++] = message_of(start_of(memory[rank][x.out], x.off_out), x.size, x.channels,
                                       x.from, false, way_of(x), tag);
    }
    // The ranks need not choose the same kernel.
    if ((trades_ >> rank & 1) != 0 && detail::fits_trade({a.list, a.count}, rank)) {
      a.log2_threads = trades_ >> (32 + rank) & 1;
      const unsigned threads = std::max(a.count << a.log2_threads, most_ranks);
      all.run(rank, {most_channels_here, 1, threads}, [&](const plane& p, void* shared) {
        trade(p, a, *static_cast<shared_numbers*>(shared));
      });
    } else {
      all.run(rank, {most_channels_here, 2 * all.size(), 2}, [&](const plane& p, void* shared) {
        move(p, a, *static_cast<std::uint64_t*>(shared));
      });
    }
  }

private:
  static constexpr std::uint16_t most_channels_here = 2;

  void make_memory(unsigned ranks, std::mt19937_64& random) {
    memory.resize(ranks);
    for (auto& x : all_) {
      x.in = memory[x.from].size();
      memory[x.from].push_back(room_for(x.size));
      auto* in = start_of(memory[x.from].back(), x.off_in);
      for (std::size_t i = 0; i < x.size; ++i)
        in[i] = static_cast<unsigned char>(random());
      x.out = memory[x.to].size();
      memory[x.to].push_back(room_for(x.size));
    }
    expected = memory;
    for (auto& x : all_)
      std::copy_n(start_of(memory[x.from][x.in], x.off_in), x.size,
                  start_of(expected[x.to][x.out], x.off_out));
  }

  struct described {
    unsigned from = 0;
    unsigned to = 0;
    std::size_t size = 0;
    std::uint16_t channels = 1;
    route way = route::push;
    std::size_t off_in = 0;
    std::size_t off_out = 0;
    std::size_t in = 0; ///< index in the rank's memory
    std::size_t out = 0;
  };
  static route way_of(const described& x) { return x.from == x.to ? route::put : x.way; }

  const std::uint64_t trades_; ///< a bit for each rank: it trades if it can
  std::vector<described> all_;
};

std::unique_ptr<operation> random_operation(unsigned ranks, std::mt19937_64& random) {
  if (chance(random, 0.6))
    return std::make_unique<reduce_operation>(ranks, random);
  return std::make_unique<move_operation>(ranks, random);
}

constexpr unsigned char used_again = 0xa5;

/// Runs all operations on all ranks, each rank in its own pace, and compares the memory. As soon as
/// a rank's kernel has ended, the rank uses its memory for something else.
void run(emulated_ranks& all, std::vector<std::unique_ptr<operation>>& program,
         std::mt19937_64& random) {
  for (auto& x : program)
    x->seen.resize(all.size());
  {
    std::vector<std::jthread> streams;
    for (unsigned rank = 0; rank < all.size(); ++rank)
      streams.emplace_back([&, rank, own = std::mt19937_64{random()}]() mutable {
        std::this_thread::sleep_for(rank * 1ms); // so that some receive before others send
        for (auto& x : program) {
          if (chance(own, 0.1))
            std::this_thread::sleep_for(std::chrono::microseconds{pick(own, 1, 3000)});
          x->run(all, rank);
          x->seen[rank] = x->memory[rank];
          for (auto& memory : x->memory[rank])
            std::ranges::fill(memory, used_again);
        }
      });
  }
  for (auto& x : program)
    for (unsigned rank = 0; rank < all.size(); ++rank)
      for (std::size_t i = 0; i < x->memory[rank].size(); ++i) {
        ASSERT_EQ(x->seen[rank][i], x->expected[rank][i])
            << x->name() << ": rank " << rank << ", buffer " << i;
        ASSERT_EQ(std::ranges::count(x->memory[rank][i], used_again),
                  std::ssize(x->memory[rank][i]))
            << x->name() << ": written after the end on rank " << rank << ", buffer " << i;
      }
}

std::vector<std::unique_ptr<operation>> random_program(std::size_t length, unsigned ranks,
                                                       std::mt19937_64& random) {
  std::vector<std::unique_ptr<operation>> result;
  while (result.size() < length)
    result.push_back(random_operation(ranks, random));
  return result;
}

class DirectKernels : public ::testing::TestWithParam<unsigned> {
protected:
  void expect_right_program(bool compares) {
    const auto seed = number_from_environment("TROUPE_DIRECT_SEED", GetParam());
    std::mt19937_64 random{seed};
    emulated_ranks all{GetParam(), 0, compares};
    auto program = random_program(60, GetParam(), random);
    run(all, program, random);
    for (unsigned rank = 0; rank < all.size(); ++rank)
      EXPECT_EQ(all.found(rank).is_there, 0u);
  }
};

TEST_P(DirectKernels, AreRightInRandomPrograms) { expect_right_program(false); }

TEST_P(DirectKernels, AreRightInRandomProgramsThatAreCompared) { expect_right_program(true); }

/// Their blocks end without each other.
TEST_P(DirectKernels, AreRightInAGraph) {
  std::mt19937_64 random{GetParam()};
  emulated_ranks all{GetParam()};
  all.record();
  auto program = random_program(40, GetParam(), random);
  run(all, program, random);
}

TEST_P(DirectKernels, AreRightWhereNumbersWrap) {
  for (std::uint32_t first : {0xffff'fff8u, 0x7fff'fff8u, clearing_period - 5}) {
    std::mt19937_64 random{first};
    emulated_ranks all{GetParam(), first, true};
    all.acknowledge(first); // as in a communicator that has come to that number
    auto program = random_program(15, GetParam(), random);
    run(all, program, random);
  }
}

/// Long messages overwrite nothing that a rank has still to read of the operation before.
TEST_P(DirectKernels, AreRightWhereRanksAreSlowToRead) {
  std::mt19937_64 random{GetParam()};
  std::vector<std::unique_ptr<operation>> program;
  for (int i = 0; i < 30; ++i) {
    if (i % 2 == 0)
      program.push_back(random_operation(GetParam(), random));
    else
      program.push_back(std::make_unique<reduce_operation>(
          GetParam(), random, static_cast<int>(pick(random, 0, GetParam() - 1))));
    program.push_back(
        std::make_unique<move_operation>(GetParam(), random, route::push, std::size_t{20'000}));
  }
  emulated_ranks all{GetParam()};
  stores_between_delays = 301;
  run(all, program, random);
  stores_between_delays = 0;
}

/// Old acknowledgements count for nothing: of a channel in which nothing was acknowledged for long,
/// or of a communicator that had the memory before, whose last ones come late.
TEST_P(DirectKernels, AreRightAmongOldAcknowledgements) {
  constexpr std::uint32_t first = clearing_period - 10;
  constexpr std::uint32_t half = std::uint32_t{1} << 31;
  for (const auto old : {first - half + 20, first + half / 4, first + 1000}) {
    std::mt19937_64 random{GetParam()};
    std::vector<std::unique_ptr<operation>> program;
    while (program.size() < 6)
      program.push_back(std::make_unique<reduce_operation>(GetParam(), random, -1));
    for (int i = 0; i < 2; ++i)
      program.push_back(
          std::make_unique<move_operation>(GetParam(), random, route::push, std::size_t{20'000}));
    emulated_ranks all{GetParam(), first};
    all.acknowledge(old);
    stores_between_delays = 301;
    run(all, program, random);
    stores_between_delays = 0;
  }
}

/// Marks recur after 2^31 messages. Between two messages with the same mark, the slots are cleared.
TEST_P(DirectKernels, TakeNoFormerMessageForANewOne) {
  constexpr std::uint32_t period_of_marks = std::uint32_t{1} << 31;
  std::mt19937_64 random{GetParam()};
  const auto ranks = GetParam();
  for (auto way : {route::push, route::put}) {
    emulated_ranks all{ranks, 100, true};
    constexpr std::uint32_t messages = 6;
    auto run_some = [&](route by, std::size_t size) {
      std::vector<std::unique_ptr<operation>> program;
      for (std::uint32_t i = 0; i < messages; ++i)
        program.push_back(std::make_unique<move_operation>(ranks, random, by, size));
      run(all, program, random);
    };
    run_some(way, 3000);
    all.begin_again(7 * clearing_period - 2);
    run_some(route::push, 30);
    // The first message has the mark of the last but one in its slot.
    all.begin_again(100 + messages - slots + period_of_marks);
    run_some(way, 3000);
  }
}

/// A rank that does not come holds the others up until the kernels are told to end. They then end,
/// and nothing is written any more.
TEST_P(DirectKernels, EndWhenARankDoesNotCome) {
  std::mt19937_64 random{GetParam()};
  for (unsigned i = 0; i < 40 / GetParam(); ++i) {
    emulated_ranks all{GetParam()};
    if (chance(random, 0.5))
      all.record();
    auto x = random_operation(GetParam(), random);
    const auto missing = static_cast<unsigned>(pick(random, 0, GetParam() - 1));
    const auto before = x->memory;
    {
      std::vector<std::jthread> streams;
      for (unsigned rank = 0; rank < all.size(); ++rank)
        if (rank != missing)
          streams.emplace_back([&, rank] { x->run(all, rank); });
      std::this_thread::sleep_for(5ms);
      all.abort();
    }
    EXPECT_EQ(x->memory[missing], before[missing]) << x->name();
  }
}

/// An operation in which all ranks exchange data with each other one.
std::unique_ptr<operation> mutual_operation(unsigned ranks, std::mt19937_64& random) {
  if (chance(random, 0.5))
    return std::make_unique<reduce_operation>(ranks, random, -1);
  const bool is_large = chance(random, 0.5);
  return std::make_unique<move_operation>(ranks, random, is_large ? route::put : route::push,
                                          pick(random, 1, chance(random, 0.3) ? 20'000 : 700));
}

/// Aborts the kernels of `all` after a time, if `stop` does not come before.
void abort_late(emulated_ranks& all, std::stop_token stop) {
  const auto until = std::chrono::steady_clock::now() + 20s;
  while (!stop.stop_requested() && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(1ms);
  if (stop.stop_requested())
    return;
  ADD_FAILURE() << "the kernels do not end by themselves";
  all.abort();
}

/// The kernels end by themselves, as do those behind them, and each rank is told why. The ranks
/// that pull write nothing to any memory, and no rank writes outside of the buffers.
TEST_P(DirectKernels, EndWhereCallsDoNotMatch) {
  const auto ranks = GetParam();
  std::mt19937_64 random{number_from_environment("TROUPE_DIRECT_SEED", ranks)};
  for (unsigned i = 0; i < 200 / ranks; ++i) {
    emulated_ranks all{ranks, 0, true};
    auto x = mutual_operation(ranks, random);
    auto y = mutual_operation(ranks, random);
    y->tag = 2;
    const auto odd = static_cast<unsigned>(pick(random, 0, ranks - 1));
    const auto before = x->memory;
    {
      std::jthread watch{[&](std::stop_token stop) { abort_late(all, stop); }};
      std::vector<std::jthread> streams;
      for (unsigned rank = 0; rank < ranks; ++rank)
        streams.emplace_back([&, rank, pause = pick(random, 0, 2000) * 1us] {
          std::this_thread::sleep_for(pause);
          for (int n = 0; n < 2; ++n) // the second one finds out in any case
            (rank == odd ? *y : *x).run(all, rank);
        });
    }
    for (unsigned rank = 0; rank < ranks; ++rank) {
      const auto& found = all.found(rank);
      ASSERT_EQ(found.is_there, 1u) << x->name() << " and " << y->name() << ", rank " << rank;
      EXPECT_TRUE(found.rank == odd || found.peer == odd);
      EXPECT_EQ(found.own[0] & 0xff, found.rank == odd ? 2u : 1u);
      EXPECT_EQ(found.theirs[0] & 0xff, found.peer == odd ? 2u : 1u);
      if (rank != odd && x->name().find("pull") != std::string::npos) {
        EXPECT_EQ(x->memory[rank], before[rank]) << x->name() << " and " << y->name();
      }
    }
  }
}

/// Neither rank of a pair writes to the other one's memory, whose size it does not know.
TEST(LargeMessages, AreNotWrittenWhereTheirSizesDiffer) {
  for (const auto sizes : {std::array{30'000, 100}, std::array{100, 30'000}}) {
    emulated_ranks all{2, 0, true};
    bytes sent(30'000, 1);
    bytes received(30'000, 0);
    const auto run = [&](unsigned rank, bytes& memory) {
      move_arguments<few_messages> a{.count = 1, .log2_threads = 0};
      a.list[0] = message_of(memory.data(), static_cast<std::size_t>(sizes[rank]), 1, 1 - rank,
                             rank == 0, route::put);
      all.run(rank, {1, 4, 2}, [&](const plane& p, void* shared) {
        move(p, a, *static_cast<std::uint64_t*>(shared));
      });
    };
    {
      std::jthread watch{[&](std::stop_token stop) { abort_late(all, stop); }};
      std::jthread sender{[&] { run(0, sent); }};
      std::jthread receiver{[&] { run(1, received); }};
    }
    EXPECT_EQ(std::count(received.begin(), received.end(), 0), 30'000);
    EXPECT_EQ(all.found(0).is_there, 1u);
    EXPECT_EQ(all.found(1).is_there, 1u);
  }
}

TEST(FirstNumbers, AreFarFromEachOtherAndFromTheEnd) {
  for (std::uint32_t n = 0; n < 100'000; ++n) {
    const auto first = first_number(n);
    EXPECT_LE(first, 0u - 2 * clearing_period);
    for (std::uint32_t back = 1; back <= 16 && back <= n; ++back) {
      const auto apart = (first - first_number(n - back)) % (std::uint32_t{1} << 31); // of marks
      ASSERT_GT(std::min(apart, (std::uint32_t{1} << 31) - apart), clearing_period) << n << back;
    }
  }
}

/// Threads without a packet wait for the slot, too. When they look, the message may have been sent
/// by others, and acknowledged.
TEST(WaitForASlot, EndsForThreadsThatLookLate) {
  last_threads_look_rarely = true;
  for (bool trades : {true, false}) {
    emulated_ranks all{2};
    std::array<bytes, 2> memory{bytes(8, 1), bytes(8, 0)};
    std::atomic<int> running = 2;
    auto stream_of = [&](unsigned rank) {
      move_arguments<few_messages> a{.count = 1, .log2_threads = 3};
      a.list[0] = message_of(memory[rank].data(), 8, 1, 1 - rank, rank == 0, route::push);
      for (int i = 0; i < 5; ++i)
        all.run(rank, {1, trades ? 1u : 4u, 8}, [&](const plane& p, void* shared) {
          if (trades)
            trade(p, a, *static_cast<shared_numbers*>(shared));
          else
            move(p, a, *static_cast<std::uint64_t*>(shared));
        });
      --running;
    };
    std::jthread sender{stream_of, 0};
    std::this_thread::sleep_for(50ms); // so that the third message waits for its slot
    std::jthread receiver{stream_of, 1};
    const auto until = std::chrono::steady_clock::now() + 20s;
    while (running != 0 && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(1ms);
    EXPECT_EQ(running, 0);
    all.abort();
    sender.join();
    receiver.join();
    EXPECT_EQ(memory[1], memory[0]);
  }
  last_threads_look_rarely = false;
}

/// Aborted kernels of two ranks.
class AbortedKernels : public ::testing::Test {
protected:
  void SetUp() override { emulated_nanoseconds = 0; }

  void put(unsigned rank, bytes& memory, std::size_t size, bool is_sent) {
    move_arguments<few_messages> a{};
    a.list[a.count++] = message_of(memory.data(), size, 1, 1 - rank, is_sent, route::put);
    all->run(rank, {1, 4, 2}, [&](const plane& p, void* shared) {
      move(p, a, *static_cast<std::uint64_t*>(shared));
    });
  }

  void sum(unsigned rank, bytes& memory) {
    reduce_arguments a{};
    a.in = a.out = memory.data();
    a.count = memory.size();
    a.share = share_of(a.count, 2, vector_bytes);
    a.targets = 3;
    all->run(rank, {1, 1, most_ranks}, [&](const plane& p, void* shared) {
      pull_reduce<std::uint8_t, 2>(p, a, *static_cast<shared_facts<std::uint8_t>*>(shared));
    });
  }

  void wait_until_stopped(unsigned rank) const {
    while (!all->stopped(rank))
      std::this_thread::yield();
  }

  /// Aborts two kernels at any time. When one has ended, its memory stays as it is.
  void expect_no_late_writes(const std::function<void(unsigned, bytes&)>& run) {
    std::mt19937_64 random{1};
    for (int round = 0; round < 300; ++round) {
      all = std::make_unique<emulated_ranks>(2);
      bytes memory[] = {bytes(30'000, 1), bytes(30'000, 2)};
      bytes ended[2];
      {
        std::vector<std::jthread> streams;
        for (unsigned rank : {0, 1})
          streams.emplace_back([&, rank, pause = pick(random, 0, 400) * 1us] {
            std::this_thread::sleep_for(pause);
            run(rank, memory[rank]);
            ended[rank] = memory[rank];
          });
        std::this_thread::sleep_for(pick(random, 0, 1000) * 1us);
        all->abort();
      }
      EXPECT_EQ(ended[0], memory[0]);
      EXPECT_EQ(ended[1], memory[1]);
    }
  }

  std::unique_ptr<emulated_ranks> all = std::make_unique<emulated_ranks>(2);
};

/// Otherwise a message would meet one that it does not belong to.
TEST_F(AbortedKernels, TakeThoseBehindThemAlong) {
  bytes small(100'000);
  bytes first(3'000, 1);
  bytes second(60'000, 2);
  {
    std::jthread stream{[&] {
      put(0, first, first.size(), true);
      put(0, second, second.size(), true);
    }};
    std::this_thread::sleep_for(2ms);
    all->abort();
    wait_until_stopped(0);
    put(1, small, first.size(), false);
  }
  EXPECT_EQ(std::count(small.begin(), small.end(), 0), 100'000);
}

TEST_F(AbortedKernels, DoNotAddToMemoryOfPeersThatHaveEnded) {
  expect_no_late_writes([this](unsigned rank, bytes& memory) { sum(rank, memory); });
}

TEST_F(AbortedKernels, DoNotPutIntoMemoryOfPeersThatHaveEnded) {
  expect_no_late_writes(
      [this](unsigned rank, bytes& memory) { put(rank, memory, memory.size(), rank == 1); });
}

/// But not for good: the peer's device may stand still.
TEST_F(AbortedKernels, StayWhileAPeersKernelMayWrite) {
  bytes memory(40'000, 1);
  gpu::store(&all->at(1).at[1]->writing, 1);
  std::jthread first{[&] { sum(0, memory); }};
  std::this_thread::sleep_for(2ms);
  all->abort();
  wait_until_stopped(0);
  EXPECT_EQ(all->ended(0), 0u);
  emulated_nanoseconds += longest_stay;
  first.join();
  sum(0, memory); // it need not stay
}

/// One block does all its work, and the others wait in vain.
TEST_F(AbortedKernels, AreAbortedAlsoIfOneBlockHasDoneItsWork) {
  const auto swap = [&](unsigned rank, unsigned channels) {
    all->run(rank, {channels, 1, 2}, [&](const plane& p, void* shared) {
      auto& numbers = *static_cast<shared_numbers*>(shared);
      numbers.load_from(p, gpu::block_x());
      bool alive = begin_kernel(p);
      std::uint64_t data = rank;
      if (alive && gpu::thread() == 0)
        alive = swap_packets(p, numbers, 1 - rank, 1, 0, data);
      end_kernel(p, true, !gpu::sync_or(!alive));
    });
  };
  {
    std::jthread many{[&] { swap(0, 3); }};
    swap(1, 1);
    std::this_thread::sleep_for(2ms);
    all->abort();
  }
  EXPECT_TRUE(all->stopped(0));
  EXPECT_FALSE(all->stopped(1));
}

INSTANTIATE_TEST_SUITE_P(Ranks, DirectKernels, ::testing::Values(2, 3, 4, 8));

} // namespace

} // namespace troupe::testing
