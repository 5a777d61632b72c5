#include "actors/named_memory.hpp"

#include "device/device_core.hpp"
#include "foundation/background.hpp" // for background::run
#include "foundation/error_text.hpp"
#include "operation/buffer.hpp"
#include <troupe/error.hpp>
#include <troupe/worker_program.hpp>

#include <optional>

namespace troupe::detail {

namespace {

using kind = program_note::kind;

program_note refuse(program_note request, const caf::error& why) {
  request.what = kind::not_kept;
  request.why = brief(why);
  return request;
}

/// Returns the reply to a request for memory that is there.
program_note grant(program_note request, kind how, const any_gpu_ref& memory) {
  const auto& wanted = request.memory;
  if (memory.type() != wanted.type || memory.count() != wanted.count)
    return refuse(
        std::move(request),
        make_error(errc::shape_mismatch, "the buffer \"" + request.name + "\" has " +
                                             std::to_string(memory.count()) + " elements of " +
                                             std::string{to_string(memory.type())} + ", not " +
                                             std::to_string(wanted.count) + " of " +
                                             std::string{to_string(wanted.type)}));
  request.what = how;
  request.memory = memory.token();
  return request;
}

/// Its content is unknown, also for the next process: this one may end before it writes there.
void mark_new(const any_gpu_ref& memory, const std::string& name) {
  memory.memory()->mark(
      {0, memory.size_bytes(),
       make_error(errc::indeterminate,
                  "the buffer \"" + name + "\" is new, and was not written yet")});
}

} // namespace

void named_memory::keep(const std::shared_ptr<world_core>& core, program_note request) {
  std::optional<program_note> reply;
  {
    std::lock_guard lock{mutex_};
    if (ended_)
      return;
    auto& of_rank = all_[static_cast<std::size_t>(request.rank)];
    std::erase_if(of_rank, [](auto& x) { return x.second.memory && x.second.memory.stale(); });
    const auto i = of_rank.find(request.name);
    if (i != of_rank.end() && !i->second.memory) { // for a process that has ended meanwhile
      i->second.request = std::move(request);
      return;
    }
    if (i != of_rank.end())
      reply = grant(std::move(request), kind::kept, i->second.memory);
    else if (of_rank.size() >= most_kept_names)
      reply =
          refuse(std::move(request),
                 make_error(errc::overloaded, "the rank has " + std::to_string(most_kept_names) +
                                                  " named buffers, which is the limit"));
    else
      of_rank.emplace(request.name, entry{{}, request});
  }
  if (reply)
    send_(*reply);
  else
    allocate(core, request);
}

void named_memory::allocate(const std::shared_ptr<world_core>& core, const program_note& request) {
  const auto& on = core->lanes()[static_cast<std::size_t>(request.rank)];
  const device_core device{core->owner(), on, as_good_as_never};
  const auto made = device.allocate(request.memory.count, request.memory.type, false, {});
  made->on_answer([self = weak_from_this(), weak_core = std::weak_ptr{core}, request,
                   op = std::weak_ptr{made}] {
    const auto owner = weak_core.lock();
    const auto how = op.lock();
    if (!owner || !how)
      return;
    // The thread that answers must not block.
    owner->owner()->workers().run([self, weak_core, request, how] {
      const auto alive = self.lock();
      const auto world = weak_core.lock();
      if (alive && world)
        alive->allocated(world, request, *how);
    });
  });
}

void named_memory::allocated(const std::shared_ptr<world_core>& core, const program_note& request,
                             const operation_of<any_gpu_ref>& how) {
  program_note last;
  {
    std::lock_guard lock{mutex_};
    auto& of_rank = all_[static_cast<std::size_t>(request.rank)];
    const auto i = of_rank.find(request.name);
    if (ended_ || i == of_rank.end())
      return;
    last = std::move(i->second.request);
    if (how.error()) {
      of_rank.erase(i);
    } else {
      mark_new(how.value, request.name);
      i->second.memory = how.value;
    }
  }
  if (!how.error())
    send_(grant(std::move(last), kind::kept_new, how.value));
  else if (last.number == request.number)
    send_(refuse(std::move(last), how.error()));
  else // of the next process: the former one's end may be the reason
    keep(core, std::move(last));
}

void named_memory::end() {
  std::map<std::size_t, names> all; // destroyed without the lock
  std::lock_guard lock{mutex_};
  ended_ = true;
  all.swap(all_);
}

} // namespace troupe::detail
