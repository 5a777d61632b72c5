#include "collective/connect_beside.hpp"

#include "collective/communicator.hpp"
#include "foundation/fair_limit.hpp"
#include "foundation/start_thread.hpp"
#include "lane/lane.hpp"

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

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

  /// Waits until all threads have left, or one has an error. Returns the first one.
  caf::error wait(std::chrono::nanoseconds limit) {
    std::unique_lock lock{mutex_};
    if (fair_limit left{limit};
        !left.wait(changed_, lock, [this] { return running_ == 0 || first_; }))
      note(make_error(
          errc::unavailable,
          "a communicator was not connected within " +
              std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(limit).count()) +
              " ms"));
    return first_;
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
  auto& lane = *target.lanes()[index];
  auto own = open_beside(on, lane.state().ordinal());
  if (!with.arrive(own ? caf::error{} : own.error()))
    return with.leave({});
  auto error = target.call_from_outside(target.local_ranks()[index], [&](auto& rank) {
    return rank.connect(own->stream, connect_scope::everything);
  });
  const auto destroyed = own->device->destroy_stream(own->stream);
  with.leave(error ? error : destroyed);
}

} // namespace

caf::error connect_beside(backend& on, const std::shared_ptr<communicator>& target,
                          const communicator_id& id, std::chrono::nanoseconds limit) {
  const auto ranks = target->lanes().size();
  const auto with = std::make_shared<meeting>(ranks);
  for (std::size_t i = 0; i < ranks; ++i)
    if (auto error =
            start_detached_thread([&on, target, i, with] { connect_rank(on, *target, i, *with); },
                                  "to connect a communicator"))
      with->leave(error);
  auto result = with->wait(limit);
  if (result)
    on.call_off(id);
  return result;
}

} // namespace troupe::detail
