/// Device memory: who uses it, in which order, and whether its content is right.
#pragma once

#include <troupe/error.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace troupe::detail {

class device_state;
class operation;
class symmetric_memory;
struct part;

/// What a reader gets whose memory a failed operation left half-written.
caf::error indeterminate(const caf::error& cause);

/// One allocation of one device in one generation. Freed by the device's lane, whoever drops it.
class buffer {
public:
  /// `deleter` for memory of the user's (`adopt`); without one the memory belongs to the device's
  /// pool, or to `symmetric`, of which it is a piece.
  buffer(std::shared_ptr<device_state> home, std::uint64_t id, std::uint64_t generation,
         void* address, std::size_t size_bytes, std::function<void(void*)> deleter = {},
         std::shared_ptr<symmetric_memory> symmetric = {});
  ~buffer();
  buffer(const buffer&) = delete;
  buffer& operator=(const buffer&) = delete;

  device_state& home() const noexcept { return *home_; }
  std::uint64_t id() const noexcept { return id_; }
  std::uint64_t generation() const noexcept { return generation_; }
  std::byte* address() const noexcept { return static_cast<std::byte*>(address_); }
  std::size_t size_bytes() const noexcept { return size_bytes_; }
  const symmetric_memory* symmetric() const noexcept { return symmetric_.get(); }

  /// True once the device began another life, or ended.
  bool stale() const noexcept;

  /// Bytes that a failed operation left half-written, and the first cause.
  struct wound {
    std::size_t begin;
    std::size_t end;
    caf::error cause;
  };

  /// None if no failed operation left bytes of [begin, end) half-written.
  /// @errors errc::indeterminate with the first cause
  caf::error check_determinate(std::size_t begin, std::size_t end) const;
  /// As `check_determinate`, and none of the writers that are still at it has failed. Under the
  /// lock of the order.
  caf::error check_readable(std::size_t begin, std::size_t end) const;
  /// The first cause of each byte stays.
  void mark_indeterminate(const wound& x);
  /// [begin, end) is wholly written again: gives the wounds that this heals, cut to the range.
  std::vector<wound> heal(std::size_t begin, std::size_t end);

  /// An admitted use of a range; `admission` keeps them, under its lock.
  struct access {
    std::weak_ptr<operation> by; // which may hold the buffer itself
    const part* at;
    std::size_t begin;
    std::size_t end;
    bool writes;
  };
  std::vector<access> accesses;

  /// What user streams hold or are about to (`acquire` without `release` so far); under
  /// admission's lock.
  int acquired_for_reading = 0;
  bool acquired_for_writing = false;
  /// How often they really do: what can be released.
  int granted_for_reading = 0;
  int granted_for_writing = 0;

  /// What admission looks at: the first bytes.
  static constexpr std::size_t looked_at = 96;

private:
  std::shared_ptr<device_state> home_;
  std::uint64_t generation_;
  std::atomic<bool> wounded_{false};
  std::uint64_t id_;
  void* address_;
  std::size_t size_bytes_;
  std::function<void(void*)> deleter_;
  const std::shared_ptr<symmetric_memory> symmetric_;
  mutable std::mutex wounds_mutex_;
  std::vector<wound> wounds_; // disjoint
};

} // namespace troupe::detail
