/// Copies pageable host memory to and from a device, in pieces through pinned memory, without
/// blocking a lane or an actor.
#pragma once

#include "operation/operation.hpp"
#include <troupe/backend.hpp>
#include <troupe/host_buffer.hpp>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::detail {

class lane;

/// The requester's host memory. After `revoke` it is not accessed any more, because the requester
/// may free it when it has its answer.
class host_range {
public:
  explicit host_range(std::span<std::byte> borrowed) : memory_(borrowed) {}
  explicit host_range(host_buffer owned)
      : borrowed_(owned.size_bytes() == 0), memory_(owned.writable()), owner_(std::move(owned)) {}

  std::size_t size() const noexcept { return memory_.size(); }
  /// Returns the same memory for another transfer: the request is not answered, although this may
  /// be revoked.
  std::shared_ptr<host_range> again();
  /// Returns the memory if a device can access it directly: if it is pinned and owned. Else null.
  std::byte* pinned() const noexcept { return owner_.pinned() ? memory_.data() : nullptr; }
  /// Copies; returns false, and copies nothing, if revoked.
  bool copy_to(std::byte* target, std::size_t offset, std::size_t size) noexcept;
  bool copy_from(const std::byte* source, std::size_t offset, std::size_t size) noexcept;
  /// Blocks until borrowed memory is not accessed any more, for good. Owned memory stays usable.
  void revoke() noexcept;
  /// Releases the memory after the transfer.
  void let_go() noexcept;

private:
  const bool borrowed_ = true;
  std::mutex mutex_;
  std::span<std::byte> memory_;
  host_buffer owner_;
  bool revoked_ = false;
};

/// A thread that copies host memory for one lane.
class stager {
public:
  explicit stager(std::function<void()> wake) : wake_(std::move(wake)) {}
  ~stager();
  stager(const stager&) = delete;
  stager& operator=(const stager&) = delete;

  /// Runs `job` on the stager's thread, then wakes the lane.
  void post(std::function<void()> job);

private:
  void run();

  std::function<void()> wake_;
  std::mutex mutex_;
  std::condition_variable condition_;
  std::deque<std::function<void()>> jobs_;
  bool stop_ = false;
  std::thread thread_; // from the first job on
};

/// A ring of pinned memory, taken in pieces. Space is reused in the order in which it was taken.
/// @thread the lane
class staging_ring {
public:
  staging_ring(backend_device& device, std::size_t size_bytes)
      : device_(device), size_(size_bytes) {}

  /// Returns the largest size of a piece: a quarter of the ring, so that copies overlap.
  std::size_t piece_limit() const noexcept { return size_ / 4; }
  /// Returns `size` bytes, or null while there is no room. Allocates the memory at the first call.
  caf::expected<std::byte*> take(std::size_t size);
  /// Gives a piece back. While the device is lost, all pieces stay in use.
  void give_back(const std::byte* memory) noexcept;
  /// Leaves the pieces in use to the lost process, which may still write to them until `is_over`
  /// returns true: they are not given out before that, and no transfer gives them back any more.
  /// Returns false if there is little room without them: then the ring is not to be used any more.
  bool leave(std::function<bool()> is_over);
  bool has_memory() const noexcept { return memory_ != nullptr; }
  /// Frees the memory. No piece is in use.
  caf::error close() noexcept;
  /// Gives the memory up, and returns what frees it, on any thread. Null if `close` has to.
  std::function<void()> let_go();

private:
  struct piece {
    std::size_t begin;
    std::size_t end;
    bool in_use = true;
  };
  struct left_pieces {
    std::vector<std::pair<std::size_t, std::size_t>> ranges; ///< begin and end
    std::function<bool()> is_over;
  };
  void use_what_is_over();

  backend_device& device_;
  std::size_t size_;
  std::byte* memory_ = nullptr;
  std::size_t begin_ = 0;   ///< pieces are taken from here, ...
  std::size_t end_ = size_; ///< ... to here: the largest range without what is left
  std::deque<piece> pieces_;
  std::vector<left_pieces> left_;
};

/// One upload or download in pieces, for operations that continue.
class transfer {
public:
  enum class direction : std::uint8_t { upload, download };
  transfer(direction way, std::shared_ptr<host_range> host, std::byte* device_memory);
  ~transfer();

  /// Does what can be done now. Returns `enqueued` once the last piece is in the stream (upload),
  /// `finished` once it is in host memory (download).
  caf::expected<issue_outcome> proceed(lane& on);
  /// Returns whether the last piece is in the stream.
  bool all_enqueued() const noexcept { return enqueued_ == size_; }
  /// Gives back the remaining pieces, after the stream has passed the last one.
  void finish(lane& on) noexcept;

private:
  struct piece;

  caf::expected<issue_outcome> proceed_upload(lane& on);
  caf::expected<issue_outcome> proceed_download(lane& on);
  /// Returns the next piece, with room in the ring. Null: there is no room yet, or nothing is left.
  std::shared_ptr<piece> take_piece(staging_ring& ring);
  caf::error mark(lane& on, piece& p, stream_kind stream);
  /// Hands downloaded pieces on to the stager, and gives back finished ones.
  caf::error reap(lane& on);

  direction way_;
  std::shared_ptr<host_range> host_;
  std::byte* device_;
  std::size_t size_;
  std::size_t taken_ = 0;    // bytes of all pieces so far
  std::size_t enqueued_ = 0; // bytes that are or were in the stream
  std::deque<std::shared_ptr<piece>> pieces_;
  caf::error error_;
};

} // namespace troupe::detail
