/// A virtual device of the host backend.
#pragma once

#include "backend/host/host_slabs.hpp"
#include "backend/host/host_stream.hpp"
#include <troupe/backend.hpp>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace troupe::detail {

/// The shared state of the devices of a host backend.
struct host_machine {
  explicit host_machine(const host_backend_options& x);
  ~host_machine();
  host_machine(const host_machine&) = delete;
  host_machine& operator=(const host_machine&) = delete;

  const int devices;
  const std::size_t bytes_per_device;
  std::map<std::pair<int, int>, host_link> links; ///< by (from, to); a missing pair has the default

  host_link link(int from, int to) const;

  host_slabs slabs;

  std::mutex mutex;
  std::vector<bool> opened;               ///< by ordinal
  std::set<std::pair<int, int>> enabled;  ///< (from, to): access to plain memory
  std::set<std::pair<int, int>> admitted; ///< (from, to): access to pool memory
  /// Memory that destroyed devices had not freed: streams of other devices may still use it.
  std::vector<void*> left;
};

class host_device final : public backend_device {
public:
  /// Expects that `machine->opened[ordinal]` is set; the destructor clears it. `beside`: another
  /// object for a device that is already open.
  host_device(std::shared_ptr<host_machine> machine, int ordinal, bool beside = false) noexcept;

  /// Cancels its streams. Memory that is still allocated is freed with the machine.
  ~host_device() override;

  caf::error bind() noexcept override;
  caf::expected<device_properties> properties() noexcept override;
  caf::expected<memory_info> memory() noexcept override;

  caf::error open_memory() noexcept override;
  caf::error close_memory() noexcept override;
  caf::expected<void*> allocate(std::size_t size_bytes, stream_view stream) noexcept override;
  caf::error deallocate(void* memory, stream_view stream) noexcept override;
  caf::expected<void*> allocate_pinned(std::size_t size_bytes) noexcept override;
  caf::error deallocate_pinned(void* memory) noexcept override { return pinned_deleter()(memory); }
  std::function<caf::error(void*)> pinned_deleter() noexcept override;

  caf::expected<stream_view> create_stream() noexcept override;
  caf::error destroy_stream(stream_view stream) noexcept override;
  caf::expected<event_view> create_event() noexcept override;
  caf::error destroy_event(event_view event) noexcept override;

  caf::error record(event_view event, stream_view stream) noexcept override;
  caf::expected<user_event> record_user(stream_view user) noexcept override;
  caf::error wait(stream_view stream, event_view event) noexcept override;
  caf::expected<bool> query(event_view event) noexcept override;
  caf::error synchronize(event_view event) noexcept override;

  caf::error copy(void* target, const void* source, std::size_t size_bytes,
                  copy_direction direction, stream_view stream) noexcept override;
  caf::error fill(void* target, std::span<const std::byte> pattern, std::size_t count,
                  stream_view stream) noexcept override;
  caf::error launch_host(stream_view stream, void (*function)(void*),
                         void* argument) noexcept override;

  caf::expected<bool> can_access_peer(int peer) noexcept override;
  caf::error enable_peer(int peer) noexcept override;
  caf::error admit_peer(int peer) noexcept override;
  /// All memory here counts as memory of a pool.
  caf::error copy_peer(void* target, int target_device, const void* source, int source_device,
                       std::size_t size_bytes, stream_view stream) noexcept override;
  /// True so that lanes work as with GPUs, although it saves no time here.
  bool prefers_copy_peers() const noexcept override { return true; }

  caf::error wait_word(stream_view stream, const std::atomic<std::uint64_t>* word,
                       std::uint64_t value) noexcept override;

  bool runs_cuda() const noexcept override;
  bool signals_completion() const noexcept override;
  void set_completion_signal(std::function<void()> signal) noexcept override;

private:
  std::size_t free_bytes() const;
  caf::error fail(errc code, std::string detail) const;
  caf::error check_peer(int peer) const;
  caf::error check_access(int from, int to) const;
  caf::error enqueue(stream_view stream, stream_command command) noexcept;

  std::shared_ptr<host_machine> machine_;
  int ordinal_;
  const bool beside_;
  const std::shared_ptr<std::function<void()>> completed_ =
      std::make_shared<std::function<void()>>();
  bool memory_open_ = false;
  std::size_t used_bytes_ = 0;
  std::unordered_map<void*, std::size_t> allocations_; ///< with their sizes
  std::unordered_map<void*, std::unique_ptr<host_event>> events_;
  std::unordered_map<void*, std::shared_ptr<host_stream>> streams_;
  std::vector<std::shared_ptr<host_stream>> closed_streams_; ///< their threads may still run
};

} // namespace troupe::detail
