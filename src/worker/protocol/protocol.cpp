#include "worker/protocol/protocol.hpp"

#include <cstring>
#include <iterator>
#include <utility>

namespace troupe::detail {

namespace {

std::uint64_t address_of(const void* x) noexcept { return reinterpret_cast<std::uint64_t>(x); }
void* at(std::uint64_t address) noexcept { return reinterpret_cast<void*>(address); }

void put(wire_writer& to, const exchange_plan& x) {
  for (const auto* counts : {&x.send_counts, &x.send_offsets, &x.recv_counts, &x.recv_offsets})
    to.put_all(std::span<const std::size_t>{*counts});
}

void put(wire_writer& to, const std::vector<launch_memory>& all) {
  to.put(static_cast<std::uint32_t>(all.size()));
  for (auto& x : all) {
    to.put(address_of(x.address));
    to.put(static_cast<std::uint64_t>(x.count));
    to.put(x.type);
  }
}

std::vector<launch_memory> get_memory(wire_reader& from) {
  std::vector<launch_memory> result;
  for (auto left = from.get<std::uint32_t>(); left > 0 && from.ok(); --left) {
    auto* address = at(from.get<std::uint64_t>());
    const auto count = from.get<std::uint64_t>();
    const auto type = from.get<dtype>();
    if (!is_dtype(type) || count > SIZE_MAX / size_of(type))
      from.fail();
    result.push_back({address, count, type});
  }
  return result;
}

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

void put(wire_writer& to, const collective_call& x) {
  to.put(x.what);
  to.put(address_of(x.send));
  to.put(address_of(x.recv));
  to.put(static_cast<std::uint64_t>(x.count));
  to.put(x.type);
  to.put(x.op);
  to.put(static_cast<std::int32_t>(x.peer));
  to.put(x.symmetric);
  to.put(x.factor != nullptr);
  if (x.factor != nullptr) {
    std::uint64_t factor = 0;
    std::memcpy(&factor, x.factor, size_of(x.type));
    to.put(factor);
  }
  to.put(x.plan != nullptr);
  if (x.plan != nullptr)
    put(to, *x.plan);
}

bool get(wire_reader& from, received_call& to) {
  auto& x = to.call;
  x.what = from.get<collective_kind>();
  x.send = at(from.get<std::uint64_t>());
  x.recv = at(from.get<std::uint64_t>());
  x.count = from.get<std::uint64_t>();
  x.type = from.get<dtype>();
  x.op = from.get<reduce_op>();
  x.peer = from.get<std::int32_t>();
  x.symmetric = from.get<bool>();
  if (from.get<bool>()) {
    const auto factor = from.get<std::uint64_t>();
    std::memcpy(to.factor, &factor, sizeof factor);
    x.factor = to.factor;
  }
  if (from.get<bool>()) {
    for (auto* counts :
         {&to.plan.send_counts, &to.plan.send_offsets, &to.plan.recv_counts, &to.plan.recv_offsets})
      *counts = from.get_all<std::size_t>();
    x.plan = &to.plan;
  }
  if (x.what > collective_kind::barrier || !is_dtype(x.type) || x.op > reduce_op::premul_sum ||
      x.count > SIZE_MAX / size_of(x.type))
    from.fail();
  return from.ok();
}

void put(wire_writer& to, const device_properties& x) {
  to.put(x.name);
  to.put(x.pci_id);
  to.put(static_cast<std::int32_t>(x.capability_major));
  to.put(static_cast<std::int32_t>(x.capability_minor));
  to.put(static_cast<std::uint64_t>(x.total_bytes));
}

device_properties get_properties(wire_reader& from) {
  device_properties result;
  result.name = from.get_string();
  result.pci_id = from.get_string();
  result.capability_major = from.get<std::int32_t>();
  result.capability_minor = from.get<std::int32_t>();
  result.total_bytes = from.get<std::uint64_t>();
  return result;
}

void put(wire_writer& to, const launch_request& x) {
  to.put(x.name);
  put(to, x.reads);
  put(to, x.writes);
  to.put_bytes(x.arguments);
  to.put(x.stream);
}

launch_request get_launch(wire_reader& from) {
  launch_request result;
  result.name = from.get_string();
  result.reads = get_memory(from);
  result.writes = get_memory(from);
  const auto arguments = from.get_bytes();
  result.arguments.assign(arguments.begin(), arguments.end());
  result.stream = from.get<stream_id>();
  return result;
}

void put(wire_writer& to, const peer_link& x) {
  to.put(x.kind);
  to.put(static_cast<std::int32_t>(x.links));
  to.put(static_cast<std::int32_t>(x.performance_rank));
  to.put(x.native_atomics);
}

peer_link get_peer_link(wire_reader& from) {
  peer_link result;
  result.kind = from.get<link_kind>();
  result.links = from.get<std::int32_t>();
  result.performance_rank = from.get<std::int32_t>();
  result.native_atomics = from.get<bool>();
  if (result.kind > link_kind::memory)
    from.fail();
  return result;
}

void put(wire_writer& to, const worker_setup& x) {
  to.put(x.backend);
  to.put(x.device);
  to.put(x.spin_ns);
  to.put(static_cast<std::int32_t>(x.host.devices));
  to.put(static_cast<std::uint64_t>(x.host.bytes_per_device));
  to.put(static_cast<std::uint32_t>(x.host.links.size()));
  for (auto& link : x.host.links) {
    to.put(static_cast<std::int32_t>(link.from));
    to.put(static_cast<std::int32_t>(link.to));
    to.put(link.access);
    put(to, link.link);
  }
  to.put(x.host.listen_address);
  to.put(static_cast<std::int64_t>(x.cuda.keep_freed.count()));
}

worker_setup get_setup(wire_reader& from) {
  worker_setup result;
  result.backend = from.get_string();
  result.device = from.get<std::int32_t>();
  result.spin_ns = from.get<std::int64_t>();
  result.host.devices = from.get<std::int32_t>();
  result.host.bytes_per_device = from.get<std::uint64_t>();
  for (auto left = from.get<std::uint32_t>(); left > 0 && from.ok(); --left) {
    host_link link;
    link.from = from.get<std::int32_t>();
    link.to = from.get<std::int32_t>();
    link.access = from.get<bool>();
    link.link = get_peer_link(from);
    result.host.links.push_back(link);
  }
  result.host.listen_address = from.get_string();
  result.cuda.keep_freed = std::chrono::milliseconds{from.get<std::int64_t>()};
  return result;
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
