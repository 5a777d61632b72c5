#include "chaos/random_collective.hpp"

#include <iterator>

namespace troupe::testing {

namespace {

constexpr collective_kind kinds[] = {
    collective_kind::all_reduce, collective_kind::all_reduce,   collective_kind::reduce,
    collective_kind::broadcast,  collective_kind::all_gather,   collective_kind::reduce_scatter,
    collective_kind::all_to_all, collective_kind::all_to_all_v, collective_kind::gather,
    collective_kind::scatter,    collective_kind::send,         collective_kind::barrier};

void choose_operation(std::mt19937_64& random, std::size_t ranks, collective_shape& x) {
  constexpr reduce_op of_floats[] = {reduce_op::min, reduce_op::max};
  constexpr reduce_op of_integers[] = {reduce_op::min,  reduce_op::max, reduce_op::sum,
                                       reduce_op::prod, reduce_op::avg, reduce_op::premul_sum};
  x.op = is_floating_point(x.type) ? of_floats[pick(random, 0, std::size(of_floats) - 1)]
                                   : of_integers[pick(random, 0, std::size(of_integers) - 1)];
  if (reduces(x.kind) && x.op == reduce_op::premul_sum)
    for (std::size_t r = 0; r < ranks; ++r)
      x.factors.push_back(pick(random, 0, 100));
}

/// Chooses counts: each rank sends some elements to each rank.
void choose_counts(std::mt19937_64& random, const std::vector<int>& on, std::size_t count,
                   std::size_t from, std::size_t to, rank_pieces& x) {
  auto n = on.size();
  x.shape.counts.assign(n, std::vector<std::uint64_t>(n));
  std::vector<std::size_t> sent(n);
  std::vector<std::size_t> received_by(n);
  for (std::size_t q = 0; q < n; ++q)
    for (std::size_t r = 0; r < n; ++r) {
      auto c = pick(random, 1, count / n);
      x.shape.counts[q][r] = c;
      sent[q] += c;
      received_by[r] += c;
    }
  for (std::size_t r = 0; r < n; ++r) {
    x.send[r] = piece{from, on[r], pick(random, 0, count - sent[r]), sent[r]};
    x.recv[r] = piece{to, on[r], pick(random, 0, count - received_by[r]), received_by[r]};
  }
}

} // namespace

std::vector<std::size_t> rank_pieces::senders() const {
  std::vector<std::size_t> result;
  for (std::size_t r = 0; r < send.size(); ++r)
    if (send[r])
      result.push_back(r);
  return result;
}

rank_pieces choose_collective(std::mt19937_64& random, const std::vector<int>& on, dtype type,
                              std::size_t count, std::size_t from, std::size_t to) {
  auto n = on.size();
  rank_pieces x;
  x.shape.kind = kinds[pick(random, 0, std::size(kinds) - 1)];
  x.shape.type = type;
  x.shape.root = static_cast<int>(pick(random, 0, n - 1));
  choose_operation(random, n, x.shape);
  x.send.resize(n);
  x.recv.resize(n);
  auto root = static_cast<std::size_t>(x.shape.root);
  // A buffer for all ranks' parts starts at `begin`, a buffer for one part at `aside`.
  auto each = chance(random, 0.5) ? count / n : pick(random, 1, count / n);
  auto begin = pick(random, 0, count - n * each);
  auto aside = pick(random, 0, count - each);
  auto in_place = chance(random, 0.3);
  auto all_of = [&](std::size_t row, std::size_t r) { return piece{row, on[r], begin, n * each}; };
  auto part_of = [&](std::size_t row, std::size_t r) {
    return piece{row, on[r], begin + r * each, each};
  };
  auto one_of = [&](std::size_t row, std::size_t r) { return piece{row, on[r], aside, each}; };
  for (std::size_t r = 0; r < n; ++r)
    switch (x.shape.kind) {
    case collective_kind::all_reduce:
      x.in_place = in_place;
      x.send[r] = all_of(from, r);
      x.recv[r] = all_of(in_place ? from : to, r);
      break;
    case collective_kind::reduce:
      x.send[r] = all_of(from, r);
      if (r == root)
        x.recv[r] = all_of(in_place ? from : to, r);
      break;
    case collective_kind::broadcast:
      if (r == root)
        x.send[r] = all_of(in_place ? to : from, r);
      x.recv[r] = all_of(to, r);
      break;
    case collective_kind::all_gather:
      x.in_place = in_place;
      x.send[r] = in_place ? part_of(to, r) : one_of(from, r);
      x.recv[r] = all_of(to, r);
      break;
    case collective_kind::reduce_scatter:
      x.in_place = in_place;
      x.send[r] = all_of(from, r);
      x.recv[r] = in_place ? part_of(from, r) : one_of(to, r);
      break;
    case collective_kind::all_to_all:
      x.send[r] = all_of(from, r);
      x.recv[r] = all_of(to, r);
      break;
    case collective_kind::gather:
      x.send[r] = in_place && r == root ? part_of(to, r) : one_of(from, r);
      if (r == root)
        x.recv[r] = all_of(to, r);
      break;
    case collective_kind::scatter:
      if (r == root)
        x.send[r] = all_of(from, r);
      x.recv[r] = in_place && r == root ? part_of(from, r) : one_of(to, r);
      break;
    case collective_kind::send:
    case collective_kind::recv:
    case collective_kind::all_to_all_v:
    case collective_kind::barrier:
      break;
    }
  if (x.shape.kind == collective_kind::all_to_all_v)
    choose_counts(random, on, count, from, to, x);
  if (x.shape.kind == collective_kind::send) {
    auto sender = pick(random, 0, n - 1);
    return whole_message(on, type, sender, all_of(from, sender), root, all_of(to, root));
  }
  return x;
}

rank_pieces whole_message(const std::vector<int>& on, dtype type, std::size_t sender, piece from,
                          std::size_t receiver, piece to) {
  rank_pieces x;
  x.shape.kind = collective_kind::send;
  x.shape.type = type;
  x.shape.root = static_cast<int>(receiver);
  x.sender = static_cast<int>(sender);
  x.send.resize(on.size());
  x.recv.resize(on.size());
  x.send[sender] = from;
  x.recv[receiver] = to;
  return x;
}

collective request_of(const rank_pieces& x, const std::function<any_gpu_ref(const piece&)>& ref) {
  collective what;
  what.kind = x.shape.kind;
  what.op = x.shape.op;
  what.peer = x.shape.root;
  what.rank = x.sender;
  what.counts = x.shape.counts;
  what.factors.assign(x.shape.factors.begin(), x.shape.factors.end());
  bool drop_send = x.in_place && x.shape.kind == collective_kind::all_gather;
  bool drop_recv = x.in_place && !drop_send;
  for (std::size_t r = 0; r < x.send.size(); ++r) {
    if (x.send[r] && !drop_send)
      what.send.push_back(ref(*x.send[r]));
    if (x.recv[r] && !drop_recv)
      what.recv.push_back(ref(*x.recv[r]));
  }
  return what;
}

content_model::function semantics_of(const rank_pieces& x) {
  return [shape = x.shape, senders = x.senders(),
          ranks = x.send.size()](const std::vector<content>& inputs) {
    if (shape.kind == collective_kind::send)
      return inputs;
    std::vector<content> sends(ranks);
    for (std::size_t i = 0; i < inputs.size(); ++i)
      sends[senders[i]] = inputs[i];
    return received(shape, sends);
  };
}

} // namespace troupe::testing
