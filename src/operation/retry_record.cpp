#include "operation/retry_record.hpp"

#include "operation/device_state.hpp"
#include "operation/operation.hpp"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

namespace troupe::detail {

void retry_record::note_admitted(locked lock, std::span<const use> uses, std::uint64_t losses) {
  note(lock, uses, 1);
  losses_seen_ = losses;
}

void retry_record::note_deferred(locked lock, std::span<const use> uses) {
  note(lock, uses, 0);
  losses_seen_ = deferred;
}

void retry_record::note(locked, std::span<const use> uses, std::uint64_t own_writes) {
  std::vector<const use*> sorted;
  sorted.reserve(uses.size());
  for (auto& u : uses)
    sorted.push_back(&u);
  std::ranges::sort(sorted, std::less<>{}, [](const use* u) { return u->memory.get(); });
  buffers_.clear();
  const buffer* last = nullptr;
  for (auto* u : sorted) {
    if (u->memory.get() != last)
      buffers_.push_back({u->memory, u->memory->admitted_writes, 0});
    last = u->memory.get();
    buffers_.back().own_writes += u->writes ? own_writes : 0;
  }
}

caf::error check_may_repeat(const operation& x) {
  for (auto& written : x.uses())
    for (auto& read : x.uses())
      if (written.writes && read.reads && written.memory == read.memory &&
          written.begin < read.end && read.begin < written.end) {
        const auto device = written.memory->home().ordinal();
        auto why = x.describe(errc::invalid_argument,
                              "max_retries of a request that reads memory which it writes, on "
                              "device " +
                                  std::to_string(device) + ": it cannot be made again");
        why.device = device;
        why.parts.clear();
        return make_error(std::move(why));
      }
  return {};
}

} // namespace troupe::detail
