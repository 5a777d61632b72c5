/// Which kernels do a call: every verb, by value, on host threads.

#include "backend/cuda/direct_plan.hpp"
#include "support/emulated_ranks.hpp"
#include "support/expect.hpp"
#include "support/random.hpp"
#include "support/reference.hpp"
#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace troupe::testing {

namespace {

using ::testing::HasSubstr;
using kind = collective_kind;

constexpr kind verbs[] = {kind::all_reduce,     kind::reduce,     kind::broadcast,
                          kind::all_gather,     kind::gather,     kind::scatter,
                          kind::reduce_scatter, kind::all_to_all, kind::all_to_all_v};

/// So small that all kinds of kernels are in use.
constexpr detail::direct_limits limits{.pushed_reduction = 500,
                                       .pushed_message = 300,
                                       .pulled_by_few = 5'000,
                                       .push_channels = 2,
                                       .few_pull_channels = 1,
                                       .pull_channels = 2,
                                       .move_channels = 2};

void on_all_ranks(unsigned ranks, const std::function<void(unsigned)>& f) {
  std::vector<std::jthread> threads;
  for (unsigned rank = 0; rank < ranks; ++rank)
    threads.emplace_back(f, rank);
}

class DirectPlan : public ::testing::TestWithParam<int> {
protected:
  unsigned ranks() const { return static_cast<unsigned>(GetParam()); }

  void launch(unsigned rank, std::span<const collective_call> calls) {
    emulated_launcher to{all_, rank};
    detail::direct_messages room;
    EXPECT_TRUE(is_ok(detail::launch_direct(calls, rank, ranks(), limits, room, to)));
  }

  void expect_right(const collective_spec& spec, bool shared) {
    const auto x = completed(spec);
    const auto sends = random_sends(x);
    on_all_ranks(ranks(), [&](unsigned rank) {
      const auto i = static_cast<int>(rank);
      const auto result = run(x, i, sends, shared ? in_place(x, i) : std::nullopt);
      EXPECT_TRUE(result) << to_string(x.what) << " of " << x.count << " " << to_string(x.type)
                          << ", op " << to_string(x.op) << ", root " << x.root << ", rank " << rank
                          << (shared ? ", in place: " : ": ") << to_string(result);
    });
  }

  check_result run(const collective_spec& x, int rank,
                   const std::vector<std::vector<std::byte>>& sends,
                   std::optional<shared_placement> placed) {
    constexpr std::size_t behind = 4;
    const auto unit = size_of(x.type);
    auto input = sends[static_cast<std::size_t>(rank)];
    const auto received = recv_count(x, rank) * unit;
    const auto recv_at = placed ? placed->recv_at * unit : 0;
    std::vector<std::byte> memory(
        std::max(recv_at + received, placed ? placed->send_at * unit + input.size() : 0) +
        behind * unit);
    poison(memory);
    if (placed)
      std::ranges::copy(input,
                        memory.begin() + static_cast<std::ptrdiff_t>(placed->send_at * unit));
    auto recv = std::span{memory}.subspan(recv_at, received + behind * unit);
    const std::vector<std::byte> before{recv.begin(), recv.end()};
    const auto* send = placed ? memory.data() + placed->send_at * unit : input.data();
    const auto call =
        call_of(x, rank, input.empty() ? nullptr : send, received == 0 ? nullptr : recv.data());
    launch(static_cast<unsigned>(rank), {&call, 1});
    EXPECT_TRUE(placed || input == sends[static_cast<std::size_t>(rank)]);
    return check_collective(x, rank, sends, before, recv);
  }

  emulated_ranks all_{static_cast<unsigned>(GetParam()), 0, true}; // no call differs
};

TEST_P(DirectPlan, DoesEveryVerbWithEveryType) {
  std::mt19937_64 random{ranks()};
  for (const auto what : verbs)
    for (const auto type : real_dtypes)
      expect_right({.what = what,
                    .type = type,
                    .count = pick(random, 1, 400),
                    .ranks = GetParam(),
                    .op = reduce_op::sum,
                    .root = static_cast<int>(pick(random, 0, ranks() - 1)),
                    .seed = random(),
                    .kind = input_kind::exact},
                   chance(random, 0.5));
}

TEST_P(DirectPlan, DoesEveryOperationWithEveryType) {
  std::mt19937_64 random{ranks()};
  for (const auto what : {kind::all_reduce, kind::reduce, kind::reduce_scatter})
    for (const auto type : real_dtypes)
      for (int op = 0; op <= static_cast<int>(reduce_op::premul_sum); ++op)
        for (const auto inputs : {input_kind::any, input_kind::exact})
          expect_right({.what = what,
                        .type = type,
                        .count = pick(random, 1, 400),
                        .ranks = GetParam(),
                        .op = static_cast<reduce_op>(op),
                        .root = static_cast<int>(pick(random, 0, ranks() - 1)),
                        .seed = random(),
                        .kind = inputs},
                       chance(random, 0.5));
}

/// Two ranks make different calls. Returns what one of them is told.
std::string told_of(const collective_call& first, const collective_call& second) {
  emulated_ranks all{2, 0, true};
  on_all_ranks(2, [&](unsigned rank) {
    emulated_launcher to{all, rank};
    detail::direct_messages room;
    EXPECT_TRUE(
        is_ok(detail::launch_direct({rank == 0 ? &first : &second, 1}, rank, 2, limits, room, to)));
  });
  const auto why = detail::mismatch_error(all.found(all.found(0).is_there == 0 ? 1 : 0));
  EXPECT_TRUE(has_code(why, errc::collective_mismatch));
  return describe(why);
}

TEST(DirectMismatch, NamesBothCalls) {
  std::vector<std::byte> memory(10'000);
  const auto with = [&](collective_call x) {
    x.send = x.recv = memory.data();
    return x;
  };
  const auto sum = with({.what = kind::all_reduce, .count = 100, .type = dtype::float32});
  auto text = told_of(
      sum,
      with({.what = kind::all_reduce, .count = 100, .type = dtype::float32, .op = reduce_op::max}));
  EXPECT_THAT(text, HasSubstr("all_reduce of 100 float32, sum"));
  EXPECT_THAT(text, HasSubstr("all_reduce of 100 float32, max"));
  text = told_of(with({.what = kind::reduce, .count = 7, .type = dtype::int64, .peer = 1}), sum);
  EXPECT_THAT(text, HasSubstr("rank 0 was reduce of 7 int64, sum, root 1"));
  EXPECT_THAT(text, HasSubstr("that of rank 1 all_reduce of 100 float32, sum"));
  text = told_of(with({.what = kind::send, .count = 5, .type = dtype::int8, .peer = 1}),
                 with({.what = kind::recv, .count = 6, .type = dtype::int8, .peer = 0}));
  EXPECT_THAT(text, HasSubstr("message of 5 bytes"));
  EXPECT_THAT(text, HasSubstr("message of 6 bytes"));
  EXPECT_THAT(told_of({.what = kind::barrier}, sum), HasSubstr("barrier"));
}

/// A barrier ends nowhere before all ranks have come to it.
TEST_P(DirectPlan, HasABarrier) {
  std::atomic<unsigned> come{0};
  for (unsigned round = 1; round <= 20; ++round)
    on_all_ranks(ranks(), [&](unsigned rank) {
      come.fetch_add(1);
      const collective_call call{.what = kind::barrier};
      launch(rank, {&call, 1});
      EXPECT_GE(come.load(), round * ranks());
    });
}

/// Messages of one group make progress together, whatever their order.
TEST_P(DirectPlan, PassesMessagesOfAGroupInAnyOrder) {
  std::mt19937_64 random{ranks()};
  for (int round = 0; round < 20; ++round) {
    struct message {
      unsigned from;
      unsigned to;
      std::vector<std::byte> content;
      std::vector<std::byte> got;
    };
    std::vector<message> all;
    for (auto n = pick(random, 1, 3 * ranks()); n > 0; --n) {
      message x{static_cast<unsigned>(pick(random, 0, ranks() - 1)),
                static_cast<unsigned>(pick(random, 0, ranks() - 1)),
                std::vector<std::byte>(pick(random, 1, 800)),
                {}};
      for (auto& b : x.content)
        b = static_cast<std::byte>(random());
      x.got.resize(x.content.size());
      all.push_back(std::move(x));
    }
    std::vector<std::vector<collective_call>> calls(ranks());
    for (auto& x : all)
      calls[x.from].push_back({.what = kind::send,
                               .send = x.content.data(),
                               .count = x.content.size(),
                               .peer = static_cast<int>(x.to)});
    for (unsigned rank = 0; rank < ranks(); ++rank) { // the receives at random places
      std::size_t at = 0;
      for (auto& x : all)
        if (x.to == rank) {
          at = pick(random, at, calls[rank].size());
          calls[rank].insert(calls[rank].begin() + static_cast<std::ptrdiff_t>(at++),
                             {.what = kind::recv,
                              .recv = x.got.data(),
                              .count = x.content.size(),
                              .peer = static_cast<int>(x.from)});
        }
    }
    on_all_ranks(ranks(), [&](unsigned rank) {
      if (!calls[rank].empty())
        launch(rank, calls[rank]);
    });
    for (auto& x : all)
      ASSERT_EQ(x.got, x.content) << "from " << x.from << " to " << x.to;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, DirectPlan, ::testing::Values(1, 2, 3, 8));

} // namespace

} // namespace troupe::testing
