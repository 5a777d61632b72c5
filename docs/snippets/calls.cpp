// Every call that the pages name in their texts and tables, as it stands there (scripts/check-docs
// looks for it here). All of them run, on four ranks.

#include "checks.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
using snippets::check;
using snippets::must;

namespace {

constexpr std::size_t part = 10;

/// The calls of one rank: `one` elements of each, or `all` of them, a part for each rank.
void of_a_rank(const troupe::world_rank& me) {
  const auto n = me.size();
  const auto device = me.where();
  const auto allocate = [&](std::size_t count) {
    return must(device.allocate<float>(count, true));
  };
  const auto op = troupe::reduce_op::sum;
  const int root = 0;
  const int to = (me.index() + 1) % static_cast<int>(n);
  const int from = (me.index() + static_cast<int>(n) - 1) % static_cast<int>(n);
  const bool at_root = me.index() == root;
  std::vector<troupe::pending<troupe::collective_done>> all;
  const auto x = allocate(part);
  const auto y = allocate(part);
  {
    const auto buffer = allocate(part);
    all.push_back(me.all_reduce(buffer, op));
    all.push_back(me.broadcast(buffer, root));
    all.push_back(me.reduce(buffer, root, op));
    all.push_back(me.all_reduce(buffer, {.deadline = 2s}));
  }
  {
    const auto send = allocate(part);
    const auto recv = allocate(part);
    all.push_back(me.all_reduce(send, recv, op));
  }
  {
    const auto send = allocate(part);
    const troupe::any_gpu_ref recv = at_root ? allocate(part) : troupe::gpu_ref<float>{};
    all.push_back(me.reduce(send, recv, root, op));
  }
  {
    const troupe::any_gpu_ref send = at_root ? allocate(part) : troupe::gpu_ref<float>{};
    const auto recv = allocate(part);
    all.push_back(me.broadcast(send, recv, root));
  }
  {
    const auto send = allocate(part);
    const auto recv = allocate(n * part);
    all.push_back(me.all_gather(send, recv));
    all.push_back(me.reduce_scatter(recv, send, op));
  }
  {
    const auto send = allocate(n * part);
    const auto recv = allocate(part);
    all.push_back(me.reduce_scatter(send, recv, op));
  }
  {
    const auto send = allocate(n * part);
    const auto recv = allocate(n * part);
    const std::vector<std::uint64_t> send_counts(n, part);
    const auto recv_counts = send_counts;
    all.push_back(me.all_to_all(send, recv));
    all.push_back(me.all_to_all_v(send, send_counts, recv, recv_counts));
  }
  {
    const auto send = allocate(part);
    const troupe::any_gpu_ref recv = at_root ? allocate(n * part) : troupe::gpu_ref<float>{};
    all.push_back(me.gather(send, recv, root));
  }
  {
    const troupe::any_gpu_ref send = at_root ? allocate(n * part) : troupe::gpu_ref<float>{};
    const auto recv = allocate(part);
    all.push_back(me.scatter(send, recv, root));
  }
  { // with one buffer for both, each rank's receive would wait for its send
    const auto buffer = allocate(part);
    all.push_back(me.send(buffer, to));
  }
  {
    const auto buffer = allocate(part);
    all.push_back(me.recv(buffer, from));
  }
  all.push_back(me.exchange({{to, x}}, {{from, y}}));
  {
    const std::vector<troupe::message_end> sends{{to, x}};
    const std::vector<troupe::message_end> recvs{{from, y}};
    all.push_back(me.exchange(sends, recvs));
  }
  const double factor = 2;
  all.push_back(me.run(
      troupe::all_reduce{.send = {x}, .op = troupe::reduce_op::premul_sum, .factors = {factor}}));
  all.push_back(me.barrier());
  for (auto& call : all)
    must(call.wait());
}

void of_all_ranks(const troupe::world& world) {
  const auto n = world.size();
  const auto allocate = [&](std::size_t count) { return must(world.allocate<float>(count, true)); };
  const auto op = troupe::reduce_op::sum;
  const std::size_t rank = 0;
  const int root = 0;
  const int from = 0;
  const int to = 1;
  std::vector<troupe::pending<troupe::collective_done>> all;
  {
    const auto buffers = allocate(part);
    all.push_back(world.all_reduce(buffers, op));
    const auto& refs = buffers;
    all.push_back(world.all_reduce(refs, op));
    check(world.status().phase == troupe::world_phase::ready, "the status");
    check(world.device_of(rank).ordinal() == 0, "the device");
    const std::size_t count = part;
    check(must(world.allocate<float>(count)).size() == world.size(), "the handles");
    all.push_back(world.broadcast(buffers, root));
    all.push_back(world.reduce(buffers, root, op));
    all.push_back(world.all_reduce(buffers, {.deadline = 2s}));
  }
  {
    const auto sends = allocate(part);
    const auto recvs = allocate(part);
    all.push_back(world.all_reduce(sends, recvs, op));
    const auto& recv = recvs[root];
    all.push_back(world.reduce(sends, recv, root, op));
    const auto& send = sends[root];
    all.push_back(world.broadcast(send, recvs, root));
  }
  {
    const auto sends = allocate(part);
    const auto recvs = allocate(n * part);
    all.push_back(world.all_gather(sends, recvs));
    all.push_back(world.all_gather(recvs));
    const auto& recv = recvs[root];
    all.push_back(world.gather(sends, recv, root));
  }
  {
    const auto sends = allocate(n * part);
    const auto recvs = allocate(part);
    all.push_back(world.reduce_scatter(sends, recvs, op));
    all.push_back(world.reduce_scatter(sends, op));
    const auto& send = sends[root];
    all.push_back(world.scatter(send, recvs, root));
  }
  {
    const auto sends = allocate(n * part);
    const auto recvs = allocate(n * part);
    const std::vector<std::vector<std::uint64_t>> counts(n, std::vector<std::uint64_t>(n, part));
    all.push_back(world.all_to_all(sends, recvs));
    all.push_back(world.all_to_all_v(sends, recvs, counts));
  }
  {
    const auto send = allocate(part)[0];
    const auto recv = allocate(part)[1];
    all.push_back(world.send_recv(from, send, to, recv));
  }
  all.push_back(world.barrier());
  for (auto& call : all)
    must(call.wait());
  {
    const auto refs = allocate(part);
    const auto value = 0.5f;
    const std::vector<std::vector<float>> parts(n, std::vector<float>(part, 4));
    must(world.fill(refs, value).wait());
    must(world.upload(refs, parts).wait());
    check(must(world.download(refs)) == parts, "the download of all ranks");
    const auto* name = "nothing";
    const auto arguments = troupe::to_bytes(value);
    const std::vector<std::vector<troupe::any_gpu_ref>> reads{troupe::any(refs)};
    const auto& writes = reads;
    must(world.launch(name, arguments, reads, writes).wait());
    const auto f = [](troupe::launch_context&, std::size_t) { return caf::error{}; };
    must(world.launch(f, reads, writes).wait());
  }
  const std::vector<std::int32_t> colors(n, 0);
  const std::vector<std::int32_t> keys(n, 0);
  const auto* name = "again";
  check(must(world.split(name, colors, keys)).size() == 1, "a split");
}

void of_a_device(const troupe::device& device, const troupe::topology& topology) {
  const std::size_t n = part;
  const std::size_t bytes = part * sizeof(float);
  const auto ref = must(device.allocate<float>(n));
  const auto to = must(device.allocate<float>(n, true));
  const auto& from = ref;
  const auto& reads = std::vector<troupe::any_gpu_ref>{};
  const auto& writes = std::vector<troupe::any_gpu_ref>{};
  const auto f = [](troupe::launch_context&) { return caf::error{}; };
  const float value = 1;
  std::vector<float> data(n, 3);
  device.fill(ref, value);
  must(device.upload(ref, data).wait());
  device.copy(to, from);
  must(topology.copy(to, from).wait());
  device.launch(f, reads, writes);
  must(device.download(ref, data).wait());
  check(data == std::vector<float>(n, 3), "the data");
  auto buffer = must(device.allocate_pinned(bytes));
  must(device.upload(ref, buffer).wait());
  device.upload(ref, std::move(data));
  device.accept(ref);
  check(device.ordinal() == 0, "the ordinal");
  check(device.incarnation() == 1, "the incarnation");
  check(must(device.stats().wait()).device == 0, "the statistics");
  CUstream_st* const stream = nullptr;
  const auto mode = troupe::access_mode::read;
  const auto acquired = device.acquire(ref, mode, stream).wait();
  if (acquired)
    must(device.release(ref, mode, stream).wait());
  else // the host backend has no streams
    check(troupe::code_of(acquired.error()) == troupe::errc::not_supported, "the stream");
  const auto moved = device.hand_over().wait();
  check(!moved && troupe::code_of(moved.error()) == troupe::errc::not_supported,
        "a device of this process");
  must(device.reset().wait());
}

void as_messages(caf::actor_system& sys, const troupe::world& world) {
  caf::scoped_actor self{sys};
  std::vector<decltype(troupe::request(self, world.rank(0), troupe::all_reduce{}, 2s))> answers;
  for (std::size_t r = 0; r < world.size(); ++r) {
    const auto mine = must(world.device_of(r).allocate<float>(part, true));
    answers.push_back(troupe::request(self, world.rank(r), troupe::all_reduce{.send = {mine}}, 2s));
    const auto rank = static_cast<std::int32_t>(r);
    const auto& actor = world.actor();
    answers.push_back(troupe::request(
        self, actor, troupe::rank_local{.rank = rank, .call = troupe::all_reduce{.send = {mine}}},
        2s));
  }
  for (auto& x : answers)
    std::move(x).receive([](const troupe::collective_done&) {},
                         [](const caf::error& why) { must(why); });
  const auto step = world.record(troupe::recording{}.barrier(), {});
  check(static_cast<bool>(step), "a step");
  troupe::request(self, world, troupe::run_step{*step}, 2s)
      .receive([](const troupe::step_done&) {}, [](const caf::error& why) { must(why); });
}

void run(caf::actor_system& sys) {
  check(troupe::all_devices(sys).size() >= 2, "two devices");
  must(troupe::register_launch("nothing", [](auto&&...) { return caf::error{}; }));
  {
    const auto two = troupe::world::open(sys, {.devices = {0, 1}});
    check(must(two).size() == 2, "two ranks");
  }
  const auto world = must(troupe::world::open(sys, {.devices = troupe::all_devices(sys)}));
  of_all_ranks(world);
  std::vector<std::thread> threads;
  std::vector<caf::error> errors(world.size());
  for (std::size_t r = 0; r < world.size(); ++r)
    threads.emplace_back([&, r] {
      try {
        of_a_rank(world.rank(r));
      } catch (const std::exception& why) {
        errors[r] = troupe::make_error(troupe::errc::internal, why.what());
      }
    });
  for (auto& x : threads)
    x.join();
  for (auto& x : errors)
    must(x);
  as_messages(sys, world);
  of_a_device(world.device_of(0), must(troupe::topology::open(sys)));
}

} // namespace

int main(int argc, char** argv) { return snippets::run_with_devices(argc, argv, run); }
