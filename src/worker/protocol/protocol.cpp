#include "worker/protocol/protocol.hpp"

#include <cstring>
#include <iterator>
#include <utility>

namespace troupe::detail {

namespace {

/// Names of the commands, by their values.
constexpr std::string_view command_names[] = {
    "skip",
    "bind",
    "warm",
    "memory",
    "open_memory",
    "close_memory",
    "allocate",
    "deallocate",
    "allocate_symmetric",
    "create_stream",
    "destroy_stream",
    "record",
    "wait_event",
    "wait_word",
    "copy",
    "fill",
    "launch",
    "enqueue",
    "register_window",
    "deregister_window",
    "asynchronous_error",
    "stop",
};
static_assert(std::size(command_names) == static_cast<std::size_t>(command::stop) + 1);

/// Names of the requests, by their values; the first one is 1.
constexpr std::string_view control_names[] = {
    "set_up",      "peer_link", "make_communicator_id",
    "check_build", "build",     "close",
    "abort",       "destroy",   "map",
    "unmap",       "hand_over", "tell",
    "told",        "call_off",
};
static_assert(std::size(control_names) == static_cast<std::size_t>(control::call_off));

std::string_view name_at(std::size_t i, std::span<const std::string_view> names) noexcept {
  return i < names.size() ? names[i] : "unknown";
}

/// All but the data that a call points to.
void call_fields(auto& wire, message_of<collective_call> auto& x) {
  wire(x.what, x.send, x.recv, x.count, x.type, x.op, x.peer, x.symmetric);
  wire.require(x.what <= collective_kind::barrier && x.op <= reduce_op::premul_sum &&
               is_dtype(x.type) && x.count <= SIZE_MAX / size_of(x.type));
}

} // namespace

std::string_view to_string(command x) noexcept {
  return name_at(static_cast<std::size_t>(x), command_names);
}

std::string_view to_string(control x) noexcept {
  return name_at(static_cast<std::size_t>(x) - 1, control_names);
}

std::string call_name(std::uint32_t marked) {
  if (marked == static_cast<std::uint32_t>(own_call::query))
    return "query";
  if (marked == static_cast<std::uint32_t>(own_call::asked))
    return "a request's part";
  return std::string{to_string(static_cast<command>(marked > UINT16_MAX ? UINT16_MAX : marked))};
}

void wire_fields(auto& wire, message_of<exchange_plan> auto& x) {
  wire(x.send_counts, x.send_offsets, x.recv_counts, x.recv_offsets);
}

void wire_fields(wire_writer& to, const collective_call& x) {
  call_fields(to, x);
  to.put(x.factor != nullptr);
  if (x.factor != nullptr) {
    std::uint64_t factor = 0;
    std::memcpy(&factor, x.factor, size_of(x.type));
    to.put(factor);
  }
  to.put(x.plan != nullptr);
  if (x.plan != nullptr)
    to.put(*x.plan);
}

void wire_fields(wire_reader& from, received_call& to) {
  call_fields(from, to.call);
  if (from.get<bool>()) {
    from(to.factor);
    to.call.factor = to.factor.data();
  }
  if (from.get<bool>()) {
    from(to.plan);
    to.call.plan = &to.plan;
  }
}

wire_writer answer_to(const control_head& request, const caf::error& error,
                      std::span<const std::byte> result) {
  wire_writer answer;
  answer(request, error);
  if (!error)
    answer.put_bytes(result);
  return answer;
}

caf::error receive_all(
    message_socket& from,
    const std::function<void(std::span<const std::byte>, std::optional<file_descriptor>)>& to) {
  std::vector<std::byte> buffer(control_bytes);
  for (;;) {
    auto got = from.receive(buffer, 1);
    if (!got)
      return got.error();
    if (got->what != received::kind::message)
      return {};
    std::optional<file_descriptor> descriptor;
    if (!got->descriptors.empty())
      descriptor = std::move(got->descriptors.front());
    to(std::span{buffer}.first(got->size_bytes), std::move(descriptor));
  }
}

} // namespace troupe::detail
