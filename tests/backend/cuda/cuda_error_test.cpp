#include "backend/cuda/cuda_error.hpp"
#include <troupe/error.hpp>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <gtest/gtest.h>

#include <cctype>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <map>
#include <new>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using detail::classify;

const std::map<errc, std::set<int>> special = {
    {errc::device_fault,
     {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911}},
    {errc::out_of_memory, {2}},
    {errc::unavailable,
     {3, 4, 34, 35, 46, 100, 102, 103, 127, 216, 802, 803, 804, 805, 806, 807, 808, 809}},
    {errc::not_supported, {36, 209, 217, 222, 801, 811}},
};

errc expected_class(int code) {
  for (const auto& [means, codes] : special)
    if (codes.contains(code))
      return means;
  return errc::cuda_error;
}

/// Returns true if the CUDA runtime knows this code.
bool is_known(int code) {
  return std::string_view{cudaGetErrorName(static_cast<cudaError_t>(code))} !=
         "unrecognized error code";
}

#ifdef TROUPE_CUDA_INCLUDE_DIR

/// One enumerator of cudaError_t, as the header documents it.
struct documented {
  std::string name;
  int code = 0;
  std::string text; ///< lower case, one space between words
};

/// Reads the enumeration's comments from CUDA's own header.
std::vector<documented> read_header(const std::filesystem::path& path) {
  std::ifstream file{path};
  std::stringstream buffer;
  buffer << file.rdbuf();
  std::string all = buffer.str();
  const auto begin = all.find("enum __device_builtin__ cudaError\n");
  if (begin == std::string::npos)
    return {};
  all = all.substr(begin, all.find("\n};", begin) - begin);
  std::vector<documented> result;
  for (auto open = all.find("/**"); open != std::string::npos; open = all.find("/**", open)) {
    const auto close = all.find("*/", open);
    documented x;
    bool space = true;
    for (const char c : all.substr(open + 3, close - open - 3)) {
      const bool blank = std::isspace(static_cast<unsigned char>(c)) || c == '*';
      if (!blank)
        x.text += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      else if (!space)
        x.text += ' ';
      space = blank;
    }
    const auto name = all.find("cuda", close);
    const auto equals = all.find('=', close);
    x.name = all.substr(name, all.find_first_of(" =", name) - name);
    x.code = std::stoi(all.substr(equals + 1, 16));
    result.push_back(std::move(x));
    open = close;
  }
  return result;
}

#endif

} // namespace

TEST(CudaError, ClassifiesEveryCode) {
  int known = 0;
  for (int code = 1; code <= 10000; ++code) {
    known += is_known(code) ? 1 : 0;
    const auto x = static_cast<cudaError_t>(code);
    EXPECT_EQ(to_string(classify(x)), to_string(expected_class(code)))
        << code << ' ' << cudaGetErrorName(x);
  }
  EXPECT_GT(known, 100);
  for (const auto& [means, codes] : special)
    for (const int code : codes)
      EXPECT_TRUE(is_known(code)) << code;
}

TEST(CudaError, TellsThatSuccessIsNoError) {
  EXPECT_EQ(classify(cudaSuccess), errc::internal);
  EXPECT_FALSE(detail::check(cudaSuccess, "cudaMalloc", 0));
}

/// The header documents errors after which the process "must be terminated and relaunched".
TEST(CudaError, CallsAFaultWhatTheHeaderCallsOne) {
#ifndef TROUPE_CUDA_INCLUDE_DIR
  GTEST_SKIP() << "built without the path of CUDA's headers";
#else
  const auto all = read_header(std::filesystem::path{TROUPE_CUDA_INCLUDE_DIR} / "driver_types.h");
  ASSERT_GT(all.size(), 100u);
  int faults = 0;
  for (const auto& x : all) {
    const auto code = static_cast<cudaError_t>(x.code);
    if (code != cudaErrorApiFailureBase) { // the start of a range
      EXPECT_EQ(cudaGetErrorName(code), x.name);
    }
    if (x.text.find("terminated and relaunched") == std::string::npos)
      continue;
    ++faults;
    EXPECT_EQ(classify(code), errc::device_fault) << x.name;
    EXPECT_EQ(severity_of(classify(code)), severity::process) << x.name;
  }
  EXPECT_GE(faults, 10);
#endif
}

TEST(CudaError, ClassifiesEveryResultOfNccl) {
  const std::map<int, std::pair<const char*, errc>> all = {
      {0, {"ncclSuccess", errc::internal}},
      {1, {"ncclUnhandledCudaError", errc::nccl_error}},
      {2, {"ncclSystemError", errc::nccl_error}},
      {3, {"ncclInternalError", errc::nccl_error}},
      {4, {"ncclInvalidArgument", errc::invalid_argument}},
      {5, {"ncclInvalidUsage", errc::nccl_error}},
      {6, {"ncclRemoteError", errc::nccl_error}},
      {7, {"ncclInProgress", errc::internal}},
  };
  ASSERT_EQ(all.size(), static_cast<std::size_t>(ncclNumResults));
  for (const auto& [code, want] : all) {
    const auto x = static_cast<ncclResult_t>(code);
    EXPECT_STREQ(detail::name_of(x), want.first);
    EXPECT_EQ(to_string(classify(x)), to_string(want.second)) << want.first;
  }
  EXPECT_EQ(classify(ncclNumResults), errc::nccl_error); // a code of a later NCCL
  EXPECT_FALSE(detail::check(ncclSuccess, "ncclAllReduce", 0));
}

/// NCCL has one code for all failures of CUDA. Its last message and the free memory of the device
/// tell the cause.
TEST(CudaError, KnowsThatNcclFoundNoMemory) {
  constexpr auto unknown = detail::unknown_bytes;
  constexpr std::size_t gib = std::size_t{1} << 30;
  for (const char* message :
       {"Cuda failure 'out of memory'", "Cuda failure 2 'out of memory'",
        "Failed to CUDA malloc 4194304 bytes", "Failed to CUDA calloc 1024 bytes",
        "Failed to CUDA calloc async 1024 bytes", "Failed to CUDA host alloc 65536 bytes"})
    for (const auto free_bytes : {unknown, gib, std::size_t{0}}) {
      EXPECT_EQ(classify(ncclUnhandledCudaError, message, free_bytes), errc::out_of_memory)
          << message;
      EXPECT_EQ(classify(ncclRemoteError, message, free_bytes), errc::nccl_error) << message;
      EXPECT_EQ(classify(ncclInternalError, message, free_bytes), errc::nccl_error) << message;
    }
  // The last message may come from another thread.
  EXPECT_EQ(
      classify(ncclUnhandledCudaError, "Connection closed by remote peer", std::size_t{24} << 20),
      errc::out_of_memory);
  EXPECT_EQ(classify(ncclSystemError, "Failed to malloc 4096 bytes", unknown), errc::out_of_memory);

  for (const auto free_bytes : {unknown, gib}) {
    EXPECT_EQ(classify(ncclUnhandledCudaError, "Cuda failure 'invalid argument'", free_bytes),
              errc::nccl_error);
    EXPECT_EQ(classify(ncclUnhandledCudaError, "", free_bytes), errc::nccl_error);
  }
  EXPECT_EQ(classify(ncclRemoteError, "", 0), errc::nccl_error);
  EXPECT_EQ(classify(ncclSystemError, "Call to connect failed: Connection refused", 0),
            errc::nccl_error);
  EXPECT_EQ(classify(ncclInvalidArgument, "out of memory", 0), errc::invalid_argument);
}

/// INV-10.
TEST(CudaError, CarriesItsFields) {
  const auto x = failure_of(
      detail::cuda_failure(cudaErrorMemoryAllocation, "cudaMallocFromPoolAsync", 3, "4096 bytes"));
  ASSERT_TRUE(x);
  EXPECT_EQ(x->code, errc::out_of_memory);
  EXPECT_EQ(x->api, "cudaMallocFromPoolAsync");
  EXPECT_EQ(x->native_name, "cudaErrorMemoryAllocation");
  EXPECT_EQ(x->native_code, 2);
  EXPECT_EQ(x->device, 3);
  EXPECT_EQ(x->rank, -1);
  EXPECT_NE(x->detail.find("out of memory"), std::string::npos) << x->detail;
  EXPECT_NE(x->detail.find("4096 bytes"), std::string::npos) << x->detail;
}

/// INV-10.
TEST(CudaError, CarriesNcclsFields) {
  const auto x = failure_of(detail::nccl_failure(ncclRemoteError, "ncclAllReduce", 2, 5));
  ASSERT_TRUE(x);
  EXPECT_EQ(x->code, errc::nccl_error);
  EXPECT_EQ(x->api, "ncclAllReduce");
  EXPECT_EQ(x->native_name, "ncclRemoteError");
  EXPECT_EQ(x->native_code, 6);
  EXPECT_EQ(x->device, 2);
  EXPECT_EQ(x->rank, 5);
  EXPECT_FALSE(x->detail.empty());
}

TEST(CudaError, CountsWhatFailsInDestructors) {
  const auto before = detail::teardown_errors();
  detail::teardown(cudaSuccess, "cudaEventDestroy", 0);
  detail::teardown(ncclSuccess, "ncclCommAbort", 0);
  detail::teardown(cudaErrorCudartUnloading, "cudaEventDestroy", 0); // the process is ending
  EXPECT_EQ(detail::teardown_errors(), before);
  detail::teardown(cudaErrorInvalidResourceHandle, "cudaEventDestroy", 0);
  detail::teardown(ncclInternalError, "ncclCommAbort", 0);
  EXPECT_EQ(detail::teardown_errors(), before + 2);
}

TEST(CudaError, TurnsNoRoomIntoAnError) {
  const auto none = detail::no_throw([]() -> caf::error { throw std::bad_alloc{}; });
  EXPECT_EQ(code_of(none), errc::out_of_memory);
}

} // namespace troupe::testing
