#include "foundation/collective_rules.hpp"
#include "support/reference.hpp"
#include <troupe/backend.hpp>
#include <troupe/collective_kind.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace troupe::testing {

namespace {

using kind = collective_kind;
using detail::rules_of;

constexpr int ranks = 4;
constexpr int root = 2;
constexpr std::size_t count = 6;

/// Buffers in units of `count`, as NCCL's and MPI's documentation have them: at the root (or the
/// only caller), and on other ranks.
struct sizes {
  std::size_t send_at_root, recv_at_root, send, recv;
};

const std::map<kind, sizes> documented = {
    {kind::all_reduce, {1, 1, 1, 1}},
    {kind::reduce, {1, 1, 1, 0}},
    {kind::broadcast, {1, 1, 0, 1}},
    {kind::all_gather, {1, ranks, 1, ranks}},
    {kind::reduce_scatter, {ranks, 1, ranks, 1}},
    {kind::all_to_all, {ranks, ranks, ranks, ranks}},
    {kind::all_to_all_v, {ranks, ranks, ranks, ranks}},
    {kind::gather, {1, ranks, 1, 0}},
    {kind::scatter, {ranks, 1, 0, 1}},
    {kind::send, {1, 0, 1, 0}},
    {kind::recv, {0, 1, 0, 1}},
    {kind::barrier, {0, 0, 0, 0}},
};

/// The number of blocks in the buffer of a rank.
std::size_t blocks(const detail::buffer_rule& x, bool at_root) {
  return x.held(at_root) ? x.blocks(ranks) : 0;
}

} // namespace

TEST(CollectiveRules, GiveEachKindItsOwnName) {
  std::set<std::string_view> names;
  for (auto what : all_collective_kinds)
    EXPECT_TRUE(names.insert(rules_of(what).name).second);
  EXPECT_EQ(to_string(kind::all_reduce), "all_reduce");
  EXPECT_EQ(to_string(kind::all_to_all_v), "all_to_all_v");
  EXPECT_EQ(to_string(kind::send), "send");
  EXPECT_EQ(to_string(kind::barrier), "barrier");
  EXPECT_EQ(names.count("unknown"), 0u);
}

TEST(CollectiveRules, GiveUnknownKindsNoBuffers) {
  for (int i : {12, 13, 255}) {
    const auto what = static_cast<kind>(i);
    EXPECT_FALSE(detail::is_known(what));
    EXPECT_EQ(to_string(what), "unknown");
    EXPECT_FALSE(rules_of(what).send.held(true));
    EXPECT_FALSE(rules_of(what).recv.held(true));
  }
}

TEST(CollectiveRules, HaveTheDocumentedSizes) {
  for (auto what : all_collective_kinds) {
    SCOPED_TRACE(to_string(what));
    const auto& rules = rules_of(what);
    const auto& want = documented.at(what);
    EXPECT_TRUE(detail::is_known(what));
    EXPECT_EQ(blocks(rules.send, true), want.send_at_root);
    EXPECT_EQ(blocks(rules.recv, true), want.recv_at_root);
    EXPECT_EQ(blocks(rules.send, false), want.send);
    EXPECT_EQ(blocks(rules.recv, false), want.recv);
    const bool depends_on_root = want.send_at_root != want.send || want.recv_at_root != want.recv;
    EXPECT_EQ(has_root(what), depends_on_root);
    EXPECT_EQ(is_message(what), (want.send == 0) != (want.recv == 0) && !depends_on_root);
    EXPECT_EQ(detail::has_peer(what), has_root(what) || is_message(what));
  }
}

TEST(CollectiveRules, PlaceDataLikeTheReference) {
  for (auto what : all_collective_kinds)
    for (int rank = 0; rank < ranks; ++rank) {
      if (is_message(what) || what == kind::all_to_all_v)
        continue;
      SCOPED_TRACE(std::string{to_string(what)} + " on rank " + std::to_string(rank));
      collective_spec x;
      x.what = what;
      x.ranks = ranks;
      x.root = root;
      x.count = count;
      const auto& rules = rules_of(what);
      const auto r = static_cast<std::size_t>(rank);
      EXPECT_EQ(blocks(rules.send, rank == root) * count, send_count(x, rank));
      EXPECT_EQ(blocks(rules.recv, rank == root) * count, recv_count(x, rank));
      const auto shared = in_place(x, rank);
      EXPECT_EQ(rules.has_in_place_form() && rules.send.held(rank == root) &&
                    rules.recv.held(rank == root),
                shared.has_value());
      if (shared) { // the own blocks of both buffers are at the same place
        EXPECT_EQ(rules.recv.block_of(r) * count, shared->send_at);
        EXPECT_EQ(rules.send.block_of(r) * count, shared->recv_at);
      }
    }
}

TEST(CollectiveRules, LetInPlaceCallsLeaveOutOneBuffer) {
  for (auto what : all_collective_kinds) {
    SCOPED_TRACE(to_string(what));
    const auto& [name, send, recv, pairwise] = rules_of(what);
    EXPECT_EQ(send.optional, what == kind::all_gather);
    EXPECT_EQ(recv.optional, what == kind::all_reduce || what == kind::reduce_scatter);
  }
}

TEST(CollectiveRules, ArePairwiseIfNcclHasNoFunction) {
  const std::set<kind> functions = {kind::all_reduce, kind::reduce,         kind::broadcast,
                                    kind::all_gather, kind::reduce_scatter, kind::barrier};
  for (auto what : all_collective_kinds)
    EXPECT_EQ(rules_of(what).pairwise, functions.count(what) == 0) << to_string(what);
}

TEST(CollectiveRules, FindTheOwnBlock) {
  std::vector<float> memory(ranks * count);
  const std::size_t rank = 3;
  auto at = [&](std::size_t block) { return memory.data() + block * count; };
  auto uses = [&](kind what, const float* send, float* recv) {
    return detail::uses_own_block(
        collective_call{
            .what = what, .send = send, .recv = recv, .count = count, .type = dtype::float32},
        rank);
  };
  for (auto what : {kind::all_gather, kind::gather}) {
    EXPECT_TRUE(uses(what, at(rank), at(0)));
    EXPECT_FALSE(uses(what, at(0), at(0)));
    EXPECT_FALSE(uses(what, at(1), at(0)));
  }
  for (auto what : {kind::reduce_scatter, kind::scatter}) {
    EXPECT_TRUE(uses(what, at(0), at(rank)));
    EXPECT_FALSE(uses(what, at(0), at(0)));
    EXPECT_FALSE(uses(what, at(0), at(2)));
  }
  for (auto what : {kind::all_reduce, kind::broadcast, kind::all_to_all})
    EXPECT_FALSE(uses(what, at(0), at(0))) << to_string(what);
}

} // namespace troupe::testing
