// What is asked of cuBLASLt. In its place is a table of functions that record their arguments, so
// no GPU is needed.

#include "compute/blas/lt_plan.hpp"
#include "compute/blas/lt_products.hpp"
#include "support/expect.hpp"
#include <troupe/launch.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using namespace blas;

/// The matrix of a layout, as it was made.
struct made_layout {
  cudaDataType_t type;
  std::uint64_t rows, columns;
  std::int64_t leading;
};

/// All that was asked of cuBLASLt.
struct lt_record {
  std::map<std::pair<const void*, int>, std::vector<std::byte>> values; ///< by object, attribute
  std::map<const void*, made_layout> layouts;
  std::map<int, std::vector<std::byte>> preferences; ///< of the last choice
  std::size_t alive = 0;                             ///< descriptors, layouts and preferences
  std::size_t choices = 0;
  std::size_t products = 0;
  std::size_t captures = 0;
  std::vector<const void*> replayed; ///< d of each
  // The last choice or product.
  const void* what = nullptr;
  const void *a = nullptr, *b = nullptr, *c = nullptr, *d = nullptr; ///< layouts
  const void *a_at = nullptr, *b_at = nullptr, *c_at = nullptr, *d_at = nullptr;
  std::array<std::byte, 16> alpha{};
  void* workspace = nullptr;
  // What it answers.
  cublasStatus_t choice = CUBLAS_STATUS_SUCCESS;
  int found = 1;
  std::size_t workspace_bytes = 0;
  bool is_one_kernel = true; ///< a product is captured as one

  template <class T> T value(const void* of, int which) const {
    T result{};
    if (const auto i = values.find({of, which}); i != values.end() && i->second.size() == sizeof(T))
      std::memcpy(&result, i->second.data(), sizeof(T));
    return result;
  }
  template <class T> T preference(int which) const {
    T result{};
    if (const auto i = preferences.find(which);
        i != preferences.end() && i->second.size() == sizeof(T))
      std::memcpy(&result, i->second.data(), sizeof(T));
    return result;
  }
};

lt_record record;

/// Drops the attributes of an object that ends.
void forget(const void* x) {
  const auto begin = record.values.lower_bound({x, std::numeric_limits<int>::min()});
  const auto end =
      std::find_if(begin, record.values.end(), [&](auto& y) { return y.first.first != x; });
  record.values.erase(begin, end);
}

template <class T> cublasStatus_t make_object(T** to) {
  *to = new T{};
  ++record.alive;
  return CUBLAS_STATUS_SUCCESS;
}
template <class T> cublasStatus_t destroy_object(T* x) {
  forget(x);
  delete x;
  --record.alive;
  return CUBLAS_STATUS_SUCCESS;
}
template <class T> cublasStatus_t keep(T* of, int which, const void* value, std::size_t size) {
  const auto* bytes = static_cast<const std::byte*>(value);
  record.values[{of, which}] = {bytes, bytes + size};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t make_layout(cublasLtMatrixLayout_t* to, cudaDataType_t type, std::uint64_t rows,
                           std::uint64_t columns, std::int64_t leading) {
  make_object(to);
  record.layouts[*to] = {type, rows, columns, leading};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t choose(cublasLtHandle_t, cublasLtMatmulDesc_t what, cublasLtMatrixLayout_t a,
                      cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                      cublasLtMatmulPreference_t preference, int,
                      cublasLtMatmulHeuristicResult_t* result, int* found) {
  ++record.choices;
  record.what = what;
  record.a = a;
  record.b = b;
  record.c = c;
  record.d = d;
  record.preferences.clear();
  for (auto i = record.values.lower_bound({preference, std::numeric_limits<int>::min()});
       i != record.values.end() && i->first.first == preference; ++i)
    record.preferences[i->first.second] = i->second;
  *result = {};
  result->workspaceSize = record.workspace_bytes;
  result->state = CUBLAS_STATUS_SUCCESS;
  *found = record.found;
  return record.choice;
}

cublasStatus_t multiply(cublasLtHandle_t, cublasLtMatmulDesc_t what, const void* alpha,
                        const void* a, cublasLtMatrixLayout_t, const void* b,
                        cublasLtMatrixLayout_t, const void*, const void* c, cublasLtMatrixLayout_t,
                        void* d, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*,
                        void* workspace, std::size_t, cudaStream_t) {
  ++record.products;
  record.what = what;
  std::memcpy(record.alpha.data(), alpha, record.alpha.size()); // of a union of this size
  record.a_at = a;
  record.b_at = b;
  record.c_at = c;
  record.d_at = d;
  record.workspace = workspace;
  return CUBLAS_STATUS_SUCCESS;
}

/// Counts its launches.
struct recorded_replay final : detail::kernel_replay {
  explicit recorded_replay(const void* to) : d_at(to) {}
  cudaError_t launch(cudaStream_t) const noexcept override {
    record.replayed.push_back(d_at);
    return cudaSuccess;
  }
  const void* const d_at;
};

std::unique_ptr<const detail::kernel_replay> capture(cudaStream_t,
                                                     const std::function<caf::error()>& enqueue) {
  ++record.captures;
  const auto products = record.products;
  EXPECT_FALSE(enqueue());
  record.products = products; // it did not run
  if (!record.is_one_kernel)
    return nullptr;
  return std::make_unique<recorded_replay>(record.d_at);
}

cudaError_t write_words(std::uint64_t* target, std::span<const std::uint64_t> words,
                        cudaStream_t) noexcept {
  std::ranges::copy(words, target);
  return cudaSuccess;
}

const lt_functions& recording_functions() {
  static const lt_functions result = [] {
    lt_functions x;
    x.cublasLtDestroy = [](cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; };
    x.cublasLtGetStatusName = [](cublasStatus_t) { return "the name of the status"; };
    x.cublasLtMatmul = multiply;
    x.cublasLtMatmulAlgoGetHeuristic = choose;
    x.cublasLtMatmulDescCreate = [](cublasLtMatmulDesc_t* to, cublasComputeType_t, cudaDataType_t) {
      return make_object(to);
    };
    x.cublasLtMatmulDescDestroy = [](cublasLtMatmulDesc_t y) { return destroy_object(y); };
    x.cublasLtMatmulDescSetAttribute =
        [](cublasLtMatmulDesc_t of, cublasLtMatmulDescAttributes_t which, const void* value,
           std::size_t size) { return keep(of, which, value, size); };
    x.cublasLtMatmulPreferenceCreate = [](cublasLtMatmulPreference_t* to) {
      return make_object(to);
    };
    x.cublasLtMatmulPreferenceDestroy = [](cublasLtMatmulPreference_t y) {
      return destroy_object(y);
    };
    x.cublasLtMatmulPreferenceSetAttribute =
        [](cublasLtMatmulPreference_t of, cublasLtMatmulPreferenceAttributes_t which,
           const void* value, std::size_t size) { return keep(of, which, value, size); };
    x.cublasLtMatrixLayoutCreate = make_layout;
    x.cublasLtMatrixLayoutDestroy = [](cublasLtMatrixLayout_t y) {
      record.layouts.erase(y);
      return destroy_object(y);
    };
    x.cublasLtMatrixLayoutSetAttribute =
        [](cublasLtMatrixLayout_t of, cublasLtMatrixLayoutAttribute_t which, const void* value,
           std::size_t size) { return keep(of, which, value, size); };
    x.write_words = write_words;
    x.capture = capture;
    return x;
  }();
  return result;
}

/// A context whose workspace is memory of the host.
class recording_context final : public launch_context {
public:
  int device() const noexcept override { return 0; }
  CUstream_st* cuda_stream() const noexcept override {
    return reinterpret_cast<CUstream_st*>(std::uintptr_t{64}); // is not used
  }
  caf::error run_on_host(std::function<void()>) override {
    return make_error(errc::internal, "nothing is to run on the host");
  }
  library_state* library(std::string_view name) const noexcept override {
    return name == lt_library_name ? state.get() : nullptr;
  }
  caf::expected<void*> workspace(std::size_t size_bytes) override {
    if (is_full)
      return make_error(errc::out_of_memory, "there is no memory");
    most_workspace = std::max(most_workspace, size_bytes);
    room.resize(std::max(room.size(), size_bytes / sizeof(block) + 1));
    return static_cast<void*>(room.data());
  }

  std::int32_t* verdict() noexcept override { return nullptr; }

  /// Returns whether the workspace is elsewhere now.
  bool move_workspace() {
    auto other = std::vector<block>(room.size() + 1);
    std::swap(room, other);
    return room.data() != other.data();
  }

  std::unique_ptr<library_state> state;
  std::size_t most_workspace = 0;
  bool is_full = false; ///< there is no memory for a workspace

private:
  struct alignas(256) block {
    std::byte bytes[256];
  };
  std::vector<block> room;
};

/// A product with its memory, which is not touched.
struct asked {
  product what;
  std::vector<launch_memory> a, b, c, d;
  std::array<launch_memory, extras> others{};

  product_memory memory() const {
    product_memory result{a, b, c, d, {}};
    for (std::size_t i = 0; i < extras; ++i)
      if (what.has[i] != 0)
        result.more[i] = &others[i];
    return result;
  }
  void add(extra which, std::uintptr_t address) {
    const auto i = static_cast<std::size_t>(which);
    what.has[i] = 1;
    others[i] = {reinterpret_cast<void*>(address), 1, dtype::float32};
  }
};

launch_memory at(std::uintptr_t address, const layout& of) {
  return {reinterpret_cast<void*>(address), of.rows * of.leading, of.type};
}

/// d of m x n = a of m x k * b of k x n; each row has one more element than columns.
asked ask(dtype of, std::uint64_t m, std::uint64_t n, std::uint64_t k) {
  asked x;
  const auto set = [&](layout& to, std::uint64_t rows, std::uint64_t columns) {
    to.rows = rows;
    to.columns = columns;
    to.leading = columns + 1;
    to.batch_stride = rows * to.leading;
    to.type = of;
  };
  set(x.what.a, m, k);
  set(x.what.b, k, n);
  set(x.what.c, m, n);
  set(x.what.d, m, n);
  x.a = {at(0x1'0000, x.what.a)};
  x.b = {at(0x2'0000, x.what.b)};
  x.d = {at(0x4'0000, x.what.d)};
  return x;
}

class LtProducts : public ::testing::Test {
protected:
  LtProducts() {
    record = {};
    blas::replay_kernels();
    context_.state = lt_products_with(recording_functions(), nullptr_but_there());
  }
  ~LtProducts() override {
    context_.state.reset();
    EXPECT_EQ(record.alive, 0U) << "something was not destroyed";
  }
  static cublasLtHandle_t nullptr_but_there() {
    return reinterpret_cast<cublasLtHandle_t>(std::uintptr_t{8});
  }
  caf::error enqueue(const asked& x) { return enqueue_by_lt(context_, x.what, x.memory()); }
  caf::error prepare(asked x) {
    x.what.only_prepares = 1;
    return prepare_by_lt(context_, x.what, x.memory());
  }

  recording_context context_;
};

TEST_F(LtProducts, TakesMatricesForTheirTransposes) {
  auto x = ask(dtype::complex64, 3, 5, 7);
  std::swap(x.what.a.rows, x.what.a.columns); // is stored as 7 x 3
  x.what.a.op = blas::transpose::conjugated;
  x.what.a.leading = 9;
  ASSERT_FALSE(enqueue(x));
  const auto& left = record.layouts.at(record.a);
  EXPECT_EQ((std::array{left.rows, left.columns}), (std::array<std::uint64_t, 2>{5, 7}));
  EXPECT_EQ(left.leading, 6);
  const auto& right = record.layouts.at(record.b);
  EXPECT_EQ((std::array{right.rows, right.columns}), (std::array<std::uint64_t, 2>{3, 7}));
  EXPECT_EQ(right.leading, 9);
  const auto& to = record.layouts.at(record.d);
  EXPECT_EQ((std::array{to.rows, to.columns}), (std::array<std::uint64_t, 2>{5, 3}));
  EXPECT_EQ(to.type, CUDA_C_32F);
  EXPECT_EQ(record.value<cublasOperation_t>(record.what, CUBLASLT_MATMUL_DESC_TRANSA), CUBLAS_OP_N);
  EXPECT_EQ(record.value<cublasOperation_t>(record.what, CUBLASLT_MATMUL_DESC_TRANSB), CUBLAS_OP_C);
  EXPECT_EQ(record.a_at, x.b.front().address);
  EXPECT_EQ(record.b_at, x.a.front().address);
  EXPECT_EQ(record.d_at, x.d.front().address);
}

TEST_F(LtProducts, ReadsFactorsInTheTypeOfTheSums) {
  auto x = ask(dtype::float64, 2, 2, 2);
  x.what.alpha[0] = 2.5;
  ASSERT_FALSE(enqueue(x));
  double wide = 0;
  std::memcpy(&wide, record.alpha.data(), sizeof wide);
  EXPECT_EQ(wide, 2.5);
  x = ask(dtype::int8, 2, 2, 2);
  x.what.d.type = x.what.c.type = dtype::int32;
  x.what.alpha[0] = -3;
  ASSERT_FALSE(enqueue(x));
  std::int32_t integer = 0;
  std::memcpy(&integer, record.alpha.data(), sizeof integer);
  EXPECT_EQ(integer, -3);
}

/// A c of another type at the place of d is refused, although it is not read.
TEST_F(LtProducts, OfFloat8HaveNoCThatIsNotRead) {
  auto x = ask(dtype::float8_e4m3, 16, 16, 16);
  ASSERT_FALSE(enqueue(x));
  EXPECT_EQ(record.c_at, nullptr);
  x = ask(dtype::bfloat16, 16, 16, 16);
  ASSERT_FALSE(enqueue(x));
  EXPECT_EQ(record.c_at, x.d.front().address);
}

TEST_F(LtProducts, DeterministicOnesDoNotDependOnAddresses) {
  auto x = ask(dtype::float32, 4, 4, 4);
  x.a.front().address = reinterpret_cast<void*>(std::uintptr_t{0x1'0010});
  ASSERT_FALSE(enqueue(x));
  const auto preference = [&](int which) { return record.preference<std::uint32_t>(which); };
  EXPECT_EQ(preference(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES), 256U); // of b
  EXPECT_EQ(preference(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES), 16U);
  EXPECT_FALSE(record.preferences.contains(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK));
  x.what.deterministic = 1;
  ASSERT_FALSE(enqueue(x));
  EXPECT_EQ(record.choices, 2U);
  for (const auto which :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    EXPECT_EQ(preference(which), 16U);
  EXPECT_EQ(preference(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) &
                CUBLASLT_REDUCTION_SCHEME_INPLACE,
            0U);
  EXPECT_EQ(record.preference<std::uint64_t>(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES),
            std::uint64_t{32} << 20);
  x.a.front().address = reinterpret_cast<void*>(std::uintptr_t{0x1'0400});
  ASSERT_FALSE(enqueue(x));
  EXPECT_EQ(record.choices, 2U); // the same plan
}

TEST_F(LtProducts, ChoosesOncePerShape) {
  auto x = ask(dtype::float32, 4, 4, 4);
  for (int i = 0; i < 10; ++i) {
    x.what.alpha[0] = i;
    ASSERT_FALSE(enqueue(x));
  }
  EXPECT_EQ(record.choices, 1U);
  x.what.d.leading = x.what.c.leading = 8;
  ASSERT_FALSE(enqueue(x));
  x.what.function = activation::relu;
  ASSERT_FALSE(enqueue(x));
  x.what.compute = precision::tf32;
  ASSERT_FALSE(enqueue(x));
  x.d.front().address = reinterpret_cast<void*>(std::uintptr_t{0x4'0004});
  ASSERT_FALSE(enqueue(x));
  EXPECT_EQ(record.choices, 5U);
  EXPECT_EQ(record.products, 14U);
}

TEST_F(LtProducts, KeepsPlansOfTenThousandShapesWithinTheirBound) {
  std::size_t most = 0;
  for (std::uint64_t i = 1; i <= 10'000; ++i) {
    ASSERT_FALSE(enqueue(ask(dtype::float32, i, 4, 4)));
    most = std::max(most, record.alive);
  }
  EXPECT_LE(most, 5U * 4096 + 6); // a descriptor and four layouts each, and those of the one in use
  EXPECT_GE(most, 1000U);
  EXPECT_EQ(record.choices, 10'000U);
  context_.state->trim();
  EXPECT_EQ(record.alive, 0U);
  ASSERT_FALSE(enqueue(ask(dtype::float32, 1, 4, 4)));
  EXPECT_EQ(record.choices, 10'001U);
}

TEST_F(LtProducts, SetsTheAddressesOfEachCall) {
  auto x = ask(dtype::float8_e4m3, 16, 16, 16);
  x.what.d.type = x.what.c.type = dtype::bfloat16;
  x.add(extra::bias, 0x100);
  x.add(extra::a_scale, 0x200);
  x.add(extra::b_scale, 0x300);
  const auto address = [](int which) { return record.value<std::uintptr_t>(record.what, which); };
  ASSERT_FALSE(enqueue(x));
  EXPECT_EQ(address(CUBLASLT_MATMUL_DESC_BIAS_POINTER), 0x100U);
  EXPECT_EQ(address(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER), 0x200U); // a is its second factor
  EXPECT_EQ(address(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER), 0x300U);
  x.add(extra::a_scale, 0x400);
  ASSERT_FALSE(enqueue(x));
  EXPECT_EQ(address(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER), 0x400U);
  EXPECT_EQ(record.choices, 1U);
}

TEST_F(LtProducts, ThatAreRepeatedAreLaunchedByTheirKernels) {
  auto x = ask(dtype::bfloat16, 16, 16, 16);
  x.add(extra::bias, 0x100);
  record.workspace_bytes = 1000;
  for (int i = 0; i < 4; ++i)
    ASSERT_FALSE(enqueue(x));
  EXPECT_EQ(record.products, 1U);
  EXPECT_EQ(record.captures, 1U);
  EXPECT_EQ(record.replayed, std::vector<const void*>(3, x.d.front().address));
  // Another product has other arguments.
  const std::function<void()> changes[] = {
      [&] { x.what.alpha[0] = 2; },
      [&] { x.add(extra::bias, 0x200); },
      [&] { x.a.front().address = reinterpret_cast<void*>(std::uintptr_t{0x8'0000}); },
      [&] { x.d.front().address = reinterpret_cast<void*>(std::uintptr_t{0x9'0000}); },
      [&] { x.what.deterministic = 1; },
      [&] { ASSERT_TRUE(context_.move_workspace()); }};
  for (auto& change : changes) {
    record.replayed.clear();
    const auto before = record.products;
    change();
    ASSERT_FALSE(enqueue(x));
    EXPECT_EQ(record.products, before + 1);
    EXPECT_TRUE(record.replayed.empty());
    ASSERT_FALSE(enqueue(x));
    EXPECT_EQ(record.replayed, std::vector<const void*>(1, x.d.front().address));
  }
  context_.state->trim();
  const auto before = record.products;
  ASSERT_FALSE(enqueue(x));
  EXPECT_EQ(record.products, before + 1);
}

TEST_F(LtProducts, ThatAreRepeatedAreLaunchedByCublasUnlessTheirKernelsAreWanted) {
  blas::replay_kernels(false);
  const auto x = ask(dtype::float32, 4, 4, 4);
  for (int i = 0; i < 4; ++i)
    ASSERT_FALSE(enqueue(x));
  EXPECT_EQ(record.products, 4U);
  EXPECT_EQ(record.captures, 0U);
  blas::replay_kernels();
}

TEST_F(LtProducts, OfSeveralKernelsAreLaunchedByCublas) {
  record.is_one_kernel = false;
  const auto x = ask(dtype::float32, 4, 4, 4);
  for (int i = 0; i < 4; ++i)
    ASSERT_FALSE(enqueue(x));
  EXPECT_EQ(record.products, 4U);
  EXPECT_EQ(record.captures, 1U);
}

TEST_F(LtProducts, OfABatchByAddressHaveListsInTheWorkspaceAndScales) {
  constexpr std::size_t many = 600; // more than the driver writes in one call
  auto x = ask(dtype::float8_e4m3, 16, 16, 16);
  x.what.d.type = x.what.c.type = dtype::bfloat16;
  x.what.batches = many;
  x.what.by_address = 1;
  x.add(extra::a_scale, 0x200);
  for (auto* list : {&x.a, &x.b, &x.d})
    for (std::size_t i = 1; i < many; ++i) {
      auto next = list->front();
      next.address = static_cast<std::byte*>(next.address) + i * 0x10'0000;
      list->push_back(next);
    }
  record.workspace_bytes = 1000;
  ASSERT_FALSE(enqueue(x));
  const auto lists = [&](const void* of, const std::vector<launch_memory>& all) {
    const auto* begin = static_cast<void* const*>(of);
    return std::ranges::equal(std::span{begin, many}, all, {}, {},
                              [](auto& m) { return m.address; });
  };
  EXPECT_TRUE(lists(record.a_at, x.b));
  EXPECT_TRUE(lists(record.b_at, x.a));
  EXPECT_TRUE(lists(record.c_at, x.d));
  EXPECT_TRUE(lists(record.d_at, x.d));
  EXPECT_GE(static_cast<const std::byte*>(record.b_at),
            static_cast<std::byte*>(record.workspace) + 1000);
  EXPECT_EQ(record.value<std::uintptr_t>(record.what, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER),
            0x200U);
}

TEST_F(LtProducts, ArePreparedInRoomForTheLargestMatrix) {
  auto x = ask(dtype::float32, 1000, 10, 1000);
  record.workspace_bytes = 5000;
  ASSERT_FALSE(prepare(x));
  EXPECT_EQ(record.products, 1U);
  const auto largest = x.a.front().size_bytes();
  EXPECT_GE(context_.most_workspace, 5000 + largest);
  EXPECT_LE(context_.most_workspace, 5000 + largest + 256);
  const auto* begin = static_cast<std::byte*>(record.workspace);
  for (const auto* p : {record.a_at, record.b_at, record.c_at, record.d_at}) {
    EXPECT_GE(static_cast<const std::byte*>(p), begin + 5000);
    EXPECT_LE(static_cast<const std::byte*>(p) + largest, begin + context_.most_workspace);
  }
  ASSERT_FALSE(enqueue(x));
  EXPECT_EQ(record.choices, 1U); // the plan was prepared
}

TEST_F(LtProducts, WithoutRoomForTheirWorkspaceDoNotRun) {
  context_.is_full = true;
  auto x = ask(dtype::float32, 4, 4, 4);
  EXPECT_FALSE(enqueue(x)); // needs none
  EXPECT_EQ(record.products, 1U);
  x.what.deterministic = 1;
  record.workspace_bytes = 1000;
  EXPECT_TRUE(has_code(enqueue(x), errc::out_of_memory));
  EXPECT_TRUE(has_code(prepare(x), errc::out_of_memory));
  x.what.batches = 2;
  x.what.by_address = 1;
  for (auto* list : {&x.a, &x.b, &x.d})
    list->push_back(list->front());
  EXPECT_TRUE(has_code(enqueue(x), errc::out_of_memory));
  EXPECT_EQ(record.products, 1U);
  context_.is_full = false;
  EXPECT_FALSE(enqueue(x));
}

TEST_F(LtProducts, WithoutAnAlgorithmAreNotSupported) {
  const auto x = ask(dtype::float32, 4, 4, 4);
  record.found = 0;
  EXPECT_TRUE(has_code(enqueue(x), errc::not_supported));
  record.found = 1;
  record.choice = CUBLAS_STATUS_NOT_SUPPORTED;
  EXPECT_TRUE(has_code(enqueue(x), errc::not_supported));
  record.choice = CUBLAS_STATUS_INTERNAL_ERROR;
  const auto error = enqueue(x);
  EXPECT_TRUE(has_code(error, errc::cuda_error));
  EXPECT_EQ(failure_of(error)->api, "cublasLtMatmulAlgoGetHeuristic");
  EXPECT_EQ(failure_of(error)->native_name, "the name of the status");
  EXPECT_EQ(record.products, 0U);
  EXPECT_EQ(record.alive, 0U); // no plan is kept
}

TEST_F(LtProducts, OfADeviceThatWasOpenedBeforeAreUnavailable) {
  context_.state.reset();
  const auto x = ask(dtype::float32, 4, 4, 4);
  EXPECT_TRUE(has_code(enqueue(x), errc::unavailable));
  EXPECT_TRUE(has_code(prepare(x), errc::unavailable));
}

} // namespace

} // namespace troupe::testing
