#include "worker/parent/remote_device.hpp"

#include "foundation/enum_name.hpp"
#include "foundation/error_text.hpp"
#include "foundation/peer_text.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

namespace troupe {

std::string_view to_string(kept_memory x) noexcept { return detail::enum_name(x); }

} // namespace troupe

namespace troupe::detail {

namespace {

stream_id id_of(stream_view x) noexcept { return reinterpret_cast<stream_id>(x.native); }
graph_id id_of(graph_view x) noexcept { return reinterpret_cast<graph_id>(x.native); }
std::uint64_t address_of(const void* x) noexcept { return reinterpret_cast<std::uint64_t>(x); }
remote_event& event_of(event_view x) noexcept { return *static_cast<remote_event*>(x.native); }

/// Errors of memory and links as CUDA numbers them: cudaErrorECCUncorrectable,
/// cudaErrorNvlinkUncorrectable, cudaErrorContained.
constexpr std::array memory_errors{214, 220, 721};

/// Returns whether memory is trusted after `loss`.
bool is_trusted(const caf::error& loss, kept_memory keeps) noexcept {
  const auto why = failure_of(loss).value_or(failure{});
  if (why.cause != errc::device_fault)
    return keeps != kept_memory::none;
  return keeps == kept_memory::after_fault &&
         std::ranges::count(memory_errors, why.native_code) == 0;
}

/// How many prepared launches are remembered.
constexpr std::size_t most_prepared = 4096;

std::vector<std::byte> wire_bytes(const launch_request& x) {
  wire_writer result;
  result.put(x);
  const auto bytes = result.bytes();
  return {bytes.begin(), bytes.end()};
}

} // namespace

remote_device::remote_device(std::shared_ptr<worker_pool> pool, int ordinal, kept_memory keeps)
    : pool_(std::move(pool)), ordinal_(ordinal), keeps_(keeps),
      slabs_(std::make_shared<device_slabs>(pool_->place_of(ordinal).device, pool_->slabs(),
                                            pool_->keep_freed())) {
  pool_->set_memory_of(ordinal_, slabs_);
}

remote_device::~remote_device() {
  if (link_)
    pool_->release(ordinal_);
}

caf::error remote_device::fail(errc code, std::string detail) const {
  return make_error({.code = code, .detail = std::move(detail), .device = ordinal_});
}

template <class T> caf::expected<T> remote_device::read(caf::expected<wire_reader> reply) const {
  if (!reply)
    return reply.error();
  auto result = reply->get<T>();
  if (!reply->ok())
    return fail(errc::internal, "a worker's reply could not be read");
  return result;
}

void remote_device::set_link(std::shared_ptr<worker_link> x) noexcept {
  std::lock_guard lock{link_mutex_};
  link_.swap(x); // the former one is released without the lock
}

caf::error remote_device::loss() const noexcept {
  std::lock_guard lock{link_mutex_};
  return link_ ? link_->loss() : caf::error{};
}

caf::error remote_device::bind() noexcept {
  auto link = pool_->provide(ordinal_, stop_.get_token());
  if (!link)
    return link.error();
  if (link_ != *link) {
    is_trusted_ = is_trusted_ && link_ && is_trusted(link_->loss(), keeps_);
    set_link(std::move(*link));
    tells_loss_ = false;
    forget_prepared();
  }
  const auto bound = read<bound_device>(link_->ask(command::bind));
  if (!bound)
    return bound.error();
  properties_ = bound->properties;
  // A graph writes to pinned memory of this process, which only workers of this host map.
  records_graphs_.store(bound->records_graphs && pool_->place_of(ordinal_).host.empty());
  slabs_->set_device_bytes(properties_.total_bytes);
  for (auto* name : {&properties_.name, &properties_.pci_id})
    *name = peer_text(*name, most_peer_name);
  properties_.worker_pid = link_->pid();
  if (!std::exchange(tells_loss_, true))
    link_->on_loss([tell = tell_loss_](const caf::error& why) {
      if (tell)
        tell(why);
    });
  return {};
}

caf::expected<memory_info> remote_device::memory() noexcept {
  auto result = read<memory_info>(link_->ask(command::memory));
  if (result)
    result->free_bytes = std::min(result->free_bytes + slabs_->free_bytes(), result->total_bytes);
  return result;
}

caf::error remote_device::open_memory() noexcept {
  slabs_->begin(link_); // drops the memory of a former worker, unless this one has taken it over
  is_trusted_ = true;
  return link_->run(command::open_memory);
}

bool remote_device::may_keep_memory(const caf::error& loss) const noexcept {
  return slabs_->are_possible() && is_trusted(loss, keeps_);
}

/// Until then the process may write to memory of any device of this host.
std::function<bool()> remote_device::lost_work() const noexcept {
  if (link_->slab_granularity() == 0) // it maps no memory of other devices
    return backend_device::lost_work();
  return [of = link_] { return of->is_reaped() && of->program_ranks().is_none(); };
}

caf::error remote_device::take_over() noexcept {
  if (!slabs_->are_possible())
    return fail(errc::not_supported, "memory of its worker is not kept");
  if (!is_trusted_)
    return fail(errc::not_supported, "its memory is not trusted any more");
  return slabs_->move_to(link_);
}

caf::error remote_device::move_to_spare() noexcept {
  const auto spare = pool_->spare(ordinal_);
  if (!spare)
    return fail(errc::unavailable, "the device has no spare");
  if (auto error = slabs_->prepare(spare))
    return error;
  const auto former = link_;
  set_link(spare); // first: the end of the former worker is no loss
  if (auto error = pool_->move_to_spare(ordinal_, *spare)) {
    set_link(former); // the caller looks whether that was lost meanwhile
    return error;
  }
  forget_prepared();
  tells_loss_ = false; // `bind` opens the device there; the memory is trusted as before
  return {};
}

caf::error remote_device::close_memory() noexcept {
  forget_prepared();
  auto error = slabs_->clear();
  keep_first(error, link_->run(command::close_memory));
  return error;
}

caf::expected<void*> remote_device::address(caf::expected<wire_reader> reply) const {
  auto result = read<void*>(std::move(reply));
  if (result && *result == nullptr)
    return fail(errc::internal, "a worker's reply could not be read");
  return result;
}

caf::expected<void*> remote_device::allocate(std::size_t size_bytes, stream_view stream) noexcept {
  if (slabs_->are_possible())
    return slabs_->allocate(size_bytes);
  return address(link_->ask(command::allocate, allocate_args{size_bytes, id_of(stream)}));
}

caf::error remote_device::deallocate(void* memory, stream_view stream) noexcept {
  if (slabs_->deallocate(memory))
    return {};
  return link_->run(command::deallocate, deallocate_args{address_of(memory), id_of(stream)});
}

caf::expected<void*> remote_device::allocate_pinned(std::size_t size_bytes) noexcept {
  auto memory = pool_->segments().create(size_bytes);
  if (!memory)
    return memory.error();
  return static_cast<void*>(*memory);
}

std::function<caf::error(void*)> remote_device::pinned_deleter() noexcept {
  return [segments = pool_->shared()](void* memory) { return segments->remove(memory); };
}

caf::expected<stream_view> remote_device::create_stream() noexcept {
  auto stream = address(link_->ask(command::create_stream));
  if (!stream)
    return stream.error();
  return stream_view{*stream};
}

caf::error remote_device::destroy_stream(stream_view stream) noexcept {
  return link_->run(command::destroy_stream, id_of(stream));
}

caf::expected<event_view> remote_device::create_event() noexcept {
  const auto number = link_->take_event();
  if (!number)
    return fail(errc::overloaded, "a worker has no more events");
  remote_event* event = nullptr;
  if (free_events_.empty()) {
    event = &events_.emplace_back();
  } else {
    event = free_events_.back();
    free_events_.pop_back();
  }
  *event = {link_, *number, 0};
  return event_view{event};
}

caf::error remote_device::destroy_event(event_view event) noexcept {
  auto& x = event_of(event);
  x.link->give_back_event(x.number);
  x.link.reset();
  free_events_.push_back(&x);
  return {};
}

caf::error remote_device::record(event_view event, stream_view stream) noexcept {
  auto& x = event_of(event);
  const auto number = x.link->next_record(x.number);
  if (auto error = x.link->tell(command::record, record_args{x.number, number, id_of(stream)}))
    return error;
  x.record = number;
  return {};
}

caf::error remote_device::wait(stream_view stream, event_view event) noexcept {
  const auto& x = event_of(event);
  if (x.record == 0)
    return {};
  if (x.link != link_)
    return wait_word(stream, &x.link->done_word(x.number), x.record);
  if (link_->is_done(x.number, x.record))
    return {};
  return link_->run(command::wait_event, wait_event_args{x.number, id_of(stream)});
}

event_word remote_device::word_of(event_view event) const noexcept {
  const auto& x = event_of(event);
  if (x.record == 0)
    return {};
  return {{x.link, &x.link->done_word(x.number)}, x.record};
}

caf::error remote_device::wait_word(stream_view stream, const std::atomic<std::uint64_t>* word,
                                    std::uint64_t value) noexcept {
  auto there = [&] { return word->load(std::memory_order_acquire) >= value; };
  if (there())
    return {};
  auto place = pool_->segments().place_of(word, sizeof *word, *link_);
  if (!place)
    return there() ? caf::error{} : place.error(); // its worker may be gone meanwhile
  return link_->run(command::wait_word, wait_word_args{*place, value, id_of(stream)});
}

caf::expected<bool> remote_device::query(event_view event) noexcept {
  const auto& x = event_of(event);
  if (x.record == 0)
    return true;
  const auto done = x.link->is_done(x.number, x.record);
  if (!x.link->lost())
    return done;
  if (x.link->was_done(x.number, x.record)) // a loss marks all words as done
    return true;
  return x.link->loss();
}

caf::error remote_device::synchronize(event_view event) noexcept {
  for (;;) {
    auto done = query(event);
    if (!done)
      return done.error();
    if (*done)
      return {};
    std::this_thread::sleep_for(
        std::chrono::microseconds{20}); // the worker polls, and signals nothing
  }
}

caf::error remote_device::copy(void* target, const void* source, std::size_t size_bytes,
                               copy_direction direction, stream_view stream) noexcept {
  copy_args what;
  what.direction = direction;
  what.size_bytes = size_bytes;
  what.stream = id_of(stream);
  what.target = address_of(target);
  what.source = address_of(source);
  if (direction != copy_direction::device_to_device && size_bytes > 0) {
    const auto* host = direction == copy_direction::host_to_device ? source : target;
    auto place = pool_->segments().place_of(host, size_bytes, *link_);
    if (!place)
      return place.error();
    what.host = *place;
  }
  return link_->run(command::copy, what, {}, link_->limit_of_copy(size_bytes));
}

caf::error remote_device::fill(void* target, std::span<const std::byte> pattern, std::size_t count,
                               stream_view stream) noexcept {
  fill_args what{address_of(target), count, pattern.size(), {}, id_of(stream)};
  if (pattern.size() > sizeof what.pattern)
    return fail(errc::invalid_argument, "a pattern of more than 16 bytes");
  std::copy(pattern.begin(), pattern.end(), what.pattern);
  return link_->run(command::fill, what);
}

caf::expected<graph_view>
remote_device::record_graph(stream_view stream,
                            const std::function<caf::error()>& enqueue) noexcept {
  const auto commands = link_->collect(enqueue);
  if (!commands)
    return commands.error();
  const graph_args what{++last_graph_, id_of(stream)};
  if (auto error = link_->run(command::record_graph, what, commands->bytes()))
    return error;
  return graph_view{reinterpret_cast<void*>(what.graph)};
}

caf::error remote_device::launch_graph(graph_view graph, stream_view stream) noexcept {
  return link_->run(command::launch_graph, graph_args{id_of(graph), id_of(stream)});
}

/// Does not wait for the worker. If another worker has the device by now, it ignores the number.
caf::error remote_device::drop_graph(graph_view graph) noexcept {
  const auto id = id_of(graph);
  link_->request(control::drop_graph, bytes_of(id), std::nullopt, [](const worker_reply&) {});
  return {};
}

caf::error remote_device::is_elsewhere() const {
  return fail(errc::not_supported, "the device lives in another process");
}

caf::error remote_device::check_near(int peer) const {
  const bool is_near = slabs_->are_possible() && peer >= 0 && peer < pool_->device_count() &&
                       pool_->place_of(peer).host == pool_->place_of(ordinal_).host;
  return is_near ? caf::error{} : is_elsewhere();
}

caf::expected<bool> remote_device::can_access_peer(int peer) noexcept {
  if (check_near(peer))
    return false;
  return read<bool>(
      link_->ask(command::can_access_peer, std::int32_t{pool_->place_of(peer).device}));
}

/// A worker that is not there yet, or is lost, is admitted with the next communicator: those that
/// exist have no rank in the worker that will be there. Copies map what they need.
caf::error remote_device::admit_peer(int peer) noexcept {
  if (auto error = check_near(peer))
    return error;
  const auto link = pool_->current(peer);
  if (!link)
    return {};
  auto error = slabs_->admit(link);
  return link->lost() ? caf::error{} : error;
}

caf::error remote_device::copy_peer(void* target, int target_device, const void* source,
                                    int source_device, std::size_t size_bytes,
                                    stream_view stream) noexcept {
  if (target_device != ordinal_)
    return fail(errc::not_supported, "a worker writes to no other device");
  if (auto error = check_near(source_device))
    return error;
  const auto kept = pool_->slabs()->reach(source, size_bytes, *link_);
  if (!kept)
    return kept.error();
  return copy(target, source, size_bytes, copy_direction::device_to_device, stream);
}

caf::expected<std::vector<shared_place>>
remote_device::place_of_verdict(const registered_call& x) noexcept {
  std::vector<shared_place> result;
  if (x.verdict == nullptr)
    return result;
  if (!pool_->place_of(ordinal_).host.empty())
    return fail(errc::not_supported, "a launch with a verdict on another host");
  const auto place = pool_->segments().place_of(x.verdict, sizeof(std::int32_t), *link_);
  if (!place)
    return place.error();
  result.push_back(*place);
  return result;
}

caf::error remote_device::send_launch(command what, const registered_call& call, stream_view stream,
                                      std::vector<shared_place> verdict) noexcept {
  const launch_request request{std::string{call.name},
                               {call.reads.begin(), call.reads.end()},
                               {call.writes.begin(), call.writes.end()},
                               {call.arguments.begin(), call.arguments.end()},
                               id_of(stream),
                               std::move(verdict)};
  auto reply = link_->ask_bytes(what, wire_bytes(request));
  return reply ? caf::error{} : reply.error();
}

caf::error remote_device::launch_registered(const registered_call& what,
                                            stream_view stream) noexcept {
  auto verdict = place_of_verdict(what);
  if (!verdict)
    return verdict.error();
  return send_launch(command::launch, what, stream, std::move(*verdict));
}

void remote_device::forget_prepared() noexcept {
  prepared_.clear();
  latest_prepared_ = {};
}

/// Asks the worker only for what it has not prepared yet. The spare prepares it, too.
caf::error remote_device::prepare_registered(const registered_call& what,
                                             stream_view stream) noexcept {
  if (const auto verdict = place_of_verdict(what); !verdict) // else the launch would fail at it
    return verdict.error();
  if (prepares(latest_prepared_, what)) // often the same for many launches
    return {};
  auto latest = as_prepared(what);
  auto key = wire_bytes(latest);
  if (prepared_.contains(key)) {
    latest_prepared_ = std::move(latest);
    return {};
  }
  if (auto error = send_launch(command::prepare_launch, what, stream, {}))
    return error;
  if (prepared_.size() == most_prepared)
    prepared_.clear();
  // The lane does not wait for room in the ring of a spare that hangs.
  if (const auto spare = pool_->spare(ordinal_))
    static_cast<void>(spare->try_tell_bytes(command::prepare_launch, key));
  pool_->prepared(ordinal_).add(key);
  prepared_.insert(std::move(key));
  return {};
}

// -- communicators

/// Does nothing: the worker connects a communicator when it builds it.
caf::error remote_communicator::connect(stream_view, connect_scope) noexcept {
  return link_->loss();
}

enqueue_args remote_communicator::arguments_of(std::span<const collective_call> calls,
                                               stream_view stream) const noexcept {
  return {key_, id_of(stream), static_cast<std::uint32_t>(calls.size())};
}

std::span<const std::byte>
remote_communicator::bytes_of_calls(std::span<const collective_call> calls) {
  calls_.clear();
  for (auto& x : calls)
    calls_.put(x);
  return calls_.bytes();
}

caf::error remote_communicator::enqueue(std::span<const collective_call> calls, stream_view stream,
                                        step_position) noexcept {
  return link_->run(command::enqueue, arguments_of(calls, stream), bytes_of_calls(calls));
}

void remote_communicator::on_loss(std::function<void()> f) noexcept {
  link_->forget(loss_listener_);
  loss_listener_ = link_->on_loss([f = std::move(f)](const caf::error&) { f(); });
}

caf::error remote_communicator::hand_over(std::span<const std::byte> what) noexcept {
  wire_writer message;
  message.put(key_);
  message.put_bytes(what);
  if (!handed_over_.exchange(true))
    link_->program_ranks().begin();
  return link_->send(control::hand_over, message.bytes());
}

caf::error remote_direct_rank::enqueue(std::span<const collective_call> calls, stream_view stream,
                                       step_position where) noexcept {
  if (where.place == 0)
    return remote_communicator::enqueue(calls, stream, {});
  const auto reached = segments_->place_of(where.reached, sizeof *where.reached, link());
  if (!reached) // how far the step comes will not be known
    return remote_communicator::enqueue(calls, stream, {});
  return link().run(command::enqueue_in_step,
                    enqueue_in_step_args{arguments_of(calls, stream), where.place, *reached},
                    bytes_of_calls(calls));
}

caf::error remote_direct_rank::replay(graph_view graph, stream_view stream, backend_device&,
                                      std::uint32_t* reached) noexcept {
  replay_args what{key(), {id_of(graph), id_of(stream)}, {}};
  if (reached != nullptr)
    if (const auto place = segments_->place_of(reached, sizeof *reached, link()))
      what.reached = *place;
  return link().run(command::replay, what);
}

void remote_direct_rank::on_closed() noexcept {
  link().request(control::close, bytes_of(key()), std::nullopt, [](const worker_reply&) {});
}

caf::error remote_communicator::asynchronous_error() noexcept {
  const auto errors = link_->communicator_errors(); // read before the worker is asked
  if (errors == errors_of_others_)
    return link_->loss();
  if (auto error = link_->run(command::asynchronous_error, key_))
    return error;
  errors_of_others_ = errors;
  return {};
}

} // namespace troupe::detail
