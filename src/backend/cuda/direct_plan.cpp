#include "backend/cuda/direct_plan.hpp"

#include "backend/cuda/nccl_arguments.hpp"
#include <troupe/collective_kind.hpp>
#include <troupe/error.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

using direct::message;
using direct::route;

constexpr unsigned warp = 32;
/// Each channel moves at least so much, before another one is used.
constexpr std::size_t pushed_by_channel = direct::slot_packets * direct::packet_bytes;
constexpr std::size_t pulled_by_channel = std::size_t{16} << 10;
constexpr std::size_t put_by_channel = std::size_t{64} << 10;

unsigned channels_for(std::size_t bytes, std::size_t each, unsigned most) noexcept {
  return static_cast<unsigned>(std::clamp<std::size_t>((bytes + each - 1) / each, 1, most));
}

/// Returns the threads of a block that does so many packets, or as many vectors.
unsigned threads_for(std::size_t packets) noexcept {
  return static_cast<unsigned>(
      std::clamp<std::size_t>((packets + warp - 1) / warp * warp, warp, direct::block_threads));
}

/// Returns the binary logarithm of the threads that trade each of `messages`: at least a warp.
unsigned log2_threads_for(std::span<const message> messages) noexcept {
  std::size_t most = 0; // packets
  for (auto& x : messages)
    most = std::max<std::size_t>(
        most, x.way == route::push ? x.share : x.share * direct::put_unit / direct::packet_bytes);
  unsigned result = 5;
  while ((messages.size() << (result + 1)) <= direct::block_threads &&
         (direct::packets_at_once << result) < most)
    ++result;
  return result;
}

direct::reduction reduction_of(reduce_op op) noexcept {
  switch (op) {
  case reduce_op::prod:
    return direct::reduction::multiply;
  case reduce_op::min:
    return direct::reduction::lesser;
  case reduce_op::max:
    return direct::reduction::greater;
  case reduce_op::sum:
  case reduce_op::avg:
  case reduce_op::premul_sum:
    break;
  }
  return direct::reduction::add;
}

// The parts of a signature: `tag`, and `rest` of a reduction.
constexpr unsigned bits_of_type = 4;
constexpr unsigned bits_of_op = 3;
static_assert(std::size(all_collective_kinds) <= 16 && std::size(real_dtypes) <= 1 << bits_of_type);

/// Both ends of a message have the same tag.
std::uint8_t tag_of(const collective_call& call) noexcept {
  const auto kind = call.what == collective_kind::recv ? collective_kind::send : call.what;
  const bool has_type = !is_message(call.what) && call.what != collective_kind::barrier;
  const auto type = has_type ? call.type : dtype{}; // a message may change its type
  return static_cast<std::uint8_t>(static_cast<unsigned>(kind) << bits_of_type |
                                   static_cast<unsigned>(type));
}

std::uint64_t signature_of_reduction(const collective_call& call) noexcept {
  const auto root = has_root(call.what) ? 1 + static_cast<unsigned>(call.peer) : 0;
  return direct::signature_of(bytes_of(call), tag_of(call),
                              root << bits_of_op | static_cast<unsigned>(call.op));
}

std::string describe(std::uint64_t signature) {
  const auto what = static_cast<collective_kind>(signature >> bits_of_type & 15);
  const auto type = static_cast<dtype>(signature & ((1 << bits_of_type) - 1));
  std::string result{what == collective_kind::send ? "message" : to_string(what)};
  if (what == collective_kind::barrier)
    return result;
  const auto bytes = signature >> direct::signature_bytes_shift;
  if (what == collective_kind::send)
    return result + " of " + std::to_string(bytes) + " bytes";
  result += " of " + std::to_string(bytes / size_of(type)) + ' ';
  result += to_string(type);
  if (!reduces(what))
    return result;
  result += ", ";
  result += to_string(static_cast<reduce_op>(signature >> 8 & ((1 << bits_of_op) - 1)));
  if (has_root(what))
    result += ", root " + std::to_string((signature >> (8 + bits_of_op) & 15) - 1);
  return result;
}

std::uint64_t word_of(const std::uint32_t (&halves)[2]) noexcept {
  return std::uint64_t{halves[1]} << 32 | halves[0];
}

/// Returns the elements of each rank's share of a pulled reduction: whole vectors.
std::size_t share_of_ranks(std::size_t count, unsigned size, dtype type) noexcept {
  return direct::share_of(count, size, direct::vector_bytes / size_of(type));
}

/// The launches of one group.
class plan {
public:
  plan(unsigned rank, unsigned size, const direct_limits& limits, direct_messages& room,
       direct_launcher& to) noexcept
      : rank_(rank), size_(size), limits_(limits), messages_(room), to_(to) {
    clear();
  }

  caf::error launch(const collective_call& call) {
    if (reduces(call.what))
      return launch_reduction(call);
    clear();
    add(call);
    return launch_messages();
  }

  caf::error launch_all(std::span<const collective_call> calls) {
    for (const auto& call : calls)
      if (is_message(call.what))
        add(call);
    if (auto error = launch_messages())
      return error;
    for (const auto& call : calls)
      if (!is_message(call.what))
        if (auto error = launch(call))
          return error;
    return {};
  }

private:
  void clear() noexcept {
    for (auto* x : {&messages_.all, &messages_.to_itself, &messages_.from_itself})
      x->clear();
  }

  caf::error launch_reduction(const collective_call& call) {
    const auto bytes = bytes_of(call);
    if (bytes == 0)
      return {};
    direct::reduce_arguments a{};
    a.in = call.send;
    a.out = call.recv;
    a.count = call.count;
    a.targets = call.what == collective_kind::reduce ? 1u << call.peer : (1u << size_) - 1;
    a.scatters = call.what == collective_kind::reduce_scatter;
    a.op = reduction_of(call.op);
    if (call.op == reduce_op::premul_sum) {
      a.has_factor = 1;
      std::memcpy(&a.factor, call.factor, size_of(call.type));
    }
    a.averages = call.op == reduce_op::avg;
    a.signature = signature_of_reduction(call);
    if (bytes > limits_.pushed_reduction) {
      a.share = share_of_ranks(call.count, size_, call.type);
      const auto share = a.scatters != 0 ? bytes : bytes / size_;
      const auto most = share <= limits_.pulled_by_few / size_ ? limits_.few_pull_channels
                                                               : limits_.pull_channels;
      return to_.pull(call.type, channels_for(share, pulled_by_channel, most), a);
    }
    const auto channels = channels_for(bytes, pushed_by_channel, limits_.push_channels);
    a.share = direct::share_of(direct::packets_of(bytes), channels);
    return to_.push(call.type, channels, threads_for(a.share), a);
  }

  /// Returns the threads of a block that does a message, or its part of it.
  unsigned threads_of(const message& x) const noexcept {
    if (x.way == route::push)
      return threads_for(x.share);
    return x.peer != rank_ ? direct::block_threads
                           : threads_for(x.share * (direct::put_unit / direct::vector_bytes));
  }

  void add_message(const collective_call& of, bool is_sent, unsigned peer, const void* memory,
                   std::size_t bytes) {
    const bool is_large = bytes > limits_.pushed_message;
    const auto channels =
        channels_for(bytes, is_large ? put_by_channel : pushed_by_channel, limits_.move_channels);
    const auto way = is_large || peer == rank_ ? route::put : route::push;
    auto& list = peer != rank_ ? messages_.all
                 : is_sent     ? messages_.to_itself
                               : messages_.from_itself;
    list.push_back(direct::message_of(const_cast<void*>(memory), bytes, channels, peer, is_sent,
                                      way, tag_of(of)));
    channels_ = std::max(channels_, channels);
  }

  /// Adds the messages of a call that does not reduce.
  void add(const collective_call& call) {
    if (call.what == collective_kind::barrier) {
      for (unsigned peer = 0; peer < size_; ++peer)
        for (const bool is_sent : {true, false})
          if (peer != rank_)
            add_message(call, is_sent, peer, nullptr, 0);
      return;
    }
    if (is_message(call.what)) {
      const bool is_sent = call.what == collective_kind::send;
      if (call.count > 0)
        add_message(call, is_sent, static_cast<unsigned>(call.peer),
                    is_sent ? call.send : call.recv, bytes_of(call));
      return;
    }
    for (unsigned peer = 0; peer < size_; ++peer) {
      const auto x = traffic_between(call, static_cast<int>(rank_), static_cast<int>(peer));
      if (x.send_bytes > 0)
        add_message(call, true, peer, x.send, x.send_bytes);
      if (x.recv_bytes > 0)
        add_message(call, false, peer, x.recv, x.recv_bytes);
    }
  }

  caf::error launch_messages() {
    auto& all = messages_.all;
    for (std::size_t i = 0; i < messages_.to_itself.size(); ++i) { // they match in their order
      all.push_back(messages_.to_itself[i]);
      all.push_back(messages_.from_itself[i]);
    }
    if (all.empty())
      return {};
    if (all.size() > direct::many_messages)
      return make_error(errc::not_supported, "a group of " + std::to_string(all.size()) +
                                                 " messages of one rank: the limit is " +
                                                 std::to_string(direct::many_messages));
    const auto channels = std::exchange(channels_, 1);
    if (fits_trade(all, rank_))
      return to_.trade(channels, log2_threads_for(all), all);
    unsigned threads = warp;
    for (auto& x : all)
      threads = std::max(threads, threads_of(x));
    return to_.move(channels, threads, all);
  }

  const unsigned rank_;
  const unsigned size_;
  const direct_limits& limits_;
  direct_messages& messages_;
  direct_launcher& to_;
  unsigned channels_ = 1; ///< of the largest message
};

} // namespace

caf::error mismatch_error(const direct::mismatch& x) {
  const auto mine = word_of(x.own);
  return make_error(
      {.code = errc::collective_mismatch,
       .detail = "the call of rank " + std::to_string(x.peer) + " was " +
                 describe(word_of(x.theirs)) + ", that of rank " + std::to_string(x.rank) + " " +
                 describe(mine),
       .verb = std::string{to_string(static_cast<collective_kind>(mine >> bits_of_type & 15))},
       .rank = static_cast<int>(x.rank)});
}

bool fits_trade(std::span<const message> messages, unsigned rank) noexcept {
  if (messages.size() > direct::few_messages)
    return false;
  unsigned sends = 0;
  unsigned receives = 0;
  for (auto& x : messages) {
    if (x.peer == rank) { // copied packet by packet, too
      if (x.share * direct::put_unit > pushed_by_channel)
        return false;
      continue;
    }
    auto& peers = x.is_sent ? sends : receives;
    if (x.way != route::push || x.share > direct::slot_packets || (peers >> x.peer & 1))
      return false;
    peers |= 1u << x.peer;
  }
  return true;
}

caf::error launch_direct(std::span<const collective_call> calls, unsigned rank, unsigned size,
                         const direct_limits& limits, direct_messages& room, direct_launcher& to) {
  plan x{rank, size, limits, room, to};
  return calls.size() == 1 ? x.launch(calls.front()) : x.launch_all(calls);
}

} // namespace troupe::detail
