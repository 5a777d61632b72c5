/// Device memory: which operations use it, in which order, and whether its content is valid.
#pragma once

#include "operation/admission_lock.hpp"
#include <troupe/error.hpp>
#include <troupe/launch.hpp>

#include <algorithm>
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
struct part;

/// Returns the error for readers of memory that a failed operation left indeterminate.
caf::error indeterminate(const caf::error& cause);
/// Returns the error for readers of memory that a request which did not run would have written.
caf::error skipped(const caf::error& cause);

/// An admitted use of a range of a buffer.
struct access {
  std::weak_ptr<operation> by; // weak: the operation may own the buffer
  const part* at = nullptr;
  std::size_t begin = 0;
  std::size_t end = 0;
  bool writes : 1 = false;
  std::uint64_t since : 63 = 0; ///< sequence number of this access among all accesses
};

/// Accesses in any order. The first one is stored in the list object: usually it is the only one.
class access_list {
public:
  std::size_t size() const noexcept { return more_.size() + (any_ ? 1 : 0); }
  access& operator[](std::size_t i) noexcept { return i == 0 ? first_ : more_[i - 1]; }
  const access& operator[](std::size_t i) const noexcept { return i == 0 ? first_ : more_[i - 1]; }
  /// Returns the index of the first access at or after `i` that overlaps [begin, end), or `size()`.
  std::size_t next_in(std::size_t i, std::size_t begin, std::size_t end) const noexcept {
    auto overlaps = [=](const access& x) { return x.begin < end && begin < x.end; };
    if (i == 0 && any_ && overlaps(first_))
      return 0;
    auto from = more_.begin() + static_cast<std::ptrdiff_t>(i == 0 ? 0 : i - 1);
    auto found = std::find_if(from, more_.end(), overlaps);
    return found == more_.end() ? size() : static_cast<std::size_t>(found - more_.begin()) + 1;
  }
  void add(access x) {
    if (any_)
      more_.push_back(std::move(x));
    else
      first_ = std::move(x);
    any_ = true;
  }
  /// Removes the `i`th access. The last access moves to its index.
  void remove(std::size_t i) noexcept {
    if (more_.empty()) {
      first_.by.reset();
      any_ = false;
      return;
    }
    if (i != more_.size())
      (*this)[i] = std::move(more_.back());
    more_.pop_back();
  }

  /// Returns whether it is time to scan all accesses for those that are over. Not for each use: a
  /// scan costs time in proportion to the number of accesses.
  bool crowded() const noexcept { return size() >= crowd_; }
  /// Called after that scan.
  void looked_through() noexcept { crowd_ = static_cast<std::uint32_t>(2 * size() + least_crowd); }

private:
  static constexpr std::size_t least_crowd = 8;

  access first_;
  bool any_ = false;
  std::uint32_t crowd_ = least_crowd;
  std::vector<access> more_;
};

/// Bytes whose content is not what the program asked for, and the first cause. Either an operation
/// failed while it wrote them (indeterminate), or a request that did not run left them unchanged
/// (skipped).
struct unreadable_range {
  /// The value of `skipped_by` if several requests were skipped, or one of another process.
  static constexpr std::uint64_t several = UINT64_MAX;

  std::size_t begin;
  std::size_t end;
  caf::error cause;
  std::uint64_t skipped_by = 0; ///< number of the request; 0: indeterminate

  bool half_written() const noexcept { return skipped_by == 0; }
  /// Returns the error for readers of the bytes.
  caf::error error() const { return half_written() ? indeterminate(cause) : skipped(cause); }
};

/// The skipped bytes that a request may read nevertheless.
class skipped_reads {
public:
  /// Includes no bytes.
  constexpr skipped_reads() = default;
  /// Includes the ranges that only the request of this number left skipped. 0: none.
  static constexpr skipped_reads of(std::uint64_t number) noexcept { return skipped_reads{number}; }
  static constexpr skipped_reads all() noexcept { return skipped_reads{unreadable_range::several}; }

  constexpr bool any() const noexcept { return number_ != 0; }
  constexpr bool includes(std::uint64_t skipped_by) const noexcept {
    return skipped_by != 0 && (number_ == unreadable_range::several || number_ == skipped_by);
  }
  /// Returns the number of the request that is retried, or `own` for a first attempt.
  constexpr std::uint64_t identity(std::uint64_t own) const noexcept {
    return number_ != 0 && number_ != unreadable_range::several ? number_ : own;
  }

private:
  constexpr explicit skipped_reads(std::uint64_t number) : number_(number) {}

  std::uint64_t number_ = 0;
};

/// Removes the bytes [begin, end) from `all`, which are disjoint and in order, and returns the
/// removed ranges. Only ranges that `which` includes are affected; all if it is null.
std::vector<unreadable_range> cut_out(std::vector<unreadable_range>& all, std::size_t begin,
                                      std::size_t end, const skipped_reads* which = nullptr);

inline bool reads(access_mode mode) noexcept { return mode != access_mode::write; }
inline bool writes(access_mode mode) noexcept { return mode != access_mode::read; }

/// Memory that another process, or foreign code of this one, lends.
struct borrowed_memory {
  void* address = nullptr;
  std::size_t size_bytes = 0;
  bool read_only = false;
  bool has_no_peers = false; ///< other devices do not reach it
  /// A word that the lender reads, as `buffer::begin_write` says; null: none.
  std::atomic<std::uint64_t>* unfinished = nullptr;
  /// Called with the marked ranges when this process no longer uses it. @thread the lane, or any
  std::function<void(std::vector<unreadable_range>)> give_back;
};

/// One allocation of one device in one generation. Its lane frees it, whichever thread drops it.
class alignas(64) buffer {
public:
  using unreadable_range = detail::unreadable_range;

  /// `deleter`: for memory of the user (`adopt`). Without one, the memory belongs to the device's
  /// pool. `has_no_peers`: other devices do not reach it
  buffer(std::shared_ptr<device_state> home, std::uint64_t id, std::uint64_t generation,
         void* address, std::size_t size_bytes, std::function<void(void*)> deleter = {},
         bool has_no_peers = false);
  buffer(std::shared_ptr<device_state> home, std::uint64_t id, std::uint64_t generation,
         borrowed_memory memory);
  ~buffer();
  buffer(const buffer&) = delete;
  buffer& operator=(const buffer&) = delete;

  device_state& home() const noexcept { return *home_; }
  std::uint64_t id() const noexcept { return id_; }
  std::uint64_t generation() const noexcept { return generation_; }
  std::byte* address() const noexcept { return static_cast<std::byte*>(address_); }
  std::size_t size_bytes() const noexcept { return size_bytes_; }

  /// Returns true once the generation of this memory has ended. For borrowed memory: once the
  /// process that lends it, or has mapped it, is gone.
  bool stale() const noexcept;
  /// Returns whether it is memory that another process, or foreign code of this one, lends.
  bool is_borrowed() const noexcept { return incarnation_ != 0; }
  /// Returns whether the memory is lent for reading only.
  bool read_only() const noexcept { return read_only_; }
  /// Returns whether other devices do not reach the memory, also where they reach their peers'.
  bool has_no_peers() const noexcept { return has_no_peers_; }

  /// Returns no error if no byte of [begin, end) is indeterminate.
  /// @errors errc::indeterminate with the first cause
  caf::error check_determinate(std::size_t begin, std::size_t end) const;
  /// Returns whether no byte is indeterminate or skipped.
  bool whole() const noexcept { return !has_unreadable_.load(std::memory_order_acquire); }
  /// Returns no error if no byte of [begin, end) is indeterminate, or skipped and not in
  /// `accepted`, and if no unsettled writer of the range has failed.
  /// @errors errc::indeterminate, errc::skipped with the first cause
  caf::error check_readable(locked, std::size_t begin, std::size_t end,
                            const skipped_reads& accepted = {}) const;
  /// Marks a range. Each byte keeps its first cause, but indeterminate replaces skipped.
  void mark(const unreadable_range& x);
  /// Removes and returns the marks, cut to [begin, end), which is wholly overwritten.
  std::vector<unreadable_range> mark_overwritten(std::size_t begin, std::size_t end) {
    return mark_overwritten(begin, end, nullptr);
  }
  /// The same for the marks that `which` includes.
  std::vector<unreadable_range> mark_overwritten(std::size_t begin, std::size_t end,
                                                 const skipped_reads& which) {
    return mark_overwritten(begin, end, &which);
  }

  /// Counts a use that writes, or a hold for writing, in the lender's word, until `end_write`. The
  /// word also has `marked` while the memory has marks. It is never 0 while work that was issued
  /// may write to the memory, nor while a byte is not what the program asked for. So if the process
  /// ends, and the word is 0 then, the memory is complete. Does nothing without a word.
  /// To be called before the work can be issued.
  void begin_write() noexcept {
    if (unfinished_ != nullptr)
      unfinished_->fetch_add(1);
  }
  /// To be called when the work is over, and its marks are set. A part that uses borrowed memory
  /// has `part::several_generations`.
  void end_write() noexcept {
    if (unfinished_ != nullptr)
      unfinished_->fetch_sub(1);
  }
  static constexpr std::uint64_t marked = std::uint64_t{1} << 63;

  /// The uses of this buffer; under the admission lock.
  access_list accesses;
  /// The number of uses so far that write; under the admission lock.
  std::uint64_t admitted_writes = 0;

  /// Holds of user streams (`acquire` without `release` so far, also pending ones), of foreign code
  /// (`lent_memory`) and of other processes (`claim`); under the admission lock.
  int acquired_for_reading = 0;
  bool acquired_for_writing = false;
  /// The number of holds that are granted and can be released.
  int granted_for_reading = 0;
  int granted_for_writing = 0;
  /// The range that a user's stream may write, in bytes of the buffer.
  std::size_t granted_begin = 0;
  std::size_t granted_end = 0;

  /// Adds or removes a hold.
  void take(locked, access_mode mode) noexcept;
  void give_back(locked, access_mode mode) noexcept;
  /// The number of holds of this kind that are granted.
  int& granted(locked, access_mode mode) noexcept {
    return detail::writes(mode) ? granted_for_writing : granted_for_reading;
  }

private:
  std::vector<unreadable_range> mark_overwritten(std::size_t begin, std::size_t end,
                                                 const skipped_reads* which);
  /// Publishes whether there are marks. Under `unreadable_mutex_`.
  void note_marks() noexcept;

  std::atomic<bool> has_unreadable_{false};
  const bool read_only_ = false;
  const bool has_no_peers_ = false;
  std::atomic<std::uint64_t>* const unfinished_ = nullptr; ///< null: no lender reads it
  std::uint64_t generation_;
  const std::uint64_t incarnation_ = 0; ///< of borrowed memory: that of the device; else 0
  const std::shared_ptr<device_state> home_;
  std::uint64_t id_;
  void* address_;
  std::size_t size_bytes_;
  std::function<void(void*)> deleter_;
  std::function<void(std::vector<unreadable_range>)> give_back_;
  mutable std::mutex unreadable_mutex_;
  std::vector<unreadable_range> unreadable_; // disjoint, in order
};

} // namespace troupe::detail
