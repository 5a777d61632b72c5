/// Part of class `device_slabs`: lends ranges of slabs to the programs in the worker.

#include "foundation/start_thread.hpp"
#include "foundation/wire.hpp"
#include "worker/parent/device_slabs.hpp"

#include <algorithm>
#include <iterator>
#include <string>

namespace troupe::detail {

namespace {

/// How long a request of programs waits for the end of lost workers that still have memory.
constexpr std::chrono::seconds lost_patience{3};

lent_range range_of(const std::byte* address, const slab_range& x) noexcept {
  return {reinterpret_cast<std::uintptr_t>(address), x.size_bytes};
}

} // namespace

void device_slabs::serve_demands_of(const std::shared_ptr<worker_link>& worker) {
  worker->when_reaped([weak = weak_from_this(), of = std::weak_ptr{worker}] {
    if (const auto gone = of.lock())
      gone->program_ranks().when_none([weak, gone] {
        if (const auto self = weak.lock())
          self->take_back_all(*gone);
      });
  });
  worker->set_demand_handler(
      [weak = weak_from_this()](const std::shared_ptr<worker_link>& by, const worker_demand& what) {
        if (const auto self = weak.lock())
          self->serve(by, what);
      });
}

/// Called on the thread that receives the replies of the worker. A new slab needs one.
void device_slabs::serve(const std::shared_ptr<worker_link>& by, const worker_demand& what) {
  if (what.kind == control::take_back) {
    if (take_back(*by, what.range))
      return by->answer(what, what.range);
    return by->give_up_nonsense("it gave back memory that it does not have");
  }
  if (by->slab_granularity() == 0)
    return by->give_up_nonsense("it asked for memory of slabs, but can make none");
  if (what.range.size_bytes == 0 || what.range.size_bytes > device_bytes_)
    return by->give_up_nonsense("it asked for more memory than the device has");
  const auto work = [self = shared_from_this(), by, what] {
    by->answer(what, self->lend(by, what.range.size_bytes));
  };
  if (auto error = start_detached_thread(work, "to lend memory to programs"))
    by->answer(what, error);
}

caf::expected<lent_range> device_slabs::lend(const std::shared_ptr<worker_link>& to,
                                             std::size_t size_bytes) {
  const auto preferred =
      next_slab_bytes(size_bytes, number_lent(*to), device_bytes_, to->slab_granularity());
  const bool others_had_some = is_lent_to_others(*to); // before: it may come back meanwhile
  auto result = lend_between(to, preferred, preferred);
  const auto has_no_room = [&] {
    return !result && code_of(result.error()) == errc::out_of_memory;
  };
  const auto most = std::max(size_bytes, preferred / 16); // for more than one allocation
  if (has_no_room())
    result = lend_between(to, size_bytes, most);
  if (has_no_room() && others_had_some) {
    wait_for_lost_workers(*to);
    result = lend_between(to, size_bytes, most);
  }
  return result;
}

caf::expected<lent_range> device_slabs::lend_between(const std::shared_ptr<worker_link>& to,
                                                     std::size_t least, std::size_t most) {
  while (true) { // others may take what was made
    {
      const std::lock_guard lock{mutex_};
      if (worker_ != to)
        return make_error({.code = errc::device_reset,
                           .detail = "another process has the device",
                           .device = ordinal_});
      if (to->lost()) // it may be reaped, and gives nothing back then
        return to->loss();
      if (const auto there = slabs_.take(std::clamp(slabs_.largest_free(), least, most))) {
        lent_.emplace(there->first, std::make_shared<loan>(loan{there->second, to}));
        return range_of(there->first, there->second);
      }
    }
    if (auto error = grow(least))
      return error;
  }
}

std::size_t device_slabs::number_lent(const worker_link& to) const {
  const std::lock_guard lock{mutex_};
  return static_cast<std::size_t>(
      std::ranges::count_if(lent_, [&](auto& x) { return x.second->to.get() == &to; }));
}

bool device_slabs::others_borrow(const worker_link& to) const {
  return std::ranges::any_of(lent_,
                             [&](auto& x) { return x.second->to && x.second->to.get() != &to; });
}

bool device_slabs::is_lent_to_others(const worker_link& than) const {
  const std::lock_guard lock{mutex_};
  return others_borrow(than);
}

void device_slabs::wait_for_lost_workers(worker_link& by) {
  const auto listener = by.on_loss([weak = weak_from_this()](const caf::error&) {
    if (const auto self = weak.lock()) {
      const std::lock_guard lock{self->mutex_};
      self->changed_.notify_all();
    }
  });
  {
    std::unique_lock lock{mutex_};
    changed_.wait_for(lock, lost_patience, [&] { return by.lost() || !others_borrow(by); });
  }
  by.forget(listener);
}

bool device_slabs::take_back(const worker_link& from, const lent_range& x) {
  {
    const std::lock_guard lock{mutex_};
    const auto found = lent_.find(reinterpret_cast<std::byte*>(x.address));
    if (found == lent_.end() || found->second->to.get() != &from ||
        found->second->range.size_bytes != x.size_bytes)
      return worker_.get() != &from; // a new generation may have dropped it
    end_lending(found);
  }
  static_cast<void>(wake_keeper()); // without one, the slab goes back with the next one
  return true;
}

void device_slabs::take_back_all(const worker_link& from) {
  {
    const std::lock_guard lock{mutex_};
    for (auto i = lent_.begin(); i != lent_.end();) {
      const auto x = i++;
      if (x->second->to.get() == &from)
        end_lending(x);
    }
    changed_.notify_all();
  }
  static_cast<void>(wake_keeper());
}

void device_slabs::end_lending(loans::iterator x) {
  x->second->to.reset(); // the caller has it
  changed_.notify_all();
  if (x->second->owners != 0)
    return;
  static_cast<void>(slabs_.give_back(x->second->range));
  lent_.erase(x);
}

std::shared_ptr<const void> device_slabs::keep_lent(const worker_link& worker, const void* memory,
                                                    std::size_t size_bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::lock_guard lock{mutex_};
  const auto next = lent_.upper_bound(reinterpret_cast<std::byte*>(address));
  if (next == lent_.begin())
    return nullptr;
  const auto& [begin, x] = *std::prev(next);
  const auto offset = address - reinterpret_cast<std::uintptr_t>(begin);
  if (x->to.get() != &worker || offset > x->range.size_bytes ||
      size_bytes > x->range.size_bytes - offset)
    return nullptr;
  ++x->owners;
  return {memory, [weak = weak_from_this(), x](const void*) {
            if (const auto self = weak.lock())
              self->drop_owner(x);
          }};
}

void device_slabs::drop_owner(const std::shared_ptr<loan>& x) {
  {
    const std::lock_guard lock{mutex_};
    if (--x->owners != 0 || x->to)
      return;
    const auto found = std::ranges::find(lent_, x, [](auto& y) { return y.second; });
    if (found == lent_.end())
      return; // dropped with its slab
    end_lending(found);
  }
  static_cast<void>(wake_keeper());
}

void device_slabs::trim_programs() {
  const auto in = worker();
  if (!in || number_lent(*in) == 0)
    return;
  const auto reply = in->request(control::trim, std::span<const std::byte>{});
  if (!reply)
    return; // lost
  wire_reader reader{reply->bytes};
  const auto ranges = reader.get<std::vector<lent_range>>();
  if (!reader.ok() || !reader.at_end())
    return in->give_up_nonsense("a list of memory that could not be read");
  for (auto& x : ranges)
    if (!take_back(*in, x))
      return in->give_up_nonsense("it gave back memory that it does not have");
}

} // namespace troupe::detail
