#include "backend/cuda/nccl_communicator.hpp"
#include "support/expect.hpp"
#include <troupe/backend.hpp>
#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using kind = collective_kind;

constexpr kind with_peer[] = {kind::reduce,  kind::broadcast, kind::gather,
                              kind::scatter, kind::send,      kind::recv};
constexpr kind reducing[] = {kind::all_reduce, kind::reduce, kind::reduce_scatter};

constexpr int ranks = 4;
constexpr int rank = 1;

/// A rank without an NCCL handle. A call is refused, or does nothing, before any call of CUDA or
/// NCCL. So the test runs on machines without them.
class NcclArguments : public ::testing::Test {
protected:
  /// Returns a valid call.
  collective_call right(kind what) {
    return {.what = what,
            .send = memory_.data(),
            .recv = memory_.data() + 4096,
            .count = 4,
            .type = dtype::float32,
            .op = reduce_op::sum,
            .peer = 2,
            .plan = what == kind::all_to_all_v ? &plan_ : nullptr};
  }

  caf::error enqueue(std::span<const collective_call> calls) {
    return rank_.enqueue(calls, stream_, {});
  }
  ::testing::AssertionResult refused(const collective_call& call) {
    return has_code(enqueue({&call, 1}), errc::invalid_argument);
  }
  ::testing::AssertionResult refused(std::initializer_list<collective_call> calls) {
    return has_code(enqueue(calls), errc::invalid_argument);
  }
  ::testing::AssertionResult does_nothing(const collective_call& call) {
    return is_ok(enqueue({&call, 1}));
  }

  alignas(8) std::array<std::byte, 8192> memory_{};
  stream_view stream_{memory_.data()};
  exchange_plan plan_{{1, 2, 3, 4}, {0, 1, 3, 6}, {4, 2, 1, 0}, {0, 4, 6, 7}};
  detail::shared_driver_access driver_ = std::make_shared<detail::driver_access>();
  detail::shared_flag unwanted_ = std::make_shared<const std::atomic<bool>>(false);
  detail::nccl_communicator rank_{{rank, 0}, ranks, true, {}, {}, driver_, unwanted_};
};

} // namespace

TEST_F(NcclArguments, NeedCallsAndAStream) {
  EXPECT_TRUE(refused({}));
  const auto call = right(kind::all_reduce);
  EXPECT_TRUE(has_code(rank_.enqueue({&call, 1}, {}, {}), errc::invalid_argument));
}

TEST_F(NcclArguments, NeedAKindATypeAndAnOperationThatThereAre) {
  EXPECT_TRUE(refused(right(static_cast<kind>(12))));
  EXPECT_TRUE(refused(right(static_cast<kind>(255))));
  for (int i = 0; i < 11; ++i) { // all kinds except the barrier
    auto call = right(static_cast<kind>(i));
    call.type = static_cast<dtype>(12);
    EXPECT_TRUE(refused(call)) << i;
    call.type = static_cast<dtype>(200);
    call.count = 0;
    EXPECT_TRUE(refused(call)) << i;
  }
  for (const auto what : reducing) {
    auto call = right(what);
    call.op = static_cast<reduce_op>(6);
    EXPECT_TRUE(refused(call)) << to_string(what);
    call.op = reduce_op::premul_sum; // without a factor
    EXPECT_TRUE(refused(call)) << to_string(what);
  }
}

TEST_F(NcclArguments, NeedAPeerThatIsARank) {
  for (const auto what : with_peer)
    for (const int peer : {-1, ranks, ranks + 100, std::numeric_limits<int>::min(),
                           std::numeric_limits<int>::max()}) {
      auto call = right(what);
      call.peer = peer;
      EXPECT_TRUE(refused(call)) << to_string(what) << ", peer " << peer;
      call.count = 0;
      EXPECT_TRUE(refused(call)) << to_string(what) << ", peer " << peer;
    }
}

TEST_F(NcclArguments, NeedMemoryWhereThereIsSomethingToDo) {
  struct row {
    kind what;
    bool root; // true: this rank is the root
    bool send;
    bool recv;
  };
  constexpr row needs[] = {
      {kind::all_reduce, false, true, true},     {kind::all_gather, false, true, true},
      {kind::reduce_scatter, false, true, true}, {kind::all_to_all, false, true, true},
      {kind::all_to_all_v, false, true, true},   {kind::reduce, false, true, false},
      {kind::reduce, true, true, true},          {kind::broadcast, false, false, true},
      {kind::broadcast, true, true, true},       {kind::gather, false, true, false},
      {kind::gather, true, true, true},          {kind::scatter, false, false, true},
      {kind::scatter, true, true, true},         {kind::send, false, true, false},
      {kind::recv, false, false, true}};
  for (const auto& [what, root, send, recv] : needs) {
    auto call = right(what);
    if (root)
      call.peer = rank;
    auto without = call;
    without.send = nullptr;
    if (send) {
      EXPECT_TRUE(refused(without)) << to_string(what) << ", root " << root;
    }
    without = call;
    without.recv = nullptr;
    if (recv) {
      EXPECT_TRUE(refused(without)) << to_string(what) << ", root " << root;
    }
    auto unaligned = call;
    unaligned.send = memory_.data() + 2;
    if (send) {
      EXPECT_TRUE(refused(unaligned)) << to_string(what) << ", root " << root;
    }
    unaligned = call;
    unaligned.recv = memory_.data() + 4097;
    if (recv) {
      EXPECT_TRUE(refused(unaligned)) << to_string(what) << ", root " << root;
    }
  }
}

TEST_F(NcclArguments, NeedACountThatMemoryCanHave) {
  for (int i = 0; i < 11; ++i) {
    auto call = right(static_cast<kind>(i));
    if (call.what == kind::all_to_all_v)
      continue;
    call.count = std::numeric_limits<std::size_t>::max() / 4;
    EXPECT_TRUE(refused(call)) << i;
    call.count = std::numeric_limits<std::size_t>::max();
    EXPECT_TRUE(refused(call)) << i;
  }
}

TEST_F(NcclArguments, NeedAPlanThatFits) {
  const auto good = plan_;
  auto call = right(kind::all_to_all_v);
  call.plan = nullptr;
  EXPECT_TRUE(refused(call));
  call.plan = &plan_;
  for (auto part : {&exchange_plan::send_counts, &exchange_plan::send_offsets,
                    &exchange_plan::recv_counts, &exchange_plan::recv_offsets}) {
    plan_ = good;
    (plan_.*part).pop_back();
    EXPECT_TRUE(refused(call));
    plan_ = good;
    (plan_.*part).push_back(0);
    EXPECT_TRUE(refused(call));
    plan_ = good;
    (plan_.*part).clear();
    EXPECT_TRUE(refused(call));
    plan_ = good;
    (plan_.*part)[3] = std::numeric_limits<std::size_t>::max();
    EXPECT_TRUE(refused(call));
  }
  plan_ = good;
  plan_.recv_counts[rank] = 1; // the rank sends 2 elements to itself
  EXPECT_TRUE(refused(call));
}

TEST_F(NcclArguments, NeedASendToOneselfWithItsRecv) {
  auto send = right(kind::send);
  auto recv = right(kind::recv);
  send.peer = recv.peer = rank;
  EXPECT_TRUE(refused(send));
  EXPECT_TRUE(refused(recv));
  EXPECT_TRUE(refused({send, recv, send}));
  EXPECT_TRUE(refused({recv, recv, send}));
  auto shorter = recv;
  shorter.count = 3;
  EXPECT_TRUE(refused({send, shorter}));
  EXPECT_TRUE(refused({send, send, recv, shorter}));
  auto empty = recv;
  empty.count = 0;
  EXPECT_TRUE(refused({send, empty}));
}

TEST_F(NcclArguments, OfEveryCallOfAGroupAreLookedAtFirst) {
  auto bad = right(kind::broadcast);
  bad.peer = ranks;
  const auto good = right(kind::all_reduce);
  const collective_call calls[] = {good, good, bad};
  const auto err = enqueue(calls);
  ASSERT_TRUE(has_code(err, errc::invalid_argument));
  EXPECT_NE(failure_of(err).value().detail.find("call 2"), std::string::npos);
  EXPECT_EQ(failure_of(err).value().rank, rank);
}

TEST_F(NcclArguments, OfNothingDoNothing) {
  for (int i = 0; i < 11; ++i) {
    auto call = right(static_cast<kind>(i));
    call.send = call.recv = nullptr;
    call.count = 0;
    if (call.what == kind::all_to_all_v)
      plan_ = {{0, 0, 0, 0}, {0, 9, 9, 0}, {0, 0, 0, 0}, {9, 9, 0, 0}};
    EXPECT_TRUE(does_nothing(call)) << i;
    call.peer = rank;
    EXPECT_TRUE(does_nothing(call)) << i;
  }
}

TEST_F(NcclArguments, OfFloat8AreReducedOnNewDevicesOnly) {
  detail::nccl_communicator old{{rank, 0}, ranks, false, {}, {}, driver_, unwanted_};
  for (const auto type : {dtype::float8_e4m3, dtype::float8_e5m2})
    for (const auto what : reducing) {
      auto call = right(what);
      call.type = type;
      EXPECT_TRUE(has_code(old.enqueue({&call, 1}, stream_, {}), errc::not_supported))
          << to_string(what);
      call.recv = nullptr;
      call.peer = rank;
      EXPECT_TRUE(has_code(old.enqueue({&call, 1}, stream_, {}), errc::invalid_argument))
          << to_string(what);
    }
}

// The handles are invalid: a call of CUDA or NCCL with them would crash.
TEST_F(NcclArguments, ReachNobodyOnceTheDriverIsNotToBeCalled) {
  const auto before = detail::teardown_errors();
  communicator_ranks all;
  for (int i = 0; i < ranks; ++i) {
    auto nowhere = [this] { return detail::unique_stream_memory{{memory_.data(), nullptr}, 0}; };
    auto x = std::make_unique<detail::nccl_communicator>(local_rank{i, i}, ranks, true, nowhere(),
                                                         nowhere(), driver_, unwanted_);
    x->adopt(reinterpret_cast<ncclComm_t>(memory_.data()));
    all.push_back(std::move(x));
  }
  driver_->end();
  for (int i = 0; i < 12; ++i) {
    const auto call = right(static_cast<kind>(i));
    EXPECT_TRUE(has_code(all[rank]->enqueue({&call, 1}, stream_), errc::device_fault)) << i;
  }
  EXPECT_TRUE(has_code(all[rank]->connect(stream_, connect_scope::everything), errc::device_fault));
  EXPECT_TRUE(has_code(all[rank]->asynchronous_error(), errc::device_fault));
  communicator_ranks some;
  some.push_back(std::move(all.back()));
  all.pop_back();
  EXPECT_TRUE(is_ok(detail::destroy_communicator(std::move(some))));
  some.clear();
  some.push_back(std::move(all.back()));
  all.pop_back();
  EXPECT_TRUE(is_ok(detail::abort_communicator(std::move(some))));
  all.clear();
  EXPECT_EQ(detail::teardown_errors(), before);
}

} // namespace troupe::testing
