/// A user's own streams, memory and kernels beside the library's, on a GPU, and a kernel that
/// faults.

#include "support/affine_kernel.hpp"
#include "support/expect.hpp"
#include "support/gpus.hpp"
#include <troupe/troupe.hpp>

#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

namespace troupe::testing {

namespace {

using namespace std::chrono_literals;
using elements = std::vector<std::uint32_t>;

caf::error check_cuda(cudaError_t code) {
  return code == cudaSuccess ? caf::error{} : make_error(errc::cuda_error, cudaGetErrorName(code));
}

/// Returns a launch of x[i] = a * x[i] + y[i].
launch_function affine(gpu_ref<std::uint32_t> x, gpu_ref<std::uint32_t> y, std::uint32_t a) {
  return [=](launch_context& context) -> caf::error {
    auto to = x.access();
    auto from = y.access();
    if (!to || !from)
      return to ? from.error() : to.error();
    return check_cuda(
        static_cast<cudaError_t>(launch_affine(*to, *from, a, x.count(), context.cuda_stream())));
  };
}

class UserWork : public ::testing::Test {
protected:
  void SetUp() override {
    TROUPE_NEEDS_GPUS(1);
    cfg_ = std::make_unique<config>();
    cfg_->use_backend(must(make_cuda_backend()));
    sys_ = std::make_unique<caf::actor_system>(*cfg_);
    gpu_ = std::make_unique<device>(must(device::open(*sys_, 0)));
    must(check_cuda(cudaSetDevice(0)));
    must(check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)));
  }

  void TearDown() override {
    if (stream_ != nullptr) {
      EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    }
    gpu_.reset();
    sys_.reset();
    cfg_.reset();
  }

  std::unique_ptr<config> cfg_;
  std::unique_ptr<caf::actor_system> sys_;
  std::unique_ptr<device> gpu_;
  cudaStream_t stream_ = nullptr;
};

TEST_F(UserWork, AUsersStreamIsOrderedWithOurs) {
  constexpr std::size_t count = 1 << 22;
  auto x = must(gpu_->allocate<std::uint32_t>(count));
  auto y = must(gpu_->allocate<std::uint32_t>(count));
  std::uint32_t want = 7;
  gpu_->fill(x, 7u);
  gpu_->fill(y, 3u);
  for (int round = 0; round < 20; ++round) {
    auto a = static_cast<std::uint32_t>(2 * round + 3);
    gpu_->launch(affine(x, y, a), {x, y}, {x});
    want = a * want + 3;
    must(gpu_->acquire(x, access_mode::read_write, stream_).wait());
    EXPECT_TRUE(has_code(gpu_->fill(x, 0u).wait(), errc::buffer_acquired));
    // The host does not wait for the stream. The release waits for it on the GPU.
    for (int k = 0; k < 8; ++k) {
      must(check_cuda(static_cast<cudaError_t>(
          launch_affine(must(x.access()), must(y.access()), a, count, stream_))));
      want = a * want + 3;
    }
    auto released = gpu_->release(x, access_mode::read_write, stream_);
    gpu_->launch(affine(x, y, a), {x, y}, {x});
    want = a * want + 3;
    must(released.wait());
  }
  auto got = must(gpu_->download(x));
  EXPECT_EQ(std::count(got.begin(), got.end(), want), static_cast<std::ptrdiff_t>(count));
}

TEST_F(UserWork, ReadersShareABufferThatIsAcquiredForReading) {
  auto x = must(gpu_->allocate<std::uint32_t>(1000));
  gpu_->fill(x, 5u);
  must(gpu_->acquire(x, access_mode::read, stream_).wait());
  EXPECT_EQ(must(gpu_->download(x)), elements(1000, 5u));
  EXPECT_TRUE(has_code(gpu_->fill(x, 0u).wait(), errc::buffer_acquired));
  EXPECT_TRUE(has_code(gpu_->reset().wait(), errc::buffer_acquired));
  EXPECT_TRUE(
      has_code(gpu_->release(x, access_mode::write, stream_).wait(), errc::invalid_argument));
  must(gpu_->release(x, access_mode::read, stream_).wait());
  must(gpu_->fill(x, 6u).wait());
  EXPECT_EQ(must(gpu_->download(x)), elements(1000, 6u));
}

TEST_F(UserWork, AUsersMemoryIsTakenIntoCare) {
  constexpr std::size_t count = 100'000;
  std::uint32_t* memory = nullptr;
  must(check_cuda(cudaMalloc(reinterpret_cast<void**>(&memory), count * sizeof(std::uint32_t))));
  auto deleted = std::make_shared<std::atomic<int>>(0);
  elements data(count);
  std::iota(data.begin(), data.end(), 1u);
  {
    auto ref = must(gpu_->adopt(memory, count, [deleted](void* x) {
      if (cudaFree(x) == cudaSuccess)
        deleted->fetch_add(1);
    }));
    auto sum = must(gpu_->allocate<std::uint32_t>(count, true));
    gpu_->upload(ref, data);
    gpu_->launch(affine(sum, ref, 1), {sum, ref}, {sum});
    ref = {}; // the operations keep the memory
    EXPECT_EQ(must(gpu_->download(sum)), data);
  }
  must(gpu_->stats().wait()); // the lane has processed the release since
  must(gpu_->stats().wait());
  EXPECT_EQ(deleted->load(), 1);
}

TEST_F(UserWork, PinnedMemoryIsCopiedDirectly) {
  constexpr std::size_t count = 1 << 20;
  auto host = must(gpu_->allocate_pinned(count * sizeof(std::uint32_t)));
  ASSERT_TRUE(host.pinned());
  auto from = host.as<std::uint32_t>();
  std::iota(from.begin(), from.end(), 11u);
  auto x = must(gpu_->allocate<std::uint32_t>(count));
  auto back = must(gpu_->allocate_pinned(count * sizeof(std::uint32_t)));
  gpu_->upload(x, host);
  must(gpu_->download(x, back).wait());
  EXPECT_TRUE(std::equal(from.begin(), from.end(), back.as<std::uint32_t>().begin()));
}

/// All completion strategies give the same results.
class Completion : public ::testing::TestWithParam<completion_strategy> {};

TEST_P(Completion, EveryStrategyAnswersRight) {
  TROUPE_NEEDS_GPUS(1);
  config cfg;
  cfg.use_backend(must(make_cuda_backend()));
  cfg.lanes.completion = GetParam();
  cfg.lanes.in_flight_limit = 4;
  caf::actor_system sys{cfg};
  auto gpu = must(device::open(sys, 0));
  auto x = must(gpu.allocate<std::uint32_t>(10'000));
  auto y = must(gpu.allocate<std::uint32_t>(10'000));
  must(gpu.fill(x, 1u).wait());
  gpu.fill(y, 1u);
  std::uint32_t want = 1;
  for (int i = 0; i < 300; ++i) {
    gpu.launch(affine(x, y, 3), {x, y}, {x});
    want = 3 * want + 1;
  }
  EXPECT_EQ(must(gpu.download(x)), elements(10'000, want));
}

INSTANTIATE_TEST_SUITE_P(All, Completion,
                         ::testing::Values(completion_strategy::event_poll,
                                           completion_strategy::host_func,
                                           completion_strategy::synchronize));

/// A kernel writes to an invalid address while other requests are pending.
[[noreturn]] void fault_in_a_kernel() {
  auto fail = [](const std::string& text) {
    std::fprintf(stderr, "%s\n", text.c_str());
    std::_Exit(1);
  };
  {
    config cfg;
    cfg.use_backend(must(make_cuda_backend()));
    caf::actor_system sys{cfg};
    set_log_sink([](const log_line&) {});
    auto w = must(world::open(sys, {.devices = all_devices(sys)}));
    auto refs = must(w.allocate<float>(1 << 20, true));
    auto gpu = w.device_of(0);
    auto x = must(gpu.allocate<std::uint32_t>(1024, true));
    auto answered = gpu.launch(
        [x](launch_context& context) {
          auto* nowhere = reinterpret_cast<std::uint32_t*>(std::uintptr_t{0x10});
          return check_cuda(static_cast<cudaError_t>(
              launch_affine(nowhere, nowhere, 1, x.count(), context.cuda_stream())));
        },
        {}, {x});
    std::vector<pending<collective_done>> sums;
    for (int i = 0; i < 20; ++i)
      sums.push_back(w.all_reduce(refs, reduce_op::sum, {.deadline = 20s}));
    auto done = answered.wait();
    if (done || code_of(done.error()) != errc::device_fault)
      fail("the launch: " + (done ? std::string{"success"} : describe(done.error())));
    for (auto& sum : sums) {
      auto result = sum.wait();
      if (!result && code_of(result.error()) != errc::device_fault &&
          code_of(result.error()) != errc::unavailable)
        fail("a sum: " + describe(result.error()));
    }
    if (!x.stale() || !refs[0].stale())
      fail("a handle is not stale");
    auto later = w.all_reduce(refs).wait();
    if (later)
      fail("a sum after the fault succeeded");
  }
  std::_Exit(0);
}

TEST(Fault, EndsTheProcesssCudaAndAnswersEverybody) {
  TROUPE_NEEDS_GPUS(1);
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto begin = std::chrono::steady_clock::now();
  EXPECT_EXIT(fault_in_a_kernel(), ::testing::ExitedWithCode(0), "");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
}

} // namespace

} // namespace troupe::testing
