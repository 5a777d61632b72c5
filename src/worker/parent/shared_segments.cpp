#include "worker/parent/shared_segments.hpp"

#include "foundation/error_text.hpp"
#include "foundation/start_thread.hpp"
#include "foundation/system_call.hpp"
#include "worker/parent/worker_link.hpp"
#include "worker/protocol/shared_memory.hpp"

#include <algorithm>
#include <iterator>
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

caf::error not_visible() {
  return make_error(errc::invalid_argument, "the host memory is not visible to workers");
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
  for (auto& x : gone.mappings)
    x->when_there([number = gone.number](worker_link& in) { unmap(number, in); });
  return {};
}

caf::expected<shared_place> shared_segments::place_of(const void* memory, std::size_t size_bytes,
                                                      worker_link& in) {
  shared_place result;
  std::span<std::byte> bytes;
  std::shared_ptr<worker_mapping> mapping;
  map_requests requests;
  {
    std::lock_guard lock{mutex_};
    auto* const x = find(memory, size_bytes);
    if (x == nullptr)
      return not_visible();
    bytes = x->bytes;
    result = {x->number,
              static_cast<std::size_t>(static_cast<const std::byte*>(memory) - bytes.data())};
    mapping = x->mapping_in(in);
    if (!mapping)
      mapping = map(*x, in, requests);
  }
  send(requests, in);
  if (mapping->is_there())
    return result;
  if (auto error = mapping->wait(in))
    return error;
  std::lock_guard lock{mutex_};
  if (auto i = all_.find(bytes.data()); i != all_.end() && i->second.number == result.segment)
    return result;
  return make_error(errc::invalid_argument, "host memory that was freed while a worker mapped it");
}

caf::error shared_segments::prepare(worker_link& worker, worker_link& spare) {
  map_requests requests;
  {
    std::lock_guard lock{mutex_};
    std::erase_if(spares_, [](auto& x) { return x.worker.expired() || x.spare.expired(); });
    spares_.push_back({worker.weak_from_this(), spare.weak_from_this()});
    for (auto& [begin, x] : all_)
      if (x.mapping_in(worker))
        map_once(x, spare, requests);
    auto* const fresh = words_of(spare);
    if (auto* const words = words_of(worker); words != nullptr && fresh != nullptr)
      for (auto& x : words->mappings)
        if (const auto in = x->in(); in && !in->lost())
          map_once(*fresh, *in, requests);
  }
  send(requests, spare);
  caf::error result;
  for (auto& x : requests)
    if (x.mapping->is_in(spare.weak_from_this()))
      keep_first(result, x.mapping->wait(spare));
  return spare.lost() ? caf::error{} : result;
}

std::shared_ptr<worker_mapping> shared_segments::segment::mapping_in(const worker_link& in) const {
  const auto found = std::ranges::find_if(
      mappings, [&](auto& x) { return x->is_in(in.weak_from_this()) && !x->has_failed(); });
  return found != mappings.end() ? *found : nullptr;
}

shared_segments::segment* shared_segments::find(const void* memory, std::size_t size_bytes) {
  const auto* const first = static_cast<const std::byte*>(memory);
  auto i = all_.upper_bound(first);
  if (i == all_.begin())
    return nullptr;
  auto& x = (--i)->second;
  const auto offset = static_cast<std::size_t>(first - x.bytes.data());
  const bool is_inside = offset <= x.bytes.size() && size_bytes <= x.bytes.size() - offset;
  return is_inside ? &x : nullptr;
}

shared_segments::segment* shared_segments::words_of(const worker_link& x) {
  return find(&x.done_word(0), sizeof x.done_word(0));
}

std::shared_ptr<worker_mapping> shared_segments::map(segment& x, worker_link& in,
                                                     map_requests& requests) {
  std::erase_if(x.mappings, [](auto& y) { return y->is_over(); });
  auto result = x.mappings.emplace_back(std::make_shared<worker_mapping>(in.weak_from_this()));
  requests.push_back({{x.number, x.bytes.size()}, x.descriptor, x.keep, result});
  for (auto& pair : spares_) {
    const auto worker = pair.worker.lock();
    const auto spare = pair.spare.lock();
    if (!worker || !spare || worker->lost() || spare->lost())
      continue;
    if (worker.get() == &in)
      map_once(x, *spare, requests);
    if (auto* const fresh = words_of(*spare); fresh != nullptr && words_of(*worker) == &x)
      map_once(*fresh, in, requests);
  }
  return result;
}

/// Does not wait for replies. If no thread starts, it waits for room in the sockets of all workers.
void shared_segments::send(map_requests all, const worker_link& first) {
  if (all.empty())
    return;
  const auto others = std::ranges::stable_partition(
      all, [&](auto& x) { return x.mapping->is_in(first.weak_from_this()); });
  const auto later = std::make_shared<map_requests>(std::make_move_iterator(others.begin()),
                                                    std::make_move_iterator(others.end()));
  all.erase(others.begin(), others.end());
  for (auto& x : all)
    x.send();
  const auto send_later = [later] {
    for (auto& x : *later)
      x.send();
  };
  if (!later->empty() && start_detached_thread(send_later, "to map memory for spares"))
    send_later();
}

void shared_segments::map_request::send() const {
  if (const auto in = mapping->in())
    in->request(control::map, bytes_of(what), descriptor,
                [mapping = mapping, number = what.segment](const worker_reply& done) {
                  if (const auto worker = mapping->in(); worker && !done)
                    unmap(number, *worker); // a relay may have kept it
                  mapping->end(done ? caf::error{} : done.error());
                });
}

} // namespace troupe::detail
