#include "operation/library_states.hpp"

#include "foundation/error_text.hpp"
#include "operation/launch_call.hpp"
#include "operation/launch_registry.hpp"
#include <troupe/error.hpp>

#include <algorithm>

namespace troupe::detail {

namespace {

/// Workspaces grow in steps of this size.
constexpr std::size_t workspace_step = std::size_t{1} << 20;

/// Waits until the work in `stream` is over.
caf::error await(backend_device& on, stream_view stream) {
  auto event = on.create_event();
  if (!event)
    return event.error();
  auto error = on.record(*event, stream);
  if (!error)
    error = on.synchronize(*event);
  keep_first(error, on.destroy_event(*event));
  return error;
}

} // namespace

caf::error making_context::run_on_host(std::function<void()>) {
  return make_error(errc::not_supported, "a launch that is prepared runs nothing on the host");
}

caf::expected<void*> loading_context::workspace(std::size_t) {
  constexpr std::uintptr_t aligned = std::uintptr_t{1} << 20; // as for any workspace
  return reinterpret_cast<void*>(aligned);
}

caf::error library_states::open_memory(backend_device& on, int ordinal, stream_view stream) {
  if (auto error = on.open_memory())
    return error;
  if (registered_libraries().empty())
    return {};
  auto error = make(on, ordinal, stream);
  if (code_of(error) != errc::device_fault)
    keep_first(error, await(on, stream)); // also what a library has enqueued before it failed
  if (code_of(error) == errc::device_fault)
    abandon();
  else if (error)
    keep_first(error, close_memory(on));
  return error;
}

caf::error library_states::make(backend_device& on, int ordinal, stream_view stream) {
  making_context context{on, ordinal, stream, *this};
  for (auto& [name, maker] : registered_libraries()) {
    std::unique_ptr<library_state> made;
    auto error = call_library_on(on, name, 0, [&, &make = maker]() -> caf::error {
      auto state = make(context);
      if (!state)
        return state.error();
      made = std::move(*state);
      return {};
    });
    if (error)
      return error;
    if (made)
      states_.emplace_back(name, std::move(made));
  }
  return {};
}

caf::error library_states::close_memory(backend_device& on) noexcept {
  while (!states_.empty())
    states_.pop_back(); // a later library may use an earlier one
  workspaces_.clear();
  ++workspace_changes_;
  return on.close_memory();
}

void library_states::abandon() noexcept {
  for (auto& [name, state] : states_)
    static_cast<void>(state.release()); // its destructor would call a driver
  states_.clear();
  workspaces_.clear();
  ++workspace_changes_;
}

library_state* library_states::find(std::string_view name) const noexcept {
  const auto i = std::ranges::find_if(states_, [&](auto& x) { return x.first == name; });
  return i != states_.end() ? i->second.get() : nullptr;
}

caf::expected<void*> library_states::workspace(backend_device& on, stream_view stream,
                                               std::size_t size_bytes) {
  auto& mine = workspaces_[stream.native];
  if (mine.address != nullptr && size_bytes <= mine.size_bytes)
    return mine.address;
  if (size_bytes > SIZE_MAX - workspace_step)
    return make_error(errc::out_of_memory, "the workspace would be too large");
  ++workspace_changes_; // also if there will be none
  if (auto* old = std::exchange(mine, {}).address; old != nullptr)
    if (auto error = on.deallocate(old, stream))
      return error;
  const auto size = std::max<std::size_t>(
      (size_bytes + workspace_step - 1) / workspace_step * workspace_step, workspace_step);
  auto memory = on.allocate(size, stream);
  if (!memory && code_of(memory.error()) == errc::out_of_memory) {
    for (auto& [name, state] : states_)
      state->trim();
    memory = on.allocate(size, stream);
  }
  if (memory)
    mine = {*memory, size};
  return memory;
}

} // namespace troupe::detail
