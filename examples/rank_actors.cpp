// One user's actor per GPU, like one process per rank in MPI. Each knows only its own device and
// buffer, and calls the collectives for its rank. The k-th calls of all ranks belong together.

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
constexpr int steps = 5;

/// A rank that starts with its number plus one in each element, and sums over all ranks in each
/// step. `outcome` must outlive the actor.
class rank_actor : public caf::event_based_actor {
public:
  rank_actor(caf::actor_config& cfg, caf::actor world, caf::actor device, int rank, int ranks,
             caf::error& outcome)
      : event_based_actor(cfg), world_(std::move(world)), device_(std::move(device)), rank_(rank),
        ranks_(ranks), outcome_(outcome) {}

  caf::behavior make_behavior() override {
    ask(device_, troupe::allocate{.count = count, .type = troupe::dtype::float64},
        [this](const troupe::any_gpu_ref& memory) { fill(memory); });
    return {}; // the actor lives as long as an answer is outstanding
  }

private:
  /// Sends a request. Its failure ends the actor.
  template <class Request, class F> void ask(const caf::actor& whom, Request what, F then) {
    troupe::request(this, whom, std::move(what), 10s)
        .then(std::move(then), [this](const caf::error& why) { finish(why); });
  }

  void fill(const troupe::any_gpu_ref& memory) {
    buffer_ = memory;
    ask(device_, troupe::fill{.target = memory, .element = static_cast<double>(rank_ + 1)},
        [this] { step(0); });
  }

  void step(int number) {
    if (number == steps) {
      ask(device_, troupe::download{.source = buffer_},
          [this](const troupe::host_buffer& result) { check(result); });
      return;
    }
    ask(world_, troupe::rank_local{.rank = rank_, .call = troupe::all_reduce{.send = {buffer_}}},
        [this, number](const troupe::collective_done&) { step(number + 1); });
  }

  void check(const troupe::host_buffer& result) {
    auto want = static_cast<double>(ranks_ + 1) / 2; // the mean of the initial values
    for (int i = 0; i < steps; ++i)
      want *= ranks_;
    std::size_t right = 0;
    for (auto x : result.as<double>())
      right += x == want;
    std::printf("rank %d: %zu of %zu elements are %g\n", rank_, right, count, want);
    finish(right == count ? caf::error{}
                          : troupe::make_error(troupe::errc::internal,
                                               "rank " + std::to_string(rank_) + " is wrong"));
  }

  void finish(const caf::error& why) {
    outcome_ = why;
    quit();
  }

  caf::actor world_;
  caf::actor device_;
  int rank_;
  int ranks_;
  troupe::any_gpu_ref buffer_;
  caf::error& outcome_;
};

caf::error run(caf::actor_system& sys) {
  auto world = troupe::world::open(sys, {.devices = troupe::all_devices(sys)});
  if (!world)
    return world.error();
  const auto ranks = static_cast<int>(world->size());
  std::vector<caf::error> outcomes(world->size());
  caf::scoped_actor self{sys};
  std::vector<caf::actor> actors;
  for (int rank = 0; rank < ranks; ++rank) {
    auto device = world->device_of(static_cast<std::size_t>(rank)).actor();
    if (!device)
      return device.error();
    actors.push_back(sys.spawn<rank_actor>(world->actor(), *device, rank, ranks,
                                           std::ref(outcomes[static_cast<std::size_t>(rank)])));
  }
  for (auto& x : actors)
    self->wait_for(x);
  for (auto& x : outcomes)
    if (x)
      return x;
  return {};
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
