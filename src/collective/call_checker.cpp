#include "collective/call_checker.hpp"

#include "foundation/collective_rules.hpp"
#include "foundation/error_text.hpp"
#include "lane/lane.hpp" // for state()
#include "operation/buffer.hpp"
#include "operation/device_state.hpp"
#include "operation/use_of.hpp"
#include <troupe/dtype.hpp>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

namespace troupe::detail {

namespace {

memory_range range_of(const any_gpu_ref& x) {
  return {&x, x.offset(), x.offset() + x.size_bytes(), x.count()};
}

/// Returns the block of `rank` in `x`, a buffer of a collective over `n` ranks.
memory_range own_block(const memory_range& x, const buffer_rule& rule, std::size_t rank,
                       std::size_t n) {
  if (!rule.per_rank)
    return x;
  auto size = (x.end - x.begin) / n;
  return {x.of, x.begin + rank * size, x.begin + (rank + 1) * size, x.count / n};
}

/// Returns the sum of `counts`, or SIZE_MAX, which no buffer has, on overflow.
std::size_t sum_of(const std::vector<std::size_t>& counts) {
  std::size_t result = 0;
  for (auto x : counts)
    if (__builtin_add_overflow(result, x, &result))
      return SIZE_MAX;
  return result;
}

/// Stores `x` as a T. Returns false if T is an integer type that does not represent it exactly.
template <class T> bool store(std::array<std::byte, 8>& to, double x) {
  T value{};
  if constexpr (std::is_integral_v<T>) {
    using limits = std::numeric_limits<T>;
    const bool in_range = x >= static_cast<double>(limits::min()) &&
                          x < std::ldexp(1.0, limits::digits); // exact, unlike the maximum
    if (!in_range || x != std::trunc(x))
      return false;
  }
  if constexpr (std::is_arithmetic_v<T>)
    value = static_cast<T>(x);
  else
    value = T{static_cast<float>(x)};
  std::memcpy(to.data(), &value, sizeof value);
  return true;
}

/// Stores the factor in the type that it multiplies. Returns false if the type cannot represent it.
bool store_factor(std::array<std::byte, 8>& to, dtype type, double x) {
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
  case dtype::complex64:
  case dtype::complex128:
    break; // its call is one of real numbers
  }
  return true;
}

/// Whether one rank's call sends data, and whether it receives data.
struct data_flow {
  bool sends = true;
  bool receives = true;
};

bool divides(std::size_t n, const memory_range& r) { return r.count % n == 0; }

caf::error refuse_parts(const call_checker& check, std::size_t rank, const memory_range& r) {
  return check.refuse(errc::shape_mismatch, rank,
                      elements(r.count) + " cannot be divided equally among " +
                          std::to_string(check.size()) + " ranks");
}

/// Sets the range of the buffer that a call in place leaves out: the own block of the other one.
caf::error complete_ranges(const call_checker& check, rank_call& result,
                           const collective_rules& rules) {
  const bool no_send = rules.send.optional && !result.send && result.recv;
  const bool no_recv = rules.recv.optional && !result.recv && result.send;
  if (!no_send && !no_recv)
    return {};
  const auto& given = no_send ? result.recv : result.send;
  const auto& rule = no_send ? rules.recv : rules.send;
  if (rule.per_rank && !divides(check.size(), given))
    return refuse_parts(check, result.rank, given);
  (no_send ? result.send : result.recv) = own_block(given, rule, result.rank, check.size());
  return {};
}

/// Checks that the call has a buffer where it sends or receives, and none elsewhere.
caf::error check_presence(const call_checker& check, const rank_call& result, data_flow flow) {
  const auto [sends, receives] = flow;
  if (sends != static_cast<bool>(result.send) || receives != static_cast<bool>(result.recv))
    return check.refuse(
        errc::invalid_argument, result.rank,
        sends != static_cast<bool>(result.send)
            ? (sends ? "the send buffer is missing" : "a send buffer on a rank that does not send")
            : (receives ? "the receive buffer is missing"
                        : "a receive buffer on a rank that does not receive"));
  return {};
}

/// Sets the type of the data, which is that of each buffer.
caf::error set_type(const call_checker& check, rank_call& result, data_flow flow) {
  auto& call = result.call;
  auto& any = flow.sends ? result.send : result.recv;
  call.type = any.of->type();
  if (flow.sends && flow.receives && result.recv.of->type() != call.type)
    return check.refuse(errc::shape_mismatch, result.rank,
                        "a buffer of " + std::string{to_string(result.recv.of->type())} +
                            " beside one of " + std::string{to_string(call.type)});
  return {};
}

/// The first buffer of a wrong size, and the number of elements that it should have.
struct size_mismatch {
  const memory_range* wrong = nullptr;
  std::size_t meant = 0;

  void want(const memory_range& r, std::size_t count) {
    if (wrong == nullptr && r && r.count != count) {
      wrong = &r;
      meant = count;
    }
  }
};

/// Sets the call's count and checks the sizes of its buffers.
caf::error set_count(const call_checker& check, rank_call& result, const collective_rules& rules,
                     data_flow flow) {
  const auto rank = result.rank;
  const auto n = check.size();
  size_mismatch sizes;
  if (result.plan) {
    sizes.want(result.send, sum_of(result.plan->send_counts));
    sizes.want(result.recv, sum_of(result.plan->recv_counts));
  } else {
    // A buffer of one block determines the count, if there is one.
    const bool by_send = flow.sends && (!rules.send.per_rank || rules.recv.per_rank);
    const auto& counted = by_send ? result.send : result.recv;
    const bool per_rank = (by_send ? rules.send : rules.recv).per_rank;
    if (per_rank && !divides(n, counted))
      return refuse_parts(check, rank, counted);
    auto& count = result.call.count;
    count = per_rank ? counted.count / n : counted.count;
    sizes.want(result.send, rules.send.blocks(n) * count);
    sizes.want(result.recv, rules.recv.blocks(n) * count);
  }
  if (sizes.wrong != nullptr)
    return check.refuse(errc::shape_mismatch, rank,
                        "a buffer of " + elements(sizes.wrong->count) + ": " +
                            std::to_string(sizes.meant) + " are expected");
  return {};
}

/// Returns whether one buffer, of those that overlap, is the other one or the rank's block of it.
bool is_in_place(const rank_call& x, const collective_rules& rules) {
  const auto own = [&](const memory_range& r, const buffer_rule& rule) {
    return r.begin + rule.block_of(x.rank) * x.call.count * size_of(x.call.type);
  };
  return rules.has_in_place_form() && own(x.send, rules.send) == own(x.recv, rules.recv);
}

/// Makes a call with complex numbers one with pairs of real numbers.
caf::error make_real(const call_checker& check, rank_call& result) {
  auto& call = result.call;
  if (!is_complex(call.type))
    return {};
  const bool by_parts =
      call.op == reduce_op::sum || call.op == reduce_op::avg || call.op == reduce_op::premul_sum;
  if (reduces(call.what) && !by_parts)
    return check.refuse(errc::invalid_argument, result.rank,
                        "complex numbers have no " + std::string{to_string(call.op)});
  call.type = real_type_of(call.type);
  call.count *= 2;
  if (result.plan)
    for (auto* x : {&result.plan->send_counts, &result.plan->send_offsets,
                    &result.plan->recv_counts, &result.plan->recv_offsets})
      for (auto& number : *x)
        number *= 2;
  return {};
}

/// Checks and stores the factor of a call with premul_sum.
caf::error set_factor(const call_checker& check, rank_call& result, const double* factor) {
  auto& call = result.call;
  if (call.op == reduce_op::premul_sum) {
    if (factor == nullptr)
      return check.refuse(errc::invalid_argument, result.rank, "premul_sum needs a factor");
    if (!store_factor(result.factor, call.type, *factor))
      return check.refuse(errc::invalid_argument, result.rank,
                          "the factor " + std::to_string(*factor) + " cannot be represented as " +
                              std::string{to_string(call.type)});
  }
  return {};
}

void set_addresses(rank_call& result, data_flow flow) {
  auto& call = result.call;
  auto address = [](const memory_range& r) { return r.of->memory()->address() + r.begin; };
  if (flow.sends)
    call.send = address(result.send);
  if (flow.receives)
    call.recv = address(result.recv);
}

} // namespace

caf::error call_checker::refuse(errc code, std::size_t rank, std::string detail) const {
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

caf::error call_checker::check(rank_call& result, std::size_t rank, const any_gpu_ref* send,
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
  const auto& rules = rules_of(x_.kind);
  const bool root = static_cast<int>(rank) == x_.peer;
  const data_flow flow{rules.send.held(root), rules.recv.held(root)};
  if (auto error = complete_ranges(*this, result, rules); error)
    return error;
  if (auto error = check_presence(*this, result, flow); error)
    return error;
  const auto [sends, receives] = flow;
  if (!sends && !receives)
    return {};
  if (auto error = set_type(*this, result, flow); error)
    return error;
  if (auto error = set_count(*this, result, rules, flow); error)
    return error;
  if (overlap(result.send, result.recv) && !is_in_place(result, rules))
    return refuse(errc::invalid_argument, rank,
                  "the send and receive buffers overlap and are not the same");
  if (auto error = make_real(*this, result); error)
    return error;
  if (auto error = set_factor(*this, result, factor); error)
    return error;
  set_addresses(result, flow);
  return {};
}

caf::error call_checker::compare(const rank_call& a, const rank_call& b) const {
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

caf::error call_checker::check_request() const {
  if (!is_known(x_.kind))
    return refuse(errc::invalid_argument, named_rank(),
                  "unknown collective " + std::to_string(static_cast<int>(x_.kind)));
  if (reduces(x_.kind) && x_.op > reduce_op::premul_sum)
    return refuse(errc::invalid_argument, named_rank(),
                  "unknown reduce operation " + std::to_string(static_cast<int>(x_.op)));
  if (has_root(x_.kind) && (x_.peer < 0 || static_cast<std::size_t>(x_.peer) >= size()))
    return refuse(errc::invalid_argument, named_rank(), out_of_range("root", x_.peer, size()));
  if (!x_.factors.empty() && (x_.op != reduce_op::premul_sum || !reduces(x_.kind)))
    return refuse(errc::invalid_argument, named_rank(), "factors are for premul_sum only");
  if (!x_.counts.empty() && x_.kind != collective_kind::all_to_all_v)
    return refuse(errc::invalid_argument, named_rank(), "counts are for all_to_all_v only");
  return {};
}

caf::error call_checker::check_rank(int rank, const char* what) const {
  if (rank < 0 || static_cast<std::size_t>(rank) >= size())
    return refuse(errc::invalid_argument, named_rank(), out_of_range(what, rank, size()));
  return {};
}

caf::error call_checker::check_there(int rank, rank_set absent) const {
  auto index = static_cast<std::size_t>(rank);
  if (absent.contains(index))
    return refuse(errc::unavailable, index, "the world is without rank " + std::to_string(rank));
  return {};
}

caf::error call_checker::check_number(std::size_t there, std::size_t wanted) const {
  if (there != wanted)
    return refuse(errc::invalid_argument, named_rank(),
                  std::to_string(there) + " buffers for " + std::to_string(wanted) + " ranks");
  return {};
}

caf::error call_checker::check_handle(std::size_t rank, const any_gpu_ref& ref) const {
  if (!ref)
    return refuse(errc::stale_ref, rank, "the handle has no memory");
  const auto& own = lanes_[rank]->state();
  if (&ref.memory()->home() != &own)
    return refuse(errc::invalid_argument, rank,
                  is_foreign(ref, own) ? foreign_handle
                                       : "the buffer lies on device " +
                                             std::to_string(ref.device()) + ", not on the rank's");
  return {};
}

} // namespace troupe::detail
