// A sum with NCCL by hand, for comparison. It is compiled, but not run: it needs GPUs.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <cstdio>
#include <thread>
#include <vector>

bool ok(cudaError_t x) {
  if (x != cudaSuccess)
    std::fprintf(stderr, "%s\n", cudaGetErrorString(x));
  return x == cudaSuccess;
}

bool ok(ncclResult_t x) {
  if (x != ncclSuccess)
    std::fprintf(stderr, "%s\n", ncclGetErrorString(x));
  return x == ncclSuccess;
}

// [sum]
bool sum(int rank, ncclComm_t comm, const std::vector<float>& data, std::vector<float>& result) {
  float* x = nullptr;
  cudaStream_t stream = nullptr;
  const auto bytes = data.size() * sizeof(float);
  bool done = ok(cudaSetDevice(rank)) && ok(cudaStreamCreate(&stream)) && ok(cudaMalloc(&x, bytes));
  done = done && ok(cudaMemcpyAsync(x, data.data(), bytes, cudaMemcpyHostToDevice, stream));
  done = done && ok(ncclAllReduce(x, x, data.size(), ncclFloat32, ncclSum, comm, stream));
  done = done && ok(cudaMemcpyAsync(result.data(), x, bytes, cudaMemcpyDeviceToHost, stream));
  // Hangs if another rank does not come: that would need a loop over cudaStreamQuery and
  // ncclCommGetAsyncError, ncclCommAbort on every rank, and new communicators.
  done = done && ok(cudaStreamSynchronize(stream));
  return ok(cudaFree(x)) && ok(cudaStreamDestroy(stream)) && done;
}
// [sum]

int main() {
  const std::size_t count = 1000;
  int devices = 0;
  if (!ok(cudaGetDeviceCount(&devices)))
    return 1;
  const auto n = static_cast<std::size_t>(devices);
  std::vector<ncclComm_t> comms(n);
  if (!ok(ncclCommInitAll(comms.data(), devices, nullptr)))
    return 1;
  std::vector<std::vector<float>> results(n, std::vector<float>(count));
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < n; ++r)
    threads.emplace_back([&, r] {
      const std::vector<float> data(count, static_cast<float>(r + 1));
      if (!sum(static_cast<int>(r), comms[r], data, results[r]))
        results[r].clear();
    });
  for (auto& x : threads)
    x.join();
  bool right = true;
  for (auto& x : results)
    right = right && x == std::vector<float>(count, static_cast<float>(n * (n + 1) / 2));
  for (auto& x : comms)
    right = ok(ncclCommDestroy(x)) && right;
  return right ? 0 : 1;
}
