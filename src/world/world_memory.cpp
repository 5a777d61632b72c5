/// `world_core`: memory on all ranks, and the windows of symmetric memory.
#include "collective/allocate_all_operation.hpp"
#include "collective/connect_operations.hpp"
#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include "operation/admission_lock.hpp"
#include "world/world_core.hpp"

#include <algorithm>
#include <utility>

namespace troupe::detail {

namespace {

/// Checks the size of an allocation of `count` elements of `type`.
/// @errors errc::invalid_argument: the type is unknown; errc::out_of_memory: the size overflows
caf::error check_size(const char* verb, dtype type, std::size_t count) {
  if (!is_dtype(type))
    return refusal(verb, errc::invalid_argument, unknown_dtype(type));
  if (count > SIZE_MAX / size_of(type))
    return refusal(verb, errc::out_of_memory, size_overflows(count, type));
  return {};
}

} // namespace

std::shared_ptr<operation_of<world_buffers>> world_core::allocate(dtype type, std::size_t count,
                                                                  allocation_options what,
                                                                  const request_options& options) {
  constexpr auto verb = "allocate";
  if (auto error = check_whole(verb); error)
    return refused_operation<world_buffers>(verb, std::move(error));
  const auto without = absent();
  if (what.symmetric || options.membership != 0) { // else only the devices matter
    const operation request{verb, 0};
    admission_lock lock;
    if (auto error =
            check_view(lock, request, options.membership, what.symmetric ? rank_set{} : absent());
        error)
      return refused_operation<world_buffers>(verb, std::move(error));
  }
  if (auto error = check_size(verb, type, count); error)
    return refused_operation<world_buffers>(verb, std::move(error));
  auto memory =
      what.symmetric ? make_symmetric(std::max<std::size_t>(count * size_of(type), 1)) : nullptr;
  auto parts = std::make_shared<allocate_all_operation>(
      lanes_, options.allow_shrunk ? without : rank_set{}, type, count, what.zeroed, memory);
  parts->deadline = from_now(options.deadline.count() != 0 ? options.deadline : limits_.deadline);
  if (!memory) {
    runtime_->start(parts);
    return parts;
  }
  return allocate_and_register(verb, std::move(parts), std::move(memory));
}

/// Returns a symmetric allocation without pieces, which leaves the world when its last handle is
/// gone.
std::shared_ptr<symmetric_memory> world_core::make_symmetric(std::size_t size_bytes) {
  return std::make_shared<symmetric_memory>(
      size(), size_bytes, [world = weak_from_this()](std::shared_ptr<symmetric_memory> x) {
        auto self = world.lock();
        if (!self)
          return;
        // The thread that drops a handle may hold the admission lock.
        self->runtime_->deadlines().call_at(clock::now(), [world, x = std::move(x)] {
          if (auto alive = world.lock())
            alive->forget(x);
        });
      });
}

/// Starts `parts`, which allocate the pieces of `memory`. Then registers `memory` with all
/// communicators, and completes the returned operation.
std::shared_ptr<operation_of<world_buffers>>
world_core::allocate_and_register(const char* verb,
                                  std::shared_ptr<operation_of<world_buffers>> parts,
                                  std::shared_ptr<symmetric_memory> memory) {
  // No lane sees this request: it is answered when the memory is registered, too.
  auto result = std::make_shared<operation_of<world_buffers>>(verb, 0);
  result->deadline = parts->deadline;
  runtime_->deadlines().add(*result);
  result->on_answer([owner = runtime_, x = std::weak_ptr{result}] {
    if (auto op = x.lock())
      owner->deadlines().remove(*op);
  });
  parts->on_answer([self = shared_from_this(), x = std::weak_ptr{parts}, memory, result] {
    auto done = x.lock();
    if (!done)
      return;
    if (done->error()) {
      result->answer(done->error());
      return;
    }
    result->value = done->value;
    std::vector<std::shared_ptr<communicator>> there;
    {
      admission_lock lock;
      self->symmetric_.push_back(memory);
      there = self->communicators_there(lock);
    }
    auto open = std::make_shared<std::atomic<std::size_t>>(there.size() + 1);
    auto one_less = [open, result] {
      if (open->fetch_sub(1) == 1)
        result->answer({});
    };
    for (auto& target : there)
      self->register_windows(target, one_less);
    one_less();
  });
  runtime_->start(parts);
  return result;
}

// -- windows

std::vector<std::shared_ptr<communicator>> world_core::communicators_there(locked) const {
  std::vector<std::shared_ptr<communicator>> result;
  for (auto& x : {current_, next_, standby_})
    if (x && x->live())
      result.push_back(x);
  return result;
}

/// Registers all memory that is not registered with `target`, nor about to be. Then calls `then`.
void world_core::register_windows(const std::shared_ptr<communicator>& target,
                                  std::function<void()> then) {
  std::vector<std::shared_ptr<symmetric_memory>> all; // freed without the lock
  std::vector<std::shared_ptr<symmetric_memory>> wanted;
  {
    admission_lock lock;
    for (auto& x : symmetric_)
      if (auto memory = x.lock(); memory && target->absent().empty())
        all.push_back(std::move(memory));
    for (auto& x : all)
      if (!target->windows_closed(lock) && x->usable() &&
          x->with(lock, target.get()) == symmetric_memory::state::none) {
        x->set(lock, target.get(), symmetric_memory::state::asked_for);
        target->keep_window(lock, x);
        wanted.push_back(x);
      }
  }
  if (wanted.empty())
    return then();
  auto op = std::make_shared<register_operation>(target, patience(), limits_.connect_limit, wanted);
  op->world = tag_;
  op->deadline = behind_the_build();
  op->on_answer(
      [self = shared_from_this(), op = std::weak_ptr{op}, target, wanted, then = std::move(then)] {
        auto x = op.lock();
        if (!x)
          return;
        self->on_registered(target, wanted, x->error());
        then();
      });
  runtime_->start(op);
}

void world_core::on_registered(const std::shared_ptr<communicator>& target,
                               const std::vector<std::shared_ptr<symmetric_memory>>& memory,
                               const caf::error& why) {
  if (why && target->live())
    log(log_level::warning,
        "world " + name_ + " uses its symmetric memory as plain memory in epoch " +
            std::to_string(target->epoch()),
        why);
  using state = symmetric_memory::state;
  std::vector<std::shared_ptr<symmetric_memory>> unused;
  {
    admission_lock lock;
    for (auto& x : memory) {
      if (x->with(lock, target.get()) == state::asked_for) // it was not let go meanwhile
        x->set(lock, target.get(), why ? state::failed : state::registered);
      if (x->with(lock, target.get()) == state::registered &&
          std::none_of(symmetric_.begin(), symmetric_.end(),
                       [&](auto& y) { return y.lock() == x; }))
        unused.push_back(x); // its last handle is gone
    }
    if (why)
      target->close_windows(lock, why);
  }
  for (auto& x : unused)
    deregister(target, x);
}

void world_core::forget(const std::shared_ptr<symmetric_memory>& x) {
  std::vector<std::shared_ptr<communicator>> with;
  {
    admission_lock lock;
    std::erase_if(symmetric_, [&](auto& y) { return y.expired() || y.lock() == x; });
    for (auto& c : communicators_there(lock))
      if (x->with(lock, c.get()) == symmetric_memory::state::registered)
        with.push_back(c);
  }
  for (auto& target : with)
    deregister(target, x);
}

void world_core::deregister(const std::shared_ptr<communicator>& target,
                            const std::shared_ptr<symmetric_memory>& x) {
  auto op = std::make_shared<deregister_operation>(target, x);
  op->deadline = behind_the_build();
  op->on_answer([op = std::weak_ptr{op}, target, x] {
    auto done = op.lock();
    if (!done || done->error()) // the communicator keeps it until it ends
      return;
    target->let_go_window(admission_lock{}, x);
  });
  runtime_->start(op);
}

} // namespace troupe::detail
