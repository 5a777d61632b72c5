#include "troupe_calls.hpp"

#include <cstdint>
#include <type_traits>

namespace bench {

namespace {

constexpr int root = 0;

/// Returns one message from each rank to the next one.
troupe::group rotation(const buffers& send, const buffers& recv) {
  troupe::group result;
  for (std::size_t rank = 0; rank < send.size(); ++rank) {
    const auto next = (rank + 1) % send.size();
    result.calls.emplace_back(troupe::send_recv{static_cast<std::int32_t>(rank),
                                                static_cast<std::int32_t>(next),
                                                send[rank],
                                                recv[next],
                                                {}});
  }
  return result;
}

} // namespace

world_message message_for(const verb& what, const buffers& send, const buffers& recv) {
  switch (what.kind) {
  case verb_kind::all_reduce:
    return troupe::all_reduce{.send = send};
  case verb_kind::reduce:
    return troupe::reduce{.send = send, .recv = recv[root], .root = root};
  case verb_kind::broadcast:
    return troupe::broadcast{.send = send[root], .recv = recv, .root = root};
  case verb_kind::all_gather:
    return troupe::all_gather{.send = send, .recv = recv};
  case verb_kind::reduce_scatter:
    return troupe::reduce_scatter{.send = send, .recv = recv};
  case verb_kind::all_to_all:
    return troupe::all_to_all{.send = send, .recv = recv};
  case verb_kind::gather:
    return troupe::gather{.send = send, .recv = recv[root], .root = root};
  case verb_kind::scatter:
    return troupe::scatter{.send = send[root], .recv = recv, .root = root};
  case verb_kind::send_recv:
    return troupe::send_recv{.from = 0, .to = 1, .send = send[0], .recv = recv[1]};
  case verb_kind::exchange:
    return rotation(send, recv);
  case verb_kind::barrier:
    break;
  }
  return troupe::barrier{};
}

troupe_call world_call(const troupe::world& world, const world_message& message,
                       const troupe::request_options& options) {
  return std::visit(
      [&]<class Message>(const Message& x) -> troupe_call {
        if constexpr (std::is_same_v<Message, troupe::group>)
          return [world, call = troupe::group{x.calls, options}] { return world.run(call); };
        else
          return [world, options, call = x.form()] { return world.run(call, options); };
      },
      message);
}

troupe_call rank_call(const troupe::world_rank& rank, const verb& what,
                      const troupe::any_gpu_ref& send, const troupe::any_gpu_ref& recv,
                      const troupe::request_options& options) {
  const auto size = static_cast<int>(rank.size());
  const auto index = rank.index();
  const auto position = static_cast<std::size_t>(index);
  if (what.kind == verb_kind::exchange) {
    const std::vector<troupe::message_end> to{{(index + 1) % size, send}};
    const std::vector<troupe::message_end> from{{(index + size - 1) % size, recv}};
    return [rank, to, from, options] { return rank.exchange(to, from, options); };
  }
  const bool sends = what.send.held(position);
  const bool receives = what.recv.held(position) && !what.in_place();
  if (!sends && !receives && what.kind != verb_kind::barrier)
    return {};
  troupe::collective call;
  call.kind = what.call;
  if (call.kind == troupe::collective_kind::send && index != root)
    call.kind = troupe::collective_kind::recv;
  if (sends)
    call.send = {send};
  if (receives)
    call.recv = {recv};
  if (troupe::has_root(call.kind))
    call.peer = root;
  else if (troupe::is_message(call.kind))
    call.peer = 1 - index; // the message is between ranks 0 and 1
  return [rank, call, options] { return rank.run(call, options); };
}

} // namespace bench
