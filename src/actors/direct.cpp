#include "actors/direct.hpp"

#include "actors/device_access.hpp"
#include "actors/supervised.hpp"

#include <caf/all.hpp>

namespace troupe::detail {

device_core::answer<host_buffer> perform(const device_core& core, const download& x) {
  host_buffer target{x.source.size_bytes()};
  auto op = core.download(x.source, std::make_shared<host_range>(target), x.options);
  auto answer = std::make_shared<operation_of<host_buffer>>("download", 0);
  answer->value = std::move(target);
  if (core.owner() != nullptr)
    core.owner()->reply_to_actor(*op);
  op->on_answer([op, answer] { answer->answer(op->error()); });
  return answer;
}

device_core::answer<gpu_token> perform(const device_core& core, const offer& x) {
  auto answer = std::make_shared<operation_of<gpu_token>>("offer", 0);
  auto token = core.offer(x.memory, x.grace);
  if (token)
    answer->value = *token;
  answer->answer(token ? caf::error{} : token.error());
  return answer;
}

namespace {

template <class Receiver> Receiver* receiver_of(const caf::actor& x) {
  return dynamic_cast<Receiver*>(caf::actor_cast<caf::abstract_actor*>(x));
}

template <class Requests>
bool admit_at(const caf::actor& to, const Requests& what, const reply_address& answer) {
  auto* receiver = receiver_of<direct_receiver<Requests>>(to);
  return receiver != nullptr && receiver->admit(what, answer);
}

} // namespace

bool admit(const caf::actor& to, const device_request& what, const reply_address& answer) {
  return admit_at(to, what, answer);
}

bool admit(const caf::actor& to, const world_request& what, const reply_address& answer) {
  return admit_at(to, what, answer);
}

bool admit(const caf::actor& to, const topology_request& what, const reply_address& answer) {
  return admit_at(to, what, answer);
}

bool admit(const caf::actor& to, const copy& what, const reply_address& answer) {
  return admit_at(to, device_request{&what}, answer) ||
         admit_at(to, topology_request{&what}, answer);
}

void admit(const device& to, const device_request& what, const reply_address& answer) {
  admit_to(device_access::core_of(to), what, answer, nullptr, device_access::lease_of(to));
}

void admit(const world& to, const world_request& what, const reply_address& answer) {
  if (!world_access::core_of(to))
    return admit_to(empty_world{}, what, answer, nullptr);
  admit_to(world_access::core_of(to), what, answer,
           caf::actor_cast<caf::strong_actor_ptr>(to.actor()), world_access::lease_of(to));
}

void admit(const topology& to, const topology_request& what, const reply_address& answer) {
  admit_to(topology_access::core_of(to), what, answer,
           caf::actor_cast<caf::strong_actor_ptr>(to.actor()));
}

void close(const caf::actor& to) {
  if (auto* receiver = receiver_of<direct_address>(to))
    receiver->close();
}

} // namespace troupe::detail
