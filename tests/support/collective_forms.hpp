/// The forms in which a collective can be requested, made from its general form.
#pragma once

#include <troupe/troupe.hpp>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace troupe::testing {

/// Returns the request of one rank alone.
/// @shape `x` is valid for a world of `ranks` ranks; in a message `rank` is one of the two ranks
inline collective call_of_rank(collective x, std::size_t rank, std::size_t ranks) {
  const auto self = static_cast<int>(rank);
  if (x.kind == collective_kind::send) {
    const bool sends = self == x.rank;
    x.kind = sends ? collective_kind::send : collective_kind::recv;
    x.peer = sends ? x.peer : x.rank;
    (sends ? x.recv : x.send).clear();
    return x;
  }
  for (auto* refs : {&x.send, &x.recv})
    if (refs->size() == ranks)
      *refs = {(*refs)[rank]};
    else if (self != x.peer)
      refs->clear();
  if (!x.factors.empty())
    x.factors = std::vector<double>(1, x.factors[rank]);
  if (x.kind == collective_kind::all_to_all_v) {
    std::vector<std::uint64_t> from;
    for (auto& row : x.counts)
      from.push_back(row[rank]);
    x.counts = {x.counts[rank], from};
  }
  return x;
}

/// Returns true if `x` has a message type that can express all of it. Verbs have no factors.
inline bool has_message(const collective& x) {
  if ((!reduces(x.kind) && !x.factors.empty()) ||
      (x.kind != collective_kind::all_to_all_v && !x.counts.empty()))
    return false;
  switch (x.kind) {
  case collective_kind::reduce:
  case collective_kind::gather:
    return x.recv.size() == 1;
  case collective_kind::broadcast:
  case collective_kind::scatter:
    return x.send.size() == 1;
  case collective_kind::send:
    return x.send.size() == 1 && x.recv.size() == 1;
  case collective_kind::barrier:
    return x.send.empty() && x.recv.empty();
  case collective_kind::all_reduce:
  case collective_kind::all_gather:
  case collective_kind::reduce_scatter:
  case collective_kind::all_to_all:
  case collective_kind::all_to_all_v:
    return true;
  default:
    return false;
  }
}

template <class F> void with_message(const collective& x, const request_options& options, F f) {
  switch (x.kind) {
  case collective_kind::all_reduce:
    return f(all_reduce{x.send, x.recv, x.op, options, x.factors});
  case collective_kind::reduce:
    return f(reduce{x.send, x.recv[0], x.peer, x.op, options, x.factors});
  case collective_kind::broadcast:
    return f(broadcast{x.send[0], x.recv, x.peer, options});
  case collective_kind::all_gather:
    return f(all_gather{x.send, x.recv, options});
  case collective_kind::reduce_scatter:
    return f(reduce_scatter{x.send, x.recv, x.op, options, x.factors});
  case collective_kind::all_to_all:
    return f(all_to_all{x.send, x.recv, options});
  case collective_kind::all_to_all_v:
    return f(all_to_all_v{x.send, x.recv, x.counts, options});
  case collective_kind::gather:
    return f(gather{x.send, x.recv[0], x.peer, options});
  case collective_kind::scatter:
    return f(scatter{x.send[0], x.recv, x.peer, options});
  case collective_kind::send:
  case collective_kind::recv:
    return f(send_recv{x.rank, x.peer, x.send[0], x.recv[0], options});
  case collective_kind::barrier:
    return f(barrier{options});
  }
}

/// Calls the verb of the facade, or `run` if there is no verb.
inline pending<collective_done> call_verb(const world& w, const collective& x,
                                          const request_options& options = {}) {
  if (!has_message(x) || !x.factors.empty())
    return w.run(x, options);
  switch (x.kind) {
  case collective_kind::all_reduce:
    return x.recv.empty() ? w.all_reduce(x.send, x.op, options)
                          : w.all_reduce(x.send, x.recv, x.op, options);
  case collective_kind::reduce:
    return w.reduce(x.send, x.recv[0], x.peer, x.op, options);
  case collective_kind::broadcast:
    return w.broadcast(x.send[0], x.recv, x.peer, options);
  case collective_kind::all_gather:
    return x.send.empty() ? w.all_gather(x.recv, options) : w.all_gather(x.send, x.recv, options);
  case collective_kind::reduce_scatter:
    return x.recv.empty() ? w.reduce_scatter(x.send, x.op, options)
                          : w.reduce_scatter(x.send, x.recv, x.op, options);
  case collective_kind::all_to_all:
    return w.all_to_all(x.send, x.recv, options);
  case collective_kind::all_to_all_v:
    return w.all_to_all_v(x.send, x.recv, x.counts, options);
  case collective_kind::gather:
    return w.gather(x.send, x.recv[0], x.peer, options);
  case collective_kind::scatter:
    return w.scatter(x.send[0], x.recv, x.peer, options);
  case collective_kind::send:
    return w.send_recv(x.rank, x.send[0], x.peer, x.recv[0], options);
  case collective_kind::barrier:
    return w.barrier(options);
  case collective_kind::recv:
    break;
  }
  return w.run(x, options);
}

/// Does the same for one rank. A handle without memory has no verb.
inline pending<collective_done> call_verb(const world_rank& r, const collective& x,
                                          const request_options& options = {}) {
  const bool exchange = x.kind == collective_kind::all_to_all_v;
  auto is_none = [](const any_gpu_ref& ref) { return !ref; };
  if (x.send.size() > 1 || x.recv.size() > 1 || !x.factors.empty() ||
      x.counts.size() != (exchange ? 2 : 0) || std::any_of(x.send.begin(), x.send.end(), is_none) ||
      std::any_of(x.recv.begin(), x.recv.end(), is_none))
    return r.run(x, options);
  auto one_of = [](const std::vector<any_gpu_ref>& refs) {
    return refs.empty() ? any_gpu_ref{} : refs[0];
  };
  auto send = one_of(x.send);
  auto recv = one_of(x.recv);
  switch (x.kind) {
  case collective_kind::all_reduce:
    return recv ? r.all_reduce(send, recv, x.op, options) : r.all_reduce(send, x.op, options);
  case collective_kind::reduce:
    return r.reduce(send, recv, x.peer, x.op, options);
  case collective_kind::broadcast:
    return r.broadcast(send, recv, x.peer, options);
  case collective_kind::all_gather:
    return send ? r.all_gather(send, recv, options) : r.all_gather(recv, options);
  case collective_kind::reduce_scatter:
    return recv ? r.reduce_scatter(send, recv, x.op, options)
                : r.reduce_scatter(send, x.op, options);
  case collective_kind::all_to_all:
    return r.all_to_all(send, recv, options);
  case collective_kind::all_to_all_v:
    return r.all_to_all_v(send, x.counts[0], recv, x.counts[1], options);
  case collective_kind::gather:
    return r.gather(send, recv, x.peer, options);
  case collective_kind::scatter:
    return r.scatter(send, recv, x.peer, options);
  default:
    break;
  }
  if (x.kind == collective_kind::send && x.recv.empty())
    return r.send(send, x.peer, options);
  if (x.kind == collective_kind::recv && x.send.empty())
    return r.recv(recv, x.peer, options);
  if (x.kind == collective_kind::barrier && x.send.empty() && x.recv.empty())
    return r.barrier(options);
  return r.run(x, options);
}

} // namespace troupe::testing
