#include "collective/rank_call.hpp"

#include "foundation/error_text.hpp"
#include "foundation/prefetch.hpp"
#include "lane/lane.hpp"
#include "operation/buffer.hpp"
#include "operation/foreign_handle.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

using lanes_view = std::span<const std::shared_ptr<lane>>;

bool overlap(const memory_range& a, const memory_range& b) noexcept {
  return a && b && a.of->memory() == b.of->memory() && a.begin < b.end && b.begin < a.end;
}

memory_range range_of(const any_gpu_ref& x) {
  return {&x, x.offset(), x.offset() + x.size_bytes(), x.count()};
}

/// Returns the `i`-th of `n` equal parts.
memory_range part_of(const memory_range& x, std::size_t i, std::size_t n) {
  auto size = (x.end - x.begin) / n;
  return {x.of, x.begin + i * size, x.begin + (i + 1) * size, x.count / n};
}

/// Returns the sum of `counts`, or SIZE_MAX, which no buffer has, on overflow.
std::size_t sum_of(const std::vector<std::size_t>& counts) {
  std::size_t result = 0;
  for (auto x : counts)
    if (__builtin_add_overflow(result, x, &result))
      return SIZE_MAX;
  return result;
}

std::string elements(std::size_t count) { return std::to_string(count) + " elements"; }

/// Stores the factor in the type that it multiplies.
template <class T> void store(std::array<std::byte, 8>& to, double x) {
  T value{};
  if constexpr (std::is_arithmetic_v<T>)
    value = static_cast<T>(x);
  else
    value = T{static_cast<float>(x)};
  std::memcpy(to.data(), &value, sizeof value);
}

void store_factor(std::array<std::byte, 8>& to, dtype type, double x) {
  switch (type) {
  case dtype::int8:
    return store<std::int8_t>(to, x);
  case dtype::uint8:
    return store<std::uint8_t>(to, x);
  case dtype::int32:
    return store<std::int32_t>(to, x);
  case dtype::uint32:
    return store<std::uint32_t>(to, x);
  case dtype::int64:
    return store<std::int64_t>(to, x);
  case dtype::uint64:
    return store<std::uint64_t>(to, x);
  case dtype::float16:
    return store<float16>(to, x);
  case dtype::bfloat16:
    return store<bfloat16>(to, x);
  case dtype::float32:
    return store<float>(to, x);
  case dtype::float64:
    return store<double>(to, x);
  case dtype::float8_e4m3:
    return store<float8_e4m3>(to, x);
  case dtype::float8_e5m2:
    return store<float8_e5m2>(to, x);
  }
}

/// Returns whether an integer type represents `x` exactly; true for other types.
bool representable(dtype type, double x) {
  auto whole = [x](double least, double beyond) {
    return x >= least && x < beyond && x == std::trunc(x);
  };
  constexpr double two31 = 2147483648.0;
  constexpr double two63 = 9223372036854775808.0;
  switch (type) {
  case dtype::int8:
    return whole(-128, 128);
  case dtype::uint8:
    return whole(0, 256);
  case dtype::int32:
    return whole(-two31, two31);
  case dtype::uint32:
    return whole(0, 2 * two31);
  case dtype::int64:
    return whole(-two63, two63);
  case dtype::uint64:
    return whole(0, 2 * two63);
  default:
    return true;
  }
}

/// Makes and checks the calls of single ranks.
class checker {
public:
  checker(const char* verb, const collective_view& x, lanes_view lanes)
      : checker(verb, x, lanes, lanes.size()) {}
  /// For a request of rank `alone`.
  checker(const char* verb, const collective_view& x, lanes_view lanes, std::size_t alone)
      : verb_(verb), x_(x), lanes_(lanes), no_rank_(alone) {}

  std::size_t size() const noexcept { return lanes_.size(); }
  /// The rank to name in an error if the request as a whole is wrong.
  std::size_t no_rank() const noexcept { return no_rank_; }

  caf::error refuse(errc code, std::size_t rank, std::string detail) const {
    failure why;
    why.code = code;
    why.verb = verb_;
    why.detail = std::move(detail);
    if (rank < size()) {
      why.rank = static_cast<int>(rank);
      if (lanes_[rank]) // null: the rank is in another process
        why.device = lanes_[rank]->state().ordinal();
    }
    return make_error(std::move(why));
  }

  /// Fills `result`, which is empty. `send`, `recv`: the rank's handle, if the request has one for
  /// it.
  caf::error check(rank_call& result, std::size_t rank, const any_gpu_ref* send,
                   const any_gpu_ref* recv, const double* factor,
                   std::unique_ptr<exchange_plan> plan) const {
    result.rank = rank;
    result.plan = std::move(plan);
    auto& call = result.call;
    call.what = x_.kind;
    call.op = reduces(x_.kind) ? x_.op : reduce_op::sum;
    call.peer = x_.peer;
    for (auto* ref : {send, recv})
      if (ref != nullptr)
        if (auto error = check_handle(rank, *ref); error)
          return error;
    if (send != nullptr)
      result.send = range_of(*send);
    if (recv != nullptr)
      result.recv = range_of(*recv);
    auto n = size();
    auto divides = [n](const memory_range& r) { return r.count % n == 0; };
    auto refuse_parts = [&](const memory_range& r) {
      return refuse(errc::shape_mismatch, rank,
                    elements(r.count) + " cannot be divided equally among " + std::to_string(n) +
                        " ranks");
    };
    bool root = static_cast<int>(rank) == x_.peer;
    bool sends = true;
    bool receives = true;
    switch (x_.kind) {
    case collective_kind::all_reduce:
      if (!result.recv)
        result.recv = result.send;
      break;
    case collective_kind::reduce:
    case collective_kind::gather:
      receives = root;
      break;
    case collective_kind::broadcast:
    case collective_kind::scatter:
      sends = root;
      break;
    case collective_kind::all_gather:
      if (result.recv && !result.send) {
        if (!divides(result.recv))
          return refuse_parts(result.recv);
        result.send = part_of(result.recv, rank, n);
      }
      break;
    case collective_kind::reduce_scatter:
      if (result.send && !result.recv) {
        if (!divides(result.send))
          return refuse_parts(result.send);
        result.recv = part_of(result.send, rank, n);
      }
      break;
    case collective_kind::send:
      receives = false;
      break;
    case collective_kind::recv:
      sends = false;
      break;
    case collective_kind::barrier:
      sends = receives = false;
      break;
    case collective_kind::all_to_all:
    case collective_kind::all_to_all_v:
      break;
    }
    if (sends != static_cast<bool>(result.send) || receives != static_cast<bool>(result.recv))
      return refuse(errc::invalid_argument, rank,
                    sends != static_cast<bool>(result.send)
                        ? (sends ? "the send buffer is missing"
                                 : "a send buffer on a rank that does not send")
                        : (receives ? "the receive buffer is missing"
                                    : "a receive buffer on a rank that does not receive"));
    if (!sends && !receives)
      return {};
    auto& any = sends ? result.send : result.recv;
    call.type = any.of->type();
    if (sends && receives && result.recv.of->type() != call.type)
      return refuse(errc::shape_mismatch, rank,
                    "a buffer of " + std::string{to_string(result.recv.of->type())} +
                        " beside one of " + std::string{to_string(call.type)});
    const memory_range* wrong = nullptr; // the first buffer of a wrong size
    std::size_t meant = 0;
    auto want = [&](const memory_range& r, std::size_t count) {
      if (wrong == nullptr && r && r.count != count) {
        wrong = &r;
        meant = count;
      }
    };
    std::size_t send_count = result.send.count;
    std::size_t recv_count = result.recv.count;
    bool in_place = false;
    switch (x_.kind) {
    case collective_kind::all_reduce:
    case collective_kind::reduce:
    case collective_kind::broadcast:
      call.count = sends ? send_count : recv_count;
      if (receives)
        want(result.recv, call.count);
      in_place = sends && receives && result.send.same_as(result.recv);
      break;
    case collective_kind::send:
      call.count = send_count;
      break;
    case collective_kind::recv:
      call.count = recv_count;
      break;
    case collective_kind::all_gather:
    case collective_kind::gather:
      call.count = send_count;
      if (receives) {
        want(result.recv, n * call.count);
        in_place = result.send.same_as(part_of(result.recv, rank, n));
      }
      break;
    case collective_kind::reduce_scatter:
    case collective_kind::scatter:
      call.count = recv_count;
      if (sends) {
        want(result.send, n * call.count);
        in_place = result.recv.same_as(part_of(result.send, rank, n));
      }
      break;
    case collective_kind::all_to_all:
      if (!divides(result.send))
        return refuse_parts(result.send);
      want(result.recv, send_count);
      call.count = send_count / n;
      break;
    case collective_kind::all_to_all_v:
      want(result.send, sum_of(result.plan->send_counts));
      want(result.recv, sum_of(result.plan->recv_counts));
      break;
    case collective_kind::barrier:
      break;
    }
    if (wrong != nullptr)
      return refuse(errc::shape_mismatch, rank,
                    "a buffer of " + elements(wrong->count) + ": " + std::to_string(meant) +
                        " are expected");
    if (!in_place && sends && receives && overlap(result.send, result.recv))
      return refuse(errc::invalid_argument, rank,
                    "the send and receive buffers overlap and are not the same");
    if (call.op == reduce_op::premul_sum) {
      if (factor == nullptr)
        return refuse(errc::invalid_argument, rank, "premul_sum needs a factor");
      if (!representable(call.type, *factor))
        return refuse(errc::invalid_argument, rank,
                      "the factor " + std::to_string(*factor) + " cannot be represented as " +
                          std::string{to_string(call.type)});
      store_factor(result.factor, call.type, *factor);
    }
    auto address = [](const memory_range& r) { return r.of->memory()->address() + r.begin; };
    auto place = [](const memory_range& r) {
      return symmetric_place{r.of->memory()->symmetric(), r.begin};
    };
    if (sends) {
      call.send = address(result.send);
      result.send_place = place(result.send);
    }
    if (receives) {
      call.recv = address(result.recv);
      result.recv_place = place(result.recv);
    }
    return {};
  }

  /// Checks what must be the same in all ranks' calls of one collective.
  caf::error compare(const rank_call& a, const rank_call& b) const {
    if (a.call.type != b.call.type)
      return refuse(errc::shape_mismatch, b.rank,
                    "a buffer of " + std::string{to_string(b.call.type)} + " beside one of " +
                        std::string{to_string(a.call.type)});
    if (a.call.count != b.call.count)
      return refuse(errc::shape_mismatch, b.rank,
                    "a buffer for " + elements(b.call.count) + " beside one for " +
                        std::to_string(a.call.count));
    return {};
  }

  caf::error check_request() const {
    if (x_.kind > collective_kind::barrier)
      return refuse(errc::invalid_argument, no_rank(),
                    "unknown collective " + std::to_string(static_cast<int>(x_.kind)));
    if (reduces(x_.kind) && x_.op > reduce_op::premul_sum)
      return refuse(errc::invalid_argument, no_rank(),
                    "unknown reduce operation " + std::to_string(static_cast<int>(x_.op)));
    if (has_root(x_.kind) && (x_.peer < 0 || static_cast<std::size_t>(x_.peer) >= size()))
      return refuse(errc::invalid_argument, no_rank(), out_of_range("root", x_.peer, size()));
    if (!x_.factors.empty() && (x_.op != reduce_op::premul_sum || !reduces(x_.kind)))
      return refuse(errc::invalid_argument, no_rank(), "factors are for premul_sum only");
    if (!x_.counts.empty() && x_.kind != collective_kind::all_to_all_v)
      return refuse(errc::invalid_argument, no_rank(), "counts are for all_to_all_v only");
    return {};
  }

  caf::error check_rank(int rank, const char* what) const {
    if (rank < 0 || static_cast<std::size_t>(rank) >= size())
      return refuse(errc::invalid_argument, no_rank(), out_of_range(what, rank, size()));
    return {};
  }

  caf::error check_there(int rank, rank_set absent) const {
    auto place = static_cast<std::size_t>(rank);
    if (absent.contains(place))
      return refuse(errc::unavailable, place, "the world is without rank " + std::to_string(rank));
    return {};
  }

  caf::error check_number(std::size_t there, std::size_t wanted) const {
    if (there != wanted)
      return refuse(errc::invalid_argument, no_rank(),
                    std::to_string(there) + " buffers for " + std::to_string(wanted) + " ranks");
    return {};
  }

private:
  caf::error check_handle(std::size_t rank, const any_gpu_ref& ref) const {
    if (!ref)
      return refuse(errc::stale_ref, rank, "the handle has no memory");
    const auto& own = lanes_[rank]->state();
    if (&ref.memory()->home() != &own)
      return refuse(errc::invalid_argument, rank,
                    is_foreign(ref, own)
                        ? foreign_handle
                        : "the buffer lies on device " + std::to_string(ref.device()) +
                              ", not on the rank's");
    return {};
  }

  const char* verb_;
  const collective_view& x_;
  lanes_view lanes_;
  std::size_t no_rank_;
};

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

caf::expected<std::vector<rank_call>> message_calls(const checker& check, const char* verb,
                                                    const collective_view& x, lanes_view lanes,
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
  std::vector<rank_call> result(2);
  if (auto error = check.check(result[0], static_cast<std::size_t>(x.rank), &x.send[0], nullptr,
                               nullptr, nullptr);
      error)
    return error;
  if (auto error = checker{verb, receiver, lanes}.check(result[1], static_cast<std::size_t>(x.peer),
                                                        nullptr, &x.recv[0], nullptr, nullptr);
      error)
    return error;
  if (auto error = check.compare(result[0], result[1]); error)
    return error;
  return result;
}

/// The ranks that have a handle for `send` or `recv` in a collective over n ranks.
enum class holders : std::uint8_t { none, all, all_or_none, root };

struct handle_rule {
  holders send;
  holders recv;
};

handle_rule rule_of(collective_kind x) {
  switch (x) {
  case collective_kind::all_reduce:
  case collective_kind::reduce_scatter:
    return {holders::all, holders::all_or_none};
  case collective_kind::all_gather:
    return {holders::all_or_none, holders::all};
  case collective_kind::reduce:
  case collective_kind::gather:
    return {holders::all, holders::root};
  case collective_kind::broadcast:
  case collective_kind::scatter:
    return {holders::root, holders::all};
  case collective_kind::all_to_all:
  case collective_kind::all_to_all_v:
    return {holders::all, holders::all};
  case collective_kind::send:
  case collective_kind::recv:
  case collective_kind::barrier:
    break;
  }
  return {holders::none, holders::none};
}

caf::error check_handles(const checker& check, std::span<const any_gpu_ref> refs, holders who) {
  if (who == holders::all_or_none && refs.empty())
    return {};
  return check.check_number(refs.size(), who == holders::none   ? 0
                                         : who == holders::root ? 1
                                                                : check.size());
}

const any_gpu_ref* handle_of(std::span<const any_gpu_ref> refs, holders who, std::size_t rank,
                             int root) {
  if (refs.empty())
    return nullptr;
  if (who == holders::root)
    return static_cast<int>(rank) == root ? &refs[0] : nullptr;
  return &refs[rank];
}

bool are_rows(std::span<const std::vector<std::uint64_t>> counts, std::size_t rows,
              std::size_t length) {
  return counts.size() == rows &&
         std::all_of(counts.begin(), counts.end(),
                     [length](const auto& row) { return row.size() == length; });
}

} // namespace

caf::expected<std::vector<rank_call>> rank_calls(const char* verb, const collective_view& x,
                                                 std::span<const std::shared_ptr<lane>> lanes,
                                                 rank_set absent, std::vector<rank_call> room) {
  checker check{verb, x, lanes};
  if (auto error = check.check_request(); error)
    return error;
  if (x.kind == collective_kind::send)
    return message_calls(check, verb, x, lanes, absent);
  if (has_root(x.kind))
    if (auto error = check.check_there(x.peer, absent); error)
      return error;
  auto n = check.size();
  if (x.kind == collective_kind::recv)
    return check.refuse(errc::invalid_argument, n,
                        "a message between two ranks is requested with `send`, not with `recv`");
  auto rule = rule_of(x.kind);
  if (auto error = check_handles(check, x.send, rule.send); error)
    return error;
  if (auto error = check_handles(check, x.recv, rule.recv); error)
    return error;
  if (!x.factors.empty() && x.factors.size() != n)
    return check.refuse(errc::invalid_argument, n,
                        std::to_string(x.factors.size()) + " factors for " + std::to_string(n) +
                            " ranks");
  bool exchange = x.kind == collective_kind::all_to_all_v;
  if (exchange && !are_rows(x.counts, n, n))
    return check.refuse(errc::invalid_argument, n,
                        "there must be one count for each pair of ranks");
  for (auto refs : {x.send, x.recv})
    for (auto& ref : refs)
      prefetch_lines(ref.memory().get(), sizeof(buffer));
  auto result = std::move(room);
  result.clear();
  result.reserve(n);
  for (std::size_t rank = 0; rank < n; ++rank) {
    if (absent.contains(rank))
      continue;
    std::unique_ptr<exchange_plan> plan;
    if (exchange) {
      std::vector<std::size_t> to(x.counts[rank].begin(), x.counts[rank].end());
      std::vector<std::size_t> from;
      for (auto& row : x.counts)
        from.push_back(row[rank]);
      plan = packed(std::move(to), std::move(from));
    }
    if (auto error =
            check.check(result.emplace_back(), rank, handle_of(x.send, rule.send, rank, x.peer),
                        handle_of(x.recv, rule.recv, rank, x.peer),
                        x.factors.empty() ? nullptr : &x.factors[rank], std::move(plan));
        error)
      return error;
    if (auto error = check.compare(result.front(), result.back()); error)
      return error;
  }
  return result;
}

caf::expected<rank_call> rank_call_of(const char* verb, const collective_view& x, std::size_t rank,
                                      std::span<const std::shared_ptr<lane>> lanes,
                                      rank_set absent) {
  checker check{verb, x, lanes, rank};
  if (auto error = check.check_request(); error)
    return error;
  if (auto error = check.check_there(static_cast<int>(rank), absent); error)
    return error;
  const bool message = x.kind == collective_kind::send || x.kind == collective_kind::recv;
  if (message)
    if (auto error =
            check.check_rank(x.peer, x.kind == collective_kind::send ? "receiver" : "sender");
        error)
      return error;
  if (message || has_root(x.kind))
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

namespace {
/// Compares all but the kind.
bool same_shape(const collective_call& a, const collective_call& b) noexcept {
  return a.what == collective_kind::barrier ||
         (a.type == b.type && a.count == b.count && a.op == b.op &&
          (!has_root(a.what) || a.peer == b.peer));
}
} // namespace

caf::expected<std::vector<rank_call>> exchange_calls(const char* verb, const exchange& x,
                                                     lanes_view lanes, rank_set absent) {
  const auto rank = static_cast<std::size_t>(x.rank);
  const any_gpu_ref none;
  const collective_view message{collective_kind::send, none, none, reduce_op::sum, x.rank};
  const checker check{verb, message, lanes, rank};
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

namespace {

bool has_symmetric_form(const collective_call& x) noexcept {
  if (x.what == collective_kind::all_gather)
    return true;
  if (x.what != collective_kind::all_reduce && x.what != collective_kind::reduce_scatter)
    return false;
  switch (x.type) {
  case dtype::float16:
  case dtype::bfloat16:
  case dtype::float32:
  case dtype::float8_e4m3:
  case dtype::float8_e5m2:
    return x.op == reduce_op::sum;
  default:
    return false;
  }
}

/// Returns whether one buffer of an all_gather or reduce_scatter is the rank's part of the other.
bool is_in_place(const rank_call& x) noexcept {
  auto part = x.rank * x.call.count * size_of(x.call.type);
  auto* send = static_cast<const std::byte*>(x.call.send);
  auto* recv = static_cast<const std::byte*>(x.call.recv);
  return (x.call.what == collective_kind::all_gather && send == recv + part) ||
         (x.call.what == collective_kind::reduce_scatter && recv == send + part);
}

} // namespace

bool is_symmetric(std::span<const rank_call* const> calls, std::size_t ranks,
                  std::size_t limit) noexcept {
  auto& first = *calls.front();
  if (first.send_place.of == nullptr || first.recv_place.of == nullptr || calls.size() != ranks ||
      ranks < 2 || !has_symmetric_form(first.call))
    return false;
  auto parts = first.call.what == collective_kind::all_reduce ? 1 : ranks;
  auto bytes = first.call.count * size_of(first.call.type) * parts;
  if (bytes == 0 || bytes > limit)
    return false;
  bool in_place = std::all_of(calls.begin(), calls.end(), [](auto* x) { return is_in_place(*x); });
  return std::all_of(calls.begin(), calls.end(), [&](const rank_call* x) {
    bool same_send = x->send_place == first.send_place;
    bool same_recv = x->recv_place == first.recv_place;
    if (x->call.what != first.call.what || x->send_place.of != first.send_place.of ||
        x->recv_place.of != first.recv_place.of)
      return false;
    if (in_place)
      return x->call.what == collective_kind::all_gather ? same_recv : same_send;
    return same_send && same_recv;
  });
}

bool conflict(const rank_call& a, const rank_call& b) noexcept {
  return overlap(a.recv, b.recv) || overlap(a.recv, b.send) || overlap(a.send, b.recv);
}

} // namespace troupe::detail
