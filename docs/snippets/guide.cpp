// The short snippets of the guide, each run once on a world of four ranks or more.

#include "checks.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#if TROUPE_HAS_CUDA
#include "../../examples/kernel_between.hpp"
#include <troupe/cuda_error.hpp>
#endif

#include <chrono>
#include <cstddef>
#include <iostream>
#include <iterator>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
using snippets::check;
using snippets::must;

namespace {

constexpr std::size_t count = 1000;

/// Fills the handles with 1, 2, ... over the ranks, and returns the sum.
float fill_ranks(const troupe::world& world, const std::vector<troupe::gpu_ref<float>>& refs) {
  for (std::size_t rank = 0; rank < world.size(); ++rank)
    world.device_of(rank).fill(refs[rank], static_cast<float>(rank + 1));
  return static_cast<float>(world.size() * (world.size() + 1) / 2);
}

void check_all(const troupe::world& world, const std::vector<troupe::gpu_ref<float>>& refs,
               float wanted, const char* what) {
  for (auto& x : must(world.download(refs)))
    check(x == std::vector<float>(count, wanted), what);
}

void four_ways_to_wait(const troupe::world& world,
                       const std::vector<troupe::gpu_ref<float>>& refs) {
  fill_ranks(world, refs);
  std::stop_source stop;
  // [pending]
  troupe::pending<troupe::collective_done> sum = world.all_reduce(refs);
  sum.then([](const caf::expected<troupe::collective_done>& done) { // on the callback thread
    if (!done)
      std::cerr << troupe::describe(done.error()) << '\n';
  });
  sum.cancel_on(stop.get_token()); // or sum.cancel()
  auto early = sum.wait_for(5ms);  // true if it is over by then
  auto done = sum.wait();          // a caf::expected<collective_done>
  // [pending]
  must(std::move(early));
  must(std::move(done));
}

void several_as_one(const troupe::world& world, const std::vector<troupe::gpu_ref<float>>& refs) {
  // [when-all]
  auto both = troupe::when_all(world.fill(refs, 1), world.device_of(0).stats());
  std::vector<troupe::pending<troupe::device_stats>> asked;
  for (std::size_t rank = 0; rank < world.size(); ++rank)
    asked.push_back(world.device_of(rank).stats());
  auto stats = troupe::when_all(asked).wait(); // a vector, or the first error, when all are over
  // [when-all]
  must(both.wait());
  check(must(std::move(stats)).size() == world.size(), "the statistics");
}

void time_limits(const troupe::world& world, const std::vector<troupe::gpu_ref<float>>& refs) {
  // [after]
  auto filled = world.fill(refs, 2);
  auto first = troupe::when_any(std::vector{filled, troupe::after(5s)}).wait(); // 1: too late
  // [after]
  check(must(std::move(first)) == 0, "the first of two");
}

void all_ranks(const troupe::world& world, const std::vector<troupe::gpu_ref<float>>& refs) {
  const std::vector<std::vector<float>> parts(world.size(), std::vector<float>(count, 3));
  // [all-ranks]
  world.upload(refs, parts); // parts[r] to rank r; one vector of numbers: the same to each rank
  world.launch("scale", troupe::to_bytes(2.0f), {troupe::any(refs)}, {troupe::any(refs)});
  world.all_reduce(refs, {.deadline = 2s});
  auto results = world.download(refs); // a vector of numbers for each rank
  // [all-ranks]
  for (auto& x : must(std::move(results)))
    for (std::size_t i = 0; i < count; ++i)
      check(x[i] == static_cast<float>(world.size() * (6 + i % 7)), "the requests to all ranks");
}

// [actor]
class summing : public caf::event_based_actor {
public:
  summing(caf::actor_config& cfg, troupe::world world, std::vector<troupe::gpu_ref<float>> refs)
      : event_based_actor(cfg), world_(std::move(world)), refs_(std::move(refs)) {}

  caf::behavior make_behavior() override {
    auto on_error = [this](const caf::error& why) { quit(why); };
    for (std::size_t rank = 0; rank < world_.size(); ++rank)
      troupe::request(this, world_.device_of(rank),
                      troupe::fill{.target = refs_[rank], .element = static_cast<float>(rank + 1)},
                      2s)
          .then([] {}, on_error);
    troupe::request(this, world_, troupe::all_reduce{.send = troupe::any(refs_)}, 2s) // then sums
        .then(
            [](const troupe::collective_done& sum) { // every rank has it
              std::cout << "all_reduce #" << sum.operation << " is done\n";
            },
            on_error);
    return {};
  }

private:
  troupe::world world_;
  std::vector<troupe::gpu_ref<float>> refs_;
};
// [actor]

void messages(caf::actor_system& sys, const troupe::world& world,
              const std::vector<troupe::gpu_ref<float>>& refs) {
  caf::scoped_actor self{sys};
  self->wait_for(sys.spawn<summing>(world, refs));
  check_all(world, refs, static_cast<float>(world.size() * (world.size() + 1) / 2), "the actor");
  const auto sum = fill_ranks(world, refs);
  // [blocking-actor]
  troupe::request(self, world, troupe::all_reduce{.send = troupe::any(refs)}, 2s)
      .receive([](const troupe::collective_done&) { /* every rank has the sum */ },
               [](const caf::error& why) { std::cerr << troupe::describe(why) << '\n'; });
  // [blocking-actor]
  check_all(world, refs, sum, "the blocking actor");
}

void world_as_an_actor(caf::actor_system& sys) {
  caf::scoped_actor self{sys};
  // [world-actor]
  auto world = troupe::spawn_nccl_world(sys, {.devices = {0, 1}}); // a caf::actor
  if (!world)
    return;
  troupe::request(self, *world, troupe::allocate_all{.count = 1000}, 10s)
      .receive([](const troupe::world_buffers& x) { std::cout << x.refs.size() << " handles\n"; },
               [](const caf::error& why) { std::cerr << troupe::describe(why) << '\n'; });
  troupe::tell(self, *world, troupe::shutdown{}); // the actor lives until then
  // [world-actor]
}

// [task]
troupe::task<float> step(troupe::world world, std::vector<troupe::gpu_ref<float>> grads) {
  std::vector<float> first(grads[0].count());
  co_await troupe::value_of(world.all_reduce(grads));
  co_await troupe::value_of(world.device_of(0).download(grads[0], first));
  co_return first[0];
}
// [task]

// [task-in-actor]
class stepping : public caf::event_based_actor {
public:
  stepping(caf::actor_config& cfg, troupe::world world, std::vector<troupe::gpu_ref<float>> refs)
      : event_based_actor(cfg), world_(std::move(world)), refs_(std::move(refs)) {}

  caf::behavior make_behavior() override {
    troupe::start(work(), troupe::executor_of(this));
    return {troupe::runs_tasks()}; // and the handlers of other messages
  }

private:
  troupe::task<> work() {
    auto sum = co_await step(world_, refs_); // a caf::expected<float>: the task decides
    std::cout << (sum ? std::to_string(*sum) : troupe::describe(sum.error())) << '\n';
    quit();
  }

  troupe::world world_;
  std::vector<troupe::gpu_ref<float>> refs_;
};
// [task-in-actor]

void coroutines(caf::actor_system& sys, const troupe::world& world,
                const std::vector<troupe::gpu_ref<float>>& grads) {
  const auto sum = fill_ranks(world, grads);
  // [start]
  troupe::pending<float> result = troupe::start(step(world, grads)); // on the callback thread
  // [start]
  check(must(result.wait()) == sum, "the task");
  caf::scoped_actor self{sys};
  self->wait_for(sys.spawn<stepping>(world, grads));
}

// [one-rank]
caf::error sum(const troupe::world_rank& me, const std::vector<float>& data,
               std::vector<float>& result) {
  const auto device = me.where();
  auto x = device.allocate<float>(data.size());
  if (!x)
    return x.error();
  device.upload(*x, data);
  me.all_reduce(*x);
  auto done = device.download(*x, result).wait(); // an error if another rank does not come
  return done ? caf::error{} : done.error();
}
// [one-rank]

void one_rank_for_each_thread(const troupe::world& world) {
  std::vector<std::vector<float>> results(world.size(), std::vector<float>(count));
  std::vector<caf::error> errors(world.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < world.size(); ++r)
    threads.emplace_back([&, r] {
      errors[r] = sum(world.rank(r), std::vector<float>(count, static_cast<float>(r)), results[r]);
    });
  for (auto& thread : threads)
    thread.join();
  for (std::size_t r = 0; r < world.size(); ++r) {
    must(errors[r]);
    check(results[r] == std::vector<float>(count, 0 + 1 + 2 + 3), "the sum of each thread");
  }
}

void rank_by_rank(const troupe::world& world, const std::vector<troupe::gpu_ref<float>>& refs) {
  const auto sum = fill_ranks(world, refs);
  // [ranks]
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < world.size(); ++r)
    threads.emplace_back([me = world.rank(r), mine = refs[r]] {
      auto done = me.all_reduce(mine).wait(); // one operation with the k-th call of each other rank
      if (!done)
        std::cerr << "rank " << me.index() << ": " << troupe::describe(done.error()) << '\n';
    });
  for (auto& thread : threads)
    thread.join();
  // [ranks]
  check_all(world, refs, sum, "the calls of ranks");
}

void groups(const troupe::world& world) {
  check(world.size() == 4, "the snippet of split is for four ranks");
  auto grads = must(world.allocate<float>(count, true));
  auto scale = must(world.allocate<float>(1, true));
  // [split]
  auto halves = world.split("half", {0, 0, 1, 1}); // a color per rank: worlds "half/0" and "half/1"
  // [split]
  check(must(std::move(halves)).size() == 2, "two halves");
  // [group]
  auto done =
      world.run(troupe::group{{troupe::all_reduce{.send = troupe::any(grads)},
                               troupe::broadcast{.send = scale[0], .recv = troupe::any(scale)}}});
  // [group]
  must(done.wait());
}

void host_memory(const troupe::world& world) {
  std::vector<std::vector<float>> data(world.size(), std::vector<float>(count, 1));
  // [mesh]
  auto mesh = troupe::mesh_comm::open(world); // a handle for each rank
  if (!mesh)
    return;
  std::vector<troupe::pending<void>> sums;
  for (std::size_t rank = 0; rank < world.size(); ++rank) // or a thread for each rank
    sums.push_back((*mesh)[rank].all_reduce(std::as_writable_bytes(std::span{data[rank]}),
                                            troupe::dtype::float32));
  auto done = troupe::when_all(sums).wait(); // data[rank] is the sum, in place
  // [mesh]
  must(std::move(done));
  for (auto& x : data)
    check(x == std::vector<float>(count, static_cast<float>(world.size())), "the mesh");
}

/// The same work as the kernel of examples/kernel_between.cu.
void scale_on_host(float* x, std::size_t n, float factor) {
  for (std::size_t i = 0; i < n; ++i)
    x[i] = x[i] * factor + static_cast<float>(i % 7);
}

#if !TROUPE_HAS_CUDA
caf::error run_my_kernel(float*, std::size_t, float, CUstream_st*) {
  return troupe::make_error(troupe::errc::not_supported, "built without CUDA");
}
#else
caf::error run_my_kernel(float* x, std::size_t n, float factor, CUstream_st* stream) {
  return troupe::error_of(launch_scale(x, n, factor, stream)); // troupe/cuda_error.hpp
}
#endif

void kernels(const troupe::device& device) {
  auto x = must(device.allocate<float>(count, true));
  // [launch]
  auto scale = [x](troupe::launch_context& context) -> caf::error {
    auto data = x.access(); // the address in device memory
    if (!data)
      return data.error();
    if (context.cuda_stream() != nullptr) // enqueues a kernel, or calls of cuBLAS, ...
      return run_my_kernel(*data, x.count(), 2.0f, context.cuda_stream());
    return context.run_on_host([=, n = x.count()] { scale_on_host(*data, n, 2.0f); });
  };
  auto done = device.launch(scale, /* reads */ {x}, /* writes */ {x});
  // [launch]
  must(done.wait());
  auto result = must(device.download(x));
  for (std::size_t i = 0; i < count; ++i)
    check(result[i] == static_cast<float>(i % 7), "the kernel");
}

// [register-launch]
/// Works in place: its buffer is in both lists of a request, so it gets it twice.
caf::error scale(troupe::launch_context& context, const float& factor, std::span<const float>,
                 std::span<float> x) {
  if (context.cuda_stream() != nullptr)
    return run_my_kernel(x.data(), x.size(), factor, context.cuda_stream());
  return context.run_on_host([=, factor = factor] { scale_on_host(x.data(), x.size(), factor); });
}
// [register-launch]

void launches_by_name(const troupe::device& device) {
  // [register-call]
  auto registered = troupe::register_launch("scale", troupe::typed_launch(scale));
  // [register-call]
  must(registered);
  auto x = must(device.allocate<float>(count, true));
  // [launch-by-name]
  auto done = device.launch("scale", troupe::to_bytes(2.0f), /* reads */ {x}, /* writes */ {x});
  // [launch-by-name]
  must(done.wait());
  check(must(device.download(x))[6] == 6, "the launch by name");
}

void steps(const troupe::world& world) {
  const auto xs = must(world.allocate<float>(count));
  const auto others = must(world.allocate<float>(count));
  const auto sums = must(world.allocate<float>(count));
  must(world.fill(xs, 1).wait());
  must(world.fill(others, 3).wait());
  // [step]
  troupe::recording r; // requests over names
  r.launch("scale", troupe::to_bytes(2.0f), /* reads */ {"x"}, /* writes */ {"x"}); // on all ranks
  r.all_reduce("x", "sums");
  r.on(0).fill({"x", 0, 10}, 1.0f); // its first 10 elements, on one rank

  auto step = world.record(r, {{"x", xs}, {"sums", sums}}); // a handle per rank for each name
  if (!step)
    std::cerr << troupe::describe(step.error()) << '\n';
  auto first = step->run();
  auto second = step->run({.deadline = 2s}); // behind the first, as any request
  auto why = step->rebind("x", others);      // later runs use other buffers
  auto third = step->run();
  // [step]
  check(!why, "rebind");
  must(first.wait());
  must(second.wait());
  must(third.wait());
  for (auto& x : must(world.download(sums)))
    for (std::size_t i = 0; i < count; ++i)
      check(x[i] == static_cast<float>(world.size() * (6 + i % 7)), "the sum of a step");
}

void copies(caf::actor_system& sys, const troupe::world& world) {
  const auto here = world.device_of(0);
  auto source = must(here.allocate<float>(count));
  here.fill(source, 7);
  auto one_per_device = must(world.allocate<float>(count));
  auto target = one_per_device[1];
  // [topology]
  auto links = troupe::topology::open(sys); // of all devices; for messages: spawn_p2p_topology
  if (!links)
    return;
  auto graph = links->verify_links().wait();   // a link that corrupts data is not used any more
  auto speeds = links->measure_links().wait(); // or links->graph(): as it is now
  if (!graph || !speeds)
    return;
  for (const auto& link : speeds->links)
    std::cout << link.from << " to " << link.to << ": " << to_string(link.kind) << ", "
              << link.bandwidth << " GB/s\n";
  // [topology]
  std::vector<troupe::any_gpu_ref> others{std::next(one_per_device.begin()), one_per_device.end()};
  // [copy]
  auto copied = links->copy(target, source);      // between any two devices
  auto spread = links->replicate(source, others); // whole to each; in parts: distribute
  auto pair = links->copy({{others[0], source},   // several as one request
                           {others[1], source}});
  // [copy]
  must(copied.wait());
  must(spread.wait());
  must(pair.wait());
  for (std::size_t rank = 1; rank < world.size(); ++rank)
    check(must(world.device_of(rank).download(one_per_device[rank])) ==
              std::vector<float>(count, 7),
          "the copies");
}

void errors(const troupe::world& world) {
  auto wrong = must(world.allocate<float>(10));
  wrong.pop_back(); // one handle too few
  auto done = world.all_reduce(wrong).wait();
  check(!done, "a wrong request fails");
  std::vector<std::string> said;
  auto retry = [&] { said.emplace_back("retry"); };
  auto give_up = [&](const std::string& why) { said.push_back(why); };
  // [error]
  if (!done) {
    const caf::error& why = done.error();
    if (troupe::code_of(why) == troupe::errc::overloaded)
      retry();
    else
      give_up(troupe::describe(why));           // "all_reduce #17: stalled (rank 3, device 3, ..."
    if (auto details = troupe::failure_of(why)) // each field of the sentence
      std::cerr << details->verb << " on rank " << details->rank << '\n';
  }
  // [error]
  check(said.size() == 1 && said[0].find("invalid_argument") != std::string::npos,
        "the error of a wrong request");
}

void shared(const troupe::world& world, const std::vector<troupe::gpu_ref<float>>& grads) {
  const auto sum = fill_ranks(world, grads);
  const auto device = world.device_of(0);
  // [order]
  world.all_reduce(grads);                 // writes grads on all ranks
  auto result = device.download(grads[0]); // waits for the sum, and for nothing else
  // [order]
  check(must(std::move(result)) == std::vector<float>(count, sum), "the order");
  // [slice]
  auto half = grads[0].slice(0, 500); // shares the memory; ordered by its own range
  // [slice]
  check(must(std::move(half)).count() == count / 2, "the slice");
}

void records(caf::actor_system& sys, const troupe::world& world) {
  caf::scoped_actor self{sys};
  // [record]
  auto written = troupe::write_flight_record(sys, "flight.json"); // a function
  troupe::request(self, world, troupe::record_flight{"flight.json"},
                  2s) // a message, to a world or device
      .receive([] {}, [](const caf::error& why) { std::cerr << troupe::describe(why) << '\n'; });
  // [record]
  must(written.wait());
}

void run(caf::actor_system& sys) {
  const auto world = must(troupe::world::open(sys, {.devices = {0, 1, 2, 3}}));
  const auto refs = must(world.allocate<float>(count));
  four_ways_to_wait(world, refs);
  several_as_one(world, refs);
  time_limits(world, refs);
  messages(sys, world, refs);
  world_as_an_actor(sys);
  coroutines(sys, world, refs);
  one_rank_for_each_thread(world);
  rank_by_rank(world, refs);
  groups(world);
  host_memory(world);
  kernels(world.device_of(0));
  launches_by_name(world.device_of(0));
  all_ranks(world, refs);
  steps(world);
  copies(sys, world);
  errors(world);
  shared(world, refs);
  records(sys, world);
}

} // namespace

int main(int argc, char** argv) { return snippets::run_with_devices(argc, argv, run); }
