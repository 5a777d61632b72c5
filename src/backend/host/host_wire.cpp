#include "backend/host/host_wire.hpp"

#include "foundation/collective_rules.hpp"
#include "foundation/peer_text.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

/// A call without its memory. After an all_to_all_v come the counts of its plan: to each rank, then
/// from each rank.
struct wire_call {
  std::uint8_t what = 0;
  std::uint8_t type = 0;
  std::uint8_t op = 0;
  std::uint8_t unused = 0;
  std::int32_t peer = 0;
  std::uint64_t count = 0;
  std::array<std::byte, 8> factor{};
};

template <class T> void append(std::vector<std::byte>& to, const T& x) {
  const auto bytes = bytes_of(x);
  to.insert(to.end(), bytes.begin(), bytes.end());
}

/// Reads consecutive values.
class head_reader {
public:
  explicit head_reader(std::span<const std::byte> rest) noexcept : rest_(rest) {}

  template <class T> bool take(T& x) noexcept {
    if (rest_.size() < sizeof(T))
      return false;
    std::memcpy(&x, rest_.data(), sizeof(T));
    rest_ = rest_.subspan(sizeof(T));
    return true;
  }

  bool at_end() const noexcept { return rest_.empty(); }

private:
  std::span<const std::byte> rest_;
};

template <class T, class Memory>
void add_block(std::vector<std::span<T>>& to, Memory memory, std::size_t offset,
               std::size_t size_bytes) {
  if (size_bytes > 0)
    to.emplace_back(reinterpret_cast<T*>(memory) + offset, size_bytes);
}

template <class T, class Memory>
void add_planned(std::vector<std::span<T>>& to, Memory memory, dtype type,
                 const std::vector<std::size_t>& counts, const std::vector<std::size_t>& offsets) {
  for (std::size_t q = 0; q < counts.size(); ++q)
    add_block(to, memory, counts[q] > 0 ? offsets[q] * size_of(type) : 0,
              counts[q] * size_of(type));
}

caf::error wrong_calls(int rank, const char* why) {
  return make_error({.code = errc::nccl_error, .detail = why, .rank = rank});
}

/// Reads one call; none if it is not valid.
std::optional<host_call> decode_call(head_reader& from, int ranks) {
  wire_call wire;
  if (!from.take(wire))
    return std::nullopt;
  collective_call x{.what = static_cast<collective_kind>(wire.what),
                    .count = wire.count,
                    .type = static_cast<dtype>(wire.type),
                    .op = static_cast<reduce_op>(wire.op),
                    .peer = wire.peer,
                    .factor = wire.factor.data()};
  const auto element_bytes = size_of(x.type);
  if (!is_known(x.what) || (element_bytes == 0 && x.what != collective_kind::barrier) ||
      (reduces(x.what) && x.op > reduce_op::premul_sum) ||
      (has_peer(x.what) && (x.peer < 0 || x.peer >= ranks)))
    return std::nullopt;
  exchange_plan plan;
  if (x.what == collective_kind::all_to_all_v) {
    for (auto [counts, offsets] : {std::pair{&plan.send_counts, &plan.send_offsets},
                                   std::pair{&plan.recv_counts, &plan.recv_offsets}}) {
      counts->resize(static_cast<std::size_t>(ranks));
      std::size_t sum = 0;
      for (auto& count : *counts) {
        std::uint64_t wanted = 0;
        if (!from.take(wanted) || wanted > most_data_bytes / element_bytes - sum)
          return std::nullopt;
        count = wanted;
        offsets->push_back(sum); // packed
        sum += count;
      }
    }
    x.plan = &plan;
  } else if (x.what != collective_kind::barrier &&
             x.count > most_data_bytes / element_bytes / static_cast<std::size_t>(ranks)) {
    return std::nullopt;
  }
  return host_call{x};
}

struct call_bytes {
  std::size_t sent;
  std::size_t received;
};

call_bytes bytes_of_call(const host_call& x, int rank, int ranks) noexcept {
  const auto element_bytes = size_of(x.type);
  if (x.what == collective_kind::all_to_all_v) {
    const auto sum = [](const auto& counts) {
      return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    };
    return {sum(x.plan.send_counts) * element_bytes, sum(x.plan.recv_counts) * element_bytes};
  }
  const auto bytes = [&](const buffer_rule& of) {
    return of.held(x.peer == rank) ? of.blocks(static_cast<std::size_t>(ranks)) * x.size_bytes()
                                   : 0;
  };
  return {bytes(rules_of(x.what).send), bytes(rules_of(x.what).recv)};
}

/// Rounds up to a cache line: the memory of each call begins at one.
constexpr std::size_t aligned(std::size_t x) noexcept { return (x + 63) / 64 * 64; }

} // namespace

communicator_id id_of(const hub_invitation& x) noexcept {
  communicator_id result;
  const auto bytes = bytes_of(x);
  static_assert(sizeof x <= sizeof result.bytes);
  std::ranges::copy(bytes, result.bytes.begin());
  return result;
}

std::optional<hub_invitation> invitation_of(const communicator_id& x) noexcept {
  hub_invitation result;
  const auto magic = result.magic;
  std::memcpy(&result, x.bytes.data(), sizeof result);
  if (result.magic != magic || (result.hub.version != 4 && result.hub.version != 6))
    return std::nullopt;
  return result;
}

wire_error wire_of(const caf::error& x) {
  wire_error result;
  auto f = failure_of(x);
  if (!f) {
    f.emplace();
    f->detail = describe(x);
  }
  result.code = static_cast<std::uint32_t>(f->code);
  result.rank = f->rank;
  result.device = f->device;
  const auto put = [](const std::string& text, auto& to, std::uint32_t& size_bytes) {
    size_bytes = static_cast<std::uint32_t>(std::min(text.size(), to.size()));
    std::memcpy(to.data(), text.data(), size_bytes);
  };
  put(f->verb, result.verb, result.verb_bytes);
  put(f->detail, result.detail, result.detail_bytes);
  return result;
}

std::optional<caf::error> error_of(const wire_error& x) {
  if (x.code == 0 || x.code > static_cast<std::uint32_t>(errc::internal) ||
      x.verb_bytes > x.verb.size() || x.detail_bytes > x.detail.size())
    return std::nullopt;
  return make_error({.code = static_cast<errc>(x.code),
                     .detail = peer_text({x.detail.data(), x.detail_bytes}),
                     .verb = peer_text({x.verb.data(), x.verb_bytes}),
                     .device = x.device,
                     .rank = x.rank});
}

void add_sent(const host_call& x, int rank, int ranks, const_blocks& to) {
  if (x.what == collective_kind::all_to_all_v)
    return add_planned(to, static_cast<const std::byte*>(x.send), x.type, x.plan.send_counts,
                       x.plan.send_offsets);
  add_block(to, static_cast<const std::byte*>(x.send), 0, bytes_of_call(x, rank, ranks).sent);
}

void add_received(const host_call& x, int rank, int ranks, mutable_blocks& to) {
  if (x.what == collective_kind::all_to_all_v)
    return add_planned(to, static_cast<std::byte*>(x.recv), x.type, x.plan.recv_counts,
                       x.plan.recv_offsets);
  add_block(to, static_cast<std::byte*>(x.recv), 0, bytes_of_call(x, rank, ranks).received);
}

caf::error check_bounds(std::span<const host_call> calls, int rank, int ranks) {
  std::uint64_t head = 0;
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  const auto fits = [&](const host_call& x) {
    head += sizeof(wire_call);
    if (x.what == collective_kind::all_to_all_v) {
      head += 2 * sizeof(std::uint64_t) * static_cast<std::size_t>(ranks);
      for (const auto* counts : {&x.plan.send_counts, &x.plan.recv_counts}) {
        std::uint64_t sum = 0;
        for (const auto count : *counts) {
          if (count > most_data_bytes / size_of(x.type) - sum)
            return false;
          sum += count;
        }
      }
    } else if (x.what != collective_kind::barrier &&
               x.count > most_data_bytes / size_of(x.type) / static_cast<std::size_t>(ranks)) {
      return false;
    }
    const auto bytes = bytes_of_call(x, rank, ranks);
    sent += aligned(bytes.sent);
    received += aligned(bytes.received);
    return head <= most_head_bytes && sent <= most_data_bytes && received <= most_data_bytes;
  };
  if (calls.size() <= most_calls && std::ranges::all_of(calls, fits))
    return {};
  return make_error({.code = errc::not_supported,
                     .detail = "too large for one exchange between processes",
                     .verb = std::string{to_string(calls.front().what)},
                     .rank = rank});
}

std::vector<std::byte> encode(std::span<const host_call> calls) {
  std::vector<std::byte> result;
  for (const auto& x : calls) {
    wire_call wire;
    wire.what = static_cast<std::uint8_t>(x.what);
    wire.type = static_cast<std::uint8_t>(x.type);
    wire.op = static_cast<std::uint8_t>(x.op);
    wire.peer = x.peer;
    wire.count = x.count;
    wire.factor = x.factor;
    append(result, wire);
    if (x.what == collective_kind::all_to_all_v)
      for (const auto* counts : {&x.plan.send_counts, &x.plan.recv_counts})
        for (const std::uint64_t count : *counts)
          append(result, count);
  }
  return result;
}

caf::expected<remote_calls> remote_calls::decode(const frame_header& header,
                                                 std::span<const std::byte> head, int rank,
                                                 int ranks) {
  constexpr auto nonsense = "it sent calls that cannot be parsed";
  if (header.calls == 0 || header.calls > most_calls)
    return wrong_calls(rank, nonsense);
  remote_calls result;
  result.rank_ = rank;
  result.ranks_ = ranks;
  head_reader from{head};
  for (std::uint32_t i = 0; i < header.calls; ++i) {
    auto x = decode_call(from, ranks);
    if (!x)
      return wrong_calls(rank, nonsense);
    result.calls_.push_back(std::move(*x));
  }
  if (!from.at_end())
    return wrong_calls(rank, nonsense);
  std::uint64_t data = 0;
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  for (const auto& x : result.calls_) {
    const auto bytes = bytes_of_call(x, rank, ranks);
    data += bytes.sent;
    sent += aligned(bytes.sent);
    received += aligned(bytes.received);
    if (sent > most_data_bytes || received > most_data_bytes)
      return wrong_calls(rank, nonsense);
  }
  if (data != header.data_bytes)
    return wrong_calls(rank, nonsense);
  result.memory_.reset(
      static_cast<std::byte*>(std::aligned_alloc(64, std::max<std::size_t>(sent + received, 64))));
  if (!result.memory_)
    return wrong_calls(rank, "out of memory for the data of its calls");
  auto* next = result.memory_.get();
  for (auto& x : result.calls_) {
    const auto bytes = bytes_of_call(x, rank, ranks);
    x.send = std::exchange(next, next + aligned(bytes.sent));
    x.recv = std::exchange(next, next + aligned(bytes.received));
  }
  return result;
}

mutable_blocks remote_calls::sent() const {
  const_blocks blocks;
  for (const auto& x : calls_)
    add_sent(x, rank_, ranks_, blocks);
  mutable_blocks result; // writable: all of it is in `memory_`
  for (const auto& x : blocks)
    result.emplace_back(const_cast<std::byte*>(x.data()), x.size());
  return result;
}

const_blocks remote_calls::received() const {
  mutable_blocks blocks;
  for (const auto& x : calls_)
    add_received(x, rank_, ranks_, blocks);
  return {blocks.begin(), blocks.end()};
}

} // namespace troupe::detail
