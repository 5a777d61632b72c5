#include "topology/device_copies.hpp"

#include "foundation/error_text.hpp"
#include "lane/lane.hpp"
#include "lane/staging.hpp"
#include "operation/use_of.hpp"
#include "topology/topology_core.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace troupe::detail {

namespace {

/// Copies that are enqueued as one group. The launch queue has room for a few such groups.
constexpr std::size_t copies_in_group = 64;
constexpr std::size_t groups_in_stream = 2;

/// The maximum number of chunks in flight through the host.
constexpr std::size_t chunks_on_the_way = 8;
/// Smaller chunks cost more than they save by overlapping.
constexpr std::size_t least_chunk = std::size_t{256} << 10;

caf::error ended(const char* verb, const device_state& device) {
  return refusal(verb, device.ordinal(), errc::unavailable, device_is(device.phase()));
}

bool has_ended(const device_state& device) {
  auto phase = device.phase();
  return phase == device_phase::failed || phase == device_phase::shut_down;
}

/// Merges adjacent and overlapping uses of the same memory into as few as possible.
void merge(std::vector<use>& uses) {
  auto key = [](const use& x) { return std::tuple{x.part, x.writes, x.memory.get(), x.begin}; };
  std::sort(uses.begin(), uses.end(), [&](auto& a, auto& b) { return key(a) < key(b); });
  auto last = uses.begin();
  for (auto i = uses.begin(); i != uses.end(); ++i) {
    if (i == last)
      continue;
    bool touches = i->part == last->part && i->writes == last->writes &&
                   i->memory == last->memory && i->begin <= last->end;
    if (touches)
      last->end = std::max(last->end, i->end);
    else if (++last != i)
      *last = std::move(*i);
  }
  if (!uses.empty())
    uses.erase(last + 1, uses.end());
}

} // namespace

// -- one copy

link_copy_operation::link_copy_operation(std::shared_ptr<topology_core> topology,
                                         const link_ends& ends, const link_generations& in,
                                         copy_route route, const any_gpu_ref& target,
                                         const any_gpu_ref& source, lane& by)
    : peer_copy_operation(target, source, by.state().ordinal()), topology_(std::move(topology)),
      ends_(ends), in_(in), route_(route) {
  parts()[0].on = &by;
}

caf::error link_copy_operation::on_check(locked) const {
  if (has_ended(lender()))
    return ended(verb(), lender());
  return topology_->why_closed();
}

caf::expected<issue_outcome> link_copy_operation::issue(part& p, lane& on) {
  if (topology_->route_of(ends_, in_) != route_)
    return topology_->why_not(link_of(ends_, route_));
  return peer_copy_operation::issue(p, on);
}

void link_copy_operation::on_success() noexcept { topology_->count(route_, 1, size()); }

void link_copy_operation::on_link_failed(const caf::error& why) noexcept {
  topology_->fail_link(link_of(ends_, route_), why);
}

// -- many copies

/// The work of one leg, and its progress. Members that are not atomic belong to the lane of `home`,
/// unless stated otherwise.
struct device_copies_operation::batch_progress {
  struct chunk {
    std::byte* staged = nullptr;
    std::byte* target = nullptr;
    std::size_t size = 0;
    event_view there; ///< recorded when the chunk is in pinned memory
  };

  link_ends ends{};
  link_generations in;
  copy_route route = copy_route::pending;
  int source_device = -1;
  int target_device = -1;
  std::vector<piece> pieces;
  std::size_t bytes = 0;

  /// Has all uses. If there are two parts, it waits for all work before them, and ends last.
  part* home = nullptr;
  part* helper = nullptr;              ///< on the target's lane; null: `home` does it alone
  device_state* other = nullptr;       ///< the one that is not `home`'s; null: there is none
  bool lent = false;                   ///< `lender` has lent its memory
  std::atomic<bool> kept_there{false}; ///< the helper keeps its device's memory

  // For the lane that copies piece by piece.
  std::size_t next = 0;
  std::deque<event_view> groups;

  // For copies through the host.
  std::size_t chunk_bytes = 0;
  std::size_t at = 0; ///< the current piece; `offset` bytes of it are in flight
  std::size_t offset = 0;
  std::uint64_t given_back = 0;
  caf::error error;
  std::array<chunk, chunks_on_the_way> chunks;
  std::atomic<std::uint64_t> sent{0};     ///< chunks that the helper may wait for
  std::atomic<bool> all_sent{false};      ///< or no more chunks come
  std::atomic<std::uint64_t> received{0}; ///< chunks that are uploaded
  // For the helper's lane.
  std::uint64_t taken = 0;
  std::deque<event_view> uploads;

  bool local() const noexcept { return ends.from == ends.to; }
  /// Returns the device whose memory is used without a part on its lane.
  device_state* lender() const noexcept { return helper == nullptr ? other : nullptr; }
  chunk& chunk_at(std::uint64_t number) noexcept { return chunks[number % chunks.size()]; }
};

namespace {

std::size_t parts_of(const std::vector<device_copies_operation::peer_batch>& batches) {
  std::size_t result = 0;
  for (auto& x : batches)
    result += x.on_both() ? 2 : 1;
  return result;
}

} // namespace

device_copies_operation::device_copies_operation(const char* verb,
                                                 std::shared_ptr<topology_core> topology,
                                                 std::vector<peer_batch> batches)
    : operation_of(verb, parts_of(batches)), topology_(std::move(topology)) {
  std::vector<use> uses;
  std::size_t elements = 0;
  const auto first_type = batches.front().sources.front().type();
  const bool alike = std::all_of(batches.begin(), batches.end(), [&](auto& x) {
    return std::all_of(x.sources.begin(), x.sources.end(),
                       [&](auto& y) { return y.type() == first_type; });
  });
  const auto type = alike ? first_type : dtype::uint8; // copies of different types count bytes
  for (auto& x : batches) {
    auto first = progress_of_parts_.size();
    auto& made = *progress_.emplace_back(std::make_unique<batch_progress>());
    made.ends = x.ends;
    made.in = x.in;
    made.route = x.route;
    made.source_device = x.sources.front().device();
    made.target_device = x.targets.front().device();
    for (std::size_t i = 0; i < x.sources.size(); ++i) {
      auto size = x.sources[i].size_bytes();
      made.pieces.push_back({address_of(x.targets[i]), address_of(x.sources[i]), size});
      made.bytes += size;
      uses.push_back(use_of(x.sources[i], true, false, first));
      uses.push_back(use_of(x.targets[i], false, true, first));
      elements += size / size_of(type);
    }
    add_parts(made, first);
    if (x.on_both())
      progress_of_parts_.emplace_back(&made, true);
    for (auto* ref : {&x.sources.front(), &x.targets.front()}) {
      auto device = ref->memory()->home().shared_from_this();
      if (std::find(devices_.begin(), devices_.end(), device) == devices_.end())
        devices_.push_back(std::move(device));
    }
  }
  merge(uses);
  expect_uses(uses.size());
  for (auto& x : uses)
    add_use(std::move(x));
  of_elements(elements, type);
}

device_copies_operation::~device_copies_operation() = default;

void device_copies_operation::add_parts(batch_progress& x, std::size_t first) {
  auto& home = parts()[first];
  x.home = &home;
  progress_of_parts_.emplace_back(&x, false);
  home.on = &topology_->lane_at(x.ends.from);
  if (x.local())
    return;
  x.other = &topology_->lane_at(x.ends.to).state();
  if (x.route == copy_route::push || x.route == copy_route::pull) {
    auto by = link_of(x.ends, x.route);
    home.on = &topology_->lane_at(by.from);
    x.other = &topology_->lane_at(by.to).state();
    home.stream = stream_kind::peer;
    home.peer = topology_->lane_at(by.to).state().ordinal();
    return;
  }
  home.stream = stream_kind::download;
  x.helper = &parts()[first + 1];
  x.helper->on = &topology_->lane_at(x.ends.to);
  x.helper->stream = stream_kind::upload;
}

device_copies_operation::batch_progress&
device_copies_operation::progress_of(const part& p) const noexcept {
  return *progress_of_parts_[p.index].first;
}

caf::error device_copies_operation::on_check(locked) const {
  for (auto& x : devices_)
    if (has_ended(*x))
      return ended(verb(), *x);
  return topology_->why_closed();
}

void device_copies_operation::on_part_over(part& p) noexcept {
  if (auto& x = progress_of(p); x.lent)
    x.lender()->end_loan();
}

bool device_copies_operation::borrows_from(int device) const noexcept {
  return std::any_of(devices_.begin(), devices_.end(),
                     [&](const auto& x) { return x->ordinal() == device; });
}

const void* device_copies_operation::waits_for(locked) const {
  for (auto& x : progress_)
    if (!x->local() && x->route == copy_route::pending &&
        topology_->route_of(x->ends, x->in) == copy_route::pending)
      return topology_.get();
  return nullptr;
}

void device_copies_operation::on_submit(locked) {
  for (auto& x : progress_) {
    if (auto* from = x->lender()) {
      from->lend();
      x->lent = true;
    }
    if (x->local() || x->route != copy_route::pending)
      continue;
    x->route = topology_->route_of(x->ends, x->in);
    if (x->route == copy_route::pending) // pending again: a device is in another generation
      x->route = copy_route::staged;
  }
}

caf::expected<issue_outcome> device_copies_operation::issue(part& p, lane& on) {
  auto& x = progress_of(p);
  if (x.bytes == 0)
    return issue_outcome::finished;
  return proceed(p, on);
}

caf::expected<issue_outcome> device_copies_operation::proceed(part& p, lane& on) {
  auto& x = progress_of(p);
  bool pushed = x.route == copy_route::push;
  if (x.helper == nullptr)
    return copy_pieces(x, p, on);
  if (&p == x.helper)
    return pushed ? keep_memory(x, p, on) : receive(x, p, on);
  return pushed ? write_there(x, p, on) : send(x, on);
}

/// Copies once the helper is issued: from then on a reset of the other device waits for it.
caf::expected<issue_outcome> device_copies_operation::write_there(batch_progress& x, part& p,
                                                                  lane& on) {
  if (x.kept_there.load())
    return copy_pieces(x, p, on);
  return failed() || lost_a_part() ? issue_outcome::enqueued : issue_outcome::continues;
}

caf::expected<issue_outcome> device_copies_operation::keep_memory(batch_progress& x, part& p,
                                                                  lane& on) {
  if (!x.kept_there.exchange(true))
    x.home->on->wake();
  if (on.must_await(*x.home))
    return issue_outcome::continues;
  if (auto error = on.wait_for(*x.home, on.stream(p)))
    return error;
  return issue_outcome::enqueued;
}

caf::expected<issue_outcome> device_copies_operation::copy_pieces(batch_progress& x, part& p,
                                                                  lane& on) {
  while (true) {
    while (!x.groups.empty()) {
      auto done = on.device().query(x.groups.front());
      if (!done)
        return on_failed_work(p, done.error());
      if (!*done)
        break;
      on.retire(x.groups.front());
      x.groups.pop_front();
    }
    if (x.next == x.pieces.size() || failed())
      return issue_outcome::enqueued;
    if (x.groups.size() == groups_in_stream)
      return issue_outcome::continues;
    if (!x.local() && topology_->route_of(x.ends, x.in) != x.route)
      return topology_->why_not(link_of(x.ends, x.route));
    auto end = std::min(x.next + copies_in_group, x.pieces.size());
    if (auto error =
            copy_group(x, std::span{x.pieces}.subspan(x.next, end - x.next), on, on.stream(p)))
      return on_failed_work(p, error);
    x.next = end;
    if (end == x.pieces.size())
      return issue_outcome::enqueued;
    auto group = on.mark(on.stream(p));
    if (!group)
      return group.error();
    x.groups.push_back(*group);
  }
}

caf::error device_copies_operation::copy_group(const batch_progress& x,
                                               std::span<const piece> group, lane& on,
                                               stream_view stream) const {
  std::vector<peer_copy> small;
  for (auto& what : group) {
    caf::error error;
    if (what.size == 0)
      continue;
    if (x.local())
      error = on.device().copy(what.target, what.source, what.size,
                               copy_direction::device_to_device, stream);
    else if (what.size <= lane::small_copy_bytes && on.device().prefers_copy_peers())
      small.push_back({what.target, x.target_device, what.source, x.source_device, what.size});
    else
      error = on.device().copy_peer(what.target, x.target_device, what.source, x.source_device,
                                    what.size, stream);
    if (error)
      return error;
  }
  if (small.size() > 1 && !on.device().copy_peers(small, stream))
    return {};
  for (auto& what : small) // one by one: `copy_peer` tells which one is wrong
    if (auto error = on.device().copy_peer(what.target, what.target_device, what.source,
                                           what.source_device, what.size_bytes, stream))
      return error;
  return {};
}

/// Returns whether the next piece may be issued (INV-2). `life`: the generation of `on`'s device.
bool device_copies_operation::may_go_on(std::uint64_t life, const lane& on) const noexcept {
  return !failed() && !lost_a_part() && on.state().live_generation() == life;
}

/// Downloads chunks, or (`copy_route::pull`) tells the helper that it may begin. Then waits for the
/// helper, which alone knows when all bytes are there.
caf::expected<issue_outcome> device_copies_operation::send(batch_progress& x, lane& on) {
  if (!x.all_sent.load(std::memory_order_relaxed)) {
    auto before = x.sent.load(std::memory_order_relaxed);
    if (auto error = download_chunks(x, on))
      x.error = std::move(error);
    bool more = x.at < x.pieces.size() && !x.error && !failed() && !lost_a_part();
    if (!more)
      x.all_sent.store(true);
    if (!more || x.sent.load(std::memory_order_relaxed) != before)
      x.helper->on->wake();
    if (more)
      return issue_outcome::continues;
  }
  if (on.must_await(*x.helper))
    return issue_outcome::continues;
  auto error = on.wait_for(*x.helper, on.stream(x.home->stream));
  if (x.error)
    return x.error;
  if (error)
    return error;
  return issue_outcome::enqueued;
}

caf::error device_copies_operation::download_chunks(batch_progress& x, lane& on) {
  auto& ring = on.download_ring();
  auto stream = on.stream(stream_kind::download);
  auto publish = [&](batch_progress::chunk& c) -> caf::error {
    auto event = on.mark(stream);
    if (!event)
      return event.error();
    c.there = *event;
    x.sent.fetch_add(1);
    return {};
  };
  if (x.route == copy_route::pull) {
    x.at = x.pieces.size();
    return publish(x.chunks.front());
  }
  if (x.chunk_bytes == 0)
    x.chunk_bytes =
        std::min(ring.piece_limit(), std::max(least_chunk, x.bytes / chunks_on_the_way));
  for (auto through = x.received.load(); x.given_back < through; ++x.given_back) {
    auto& c = x.chunk_at(x.given_back);
    on.retire(std::exchange(c.there, {}));
    ring.give_back(c.staged);
  }
  while (x.at < x.pieces.size() && may_go_on(x.in.from, on)) {
    auto sent = x.sent.load(std::memory_order_relaxed);
    auto& from = x.pieces[x.at];
    auto size = std::min(x.chunk_bytes, from.size - x.offset);
    if (size == 0) {
      ++x.at;
      continue;
    }
    if (sent - x.given_back == x.chunks.size())
      return {};
    auto staged = ring.take(size);
    if (!staged)
      return staged.error();
    if (*staged == nullptr)
      return {};
    auto& c = x.chunk_at(sent);
    c = {*staged, from.target + x.offset, size, {}};
    auto error = on.device().copy(c.staged, from.source + x.offset, size,
                                  copy_direction::device_to_host, stream);
    if (!error)
      error = publish(c);
    if (error) {
      ring.give_back(c.staged); // if the device is there, a later use comes behind it in the stream
      return error;
    }
    x.offset += size;
    if (x.offset == from.size) {
      ++x.at;
      x.offset = 0;
    }
  }
  return {};
}

/// Uploads chunks, or reads from the other device, behind the work in the stream of the home part.
caf::expected<issue_outcome> device_copies_operation::receive(batch_progress& x, part& p,
                                                              lane& on) {
  bool last = x.all_sent.load() || failed() || (lost_a_part() && !on.must_await(*x.home));
  if (x.route == copy_route::pull)
    return read_there(x, p, on, last);
  auto error = count_uploaded(x, on);
  if (!error && may_go_on(x.in.to, on))
    error = upload_chunks(x, on);
  if (error)
    return error;
  bool ends_early = failed() || lost_a_part();
  if (!last || (x.taken != x.sent.load() && !ends_early))
    return issue_outcome::continues;
  x.home->on->wake(); // it may wait for chunks that will not be uploaded
  return x.taken == 0 ? issue_outcome::finished : issue_outcome::enqueued;
}

caf::expected<issue_outcome> device_copies_operation::read_there(batch_progress& x, part& p,
                                                                 lane& on, bool last) {
  if (x.taken == 0) {
    if (x.sent.load() == 0 || !may_go_on(x.in.to, on))
      return last ? issue_outcome::finished : issue_outcome::continues;
    if (auto error = on.device().wait(on.stream(p), x.chunks.front().there))
      return error;
    ++x.taken;
  }
  return copy_pieces(x, p, on);
}

caf::error device_copies_operation::count_uploaded(batch_progress& x, lane& on) {
  auto before = x.received.load(std::memory_order_relaxed);
  while (!x.uploads.empty()) {
    auto done = on.device().query(x.uploads.front());
    if (!done)
      return done.error();
    if (!*done)
      break;
    on.retire(x.uploads.front());
    x.uploads.pop_front();
    x.received.fetch_add(1);
  }
  if (x.received.load(std::memory_order_relaxed) != before)
    x.home->on->wake();
  return {};
}

caf::error device_copies_operation::upload_chunks(batch_progress& x, lane& on) {
  auto stream = on.stream(stream_kind::upload);
  for (auto sent = x.sent.load(); x.taken < sent; ++x.taken) {
    auto& c = x.chunk_at(x.taken);
    if (auto error = on.device().wait(stream, c.there))
      return error;
    if (auto error =
            on.device().copy(c.target, c.staged, c.size, copy_direction::host_to_device, stream))
      return error;
    auto event = on.mark(stream);
    if (!event)
      return event.error();
    x.uploads.push_back(*event);
  }
  return {};
}

void device_copies_operation::on_lost_part(part&, const caf::error&) noexcept {
  lane::wake(parts());
}

void device_copies_operation::on_part_done(part& p) noexcept {
  auto& x = progress_of(p);
  auto& on = *p.on;
  auto retire_all = [&](std::deque<event_view>& events) {
    for (auto event : events)
      on.retire(event);
    events.clear();
  };
  if (&p == x.helper) {
    retire_all(x.uploads);
    if (x.route == copy_route::pull)
      retire_all(x.groups);
    return;
  }
  if (x.helper == nullptr || x.route == copy_route::push)
    return retire_all(x.groups);
  for (auto sent = x.sent.load(); x.given_back < sent; ++x.given_back) {
    auto& c = x.chunk_at(x.given_back);
    on.retire(std::exchange(c.there, {}));
    if (x.route == copy_route::staged)
      on.download_ring().give_back(c.staged);
  }
}

caf::error device_copies_operation::on_failed_work(part& p, caf::error why) noexcept {
  auto& x = progress_of(p);
  if (x.local() || x.route == copy_route::staged)
    return why;
  auto result = as_link_failure(why, x.source_device, x.target_device);
  if (code_of(result) == errc::link_failed)
    topology_->fail_link(link_of(x.ends, x.route), result);
  return result;
}

void device_copies_operation::on_success() noexcept {
  for (auto& x : progress_)
    topology_->count(x->local() ? std::optional<copy_route>{} : x->route, x->pieces.size(),
                     x->bytes);
}

} // namespace troupe::detail
