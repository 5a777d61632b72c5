/// Device memory of the programs in a worker: ranges that the parent lends, in pieces.
#pragma once

#include "foundation/slab_book.hpp"
#include "worker/protocol/protocol.hpp"
#include <troupe/error.hpp>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace troupe::detail {

/// Gives out memory of ranges that the parent lends. The caller frees memory only when no work uses
/// it. A range of which nothing is in use goes back to the parent after a time, or when the parent
/// asks for it.
/// @thread any
class guest_memory {
public:
  struct options {
    int device = 0; ///< its ordinal, for errors
    /// How long a range is kept that is not in use, as `cuda_backend_options::keep_freed`.
    std::chrono::milliseconds keep{0};
    /// Sends a request to the parent: `control::lend` or `take_back`. `answered` gets the reply.
    std::function<caf::error(control, std::uint64_t number, const lent_range&)> demand;
  };

  explicit guest_memory(options x) : options_(std::move(x)) {}
  ~guest_memory();
  guest_memory(const guest_memory&) = delete;
  guest_memory& operator=(const guest_memory&) = delete;

  /// @shape  device_bytes: what the device has in all
  /// @errors errc::out_of_memory: nothing changed; errc::device_reset: another process has the
  ///         device; errc::unavailable: the worker ends
  caf::expected<void*> allocate(std::size_t size_bytes, std::size_t device_bytes);
  /// Returns false if the memory is not from here.
  bool deallocate(void* memory);
  /// Frees all that is allocated.
  void clear();
  /// Returns the number of bytes that can be allocated without the parent.
  std::size_t free_bytes() const;

  /// Drops the ranges of which nothing is in use, and returns them for the parent.
  std::vector<lent_range> trim();
  /// Takes the reply to a request.
  void answered(std::uint64_t number, const caf::expected<lent_range>& result);
  /// Ends waits for replies, from now on: none comes any more.
  void end();

private:
  using clock = slab_book::clock;

  /// Sends a request, and waits for the reply. Needs `demanding_`.
  caf::expected<lent_range> demand(control what, const lent_range& x);
  std::optional<void*> take(std::size_t size_bytes);
  std::optional<void*> take_locked(std::size_t size_bytes);
  /// Adds a range, and takes memory of it.
  caf::expected<void*> take_from(const lent_range& fresh, std::size_t size_bytes);
  bool has_most_ranges() const;
  /// Gives ranges that are empty since `when` or before back to the parent. Needs `demanding_`.
  void give_back_empty(clock::time_point when);
  caf::error out_of_memory(std::size_t size_bytes, const std::string& why) const;
  void note_empty();
  void keep_house();

  const options options_;
  /// Held during a request, of which the parent serves one at a time; before `mutex_`.
  std::mutex demanding_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  slab_book ranges_; ///< that the parent lends
  std::unordered_map<void*, slab_range> taken_;
  std::uint64_t last_demand_ = 0;
  std::optional<caf::expected<lent_range>> reply_; ///< to the last request
  bool ends_ = false;
  std::thread keeper_; ///< gives empty ranges back
};

} // namespace troupe::detail
