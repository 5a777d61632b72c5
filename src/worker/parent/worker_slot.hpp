/// The workers of one device in a pool.
#pragma once

#include "worker/parent/worker_link.hpp"

#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <utility>
#include <vector>

namespace troupe::detail {

/// The worker of a device and its spare.
/// `Running` is a worker of the pool: its `link`, null if there is no worker, and all that ends
/// with it. @thread any
template <class Running> class worker_slot {
public:
  /// Returns the worker. If it is lost, the spare becomes the worker; if both are lost, `start`
  /// makes one. `stop` cancels the current start, also of a spare. `end` gets the lost workers.
  /// @errors errors of `start`
  template <class Start, class End>
  caf::expected<std::shared_ptr<worker_link>> provide(Start start, End end,
                                                      const std::stop_token& stop) {
    if (auto link = take(end))
      return link;
    return until_stopped(stop, [&]() -> caf::expected<std::shared_ptr<worker_link>> {
      std::lock_guard one_at_a_time{starting_}; // a spare may be starting
      if (auto link = take(end))
        return link;
      auto started = start(stop_token());
      if (!started)
        return started.error();
      std::lock_guard lock{mutex_};
      closed_ = false;
      now_ = std::move(*started);
      return now_.link;
    });
  }
  /// Does the same for the spare. `end` may block, and the device may need another worker
  /// meanwhile.
  /// @errors also errc::unavailable: the device is closed
  template <class Start, class End>
  caf::error provide_spare(Start start, End end, const std::stop_token& stop) {
    return until_stopped(stop, [&]() -> caf::error {
      std::lock_guard one_at_a_time{starting_};
      std::unique_lock lock{mutex_};
      if (closed_)
        return make_error(errc::unavailable, "the device is closed");
      if (is_there(spare_))
        return {};
      put_aside(spare_);
      auto lost = std::exchange(lost_, {});
      lock.unlock();
      end(std::move(lost));
      auto started = start(stop_token());
      if (!started)
        return started.error();
      lock.lock();
      spare_ = std::move(*started);
      return {};
    });
  }
  /// Makes `spare` the worker. Returns the former one; none: it is lost, or `spare` is not the
  /// spare any more.
  std::optional<Running> move_to_spare(const worker_link& spare) {
    std::lock_guard lock{mutex_};
    if (!is_there(now_) || !is_there(spare_) || spare_.link.get() != &spare)
      return std::nullopt;
    return std::exchange(now_, std::exchange(spare_, {}));
  }
  /// Cancels starts and gives the worker, the spare and the lost workers to `end`.
  template <class End> void release(End end) {
    {
      std::lock_guard lock{mutex_};
      closed_ = true;
    }
    stop_starting();
    std::lock_guard one_at_a_time{starting_};
    std::unique_lock lock{mutex_};
    auto now = std::exchange(now_, {});
    auto spare = std::exchange(spare_, {});
    auto lost = std::exchange(lost_, {});
    stop_ = std::stop_source{};
    lock.unlock();
    end(std::move(now), std::move(spare), std::move(lost));
  }

  /// Sets a worker that was started elsewhere. To be called before all other functions.
  void begin_with(Running first) { now_ = std::move(first); }
  std::shared_ptr<worker_link> current() const {
    std::lock_guard lock{mutex_};
    return now_.link;
  }
  std::shared_ptr<worker_link> spare() const {
    std::lock_guard lock{mutex_};
    return spare_.link;
  }

private:
  /// Runs `f`, which starts a worker, and cancels it on `stop`.
  template <class F> auto until_stopped(const std::stop_token& stop, F f) {
    auto result = [&] {
      const std::stop_callback on_stop{stop, [this] { stop_starting(); }};
      return f();
    }();
    if (stop.stop_requested()) {
      std::lock_guard lock{mutex_};
      stop_ = std::stop_source{};
    }
    return result;
  }
  static bool is_there(const Running& x) { return x.link && !x.link->lost(); }
  void put_aside(Running& x) {
    if (x.link)
      lost_.push_back(std::exchange(x, {}));
  }
  template <class End> std::shared_ptr<worker_link> take(End& end) {
    std::unique_lock lock{mutex_};
    if (is_there(now_))
      return now_.link;
    put_aside(now_);
    if (is_there(spare_)) {
      now_ = std::exchange(spare_, {}); // at once: the lost workers can wait
      return now_.link;
    }
    put_aside(spare_);
    auto lost = std::exchange(lost_, {});
    lock.unlock();
    end(std::move(lost));
    return nullptr;
  }
  /// Cancels the current start, and later ones until `stop_` is replaced.
  void stop_starting() {
    std::unique_lock lock{mutex_};
    auto stop = stop_;
    lock.unlock();
    stop.request_stop();
  }
  std::stop_token stop_token() const {
    std::lock_guard lock{mutex_};
    return stop_.get_token();
  }

  mutable std::mutex mutex_; ///< held for short times only
  Running now_;
  Running spare_;
  std::vector<Running> lost_; ///< to be ended later
  std::stop_source stop_;     ///< cancels the current start
  bool closed_ = false;       ///< the device was released, and is not in use again
  std::mutex starting_;       ///< held while a worker starts; locked before `mutex_`
};

} // namespace troupe::detail
