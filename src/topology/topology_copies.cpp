// Checks and routes of a topology's copies.

#include "foundation/error_text.hpp"
#include "operation/use_of.hpp"
#include "runtime/retried_request.hpp"
#include "topology/topology_core.hpp"

#include <algorithm>
#include <string>
#include <tuple>

namespace troupe::detail {

namespace {

topology_core::copies_answer refuse(const char* verb, caf::error why) {
  return refused_operation<nothing>(verb, std::move(why));
}

std::string shape_of(const any_gpu_ref& x) {
  return std::to_string(x.count()) + " elements of " + std::string{to_string(x.type())};
}

caf::error no_memory(const char* verb, const any_gpu_ref& x) {
  return refusal(verb, x.device(), errc::stale_ref, "the handle has no memory");
}

caf::error check_shape(const char* verb, const any_gpu_ref& target, const any_gpu_ref& source) {
  if (target.type() == source.type() && target.count() == source.count())
    return {};
  return refusal(verb, target.device(), errc::shape_mismatch,
                 shape_of(source) + " into " + shape_of(target));
}

/// Refuses a target that shares bytes with another target or a source.
caf::error check_overlap(const char* verb, std::span<const copy_pair> copies) {
  struct range {
    const any_gpu_ref* of;
    bool target;
    std::size_t end() const { return of->offset() + of->size_bytes(); }
  };
  std::vector<range> all;
  for (auto& x : copies)
    for (auto& [ref, target] : {std::pair{&x.target, true}, std::pair{&x.source, false}})
      if (ref->size_bytes() != 0)
        all.push_back({ref, target});
  std::sort(all.begin(), all.end(), [](const range& a, const range& b) {
    if (a.of->memory() != b.of->memory())
      return std::less<>{}(a.of->memory().get(), b.of->memory().get());
    return a.of->offset() < b.of->offset();
  });
  // The earlier range that ends last, and the same among the targets.
  const range* last = nullptr;
  const range* last_target = nullptr;
  for (auto& x : all) {
    if (last != nullptr && last->of->memory() != x.of->memory())
      last = last_target = nullptr;
    auto* before = x.target ? last : last_target;
    if (before != nullptr && before->end() > x.of->offset())
      return refusal(verb, x.of->device(), errc::invalid_argument,
                     copies.size() == 1 ? "source and target overlap"
                                        : "a target overlaps another one, or a source");
    if (last == nullptr || x.end() > last->end())
      last = &x;
    if (x.target && (last_target == nullptr || x.end() > last_target->end()))
      last_target = &x;
  }
  return {};
}

// A route and the generations of its devices in one word.

constexpr int route_bits = 2;
constexpr int life_bits = 31;

constexpr std::uint64_t packed(copy_route route, const link_generations& in) noexcept {
  constexpr auto mask = (std::uint64_t{1} << life_bits) - 1;
  return (in.from & mask) << (route_bits + life_bits) | (in.to & mask) << route_bits |
         static_cast<std::uint64_t>(route);
}

constexpr copy_route route_in(std::uint64_t word) noexcept {
  return static_cast<copy_route>(word & ((1u << route_bits) - 1));
}

static_assert(static_cast<unsigned>(copy_route::staged) < (1u << route_bits));
static_assert(packed(copy_route::pending, {}) == 0);

} // namespace

// -- routes

/// A process that has ended may still write for some milliseconds. So it must not write to memory
/// of other devices, which remain in use.
link_ends topology_core::first_choice(const link_ends& x) const noexcept {
  return link_of(x, lane_at(x.from).is_remote() ? copy_route::pull : copy_route::push);
}

/// Under mutex_. Computes all routes anew.
void topology_core::note_routes() noexcept {
  for (std::size_t from = 0; from < size(); ++from)
    for (std::size_t to = 0; to < size(); ++to) {
      if (from == to)
        continue;
      const link_ends x{from, to};
      auto route = copy_route::pending;
      caf::error reason;
      if (is_connected(from) && is_connected(to)) {
        auto access = first_choice(x) == x ? access_of(x, reason) : peer_access::none;
        // A link that failed is not trusted in the other direction, either.
        auto back = access == peer_access::none ? access_of({to, from}, reason) : peer_access::none;
        if (access == peer_access::enabled)
          route = copy_route::push;
        else if (back == peer_access::enabled)
          route = copy_route::pull;
        else if (access != peer_access::pending && back != peer_access::pending)
          route = copy_route::staged;
      }
      const auto in = generations_of(x);
      auto& word = routes_[from * size() + to];
      // A device with the same memory in another process is reached as before, also until it has
      // connected again: copies that were admitted go on.
      const auto before = word.load(std::memory_order_relaxed);
      if (route == copy_route::pending && before == packed(route_in(before), in))
        continue;
      word.store(packed(route, in), std::memory_order_release);
    }
}

copy_route topology_core::route_of(const link_ends& x, const link_generations& in) const noexcept {
  auto word = routes_[x.from * size() + x.to].load(std::memory_order_acquire);
  auto route = route_in(word);
  return word == packed(route, in) ? route : copy_route::pending;
}

caf::error topology_core::why_closed() const {
  if (!is_closed_.load(std::memory_order_relaxed))
    return {};
  std::lock_guard lock{mutex_};
  return closed_;
}

caf::error topology_core::why_not(const link_ends& x) const {
  {
    std::lock_guard lock{mutex_};
    if (auto& out = edge_at(x).out)
      return out;
  }
  if (auto why = why_not_ready(x))
    return why;
  const auto to = std::to_string(lane_at(x.to).state().ordinal());
  return make_error({.code = errc::link_failed,
                     .detail = "no peer access to device " + to + " any more",
                     .device = lane_at(x.from).state().ordinal()});
}

void topology_core::fail_link(const link_ends& x, const caf::error& why) noexcept {
  {
    std::lock_guard lock{mutex_};
    if (edge_at(x).out)
      return;
  }
  take_out(x, link_check::wrong, why);
}

// -- counts

void topology_core::count(std::optional<copy_route> route, std::size_t copies,
                          std::size_t bytes) noexcept {
  auto& x = !route ? local_ : *route == copy_route::staged ? staged_ : direct_;
  x.copies.fetch_add(copies, std::memory_order_relaxed);
  x.bytes.fetch_add(bytes, std::memory_order_relaxed);
}

topology_stats topology_core::stats() const noexcept {
  topology_stats result;
  result.local_copies = local_.copies.load(std::memory_order_relaxed);
  result.local_bytes = local_.bytes.load(std::memory_order_relaxed);
  result.direct_copies = direct_.copies.load(std::memory_order_relaxed);
  result.direct_bytes = direct_.bytes.load(std::memory_order_relaxed);
  result.staged_copies = staged_.copies.load(std::memory_order_relaxed);
  result.staged_bytes = staged_.bytes.load(std::memory_order_relaxed);
  result.links_failed = links_failed_.load(std::memory_order_relaxed);
  return result;
}

// -- requests

std::optional<std::size_t> topology_core::index_of(const any_gpu_ref& x) const noexcept {
  auto i = indices_.find(x.device());
  if (i == indices_.end() || &x.memory()->home() != &nodes_[i->second].on->state())
    return std::nullopt;
  return i->second;
}

caf::error topology_core::check_copy(const char* verb, const any_gpu_ref& target,
                                     const any_gpu_ref& source) const {
  for (auto* ref : {&target, &source}) {
    if (!*ref)
      return no_memory(verb, *ref);
    if (!index_of(*ref))
      return refusal(verb, ref->device(), errc::invalid_argument,
                     is_foreign(*ref, lane_at(0).state())
                         ? foreign_handle
                         : "device " + std::to_string(ref->device()) + " is not in the topology");
  }
  return check_shape(verb, target, source);
}

caf::error topology_core::check_copies(const char* verb, std::span<const copy_pair> copies) const {
  for (auto& x : copies)
    if (auto error = check_copy(verb, x.target, x.source))
      return error;
  return check_overlap(verb, copies);
}

copy_route topology_core::route_of(const link_ends& ends, const any_gpu_ref& target,
                                   const any_gpu_ref& source) const noexcept {
  if (ends.from == ends.to)
    return copy_route::pending;
  if (target.memory()->has_no_peers() || source.memory()->has_no_peers())
    return copy_route::staged;
  return route_of(ends, link_generations{source.generation(), target.generation()});
}

std::vector<device_copies_operation::peer_batch>
topology_core::batches_of(std::span<const copy_pair> copies) const {
  std::vector<device_copies_operation::peer_batch> result;
  std::map<std::tuple<link_ends, std::uint64_t, std::uint64_t, copy_route>, std::size_t> known;
  for (auto& x : copies) {
    const link_ends ends{*index_of(x.source), *index_of(x.target)};
    const link_generations in{x.source.generation(), x.target.generation()};
    const auto route = route_of(ends, x.target, x.source);
    auto [i, is_new] = known.try_emplace({ends, in.from, in.to, route}, result.size());
    if (is_new)
      result.push_back({ends, in, route, {}, {}});
    result[i->second].sources.push_back(x.source);
    result[i->second].targets.push_back(x.target);
  }
  return result;
}

/// Starts the request whose operations `make` makes.
template <class Make>
topology_core::copies_answer topology_core::start(const request_options& options, Make make) {
  copies_answer op = make();
  op->deadline =
      from_now(options.deadline.count() != 0 ? options.deadline : config_.limits.deadline);
  if (options.max_retries != 0)
    return start_retried(runtime_, op, options, std::move(make));
  runtime_->start(op, options);
  return op;
}

/// Answers a request without copies at once: it has no lane and no place in the order.
topology_core::copies_answer topology_core::copy_nothing(const char* verb,
                                                         const request_options& options) {
  auto result = std::make_shared<operation_of<nothing>>(verb, 0);
  auto why = why_closed();
  if (!why && options.deadline.count() < 0)
    why = result->late();
  result->answer(std::move(why));
  return result;
}

topology_core::copies_answer topology_core::start_copies(const char* verb,
                                                         std::span<const copy_pair> copies,
                                                         const request_options& options) {
  if (auto error = check_copies(verb, copies))
    return refuse(verb, std::move(error));
  if (copies.empty())
    return copy_nothing(verb, options);
  return start(options, [verb, self = shared_from_this(),
                         all = std::vector<copy_pair>(copies.begin(), copies.end())] {
    return std::make_shared<device_copies_operation>(verb, self, self->batches_of(all));
  });
}

topology_core::copies_answer topology_core::copy(const any_gpu_ref& target,
                                                 const any_gpu_ref& source,
                                                 const request_options& options) {
  if (auto error = check_copy("copy", target, source))
    return refuse("copy", std::move(error));
  const copy_pair one{target, source};
  if (route_of({*index_of(source), *index_of(target)}, target, source) == copy_route::pending)
    return start_copies("copy", {&one, 1}, options); // checks for overlap, too
  return start(options, [self = shared_from_this(), one] { return self->operation_of_copy(one); });
}

/// Returns an operation that copies between two devices, whose buffers cannot overlap.
topology_core::copies_answer topology_core::operation_of_copy(const copy_pair& x) {
  const link_ends ends{*index_of(x.source), *index_of(x.target)};
  const link_generations in{x.source.generation(), x.target.generation()};
  const auto route = route_of(ends, x.target, x.source);
  if (route != copy_route::push && route != copy_route::pull)
    return std::make_shared<device_copies_operation>("copy", shared_from_this(),
                                                     batches_of({&x, 1}));
  auto& by = lane_at(link_of(ends, route).from);
  return std::make_shared<link_copy_operation>(shared_from_this(), ends, in, route, x.target,
                                               x.source, by);
}

topology_core::copies_answer topology_core::copy(const std::vector<copy_pair>& copies,
                                                 const request_options& options) {
  return start_copies("copy_batch", copies, options);
}

topology_core::copies_answer topology_core::replicate(const any_gpu_ref& source,
                                                      const std::vector<any_gpu_ref>& targets,
                                                      const request_options& options) {
  std::vector<copy_pair> copies;
  copies.reserve(targets.size());
  for (auto& x : targets)
    copies.push_back({x, source});
  return start_copies("replicate", copies, options);
}

topology_core::copies_answer topology_core::distribute(const any_gpu_ref& source,
                                                       const std::vector<any_gpu_ref>& targets,
                                                       const request_options& options) {
  constexpr auto verb = "distribute";
  if (!source)
    return refuse(verb, no_memory(verb, source));
  std::vector<copy_pair> copies;
  std::size_t first = 0;
  bool fits = true;
  for (auto& x : targets) {
    if (!x)
      return refuse(verb, no_memory(verb, x));
    auto part = source.slice(first, x.count());
    if (!part) {
      fits = false;
      break;
    }
    copies.push_back({x, std::move(*part)});
    first += x.count();
  }
  if (!fits || first != source.count())
    return refuse(verb, refusal(verb, source.device(), errc::shape_mismatch,
                                "the targets together do not have the source's " +
                                    std::to_string(source.count()) + " elements"));
  return start_copies(verb, copies, options);
}

} // namespace troupe::detail
