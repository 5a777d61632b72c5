/// The memory of a device in a worker: slabs that the worker makes, and that this process manages
/// and keeps.
#pragma once

#include "foundation/slab_book.hpp"
#include "worker/parent/shared_slabs.hpp"
#include "worker/parent/worker_link.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace troupe::detail {

/// Returns how large the next slab should be.
/// @shape  needed: for one allocation; slabs: how many there are; unit: sizes are multiples of it
/// @units  bytes
std::size_t next_slab_bytes(std::size_t needed, std::size_t slabs, std::size_t device_bytes,
                            std::size_t unit) noexcept;

/// Gives out memory of one device from slabs. The caller frees memory only when no work uses it, so
/// no stream is needed. A slab of which nothing is in use goes back to the device after a time.
/// The programs in the worker give out ranges themselves, which they borrow from here. What a lost
/// worker had borrowed is in use until its work is over, and that of its communicators.
/// @thread the lane of the device, unless a function says otherwise
class device_slabs : public std::enable_shared_from_this<device_slabs> {
public:
  /// `ordinal`: as the worker counts devices. `keep`: how long a slab is kept that is not in use,
  /// as `cuda_backend_options::keep_freed`
  device_slabs(int ordinal, std::shared_ptr<shared_slabs> shared, std::chrono::milliseconds keep);
  ~device_slabs();
  device_slabs(const device_slabs&) = delete;
  device_slabs& operator=(const device_slabs&) = delete;

  /// Begins anew with a worker, and drops all slabs of a former one. Does nothing if `worker` has
  /// the slabs already.
  void begin(std::shared_ptr<worker_link> worker);
  /// Gives all slabs to `worker`, at the same addresses. The former worker is lost.
  /// @errors those of `worker`: then it has some of them, and `begin` drops all
  caf::error move_to(std::shared_ptr<worker_link> worker);
  /// Maps the slabs that there are, and later ones, in a worker that may become the device's.
  /// @errors those of `spare`
  /// @thread any
  caf::error prepare(const std::shared_ptr<worker_link>& spare);
  /// Maps the slabs that there are in a worker of another device, and later ones before any of
  /// their memory is used. Calling it again changes nothing.
  /// @errors those of `peer`
  /// @thread any
  caf::error admit(const std::shared_ptr<worker_link>& peer);
  /// Returns whether `admit` was called for the worker.
  /// @thread any
  bool admits(const worker_link& peer) const;
  void set_device_bytes(std::size_t x) noexcept { device_bytes_ = x; }
  /// Returns whether the worker can make slabs.
  /// @thread any
  bool are_possible() const noexcept { return unit_.load(std::memory_order_relaxed) != 0; }

  /// @errors errc::out_of_memory: nothing changed; errc::unavailable: also without a descriptor;
  ///         errc::worker_lost
  caf::expected<void*> allocate(std::size_t size_bytes);
  /// Returns false if the memory is not from here.
  bool deallocate(void* memory);
  /// Frees all that is allocated, and gives back the slabs from which nothing is lent.
  caf::error clear();
  /// Returns the number of bytes that can be allocated without a new slab.
  /// @thread any
  std::size_t free_bytes() const;
  /// Gives the slabs back of which nothing is in use, neither here nor by programs. Waits some time
  /// for workers of other devices that have mapped them.
  /// @thread any but one that receives messages of workers
  caf::error give_back_unused();

  // -- memory for the programs in the worker

  /// Returns an owner of memory that is lent to the programs in `worker`: the memory is not used
  /// for anything else while the owner exists. Null: it is not lent to them.
  /// @thread any
  std::shared_ptr<const void> keep_lent(const worker_link& worker, const void* memory,
                                        std::size_t size_bytes);

private:
  using clock = slab_book::clock;

  /// A range that is lent to the programs in a worker.
  struct loan {
    slab_range range;
    /// Null: it was given back, and is free when there are no owners. Else the worker is kept until
    /// its process is gone: nothing else gives the range back.
    std::shared_ptr<worker_link> to;
    std::size_t owners = 0; ///< of `keep_lent`
  };
  using loans = std::map<std::byte*, std::shared_ptr<loan>>;

  memory_slab slab_of(slab_book::slab x) const noexcept { return {ordinal_, x.data(), x.size()}; }
  caf::error is_gone() const;
  /// Makes a slab in which `size_bytes` fit.
  caf::error grow(std::size_t size_bytes);
  caf::error make(std::size_t slab_bytes, std::size_t unit);
  std::shared_ptr<worker_link> worker() const;

  /// Serves a request of the programs in a worker. Does not block: it lends on another thread.
  void serve(const std::shared_ptr<worker_link>& by, const worker_demand& what);
  caf::expected<lent_range> lend(const std::shared_ptr<worker_link>& to, std::size_t size_bytes);
  /// Lends a range of `least` bytes or more, up to `most` if one is free.
  caf::expected<lent_range> lend_between(const std::shared_ptr<worker_link>& to, std::size_t least,
                                         std::size_t most);
  std::size_t number_lent(const worker_link& to) const;
  /// Returns whether something is lent to another worker. Needs `mutex_`.
  bool others_borrow(const worker_link& to) const;
  bool is_lent_to_others(const worker_link& than) const;
  /// Waits some time until nothing is lent to other workers, which are lost.
  void wait_for_lost_workers(worker_link& by);
  /// Takes back a range that programs in `from` give back. Returns false if the device's worker has
  /// no such range.
  bool take_back(const worker_link& from, const lent_range& x);
  /// Takes back all that is lent to a worker.
  void take_back_all(const worker_link& from);
  /// Gives back a range that is lent, when there are no owners. Needs `mutex_`.
  void end_lending(loans::iterator x);
  void drop_owner(const std::shared_ptr<loan>& x);
  /// Lets the programs give back what they do not use.
  void trim_programs();
  /// Serves the worker's programs from now on, and takes all back when its work is over.
  void serve_demands_of(const std::shared_ptr<worker_link>& worker);

  /// Slabs that are to be unmapped, and their worker.
  struct removed {
    std::vector<memory_slab> slabs;
    std::shared_ptr<worker_link> worker;
    loans lent{}; ///< may be the last to keep a worker: to be destroyed without the lock
  };

  /// Removes the slabs that are empty since `when` or before.
  removed take_empty(clock::time_point when);
  std::vector<memory_slab> all() const;
  std::vector<memory_slab> all_locked() const;
  void forget_spare();
  std::vector<std::shared_ptr<worker_link>> peers();
  caf::error map_in_peers(shared_slab& what);
  caf::error map(const std::vector<memory_slab>& slabs, worker_link& in) const;
  /// Removes all slabs. Needs `mutex_`.
  removed take_all();
  /// Gives slabs back to the device.
  caf::error unmap(const removed& what) const;
  /// Lets the keeper look again; without one, empty slabs go back at once.
  void note_empty();
  /// Lets the keeper look again. Returns an error if there is none.
  caf::error wake_keeper();
  void keep_house();

  const int ordinal_;
  const std::shared_ptr<shared_slabs> shared_; ///< lets workers of other devices use the slabs
  const std::chrono::milliseconds keep_;
  std::mutex growing_; ///< held while a slab is made; before `giving_back_`
  /// Held while empty slabs are given back, and while the worker changes; before `mutex_`.
  std::mutex giving_back_;
  std::atomic<std::size_t> device_bytes_{0};
  std::atomic<std::size_t> unit_{0}; ///< as `backend::slab_granularity`

  mutable std::mutex mutex_;            ///< guards the members below
  std::shared_ptr<worker_link> worker_; ///< changed by the lane
  slab_book slabs_;                     ///< `shared_` has their descriptors
  std::optional<memory_slab> arriving_; ///< not in use before other devices' workers have mapped it
  std::unordered_map<void*, slab_range> taken_;
  loans lent_; ///< by address
  std::weak_ptr<worker_link> spare_;
  std::vector<std::weak_ptr<worker_link>> peers_; ///< workers of other devices
  bool ends_ = false;
  std::condition_variable changed_;
  std::thread keeper_; ///< gives empty slabs back
};

} // namespace troupe::detail
