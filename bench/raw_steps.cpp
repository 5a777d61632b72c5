#include "raw_steps.hpp"

#include "nccl_call.hpp"
#include "step_kernels.hpp"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace bench {

namespace {

void wait_until(const auto& there) {
  while (!there())
    std::this_thread::yield();
}

constexpr std::size_t most_ranks = 8;

/// Shared by the processes.
struct board {
  std::atomic<bool> has_id{false};
  ncclUniqueId id{};
  std::atomic<std::uint64_t> asked{0}; ///< the number of the run that is to be made
  std::size_t count = 0;
  std::size_t window = 0;
  std::atomic<std::size_t> at_begin{0}; ///< ranks, in all runs
  std::atomic<std::size_t> at_end{0};
  std::chrono::nanoseconds took{}; ///< the time of rank 0
};

class rank_process {
public:
  rank_process(board& shared, std::size_t rank, std::size_t ranks, const step_shape& shape)
      : shared_(shared), rank_(rank), ranks_(ranks), shape_(shape) {}

  [[noreturn]] void run() {
    open();
    record();
    for (std::uint64_t number = 1;; ++number) {
      wait_until([&] { return shared_.asked.load() >= number; });
      put_first_values();
      meet(shared_.at_begin, number);
      const auto begin = std::chrono::steady_clock::now();
      replay(shared_.count, shared_.window);
      const auto took = std::chrono::steady_clock::now() - begin;
      if (rank_ == 0)
        shared_.took = took;
      verify();
      meet(shared_.at_end, number);
    }
  }

private:
  void meet(std::atomic<std::size_t>& at, std::uint64_t number) const {
    at.fetch_add(1);
    wait_until([&] { return at.load() >= ranks_ * number; });
  }

  void open() {
    // Launches a graph sooner. No NCCL but that of the graph runs.
    if (::setenv("NCCL_GRAPH_MIXING_SUPPORT", "0", 0) != 0)
      fail(std::string{"setenv: "} + std::strerror(errno));
    check(cudaSetDevice(static_cast<int>(rank_)), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaMalloc(&memory_, shape_.elements * sizeof(float)), "cudaMalloc");
    check(load_add_one(), "cudaFuncGetAttributes");
    if (rank_ == 0) {
      check(ncclGetUniqueId(&shared_.id), "ncclGetUniqueId");
      shared_.has_id.store(true);
    }
    wait_until([&] { return shared_.has_id.load(); });
    check(ncclCommInitRank(&communicator_, static_cast<int>(ranks_), shared_.id,
                           static_cast<int>(rank_)),
          "ncclCommInitRank");
  }

  void enqueue() {
    for (std::size_t i = 0; i < shape_.sums; ++i) {
      for (std::size_t k = 0; k < shape_.kernels; ++k)
        check(launch_add_one(memory_, shape_.elements, stream_), "add_one");
      check(ncclAllReduce(memory_, memory_, shape_.elements, ncclFloat32, ncclAvg, communicator_,
                          stream_),
            "ncclAllReduce");
    }
  }

  void record() {
    put_first_values();
    enqueue(); // loads and connects everything
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
    enqueue();
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiateWithFlags(&graph_, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphUpload(graph_, stream_), "cudaGraphUpload");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  void replay(std::size_t count, std::size_t window) {
    while (events_.size() < window)
      events_.push_back(std::make_unique<cuda_event>());
    for (std::size_t i = 0; i < count + window; ++i) {
      if (i >= window)
        events_[i % window]->spin();
      if (i >= count)
        continue;
      check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
      events_[i % window]->record(stream_);
    }
  }

  void put_first_values() {
    const std::vector<float> first(shape_.elements, static_cast<float>(rank_));
    check(cudaMemcpyAsync(memory_, first.data(), first.size() * sizeof(float),
                          cudaMemcpyHostToDevice, stream_),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  void verify() const {
    std::vector<float> got(shape_.elements);
    check(cudaMemcpyAsync(got.data(), memory_, got.size() * sizeof(float), cudaMemcpyDeviceToHost,
                          stream_),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    const auto added = shape_.sums * shape_.kernels * shared_.count;
    const auto want = static_cast<float>(ranks_ - 1) / 2 + static_cast<float>(added);
    if (std::ranges::any_of(got, [&](float x) { return x != want; }))
      fail("a value of the step by hand is wrong");
  }

  board& shared_;
  const std::size_t rank_;
  const std::size_t ranks_;
  const step_shape shape_;
  cudaStream_t stream_ = nullptr;
  float* memory_ = nullptr;
  ncclComm_t communicator_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
  std::vector<std::unique_ptr<cuda_event>> events_;
};

class processes final : public raw_steps {
public:
  processes(std::size_t ranks, const step_shape& shape) : ranks_(ranks) {
    void* memory =
        ::mmap(nullptr, sizeof(board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || ranks > most_ranks)
      fail(std::string{"no shared memory: "} + std::strerror(errno));
    shared_ = new (memory) board;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const auto id = ::fork();
      if (id < 0)
        fail(std::string{"fork: "} + std::strerror(errno));
      if (id == 0) {
        if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
          fail(std::string{"prctl: "} + std::strerror(errno));
        rank_process{*shared_, rank, ranks, shape}.run();
      }
      ids_.push_back(id);
    }
  }

  ~processes() override {
    for (auto id : ids_) {
      static_cast<void>(::kill(id, SIGKILL));
      static_cast<void>(::waitpid(id, nullptr, 0));
    }
    static_cast<void>(::munmap(shared_, sizeof(board)));
  }

  std::chrono::nanoseconds run(std::size_t count, std::size_t window) override {
    shared_->count = count;
    shared_->window = window;
    const auto number = shared_->asked.fetch_add(1) + 1;
    while (shared_->at_end.load() < ranks_ * number) {
      if (::waitpid(-1, nullptr, WNOHANG) > 0)
        fail("a process of the step by hand has ended");
      std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
    return shared_->took;
  }

private:
  const std::size_t ranks_;
  board* shared_ = nullptr;
  std::vector<pid_t> ids_;
};

} // namespace

std::unique_ptr<raw_steps> start_raw_steps(std::size_t ranks, const step_shape& shape) {
  return std::make_unique<processes>(ranks, shape);
}

} // namespace bench
