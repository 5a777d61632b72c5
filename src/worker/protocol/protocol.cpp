#include "worker/protocol/protocol.hpp"

#include "foundation/enum_name.hpp"

#include <cstring>
#include <utility>

namespace troupe::detail {

namespace {

/// All but the data that a call points to.
void call_fields(auto& wire, message_of<collective_call> auto& x) {
  wire(x.what, x.send, x.recv, x.count, x.type, x.op, x.peer);
  wire.require(x.what <= collective_kind::barrier && x.op <= reduce_op::premul_sum &&
               is_dtype(x.type) && !is_complex(x.type) && x.count <= SIZE_MAX / size_of(x.type));
}

} // namespace

std::string_view to_string(command x) noexcept { return enum_name(x); }

bool is_recordable(command x) noexcept {
  switch (x) {
  case command::copy:
  case command::fill:
  case command::launch:
  case command::enqueue:
  case command::enqueue_in_step:
    return true;
  default:
    return false;
  }
}

std::string_view to_string(control x) noexcept { return enum_name(x); }

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
