/// The requests that wait to be made again after a loss.
#pragma once

#include "admission/admission.hpp"
#include "operation/operation.hpp"
#include <troupe/detail/completion.hpp>
#include <troupe/error.hpp>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace troupe::detail {

/// A request that may be made again, seen by the queue.
class retryable {
public:
  virtual ~retryable() = default;
  /// Returns its position among such requests.
  virtual std::uint64_t key() const noexcept = 0;
  /// Makes its next attempt. Returns null if the request has been answered.
  virtual std::shared_ptr<operation> next_attempt() = 0;
  /// Called when `attempt` was admitted.
  virtual void on_admitted(const std::shared_ptr<operation>& attempt) = 0;
  /// Called when the next attempt was refused with `why`.
  virtual void on_refused(const caf::error& why) = 0;
};

/// Makes requests again that were ended by a loss: all of them in one step, in their order, as soon
/// as the loss has ended what it ends. What their attempts wait for is up to admission: their
/// devices, and the work of the lost process where both use the same memory.
/// @thread any
class retry_queue {
public:
  /// `admissions` outlives this.
  explicit retry_queue(admission& admissions) : admissions_(admissions) {}

  void add(std::shared_ptr<retryable> x);
  /// Makes the requests of the queue again, unless a loss is open: its end does that. Returns false
  /// if requests have failed that are not in the queue yet: call it again soon.
  [[nodiscard]] bool make_again();
  /// Refuses the requests of the queue.
  void refuse_all(const caf::error& why);

private:
  struct entry {
    std::shared_ptr<retryable> who;
    std::shared_ptr<operation> attempt = nullptr; ///< the next one, once it is made
    caf::error refusal = {};
  };
  using entries = std::vector<entry>;

  bool make_waiting(entries& refused);
  entries take();
  bool is_empty();
  bool is_patient(clock::time_point now);

  admission& admissions_;
  std::mutex order_mutex_; // held while requests are made again; locked before the others
  std::optional<clock::time_point> incomplete_since_; // under order_mutex_
  std::mutex mutex_;                                  // of the next one
  entries waiting_;
};

} // namespace troupe::detail
