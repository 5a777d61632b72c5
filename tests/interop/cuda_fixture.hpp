/// GPUs, and streams of the test beside those of the library.
#pragma once

#include "support/affine_kernel.hpp"
#include "support/expect.hpp"
#include "support/gpus.hpp"
#include <troupe/troupe.hpp>

#include <caf/actor_system.hpp>

#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace troupe::testing {

inline void must_cuda(cudaError_t code) { ASSERT_EQ(code, cudaSuccess) << cudaGetErrorName(code); }

/// A stream of the test.
class own_stream {
public:
  explicit own_stream(int device) : device_(device) {
    must_cuda(cudaSetDevice(device));
    must_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~own_stream() {
    gate_.open();
    must_cuda(cudaSetDevice(device_));
    must_cuda(cudaStreamSynchronize(stream_));
    must_cuda(cudaStreamDestroy(stream_));
  }
  own_stream(const own_stream&) = delete;
  own_stream& operator=(const own_stream&) = delete;

  operator cudaStream_t() const noexcept { return stream_; }

  /// Blocks the stream until `open` is called.
  void hold() {
    must_cuda(cudaLaunchHostFunc(stream_, [](void* x) { static_cast<latch*>(x)->wait(); }, &gate_));
  }
  void open() { gate_.open(); }
  void synchronize() const { must_cuda(cudaStreamSynchronize(stream_)); }

private:
  struct latch {
    void wait() {
      std::unique_lock lock{mutex};
      opened.wait(lock, [this] { return is_open; });
    }
    void open() {
      std::lock_guard lock{mutex};
      is_open = true;
      opened.notify_all();
    }
    std::mutex mutex;
    std::condition_variable opened;
    bool is_open = false;
  };

  int device_;
  cudaStream_t stream_ = nullptr;
  latch gate_;
};

/// Pinned memory of the test, so that copies in its streams do not wait.
class pinned_words {
public:
  explicit pinned_words(std::size_t count) : count_(count) {
    must_cuda(cudaMallocHost(reinterpret_cast<void**>(&words_), size_bytes()));
  }
  explicit pinned_words(const std::vector<std::uint32_t>& content) : pinned_words(content.size()) {
    std::copy(content.begin(), content.end(), words_);
  }
  ~pinned_words() { must_cuda(cudaFreeHost(words_)); }
  pinned_words(const pinned_words&) = delete;
  pinned_words& operator=(const pinned_words&) = delete;

  std::uint32_t* data() const noexcept { return words_; }
  std::size_t size_bytes() const noexcept { return count_ * sizeof(std::uint32_t); }
  std::vector<std::uint32_t> content() const { return {words_, words_ + count_}; }

private:
  std::uint32_t* words_ = nullptr;
  std::size_t count_;
};

/// An actor system on the GPUs of the machine.
class CudaInterop : public ::testing::Test {
protected:
  void SetUp() override {
    TROUPE_NEEDS_GPUS(1);
    cfg_ = std::make_unique<config>();
    cfg_->use_backend(must(make_cuda_backend()));
    sys_ = std::make_unique<caf::actor_system>(*cfg_);
    gpu_ = std::make_unique<device>(must(device::open(*sys_, 0)));
  }
  void TearDown() override {
    gpu_.reset();
    sys_.reset();
    cfg_.reset();
  }

  /// The lane has seen what was released before.
  static void settle(const device& d) {
    must(d.stats().wait());
    must(d.stats().wait());
  }

  std::unique_ptr<config> cfg_;
  std::unique_ptr<caf::actor_system> sys_;
  std::unique_ptr<device> gpu_;
};

/// Returns a launch of x[i] = a * x[i] + y[i].
inline launch_function affine(gpu_ref<std::uint32_t> x, gpu_ref<std::uint32_t> y, std::uint32_t a) {
  return [=](launch_context& context) -> caf::error {
    auto to = x.access();
    auto from = y.access();
    if (!to || !from)
      return to ? from.error() : to.error();
    const auto code =
        static_cast<cudaError_t>(launch_affine(*to, *from, a, x.count(), context.cuda_stream()));
    return code == cudaSuccess ? caf::error{}
                               : make_error(errc::cuda_error, cudaGetErrorName(code));
  };
}

} // namespace troupe::testing
