#include "operation/symmetric_memory.hpp"

namespace troupe::detail {

symmetric_memory::symmetric_memory(std::size_t ranks, std::size_t size_bytes,
                                   std::function<void(std::shared_ptr<symmetric_memory>)> on_unused)
    : size_bytes_(size_bytes), on_unused_(std::move(on_unused)), pieces_(ranks) {}

symmetric_memory::~symmetric_memory() {
  for (auto& x : pieces_)
    if (x.address != nullptr)
      x.home->release({x.address, x.generation, {}});
}

void symmetric_memory::add(std::size_t rank, std::shared_ptr<device_state> home, void* address) {
  auto& x = pieces_[rank];
  x.generation = home->generation();
  x.home = std::move(home);
  x.address = static_cast<std::byte*>(address);
  in_use_.fetch_add(1);
}

void symmetric_memory::drop() noexcept {
  if (in_use_.fetch_sub(1) == 1 && on_unused_)
    on_unused_(shared_from_this());
}

bool symmetric_memory::usable() const noexcept {
  return in_use_.load() != 0 && std::all_of(pieces_.begin(), pieces_.end(), [](const piece& x) {
           return x.address != nullptr && x.home->live_generation() == x.generation;
         });
}

symmetric_memory::state symmetric_memory::with(locked, const communicator* x) const noexcept {
  for (auto& [key, value] : states_)
    if (key == x)
      return value;
  return state::none;
}

void symmetric_memory::set(locked, const communicator* x, state s) {
  auto i = std::find_if(states_.begin(), states_.end(), [x](auto& y) { return y.first == x; });
  if (s == state::none) {
    if (i != states_.end())
      states_.erase(i);
  } else if (i != states_.end()) {
    i->second = s;
  } else {
    states_.emplace_back(x, s);
  }
}

} // namespace troupe::detail
