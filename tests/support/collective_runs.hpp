/// Collectives and messages on a backend's communicators: each rank's memory and the expected
/// results.
#pragma once

#include "support/reference.hpp"
#include <troupe/backend.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace troupe::testing {

/// Collectives in which all ranks take part.
inline constexpr std::array collectives{
    collective_kind::all_reduce,   collective_kind::reduce,         collective_kind::broadcast,
    collective_kind::all_gather,   collective_kind::reduce_scatter, collective_kind::all_to_all,
    collective_kind::all_to_all_v, collective_kind::gather,         collective_kind::scatter,
    collective_kind::barrier};

inline constexpr std::array reduce_ops{reduce_op::sum, reduce_op::prod, reduce_op::min,
                                       reduce_op::max, reduce_op::avg,  reduce_op::premul_sum};

/// Bytes before and after a buffer that no call may write.
inline constexpr std::size_t margin = 64;

/// Memory of one rank: elements between two margins.
struct guarded_memory {
  guarded_memory() = default;
  explicit guarded_memory(std::size_t size_bytes) : all(size_bytes + 2 * margin) { poison(all); }
  std::byte* data() { return all.data() + margin; }
  std::vector<std::byte> all;
};

/// One collective: each rank's memory and the expected results.
class collective_run {
public:
  enum class memory { apart, in_place };

  collective_run(collective_spec spec, memory where)
      : spec_(completed(std::move(spec))), sends_(random_sends(spec_)),
        ranks_(static_cast<std::size_t>(spec_.ranks)) {
    for (int i = 0; i < spec_.ranks; ++i)
      place(i, where);
  }

  collective_call call(int rank) {
    auto& x = ranks_[static_cast<std::size_t>(rank)];
    return call_of(spec_, rank, x.send_to_give, x.recv_to_give);
  }

  const collective_spec& spec() const { return spec_; }

  void expect_right() const {
    for (int i = 0; i < spec_.ranks; ++i) {
      const auto& x = ranks_[static_cast<std::size_t>(i)];
      const auto before = std::span{x.before}.subspan(x.recv_at);
      const auto after = std::span{x.recv.all}.subspan(x.recv_at);
      const auto result = check_collective(spec_, i, sends_, before, after);
      ASSERT_TRUE(result) << describe() << ", rank " << i << ": " << to_string(result);
      ASSERT_TRUE(
          std::equal(x.before.begin(), x.before.begin() + offset(x.recv_at), x.recv.all.begin()))
          << describe() << ", rank " << i << ": written to before the start";
      ASSERT_EQ(x.send.all, x.send_before) << describe() << ", rank " << i;
    }
  }

  void expect_untouched() const {
    for (const auto& x : ranks_) {
      ASSERT_EQ(x.recv.all, x.before) << describe();
      ASSERT_EQ(x.send.all, x.send_before) << describe();
    }
  }

  /// Writes all of the memory. A race is reported if the backend still uses it.
  void overwrite() {
    for (auto& x : ranks_) {
      poison(x.send.all);
      poison(x.recv.all);
    }
  }

private:
  struct rank_memory {
    guarded_memory send; ///< not used in place
    guarded_memory recv; ///< in place, it contains send too
    std::vector<std::byte> send_before;
    std::vector<std::byte> before;
    std::size_t recv_at = 0; ///< in recv.all
    const void* send_to_give = nullptr;
    void* recv_to_give = nullptr;
  };

  static std::ptrdiff_t offset(std::size_t x) { return static_cast<std::ptrdiff_t>(x); }

  void place(int rank, memory where) {
    auto& x = ranks_[static_cast<std::size_t>(rank)];
    const auto& send = sends_[static_cast<std::size_t>(rank)];
    const auto size = size_of(spec_.type);
    const auto recv_bytes = recv_count(spec_, rank) * size;
    const auto shared = where == memory::in_place ? in_place(spec_, rank) : std::nullopt;
    const auto send_at = shared ? shared->send_at * size : 0;
    const auto recv_at = shared ? shared->recv_at * size : 0;
    const auto send_bytes = send.size();
    x.recv = guarded_memory{shared ? std::max(send_at + send_bytes, recv_at + recv_bytes)
                                   : recv_bytes + 5 * size};
    if (!shared)
      x.send = guarded_memory{send_bytes};
    auto* const from = shared ? x.recv.data() + send_at : x.send.data();
    std::copy(send.begin(), send.end(), from);
    x.recv_at = margin + recv_at;
    x.before = x.recv.all;
    x.send_before = x.send.all;
    // A rank that sends or receives nothing may pass memory or a null pointer.
    const auto gives_all = shared || spec_.seed % 2 == 0;
    x.send_to_give = send_bytes > 0 || gives_all ? from : nullptr;
    x.recv_to_give = recv_bytes > 0 || gives_all ? x.recv.data() + recv_at : nullptr;
  }

  std::string describe() const {
    std::string result{to_string(spec_.what)};
    result += ' ';
    result += to_string(spec_.type);
    result += ' ';
    result += to_string(spec_.op);
    return result + ", " + std::to_string(spec_.ranks) + " ranks, count " +
           std::to_string(spec_.count) + ", root " + std::to_string(spec_.root) + ", seed " +
           std::to_string(spec_.seed);
  }

  collective_spec spec_;
  std::vector<std::vector<std::byte>> sends_;
  std::vector<rank_memory> ranks_;
};

/// One message from one rank to another.
class message_run {
public:
  message_run(int from, int to, dtype type, std::size_t count, std::mt19937& random)
      : from_(from), to_(to), type_(type), count_(count), send_(count * size_of(type)),
        recv_(count * size_of(type)), want_(recv_) {
    for (std::size_t i = 0; i < count * size_of(type); ++i)
      send_.data()[i] = want_.data()[i] = static_cast<std::byte>(random());
    sent_ = send_.all;
  }

  int from() const { return from_; }
  int to() const { return to_; }
  collective_call send() { return call(collective_kind::send, send_.data(), nullptr, to_); }
  collective_call recv() { return call(collective_kind::recv, nullptr, recv_.data(), from_); }

  void expect_right() const {
    ASSERT_EQ(recv_.all, want_.all) << from_ << " to " << to_ << ", count " << count_;
    ASSERT_EQ(send_.all, sent_);
  }

private:
  collective_call call(collective_kind what, const void* from, void* to, int peer) const {
    return {.what = what,
            .send = count_ > 0 ? from : nullptr,
            .recv = count_ > 0 ? to : nullptr,
            .count = count_,
            .type = type_,
            .peer = peer};
  }

  int from_;
  int to_;
  dtype type_;
  std::size_t count_;
  guarded_memory send_;
  guarded_memory recv_;
  guarded_memory want_;
  std::vector<std::byte> sent_;
};

/// Calls of all ranks that form one group on each rank.
struct group_run {
  std::vector<std::unique_ptr<collective_run>> collectives;
  std::vector<std::unique_ptr<message_run>> messages;

  /// Returns the rank's calls in random order. Collectives and messages of two ranks keep their
  /// order.
  std::vector<collective_call> calls(int rank, std::mt19937& random) {
    std::map<std::tuple<collective_kind, int>, std::vector<collective_call>> lines;
    std::vector<std::tuple<collective_kind, int>> order;
    const auto add = [&](collective_kind what, int peer, const collective_call& x) {
      lines[{what, peer}].push_back(x);
      order.emplace_back(what, peer);
    };
    for (auto& x : collectives)
      add(collective_kind::barrier, 0, x->call(rank));
    for (auto& x : messages) {
      if (x->from() == rank)
        add(collective_kind::send, x->to(), x->send());
      if (x->to() == rank)
        add(collective_kind::recv, x->from(), x->recv());
    }
    std::shuffle(order.begin(), order.end(), random);
    std::map<std::tuple<collective_kind, int>, std::size_t> next;
    std::vector<collective_call> result;
    result.reserve(order.size());
    for (const auto& line : order)
      result.push_back(lines[line][next[line]++]);
    return result;
  }

  void expect_right() const {
    for (const auto& x : collectives)
      ASSERT_NO_FATAL_FAILURE(x->expect_right());
    for (const auto& x : messages)
      ASSERT_NO_FATAL_FAILURE(x->expect_right());
  }
};

/// Returns random calls for one group on each of `ranks` ranks.
inline group_run random_group(int ranks, std::mt19937& random) {
  const auto below = [&](auto n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const auto count = [&]() -> std::size_t {
    return random() % 8 == 0 ? 2'000 + random() % 4'000 : random() % 40;
  };
  group_run result;
  for (auto n = below(3); n > 0; --n)
    result.collectives.push_back(std::make_unique<collective_run>(
        collective_spec{.what = collectives[random() % collectives.size()],
                        .type = real_dtypes[random() % std::size(real_dtypes)],
                        .count = count(),
                        .ranks = ranks,
                        .op = reduce_ops[random() % reduce_ops.size()],
                        .root = below(ranks),
                        .seed = random()},
        random() % 2 ? collective_run::memory::in_place : collective_run::memory::apart));
  for (auto n = below(3 * ranks); n > 0; --n)
    result.messages.push_back(std::make_unique<message_run>(
        below(ranks), below(ranks), real_dtypes[random() % std::size(real_dtypes)], count(),
        random));
  return result;
}

} // namespace troupe::testing
