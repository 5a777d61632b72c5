#include "admission/retry_order.hpp"

#include "operation/device_state.hpp"

#include <algorithm>
#include <ranges>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace troupe::detail {

void retry_order::note_admitted(locked lock, const operation& x) {
  auto& record = *x.retries();
  set_key(lock, record);
  record.note_admitted(lock, x.uses(), losses());
}

caf::error retry_order::defer(locked lock, const operation& x) {
  auto& record = *x.retries();
  set_key(lock, record);
  record.note_deferred(lock, x.uses());
  record.begin_wait();
  return make_error(x.describe(errc::worker_lost, "deferred: a device was lost"));
}

/// From the last request to the first: only later requests that are made again may have written to
/// a buffer since an attempt was admitted. Then making all of them again, in this order, repeats
/// everything that has been admitted on the buffer since.
void retry_order::check(locked lock, std::span<retry> all) {
  std::unordered_map<const buffer*, std::uint64_t> later;
  for (auto& x : all | std::views::reverse) {
    auto& used = x.attempt->retries()->buffers(lock);
    for (auto& u : used)
      if (auto memory = u.memory.lock();
          memory && memory->admitted_writes - u.writes_seen != later[memory.get()])
        x.refusal = make_error(errc::unavailable,
                               "a later request writes to one of its buffers, on device " +
                                   std::to_string(memory->home().ordinal()));
    if (x.refusal)
      continue;
    for (auto& u : used)
      if (auto memory = u.memory.lock())
        later[memory.get()] += u.own_writes;
  }
}

void retry_order::leave_out_waiting(locked lock, std::vector<std::shared_ptr<operation>>& users,
                                    std::uint64_t last) {
  std::ranges::sort(users, {}, [](auto& x) { return x->position(); });
  std::vector<std::shared_ptr<operation>> ended;
  std::unordered_set<const buffer*> used; // by attempts in `ended`
  for (auto& x : users) {
    std::vector<const buffer*> own;
    if (x->retries() != nullptr)
      for (auto& u : x->retries()->buffers(lock))
        own.push_back(u.memory.lock().get());
    if (x->position() > last &&
        std::ranges::none_of(own, [&](auto* b) { return used.contains(b); }))
      continue;
    used.insert(own.begin(), own.end());
    ended.push_back(std::move(x));
  }
  users = std::move(ended);
}

} // namespace troupe::detail
