#include "worker/parent/shared_segments.hpp"

#include "foundation/system_call.hpp"
#include "worker/parent/worker_link.hpp"
#include "worker/protocol/shared_memory.hpp"

#include <optional>
#include <utility>

#include <unistd.h>

namespace troupe::detail {

namespace {

std::size_t whole_pages(std::size_t size_bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (size_bytes + page - 1) / page * page;
}

/// Requests the unmapping without waiting: the worker may be lost.
void unmap(std::uint64_t segment, worker_link& in) {
  in.request(control::unmap, bytes_of(segment), std::nullopt, [](const worker_reply&) {});
}

} // namespace

caf::expected<std::byte*> shared_segments::create(std::size_t size_bytes) {
  auto memory = shared_memory::create(whole_pages(size_bytes));
  if (!memory)
    return as_out_of_memory(memory.error());
  auto kept = std::make_shared<shared_memory>(std::move(*memory));
  add(kept->bytes(), kept->descriptor(), kept);
  return kept->bytes().data();
}

void shared_segments::add(std::span<std::byte> bytes, int descriptor,
                          std::shared_ptr<const void> keep) {
  std::lock_guard lock{mutex_};
  all_.insert_or_assign(bytes.data(), segment{++last_, bytes, descriptor, std::move(keep), {}});
}

caf::error shared_segments::remove(const void* memory) {
  segment gone;
  {
    std::lock_guard lock{mutex_};
    auto i = all_.find(static_cast<const std::byte*>(memory));
    if (i == all_.end())
      return make_error(errc::invalid_argument, "the memory is not shared with workers");
    gone = std::move(i->second);
    all_.erase(i);
  }
  gone.mapped_by.for_each([&](worker_link& in) { unmap(gone.number, in); });
  return {};
}

caf::expected<shared_place> shared_segments::place_of(const void* memory, std::size_t size_bytes,
                                                      worker_link& in) {
  const auto* first = static_cast<const std::byte*>(memory);
  map_args what;
  shared_place result;
  segment from;
  {
    std::lock_guard lock{mutex_};
    auto i = all_.upper_bound(first);
    if (i == all_.begin())
      return make_error(errc::invalid_argument, "the host memory is not visible to workers");
    auto& x = (--i)->second;
    const auto bytes = x.bytes;
    const auto offset = static_cast<std::size_t>(first - bytes.data());
    if (offset > bytes.size() || size_bytes > bytes.size() - offset)
      return make_error(errc::invalid_argument, "the host memory is not visible to workers");
    result = {x.number, offset};
    if (x.mapped_by.contains(in))
      return result;
    what = {x.number, bytes.size()};
    from = x;
  }
  if (auto done = in.request(control::map, what, from.descriptor); !done) {
    unmap(what.segment, in); // a relay may have kept it
    return done.error();
  }
  {
    std::lock_guard lock{mutex_};
    if (auto i = all_.find(from.bytes.data());
        i != all_.end() && i->second.number == what.segment) {
      i->second.mapped_by.add(in.weak_from_this());
      return result;
    }
  }
  unmap(what.segment, in); // unknown to `remove`
  return make_error(errc::invalid_argument, "host memory that was freed while a worker mapped it");
}

} // namespace troupe::detail
