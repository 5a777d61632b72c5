/// A device in a worker process, as its parent's lane sees it.
#pragma once

#include "worker/parent/worker_pool.hpp"
#include <troupe/backend.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <stop_token>
#include <vector>

namespace troupe::detail {

/// Target of a remote device's `event_view`. It stays in place as long as the device.
struct remote_event {
  std::shared_ptr<worker_link> link;
  std::uint64_t number = 0;
  std::uint64_t record = 0; ///< 0: never recorded
};

class remote_device final : public backend_device {
public:
  remote_device(std::shared_ptr<worker_pool> pool, int ordinal, kept_memory keeps);
  ~remote_device() override;

  /// Starts a worker if the device has none.
  caf::error bind() noexcept override;
  caf::expected<device_properties> properties() noexcept override { return properties_; }
  caf::expected<memory_info> memory() noexcept override;
  caf::error open_memory() noexcept override;
  caf::error close_memory() noexcept override;
  caf::expected<void*> allocate(std::size_t size_bytes, stream_view stream) noexcept override;
  caf::error deallocate(void* memory, stream_view stream) noexcept override;
  caf::expected<void*> allocate_pinned(std::size_t size_bytes) noexcept override;
  caf::error deallocate_pinned(void* memory) noexcept override {
    return pool_->segments().remove(memory);
  }
  std::function<caf::error(void*)> pinned_deleter() noexcept override;

  caf::expected<stream_view> create_stream() noexcept override;
  caf::error destroy_stream(stream_view stream) noexcept override;
  caf::expected<event_view> create_event() noexcept override;
  caf::error destroy_event(event_view event) noexcept override;
  caf::error record(event_view event, stream_view stream) noexcept override;
  caf::error wait(stream_view stream, event_view event) noexcept override;
  caf::expected<bool> query(event_view event) noexcept override;
  caf::error synchronize(event_view event) noexcept override;

  caf::error copy(void* target, const void* source, std::size_t size_bytes,
                  copy_direction direction, stream_view stream) noexcept override;
  caf::error fill(void* target, std::span<const std::byte> pattern, std::size_t count,
                  stream_view stream) noexcept override;
  /// @errors errc::not_supported: no function of this process can run there
  caf::error launch_host(stream_view, void (*)(void*), void*) noexcept override {
    return is_elsewhere();
  }

  bool records_graphs() const noexcept override { return records_graphs_.load(); }
  /// The commands of `enqueue` go to the worker together, which records them.
  caf::expected<graph_view>
  record_graph(stream_view stream, const std::function<caf::error()>& enqueue) noexcept override;
  caf::error launch_graph(graph_view graph, stream_view stream) noexcept override;
  caf::error drop_graph(graph_view graph) noexcept override;
  std::uint64_t workspace_changes() const noexcept override { return link_->workspace_changes(); }

  /// Returns true if this device can read the slabs of `peer`.
  caf::expected<bool> can_access_peer(int peer) noexcept override;
  /// Does nothing: a slab is mapped when a copy first needs it.
  caf::error enable_peer(int peer) noexcept override { return check_near(peer); }
  caf::error admit_peer(int peer) noexcept override;
  /// The target's worker reads: another one could go on writing for some time after its end.
  /// @errors errc::not_supported: `target_device` is another one, or the source's device is not
  ///         near; errc::stale_ref: the source is in no slab
  caf::error copy_peer(void* target, int target_device, const void* source, int source_device,
                       std::size_t size_bytes, stream_view stream) noexcept override;

  caf::error wait_word(stream_view stream, const std::atomic<std::uint64_t>* word,
                       std::uint64_t value) noexcept override;
  event_word word_of(event_view event) const noexcept override;
  void interrupt() noexcept override { stop_.request_stop(); }
  bool is_remote() const noexcept override { return true; }
  caf::error launch_registered(const registered_call& what, stream_view stream) noexcept override;
  caf::error prepare_registered(const registered_call& what, stream_view stream) noexcept override;
  void set_loss_signal(std::function<void(const caf::error&)> signal) noexcept override {
    tell_loss_ = std::move(signal);
  }
  caf::error loss() const noexcept override;
  bool may_keep_memory(const caf::error& loss) const noexcept override;
  std::function<bool()> lost_work() const noexcept override;
  caf::error take_over() noexcept override;
  caf::error move_to_spare() noexcept override;

  bool runs_cuda() const noexcept override { return false; }
  bool signals_completion() const noexcept override { return false; }
  void set_completion_signal(std::function<void()>) noexcept override {}

private:
  caf::error fail(errc code, std::string detail) const;
  caf::error is_elsewhere() const;
  /// Returns an error if the device has no slabs, or `peer` is on another host.
  caf::error check_near(int peer) const;
  template <class T> caf::expected<T> read(caf::expected<wire_reader> reply) const;
  void set_link(std::shared_ptr<worker_link> x) noexcept;
  /// Returns the place of the word of a launch, if it has one.
  caf::expected<std::vector<shared_place>> place_of_verdict(const registered_call& x) noexcept;
  caf::error send_launch(command what, const registered_call& call, stream_view stream,
                         std::vector<shared_place> verdict) noexcept;
  void forget_prepared() noexcept;
  /// Reads an address or a number, never 0.
  caf::expected<void*> address(caf::expected<wire_reader> reply) const;

  const std::shared_ptr<worker_pool> pool_;
  const int ordinal_;
  const kept_memory keeps_;
  std::stop_source stop_;
  mutable std::mutex link_mutex_;     ///< for other threads; the lane alone changes the link
  std::shared_ptr<worker_link> link_; ///< set by the first `bind`; may be lost
  device_properties properties_;
  std::atomic<bool> records_graphs_{false};
  graph_id last_graph_ = 0; ///< counts on over all workers of the device
  const std::shared_ptr<device_slabs> slabs_;
  bool is_trusted_ = true; ///< the memory in `slabs_`, after the losses since `open_memory`
  std::set<std::vector<std::byte>> prepared_; ///< what the worker has prepared for launches
  launch_request latest_prepared_;            ///< the last one that was looked up
  std::deque<remote_event> events_;
  std::vector<remote_event*> free_events_;
  std::function<void(const caf::error&)> tell_loss_;
  bool tells_loss_ = false; ///< true if the link has the listener
};

/// One rank of a communicator, in a worker.
class remote_communicator : public backend_communicator {
public:
  remote_communicator(std::shared_ptr<worker_link> link, communicator_key key)
      : link_(std::move(link)), key_(key) {
    link_->ranks().begin();
  }
  ~remote_communicator() override {
    link_->forget(loss_listener_);
    if (is_handed_over())
      link_->program_ranks().end();
    link_->ranks().end();
  }
  remote_communicator(const remote_communicator&) = delete;
  remote_communicator& operator=(const remote_communicator&) = delete;

  worker_link& link() const noexcept { return *link_; }
  const std::shared_ptr<worker_link>& shared_link() const noexcept { return link_; }
  communicator_key key() const noexcept { return key_; }
  bool is_handed_over() const noexcept { return handed_over_.load(); }
  /// Returns the owner of the device memory that this process has made for all ranks, if any.
  virtual std::shared_ptr<const void> memory() const noexcept { return nullptr; }

  caf::error connect(stream_view stream, connect_scope what) noexcept override;
  caf::error enqueue(std::span<const collective_call> calls, stream_view stream,
                     step_position) noexcept override;
  void on_loss(std::function<void()> f) noexcept override;
  std::shared_ptr<const device_life> life() const noexcept override { return link_; }
  caf::error hand_over(std::span<const std::byte> what) noexcept override;
  caf::error asynchronous_error() noexcept override;

protected:
  enqueue_args arguments_of(std::span<const collective_call> calls,
                            stream_view stream) const noexcept;
  /// Returns the calls as they are sent; valid until the next call of this function.
  std::span<const std::byte> bytes_of_calls(std::span<const collective_call> calls);

private:
  const std::shared_ptr<worker_link> link_;
  const communicator_key key_;
  std::atomic<bool> handed_over_{false};
  std::uint64_t loss_listener_ = 0; ///< id of the listener in the link
  wire_writer calls_;               ///< buffer for the calls of the current `enqueue`
  /// `communicator_errors()` when this rank last had no error.
  std::uint64_t errors_of_others_ = 0;
};

/// One rank of a direct communicator, in a worker.
class remote_direct_rank final : public remote_communicator {
public:
  /// `memory`: of all ranks. It exists as long as one of them
  remote_direct_rank(std::shared_ptr<worker_link> link, communicator_key key,
                     std::shared_ptr<const std::vector<std::shared_ptr<shared_slab>>> memory,
                     std::shared_ptr<shared_segments> segments)
      : remote_communicator(std::move(link), key), memory_(std::move(memory)),
        segments_(std::move(segments)) {}

  caf::error enqueue(std::span<const collective_call> calls, stream_view stream,
                     step_position where) noexcept override;
  caf::error replay(graph_view graph, stream_view stream, backend_device& device,
                    std::uint32_t* reached) noexcept override;
  /// Does not wait for the worker.
  void on_closed() noexcept override;
  std::shared_ptr<const void> memory() const noexcept override { return memory_; }

private:
  const std::shared_ptr<const std::vector<std::shared_ptr<shared_slab>>> memory_;
  const std::shared_ptr<shared_segments> segments_;
};

} // namespace troupe::detail
