/// A collective over all ranks of a world, with its memory and its reference.
#pragma once

#include "support/collective_forms.hpp"
#include "support/world_fixture.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace troupe::testing {

/// All kinds that `round_of` supports.
inline constexpr collective_kind round_kinds[] = {
    collective_kind::all_reduce,   collective_kind::reduce,         collective_kind::broadcast,
    collective_kind::all_gather,   collective_kind::reduce_scatter, collective_kind::all_to_all,
    collective_kind::all_to_all_v, collective_kind::gather,         collective_kind::scatter};

/// Returns how many elements rank `q` sends to rank `r`.
inline std::uint64_t exchanged(std::size_t q, std::size_t r) { return (q + 2 * r) % 4; }

inline std::vector<std::vector<std::uint64_t>> all_counts(std::size_t n) {
  std::vector<std::vector<std::uint64_t>> counts(n, std::vector<std::uint64_t>(n));
  for (std::size_t q = 0; q < n; ++q)
    for (std::size_t r = 0; r < n; ++r)
      counts[q][r] = exchanged(q, r);
  return counts;
}

/// Returns plans with contiguous blocks, in the layout that a world uses.
inline std::vector<exchange_plan> packed_plans(std::size_t n) {
  std::vector<exchange_plan> plans(n);
  for (std::size_t q = 0; q < n; ++q) {
    auto& plan = plans[q];
    std::size_t sent = 0;
    std::size_t received = 0;
    for (std::size_t r = 0; r < n; ++r) {
      plan.send_offsets.push_back(std::exchange(sent, sent + exchanged(q, r)));
      plan.recv_offsets.push_back(std::exchange(received, received + exchanged(r, q)));
      plan.send_counts.push_back(exchanged(q, r));
      plan.recv_counts.push_back(exchanged(r, q));
    }
  }
  return plans;
}

/// A collective of one type over all ranks of a world, with its memory.
class round_of {
public:
  round_of(const world& over, collective_spec spec) : over_(over), spec_(std::move(spec)) {
    auto n = over.size();
    spec_.ranks = static_cast<int>(n);
    if (spec_.what == collective_kind::all_to_all_v)
      spec_.plans = packed_plans(n);
    sends_ = random_sends(spec_);
    for (std::size_t rank = 0; rank < n; ++rank) {
      auto device = over.device_of(rank);
      auto r = static_cast<int>(rank);
      send_.push_back(must(device.allocate(spec_.type, send_count(spec_, r)).wait()));
      recv_.push_back(must(device.allocate(spec_.type, recv_count(spec_, r)).wait()));
      put(device, send_.back(),
          std::span{sends_[rank]}.first(std::min(sends_[rank].size(), send_.back().size_bytes())));
      before_.emplace_back(recv_.back().size_bytes(), std::byte{0xa5});
      put(device, recv_.back(), before_.back());
    }
  }

  collective request() const {
    collective x;
    x.kind = spec_.what;
    x.op = spec_.op;
    x.peer = spec_.root;
    auto root = static_cast<std::size_t>(spec_.root);
    bool root_sends = x.kind == collective_kind::broadcast || x.kind == collective_kind::scatter;
    bool root_receives = x.kind == collective_kind::reduce || x.kind == collective_kind::gather;
    x.send = root_sends ? std::vector{send_[root]} : send_;
    x.recv = root_receives ? std::vector{recv_[root]} : recv_;
    if (x.kind == collective_kind::all_to_all_v)
      x.counts = all_counts(over_.size());
    return x;
  }

  collective request_of(std::size_t rank) const {
    return call_of_rank(request(), rank, over_.size());
  }

  /// Restores the initial content of the receive buffers.
  void poison() const {
    for (std::size_t rank = 0; rank < over_.size(); ++rank)
      put(over_.device_of(rank), recv_[rank], before_[rank]);
  }

  /// Accepts the bytes of all buffers, so that skipped requests leave no marks.
  void accept() const {
    for (std::size_t rank = 0; rank < over_.size(); ++rank)
      for (auto& x : accept(rank))
        EXPECT_TRUE(is_ok(answer_of(x)));
  }
  /// Does the same on one rank, without waiting for the results.
  std::vector<pending<void>> accept(std::size_t rank) const {
    std::vector<pending<void>> result;
    for (auto* x : {&send_, &recv_})
      if (rank < x->size() && (*x)[rank])
        result.push_back(over_.device_of(rank).accept((*x)[rank]));
    return result;
  }

  void expect_right() const {
    for (std::size_t rank = 0; rank < over_.size(); ++rank) {
      auto after = must(get(over_.device_of(rank), recv_[rank]));
      auto found = check_collective(spec_, static_cast<int>(rank), sends_, before_[rank], after);
      EXPECT_TRUE(found) << to_string(spec_.what) << " of " << to_string(spec_.type) << ", rank "
                         << rank << " of " << over_.size() << ": " << to_string(found);
    }
  }

  const collective_spec& spec() const { return spec_; }
  const std::vector<std::vector<std::byte>>& sends() const { return sends_; }
  std::vector<any_gpu_ref> send() const { return send_; }
  std::vector<any_gpu_ref> recv() const { return recv_; }

private:
  const world& over_;
  collective_spec spec_;
  std::vector<std::vector<std::byte>> sends_;
  std::vector<std::vector<std::byte>> before_;
  std::vector<any_gpu_ref> send_;
  std::vector<any_gpu_ref> recv_;
};

} // namespace troupe::testing
