#include "collective/rank_call.hpp"

#include "collective/call_checker.hpp"
#include "foundation/collective_rules.hpp"

#include <algorithm>
#include <numeric>
#include <type_traits>
#include <utility>

namespace troupe::detail {

std::string elements(std::size_t count) { return std::to_string(count) + " elements"; }

namespace {

using lanes_view = std::span<const std::shared_ptr<lane>>;

std::unique_ptr<exchange_plan> packed(std::vector<std::size_t> send_counts,
                                      std::vector<std::size_t> recv_counts) {
  auto result = std::make_unique<exchange_plan>();
  auto offsets = [](const std::vector<std::size_t>& counts) {
    std::vector<std::size_t> at(counts.size());
    std::exclusive_scan(counts.begin(), counts.end(), at.begin(), std::size_t{0});
    return at;
  };
  result->send_offsets = offsets(send_counts);
  result->recv_offsets = offsets(recv_counts);
  result->send_counts = std::move(send_counts);
  result->recv_counts = std::move(recv_counts);
  return result;
}

caf::error add_message_calls(std::vector<rank_call>& to, const call_checker& check,
                             const char* verb, const collective_view& x, lanes_view lanes,
                             rank_set absent) {
  for (auto [rank, what] : {std::pair{x.rank, "sender"}, std::pair{x.peer, "receiver"}}) {
    if (auto error = check.check_rank(rank, what); error)
      return error;
    if (auto error = check.check_there(rank, absent); error)
      return error;
  }
  for (auto refs : {x.send, x.recv})
    if (refs.size() != 1)
      return check.refuse(errc::invalid_argument, check.size(),
                          std::to_string(refs.size()) +
                              " buffers at one end of a message, which has one");
  auto receiver = x;
  receiver.kind = collective_kind::recv;
  receiver.peer = x.rank;
  const auto first = to.size();
  to.resize(first + 2);
  auto& sends = to[first];
  auto& receives = to[first + 1];
  if (auto error = check.check(sends, static_cast<std::size_t>(x.rank), &x.send[0], nullptr,
                               nullptr, nullptr);
      error)
    return error;
  if (auto error = call_checker{verb, receiver, lanes}.check(
          receives, static_cast<std::size_t>(x.peer), nullptr, &x.recv[0], nullptr, nullptr);
      error)
    return error;
  return check.compare(sends, receives);
}

caf::error check_handles(const call_checker& check, std::span<const any_gpu_ref> refs,
                         const buffer_rule& rule) {
  using enum buffer_rule::holders;
  if (rule.optional && refs.empty())
    return {};
  return check.check_number(refs.size(), rule.held_by == none   ? 0
                                         : rule.held_by == root ? 1
                                                                : check.size());
}

const any_gpu_ref* handle_of(std::span<const any_gpu_ref> refs, const buffer_rule& rule,
                             std::size_t rank, int root) {
  if (refs.empty() || !rule.held(static_cast<int>(rank) == root))
    return nullptr;
  return &refs[rule.held_by == buffer_rule::holders::root ? 0 : rank];
}

bool are_rows(std::span<const std::vector<std::uint64_t>> counts, std::size_t rows,
              std::size_t length) {
  return counts.size() == rows &&
         std::all_of(counts.begin(), counts.end(),
                     [length](const auto& row) { return row.size() == length; });
}

} // namespace

caf::error add_rank_calls(std::vector<rank_call>& to, const char* verb, const collective_view& x,
                          std::span<const std::shared_ptr<lane>> lanes, rank_set absent) {
  call_checker check{verb, x, lanes};
  if (auto error = check.check_request(); error)
    return error;
  if (x.kind == collective_kind::send)
    return add_message_calls(to, check, verb, x, lanes, absent);
  if (has_root(x.kind))
    if (auto error = check.check_there(x.peer, absent); error)
      return error;
  auto n = check.size();
  if (x.kind == collective_kind::recv)
    return check.refuse(errc::invalid_argument, n,
                        "a message between two ranks is requested with `send`, not with `recv`");
  const auto& rules = rules_of(x.kind);
  if (auto error = check_handles(check, x.send, rules.send); error)
    return error;
  if (auto error = check_handles(check, x.recv, rules.recv); error)
    return error;
  if (!x.factors.empty() && x.factors.size() != n)
    return check.refuse(errc::invalid_argument, n,
                        std::to_string(x.factors.size()) + " factors for " + std::to_string(n) +
                            " ranks");
  bool exchange = x.kind == collective_kind::all_to_all_v;
  if (exchange && !are_rows(x.counts, n, n))
    return check.refuse(errc::invalid_argument, n,
                        "there must be one count for each pair of ranks");
  const auto first = to.size();
  for (std::size_t rank = 0; rank < n; ++rank) {
    if (absent.contains(rank))
      continue;
    std::unique_ptr<exchange_plan> plan;
    if (exchange) {
      std::vector<std::size_t> from;
      for (auto& row : x.counts)
        from.push_back(row[rank]);
      plan = packed({x.counts[rank].begin(), x.counts[rank].end()}, std::move(from));
    }
    if (auto error =
            check.check(to.emplace_back(), rank, handle_of(x.send, rules.send, rank, x.peer),
                        handle_of(x.recv, rules.recv, rank, x.peer),
                        x.factors.empty() ? nullptr : &x.factors[rank], std::move(plan));
        error)
      return error;
    if (auto error = check.compare(to[first], to.back()); error)
      return error;
  }
  return {};
}

caf::expected<rank_call> rank_call_of(const char* verb, const collective_view& x, std::size_t rank,
                                      std::span<const std::shared_ptr<lane>> lanes,
                                      rank_set absent) {
  call_checker check{verb, x, lanes, rank};
  if (auto error = check.check_request(); error)
    return error;
  if (auto error = check.check_there(static_cast<int>(rank), absent); error)
    return error;
  if (is_message(x.kind))
    if (auto error =
            check.check_rank(x.peer, x.kind == collective_kind::send ? "receiver" : "sender");
        error)
      return error;
  if (has_peer(x.kind))
    if (auto error = check.check_there(x.peer, absent); error)
      return error;
  for (auto number : {x.send.size(), x.recv.size(), x.factors.size()})
    if (number > 1)
      return check.refuse(errc::invalid_argument, rank,
                          std::to_string(number) +
                              " handles or factors in the call of one rank, which has one");
  auto n = check.size();
  bool exchange = x.kind == collective_kind::all_to_all_v;
  if (exchange && !are_rows(x.counts, 2, n))
    return check.refuse(errc::invalid_argument, rank,
                        "there must be one send count and one receive count for each rank");
  auto plan = exchange ? packed({x.counts[0].begin(), x.counts[0].end()},
                                {x.counts[1].begin(), x.counts[1].end()})
                       : nullptr;
  rank_call result;
  if (auto error = check.check(result, rank, x.send.empty() ? nullptr : &x.send[0],
                               x.recv.empty() ? nullptr : &x.recv[0],
                               x.factors.empty() ? nullptr : &x.factors[0], std::move(plan));
      error)
    return error;
  return result;
}

caf::expected<std::vector<rank_call>> exchange_calls(const char* verb, const exchange& x,
                                                     lanes_view lanes, rank_set absent) {
  const auto rank = static_cast<std::size_t>(x.rank);
  const any_gpu_ref none;
  const collective_view message{collective_kind::send, none, none, reduce_op::sum, x.rank};
  const call_checker check{verb, message, lanes, rank};
  if (auto error = check.check_there(x.rank, absent); error) // also if it has no messages
    return error;
  std::vector<rank_call> result;
  result.reserve(x.sends.size() + x.recvs.size());
  std::vector<std::size_t> to_itself;
  std::vector<std::size_t> from_itself;
  auto add = [&](collective_kind what, const message_end& end) -> caf::error {
    const bool sends = what == collective_kind::send;
    auto call = rank_call_of(
        verb,
        {what, sends ? end.buffer : none, sends ? none : end.buffer, reduce_op::sum, end.peer},
        rank, lanes, absent);
    if (!call)
      return std::move(call.error());
    if (end.peer == x.rank)
      (sends ? to_itself : from_itself).push_back(result.size());
    result.push_back(std::move(*call));
    return {};
  };
  for (auto& end : x.sends)
    if (auto error = add(collective_kind::send, end); error)
      return error;
  for (auto& end : x.recvs)
    if (auto error = add(collective_kind::recv, end); error)
      return error;
  if (to_itself.size() != from_itself.size())
    return check.refuse(errc::invalid_argument, rank,
                        "messages of a rank to itself need both ends in it; " +
                            std::to_string(to_itself.size()) + " are sent and " +
                            std::to_string(from_itself.size()) + " received");
  for (std::size_t i = 0; i < to_itself.size(); ++i)
    if (auto error = check.compare(result[to_itself[i]], result[from_itself[i]]); error)
      return error;
  return result;
}

bool conflict(const rank_call& a, const rank_call& b) noexcept {
  return overlap(a.recv, b.recv) || overlap(a.recv, b.send) || overlap(a.send, b.recv);
}

// -- comparison

namespace {

/// Compares all but the kind.
bool same_shape(const collective_call& a, const collective_call& b) noexcept {
  return a.what == collective_kind::barrier ||
         (a.type == b.type && a.count == b.count && a.op == b.op &&
          (!has_root(a.what) || a.peer == b.peer));
}

} // namespace

bool alike(const rank_call& a, const rank_call& b) noexcept {
  return a.call.what == b.call.what && same_shape(a.call, b.call);
}

std::string difference(const rank_call& a, const rank_call& b) {
  auto apart = [&](const auto& of_a, const auto& of_b) {
    auto text = [](const auto& x) {
      if constexpr (std::is_integral_v<std::decay_t<decltype(x)>>)
        return std::to_string(x);
      else
        return std::string{x};
    };
    return "rank " + std::to_string(b.rank) + " called " + text(of_b) + " where rank " +
           std::to_string(a.rank) + " called " + text(of_a);
  };
  auto described = [](const rank_call& x) {
    auto text = std::string{to_string(x.call.what)} + " of " + elements(x.call.count) + " of " +
                std::string{to_string(x.call.type)};
    if (reduces(x.call.what))
      text += " with " + std::string{to_string(x.call.op)};
    if (has_root(x.call.what))
      text += " with root " + std::to_string(x.call.peer);
    return text;
  };
  if (!a.is_message() && a.call.what != b.call.what)
    return apart(to_string(a.call.what), to_string(b.call.what));
  if (!same_shape(a.call, b.call))
    return apart(described(a), described(b));
  if (a.plan)
    for (auto [from, to] : {std::pair{&a, &b}, std::pair{&b, &a}})
      if (auto sent = from->plan->send_counts[to->rank], wanted = to->plan->recv_counts[from->rank];
          sent != wanted)
        return "rank " + std::to_string(from->rank) + " sends " + elements(sent) + " to rank " +
               std::to_string(to->rank) + ", which receives " + std::to_string(wanted);
  return {};
}

} // namespace troupe::detail
