// The topology of real GPUs.

#include "support/world_fixture.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

class CudaTopology : public ::testing::Test {
protected:
  void SetUp() override { TROUPE_NEEDS_GPUS(2); }

  /// All GPUs through CUDA, independent of the backend of the other tests.
  struct gpus {
    gpus() : system((cfg.use_backend(must(make_cuda_backend())), cfg)) {}

    config cfg;
    caf::actor_system system;
  };
};

/// Returns CUDA's own attribute for a pair.
int attribute_of(cudaDeviceP2PAttr what, const p2p_link& x) {
  int value = -1;
  EXPECT_EQ(cudaDeviceGetP2PAttribute(&value, what, x.from, x.to), cudaSuccess);
  return value;
}

TEST_F(CudaTopology, KnowsEnablesAndVerifiesEveryLink) {
  gpus on;
  auto t = must(topology::open(on.system, {.verify = true}));
  auto graph = t.graph();
  auto number = static_cast<std::size_t>(gpus_present());
  ASSERT_EQ(graph.devices.size(), number);
  ASSERT_EQ(graph.links.size(), number * (number - 1));
  for (auto& x : graph.links) {
    SCOPED_TRACE(caf::deep_to_string(x));
    EXPECT_EQ(x.possible, attribute_of(cudaDevP2PAttrAccessSupported, x) == 1);
    EXPECT_EQ(x.performance_rank, attribute_of(cudaDevP2PAttrPerformanceRank, x));
    EXPECT_EQ(x.native_atomics, attribute_of(cudaDevP2PAttrNativeAtomicSupported, x) == 1);
    EXPECT_EQ(x.kind == link_kind::host, !x.possible);
    EXPECT_TRUE(x.links == 0 || x.kind == link_kind::nvlink);
    EXPECT_EQ(x.access, x.possible ? peer_access::enabled : peer_access::none);
    EXPECT_EQ(x.checked, x.possible ? link_check::right : link_check::unchecked);
  }
}

TEST_F(CudaTopology, MeasuresPlausibly) {
  gpus on;
  auto t = must(topology::open(on.system));
  auto graph = must(answer_of(t.measure_links({}, {.deadline = patience})));
  for (auto& x : graph.links) {
    if (x.access != peer_access::enabled)
      continue;
    SCOPED_TRACE(caf::deep_to_string(x));
    // PCIe of the third generation exceeds 5 GB/s. 18 NVLinks stay below 1000 GB/s.
    EXPECT_GT(x.bandwidth, x.kind == link_kind::nvlink ? 15 : 3);
    EXPECT_LT(x.bandwidth, 1500);
    EXPECT_GT(x.bandwidth_both, 0.8 * x.bandwidth);
    EXPECT_LT(x.bandwidth_both, 2.5 * x.bandwidth);
    EXPECT_GT(x.latency_us, 0.5);
    EXPECT_LT(x.latency_us, 2000);
    std::printf("%d to %d: %s x%d, %.1f GB/s, both %.1f GB/s, %.2f us\n", x.from, x.to,
                std::string{to_string(x.kind)}.c_str(), x.links, x.bandwidth, x.bandwidth_both,
                x.latency_us);
  }
}

/// Compares with a copy by CUDA alone, of the same size and kind of memory.
TEST_F(CudaTopology, MeasuresWhatCudaReaches) {
  gpus on;
  auto t = must(topology::open(on.system));
  auto link = *t.graph().link(0, 1);
  if (link.access != peer_access::enabled)
    GTEST_SKIP() << "these two devices cannot access each other";
  auto one = must(device::open(on.system, 0));
  auto other = must(device::open(on.system, 1));
  constexpr std::size_t size = 64 * mib;
  auto source = must(one.allocate<std::uint8_t>(size));
  auto target = must(other.allocate<std::uint8_t>(size));
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  constexpr int copies = 30;
  double raw = 0;
  for (int round = 0; round < 3; ++round) {
    auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < copies; ++i)
      ASSERT_EQ(
          cudaMemcpyPeerAsync(must(target.access()), 1, must(source.access()), 0, size, stream),
          cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
    raw = std::max(raw, static_cast<double>(copies * size) / time.count());
  }
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  auto measured = must(answer_of(t.measure_links({0, 1}))).link(0, 1)->bandwidth;
  std::printf("raw %.1f GB/s, measured %.1f GB/s\n", raw, measured);
  EXPECT_GT(measured, 0.9 * raw);
  EXPECT_LT(measured, 1.1 * raw);
}

TEST_F(CudaTopology, EnablesAccessAgainAfterAReset) {
  gpus on;
  auto t = must(topology::open(on.system));
  auto before = t.graph();
  graph_feed feed{on.system, t.actor()};
  for (std::uint64_t generation = 2; generation <= 4; ++generation) {
    for (int ordinal : {0, 1})
      must(answer_of(must(device::open(on.system, ordinal)).reset()));
    auto graph = feed.until([&](const p2p_graph& x) {
      return x.settled && x.device(0)->generation == generation &&
             x.device(1)->generation == generation;
    });
    for (auto& x : graph.links)
      EXPECT_EQ(x.access, before.link(x.from, x.to)->access);
    for (auto& x : must(answer_of(t.verify_links())).links)
      EXPECT_EQ(x.checked, x.possible ? link_check::right : link_check::unchecked);
  }
}

/// A byte that does not arrive is detected on real links too.
TEST_F(CudaTopology, FindsALinkThatCorrupts) {
  auto plan = std::make_shared<fault_plan>(11);
  config cfg;
  cfg.use_backend(with_faults(must(make_cuda_backend()), plan));
  caf::actor_system system{cfg};
  auto t = must(topology::open(system));
  if (t.graph().link(0, 1)->access != peer_access::enabled)
    GTEST_SKIP() << "these two devices cannot access each other";
  plan->add({.kind = fault::corrupt, .on = verb::copy_peer, .device = 0, .peer = 1});
  auto graph = must(answer_of(t.verify_links()));
  EXPECT_EQ(plan->injected(fault::corrupt), 1u);
  for (auto& x : graph.links)
    EXPECT_EQ(x.checked == link_check::wrong, x.from == 0 && x.to == 1);
  EXPECT_TRUE(has_code(graph.link(0, 1)->reason, errc::link_failed));
  graph = must(answer_of(t.verify_links()));
  EXPECT_EQ(graph.link(0, 1)->checked, link_check::right);
  EXPECT_EQ(graph.link(0, 1)->access, peer_access::enabled);
}

/// Copies between the pools of all pairs, and between memory that CUDA gave to the user.
class CudaCopies : public CudaTopology, public ::testing::WithParamInterface<bool> {
protected:
  topology open(caf::actor_system& system) const {
    return must(topology::open(system, {.use_links = GetParam()}));
  }

  static any_gpu_ref of_the_user(const device& d, std::size_t size) {
    EXPECT_EQ(cudaSetDevice(d.ordinal()), cudaSuccess);
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, size), cudaSuccess);
    auto deleter = [](void* x) { EXPECT_EQ(cudaFree(x), cudaSuccess); };
    return must(d.adopt(memory, size, dtype::uint8, deleter));
  }
};

INSTANTIATE_TEST_SUITE_P(Ways, CudaCopies, ::testing::Bool(),
                         [](const auto& x) { return std::string{x.param ? "links" : "host"}; });

TEST_P(CudaCopies, BringEveryByte) {
  gpus on;
  auto t = open(on.system);
  for (bool plain : {false, true})
    for (std::size_t size : {std::size_t{1}, std::size_t{4096}, 4 * mib + 3, 200 * mib + 1})
      for (auto [from, to] : {std::pair{0, 1}, {1, 0}}) {
        SCOPED_TRACE(std::to_string(size) + " bytes from " + std::to_string(from) +
                     (plain ? ", plain" : ", of the pools"));
        auto one = must(device::open(on.system, from));
        auto other = must(device::open(on.system, to));
        auto make = [&](const device& d) {
          return plain ? of_the_user(d, size) : must(answer_of(d.allocate(dtype::uint8, size)));
        };
        auto source = make(one);
        auto target = make(other);
        auto data = random_bytes(size, size);
        put(one, source, data);
        must(answer_of(other.fill(target, std::uint8_t{0x5a})));
        ASSERT_TRUE(is_ok(answer_of(t.copy(target, source))));
        EXPECT_TRUE(holds(other, target, data));
        // Copies back a slice with an arbitrary offset.
        if (size < 4096)
          continue;
        auto part = must(target.slice(1001, size - 2000));
        auto back = must(source.slice(3, size - 2000));
        ASSERT_TRUE(is_ok(answer_of(t.copy(back, part))));
        EXPECT_TRUE(holds(one, back, std::span{data}.subspan(1001, size - 2000)));
      }
  auto stats = t.stats();
  EXPECT_EQ(stats.links_failed, 0u);
  if (!GetParam() || t.graph().link(0, 1)->access == peer_access::enabled) {
    EXPECT_EQ(GetParam() ? stats.staged_copies : stats.direct_copies, 0u);
  }
}

TEST_P(CudaCopies, AllPairsAtOnceAndOften) {
  gpus on;
  auto t = open(on.system);
  auto number = gpus_present();
  constexpr std::size_t size = 8 * mib;
  std::vector<device> devices;
  std::vector<any_gpu_ref> sources;
  std::vector<std::vector<std::byte>> data;
  for (int i = 0; i < number; ++i) {
    devices.push_back(must(device::open(on.system, i)));
    sources.push_back(must(answer_of(devices.back().allocate(dtype::uint8, size))));
    data.push_back(random_bytes(size, static_cast<std::uint64_t>(i)));
    put(devices.back(), sources.back(), data.back());
  }
  std::vector<copy_pair> all;
  for (auto& from : sources)
    for (auto& d : devices)
      if (d.ordinal() != from.device())
        all.push_back({must(answer_of(d.allocate(dtype::uint8, size, true))), from});
  std::vector<pending<void>> rounds;
  for (int i = 0; i < 20; ++i)
    rounds.push_back(t.copy(all));
  for (auto& x : rounds)
    ASSERT_TRUE(is_ok(answer_of(x)));
  for (auto& x : all)
    EXPECT_TRUE(holds(devices[static_cast<std::size_t>(x.target.device())], x.target,
                      data[static_cast<std::size_t>(x.source.device())]));
}

} // namespace

} // namespace troupe::testing
