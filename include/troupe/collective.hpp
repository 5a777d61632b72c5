/// Collective requests and their answers.
#pragma once

#include <troupe/dtype.hpp>
#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>

#include <chrono>
#include <cstdint>
#include <vector>

namespace troupe {

/// What every request may say.
struct request_options {
  /// From now on; 0: the receiver's default. It answers the request and nothing more: work that has
  /// begun runs on, its buffers busy until it is over.
  std::chrono::nanoseconds deadline{0};
  /// The membership of the world that the request means; 0: any.
  std::uint64_t membership = 0;
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, request_options& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::request_options", field("deadline", x.deadline),
                        field("membership", x.membership));
}

/// A collective is done on all ranks.
struct collective_done {
  std::uint64_t operation = 0;
  std::uint64_t epoch = 0;
  std::uint64_t membership = 0;
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, collective_done& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::collective_done", field("operation", x.operation),
                        field("epoch", x.epoch), field("membership", x.membership));
}

/// recv[r][i] = op over all ranks q of send[q][i], for every rank r. Answered by `collective_done`.
/// @shape  one ref per rank, in rank order, all of one count and dtype; `recv` empty: in place
/// @errors errc::invalid_argument, shape_mismatch, stale_ref, indeterminate, membership_changed,
///         overloaded, unavailable: nothing launched. errc::deadline_exceeded, cancelled: it may
///         run on. errc::stalled, nccl_error, rank_not_issued: the communicator ended, `recv` is
///         indeterminate. errc::device_reset, device_fault: the memory is gone
struct all_reduce {
  std::vector<any_gpu_ref> send;
  std::vector<any_gpu_ref> recv;
  reduce_op op = reduce_op::sum;
  request_options options;
};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, all_reduce& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::all_reduce", field("send", x.send), field("recv", x.recv),
                        field("op", x.op), field("options", x.options));
}

} // namespace troupe
