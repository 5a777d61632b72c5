/// All-reduces of random sizes, types and operations under a fault plan. Every request gets one
/// result in time (INV-1), and no success has a wrong element (INV-12).

#include "support/answer_time.hpp"
#include "support/expect.hpp"
#include "support/reference.hpp"
#include "support/world_fixture.hpp"
#include <troupe/testing/fault_plan.hpp>
#include <troupe/troupe.hpp>
#include <troupe/worker.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace troupe::testing {

namespace {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;

constexpr std::size_t ranks = 4;
constexpr int clients = 4;
constexpr int operations_per_client = 2500;

struct tally {
  std::mutex mutex;
  std::map<errc, int> errors;
  int successes = 0;
  int answers = 0;
  int wrong = 0;
  clock::duration latest{};
  std::string first_wrong;
};

/// Downloads, and repeats if the fault plan made the copy fail.
caf::error download(const device& from, const any_gpu_ref& ref, std::vector<std::byte>& output) {
  while (true) {
    auto done = from.download(ref, std::span{output}, {.deadline = 10s}).wait();
    if (done || code_of(done.error()) != errc::cuda_error)
      return done ? caf::error{} : done.error();
  }
}

/// Runs one client: fills its buffers, reduces them, and checks the results.
void run_client(const world& w, std::uint64_t seed, tally& all) {
  std::mt19937_64 random{seed};
  auto pick = [&](std::size_t low, std::size_t high) {
    return std::uniform_int_distribution<std::size_t>{low, high}(random);
  };
  constexpr std::size_t most = 2048;
  auto refs = must(w.allocate(dtype::uint64, most));
  for (int i = 0; i < operations_per_client; ++i) {
    auto type = real_dtypes[pick(0, std::size(real_dtypes) - 1)];
    auto op = all_reduce_ops[pick(0, std::size(all_reduce_ops) - 1)];
    auto count = pick(1, most);
    auto inputs = random_inputs({type, op, random(), 0, ranks, input_kind::exact}, count);
    std::vector<any_gpu_ref> send;
    for (std::size_t r = 0; r < ranks; ++r) {
      send.push_back(must(must(refs[r].reinterpret(type)).slice(0, count)));
      // Not waited for: the all-reduce runs after the upload, and fails if the upload fails.
      static_cast<void>(w.device_of(r).upload(
          send.back(),
          host_buffer{std::vector<std::uint8_t>(
              reinterpret_cast<const std::uint8_t*>(inputs[r].data()),
              reinterpret_cast<const std::uint8_t*>(inputs[r].data()) + inputs[r].size())}));
    }
    auto allowed = std::chrono::milliseconds{pick(5, 400)};
    auto sum = w.all_reduce(send, op, {.deadline = allowed});
    when_answered(sum, allowed, [&](const caf::expected<collective_done>&, clock::duration late) {
      std::lock_guard lock{all.mutex};
      ++all.answers;
      all.latest = std::max(all.latest, late);
    });
    auto done = sum.wait();
    if (!done) {
      std::lock_guard lock{all.mutex};
      ++all.errors[code_of(done.error()).value_or(errc::internal)];
      continue;
    }
    for (std::size_t r = 0; r < ranks; ++r) {
      std::vector<std::byte> output(inputs[r].size());
      poison(output);
      must(download(w.device_of(r), send[r], output));
      auto result = check(type, op, inputs, output, input_kind::exact);
      std::lock_guard lock{all.mutex};
      if (!result && all.wrong++ == 0)
        all.first_wrong = to_string(result) + " (" + std::string{to_string(type)} + ", " +
                          std::string{to_string(op)} + ", rank " + std::to_string(r) + ")";
    }
    std::lock_guard lock{all.mutex};
    ++all.successes;
  }
}

TEST(Faults, EveryRequestIsAnsweredOnceInTimeAndNeverWrong) {
  // Probability for each rank's call: 4 ranks affect 5 % of the operations.
  auto each = 0.05 / ranks / 4;
  auto plan = std::make_shared<fault_plan>(
      20261120,
      std::vector<fault_rule>{
          {.kind = fault::fail, .on = verb::collective, .times = forever, .probability = each},
          {.kind = fault::not_issued,
           .on = verb::collective,
           .times = forever,
           .probability = each},
          {.kind = fault::hang, .on = verb::collective, .times = forever, .probability = each},
          {.kind = fault::slow,
           .on = verb::collective,
           .times = forever,
           .probability = each,
           .delay = 3ms},
          {.kind = fault::fail, .on = verb::copy, .times = forever, .probability = each},
      });
  config cfg;
  const host_backend_options host{.devices = static_cast<int>(ranks)};
  cfg.use_backend(with_faults(in_workers()
                                  ? must(make_worker_backend({.backend = "host", .host = host}))
                                  : make_host_backend(host),
                              plan));
  caf::actor_system sys{cfg};
  set_log_sink([](const log_line&) {}); // hundreds of communicators end
  world_limits limits;
  limits.stall_limit = 40ms;
  limits.restarts = 1 << 30;
  limits.restart_backoff = 0ms;
  tally all;
  {
    auto w = must(world::open(sys, {.devices = all_devices(sys), .limits = limits}));
    std::vector<std::thread> threads;
    for (int c = 0; c < clients; ++c)
      threads.emplace_back([&, c] { run_client(w, static_cast<std::uint64_t>(c) + 1, all); });
    for (auto& t : threads)
      t.join();
    EXPECT_GT(all.latest, 0ns); // some results came at their deadlines
    EXPECT_LT(all.latest, at_once);
    auto ms = [](clock::duration x) {
      return std::chrono::duration<double, std::milli>(x).count();
    };
    std::printf("%d successes; latest answer %.2f ms after its deadline\n", all.successes,
                ms(all.latest));
    for (auto [code, count] : all.errors)
      std::printf("%6d %s\n", count, std::string{to_string(code)}.c_str());
  }
  set_log_sink({});
  EXPECT_EQ(all.answers, clients * operations_per_client);
  EXPECT_EQ(all.wrong, 0) << all.first_wrong;
  for (auto kind : {fault::fail, fault::not_issued, fault::hang, fault::slow})
    EXPECT_GT(plan->injected(kind), 20u) << to_string(kind);
  // The faults affect some requests, and the world continues after each.
  EXPECT_GT(all.successes, clients * operations_per_client / 2);
  for (auto code : {errc::internal, errc::invalid_argument, errc::shape_mismatch, errc::stale_ref,
                    errc::out_of_range})
    EXPECT_EQ(all.errors.count(code), 0u) << to_string(code);
}

} // namespace

} // namespace troupe::testing
