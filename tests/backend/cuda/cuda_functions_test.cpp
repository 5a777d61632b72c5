#include "backend/cuda/cuda_functions.hpp"
#include "support/expect.hpp"
#include <troupe/error.hpp>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <string>

namespace troupe::testing {

namespace {

/// Loads the libraries, since tests of this program call parts of the backend without a backend.
class loaded_libraries : public ::testing::Environment {
public:
  void SetUp() override {
    must(detail::load_cudart());
    must(detail::load_nccl());
  }
};

const auto* const environment = ::testing::AddGlobalTestEnvironment(new loaded_libraries);

} // namespace

/// With two runtimes in one process, each thread would have two last errors.
TEST(CudaFunctions, AreThoseThatTheProgramIsLinkedWith) {
  int version = 0;
  ASSERT_EQ(ncclGetVersion(&version), ncclSuccess); // this program links both libraries
  ASSERT_STRNE(cudaGetErrorName(cudaSuccess), "");
  for (const char* library : {"/libcudart.so", "/libnccl.so"}) {
    std::set<std::string> files;
    std::ifstream maps{"/proc/self/maps"};
    for (std::string line; std::getline(maps, line);)
      if (line.find(library) != std::string::npos)
        files.insert(line.substr(line.find('/')));
    EXPECT_EQ(files.size(), 1u) << ::testing::PrintToString(files);
  }
}

TEST(CudaFunctions, AreLoadedOnce) {
  EXPECT_TRUE(is_ok(detail::load_cudart()));
  EXPECT_TRUE(is_ok(detail::load_nccl()));
}

TEST(CudaFunctions, GiveAnErrorWhileTheyAreNotLoaded) {
  detail::loaded_function<decltype(::cudaFree)> runtime;
  detail::loaded_function<decltype(::ncclGroupStart)> nccl;
  detail::loaded_function<decltype(::cudaGetErrorString)> text;
  EXPECT_EQ(runtime(nullptr), cudaErrorSharedObjectSymbolNotFound);
  EXPECT_EQ(nccl(), ncclSystemError);
  EXPECT_STREQ(text(cudaSuccess), "the library is not loaded");
}

TEST(CudaFunctions, GiveAnErrorWhereTheLibraryHasNone) {
  const std::string names[] = {"libc.so.6"};
  void* const library = must(detail::load_library(names));
  detail::loaded_function<decltype(::cudaFree)> function;
  EXPECT_FALSE(function.load(library, "cudaFree"));
  EXPECT_EQ(function(nullptr), cudaErrorSharedObjectSymbolNotFound);
  detail::loaded_function<const char*(const char*, int)> present;
  ASSERT_TRUE(present.load(library, "strchr"));
  EXPECT_STREQ(present("four", 'u'), "ur");
}

TEST(CudaFunctions, SayWhereTheirLibraryWasLookedFor) {
  const std::string names[] = {"libtroupe-has-none.so.1", "/nowhere/libtroupe-has-none.so.1"};
  const auto none = detail::load_library(names);
  ASSERT_TRUE(has_code(none, errc::unavailable));
  const auto text = describe(none.error());
  EXPECT_NE(text.find("libtroupe-has-none.so.1 cannot be loaded: libtroupe-has-none.so.1: "),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("; /nowhere/libtroupe-has-none.so.1: "), std::string::npos) << text;
}

TEST(CudaFunctions, ComeFromTheFirstLibraryThatIsThere) {
  const std::string names[] = {"/nowhere/libc.so.6", "libc.so.6"};
  EXPECT_NE(must(detail::load_library(names)), nullptr);
}

} // namespace troupe::testing
