/// The record that admission keeps of a request that may be made again after a loss.
#pragma once

#include "operation/admission_lock.hpp"
#include "operation/buffer.hpp"
#include <troupe/error.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace troupe::detail {

class operation;
struct use;

/// The order of a request that may be made again (`request_options::max_retries`), and the writes
/// that its buffers had seen when its last attempt was admitted. Changes under the admission lock;
/// the request itself reads it when the attempt has been answered.
class retry_record {
public:
  /// The number of requests of one admission that wait for another attempt, or may come to do so.
  using counter = std::atomic<std::int64_t>;

  explicit retry_record(std::shared_ptr<counter> waiting) : waiting_(std::move(waiting)) {}
  ~retry_record() { close(); }
  retry_record(const retry_record&) = delete;
  retry_record& operator=(const retry_record&) = delete;

  /// Called when an attempt has failed, before that is visible, and when one is put off.
  /// @thread any, as the next two
  void begin_wait() noexcept {
    auto before = stage::attempted;
    if (stage_.compare_exchange_strong(before, stage::waiting))
      waiting_->fetch_add(1);
  }
  /// Called when the next attempt was admitted.
  void end_wait() noexcept { leave(stage::attempted); }
  /// Called when the request is answered: there is no other attempt.
  void close() noexcept { leave(stage::closed); }

  /// A buffer of the request.
  struct used_buffer {
    std::weak_ptr<buffer> memory;  ///< weak: the request may have been answered
    std::uint64_t writes_seen = 0; ///< `buffer::admitted_writes` once the attempt was admitted
    std::uint64_t own_writes = 0;  ///< how many of them are of the attempt
  };

  /// Notes an attempt with these uses that was admitted. `losses`: the losses so far.
  void note_admitted(locked lock, std::span<const use> uses, std::uint64_t losses);
  /// Notes an attempt that was put off: it was not admitted, and is made after those before it.
  void note_deferred(locked lock, std::span<const use> uses);

  /// Sets the position among requests that may be made again, at the first attempt.
  void set_key(locked, std::uint64_t key) noexcept { key_ = key; }
  /// Returns that position; 0: no attempt was made yet.
  std::uint64_t key() const noexcept { return key_; }
  const std::vector<used_buffer>& buffers(locked) const noexcept { return buffers_; }
  /// Returns whether the last attempt was put off.
  bool is_deferred() const noexcept { return losses_seen_ == deferred; }
  /// Returns whether there was a loss since the last attempt was admitted.
  bool has_loss_since(std::uint64_t losses) const noexcept { return losses > losses_seen_; }

private:
  static constexpr std::uint64_t deferred = 0; ///< losses are counted from 1

  enum class stage : std::uint8_t { attempted, waiting, closed };

  void leave(stage next) noexcept {
    if (stage_.exchange(next) == stage::waiting)
      waiting_->fetch_sub(1);
  }
  void note(locked, std::span<const use> uses, std::uint64_t own_writes);

  const std::shared_ptr<counter> waiting_;
  std::atomic<stage> stage_{stage::attempted};
  std::uint64_t key_ = 0;
  std::uint64_t losses_seen_ = deferred;
  std::vector<used_buffer> buffers_; ///< each once
};

/// Checks that a request may be made again: it must not read what it writes.
/// @errors errc::invalid_argument
caf::error check_may_repeat(const operation& x);

} // namespace troupe::detail
