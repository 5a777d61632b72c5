#include "collective/connect_beside.hpp"

#include "collective/communicator.hpp"
#include "foundation/fair_limit.hpp"
#include "lane/lane.hpp"
#include "runtime/runtime.hpp"

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

/// How long a thread may stay in a call that was called off. NCCL may load code in it.
constexpr std::chrono::seconds leaving_limit{30};

/// A rank's device, opened once more, and a stream of it.
struct connecting_device {
  std::unique_ptr<backend_device> device;
  stream_view stream;
};

caf::expected<connecting_device> open_beside(backend& on, int ordinal) {
  auto device = on.open_beside(ordinal);
  if (!device)
    return device.error();
  if (auto error = (*device)->bind())
    return error;
  auto stream = (*device)->create_stream();
  if (!stream)
    return stream.error();
  return connecting_device{std::move(*device), *stream};
}

/// The threads, one for each rank. A rank's call waits for the others', so none is made before all
/// threads can make theirs.
class meeting {
public:
  explicit meeting(std::size_t threads) noexcept : arriving_(threads), running_(threads) {}

  /// Returns whether the call is to be made, once all threads have arrived.
  bool arrive(const caf::error& error) {
    std::unique_lock lock{mutex_};
    note(error);
    --arriving_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return arriving_ == 0 || first_; });
    return !first_;
  }

  void leave(const caf::error& error) {
    const std::lock_guard lock{mutex_};
    note(error);
    --running_;
    changed_.notify_all();
  }

  /// Waits until all threads have left, one has an error, or the communicator has ended. Returns
  /// the first error.
  caf::error wait(fair_limit limit, const communicator& target) {
    std::unique_lock lock{mutex_};
    while (running_ > 0 && !first_ && target.live() && !limit.over())
      changed_.wait_until(lock, limit.next());
    if (running_ > 0 && !first_)
      first_ = target.live()
                   ? make_error(errc::unavailable, "a communicator was not connected in time")
                   : target.dead();
    changed_.notify_all();
    return first_;
  }

  bool wait_until_left(fair_limit limit) {
    std::unique_lock lock{mutex_};
    return limit.wait(changed_, lock, [this] { return running_ == 0; });
  }

private:
  void note(const caf::error& error) {
    if (!first_)
      first_ = error;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t arriving_;
  std::size_t running_;
  caf::error first_;
};

void connect_rank(backend& on, communicator& target, std::size_t index, meeting& with) {
  auto own = open_beside(on, target.lanes()[index]->state().ordinal());
  if (!with.arrive(own ? caf::error{} : own.error()))
    return with.leave({});
  auto error = target.call_from_outside(target.local_ranks()[index], [&](auto& rank) {
    return rank.connect(own->stream, connect_scope::everything);
  });
  const auto destroyed = own->device->destroy_stream(own->stream);
  with.leave(error ? error : destroyed);
}

} // namespace

caf::error connect_beside(runtime& owner, const std::shared_ptr<communicator>& target,
                          const communicator_id& id, std::chrono::nanoseconds limit) {
  // The calls of two communicators on different devices could wait for each other.
  static std::mutex one_at_a_time;
  const std::lock_guard lock{one_at_a_time};
  auto& backend = owner.backend();
  const auto ranks = target->lanes().size();
  const auto with = std::make_shared<meeting>(ranks);
  for (std::size_t i = 0; i < ranks; ++i)
    owner.workers().run([&backend, target, i, with] { connect_rank(backend, *target, i, *with); });
  auto result = with->wait(fair_limit{limit}, *target);
  if (!result)
    return {};
  backend.call_off(id);
  if (with->wait_until_left(fair_limit{leaving_limit}))
    return result;
  return owner.end_everything(
      make_error(errc::lane_stuck, "a thread did not return from connecting a communicator (" +
                                       describe(result) + ")"));
}

} // namespace troupe::detail
