/// Collective requests and their answers.
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

/// What a request does where a queue is full: of a device, of a world without a communicator, or of
/// a rank's calls that wait for the other ranks'.
enum class room_policy : std::uint8_t {
  wait,   ///< blocks the caller until there is room, at most until the deadline. An actor, a
          ///< callback and a lane do not wait: their requests are held in order, up to a second
          ///< bound of 16 times the first. Refused at once where only the calling thread can make
          ///< the room, as where one thread makes the calls of all ranks
  refuse, ///< is answered with errc::overloaded at once
};

std::string_view to_string(room_policy x) noexcept;
TROUPE_INSPECT_ENUM(room_policy)

/// What every request may say.
struct request_options {
  /// From now on; 0: the receiver's default. It answers the request and nothing more: work that has
  /// begun runs on, its buffers busy until it is over.
  std::chrono::nanoseconds deadline{0};
  /// The membership of the world that the request means; 0: any.
  std::uint64_t membership = 0;
  /// While a world is without some of its ranks (`loss_policy::shrink`): goes on with those that
  /// are there. The others' handles are not looked at; results have one part per rank that took
  /// part, in rank order, and what lies behind these in a buffer stays as it is; `avg` divides by
  /// their number; a root, or one end of a message, that is not there is `errc::unavailable`, and
  /// so is a call of such a rank (`rank_local`). Without it such a world answers collectives with
  /// `errc::membership_changed`.
  bool allow_shrunk = false;
  room_policy room = room_policy::wait;
  /// The number of a request that did not run (`failure::operation`, `pending::number`), which this
  /// one is, made again: it may read what that one alone left skipped (errc::skipped), and ends
  /// that mark when it succeeds. A further attempt names the first one, too. 0: none.
  std::uint64_t retry_of = 0;
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, request_options& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::request_options", field("deadline", x.deadline),
                        field("membership", x.membership), field("allow_shrunk", x.allow_shrunk),
                        field("room", x.room), field("retry_of", x.retry_of));
}

/// A collective is done on all ranks.
struct collective_done {
  std::uint64_t operation = 0;
  std::uint64_t epoch = 0;
  std::uint64_t membership = 0;
  bool symmetric = false; ///< it went the way of symmetric memory (`allocation_options`)
  /// Those that took part, if the world was without some (`request_options::allow_shrunk`); empty:
  /// all of them.
  std::vector<std::int32_t> ranks = {};
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, collective_done& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::collective_done", field("operation", x.operation),
                        field("epoch", x.epoch), field("membership", x.membership),
                        field("symmetric", x.symmetric), field("ranks", x.ranks));
}

/// One collective over all ranks of a world, or one message between two of them: what every request
/// below comes to, and what a group holds. Each of them converts to it.
struct collective {
  collective_kind kind = collective_kind::all_reduce;
  std::vector<any_gpu_ref> send =
      {}; ///< one per rank; of the root or of `rank` alone; none: in place
  std::vector<any_gpu_ref> recv = {}; ///< likewise
  reduce_op op = reduce_op::sum;
  std::vector<double> factors =
      {};                 ///< one per rank, for reduce_op::premul_sum; rounded to the type
  std::int32_t rank = -1; ///< that sends
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

// The requests to a world. All are answered by `collective_done`, and have these errors in common:
// errc::invalid_argument, shape_mismatch, stale_ref, indeterminate, skipped, buffer_acquired,
// membership_changed, overloaded, unavailable, not_supported (the world has a program, or NCCL
// cannot do it there): nothing launched. errc::deadline_exceeded, cancelled: it may run on.
// errc::stalled, nccl_error, rank_not_issued, lane_stuck: the communicator ended, what was to be
// written is indeterminate. errc::device_reset, device_fault, worker_lost: the memory of that
// device is gone. Formulas: n is the number of ranks; q and r are ranks. All refs of a request have
// one dtype. Ranges overlap only where "in place" says so. Typed handles go in by `troupe::any`.

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
///         count. In place: send[r] is the r-th part of recv[r]; so also if `send` is empty
struct all_gather {
  std::vector<any_gpu_ref> send = {};
  std::vector<any_gpu_ref> recv = {};
  request_options options = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// recv[r][i] = op over all q of send[q][r * count + i].
/// @shape  send: one ref per rank, all of n * count elements; recv: one ref per rank, all of
///         `count`. In place: recv[r] is the r-th part of send[r]; so also if `recv` is empty.
///         factors: as `all_reduce`
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

/// As `all_to_all`, with counts[q][r] elements from rank q to rank r. The parts lie one behind the
/// other, in the order of the ranks that they go to or come from.
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
/// @shape  send, recv: as many elements, on the two ranks' devices
struct send_recv {
  std::int32_t from = 0;
  std::int32_t to = 0;
  any_gpu_ref send = {};
  any_gpu_ref recv = {};
  request_options options = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// Done when all ranks' devices have come to it, and so are done with every collective before it.
struct barrier {
  request_options options = {};

  collective form() const;
  operator collective() const { return form(); }
};

/// Several collectives and messages between ranks as one: they make progress together, so that no
/// pattern of messages can deadlock, and are answered once.
/// @shape  up to 1,024 calls, none that reads or writes what another writes; none: done at once
struct group {
  std::vector<collective> calls = {};
  request_options options = {};
};

/// One rank's call of a collective or message; the other ranks make theirs (troupe/world_rank.hpp
/// says how they come together).
/// @shape  call.send, call.recv: at most the rank's own handle; call.factors: at most its own;
///         call.peer: the root, or the rank at the other end; call.counts: of all_to_all_v, the
///         elements to each rank and those from each rank; call.rank does not matter
struct rank_local {
  std::int32_t rank = 0;
  collective call = {};
  request_options options = {};
};

/// One end of a message between two ranks.
struct message_end {
  std::int32_t peer = 0;   ///< the rank at the other end
  any_gpu_ref buffer = {}; ///< the calling rank's
};

/// Messages of one rank to others and from them as one: they make progress together, so that it
/// does not matter who sends first, and are answered once. The others may have theirs in an
/// `exchange`, or send and receive one by one: what counts is the order of the messages from one
/// rank to another. A message of the rank to itself has both ends here.
/// If one of them fails before others have begun, these are taken back: `errc::cancelled` at their
/// other ends.
/// @shape  up to 1,024 ends, none that reads or writes what another writes; none: done at once.
///         sends[k].buffer: as many elements as where `sends[k].peer` receives
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
