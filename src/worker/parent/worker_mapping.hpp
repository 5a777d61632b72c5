/// Memory that a worker maps.
#pragma once

#include <caf/error.hpp>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace troupe::detail {

class worker_link;

/// Memory that is mapped in one worker, or about to be. Keeps no worker alive.
/// @thread any
class worker_mapping {
public:
  explicit worker_mapping(std::weak_ptr<worker_link> in) noexcept : in_(std::move(in)) {}

  /// Returns null if the worker is gone.
  std::shared_ptr<worker_link> in() const noexcept { return in_.lock(); }
  bool is_in(const std::weak_ptr<const worker_link>& x) const noexcept {
    return !in_.owner_before(x) && !x.owner_before(in_);
  }
  /// Returns true if the worker is gone, or has not mapped it.
  bool is_over() const { return in_.expired() || has_failed(); }
  bool has_failed() const;
  bool is_there() const;

  /// Notes the reply of the worker.
  void end(caf::error result);
  /// Waits for the reply. A worker that does not reply within its limit is given up.
  caf::error wait(worker_link& in);
  /// Calls `f` as soon as it is mapped; never if it has failed, or the worker is gone. One `f` at
  /// most.
  void when_there(std::function<void(worker_link&)> f);

private:
  const std::weak_ptr<worker_link> in_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<caf::error> result_; ///< none yet: the worker has not replied
  std::function<void(worker_link&)> when_there_;
};

} // namespace troupe::detail
