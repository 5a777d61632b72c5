#include "backend/host/host_device.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>

namespace troupe::detail {

namespace {

constexpr std::size_t alignment = 256;

/// Allocates memory with content that cannot be mistaken for zeros; null if there is none.
void* poisoned_memory(std::size_t size_bytes) noexcept {
  constexpr int poison = 0xA5;
  constexpr auto edge = std::size_t{64} << 10; // only the ends of a large block are written
  if (size_bytes > SIZE_MAX - alignment)
    return nullptr;
  auto* memory = static_cast<std::byte*>(
      std::aligned_alloc(alignment, (size_bytes + alignment - 1) / alignment * alignment));
  if (!memory)
    return nullptr;
  const auto head = std::min(size_bytes, edge);
  const auto tail = std::min(size_bytes - head, edge);
  std::memset(memory, poison, head);
  std::memset(memory + size_bytes - tail, poison, tail);
  return memory;
}

} // namespace

host_machine::host_machine(const host_backend_options& x)
    : devices(std::max(x.devices, 0)), bytes_per_device(x.bytes_per_device),
      opened(static_cast<std::size_t>(devices)) {
  for (const auto& link : x.links)
    links[{link.from, link.to}] = link;
}

host_machine::~host_machine() {
  for (auto* memory : left)
    std::free(memory);
}

host_link host_machine::link(int from, int to) const {
  const auto i = links.find({from, to});
  return i != links.end() ? i->second : host_link{from, to};
}

host_device::host_device(std::shared_ptr<host_machine> machine, int ordinal, bool beside) noexcept
    : machine_(std::move(machine)), ordinal_(ordinal), beside_(beside) {}

host_device::~host_device() {
  for (auto& [native, stream] : streams_)
    closed_streams_.push_back(std::move(stream));
  for (const auto& stream : closed_streams_)
    stream->cancel();
  for (const auto& stream : closed_streams_)
    stream->join();
  std::lock_guard lock{machine_->mutex};
  for (const auto& [memory, size_bytes] : allocations_)
    machine_->left.push_back(memory);
  if (beside_)
    return;
  machine_->opened[static_cast<std::size_t>(ordinal_)] = false;
  std::erase_if(machine_->enabled, [this](const auto& x) { return x.first == ordinal_; });
  std::erase_if(machine_->admitted, [this](const auto& x) { return x.second == ordinal_; });
}

caf::error host_device::bind() noexcept { return {}; }

caf::expected<device_properties> host_device::properties() noexcept {
  device_properties result;
  result.name = "host device " + std::to_string(ordinal_);
  result.total_bytes = machine_->bytes_per_device;
  return result;
}

std::size_t host_device::free_bytes() const {
  const auto total = machine_->bytes_per_device;
  return total - std::min(total, used_bytes_ + machine_->slabs.bytes_on(ordinal_));
}

caf::expected<memory_info> host_device::memory() noexcept {
  return memory_info{free_bytes(), machine_->bytes_per_device};
}

caf::error host_device::open_memory() noexcept {
  if (memory_open_)
    return fail(errc::invalid_argument, "the memory is open already");
  memory_open_ = true;
  return {};
}

caf::error host_device::close_memory() noexcept {
  for (const auto& [memory, size_bytes] : allocations_)
    std::free(memory);
  allocations_.clear();
  used_bytes_ = 0;
  memory_open_ = false;
  return {};
}

caf::expected<void*> host_device::allocate(std::size_t size_bytes, stream_view stream) noexcept {
  if (!stream.native || size_bytes == 0 || !memory_open_)
    return fail(errc::invalid_argument,
                "the stream or the size is missing, or the memory is not open");
  const auto total_bytes = machine_->bytes_per_device;
  const auto left_bytes = free_bytes();
  const auto no_room = [&](const std::string& why) {
    return fail(errc::out_of_memory, std::to_string(size_bytes) + " bytes asked for, " +
                                         std::to_string(left_bytes) + " of " +
                                         std::to_string(total_bytes) + " free" + why);
  };
  if (size_bytes > left_bytes)
    return no_room({});
  auto* memory = poisoned_memory(size_bytes);
  if (!memory)
    return no_room(", but the host has no more");
  allocations_.emplace(memory, size_bytes);
  used_bytes_ += size_bytes;
  return memory;
}

caf::error host_device::deallocate(void* memory, stream_view stream) noexcept {
  const auto i = allocations_.find(memory);
  if (i == allocations_.end())
    return fail(errc::invalid_argument,
                "the memory was not allocated here, or it was freed before");
  if (auto err = enqueue(stream, free_command{memory}))
    return err;
  // Later allocations may use the space at once, as in a stream-ordered pool.
  used_bytes_ -= i->second;
  allocations_.erase(i);
  return {};
}

caf::expected<void*> host_device::allocate_pinned(std::size_t size_bytes) noexcept {
  if (size_bytes == 0)
    return fail(errc::invalid_argument, "no size");
  if (auto* memory = poisoned_memory(size_bytes))
    return memory;
  return fail(errc::out_of_memory, std::to_string(size_bytes) + " bytes of host memory asked for");
}

std::function<caf::error(void*)> host_device::pinned_deleter() noexcept {
  return [](void* memory) {
    std::free(memory);
    return caf::error{};
  };
}

caf::expected<stream_view> host_device::create_stream() noexcept {
  auto stream = std::make_shared<host_stream>(completed_);
  const stream_view result{stream.get()};
  streams_.emplace(result.native, std::move(stream));
  return result;
}

caf::error host_device::destroy_stream(stream_view stream) noexcept {
  const auto i = streams_.find(stream.native);
  if (i == streams_.end())
    return fail(errc::invalid_argument, "the stream is not of this device");
  i->second->close();
  closed_streams_.push_back(std::move(i->second));
  streams_.erase(i);
  std::erase_if(closed_streams_, [](const auto& x) {
    if (!x->finished())
      return false;
    x->join();
    return true;
  });
  return {};
}

caf::expected<event_view> host_device::create_event() noexcept {
  auto event = std::make_unique<host_event>();
  const event_view result{event.get()};
  events_.emplace(result.native, std::move(event));
  return result;
}

caf::error host_device::destroy_event(event_view event) noexcept {
  if (events_.erase(event.native) == 0)
    return fail(errc::invalid_argument, "the event is not of this device");
  return {};
}

caf::error host_device::record(event_view event, stream_view stream) noexcept {
  if (!event.native || !stream.native)
    return fail(errc::invalid_argument, "the event or the stream is missing");
  auto position = static_cast<host_stream*>(stream.native)->record();
  if (!position)
    return std::move(position.error());
  static_cast<host_event*>(event.native)->set(std::move(*position));
  return {};
}

caf::expected<user_event> host_device::record_user(stream_view user) noexcept {
  auto event = std::make_shared<host_event>();
  const event_view result{event.get()};
  if (auto error = record(result, user))
    return error;
  return user_event{result, std::move(event)};
}

caf::error host_device::wait(stream_view stream, event_view event) noexcept {
  if (!event.native || !stream.native)
    return fail(errc::invalid_argument, "the event or the stream is missing");
  auto until = static_cast<host_event*>(event.native)->get();
  if (until.reached())
    return {};
  return enqueue(stream, wait_command{std::move(until)});
}

caf::expected<bool> host_device::query(event_view event) noexcept {
  if (!event.native)
    return fail(errc::invalid_argument, "no event");
  return static_cast<host_event*>(event.native)->get().reached();
}

caf::error host_device::synchronize(event_view event) noexcept {
  if (!event.native)
    return fail(errc::invalid_argument, "no event");
  if (const auto until = static_cast<host_event*>(event.native)->get(); !until.reached())
    until.progress->wait(until.position);
  return {};
}

caf::error host_device::copy(void* target, const void* source, std::size_t size_bytes,
                             copy_direction, stream_view stream) noexcept {
  if (size_bytes > 0 && (!target || !source))
    return fail(errc::invalid_argument, "a buffer is null");
  return enqueue(stream, copy_command{target, source, size_bytes});
}

caf::error host_device::fill(void* target, std::span<const std::byte> pattern, std::size_t count,
                             stream_view stream) noexcept {
  const auto size = pattern.size();
  if (size > 16 || !std::has_single_bit(size) || (count > 0 && !target) ||
      reinterpret_cast<std::uintptr_t>(target) % size != 0)
    return fail(errc::invalid_argument,
                "a pattern of " + std::to_string(size) +
                    " bytes, or a target that is null or not aligned to it");
  fill_command command{target, {}, size, count};
  std::copy(pattern.begin(), pattern.end(), command.pattern.begin());
  return enqueue(stream, command);
}

caf::error host_device::launch_host(stream_view stream, void (*function)(void*),
                                    void* argument) noexcept {
  if (!function)
    return fail(errc::invalid_argument, "no function");
  return enqueue(stream, call_command{function, argument});
}

caf::error host_device::check_peer(int peer) const {
  if (peer < 0 || peer >= machine_->devices)
    return fail(errc::invalid_argument, "no device " + std::to_string(peer));
  return {};
}

caf::error host_device::check_access(int from, int to) const {
  if (from == to || machine_->link(from, to).access)
    return {};
  return fail(errc::not_supported, "device " + std::to_string(from) +
                                       " cannot access the memory of device " + std::to_string(to));
}

caf::expected<bool> host_device::can_access_peer(int peer) noexcept {
  if (auto err = check_peer(peer))
    return err;
  return !check_access(ordinal_, peer);
}

caf::error host_device::enable_peer(int peer) noexcept {
  if (auto err = check_peer(peer))
    return err;
  if (auto err = check_access(ordinal_, peer))
    return err;
  std::lock_guard lock{machine_->mutex};
  machine_->enabled.emplace(ordinal_, peer);
  return {};
}

caf::error host_device::admit_peer(int peer) noexcept {
  if (auto err = check_peer(peer))
    return err;
  if (auto err = check_access(peer, ordinal_))
    return err;
  std::lock_guard lock{machine_->mutex};
  machine_->admitted.emplace(peer, ordinal_);
  return {};
}

caf::error host_device::copy_peer(void* target, int target_device, const void* source,
                                  int source_device, std::size_t size_bytes,
                                  stream_view stream) noexcept {
  const auto peer = target_device == ordinal_ ? source_device : target_device;
  if (auto err = check_peer(peer))
    return err;
  if (target_device != ordinal_ && source_device != ordinal_)
    return fail(errc::invalid_argument, "a copy between two other devices");
  if (size_bytes > 0 && (!target || !source))
    return fail(errc::invalid_argument, "a buffer is null");
  if (peer != ordinal_) {
    std::lock_guard lock{machine_->mutex};
    const std::pair way{ordinal_, peer};
    if (!machine_->enabled.contains(way) || !machine_->admitted.contains(way))
      return fail(errc::not_supported,
                  "access to device " + std::to_string(peer) + " is not enabled on either side");
  }
  return enqueue(stream, copy_command{target, source, size_bytes});
}

caf::error host_device::wait_word(stream_view stream, const std::atomic<std::uint64_t>* word,
                                  std::uint64_t value) noexcept {
  if (!word)
    return fail(errc::invalid_argument, "no word");
  return enqueue(stream, wait_word_command{word, value});
}

bool host_device::runs_cuda() const noexcept { return false; }

bool host_device::signals_completion() const noexcept { return true; }

void host_device::set_completion_signal(std::function<void()> signal) noexcept {
  *completed_ = std::move(signal);
}

caf::error host_device::fail(errc code, std::string detail) const {
  return make_error({.code = code, .detail = std::move(detail), .device = ordinal_});
}

caf::error host_device::enqueue(stream_view stream, stream_command command) noexcept {
  if (!stream.native)
    return fail(errc::invalid_argument, "no stream");
  return static_cast<host_stream*>(stream.native)->enqueue(std::move(command));
}

} // namespace troupe::detail
