/// Device memory that workers of other devices can use.
#pragma once

#include "foundation/file_descriptor.hpp"
#include "worker/parent/open_count.hpp"
#include "worker/parent/worker_mapping.hpp"
#include "worker/protocol/protocol.hpp"
#include <troupe/backend.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace troupe::detail {

class worker_link;

/// @units `memory_slab::ordinal`: as the workers count devices
inline slab_args arguments_of(const memory_slab& x) noexcept {
  return {reinterpret_cast<std::uintptr_t>(x.address), x.size_bytes, x.ordinal};
}

/// Chooses the addresses of slabs, which are the same in all processes.
/// @thread any
class slab_addresses {
public:
  /// Takes addresses that are not taken. Other uses of them in a process are not known here.
  /// Returns null if there are none. Never crosses a multiple of `memory_slab::window`.
  /// @shape size_bytes: a multiple of `unit`, which is a power of two
  void* take(std::size_t size_bytes, std::size_t unit);
  /// Returns how many there are. @units bytes
  static std::size_t capacity() noexcept;
  void give_back(void* address) noexcept;
  /// The next addresses are of another window than `address`, which something else uses.
  void leave_window(void* address) noexcept;

private:
  std::mutex mutex_;
  std::map<std::uintptr_t, std::uintptr_t> taken_; ///< begin to end
  std::uintptr_t next_ = 0; ///< given back addresses are used again as late as possible
};

/// A slab that workers may have mapped, beside the one that made it. Its destructor tells them to
/// unmap it when the present work in their streams is done. Its addresses are free when all have
/// replied.
/// @thread any
class shared_slab {
public:
  shared_slab(const memory_slab& what, std::shared_ptr<const file_descriptor> descriptor,
              std::shared_ptr<slab_addresses> addresses,
              std::shared_ptr<open_count> unmappings) noexcept
      : what_(what), descriptor_(std::move(descriptor)), addresses_(std::move(addresses)),
        unmappings_(std::move(unmappings)) {}
  ~shared_slab();
  shared_slab(const shared_slab&) = delete;
  shared_slab& operator=(const shared_slab&) = delete;

  bool contains(const void* memory, std::size_t size_bytes) const noexcept;
  /// Maps it in a worker that has not mapped it yet. Blocks.
  caf::error map(worker_link& in);
  /// Does the same, and does not wait.
  void begin_to_map(worker_link& in) { static_cast<void>(mapping_in(in)); }
  /// Notes that a worker has mapped it, which made it: it unmaps it as the others do.
  void note_mapped(worker_link& in);
  const memory_slab& what() const noexcept { return what_; }
  /// Notes that `owner`, which has mapped it, has it instead of the worker that made it: it unmaps
  /// it when it is told to.
  void give_to(const worker_link& owner);

private:
  std::shared_ptr<worker_mapping> mapping_in(worker_link& in);

  const memory_slab what_;
  const std::shared_ptr<const file_descriptor> descriptor_;
  const std::shared_ptr<slab_addresses> addresses_;
  const std::shared_ptr<open_count> unmappings_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<worker_mapping>> mappings_;
};

/// The slabs of all devices of this host. A worker maps a slab of another device when it first
/// needs it.
/// @thread any
class shared_slabs {
public:
  slab_addresses& addresses() noexcept { return *addresses_; }

  /// Lets a worker make a slab. Only the result knows it.
  /// @shape size_bytes: a multiple of `unit`, which is that of the worker
  /// @errors errc::out_of_memory: the device has no memory, or there are no addresses;
  ///         errc::unavailable: no descriptor arrived, or all addresses that were tried are in use;
  ///         errc::worker_lost
  caf::expected<std::shared_ptr<shared_slab>> make(int ordinal, std::size_t size_bytes,
                                                   std::size_t unit, worker_link& in);
  /// Adds a slab of `make`, for the functions below.
  void add(const std::shared_ptr<shared_slab>& slab);
  void remove(const memory_slab& what);

  /// Lets a worker use memory of another device. Blocks if it has not mapped the slab yet. The
  /// worker keeps the slab mapped while the caller keeps the result, and then for what it has been
  /// told to do meanwhile.
  /// @errors errc::stale_ref: it is memory of no slab
  caf::expected<std::shared_ptr<const shared_slab>>
  reach(const void* memory, std::size_t size_bytes, worker_link& from);

  /// Maps a slab in another worker of its device. Does nothing if there is no such slab.
  caf::error map(const memory_slab& what, worker_link& in);
  /// Does the same, and does not wait.
  void begin_to_map(const memory_slab& what, worker_link& in);
  /// Makes `owner`, which has mapped it, the worker of the slab.
  void give_to(const memory_slab& what, const worker_link& owner);

  /// Waits until workers have unmapped what was removed: until then it is not free. Returns false
  /// if they have not.
  bool wait_for_unmappings(std::chrono::nanoseconds limit) noexcept {
    return unmappings_->wait_for_none(limit);
  }

private:
  std::shared_ptr<shared_slab> find(const memory_slab& what);

  const std::shared_ptr<slab_addresses> addresses_ = std::make_shared<slab_addresses>();
  const std::shared_ptr<open_count> unmappings_ = std::make_shared<open_count>();
  std::mutex mutex_;
  std::map<const std::byte*, std::shared_ptr<shared_slab>> all_; ///< by address
};

} // namespace troupe::detail
