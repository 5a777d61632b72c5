/// The programs of a worker: their interface to the worker, and the device as they see it. The
/// parent drives the same device.
#pragma once

#include "worker/child/guest_memory.hpp"
#include "worker/protocol/protocol.hpp"
#include <troupe/backend.hpp>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace troupe::detail {

/// The part of a worker that drives ranks for its programs.
/// @thread any
class program_site {
public:
  virtual ~program_site() = default;

  /// Prepares slow resources in advance, for a spare.
  /// @thread the one that drives the device
  virtual caf::error warm() = 0;
  /// Takes over `rank`, which the parent knows by `key`; `what` describes it. Tells the worker when
  /// nothing of the rank is left.
  virtual caf::error take(communicator_key key, communicator_ranks rank,
                          std::span<const std::byte> what) = 0;
  /// Ends that rank for the parent. Returns when no operation on it can succeed any more.
  virtual void close(communicator_key key) = 0;
  /// Allows to abort or destroy that rank: all ranks of its communicator are closed.
  virtual void allow_end(communicator_key key) = 0;
  /// Receives a message of the parent. @thread one call at a time, `take` included
  virtual void received(std::span<const std::byte> what) = 0;
  /// Returns the memory that the parent lends and that the programs do not use. They have given it
  /// back.
  virtual std::vector<lent_range> trim() = 0;
  /// Receives the parent's reply to a request for memory.
  virtual void answered(std::uint64_t number, const caf::expected<lent_range>& result) = 0;
};

/// Serializes calls of two threads on communicators of one device.
struct shared_device {
  std::mutex driving;
};

/// The ranks that a program drives: each must be closed, and its end be allowed, before it ends.
/// An aborted kernel goes on with whatever it finds in its buffers and sends that to its peers,
/// whose kernels then end as if all was well. So all ranks are closed before any is aborted.
class guest_ends {
public:
  /// `on_allowed` is called once, when the end of the rank is allowed, before any wait for that
  /// returns. It must not block.
  void add(communicator_key key, std::function<void()> on_allowed);
  void remove(communicator_key key);
  void set_closed(communicator_key key);
  /// Lets the end of that rank begin, which waits for it.
  void allow(communicator_key key);
  /// Allows the end of all ranks, also of those that are added later.
  void allow_all();
  /// Blocks until the rank is closed, or is not there.
  void wait_closed(communicator_key key) { wait(key, &state::closed); }
  /// Blocks until the end of the rank is allowed.
  void wait_allowed(communicator_key key) { wait(key, &state::allowed); }

private:
  struct state {
    bool closed = false;
    bool allowed = false;
    std::function<void()> on_allowed = {};
  };
  void allow(state& x);
  void wait(communicator_key key, bool state::* what);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<communicator_key, state> ranks_;
  bool all_allowed_ = false;
};

struct guest_options {
  int device = 0; ///< ordinal of the worker's only device
  std::shared_ptr<backend> executes;
  std::shared_ptr<shared_device> with;
  /// Called when nothing is left of the rank that the parent knows by this key.
  std::function<void(communicator_key)> on_gone;
  /// Called when this process's work on the device is lost.
  std::function<void(const caf::error&)> on_fault;
  /// Sends bytes to the parent. @thread any
  std::function<caf::error(std::span<const std::byte>)> tell;
  std::shared_ptr<guest_memory> memory; ///< what the parent lends; null: the process has its own
  std::span<std::atomic<std::uint64_t>> words = {}; ///< `link_area::unfinished`
};

class guest_backend final : public backend {
public:
  explicit guest_backend(guest_options options) : options_(std::move(options)) {}

  /// Wraps a rank as a communicator of this backend.
  communicator_ranks adopt(communicator_key key, communicator_ranks rank) const;

  std::string_view name() const noexcept override { return options_.executes->name(); }
  int device_count() const noexcept override { return options_.executes->device_count(); }
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override;
  /// Returns false: other processes have not mapped it.
  bool shares_adopted_memory() const noexcept override { return false; }
  std::shared_ptr<const void> keep_for_peers(int, const void*, std::size_t) noexcept override {
    return options_.memory; // the parent's lease keeps what is lent to this process
  }
  std::atomic<std::uint64_t>* find_word(std::uint32_t number) noexcept override {
    return number != 0 && number <= options_.words.size() ? &options_.words[number - 1] : nullptr;
  }
  /// Returns false: the parent supervises the device.
  bool allows_reset() const noexcept override { return false; }
  caf::expected<peer_link> link(int from, int to) noexcept override;
  /// Fails, as `build` does: the parent builds the communicators.
  caf::expected<communicator_id> make_communicator_id() noexcept override;
  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override;
  caf::error abort(communicator_ranks ranks) noexcept override {
    return end(&backend::abort, std::move(ranks));
  }
  caf::error destroy(communicator_ranks ranks) noexcept override {
    return end(&backend::destroy, std::move(ranks));
  }
  /// Sends bytes to the parent.
  caf::error tell(int ordinal, std::span<const std::byte> what) noexcept override;
  void set_listener(std::function<void(int, std::span<const std::byte>)> f) noexcept override;
  guest_ends& ends() const noexcept { return *ends_; }
  /// Returns the memory that the parent lends; null: it lends none.
  guest_memory* memory() const noexcept { return options_.memory.get(); }
  /// Passes bytes from the parent to the listener.
  void received(std::span<const std::byte> what) const;
  void abandon(const caf::error& why) noexcept override;

private:
  using end_function = caf::error (backend::*)(communicator_ranks) noexcept;
  caf::error end(end_function how, communicator_ranks ranks) noexcept;

  const guest_options options_;
  const std::shared_ptr<guest_ends> ends_ = std::make_shared<guest_ends>();
  mutable std::mutex listener_mutex_;
  std::function<void(int, std::span<const std::byte>)> listener_;
};

} // namespace troupe::detail
