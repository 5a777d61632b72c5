// A user's actor that awaits its requests in a coroutine. It never blocks, and keeps its state
// between the steps in local variables. Compare actor_client.cpp, where each answer is a message.

#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <future>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr std::size_t count = 1000;

using outcome = troupe::pending<std::size_t>;

/// Sums 1, 2, ... over the ranks. `started` gets what tells how many elements are right.
class client : public caf::event_based_actor {
public:
  client(caf::actor_config& cfg, troupe::world world, std::vector<troupe::gpu_ref<float>> buffers,
         std::promise<outcome>& started)
      : event_based_actor(cfg), world_(std::move(world)), buffers_(std::move(buffers)),
        started_(started) {}

  caf::behavior make_behavior() override {
    started_.set_value(troupe::start(sum(), troupe::executor_of(this)));
    return {troupe::runs_tasks()}; // and the handlers of other messages
  }

private:
  troupe::task<std::size_t> sum() {
    std::vector<float> result(count);
    co_await troupe::value_of(world_.upload(buffers_, rows()));
    co_await troupe::value_of(world_.all_reduce(buffers_));
    co_await troupe::value_of(world_.device_of(0).download(buffers_[0], result));
    const auto n = world_.size();
    co_return static_cast<std::size_t>(
        std::count(result.begin(), result.end(), static_cast<float>(n * (n + 1)) / 2));
  }

  /// Returns what each rank starts with.
  std::vector<std::vector<float>> rows() const {
    std::vector<std::vector<float>> result;
    for (std::size_t rank = 0; rank < world_.size(); ++rank)
      result.emplace_back(count, static_cast<float>(rank + 1));
    return result;
  }

  const troupe::world world_;
  const std::vector<troupe::gpu_ref<float>> buffers_;
  std::promise<outcome>& started_;
};

caf::error run(caf::actor_system& sys) {
  auto world = troupe::world::open(sys, {.devices = troupe::all_devices(sys)});
  if (!world)
    return world.error();
  auto buffers = world->allocate<float>(count);
  if (!buffers)
    return buffers.error();
  std::promise<outcome> started;
  sys.spawn<client>(*world, *buffers, std::ref(started));
  const auto right = started.get_future().get().wait();
  if (!right)
    return right.error();
  std::printf("%zu of %zu elements are right\n", *right, count);
  if (*right != count)
    return troupe::make_error(troupe::errc::internal, "a wrong sum");
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
