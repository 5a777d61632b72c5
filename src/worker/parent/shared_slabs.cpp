#include "worker/parent/shared_slabs.hpp"

#include "worker/parent/worker_link.hpp"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

/// Addresses that no allocator of the system, of CUDA or of a sanitizer uses by itself.
#if defined(__SANITIZE_THREAD__)
constexpr std::uintptr_t first_address = 0x7e80'0000'0000;
constexpr std::uintptr_t last_address = 0x7ec0'0000'0000;
#else
constexpr std::uintptr_t first_address = 0x2000'0000'0000;
constexpr std::uintptr_t last_address = 0x3000'0000'0000;
#endif

/// How many addresses are tried for a slab, each in another window.
constexpr std::size_t most_tries =
    std::max<std::size_t>((last_address - first_address) / memory_slab::window, 1);

/// Returns whether the addresses of a slab were in use; else it is a failed call of the system.
bool is_in_use(const caf::error& why) {
  const auto x = failure_of(why);
  return x && x->code == errc::unavailable && x->native_code == 0;
}

const std::byte* begin_of(const memory_slab& x) noexcept {
  return static_cast<const std::byte*>(x.address);
}

} // namespace

// -- addresses

void* slab_addresses::take(std::size_t size_bytes, std::size_t unit) {
  const std::lock_guard lock{mutex_};
  const auto rounded_up = [=](std::uintptr_t x) {
    const auto begin = (x + unit - 1) / unit * unit;
    const auto window_end = begin / memory_slab::window * memory_slab::window + memory_slab::window;
    return size_bytes <= window_end - begin ? begin : window_end;
  };
  if (size_bytes > memory_slab::window)
    return nullptr;
  bool from_the_start = next_ <= first_address;
  auto begin = rounded_up(std::max(next_, first_address));
  while (true) {
    if (begin > last_address || size_bytes > last_address - begin) {
      if (from_the_start)
        return nullptr;
      from_the_start = true;
      begin = rounded_up(first_address);
    }
    // The last one that begins before the end of these addresses.
    auto other = taken_.lower_bound(begin + size_bytes);
    if (other == taken_.begin() || (--other)->second <= begin)
      break;
    begin = rounded_up(other->second);
  }
  next_ = begin + size_bytes;
  taken_.emplace(begin, next_);
  return reinterpret_cast<void*>(begin);
}

std::size_t slab_addresses::capacity() noexcept { return last_address - first_address; }

void slab_addresses::give_back(void* address) noexcept {
  const std::lock_guard lock{mutex_};
  taken_.erase(reinterpret_cast<std::uintptr_t>(address));
}

void slab_addresses::leave_window(void* address) noexcept {
  const auto window = reinterpret_cast<std::uintptr_t>(address) / memory_slab::window;
  const std::lock_guard lock{mutex_};
  if (next_ / memory_slab::window == window)
    next_ = (window + 1) * memory_slab::window;
}

// -- slabs

/// Does not wait for the workers, which may be lost.
shared_slab::~shared_slab() {
  unmappings_->begin();
  const std::shared_ptr<void> until_unmapped{
      what_.address, [to = addresses_, unmappings = unmappings_](void* address) {
        to->give_back(address);
        unmappings->end();
      }};
  for (auto& x : mappings_)
    x->when_there([what = what_, until_unmapped](worker_link& in) {
      in.request(control::drop_slab, bytes_of(arguments_of(what)), std::nullopt,
                 [until_unmapped](const worker_reply&) {});
    });
}

bool shared_slab::contains(const void* memory, std::size_t size_bytes) const noexcept {
  const auto offset =
      static_cast<std::size_t>(static_cast<const std::byte*>(memory) - begin_of(what_));
  return offset <= what_.size_bytes && size_bytes <= what_.size_bytes - offset;
}

std::shared_ptr<worker_mapping> shared_slab::mapping_in(worker_link& in) {
  std::shared_ptr<worker_mapping> result;
  {
    const std::lock_guard lock{mutex_};
    std::erase_if(mappings_, [](auto& x) { return x->is_over(); });
    for (auto& x : mappings_)
      if (x->is_in(in.weak_from_this()))
        return x;
    result = mappings_.emplace_back(std::make_shared<worker_mapping>(in.weak_from_this()));
  }
  in.request(
      control::map_slab, bytes_of(arguments_of(what_)), descriptor_->get(),
      [result](const worker_reply& done) { result->end(done ? caf::error{} : done.error()); });
  return result;
}

void shared_slab::note_mapped(worker_link& in) {
  auto x = std::make_shared<worker_mapping>(in.weak_from_this());
  x->end({});
  const std::lock_guard lock{mutex_};
  mappings_.push_back(std::move(x));
}

caf::error shared_slab::map(worker_link& in) { return mapping_in(in)->wait(in); }

void shared_slab::give_to(const worker_link& owner) {
  const std::lock_guard lock{mutex_};
  std::erase_if(mappings_, [&](auto& x) { return x->is_in(owner.weak_from_this()); });
}

caf::expected<std::shared_ptr<shared_slab>> shared_slabs::make(int ordinal, std::size_t size_bytes,
                                                               std::size_t unit, worker_link& in) {
  worker_reply made =
      make_error({.code = errc::out_of_memory,
                  .detail = "no addresses are left for " + std::to_string(size_bytes) + " bytes",
                  .device = ordinal});
  memory_slab what{ordinal, nullptr, size_bytes};
  for (std::size_t tries = 0; tries < most_tries; ++tries) {
    what.address = addresses_->take(size_bytes, unit);
    if (what.address == nullptr)
      break;
    made = in.request(control::make_slab, arguments_of(what));
    if (made)
      break;
    addresses_->give_back(what.address);
    if (!is_in_use(made.error()))
      break;
    addresses_->leave_window(what.address);
  }
  if (!made)
    return made.error();
  if (!made->descriptor) {
    // The worker has made it. It goes with the worker, at the latest.
    static_cast<void>(in.request(control::unmap_slab, arguments_of(what)));
    addresses_->give_back(what.address);
    return make_error({.code = errc::unavailable,
                       .detail = "no file descriptor arrived with device memory; this process may "
                                 "have reached its limit",
                       .device = ordinal});
  }
  return std::make_shared<shared_slab>(what, std::move(made->descriptor), addresses_, unmappings_);
}

void shared_slabs::add(const std::shared_ptr<shared_slab>& slab) {
  const std::lock_guard lock{mutex_};
  all_.insert_or_assign(begin_of(slab->what()), slab);
}

void shared_slabs::remove(const memory_slab& what) {
  std::shared_ptr<shared_slab> gone; // ends without the lock
  const std::lock_guard lock{mutex_};
  if (const auto found = all_.find(begin_of(what)); found != all_.end()) {
    gone = std::move(found->second);
    all_.erase(found);
  }
}

std::shared_ptr<shared_slab> shared_slabs::find(const memory_slab& what) {
  const std::lock_guard lock{mutex_};
  const auto found = all_.find(begin_of(what));
  return found != all_.end() ? found->second : nullptr;
}

caf::error shared_slabs::map(const memory_slab& what, worker_link& in) {
  const auto x = find(what);
  return x ? x->map(in) : caf::error{};
}

void shared_slabs::begin_to_map(const memory_slab& what, worker_link& in) {
  if (const auto x = find(what))
    x->begin_to_map(in);
}

void shared_slabs::give_to(const memory_slab& what, const worker_link& owner) {
  if (const auto x = find(what))
    x->give_to(owner);
}

caf::expected<std::shared_ptr<const shared_slab>>
shared_slabs::reach(const void* memory, std::size_t size_bytes, worker_link& from) {
  std::shared_ptr<shared_slab> result;
  {
    const std::lock_guard lock{mutex_};
    if (const auto next = all_.upper_bound(static_cast<const std::byte*>(memory));
        next != all_.begin())
      result = std::prev(next)->second;
  }
  if (result == nullptr || !result->contains(memory, size_bytes))
    return make_error(errc::stale_ref, "other devices do not reach the memory");
  if (auto error = result->map(from))
    return error;
  return std::shared_ptr<const shared_slab>{std::move(result)};
}

} // namespace troupe::detail
