/// The order of requests that are made again after losses.
#pragma once

#include "operation/operation.hpp"
#include "operation/retry_record.hpp"
#include <troupe/error.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace troupe::detail {

/// A further attempt of a request, to be admitted.
struct retry {
  std::shared_ptr<operation> attempt; ///< has the record of the request
  caf::error refusal{};               ///< why it is not admitted
};

/// Keeps requests that may be made again in their order, also across losses. From the moment at
/// which a loss is known until the requests that it ends are made again, it defers new ones: these
/// are made after those, in one step. So no such request gets between an earlier one and its next
/// attempt. A request of another kind may, and then the earlier one is not made again (`check`).
class retry_order {
public:
  /// Returns the record of a new request.
  std::shared_ptr<retry_record> new_record() const {
    return std::make_shared<retry_record>(waiting_);
  }

  /// A device is lost. Requests are deferred until `end_loss`.
  void begin_loss(locked) noexcept {
    losses_.fetch_add(1, std::memory_order_relaxed);
    ++open_;
  }
  /// All requests that the loss ends have failed.
  void end_loss(locked) noexcept { --open_; }
  /// Returns how many losses are between the two.
  std::uint64_t open_losses(locked) const noexcept { return open_; }
  /// Returns the number of losses so far, counted from 1.
  std::uint64_t losses() const noexcept { return losses_.load(std::memory_order_relaxed); }

  /// Notes that `x`, which may be made again, was admitted.
  void note_admitted(locked lock, const operation& x);
  /// Returns how many requests wait for another attempt. Some may not be in the queue yet.
  std::size_t waiting() const noexcept {
    return static_cast<std::size_t>(std::max<std::int64_t>(waiting_->load(), 0));
  }
  /// Returns whether first attempts are put off: a loss is open, or requests wait to be made again.
  bool defers(locked) const noexcept { return open_ != 0 || waiting() != 0; }
  /// Puts `x` off, a first attempt.
  /// @errors errc::worker_lost: it is deferred
  caf::error defer(locked lock, const operation& x);
  /// Refuses each attempt whose buffers another request was to write since its former attempt, if
  /// that request is not made again after it. `all` is in order.
  static void check(locked lock, std::span<retry> all);
  /// Removes from `users`, which are the users of a lost device, what the loss does not end. An
  /// operation admitted after `last` waits for the device, and is not in the lost process. Of these
  /// the loss ends only attempts that use a buffer of an earlier request that is made again: they
  /// could prevent that (`check`), and are made again behind it.
  static void leave_out_waiting(locked lock, std::vector<std::shared_ptr<operation>>& users,
                                std::uint64_t last);

private:
  void set_key(locked lock, retry_record& x) noexcept {
    if (x.key() == 0)
      x.set_key(lock, ++last_key_);
  }

  const std::shared_ptr<retry_record::counter> waiting_ =
      std::make_shared<retry_record::counter>(0);
  std::atomic<std::uint64_t> losses_{1};
  std::uint64_t open_ = 0;
  std::uint64_t last_key_ = 0;
};

} // namespace troupe::detail
