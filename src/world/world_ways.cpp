/// `world_core`: which way a request goes, and NCCL's communicator beside a direct one.
#include "collective/connect_beside.hpp"
#include "operation/admission_lock.hpp"
#include "world/world_core.hpp"

#include <algorithm>
#include <utility>

namespace troupe::detail {

collective_way world_core::way_of(const rank_call& x) const noexcept {
  switch (collectives_) {
  case collectives_policy::nccl:
    return collective_way::nccl;
  case collectives_policy::direct:
    return collective_way::direct;
  case collectives_policy::automatic:
    break;
  }
  const auto bytes = x.plan ? 0 : x.call.count * size_of(x.call.type);
  return bytes <= ways_.direct_up_to[static_cast<std::size_t>(x.call.what)] ? collective_way::direct
                                                                            : collective_way::nccl;
}

bool world_core::waits(locked lock, collective_way way) noexcept {
  if (phase_ > world_phase::ready)
    return false;
  if (!is_beside(way))
    return !has_communicator();
  if (beside_.live && beside_.live->live())
    return false;
  want_beside(lock);
  return true;
}

std::shared_ptr<communicator> world_core::join(locked, collective_way way,
                                               collective_done& view) const {
  const auto& target = is_beside(way) ? beside_.live : current_;
  view.epoch = target->epoch();
  view.membership = membership_;
  view.way = way;
  view.ranks.clear();
  if (!target->absent().empty())
    for (auto i : target->members())
      view.ranks.push_back(static_cast<std::int32_t>(i));
  return target;
}

void world_core::want_beside(locked) {
  if (!std::exchange(beside_.wanted, true) && on_wanted_)
    on_wanted_();
}

void world_core::want_beside_ahead() {
  admission_lock lock;
  beside_.wanted |=
      collectives_ == collectives_policy::automatic &&
      std::ranges::any_of(ways_.direct_up_to, [](auto x) { return x != way_table::no_limit; });
}

bool world_core::wants_beside() const {
  admission_lock lock;
  return phase_ == world_phase::ready && beside_.wanted && !beside_.next;
}

void world_core::build_beside(std::function<void(const caf::error&)> done) {
  std::uint64_t epoch = 0;
  std::vector<world_member> members;
  {
    admission_lock lock;
    epoch = ++last_epoch_;
    members = members_without(lock, {});
  }
  runtime_->workers().run(
      [self = shared_from_this(), epoch, members = std::move(members), done = std::move(done)] {
        auto& backend = self->runtime_->backend();
        const auto id = backend.make_communicator_id();
        if (!id)
          return done(self->end_on_fault(id.error()));
        auto built = backend.build(*id, static_cast<int>(members.size()), self->ranks_without({}));
        if (!built)
          return done(self->end_on_fault(built.error()));
        auto target = self->adopt_beside(epoch, members, std::move(*built));
        if (!target)
          return done(make_error(errc::membership_changed,
                                 "the world changed before this communicator was built"));
        const auto open = [self, target, done](const caf::error& why) {
          if (!why)
            return done(self->open_beside(target) ? caf::error{} : target->dead());
          self->drop_beside(target);
          target->discard(); // calls on it may have failed
          done(why);
        };
        if (auto error = connect_beside(*self->runtime_, target, *id, self->limits_.connect_limit))
          return open(self->end_on_fault(error));
        self->give_access(target, open);
      });
}

/// Returns null if the world has changed since the build began.
std::shared_ptr<communicator> world_core::adopt_beside(std::uint64_t epoch,
                                                       const std::vector<world_member>& members,
                                                       communicator_ranks ranks) {
  auto result = own(epoch, collective_way::nccl, {}, std::move(ranks));
  {
    admission_lock lock;
    if (phase_ <= world_phase::ready && is_ready({}) && members_without(lock, {}) == members) {
      beside_.next = result;
      return result;
    }
  }
  result->retire();
  return nullptr;
}

void world_core::drop_beside(const std::shared_ptr<communicator>& x) {
  admission_lock lock;
  if (beside_.next == x)
    beside_.next.reset();
}

/// Requests go on. Returns false if the communicator has ended.
bool world_core::open_beside(const std::shared_ptr<communicator>& x) {
  {
    admission_lock lock;
    if (beside_.next != x || !x->live())
      return false;
    beside_.live = std::move(beside_.next);
    beside_.wanted = false;
  }
  runtime_->admissions().go_on();
  return true;
}

} // namespace troupe::detail
