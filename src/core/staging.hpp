/// Pageable host memory to and from a device: in pieces through pinned memory, blocking neither
/// lane nor actor.
#pragma once

#include "core/operation.hpp"
#include <troupe/backend.hpp>
#include <troupe/host_buffer.hpp>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace troupe::detail {

class lane;

/// The requester's host memory; once revoked it is not touched any more (the requester may free it
/// when it has its answer).
class host_range {
public:
  explicit host_range(std::span<std::byte> borrowed) : memory_(borrowed) {}
  explicit host_range(host_buffer owned)
      : borrowed_(owned.size_bytes() == 0), memory_(owned.writable()), owner_(std::move(owned)) {}

  std::size_t size() const noexcept { return memory_.size(); }
  /// Pinned and owned: a device may read and write it directly.
  std::byte* pinned() const noexcept { return owner_.pinned() ? memory_.data() : nullptr; }
  /// False if revoked: nothing was copied.
  bool copy_to(std::byte* target, std::size_t offset, std::size_t size) noexcept;
  bool copy_from(const std::byte* source, std::size_t offset, std::size_t size) noexcept;
  /// Returns when nobody touches borrowed memory any more. Owned memory stays usable.
  void revoke() noexcept;
  /// The transfer is over: nothing is kept.
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

/// Pinned memory in pieces; their room is handed out again in the same order.
/// @thread the lane
class staging_ring {
public:
  staging_ring(backend_device& device, std::size_t size_bytes)
      : device_(device), size_(size_bytes) {}

  /// The most that one piece can have: a quarter, so that copies overlap.
  std::size_t piece_limit() const noexcept { return size_ / 4; }
  /// `size` bytes, or null while there is no room. Makes the memory at the first call.
  caf::expected<std::byte*> take(std::size_t size);
  /// Gives a piece back.
  void give_back(const std::byte* memory) noexcept;
  bool has_memory() const noexcept { return memory_ != nullptr; }
  /// Frees the memory; no piece is out.
  caf::error close() noexcept;

private:
  struct piece {
    std::size_t begin;
    std::size_t end;
    bool in_use = true;
  };
  backend_device& device_;
  std::size_t size_;
  std::byte* memory_ = nullptr;
  std::deque<piece> pieces_;
};

/// One upload or download in pieces, for operations that continue.
class transfer {
public:
  enum class direction : std::uint8_t { upload, download };
  transfer(direction way, std::shared_ptr<host_range> host, std::byte* device_memory);
  ~transfer();

  /// Does what can be done now; `enqueued` once the last piece is in the stream (upload),
  /// `finished` once it is in host memory (download).
  caf::expected<issue_outcome> proceed(lane& on);
  /// The stream has the last piece.
  bool all_enqueued() const noexcept { return enqueued_ == size_; }
  /// Gives back what is left, after the stream has passed the last piece.
  void finish(lane& on) noexcept;

private:
  struct piece;

  caf::expected<issue_outcome> proceed_upload(lane& on);
  caf::expected<issue_outcome> proceed_download(lane& on);
  /// The next one, with its room in the ring; null: there is no room yet, or nothing left to do.
  std::shared_ptr<piece> take_piece(staging_ring& ring);
  caf::error mark(lane& on, piece& p, stream_kind stream);
  /// Takes back pieces that are through.
  caf::error reap(lane& on);

  direction way_;
  std::shared_ptr<host_range> host_;
  std::byte* device_;
  std::size_t size_;
  std::size_t taken_ = 0;    // bytes that have a place in the ring
  std::size_t enqueued_ = 0; // bytes that the stream has
  std::deque<std::shared_ptr<piece>> pieces_;
  caf::error error_;
};

} // namespace troupe::detail
