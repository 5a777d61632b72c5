/// Requests that are admitted on the thread of the requesting actor.
#pragma once

#include "actors/reply.hpp"
#include "actors/supervised.hpp"
#include "collective/collective_writes.hpp"
#include "device/device_core.hpp"
#include "foundation/log.hpp"
#include "operation/skipping.hpp"
#include "topology/topology_core.hpp"
#include "world/world_core.hpp"
#include <troupe/request.hpp>

#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace troupe::detail {

/// An actor that can be closed without its mailbox.
class direct_address {
public:
  virtual ~direct_address() = default;
  /// Does the same as the function of this name in troupe/request.hpp.
  virtual void close() = 0;
};

/// An actor whose requests can be admitted without its mailbox.
template <class Requests> class direct_receiver : public direct_address {
public:
  /// Does the same as the functions of this name in troupe/request.hpp.
  virtual bool admit(const Requests& what, const reply_address& answer) = 0;
};

/// The data of an actor, until it ends. @thread any
template <class Core> class shared_core {
public:
  explicit shared_core(std::shared_ptr<Core> core) : core_(std::move(core)) {}
  std::shared_ptr<Core> get() const {
    std::lock_guard lock{mutex_};
    return core_;
  }
  void reset() {
    std::shared_ptr<Core> gone;
    std::lock_guard lock{mutex_};
    gone.swap(core_);
  }

private:
  mutable std::mutex mutex_;
  std::shared_ptr<Core> core_;
};

// -- start of requests

inline auto perform(const device_core& core, const allocate& x) {
  return core.allocate(x.count, x.type, x.zeroed, x.options);
}
inline auto perform(const device_core& core, const upload& x) {
  return core.upload(x.target, std::make_shared<host_range>(x.source), x.options);
}
device_core::answer<host_buffer> perform(const device_core& core, const download& x);
inline auto perform(const device_core& core, const fill& x) {
  return core.fill(x.target, x.element, x.options);
}
inline auto perform(const device_core& core, const copy& x) {
  return core.copy(x.target, x.source, x.options);
}
inline auto perform(const device_core& core, const accept& x) {
  return core.accept(x.target, x.options);
}
inline auto perform(const device_core& core, const troupe::launch& x) {
  return core.launch(x.name, x.arguments, x.reads, x.writes, x.options);
}
inline auto perform(const device_core& core, const launch_callable& x) {
  return core.launch(x.function, x.reads, x.writes, x.options);
}
device_core::answer<gpu_token> perform(const device_core& core, const offer& x);
inline auto perform(const device_core& core, const claim& x) {
  return core.claim(x.token, x.mode, x.options);
}
inline auto perform(const device_core& core, const stats& x) { return core.stats(x.options); }
inline auto perform(const device_core& core, const reset& x) { return core.reset(x.options); }
inline auto perform(const device_core& core, const hand_over& x) {
  return core.hand_over(x.options);
}

template <class Request>
  requires std::is_convertible_v<const Request&, collective>
auto perform(const std::shared_ptr<world_core>& core, const Request& x) {
  return core->run(collective_view{x.form()}, x.options);
}
/// Same, without a copy of the handles.
inline auto perform(const std::shared_ptr<world_core>& core, const all_reduce& x) {
  return core->run({collective_kind::all_reduce, x.send, x.recv, x.op, x.factors}, x.options);
}
inline auto perform(const std::shared_ptr<world_core>& core, const group& x) {
  return core->run(x);
}
inline auto perform(const std::shared_ptr<world_core>& core, const rank_local& x) {
  return core->run(x.rank, collective_view{x.call}, x.options, core);
}
inline auto perform(const std::shared_ptr<world_core>& core, const exchange& x) {
  return core->run(x, core);
}
inline auto perform(const std::shared_ptr<world_core>& core, const allocate_all& x) {
  return core->allocate(x.type, x.count, x.what, x.options);
}
std::shared_ptr<operation_of<step_done>> perform(const std::shared_ptr<world_core>& core,
                                                 const run_step& x);

inline auto perform(const std::shared_ptr<topology_core>& core, const verify_links& x) {
  return core->verify(x.devices, x.options);
}
inline auto perform(const std::shared_ptr<topology_core>& core, const measure_links& x) {
  return core->measure(x.devices, x.options);
}
inline auto perform(const std::shared_ptr<topology_core>& core, const copy& x) {
  return core->copy(x.target, x.source, x.options);
}
inline auto perform(const std::shared_ptr<topology_core>& core, const copy_batch& x) {
  return core->copy(x.copies, x.options);
}
inline auto perform(const std::shared_ptr<topology_core>& core, const replicate& x) {
  return core->replicate(x.source, x.targets, x.options);
}
inline auto perform(const std::shared_ptr<topology_core>& core, const distribute& x) {
  return core->distribute(x.source, x.targets, x.options);
}

/// A `world` without a world: refuses every request.
struct empty_world {};

template <class Request> auto perform(empty_world, const Request&) {
  using other = std::conditional_t<std::is_same_v<Request, run_step>, step_done, collective_done>;
  using reply = std::conditional_t<std::is_same_v<Request, allocate_all>, world_buffers, other>;
  return refused_operation<reply>("a request", why_empty_world());
}

// -- memory that requests write

void add_writes_of_step(std::vector<use>& to, const run_step& x);

/// Adds the memory that a request would write in a world of `n` ranks. Most requests write none.
template <class Request> void add_writes_of(std::vector<use>& to, const Request& x, std::size_t n) {
  if constexpr (std::is_convertible_v<const Request&, collective>)
    add_writes(to, collective_view{x.form()}, n);
  else if constexpr (std::is_same_v<Request, rank_local>)
    add_writes(to, collective_view{x.call}, n, x.rank >= 0 ? static_cast<std::size_t>(x.rank) : 0);
  else if constexpr (std::is_same_v<Request, group>)
    add_writes(to, x, n);
  else if constexpr (std::is_same_v<Request, exchange>)
    add_writes(to, x);
  else if constexpr (std::is_same_v<Request, run_step>)
    add_writes_of_step(to, x);
  else if constexpr (std::is_same_v<Request, copy_batch>)
    for (auto& one : x.copies)
      add_write(to, one.target);
  else if constexpr (requires { x.writes; })
    add_writes(to, x.writes);
  else if constexpr (requires { x.targets; })
    add_writes(to, x.targets);
  else if constexpr (requires { x.target; } && !std::is_same_v<Request, accept>)
    add_write(to, x.target);
}

inline runtime* owner_of(const device_core& core) { return core.owner(); }
template <class Core> runtime* owner_of(const std::shared_ptr<Core>& core) {
  return core->owner().get();
}
inline runtime* owner_of(empty_world) { return nullptr; }
inline std::size_t ranks_of(const std::shared_ptr<world_core>& core) { return core->size(); }
inline std::size_t ranks_of(empty_world) { return 0; }
template <class Core> std::size_t ranks_of(const Core&) { return 1; }

/// Starts a request whose answer is a message. Its requester does not see the answer when the call
/// returns. So the memory that it would have written is skipped also if it fails validation.
template <class Core, class Request> auto start_for_message(const Core& core, const Request& x) {
  auto op = perform(core, x);
  if (op->completed() && op->error() && fails_validation(op->error())) {
    std::vector<use> writes;
    add_writes_of(writes, x, ranks_of(core));
    mark_skipped(writes, op->error(), op->number());
  }
  return op;
}

/// Returns a handler of `self` for messages of a type.
template <class Request, class Self, class Core> auto answering(Self* self, const Core& core) {
  return [self, &core](const Request& x) {
    no_blocking_scope scope{"an actor"};
    return reply_when_answered(self, owner_of(core), start_for_message(core, x));
  };
}

/// Returns the behavior of `self`, which answers all `Requests` and has the handlers `fs`. Other
/// requests get an error, and other messages are logged; `what`, as in "a world", is in the text.
template <class Self, class Core, class... Requests, class Exit, class... Fs>
caf::behavior behavior_with(Self* self, std::string what, const Core& core,
                            std::variant<const Requests*...>, Exit exit, Fs... fs) {
  auto other = [what = std::move(what)](const std::string& type) {
    auto error = make_error(errc::invalid_argument,
                            what + " takes no " + type +
                                " (troupe/request.hpp lists what devices, worlds and topologies "
                                "take)");
    log(log_level::warning, "a message to an actor", error);
    return error;
  };
  return self->with_exit_and_others(std::move(other), std::move(exit),
                                    answering<Requests>(self, core)..., std::move(fs)...);
}

/// Starts a request and sends its answer. `replier` is the sender of the answer, if it is an actor;
/// `keep` lives until the answer.
template <class Core, class Requests>
void admit_to(const Core& core, const Requests& what, const reply_address& answer,
              const caf::strong_actor_ptr& replier, std::shared_ptr<const void> keep = nullptr) {
  std::visit(
      [&](auto* x) {
        reply_when_answered(owner_of(core), start_for_message(core, *x), answer, replier,
                            std::move(keep));
      },
      what);
}

} // namespace troupe::detail
