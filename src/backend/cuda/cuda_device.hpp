/// One GPU, driven by the CUDA runtime.
#pragma once

#include "backend/cuda/cuda_event.hpp"
#include "backend/cuda/device_pool.hpp"
#include "backend/cuda/driver_access.hpp"
#include <troupe/backend.hpp>

#include <cuda_runtime_api.h>

#include <atomic>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

namespace troupe::detail {

/// The claim on a device: at most one owner per process.
struct claim_traits {
  using value_type = std::atomic<bool>*;
  static void destroy(std::atomic<bool>* taken, int) noexcept { taken->store(false); }
};

class cuda_device final : public backend_device {
public:
  /// @shape ordinal: 0 to `device_count` - 1
  /// @errors errc::invalid_argument; errc::unavailable: the device is already open in this process,
  ///         and this is not an `open_beside`
  static caf::expected<std::unique_ptr<backend_device>> open(int ordinal, int device_count,
                                                             shared_driver_access driver,
                                                             std::shared_ptr<pool_trimmer> trimmer,
                                                             bool beside = false) noexcept;

  /// Frees the memory that is still allocated, if the driver may still be called. No work may be in
  /// flight.
  ~cuda_device() override;

  caf::error bind() noexcept override;
  caf::expected<device_properties> properties() noexcept override;
  /// `free_bytes` includes unused memory in this device's pool.
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

  bool records_graphs() const noexcept override { return true; }
  caf::expected<graph_view>
  record_graph(stream_view stream, const std::function<caf::error()>& enqueue) noexcept override;
  caf::error launch_graph(graph_view graph, stream_view stream) noexcept override;
  caf::error drop_graph(graph_view graph) noexcept override;

  caf::error clear_last_error(std::string_view found, std::string_view call,
                              std::uint64_t number) noexcept override;

  caf::expected<bool> can_access_peer(int peer) noexcept override;
  caf::error enable_peer(int peer) noexcept override;
  caf::error admit_peer(int peer) noexcept override;
  /// Without enabled access, the driver may copy through host memory.
  caf::error copy_peer(void* target, int target_device, const void* source, int source_device,
                       std::size_t size_bytes, stream_view stream) noexcept override;
  caf::error copy_peers(std::span<const peer_copy> copies, stream_view stream) noexcept override;
  bool prefers_copy_peers() const noexcept override { return true; }

  caf::error register_pinned(void* memory, std::size_t size_bytes) noexcept override;
  caf::error unregister_pinned(void* memory) noexcept override;
  caf::error wait_word(stream_view stream, const std::atomic<std::uint64_t>* word,
                       std::uint64_t value) noexcept override;
  bool runs_cuda() const noexcept override { return true; }
  bool signals_completion() const noexcept override { return false; }
  void set_completion_signal(std::function<void()>) noexcept override {}

private:
  using unique_claim = unique_handle<claim_traits>;

  /// `claim` is empty for `open_beside`.
  cuda_device(unique_claim claim, int ordinal, shared_driver_access driver,
              std::shared_ptr<pool_trimmer> trimmer) noexcept
      : claim_(std::move(claim)), ordinal_(ordinal), driver_(std::move(driver)),
        trimmer_(std::move(trimmer)) {}

  /// Makes the device current; called before every CUDA call.
  caf::error select() const noexcept;
  /// Makes the device current, then calls `f`: the function `api` of CUDA.
  template <class F> caf::error call(const char* api, F f) const noexcept;
  /// Same on any thread: restores the device that was current.
  template <class F> caf::error call_aside(const char* api, F f) const noexcept;
  /// Calls `allocate`, which returns a CUDA code. If there was no memory, trims the pools of device
  /// `of` (-1: of all devices) and calls it once more.
  template <class F> cudaError_t with_room(int of, F allocate) noexcept;
  /// @errors errc::not_supported: work is being recorded, and `what` cannot be part of a graph
  caf::error check_recorded(const char* what) const noexcept;

  const unique_claim claim_;
  const int ordinal_;
  const shared_driver_access driver_;
  const std::shared_ptr<pool_trimmer> trimmer_;
  std::shared_ptr<device_pool> pool_;   ///< of this generation; null while memory is closed
  std::unordered_set<void*> allocated_; ///< memory of `pool_` that is not freed yet
  std::bitset<1024> logged_errors_;     ///< codes that `clear_last_error` has logged
  std::vector<std::unique_ptr<cuda_event>> events_;
  bool records_ = false;   ///< `record_graph` enqueues
  std::vector<int> peers_; ///< have access to the pool of every generation
};

} // namespace troupe::detail
