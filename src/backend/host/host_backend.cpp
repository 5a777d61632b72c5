#include "backend/host/host_communicator.hpp"
#include "backend/host/host_connection.hpp"
#include "backend/host/host_device.hpp"
#include "backend/host/host_group.hpp"
#include "backend/host/host_hub.hpp"
#include "backend/host/host_wire.hpp"
#include "foundation/error_text.hpp"
#include <troupe/backend.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include <unistd.h>

namespace troupe {

namespace detail {

namespace {

/// A communicator whose ranks are arriving.
struct assembly {
  explicit assembly(int size)
      : group(std::make_shared<host_group>(size)), taken(static_cast<std::size_t>(size)) {}

  std::shared_ptr<host_group> group;
  std::vector<bool> taken;  ///< by rank
  std::vector<int> devices; ///< of the ranks that have arrived
  bool unwanted = false;
  bool complete() const noexcept { return devices.size() == taken.size(); }
};

/// Ranks of this process that are joining a communicator with ranks of other processes.
struct arrival {
  std::vector<int> devices;
  waiting_room room;
};

class host_backend final : public backend {
public:
  explicit host_backend(const host_backend_options& options)
      : machine_(std::make_shared<host_machine>(options)), listen_address_(options.listen_address) {
  }

  std::string_view name() const noexcept override { return "host"; }

  int device_count() const noexcept override { return machine_->devices; }

  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    if (auto err = check_ordinal(ordinal))
      return err;
    {
      std::lock_guard lock{machine_->mutex};
      auto opened = machine_->opened[static_cast<std::size_t>(ordinal)];
      if (opened)
        return fail(errc::unavailable, ordinal, "the device is open already");
      opened = true;
    }
    return std::unique_ptr<backend_device>{std::make_unique<host_device>(machine_, ordinal)};
  }

  caf::expected<std::unique_ptr<backend_device>> open_beside(int ordinal) noexcept override {
    if (auto err = check_ordinal(ordinal))
      return err;
    return std::unique_ptr<backend_device>{std::make_unique<host_device>(machine_, ordinal, true)};
  }

  caf::expected<peer_link> link(int from, int to) noexcept override {
    for (const auto ordinal : {from, to})
      if (auto err = check_ordinal(ordinal))
        return err;
    if (from == to)
      return fail(errc::invalid_argument, from, "a device has no link to itself");
    const auto result = machine_->link(from, to);
    if (result.access || result.link.kind != link_kind::memory)
      return result.link;
    return peer_link{};
  }

  caf::expected<communicator_id> make_communicator_id() noexcept override {
    if (!listen_address_.empty())
      return invite();
    static std::atomic<std::uint64_t> next{1};
    const std::array<std::uint64_t, 3> unique{
        static_cast<std::uint64_t>(getpid()),
        static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()),
        next++};
    communicator_id result;
    std::memcpy(result.bytes.data(), unique.data(), sizeof unique);
    return result;
  }

  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override {
    if (size <= 0 || ranks.empty())
      return make_error(errc::invalid_argument, "a communicator needs at least one rank");
    if (const auto where = invitation_of(id))
      return connect(id, *where, size, ranks);
    std::unique_lock lock{mutex_};
    const auto found = assemblies_.find(id.bytes);
    auto mine = found != assemblies_.end() ? found->second : std::make_shared<assembly>(size);
    if (auto err = join(*mine, size, ranks))
      return err;
    if (found == assemblies_.end())
      assemblies_.emplace(id.bytes, mine);
    if (mine->complete()) {
      assemblies_.erase(id.bytes);
      complete_.notify_all();
    } else {
      complete_.wait(lock, [&] { return mine->complete() || mine->unwanted; });
      if (!mine->complete())
        return build_called_off();
    }
    return communicators(std::vector<std::shared_ptr<host_transport>>(ranks.size(), mine->group),
                         ranks);
  }

  std::size_t slab_granularity() const noexcept override { return host_slabs::granularity(); }

  caf::expected<int> make_slab(const memory_slab& what) noexcept override {
    if (auto err = check_ordinal(what.ordinal))
      return err;
    auto made = machine_->slabs.make(what, machine_->bytes_per_device);
    if (!made)
      return std::move(made.error());
    return made->release();
  }

  caf::error map_slab(const memory_slab& what, int descriptor, int by) noexcept override {
    for (const auto ordinal : {what.ordinal, by})
      if (auto err = check_ordinal(ordinal))
        return err;
    return machine_->slabs.map(what, descriptor);
  }

  caf::error unmap_slab(const memory_slab& what) noexcept override {
    return machine_->slabs.unmap(what);
  }

  bool can_be_direct(std::span<const int> ordinals) const noexcept override {
    return std::ranges::all_of(ordinals, [&](int from) {
      return std::ranges::all_of(
          ordinals, [&](int to) { return from == to || machine_->link(from, to).access; });
    });
  }

  /// The same as `build` for ranks that are all here.
  caf::expected<communicator_ranks>
  build_direct(std::span<const local_rank> ranks) noexcept override {
    if (ranks.empty())
      return make_error(errc::invalid_argument, "a communicator needs at least one rank");
    const auto size = static_cast<int>(ranks.size());
    assembly all{size};
    if (auto err = join(all, size, ranks))
      return err;
    return communicators(std::vector<std::shared_ptr<host_transport>>(ranks.size(), all.group),
                         ranks);
  }

  /// The ranks of several processes exchange data through a hub.
  std::size_t direct_bytes() const noexcept override { return 1; }
  caf::expected<communicator_id> make_direct_id() noexcept override {
    return make_communicator_id();
  }
  caf::expected<communicator_ranks>
  join_direct(const communicator_id& id, int rank,
              std::span<const direct_member> members) noexcept override {
    const auto size = static_cast<int>(members.size());
    if (rank < 0 || rank >= size)
      return make_error(errc::invalid_argument, "rank " + std::to_string(rank) + " of " +
                                                    std::to_string(size) + " is out of range");
    const local_rank mine{rank, members[static_cast<std::size_t>(rank)].device};
    return build(id, size, {&mine, 1});
  }

  void call_off(const communicator_id& id) noexcept override {
    std::lock_guard lock{mutex_};
    if (const auto where = invitation_of(id)) {
      if (hub_ && hub_->has_invited(*where))
        hub_->call_off(where->group);
      else if (const auto found = connecting_.find(id.bytes); found != connecting_.end())
        found->second.room.close();
      return;
    }
    const auto found = assemblies_.find(id.bytes);
    if (found == assemblies_.end())
      return;
    found->second->unwanted = true;
    assemblies_.erase(found);
    complete_.notify_all();
  }

  caf::error abort(communicator_ranks ranks) noexcept override {
    for (const auto& x : ranks)
      transport_of(*x).end(make_error(errc::nccl_error, "the communicator was aborted"));
    for (const auto& x : ranks)
      transport_of(*x).wait_quiet();
    return {};
  }

  caf::error destroy(communicator_ranks ranks) noexcept override {
    for (const auto& x : ranks)
      transport_of(*x).wait_idle();
    for (const auto& x : ranks)
      transport_of(*x).leave(static_cast<const host_communicator&>(*x).rank());
    return {};
  }

private:
  using id_bytes = std::array<std::byte, 128>;

  static host_transport& transport_of(const backend_communicator& x) noexcept {
    return static_cast<const host_communicator&>(x).transport();
  }

  communicator_ranks communicators(const std::vector<std::shared_ptr<host_transport>>& transports,
                                   std::span<const local_rank> ranks) const {
    communicator_ranks result;
    for (std::size_t i = 0; i < ranks.size(); ++i)
      result.push_back(std::make_unique<host_communicator>(transports[i], ranks[i].rank));
    return result;
  }

  caf::expected<communicator_id> invite() {
    std::lock_guard lock{mutex_};
    if (!hub_) {
      auto started = host_hub::start(listen_address_);
      if (!started)
        return std::move(started.error());
      hub_ = std::move(*started);
    }
    return id_of(hub_->invite());
  }

  /// Builds ranks that meet other ranks at a hub.
  caf::expected<communicator_ranks> connect(const communicator_id& id, const hub_invitation& where,
                                            int size, std::span<const local_rank> ranks) {
    if (size > most_ranks)
      return make_error(errc::not_supported,
                        "too many ranks for a communicator of several processes: " +
                            std::to_string(size));
    waiting_room* room = nullptr;
    {
      std::lock_guard lock{mutex_};
      const auto found = connecting_.find(id.bytes);
      assembly mine{size};
      if (found != connecting_.end())
        mine.devices = found->second.devices;
      if (auto err = join(mine, size, ranks))
        return err;
      auto& here = connecting_[id.bytes];
      here.devices = std::move(mine.devices);
      room = &here.room;
    }
    auto transports = host_connection::build(where, size, ranks, *room);
    bool unwanted = false;
    {
      std::lock_guard lock{mutex_};
      const auto found = connecting_.find(id.bytes);
      unwanted = room->is_closed();
      for (const auto& x : ranks)
        std::erase(found->second.devices, x.device);
      if (found->second.devices.empty())
        connecting_.erase(found);
    }
    if (!transports && unwanted)
      return build_called_off();
    if (!transports)
      return std::move(transports.error());
    return communicators(*transports, ranks);
  }

  static caf::error fail(errc code, int device, std::string detail) {
    return make_error({.code = code, .detail = std::move(detail), .device = device});
  }

  caf::error check_ordinal(int ordinal) const {
    if (ordinal >= 0 && ordinal < machine_->devices)
      return {};
    return fail(errc::invalid_argument, ordinal, device_out_of_range(ordinal, machine_->devices));
  }

  /// Adds all of `ranks`; after an error, none.
  caf::error join(assembly& to, int size, std::span<const local_rank> ranks) const {
    if (static_cast<std::size_t>(size) != to.taken.size())
      return make_error(errc::invalid_argument, "a communicator of " + std::to_string(size) +
                                                    " ranks, where another rank said " +
                                                    std::to_string(to.taken.size()));
    auto taken = to.taken;
    auto devices = to.devices;
    for (const auto& x : ranks) {
      if (auto err = check_ordinal(x.device))
        return err;
      if (x.rank < 0 || x.rank >= size || taken[static_cast<std::size_t>(x.rank)])
        return fail(errc::invalid_argument, x.device,
                    "rank " + std::to_string(x.rank) + " is already taken, or out of range");
      if (std::find(devices.begin(), devices.end(), x.device) != devices.end())
        return fail(errc::invalid_argument, x.device, "the device has a rank already");
      taken[static_cast<std::size_t>(x.rank)] = true;
      devices.push_back(x.device);
    }
    to.taken = std::move(taken);
    to.devices = std::move(devices);
    return {};
  }

  std::shared_ptr<host_machine> machine_;
  std::mutex mutex_;
  std::condition_variable complete_;
  std::map<id_bytes, std::shared_ptr<assembly>> assemblies_;
  std::map<id_bytes, arrival> connecting_; ///< communicators that are connecting to a hub
  const std::string listen_address_;
  std::unique_ptr<host_hub> hub_; ///< created with the first id
};

} // namespace

} // namespace detail

std::shared_ptr<backend> make_host_backend(host_backend_options options) {
  return std::make_shared<detail::host_backend>(options);
}

} // namespace troupe
