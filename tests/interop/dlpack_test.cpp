// Memory as DLPack tensors, and tensors as memory, on virtual devices. The tests of CUDA's streams
// are in dlpack_cuda_test.cpp.

#include "interop/acquired.hpp"
#include "support/eventually.hpp"
#include "support/random.hpp"
#include "support/world_fixture.hpp"
#include <troupe/dlpack.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <future>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

/// A tensor of the test, as another library would make it.
template <class Tensor> struct producer {
  explicit producer(std::vector<std::byte> bytes, DLDataType type,
                    std::vector<std::int64_t> extents)
      : data(std::move(bytes)), shape(std::move(extents)) {
    auto& x = tensor.dl_tensor;
    x.data = data.data();
    x.device = {kDLCPU, 0};
    x.ndim = static_cast<std::int32_t>(shape.size());
    x.dtype = type;
    x.shape = shape.data();
    x.strides = nullptr;
    tensor.manager_ctx = this;
    tensor.deleter = [](Tensor* self) { ++static_cast<producer*>(self->manager_ctx)->deleted; };
    if constexpr (std::is_same_v<Tensor, dlpack_versioned_tensor>)
      tensor.version = {1, 0};
  }
  producer(const producer&) = delete;

  std::vector<std::byte> data;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  std::atomic<int> deleted{0};
  Tensor tensor{};
};

using new_producer = producer<dlpack_versioned_tensor>;
using old_producer = producer<DLManagedTensor>;

std::vector<std::byte> content_of(const DLTensor& x, std::size_t size_bytes) {
  const auto* begin = static_cast<const std::byte*>(x.data) + x.byte_offset;
  return {begin, begin + size_bytes};
}

/// The lane has seen what was released before.
void settle(const device& d) {
  must(answer_of(d.stats()));
  must(answer_of(d.stats()));
}

class Dlpack : public ::testing::Test {
protected:
  void SetUp() override {
    TROUPE_IN_PROCESS_ONLY("tensors are in the memory of this process");
    TROUPE_HOST_ONLY("the test reads the memory itself");
    sys_ = std::make_unique<test_system>(system_options{.devices = 2, .faults = faults_});
    gpu_ = std::make_unique<device>(sys_->open());
  }

  any_gpu_ref allocated(dtype type, std::size_t count, std::uint64_t seed) {
    auto ref = must(answer_of(gpu_->allocate(type, count)));
    put(*gpu_, ref, random_bytes(ref.size_bytes(), seed));
    return ref;
  }

  std::shared_ptr<fault_plan> faults_ = std::make_shared<fault_plan>();
  std::unique_ptr<test_system> sys_;
  std::unique_ptr<device> gpu_;
};

// -- types

// The codes as DLPack's documentation has them, and what NumPy and PyTorch call the types.
const std::map<dtype, DLDataType> known_types = {
    {dtype::int8, {0, 8, 1}},         {dtype::int32, {0, 32, 1}},
    {dtype::int64, {0, 64, 1}},       {dtype::uint8, {1, 8, 1}},
    {dtype::uint32, {1, 32, 1}},      {dtype::uint64, {1, 64, 1}},
    {dtype::float16, {2, 16, 1}},     {dtype::float32, {2, 32, 1}},
    {dtype::float64, {2, 64, 1}},     {dtype::bfloat16, {4, 16, 1}},
    {dtype::float8_e4m3, {10, 8, 1}}, {dtype::float8_e5m2, {12, 8, 1}},
    {dtype::complex64, {5, 64, 1}},   {dtype::complex128, {5, 128, 1}},
};

TEST(DlpackTypes, AreMappedInBothDirections) {
  ASSERT_EQ(known_types.size(), std::size(all_dtypes));
  for (auto [type, want] : known_types) {
    SCOPED_TRACE(to_string(type));
    const auto got = to_dlpack(type);
    EXPECT_EQ(got.code, want.code);
    EXPECT_EQ(got.bits, want.bits);
    EXPECT_EQ(got.lanes, want.lanes);
    EXPECT_EQ(from_dlpack(want), type);
  }
}

TEST(DlpackTypes, OthersHaveNoType) {
  std::size_t found = 0;
  for (unsigned code = 0; code < 256; ++code)
    for (unsigned bits = 0; bits < 256; ++bits) {
      const DLDataType x{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1};
      const bool is_known = std::ranges::any_of(known_types, [&](const auto& known) {
        return known.second.code == x.code && known.second.bits == x.bits;
      });
      EXPECT_EQ(from_dlpack(x).has_value(), is_known) << code << ' ' << bits;
      found += is_known;
      EXPECT_FALSE(from_dlpack(DLDataType{x.code, x.bits, 2}));
      EXPECT_FALSE(from_dlpack(DLDataType{x.code, x.bits, 0}));
    }
  EXPECT_EQ(found, known_types.size());
}

// -- export

TEST_F(Dlpack, ExportsEveryType) {
  for (auto type : all_dtypes) {
    SCOPED_TRACE(to_string(type));
    const auto seed = static_cast<std::uint64_t>(type);
    auto ref = allocated(type, 6 * 35, seed);
    auto tensor = must(to_dlpack(*gpu_, ref, {.shape = {6, 5, 7}}));
    EXPECT_EQ(tensor->version.major, 1u);
    EXPECT_EQ(tensor->flags, 0u);
    auto& x = tensor->dl_tensor;
    EXPECT_EQ(x.device.device_type, kDLCPU);
    EXPECT_EQ(x.device.device_id, 0);
    ASSERT_EQ(x.ndim, 3);
    EXPECT_EQ((std::vector<std::int64_t>{x.shape, x.shape + 3}),
              (std::vector<std::int64_t>{6, 5, 7}));
    EXPECT_EQ((std::vector<std::int64_t>{x.strides, x.strides + 3}),
              (std::vector<std::int64_t>{35, 7, 1}));
    EXPECT_EQ(x.dtype.code, known_types.at(type).code);
    EXPECT_EQ(x.dtype.bits, known_types.at(type).bits);
    EXPECT_EQ(x.dtype.lanes, 1);
    EXPECT_EQ(x.data, must(ref.access()));
    EXPECT_EQ(content_of(x, ref.size_bytes()), random_bytes(ref.size_bytes(), seed));
  }
}

TEST_F(Dlpack, ExportsWithoutAVersion) {
  auto ref = allocated(dtype::float32, 100, 1);
  auto tensor = must(to_dlpack_unversioned(*gpu_, ref));
  auto& x = tensor->dl_tensor;
  ASSERT_EQ(x.ndim, 1);
  EXPECT_EQ(x.shape[0], 100);
  EXPECT_EQ(x.strides[0], 1);
  EXPECT_EQ(content_of(x, 400), random_bytes(400, 1));
  tensor.reset();
  EXPECT_TRUE(is_ok(answer_of(gpu_->fill(ref, same_bytes(ref)))));
}

TEST_F(Dlpack, TheConsumerGetsWhatWasRequestedBefore) {
  auto ref = allocated(dtype::uint8, 100'000, 1);
  gate held;
  held.hold_stream(*gpu_, {}, {ref});
  const auto want = random_bytes(100'000, 2);
  auto upload = gpu_->upload(ref, std::span<const std::byte>{want});
  auto exported = std::async(std::launch::async, [&] { return to_dlpack(*gpu_, ref); });
  // From its admission on, other requests are refused.
  ASSERT_TRUE(eventually([&] { return is_acquired(*gpu_, ref); }));
  EXPECT_FALSE(upload.ready());
  EXPECT_EQ(exported.wait_for(std::chrono::seconds{0}), std::future_status::timeout);
  held.open();
  auto tensor = must(exported.get());
  EXPECT_EQ(content_of(tensor->dl_tensor, 100'000), want);
}

TEST_F(Dlpack, RequestsGetWhatTheConsumerWrote) {
  auto ref = allocated(dtype::uint8, 100'000, 1);
  auto tensor = must(to_dlpack(*gpu_, ref));
  EXPECT_TRUE(has_code(get(*gpu_, ref), errc::buffer_acquired));
  EXPECT_TRUE(has_code(answer_of(gpu_->fill(ref, same_bytes(ref))), errc::buffer_acquired));
  const auto want = random_bytes(100'000, 2);
  std::memcpy(tensor->dl_tensor.data, want.data(), want.size());
  tensor.reset();
  EXPECT_TRUE(holds(*gpu_, ref, want));
}

TEST_F(Dlpack, ATensorKeepsASliceOfMemory) {
  auto ref = allocated(dtype::int32, 1000, 1);
  const auto all = random_bytes(4000, 1);
  auto tensor = must(to_dlpack(*gpu_, must(ref.slice(100, 300))));
  EXPECT_TRUE(has_code(get(*gpu_, must(ref.slice(0, 100))), errc::buffer_acquired));
  EXPECT_TRUE(has_code(answer_of(gpu_->reset()), errc::buffer_acquired));
  ref = {};
  for (int i = 0; i < 20; ++i) // the memory is not used again
    allocated(dtype::int32, 1000, 2);
  settle(*gpu_);
  EXPECT_EQ(content_of(tensor->dl_tensor, 1200),
            (std::vector<std::byte>{all.begin() + 400, all.begin() + 1600}));
  const auto used = must(answer_of(gpu_->stats())).free_bytes;
  tensor.reset();
  settle(*gpu_);
  EXPECT_EQ(must(answer_of(gpu_->stats())).free_bytes, used + 4000);
  EXPECT_TRUE(is_ok(answer_of(gpu_->reset())));
}

TEST_F(Dlpack, ReadersShareATensorThatIsOnlyRead) {
  auto ref = allocated(dtype::uint8, 1000, 1);
  auto one = must(to_dlpack(*gpu_, ref, {.mode = access_mode::read}));
  auto other = must(to_dlpack(*gpu_, ref, {.mode = access_mode::read}));
  EXPECT_EQ(one->flags, dlpack_read_only);
  EXPECT_TRUE(holds(*gpu_, ref, random_bytes(1000, 1)));
  EXPECT_TRUE(has_code(to_dlpack(*gpu_, ref), errc::buffer_acquired));
  one.reset();
  EXPECT_TRUE(has_code(answer_of(gpu_->fill(ref, same_bytes(ref))), errc::buffer_acquired));
  other.reset();
  EXPECT_TRUE(is_ok(answer_of(gpu_->fill(ref, same_bytes(ref)))));
}

TEST_F(Dlpack, ATensorThatIsWrittenMakesMemoryValid) {
  auto ref = allocated(dtype::uint8, 1000, 1);
  auto failed = gpu_->launch(
      [](launch_context&) { return make_error(errc::invalid_argument, "it fails"); }, {}, {ref});
  EXPECT_TRUE(has_code(answer_of(failed), errc::launch_failed));
  EXPECT_TRUE(has_code(to_dlpack(*gpu_, ref), errc::indeterminate));
  EXPECT_TRUE(has_code(to_dlpack(*gpu_, ref, {.mode = access_mode::read}), errc::indeterminate));
  auto tensor = must(to_dlpack(*gpu_, ref, {.mode = access_mode::write}));
  const auto want = random_bytes(1000, 2);
  std::memcpy(tensor->dl_tensor.data, want.data(), want.size());
  tensor.reset();
  EXPECT_TRUE(holds(*gpu_, ref, want));
}

TEST_F(Dlpack, RefusesExportsThatCannotBe) {
  auto ref = allocated(dtype::float32, 100, 1);
  EXPECT_TRUE(has_code(to_dlpack(*gpu_, ref, {.shape = {10, 11}}), errc::shape_mismatch));
  EXPECT_TRUE(has_code(to_dlpack(*gpu_, ref, {.shape = {-10, -10}}), errc::invalid_argument));
  EXPECT_TRUE(has_code(to_dlpack(*gpu_, ref, {.shape = {std::int64_t{1} << 62, 4}}),
                       errc::invalid_argument));
  EXPECT_TRUE(has_code(to_dlpack(*gpu_, ref, {.stream = nullptr}), errc::not_supported));
  EXPECT_TRUE(has_code(to_dlpack(*gpu_, any_gpu_ref{}), errc::stale_ref));
  EXPECT_TRUE(has_code(to_dlpack(sys_->open(1), ref), errc::invalid_argument));
  EXPECT_TRUE(
      has_code(to_dlpack(*gpu_, ref, {.options = {.deadline = -1s}}), errc::deadline_exceeded));
  auto refused =
      gpu_->launch([&](launch_context&) { return error_of(to_dlpack(*gpu_, ref)); }, {}, {});
  EXPECT_TRUE(has_code(answer_of(refused), errc::launch_failed)) << "a lane must not block";
  must(answer_of(gpu_->reset()));
  EXPECT_TRUE(has_code(to_dlpack(*gpu_, ref), errc::stale_ref));
}

// -- import

TEST_F(Dlpack, ImportsEveryType) {
  for (auto type : all_dtypes) {
    SCOPED_TRACE(to_string(type));
    const auto size = 24 * size_of(type);
    const auto want = random_bytes(3 * size, static_cast<std::uint64_t>(type));
    new_producer made{want, known_types.at(type), {2, 3, 4}};
    made.tensor.dl_tensor.byte_offset = size;
    {
      auto ref = must(from_dlpack(*gpu_, &made.tensor));
      EXPECT_EQ(ref.type(), type);
      EXPECT_EQ(ref.count(), 24u);
      EXPECT_EQ(must(ref.access()), made.data.data() + size);
      const std::vector<std::byte> middle{want.begin() + static_cast<std::ptrdiff_t>(size),
                                          want.begin() + static_cast<std::ptrdiff_t>(2 * size)};
      EXPECT_TRUE(holds(*gpu_, ref, middle));
      // It is the same memory: what is written there is in the tensor.
      const auto next = random_bytes(size, 77);
      put(*gpu_, ref, next);
      auto all = want;
      std::ranges::copy(next, all.begin() + static_cast<std::ptrdiff_t>(size));
      EXPECT_EQ(made.data, all);
      EXPECT_EQ(made.deleted, 0);
    }
    settle(*gpu_);
    EXPECT_TRUE(eventually([&] { return made.deleted == 1; }));
  }
}

TEST_F(Dlpack, ImportsTensorsWithoutAVersion) {
  const auto want = random_bytes(400, 1);
  old_producer made{want, {2, 32, 1}, {100}};
  auto ref = must(from_dlpack<float>(*gpu_, &made.tensor));
  EXPECT_TRUE(holds(*gpu_, ref, want));
  ref = {};
  settle(*gpu_);
  EXPECT_TRUE(eventually([&] { return made.deleted == 1; }));
}

TEST_F(Dlpack, TheDeleterIsCalledOnceAfterTheLastUse) {
  new_producer made{random_bytes(400, 1), {2, 32, 1}, {100}};
  gate held;
  auto ref = must(from_dlpack<float>(*gpu_, &made.tensor));
  auto copy = ref;
  auto work = held.hold_stream(*gpu_, {}, {ref});
  ASSERT_TRUE(held.wait_reached());
  ref = {};
  copy = {};
  settle(*gpu_);
  EXPECT_EQ(made.deleted, 0);
  held.open();
  EXPECT_TRUE(is_ok(answer_of(work)));
  EXPECT_TRUE(eventually([&] { return made.deleted == 1; }));
  settle(*gpu_);
  EXPECT_EQ(made.deleted, 1);
}

TEST_F(Dlpack, ImportsDenseTensorsOfAnyShape) {
  const auto want = random_bytes(24, 1);
  using extents = std::vector<std::int64_t>;
  const std::vector<std::pair<extents, extents>> shapes = {
      {{24}, {1}},       {{4, 6}, {6, 1}},        {{4, 1, 6}, {6, 99, 1}},
      {{1, 24}, {0, 1}}, {{2, 3, 4}, {12, 4, 1}}, {{24, 1}, {1, -5}},
  };
  for (auto& [shape, strides] : shapes) {
    new_producer made{want, {1, 8, 1}, shape};
    made.strides = strides;
    made.tensor.dl_tensor.strides = made.strides.data();
    auto ref = must(from_dlpack(*gpu_, &made.tensor));
    EXPECT_TRUE(holds(*gpu_, ref, want));
    ref = {};
    settle(*gpu_);
    EXPECT_TRUE(eventually([&] { return made.deleted == 1; }));
  }
  new_producer scalar{random_bytes(8, 1), {2, 64, 1}, {}};
  auto ref = must(from_dlpack<double>(*gpu_, &scalar.tensor));
  EXPECT_EQ(ref.count(), 1u);
  ref = {};
  settle(*gpu_);
}

TEST_F(Dlpack, RefusesTensorsThatItCannotUse) {
  struct wrong {
    const char* what;
    void (*change)(new_producer&);
    errc code;
    const char* says;
  };
  const wrong all[] = {
      {"lanes", [](auto& x) { x.tensor.dl_tensor.dtype.lanes = 4; }, errc::not_supported,
       "4 lanes"},
      {"bool", [](auto& x) { x.tensor.dl_tensor.dtype = {6, 8, 1}; }, errc::not_supported,
       "type code 6 with 8 bits"},
      {"column-major",
       [](auto& x) {
         x.strides = {1, 4};
         x.tensor.dl_tensor.strides = x.strides.data();
       },
       errc::not_supported, "stride 1 of the tensor is 4, not 1"},
      {"every second row",
       [](auto& x) {
         x.shape = {2, 5};
         x.strides = {10, 1};
         x.tensor.dl_tensor.strides = x.strides.data();
       },
       errc::not_supported, "stride 0 of the tensor is 10, not 5"},
      {"on a GPU", [](auto& x) { x.tensor.dl_tensor.device = {kDLCUDA, 0}; },
       errc::invalid_argument, "DLPack device of type 2"},
      {"pinned", [](auto& x) { x.tensor.dl_tensor.device = {kDLCUDAHost, 0}; },
       errc::invalid_argument, "DLPack device of type 3"},
      {"empty", [](auto& x) { x.shape[0] = 0; }, errc::invalid_argument, "no elements"},
      {"without memory", [](auto& x) { x.tensor.dl_tensor.data = nullptr; }, errc::invalid_argument,
       "no elements"},
      {"negative", [](auto& x) { x.shape[1] = -5; }, errc::invalid_argument, "-5"},
      {"huge", [](auto& x) { x.shape[0] = INT64_MAX; }, errc::invalid_argument, "too many"},
      {"no shape", [](auto& x) { x.tensor.dl_tensor.shape = nullptr; }, errc::invalid_argument,
       "no shape"},
      {"misaligned", [](auto& x) { x.tensor.dl_tensor.byte_offset = 2; }, errc::not_supported,
       "multiple"},
      {"too new", [](auto& x) { x.tensor.version = {2, 0}; }, errc::not_supported, "DLPack 2.0"},
      {"too old", [](auto& x) { x.tensor.version = {0, 8}; }, errc::not_supported, "DLPack 0.8"},
  };
  for (auto& x : all) {
    SCOPED_TRACE(x.what);
    new_producer made{random_bytes(80, 1), {2, 32, 1}, {4, 5}};
    x.change(made);
    const auto got = from_dlpack(*gpu_, &made.tensor);
    EXPECT_TRUE(has_code(got, x.code));
    EXPECT_NE(describe(error_of(got)).find(x.says), std::string::npos) << describe(error_of(got));
    settle(*gpu_);
    EXPECT_EQ(made.deleted, 0) << "after an error the tensor is the caller's";
  }
  new_producer made{random_bytes(80, 1), {2, 32, 1}, {4, 5}};
  EXPECT_TRUE(has_code(from_dlpack<double>(*gpu_, &made.tensor), errc::shape_mismatch));
  EXPECT_TRUE(has_code(from_dlpack(*gpu_, &made.tensor, {.stream = nullptr}), errc::not_supported));
  EXPECT_TRUE(
      has_code(from_dlpack(*gpu_, static_cast<DLManagedTensor*>(nullptr)), errc::invalid_argument));
  auto other = sys_->open(1);
  other.shutdown();
  EXPECT_TRUE(has_code(from_dlpack(other, &made.tensor), errc::unavailable));
  EXPECT_EQ(made.deleted, 0);
}

TEST_F(Dlpack, NeverWritesAReadOnlyTensor) {
  const auto want = random_bytes(400, 1);
  new_producer made{want, {2, 32, 1}, {100}};
  made.tensor.flags = dlpack_read_only;
  auto ref = must(from_dlpack<float>(*gpu_, &made.tensor));
  EXPECT_TRUE(has_code(answer_of(gpu_->fill(ref, 1.f)), errc::buffer_acquired));
  EXPECT_TRUE(has_code(to_dlpack(*gpu_, ref), errc::buffer_acquired));
  EXPECT_TRUE(holds(*gpu_, ref, want));
  auto again = must(to_dlpack(*gpu_, ref, {.mode = access_mode::read}));
  ref = {};
  EXPECT_EQ(made.deleted, 0);
  EXPECT_EQ(content_of(again->dl_tensor, 400), want);
  again.reset();
  settle(*gpu_);
  EXPECT_TRUE(eventually([&] { return made.deleted == 1; }));
}

TEST_F(Dlpack, ATensorGoesRoundFromDeviceToDevice) {
  // To another virtual device, whose memory is host memory too, and to the same one.
  for (int to : {1, 0}) {
    auto d = sys_->open(to);
    auto ref = allocated(dtype::float32, 1000, 3);
    auto tensor = must(to_dlpack(*gpu_, ref, {.shape = {10, 100}}));
    auto there = must(from_dlpack<float>(d, std::move(tensor)));
    EXPECT_EQ(tensor, nullptr);
    EXPECT_TRUE(holds(d, there, random_bytes(4000, 3)));
    EXPECT_TRUE(is_ok(answer_of(d.fill(there, 4.f))));
    EXPECT_TRUE(has_code(get(*gpu_, ref), errc::buffer_acquired));
    there = {};
    ASSERT_TRUE(eventually([&] { return !is_acquired(*gpu_, ref); }));
    EXPECT_TRUE(holds(*gpu_, ref, std::vector<float>(1000, 4)));
  }
}

// -- lifetimes

TEST_F(Dlpack, TheSystemEndsBeforeAnImportedTensor) {
  new_producer made{random_bytes(400, 1), {2, 32, 1}, {100}};
  auto ref = must(from_dlpack(*gpu_, &made.tensor));
  gpu_.reset();
  sys_.reset();
  EXPECT_TRUE(ref.stale());
  EXPECT_EQ(made.deleted, 0);
  ref = {};
  EXPECT_TRUE(eventually([&] { return made.deleted == 1; }));
}

TEST_F(Dlpack, TheSystemWaitsForAnExportedTensor) {
  auto ref = allocated(dtype::uint8, 1000, 1);
  auto tensor = must(to_dlpack(*gpu_, ref));
  ref = {};
  gpu_.reset();
  std::atomic<bool> released = false;
  std::thread consumer{[&] {
    EXPECT_EQ(content_of(tensor->dl_tensor, 1000), random_bytes(1000, 1));
    released = true;
    tensor.reset();
  }};
  sys_.reset();
  EXPECT_TRUE(released);
  consumer.join();
}

TEST_F(Dlpack, TheDeviceEndsBeforeAnImportedTensor) {
  for (bool shuts_down : {false, true}) {
    SCOPED_TRACE(shuts_down);
    new_producer made{random_bytes(400, 1), {2, 32, 1}, {100}};
    auto ref = must(from_dlpack(*gpu_, &made.tensor));
    if (shuts_down)
      gpu_->shutdown();
    else
      must(answer_of(gpu_->reset()));
    EXPECT_TRUE(ref.stale());
    EXPECT_EQ(made.deleted, 0);
    ref = {};
    EXPECT_TRUE(eventually([&] { return made.deleted == 1; }));
  }
}

TEST_F(Dlpack, AFaultEndsEveryTensorOnce) {
  new_producer made{random_bytes(400, 1), {2, 32, 1}, {100}};
  auto imported = must(from_dlpack(*gpu_, &made.tensor));
  auto ref = allocated(dtype::uint8, 1000, 1);
  auto tensor = must(to_dlpack(*gpu_, ref));
  faults_->poison();
  EXPECT_TRUE(has_code(answer_of(gpu_->stats()), errc::device_fault));
  EXPECT_TRUE(ref.stale());
  EXPECT_EQ(made.deleted, 0);
  imported = {};
  tensor.reset();
  ref = {};
  gpu_.reset();
  sys_.reset();
  EXPECT_TRUE(eventually([&] { return made.deleted == 1; }));
}

TEST_F(Dlpack, ManyThreadsExportAndImport) {
  std::vector<std::thread> threads;
  std::atomic<int> made{0};
  std::atomic<int> deleted{0};
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::mt19937_64 random{t};
      for (int i = 0; i < 50; ++i) {
        const auto count = pick(random, 1, 1000);
        auto ref = must(answer_of(gpu_->allocate(dtype::uint8, count)));
        const auto want = random_bytes(count, random());
        put(*gpu_, ref, want);
        auto tensor = must(to_dlpack(*gpu_, ref));
        ref = {};
        ++made;
        auto back = must(from_dlpack<std::uint8_t>(*gpu_, std::move(tensor)));
        EXPECT_TRUE(holds(*gpu_, back, want));
        back = {};
        ++deleted;
      }
    });
  for (auto& x : threads)
    x.join();
  EXPECT_EQ(made, 200);
  settle(*gpu_);
  EXPECT_TRUE(eventually([&] { return is_ok(answer_of(gpu_->reset())); }));
}

// -- devices in other processes

TEST(DlpackOfWorkers, IsRefused) {
  if (!in_workers())
    GTEST_SKIP() << "only with devices in worker processes";
  test_system system;
  auto d = system.open();
  auto ref = must(d.allocate<float>(100));
  EXPECT_TRUE(has_code(to_dlpack(d, ref), errc::not_supported));
  EXPECT_TRUE(has_code(to_dlpack(d, ref, {.stream = nullptr}), errc::not_supported));
  new_producer made{random_bytes(400, 1), {2, 32, 1}, {100}};
  made.tensor.dl_tensor.device = {on_cuda() ? kDLCUDA : kDLCPU, 0};
  EXPECT_TRUE(has_code(from_dlpack(d, &made.tensor), errc::not_supported));
  EXPECT_EQ(made.deleted, 0);
  EXPECT_TRUE(works(d));
}

} // namespace

} // namespace troupe::testing
