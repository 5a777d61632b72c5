#include "worker/child/guest_memory.hpp"

#include "foundation/start_thread.hpp"

#include <optional>
#include <span>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

std::span<std::byte> bytes_at(const lent_range& x) noexcept {
  return {reinterpret_cast<std::byte*>(x.address), x.size_bytes};
}

lent_range range_of(std::span<std::byte> x) noexcept {
  return {reinterpret_cast<std::uintptr_t>(x.data()), x.size()};
}

} // namespace

guest_memory::~guest_memory() {
  end();
  if (keeper_.joinable())
    keeper_.join();
}

void guest_memory::end() {
  const std::lock_guard lock{mutex_};
  ends_ = true;
  changed_.notify_all();
}

// -- requests to the parent

caf::expected<lent_range> guest_memory::demand(control what, const lent_range& x) {
  const auto over = [this] {
    return make_error({.code = errc::unavailable,
                       .detail = "the worker of the device ends",
                       .device = options_.device});
  };
  std::uint64_t number = 0;
  {
    const std::lock_guard lock{mutex_};
    if (ends_)
      return over(); // the last request may not be answered yet
    number = ++last_demand_;
    reply_.reset();
  }
  if (auto error = options_.demand(what, number, x))
    return error;
  std::unique_lock lock{mutex_};
  changed_.wait(lock, [this] { return reply_ || ends_; });
  return reply_ ? *reply_ : caf::expected<lent_range>{over()};
}

void guest_memory::answered(std::uint64_t number, const caf::expected<lent_range>& result) {
  const std::lock_guard lock{mutex_};
  if (number == last_demand_)
    reply_ = result;
  changed_.notify_all();
}

// -- memory

caf::error guest_memory::out_of_memory(std::size_t size_bytes, const std::string& why) const {
  return make_error({.code = errc::out_of_memory,
                     .detail = std::to_string(size_bytes) + " bytes asked for, but " + why,
                     .device = options_.device});
}

caf::expected<void*> guest_memory::allocate(std::size_t size_bytes, std::size_t device_bytes) {
  if (const auto there = take(size_bytes))
    return *there;
  if (size_bytes > device_bytes)
    return out_of_memory(size_bytes, "the device has " + std::to_string(device_bytes));
  const std::lock_guard one_at_a_time{demanding_};
  if (has_most_ranges())
    give_back_empty(clock::time_point::max());
  if (has_most_ranges())
    return out_of_memory(size_bytes, "programs have " + std::to_string(slab_space::most_slabs) +
                                         " pieces of memory, and none has room");
  const auto fresh = demand(control::lend, {0, size_bytes});
  if (!fresh)
    return fresh.error();
  return take_from(*fresh, size_bytes);
}

bool guest_memory::has_most_ranges() const {
  const std::lock_guard lock{mutex_};
  return ranges_.is_full();
}

std::optional<void*> guest_memory::take(std::size_t size_bytes) {
  const std::lock_guard lock{mutex_};
  return take_locked(size_bytes);
}

std::optional<void*> guest_memory::take_locked(std::size_t size_bytes) {
  const auto there = ranges_.take(size_bytes);
  if (!there)
    return std::nullopt;
  taken_.insert(*there);
  return there->first;
}

/// Other threads find the range when it has what this one needs of it.
caf::expected<void*> guest_memory::take_from(const lent_range& fresh, std::size_t size_bytes) {
  const std::lock_guard lock{mutex_};
  if (ranges_.add(bytes_at(fresh)))
    if (const auto there = take_locked(size_bytes))
      return *there;
  return make_error(
      {.code = errc::internal,
       .detail = "the parent lent too little for " + std::to_string(size_bytes) + " bytes",
       .device = options_.device});
}

bool guest_memory::deallocate(void* memory) {
  {
    const std::lock_guard lock{mutex_};
    const auto found = taken_.find(memory);
    if (found == taken_.end())
      return false;
    const auto range = found->second;
    taken_.erase(found);
    if (!ranges_.give_back(range))
      return true;
  }
  note_empty();
  return true;
}

void guest_memory::clear() {
  {
    const std::lock_guard lock{mutex_};
    for (const auto& [memory, range] : taken_)
      static_cast<void>(ranges_.give_back(range));
    taken_.clear();
  }
  note_empty();
}

std::size_t guest_memory::free_bytes() const {
  const std::lock_guard lock{mutex_};
  return ranges_.free_bytes();
}

// -- empty ranges

std::vector<lent_range> guest_memory::trim() {
  const std::lock_guard lock{mutex_};
  std::vector<lent_range> result;
  while (const auto x = ranges_.take_empty(clock::time_point::max()))
    result.push_back(range_of(*x));
  return result;
}

/// A range leaves only when it can be sent at once: else the parent would not find it where it asks
/// for memory.
void guest_memory::give_back_empty(clock::time_point when) {
  while (true) {
    std::optional<std::span<std::byte>> next;
    {
      const std::lock_guard lock{mutex_};
      next = ranges_.take_empty(when);
    }
    if (!next || !demand(control::take_back, range_of(*next)))
      return; // an error: the worker ends
  }
}

/// Without a thread, the parent gets empty ranges when it asks for them.
void guest_memory::note_empty() {
  if (options_.keep == cuda_backend_options::forever)
    return;
  const std::lock_guard lock{mutex_};
  if (!keeper_.joinable())
    static_cast<void>(start_thread(keeper_, [this] { keep_house(); }, "to give memory back"));
  changed_.notify_all();
}

void guest_memory::keep_house() {
  for (std::unique_lock lock{mutex_}; !ends_;) {
    const auto since = ranges_.first_empty();
    if (!since) {
      changed_.wait(lock);
      continue;
    }
    if (clock::now() < *since + options_.keep) {
      changed_.wait_until(lock, *since + options_.keep);
      continue;
    }
    lock.unlock();
    {
      const std::lock_guard one_at_a_time{demanding_};
      give_back_empty(clock::now() - options_.keep);
    }
    lock.lock();
  }
}

} // namespace troupe::detail
