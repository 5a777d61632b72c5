#include "worker/child/guest_memory.hpp"

#include "foundation/log.hpp"
#include "foundation/start_thread.hpp"

#include <string>
#include <utility>

namespace troupe::detail {

namespace {

std::byte* at_byte(const lent_range& x, std::size_t offset) noexcept {
  return reinterpret_cast<std::byte*>(x.address) + offset;
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
  const std::lock_guard one_at_a_time{demanding_};
  std::uint64_t number = 0;
  {
    const std::lock_guard lock{mutex_};
    number = ++last_demand_;
    reply_.reset();
  }
  if (auto error = options_.demand(what, number, x))
    return error;
  std::unique_lock lock{mutex_};
  changed_.wait(lock, [this] { return reply_ || ends_; });
  if (reply_)
    return *reply_;
  return make_error({.code = errc::unavailable,
                     .detail = "the worker of the device ends",
                     .device = options_.device});
}

void guest_memory::answered(std::uint64_t number, const caf::expected<lent_range>& result) {
  const std::lock_guard lock{mutex_};
  if (number == last_demand_)
    reply_ = result;
  changed_.notify_all();
}

// -- memory

caf::error guest_memory::out_of_memory(std::size_t size_bytes, const char* why) const {
  return make_error({.code = errc::out_of_memory,
                     .detail = std::to_string(size_bytes) + " bytes asked for, but " + why,
                     .device = options_.device});
}

caf::expected<void*> guest_memory::allocate(std::size_t size_bytes, std::size_t device_bytes) {
  if (const auto there = take(size_bytes))
    return *there;
  if (size_bytes > device_bytes)
    return out_of_memory(size_bytes, "the device has less");
  const auto fresh = demand(control::lend, {0, size_bytes});
  if (!fresh)
    return fresh.error();
  if (const auto there = take_from(*fresh, size_bytes))
    return *there;
  if (auto kept = demand(control::take_back, *fresh); !kept)
    log(log_level::warning, "memory was not given back to the parent", kept.error());
  return out_of_memory(size_bytes, "programs have too many large pieces of memory");
}

std::optional<void*> guest_memory::take(std::size_t size_bytes) {
  const std::lock_guard lock{mutex_};
  const auto range = space_.take(size_bytes);
  if (!range)
    return std::nullopt;
  auto& in = ranges_.at(range->slab);
  in.empty_since.reset();
  void* const result = at_byte(in.what, range->begin);
  taken_.emplace(result, *range);
  return result;
}

std::optional<void*> guest_memory::take_from(const lent_range& fresh, std::size_t size_bytes) {
  {
    const std::lock_guard lock{mutex_};
    const auto number = space_.add(fresh.size_bytes);
    if (!number)
      return std::nullopt;
    ranges_.emplace(*number, borrowed{fresh, {}}); // not empty for the keeper before it was used
  }
  return take(size_bytes);
}

bool guest_memory::give_back(const slab_range& x) {
  const bool is_empty = space_.give_back(x);
  if (is_empty)
    ranges_.at(x.slab).empty_since = clock::now();
  return is_empty;
}

bool guest_memory::deallocate(void* memory) {
  {
    const std::lock_guard lock{mutex_};
    const auto found = taken_.find(memory);
    if (found == taken_.end())
      return false;
    const auto range = found->second;
    taken_.erase(found);
    if (!give_back(range))
      return true;
  }
  note_empty();
  return true;
}

void guest_memory::clear() {
  {
    const std::lock_guard lock{mutex_};
    for (const auto& [memory, range] : taken_)
      static_cast<void>(give_back(range));
    taken_.clear();
  }
  note_empty();
}

std::size_t guest_memory::free_bytes() const {
  const std::lock_guard lock{mutex_};
  return space_.free_bytes();
}

// -- empty ranges

std::vector<lent_range> guest_memory::take_empty(clock::time_point when) {
  std::vector<lent_range> result;
  for (auto i = ranges_.begin(); i != ranges_.end();) {
    if (!i->second.empty_since || *i->second.empty_since > when) {
      ++i;
      continue;
    }
    space_.remove(i->first);
    result.push_back(i->second.what);
    i = ranges_.erase(i);
  }
  return result;
}

std::vector<lent_range> guest_memory::trim() {
  const std::lock_guard lock{mutex_};
  return take_empty(clock::time_point::max());
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
    std::optional<clock::time_point> due;
    for (const auto& [number, x] : ranges_)
      if (x.empty_since && (!due || *x.empty_since + options_.keep < *due))
        due = *x.empty_since + options_.keep;
    if (!due) {
      changed_.wait(lock);
      continue;
    }
    if (clock::now() < *due) {
      changed_.wait_until(lock, *due);
      continue;
    }
    const auto all = take_empty(clock::now() - options_.keep);
    lock.unlock();
    for (const auto& x : all)
      static_cast<void>(demand(control::take_back, x)); // fails only when the worker ends
    lock.lock();
  }
}

} // namespace troupe::detail
