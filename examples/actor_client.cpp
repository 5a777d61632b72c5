// A user's actor that talks to devices and to a world by messages. It never blocks: each answer is
// a message and starts the next step.

#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

using namespace std::chrono_literals;

namespace {

constexpr std::size_t count = 1000;

/// Sums 1, 2, ... over the ranks, and ends. `outcome` must outlive the actor.
class client : public caf::event_based_actor {
public:
  client(caf::actor_config& cfg, caf::actor world, std::vector<caf::actor> devices,
         caf::error& outcome)
      : event_based_actor(cfg), world_(std::move(world)), devices_(std::move(devices)),
        buffers_(devices_.size()), outcome_(outcome) {}

  caf::behavior make_behavior() override {
    for (std::size_t rank = 0; rank < devices_.size(); ++rank)
      ask(devices_[rank], troupe::allocate{.count = count, .type = troupe::dtype::float32},
          [this, rank](const troupe::any_gpu_ref& memory) { fill(rank, memory); });
    return {}; // the actor lives as long as an answer is outstanding
  }

private:
  /// Sends a request. Its failure ends the actor.
  template <class Request, class F> void ask(const caf::actor& whom, Request what, F then) {
    troupe::request(this, whom, std::move(what), 10s)
        .then(std::move(then), [this](const caf::error& why) { finish(why); });
  }

  void fill(std::size_t rank, const troupe::any_gpu_ref& memory) {
    buffers_[rank] = memory;
    ask(devices_[rank], troupe::fill{.target = memory, .element = static_cast<float>(rank + 1)},
        [this] { join([this] { reduce(); }); });
  }

  void reduce() {
    ask(world_, troupe::all_reduce{.send = buffers_},
        [this](const troupe::collective_done& answer) {
          std::printf("all_reduce #%llu is done\n",
                      static_cast<unsigned long long>(answer.operation));
          for (std::size_t rank = 0; rank < devices_.size(); ++rank)
            ask(devices_[rank], troupe::download{.source = buffers_[rank]},
                [this, rank](const troupe::host_buffer& result) { check(rank, result); });
        });
  }

  void check(std::size_t rank, const troupe::host_buffer& result) {
    const auto n = devices_.size();
    const auto sum = static_cast<float>(n * (n + 1)) / 2;
    std::size_t right = 0;
    for (auto x : result.as<float>())
      right += x == sum;
    std::printf("rank %zu: %zu of %zu elements are %g\n", rank, right, count,
                static_cast<double>(sum));
    if (right != count)
      return finish(
          troupe::make_error(troupe::errc::internal, "rank " + std::to_string(rank) + " is wrong"));
    join([this] { finish({}); });
  }

  /// Calls `next` when all ranks have reached this point.
  template <class F> void join(F next) {
    if (++arrived_ < devices_.size())
      return;
    arrived_ = 0;
    next();
  }

  void finish(const caf::error& why) {
    outcome_ = why;
    quit();
  }

  caf::actor world_;
  std::vector<caf::actor> devices_;
  std::vector<troupe::any_gpu_ref> buffers_;
  std::size_t arrived_ = 0;
  caf::error& outcome_;
};

caf::error run(caf::actor_system& sys) {
  auto world = troupe::world::open(sys, {.devices = troupe::all_devices(sys)});
  if (!world)
    return world.error();
  std::vector<caf::actor> devices;
  for (std::size_t rank = 0; rank < world->size(); ++rank) {
    auto device = world->device_of(rank).actor();
    if (!device)
      return device.error();
    devices.push_back(std::move(*device));
  }
  caf::error outcome;
  caf::scoped_actor self{sys};
  self->wait_for(sys.spawn<client>(world->actor(), std::move(devices), std::ref(outcome)));
  return outcome;
}

} // namespace

int main(int argc, char** argv) {
  troupe::config cfg;
  auto error = cfg.parse(argc, argv);
  if (!error && !cfg.help_printed()) {
    caf::actor_system sys{cfg};
    error = run(sys);
  }
  if (error) {
    std::fprintf(stderr, "%s\n", troupe::describe(error).c_str());
    return 1;
  }
  return 0;
}
