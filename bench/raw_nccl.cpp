#include "raw_nccl.hpp"

#include "cuda_call.hpp"
#include "rank_threads.hpp"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <memory>
#include <string>
#include <utility>

namespace bench {

namespace {

using bench::check;

void check(ncclResult_t code, const char* call) {
  if (code != ncclSuccess)
    fail(std::string{call} + ": " + ncclGetErrorString(code) + "; " + ncclGetLastError(nullptr));
}

struct rank {
  int device = 0;
  ncclComm_t communicator = nullptr;
  cudaStream_t stream = nullptr;
  float* memory = nullptr;

  void select() const { check(cudaSetDevice(device), "cudaSetDevice"); }

  void all_reduce(std::size_t count) const {
    check(ncclAllReduce(memory, memory, count, ncclFloat32, ncclSum, communicator, stream),
          "ncclAllReduce");
  }

  void synchronize() const { check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }
};

class raw_ranks {
public:
  raw_ranks(const std::vector<int>& devices, std::size_t bytes) : ranks_(devices.size()) {
    std::vector<ncclComm_t> communicators(devices.size());
    check(ncclCommInitAll(communicators.data(), static_cast<int>(devices.size()), devices.data()),
          "ncclCommInitAll");
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      auto& r = ranks_[i];
      r.device = devices[i];
      r.communicator = communicators[i];
      r.select();
      check(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking), "cudaStreamCreate");
      check(cudaMalloc(&r.memory, bytes), "cudaMalloc");
    }
  }

  ~raw_ranks() {
    check(ncclGroupStart(), "ncclGroupStart");
    for (auto& r : ranks_)
      check(ncclCommDestroy(r.communicator), "ncclCommDestroy");
    check(ncclGroupEnd(), "ncclGroupEnd");
    for (auto& r : ranks_) {
      r.select();
      check(cudaFree(r.memory), "cudaFree");
      check(cudaStreamDestroy(r.stream), "cudaStreamDestroy");
    }
  }

  raw_ranks(const raw_ranks&) = delete;
  raw_ranks& operator=(const raw_ranks&) = delete;

  const std::vector<rank>& all() const { return ranks_; }

private:
  std::vector<rank> ranks_;
};

class raw_contestant : public summing_contestant {
public:
  explicit raw_contestant(std::shared_ptr<const std::vector<rank>> ranks)
      : ranks_(std::move(ranks)) {}

  std::size_t ranks() const override { return all().size(); }

  void write(std::size_t i, std::size_t first, std::span<const float> numbers) override {
    auto& r = all()[i];
    r.select();
    check(cudaMemcpyAsync(r.memory + first, numbers.data(), numbers.size_bytes(),
                          cudaMemcpyHostToDevice, r.stream),
          "cudaMemcpyAsync");
    r.synchronize();
  }

  /// Reads without stream order: `run` has to wait for its operations.
  void read(std::size_t i, std::size_t first, std::span<float> numbers) override {
    auto& r = all()[i];
    r.select();
    check(
        cudaMemcpy(numbers.data(), r.memory + first, numbers.size_bytes(), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  }

  void clear(std::size_t count) override {
    for (auto& r : all()) {
      r.select();
      check(cudaMemsetAsync(r.memory, 0, count * sizeof(float), r.stream), "cudaMemsetAsync");
      r.synchronize();
    }
  }

protected:
  const std::vector<rank>& all() const { return *ranks_; }

private:
  std::shared_ptr<const std::vector<rank>> ranks_;
};

class threads_contestant final : public raw_contestant {
public:
  using raw_contestant::raw_contestant;

  std::string name() const override { return "raw, a thread per rank"; }

  timing sum(std::size_t count, std::size_t operations, std::size_t window) override {
    if (window == 1)
      return in_steps(ranks(), operations, [&](std::size_t i) {
        auto& r = all()[i];
        r.select();
        return [&r, count, done = std::make_unique<cuda_event>()] {
          r.all_reduce(count);
          done->record(r.stream);
          done->spin();
        };
      });
    return in_one_step(ranks(), operations, [&](std::size_t i) {
      auto& r = all()[i];
      r.select();
      return [&r, count, operations, window, events = std::make_unique<cuda_event[]>(window)] {
        for (std::size_t k = 0; k < operations; ++k) {
          r.all_reduce(count);
          events[k % window].record(r.stream);
          if (k + 1 >= window)
            events[(k + 1) % window].spin(); // the oldest
        }
        events[(operations - 1) % window].spin();
      };
    });
  }
};

class grouped_contestant final : public raw_contestant {
public:
  using raw_contestant::raw_contestant;

  std::string name() const override { return "raw, one thread, grouped"; }

  timing sum(std::size_t count, std::size_t operations, std::size_t window) override {
    if (window != 1)
      fail("one thread with a group does one operation after the other");
    timing result;
    result.each.reserve(operations);
    const auto begin = clock::now();
    for (std::size_t k = 0; k < operations; ++k) {
      const auto start = clock::now();
      check(ncclGroupStart(), "ncclGroupStart");
      for (auto& r : all())
        r.all_reduce(count);
      check(ncclGroupEnd(), "ncclGroupEnd");
      for (auto& r : all())
        r.synchronize();
      result.each.push_back(microseconds(clock::now() - start));
    }
    result.per_operation = microseconds(clock::now() - begin) / static_cast<double>(operations);
    return result;
  }
};

} // namespace

raw_contestants make_raw(const std::vector<int>& devices, std::size_t bytes) {
  const auto owner = std::make_shared<const raw_ranks>(devices, bytes);
  const std::shared_ptr<const std::vector<rank>> ranks{owner, &owner->all()};
  return {std::make_unique<threads_contestant>(ranks), std::make_unique<grouped_contestant>(ranks)};
}

} // namespace bench
