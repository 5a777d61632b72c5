/// Collective requests and their replies.
#pragma once

#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>

#include <chrono>
#include <cstdint>
#include <string_view>
#include <vector>

namespace troupe {

/// How a request treats a full queue: the queue of a device, of a world without a communicator, or
/// of a rank's calls that wait for calls of other ranks.
enum class room_policy : std::uint8_t {
  wait,   ///< blocks the caller until there is room, at most until the deadline. Requests of
          ///< actors, callbacks and lanes do not block: they are queued in order, up to a second
          ///< limit of 16 times the first. If only the calling thread can make room, the request is
          ///< refused at once, for example if one thread makes the calls of all ranks
  refuse, ///< fails with errc::overloaded at once
};

std::string_view to_string(room_policy x) noexcept;
TROUPE_INSPECT_ENUM(room_policy)

/// Options of a request.
struct request_options {
  /// Time limit, from the request on; 0: the receiver's default. It only completes the request:
  /// work that has begun continues, and its buffers are busy until it is over.
  std::chrono::nanoseconds deadline{0};
  /// The membership of the world that the request requires; 0: any.
  std::uint64_t membership = 0;
  /// Allows the request to run while the world is without some of its ranks
  /// (`loss_policy::shrink`). Handles of absent ranks are ignored. Results have one part per
  /// present rank, in rank order; the rest of the buffer does not change. `avg` divides by the
  /// number of present ranks. If a root or one end of a message is absent, the request fails with
  /// `errc::unavailable`, as does a call of an absent rank (`rank_local`). Without this option,
  /// such a world fails collectives with `errc::membership_changed`.
  bool allow_shrunk = false;
  room_policy room = room_policy::wait;
  /// The number of an earlier request that did not run (`failure::operation`, `pending::number`)
  /// and that this request repeats; 0: none. This request may read content that only the earlier
  /// one left skipped (errc::skipped), and its success ends that mark. Further attempts also name
  /// the first request.
  std::uint64_t retry_of = 0;
  /// How often a request that a loss has ended (errc::worker_lost) is made again, at most; 0:
  /// never. An attempt of which nothing was issued does not count. Requests that are made again
  /// keep their order. They wait for their devices, within the `deadline` of the request, which is
  /// answered once: with the result of the last attempt. A request is not made again if memory that
  /// it uses is gone or cannot be read, or if another request that is not made again was to write
  /// to one of its buffers after it. The error says so. Only for fills, uploads, copies, launches,
  /// and collectives and groups of all ranks.
  /// @errors errc::invalid_argument: the request reads memory that it writes; errc::not_supported:
  ///         requests of this kind cannot be made again
  std::uint32_t max_retries = 0;
  /// For launches: lets the work run at the same time as other such launches of the device that use
  /// other memory, in one of up to four streams. Other requests ignore it.
  bool overlap = false;
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, request_options& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::request_options", field("deadline", x.deadline),
                        field("membership", x.membership), field("allow_shrunk", x.allow_shrunk),
                        field("room", x.room), field("retry_of", x.retry_of),
                        field("max_retries", x.max_retries), field("overlap", x.overlap));
}

/// The way that a collective went: by NCCL, or by kernels of the library (`collectives_policy`).
enum class collective_way : std::uint8_t { nccl, direct };

/// Returns the enumerator's name, which is never freed.
std::string_view to_string(collective_way x) noexcept;
TROUPE_INSPECT_ENUM(collective_way)

/// The result of a collective that is done on all ranks.
struct collective_done {
  std::uint64_t operation = 0;
  std::uint64_t epoch = 0;
  std::uint64_t membership = 0;
  /// The present ranks, if some were absent (`request_options::allow_shrunk`); empty: all.
  std::vector<std::int32_t> ranks = {};
  collective_way way = collective_way::nccl;
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, collective_done& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::collective_done", field("operation", x.operation),
                        field("epoch", x.epoch), field("membership", x.membership),
                        field("ranks", x.ranks), field("way", x.way));
}

/// One collective over all ranks of a world, or one message between two ranks. Each request below
/// converts to it, and a group holds a list of them.
struct collective {
  collective_kind kind = collective_kind::all_reduce;
  std::vector<any_gpu_ref> send =
      {}; ///< one per rank, or only that of the root or of `rank`; empty: in place
  std::vector<any_gpu_ref> recv = {}; ///< as `send`
  reduce_op op = reduce_op::sum;
  std::vector<double> factors =
      {};                 ///< one per rank, for reduce_op::premul_sum; rounded to the type
  std::int32_t rank = -1; ///< the rank that sends
  std::int32_t peer = -1; ///< the root, or the rank that receives
  std::vector<std::vector<std::uint64_t>> counts =
      {}; ///< counts[q][r]: elements from rank q to rank r
};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, collective& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::collective", field("kind", x.kind), field("send", x.send),
                        field("recv", x.recv), field("op", x.op), field("factors", x.factors),
                        field("rank", x.rank), field("peer", x.peer), field("counts", x.counts));
}

// The requests to a world. The reply to each is `collective_done`. Their common errors:
// - errc::invalid_argument, shape_mismatch, stale_ref, indeterminate, skipped, buffer_acquired,
//   membership_changed, overloaded, unavailable, not_supported (the world has a program, or NCCL
//   cannot do it there): nothing was launched
// - errc::deadline_exceeded, cancelled: the work may continue
// - errc::stalled, nccl_error, rank_not_issued, lane_stuck: the communicator has ended, and the
//   targets are indeterminate
// - errc::device_reset, device_fault, worker_lost: the memory of that device is gone
// In formulas, n is the number of ranks; q and r are ranks. All refs of a request have one dtype.
// Ranges may overlap only where "in place" says so. `troupe::any` converts typed handles.

/// recv[r][i] = op over all q of send[q][i], for every r.
/// @shape  one ref per rank, in rank order, all of one count; `recv` empty: in place. factors: one
///         per rank with reduce_op::premul_sum, else empty
struct all_reduce {
  std::vector<any_gpu_ref> send = {};
  std::vector<any_gpu_ref> recv = {};
  reduce_op op = reduce_op::sum;
  request_options options = {};
  std::vector<double> factors = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// recv[i] = op over all q of send[q][i], on the root.
/// @shape  send: one ref per rank, all of one count; recv: as many elements on the root's device.
///         In place: recv equals send[root]. factors: as `all_reduce`
struct reduce {
  std::vector<any_gpu_ref> send = {};
  any_gpu_ref recv = {};
  std::int32_t root = 0;
  reduce_op op = reduce_op::sum;
  request_options options = {};
  std::vector<double> factors = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// recv[r][i] = send[i], for every r.
/// @shape  recv: one ref per rank, all of one count; send: as many elements on the root's device.
///         In place: send equals recv[root]
struct broadcast {
  any_gpu_ref send = {};
  std::vector<any_gpu_ref> recv = {};
  std::int32_t root = 0;
  request_options options = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// recv[r][q * count + i] = send[q][i], for every q and r.
/// @shape  send: one ref per rank, all of `count` elements; recv: one ref per rank, all of n *
///         count. In place: send[r] is the r-th part of recv[r], or `send` is empty
struct all_gather {
  std::vector<any_gpu_ref> send = {};
  std::vector<any_gpu_ref> recv = {};
  request_options options = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// recv[r][i] = op over all q of send[q][r * count + i].
/// @shape  send: one ref per rank, all of n * count elements; recv: one ref per rank, all of
///         `count`. In place: recv[r] is the r-th part of send[r], or `recv` is empty. factors: as
///         `all_reduce`
struct reduce_scatter {
  std::vector<any_gpu_ref> send = {};
  std::vector<any_gpu_ref> recv = {};
  reduce_op op = reduce_op::sum;
  request_options options = {};
  std::vector<double> factors = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// recv[r][q * count + i] = send[q][r * count + i], for every q and r.
/// @shape  send, recv: one ref per rank, all of n * count elements
struct all_to_all {
  std::vector<any_gpu_ref> send = {};
  std::vector<any_gpu_ref> recv = {};
  request_options options = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// As `all_to_all`, with counts[q][r] elements from rank q to rank r. The parts in a buffer are
/// contiguous, in the order of the ranks that they go to or come from.
/// @shape  send[q]: the sum of counts[q][...] elements; recv[r]: the sum of counts[...][r]
struct all_to_all_v {
  std::vector<any_gpu_ref> send = {};
  std::vector<any_gpu_ref> recv = {};
  std::vector<std::vector<std::uint64_t>> counts = {};
  request_options options = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// recv[q * count + i] = send[q][i], for every q, on the root.
/// @shape  send: one ref per rank, all of `count` elements; recv: n * count on the root's device.
///         In place on the root: send[root] is its part of recv
struct gather {
  std::vector<any_gpu_ref> send = {};
  any_gpu_ref recv = {};
  std::int32_t root = 0;
  request_options options = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// recv[r][i] = send[r * count + i], for every r.
/// @shape  send: n * count elements on the root's device; recv: one ref per rank, all of `count`.
///         In place on the root: recv[root] is its part of send
struct scatter {
  any_gpu_ref send = {};
  std::vector<any_gpu_ref> recv = {};
  std::int32_t root = 0;
  request_options options = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// recv[i] = send[i], from the rank `from` to the rank `to`, which may be the same.
/// @shape  send, recv: the same number of elements, on the two ranks' devices
struct send_recv {
  std::int32_t from = 0;
  std::int32_t to = 0;
  any_gpu_ref send = {};
  any_gpu_ref recv = {};
  request_options options = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// Completes when all ranks' devices have reached it and so have finished every earlier collective.
struct barrier {
  request_options options = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// Several collectives and messages between ranks as one operation with one result. They progress
/// together, so no pattern of messages can deadlock.
/// @shape  up to 1,024 calls; no call reads or writes memory that another one writes; no calls:
///         done at once
struct group {
  std::vector<collective> calls = {};
  request_options options = {};
};

/// One rank's call of a collective or message. The other ranks make their own calls
/// (troupe/world_rank.hpp describes how calls match).
/// @shape  call.send, call.recv: at most the rank's own handle; call.factors: at most its own;
///         call.peer: the root, or the rank at the other end; call.counts: for all_to_all_v, the
///         element counts to each rank and those from each rank; call.rank: ignored
struct rank_local {
  std::int32_t rank = 0;
  collective call = {};
  request_options options = {};
};

/// One end of a message between two ranks.
struct message_end {
  std::int32_t peer = 0;   ///< the rank at the other end
  any_gpu_ref buffer = {}; ///< of the calling rank
};

/// Messages from one rank to others and from others to it, as one operation with one result. They
/// progress together, so it does not matter which rank sends first. The other ranks can use an
/// `exchange`, or send and receive one by one: only the order of the messages from one rank to
/// another counts. A message of the rank to itself has both ends here.
/// If a message fails before others have begun, those are cancelled: their other ends get
/// `errc::cancelled`.
/// @shape  up to 1,024 ends; no end reads or writes memory that another one writes; no ends: done
///         at once. sends[k].buffer: as many elements as `sends[k].peer` receives
struct exchange {
  std::int32_t rank = 0;
  std::vector<message_end> sends = {};
  std::vector<message_end> recvs = {};
  request_options options = {};
};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, all_reduce& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::all_reduce", field("send", x.send), field("recv", x.recv),
                        field("op", x.op), field("options", x.options),
                        field("factors", x.factors));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, reduce& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::reduce", field("send", x.send), field("recv", x.recv),
                        field("root", x.root), field("op", x.op), field("options", x.options),
                        field("factors", x.factors));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, broadcast& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::broadcast", field("send", x.send), field("recv", x.recv),
                        field("root", x.root), field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, all_gather& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::all_gather", field("send", x.send), field("recv", x.recv),
                        field("options", x.options));
}

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, reduce_scatter& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::reduce_scatter", field("send", x.send),
                        field("recv", x.recv), field("op", x.op), field("options", x.options),
                        field("factors", x.factors));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, all_to_all& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::all_to_all", field("send", x.send), field("recv", x.recv),
                        field("options", x.options));
}

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, all_to_all_v& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::all_to_all_v", field("send", x.send), field("recv", x.recv),
                        field("counts", x.counts), field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, gather& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::gather", field("send", x.send), field("recv", x.recv),
                        field("root", x.root), field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, scatter& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::scatter", field("send", x.send), field("recv", x.recv),
                        field("root", x.root), field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, send_recv& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::send_recv", field("from", x.from), field("to", x.to),
                        field("send", x.send), field("recv", x.recv), field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, barrier& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::barrier", field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, group& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::group", field("calls", x.calls),
                        field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, rank_local& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::rank_local", field("rank", x.rank), field("call", x.call),
                        field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, message_end& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::message_end", field("peer", x.peer),
                        field("buffer", x.buffer));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, exchange& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::exchange", field("rank", x.rank), field("sends", x.sends),
                        field("recvs", x.recvs), field("options", x.options));
}

} // namespace troupe
