#include "raw_products.hpp"

#include "cuda_call.hpp"

#include <cublasLt.h>

#include <bit>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace bench {

namespace {

constexpr std::size_t workspace_bytes = std::size_t{32} << 20;

void check(cublasStatus_t code, const char* call) {
  if (code != CUBLAS_STATUS_SUCCESS)
    fail(std::string{call} + ": " + cublasLtGetStatusName(code));
}

class products final : public raw_products {
public:
  products(int device, std::size_t n, product_kind kind, std::size_t most_in_flight)
      : n_(n), kind_(kind) {
    bench::check(cudaSetDevice(device), "cudaSetDevice");
    bench::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    const auto factor = n * n * (kind == product_kind::float8 ? 1 : 2);
    a_ = memory(factor);
    b_ = memory(factor);
    workspace_ = memory(workspace_bytes);
    for (std::size_t i = 0; i < most_in_flight; ++i) {
      d_.push_back(memory(n * n * 2));
      events_.push_back(std::make_unique<cuda_event>());
    }
    fill(a_);
    fill(b_);
    check(cublasLtCreate(&handle_), "cublasLtCreate");
    plan();
    run(1, 1);
    verify();
  }
  ~products() override {
    check(cublasLtDestroy(handle_), "cublasLtDestroy");
    for (auto* x : all_)
      bench::check(cudaFree(x), "cudaFree");
    bench::check(cudaStreamDestroy(stream_), "cudaStreamDestroy");
  }

  void run(std::size_t count, std::size_t window) override {
    const float one = 1;
    const float zero = 0;
    for (std::size_t i = 0; i < count + window; ++i) {
      const auto place = i % window;
      if (i >= window)
        events_[place]->spin();
      if (i >= count)
        continue;
      check(cublasLtMatmul(handle_, what_, &one, a_, factors_, b_, factors_, &zero, d_[place],
                           result_, d_[place], result_, &algorithm_, workspace_, workspace_bytes,
                           stream_),
            "cublasLtMatmul");
      events_[place]->record(stream_);
    }
  }

private:
  void* memory(std::size_t size_bytes) {
    void* result = nullptr;
    bench::check(cudaMalloc(&result, size_bytes), "cudaMalloc");
    all_.push_back(result);
    return result;
  }

  /// Fills a factor with ones.
  void fill(void* to) {
    if (kind_ == product_kind::float8) {
      bench::check(cudaMemset(to, 0x38, n_ * n_), "cudaMemset");
      return;
    }
    const std::vector<std::uint16_t> ones(n_ * n_, 0x3f80);
    bench::check(cudaMemcpy(to, ones.data(), ones.size() * 2, cudaMemcpyHostToDevice),
                 "cudaMemcpy");
  }

  void plan() {
    const auto type = kind_ == product_kind::float8 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
    check(cublasLtMatmulDescCreate(&what_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    const auto transposed = CUBLAS_OP_T;
    check(cublasLtMatmulDescSetAttribute(what_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                         sizeof transposed),
          "cublasLtMatmulDescSetAttribute");
    const auto leading = static_cast<std::int64_t>(n_);
    check(cublasLtMatrixLayoutCreate(&factors_, type, n_, n_, leading),
          "cublasLtMatrixLayoutCreate");
    check(cublasLtMatrixLayoutCreate(&result_, CUDA_R_16BF, n_, n_, leading),
          "cublasLtMatrixLayoutCreate");
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &workspace_bytes, sizeof workspace_bytes),
          "cublasLtMatmulPreferenceSetAttribute");
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    check(cublasLtMatmulAlgoGetHeuristic(handle_, what_, factors_, factors_, result_, result_,
                                         preference, 1, &found, &count),
          "cublasLtMatmulAlgoGetHeuristic");
    if (count == 0)
      fail("cuBLASLt has no algorithm");
    algorithm_ = found.algo;
  }

  void verify() {
    std::vector<std::uint16_t> got(n_ * n_);
    bench::check(cudaMemcpy(got.data(), d_[0], got.size() * 2, cudaMemcpyDeviceToHost),
                 "cudaMemcpy");
    for (const auto x : got)
      if (const auto bits = std::uint32_t{x} << 16;
          std::bit_cast<float>(bits) != static_cast<float>(n_))
        fail("cuBLASLt's product is wrong");
  }

  const std::size_t n_;
  const product_kind kind_;
  cudaStream_t stream_ = nullptr;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t what_ = nullptr;
  cublasLtMatrixLayout_t factors_ = nullptr;
  cublasLtMatrixLayout_t result_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_{};
  void* a_ = nullptr;
  void* b_ = nullptr;
  void* workspace_ = nullptr;
  std::vector<void*> d_;
  std::vector<void*> all_;
  std::vector<std::unique_ptr<cuda_event>> events_;
};

} // namespace

std::unique_ptr<raw_products> make_raw_products(int device, std::size_t n, product_kind kind,
                                                std::size_t most_in_flight) {
  return std::make_unique<products>(device, n, kind, most_in_flight);
}

} // namespace bench
