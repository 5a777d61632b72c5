#include "actors/reply.hpp"
#include "actors/spawn.hpp"
#include "actors/subscribers.hpp"
#include "core/device_core.hpp"
#include <troupe/device.hpp>
#include <troupe/flight_record.hpp>

#include <caf/all.hpp>

#include <cstring>
#include <utility>

namespace troupe::detail {

namespace {

std::vector<std::byte> as_bytes(const std::vector<std::uint8_t>& from) {
  std::vector<std::byte> to(from.size());
  if (!from.empty())
    std::memcpy(to.data(), from.data(), from.size());
  return to;
}

/// The address of a device. Control only: requests become operations, which answer by themselves.
class device_actor final : public actor_base<> {
public:
  device_actor(caf::actor_config& cfg, device_core core)
      : actor_base(cfg), core_(std::move(core)) {}

  caf::behavior make_behavior() override {
    watch_ =
        core_.state().watch([self = caf::actor_cast<caf::actor>(this)](
                                const device_changed& change) { detail::anon_send(self, change); });
    return with_exit(
        [this](caf::exit_msg& x) { quit(x.reason); },
        [this](const allocate& x) {
          return reply_to(core_.allocate(x.count, x.type, x.zeroed, x.options));
        },
        [this](const upload& x) {
          return reply_to(
              core_.upload(x.target, std::make_shared<host_range>(x.source), x.options));
        },
        [this](const download& x) { return reply_with_memory(x); },
        [this](const fill& x) {
          return reply_to(core_.fill(x.target, as_bytes(x.element), x.options));
        },
        [this](const copy& x) { return reply_to(core_.copy(x.target, x.source, x.options)); },
        [this](const troupe::launch& x) {
          return reply_to(
              core_.launch(x.name, as_bytes(x.arguments), x.reads, x.writes, x.options));
        },
        [this](const launch_callable& x) {
          return reply_to(core_.launch(x.function, x.reads, x.writes, x.options));
        },
        [this](const offer& x) -> caf::result<gpu_token> {
          auto token = core_.offer(x.memory, x.grace);
          if (!token)
            return token.error();
          return *token;
        },
        [this](const claim& x) { return reply_to(core_.claim(x.token, x.mode, x.options)); },
        [this](const stats& x) { return reply_to(core_.stats(x.options)); },
        [this](const reset& x) { return reply_to(core_.reset(x.options)); },
        [this](const record_flight& x) { return reply_to(core_.record_flight(x.path, x.options)); },
        [this](const shutdown&) {
          core_.shut_down(make_error(errc::unavailable, "the device was shut down"));
        },
        [this](const watch_generation&) {
          if (auto who = subscribers_.add(this); who && last_.device >= 0)
            detail::send(this, who, last_);
        },
        [this](const device_changed& change) {
          last_ = change;
          subscribers_.tell(this, change);
        });
  }

  void on_exit() override {
    core_.state().unwatch(watch_);
    subscribers_.clear();
  }

private:
  template <class T> reply_of<T> reply_to(const std::shared_ptr<operation_of<T>>& op) {
    return reply_when_answered(this, core_.owner(), op);
  }

  caf::result<host_buffer> reply_with_memory(const download& x) {
    host_buffer target{x.source.size_bytes()};
    auto op = core_.download(x.source, std::make_shared<host_range>(target), x.options);
    auto answer = std::make_shared<operation_of<host_buffer>>("download", 0);
    answer->value = std::move(target);
    core_.owner().reply_to_actor(*op);
    op->on_answer([op, answer] { answer->answer(op->error()); });
    return reply_to(answer);
  }

  const device_core core_;
  std::uint64_t watch_ = 0;
  device_changed last_;
  subscriber_list subscribers_;
};

} // namespace

caf::actor spawn_device_actor(caf::actor_system& sys, device_core core) {
  return sys.spawn<device_actor>(std::move(core));
}

} // namespace troupe::detail
