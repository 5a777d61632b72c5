#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_handles.hpp"
#include "backend/cuda/fill.hpp"
#include "support/cuda_driver.hpp"
#include "support/eventually.hpp"
#include "support/expect.hpp"
#include "support/full_device.hpp"
#include "support/gpus.hpp"
#include "support/log_lines.hpp"
#include "support/unique_handle_suite.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;
constexpr std::byte poison_byte{0xa5};

using bytes = std::vector<std::byte>;

bytes random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 engine{seed};
  bytes result(size);
  for (auto& x : result)
    x = static_cast<std::byte>(engine() >> 56);
  return result;
}

/// A device with open memory and a stream, used by the thread that made it.
class driven_device {
public:
  driven_device(backend& cuda, int ordinal) : device_(must(cuda.open(ordinal))) {
    must(device_->bind());
    must(device_->open_memory());
    stream_ = must(device_->create_stream());
  }

  ~driven_device() {
    EXPECT_TRUE(is_ok(device_->destroy_stream(stream_)));
    EXPECT_TRUE(is_ok(device_->close_memory()));
  }

  driven_device(const driven_device&) = delete;
  driven_device& operator=(const driven_device&) = delete;

  backend_device* operator->() const noexcept { return device_.get(); }
  stream_view stream() const noexcept { return stream_; }

  void wait_for_all() {
    const auto event = must(device_->create_event());
    must(device_->record(event, stream_));
    must(device_->synchronize(event));
    must(device_->destroy_event(event));
  }

  /// Writes through pinned memory of its own. Blocks until done.
  void write(void* target, std::span<const std::byte> source) {
    if (source.empty())
      return;
    void* const pinned = must(device_->allocate_pinned(source.size()));
    std::memcpy(pinned, source.data(), source.size());
    must(device_->copy(target, pinned, source.size(), copy_direction::host_to_device, stream_));
    wait_for_all();
    must(device_->deallocate_pinned(pinned));
  }

  bytes read(const void* source, std::size_t size) {
    bytes result(size);
    void* const pinned = must(device_->allocate_pinned(size));
    std::memset(pinned, 0x5a, size);
    must(device_->copy(pinned, source, size, copy_direction::device_to_host, stream_));
    wait_for_all();
    std::memcpy(result.data(), pinned, size);
    must(device_->deallocate_pinned(pinned));
    return result;
  }

private:
  std::unique_ptr<backend_device> device_;
  stream_view stream_;
};

class CudaBackend : public ::testing::Test {
protected:
  void SetUp() override {
    TROUPE_NEEDS_GPUS(1);
    cuda_ = must(make_cuda_backend());
    before_ = detail::teardown_errors();
  }

  void TearDown() override {
    if (!cuda_)
      return;
    EXPECT_EQ(detail::teardown_errors(), before_);
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "left for another caller";
  }

  std::shared_ptr<backend> cuda_;
  std::uint64_t before_ = 0;
};

/// Blocks a stream until it is opened or goes out of scope.
class gate {
public:
  ~gate() { open(); }
  void hold(backend_device& device, stream_view stream) {
    must(device.launch_host(
        stream,
        [](void* self) {
          while (!static_cast<gate*>(self)->open_.load())
            std::this_thread::yield();
        },
        this));
  }
  void open() noexcept { open_.store(true); }

private:
  std::atomic<bool> open_{false};
};

std::size_t index_of_difference(const bytes& a, const bytes& b) {
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin());
}

} // namespace

TEST_F(CudaBackend, GivesADeviceToOneAtATime) {
  EXPECT_EQ(cuda_->name(), "cuda");
  auto first = must(cuda_->open(0));
  EXPECT_TRUE(has_code(cuda_->open(0), errc::unavailable));
  EXPECT_TRUE(has_code(must(make_cuda_backend())->open(0), errc::unavailable));
  first.reset();
  EXPECT_TRUE(cuda_->open(0));
  EXPECT_TRUE(has_code(cuda_->open(-1), errc::invalid_argument));
  EXPECT_TRUE(has_code(cuda_->open(cuda_->device_count()), errc::invalid_argument));
}

TEST_F(CudaBackend, TellsWhatTheDeviceIs) {
  const driven_device device{*cuda_, 0};
  const auto properties = must(device->properties());
  EXPECT_FALSE(properties.name.empty());
  EXPECT_GE(properties.capability_major, 7);
  EXPECT_GT(properties.total_bytes, mib);
  int found = -1;
  EXPECT_EQ(cudaDeviceGetByPCIBusId(&found, properties.pci_id.c_str()), cudaSuccess);
  EXPECT_EQ(found, 0);
  EXPECT_TRUE(std::none_of(properties.pci_id.begin(), properties.pci_id.end(), [](unsigned char c) {
    return std::isupper(c) != 0;
  })) << properties.pci_id;
  const auto memory = must(device->memory());
  EXPECT_GT(memory.free_bytes, 0u);
  EXPECT_LE(memory.free_bytes, memory.total_bytes);
  EXPECT_LE(memory.total_bytes, properties.total_bytes);
}

TEST_F(CudaBackend, AllocatesAlignedMemoryThatHoldsWhatIsWritten) {
  driven_device device{*cuda_, 0};
  std::vector<std::pair<void*, bytes>> all;
  std::uint64_t seed = 1;
  for (const std::size_t size :
       {std::size_t{1}, std::size_t{255}, std::size_t{256}, std::size_t{4097}, mib, 33 * mib + 5}) {
    void* const memory = must(device->allocate(size, device.stream()));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 256, 0u) << size;
    all.emplace_back(memory, random_bytes(size, seed++));
    device.write(memory, all.back().second);
  }
  for (const auto& [memory, content] : all)
    EXPECT_EQ(device.read(memory, content.size()), content) << content.size();
  for (const auto& [memory, content] : all)
    EXPECT_TRUE(is_ok(device->deallocate(memory, device.stream())));
  EXPECT_TRUE(has_code(device->deallocate(all[0].first, device.stream()), errc::invalid_argument));
}

TEST_F(CudaBackend, StaysUsableWhenMemoryRunsOut) {
  driven_device device{*cuda_, 0};
  const auto free = must(device->memory()).free_bytes;
  void* const kept = must(device->allocate(mib, device.stream()));
  const auto content = random_bytes(mib, 7);
  device.write(kept, content);
  for (const std::size_t size : {must(device->memory()).total_bytes * 2, free + mib}) {
    const auto none = device->allocate(size, device.stream());
    ASSERT_TRUE(has_code(none, errc::out_of_memory));
    const auto why = failure_of(none.error());
    ASSERT_TRUE(why);
    EXPECT_EQ(why->device, 0);
    EXPECT_EQ(why->native_name, "cudaErrorMemoryAllocation");
    EXPECT_NE(why->detail.find(std::to_string(size)), std::string::npos) << why->detail;
  }
  EXPECT_EQ(device.read(kept, mib), content);
}

/// Memory that the pool holds in pieces must not prevent a large allocation.
TEST_F(CudaBackend, GivesBackWhatThePoolHoldsBeforeMemoryRunsOut) {
  driven_device device{*cuda_, 0};
  const auto other = must(device->create_stream());
  const auto free = must(device->memory()).free_bytes;
  std::vector<void*> pieces;
  for (int i = 0; i < 8; ++i)
    pieces.push_back(must(device->allocate(free / 10, device.stream())));
  for (void* piece : pieces)
    must(device->deallocate(piece, device.stream()));
  void* const large = must(device->allocate(free / 10 * 7, device.stream()));
  must(device->deallocate(large, device.stream()));
  device.wait_for_all();
  void* const elsewhere = must(device->allocate(free / 10 * 8, other));
  must(device->deallocate(elsewhere, other));
  EXPECT_TRUE(is_ok(device->destroy_stream(other)));
}

namespace {

/// Allocates and frees half of the free memory of device 0. Returns the memory that was free
/// before, as all processes see it.
std::size_t use_half(driven_device& device) {
  const auto before = free_bytes_of_device(0);
  void* const memory = must(device->allocate(before / 2, device.stream()));
  must(device->deallocate(memory, device.stream()));
  device.wait_for_all();
  return before;
}

bool is_back(std::size_t before) { return free_bytes_of_device(0) + 64 * mib >= before; }

} // namespace

TEST_F(CudaBackend, GivesFreedMemoryBackAfterItsTime) {
  using clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds keep{1500};
  auto cuda = must(make_cuda_backend({.keep_freed = keep}));
  driven_device device{*cuda, 0};
  for (int i = 0; i < 2; ++i) { // the second time after a period without work
    const auto begin = clock::now();
    const auto before = use_half(device);
    if (clock::now() - begin < keep) {
      EXPECT_FALSE(is_back(before)) << "the next allocation is slow";
    }
    EXPECT_TRUE(eventually([&] { return is_back(before); }, std::chrono::seconds{10}));
    EXPECT_GE(clock::now() - begin, keep);
  }
}

TEST_F(CudaBackend, GivesFreedMemoryBackAtOnce) {
  auto cuda = must(make_cuda_backend({.keep_freed = std::chrono::milliseconds{0}}));
  driven_device device{*cuda, 0};
  const auto before = use_half(device);
  EXPECT_TRUE(eventually([&] { return is_back(before); }, std::chrono::seconds{2}));
  // The stream still owns the memory until it has executed the free.
  const auto other = must(device->create_stream());
  {
    gate held;
    void* const memory = must(device->allocate(before / 2, other));
    held.hold(*device.operator->(), other);
    must(device->deallocate(memory, other));
    EXPECT_FALSE(is_back(before));
    held.open();
    EXPECT_TRUE(eventually([&] { return is_back(before); }, std::chrono::seconds{2}));
  }
  must(device->destroy_stream(other));
}

TEST_F(CudaBackend, KeepsMemoryThatIsNeededAgainAndAgain) {
  using clock = std::chrono::steady_clock;
  auto cuda = must(make_cuda_backend({.keep_freed = std::chrono::milliseconds{300}}));
  driven_device device{*cuda, 0};
  const auto before = use_half(device);
  const auto until = clock::now() + std::chrono::seconds{2};
  while (clock::now() < until) {
    must(device->deallocate(must(device->allocate(before / 2, device.stream())), device.stream()));
    device.wait_for_all();
    ASSERT_FALSE(is_back(before));
  }
  EXPECT_TRUE(eventually([&] { return is_back(before); }, std::chrono::seconds{5}));
}

TEST_F(CudaBackend, KeepsFreedMemoryUntilItRunsOut) {
  auto cuda = must(make_cuda_backend({.keep_freed = cuda_backend_options::forever}));
  driven_device device{*cuda, 0};
  const auto before = use_half(device);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{1};
  while (std::chrono::steady_clock::now() < until)
    ASSERT_FALSE(is_back(before));
  // Another device object of the process needs the memory, as programs beside a worker's device do.
  auto beside = must(cuda->open_beside(0));
  must(beside->bind());
  must(beside->open_memory());
  const auto stream = must(beside->create_stream());
  void* const memory = must(beside->allocate(before / 10 * 8, stream));
  must(beside->deallocate(memory, stream));
  must(beside->destroy_stream(stream));
  must(beside->close_memory());
  EXPECT_TRUE(is_back(before));
}

/// The thread that returns memory neither waits for a lane nor blocks one.
TEST_F(CudaBackend, HoldsNoOtherCallUpWhileItGivesMemoryBack) {
  using clock = std::chrono::steady_clock;
  auto cuda = must(make_cuda_backend({.keep_freed = std::chrono::milliseconds{50}}));
  driven_device device{*cuda, 0};
  const auto before = free_bytes_of_device(0);
  std::vector<void*> pieces;
  for (std::size_t size = 0; size < before / 2; size += 512 * mib)
    pieces.push_back(must(device->allocate(512 * mib, device.stream())));
  for (void* x : pieces)
    must(device->deallocate(x, device.stream()));
  const auto event = must(device->create_event());
  clock::duration longest{};
  EXPECT_TRUE(eventually(
      [&] {
        const auto begin = clock::now();
        must(device->record(event, device.stream()));
        must(device->synchronize(event));
        longest = std::max(longest, clock::now() - begin);
        return is_back(before);
      },
      std::chrono::seconds{10}));
  EXPECT_LT(longest, std::chrono::milliseconds{100});
  must(device->destroy_event(event));
}

TEST_F(CudaBackend, ClearsAnErrorThatACallHasLeft) {
  log_lines log;
  driven_device device{*cuda_, 0};
  for (int i = 0; i < 3; ++i) {
    EXPECT_NE(cudaSetDevice(9999), cudaSuccess);
    EXPECT_NE(cudaPeekAtLastError(), cudaSuccess);
    EXPECT_TRUE(is_ok(device->clear_last_error("after", "launch", 7)));
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  }
  EXPECT_TRUE(is_ok(device->clear_last_error("before", "launch", 8)));
  EXPECT_TRUE(log.say("found after launch #7"));
  EXPECT_TRUE(log.say("invalid device ordinal"));
  EXPECT_EQ(log.count(), 1u) << "each kind of error once";
}

TEST_F(CudaBackend, CountsWhatThePoolHoldsAsFree) {
  driven_device device{*cuda_, 0};
  const auto before = must(device->memory()).free_bytes;
  void* const memory = must(device->allocate(512 * mib, device.stream()));
  const auto during = must(device->memory()).free_bytes;
  EXPECT_LE(during, before - 512 * mib);
  must(device->deallocate(memory, device.stream()));
  device.wait_for_all();
  EXPECT_GE(must(device->memory()).free_bytes, before - 64 * mib);
}

TEST_F(CudaBackend, FillsAnyPatternAtAnyAlignment) {
  driven_device device{*cuda_, 0};
  constexpr std::size_t guard = 32; // guard bytes before and after
  std::mt19937_64 engine{11};
  for (const std::size_t size : {1u, 2u, 4u, 8u}) {
    for (const std::size_t count : {0u, 1u, 2u, 3u, 5u, 7u, 8u, 9u, 15u, 16u, 17u, 31u, 33u, 255u,
                                    256u, 257u, 1000u, 4099u, 100'003u}) {
      for (std::size_t shift = 0; shift < 32; shift += size) {
        bytes pattern = random_bytes(size, engine());
        if (shift == 0)
          std::fill(pattern.begin(), pattern.end(), std::byte{0}); // all bytes are equal
        const std::size_t total = guard + shift + count * size + guard;
        bytes want(total, poison_byte);
        for (std::size_t i = 0; i < count * size; ++i)
          want[guard + shift + i] = pattern[i % size];
        auto* const memory =
            static_cast<std::byte*>(must(device->allocate(total, device.stream())));
        device.write(memory, bytes(total, poison_byte));
        ASSERT_TRUE(is_ok(device->fill(memory + guard + shift, pattern, count, device.stream())));
        const auto got = device.read(memory, total);
        ASSERT_EQ(index_of_difference(want, got), total)
            << "pattern of " << size << ", count " << count << ", shift " << shift;
        must(device->deallocate(memory, device.stream()));
      }
    }
  }
}

/// Loading a kernel at its first launch may wait for all work on the device.
TEST_F(CudaBackend, HasLoadedItsKernelsWhenItIsBound) {
  driven_device device{*cuda_, 0};
  auto* const memory = static_cast<std::byte*>(must(device->allocate(mib, device.stream())));
  device.wait_for_all();
  const auto other = must(device->create_stream());
  const auto event = must(device->create_event());
  const auto pattern = random_bytes(8, 29);
  gate held;
  held.hold(*device.operator->(), other);
  std::promise<void> launched;
  std::atomic<bool> late{false};
  std::thread watch{[&, done = launched.get_future()] {
    if (done.wait_for(std::chrono::seconds{20}) != std::future_status::ready) {
      late = true;
      held.open();
    }
  }};
  for (const std::size_t size : {2u, 4u, 8u})
    EXPECT_TRUE(
        is_ok(device->fill(memory, std::span{pattern}.first(size), mib / size, device.stream())));
  for (int type = 0; type < ncclNumTypes; ++type)
    EXPECT_EQ(detail::launch_multiply(memory, memory, pattern.data(), 16,
                                      static_cast<ncclDataType_t>(type),
                                      static_cast<cudaStream_t>(device.stream().native)),
              cudaSuccess)
        << type;
  must(device->record(event, device.stream()));
  must(device->synchronize(event));
  launched.set_value();
  watch.join();
  EXPECT_FALSE(late) << "a launch waited for the other stream";
  held.open();
  must(device->destroy_event(event));
  must(device->destroy_stream(other));
}

TEST_F(CudaBackend, FillsMoreThanItsThreadsReachAtOnce) {
  driven_device device{*cuda_, 0};
  for (const std::size_t size : {2u, 4u, 8u}) {
    const std::size_t count = 80 * mib / size + 3;
    const auto pattern = random_bytes(size, size);
    auto* const memory =
        static_cast<std::byte*>(must(device->allocate((count + 1) * size, device.stream())));
    must(device->fill(memory, std::array{poison_byte}, (count + 1) * size, device.stream()));
    ASSERT_TRUE(is_ok(device->fill(memory + size, pattern, count, device.stream())));
    const auto got = device.read(memory, (count + 1) * size);
    bytes want((count + 1) * size, poison_byte);
    for (std::size_t i = 0; i < count * size; ++i)
      want[size + i] = pattern[i % size];
    ASSERT_EQ(index_of_difference(want, got), want.size()) << "pattern of " << size;
    must(device->deallocate(memory, device.stream()));
  }
}

TEST_F(CudaBackend, RefusesToFillWhatItCannot) {
  driven_device device{*cuda_, 0};
  auto* const memory = static_cast<std::byte*>(must(device->allocate(64, device.stream())));
  const bytes before(64, poison_byte);
  device.write(memory, before);
  const auto pattern = random_bytes(16, 3);
  for (const std::size_t size : {0u, 3u, 5u, 12u})
    EXPECT_TRUE(has_code(device->fill(memory, std::span{pattern}.first(size), 1, device.stream()),
                         errc::invalid_argument))
        << size;
  for (const std::size_t size : {2u, 4u, 8u})
    EXPECT_TRUE(
        has_code(device->fill(memory + 1, std::span{pattern}.first(size), 1, device.stream()),
                 errc::invalid_argument))
        << size;
  EXPECT_EQ(device.read(memory, 64), before);
}

TEST_F(CudaBackend, CopiesInAllDirectionsAndParts) {
  driven_device device{*cuda_, 0};
  constexpr std::size_t size = 3 * mib + 17;
  const auto content = random_bytes(size, 5);
  auto* const a = static_cast<std::byte*>(must(device->allocate(size, device.stream())));
  auto* const b = static_cast<std::byte*>(must(device->allocate(size, device.stream())));
  device.write(a, content);
  device.write(b, bytes(size, poison_byte));
  constexpr std::size_t from = 1001;
  constexpr std::size_t to = 77;
  constexpr std::size_t length = 2 * mib + 3;
  must(device->copy(b + to, a + from, length, copy_direction::device_to_device, device.stream()));
  EXPECT_TRUE(is_ok(device->copy(b, a, 0, copy_direction::device_to_device, device.stream())));
  bytes want(size, poison_byte);
  std::copy_n(content.begin() + from, length, want.begin() + to);
  EXPECT_EQ(device.read(b, size), want);
  EXPECT_EQ(device.read(a, size), content);
}

TEST_F(CudaBackend, TellsWhenAnEventIsDone) {
  driven_device device{*cuda_, 0};
  const auto event = must(device->create_event());
  EXPECT_TRUE(must(device->query(event))) << "never recorded";
  {
    gate held;
    held.hold(*device.operator->(), device.stream());
    must(device->record(event, device.stream()));
    for (int i = 0; i < 100; ++i)
      ASSERT_FALSE(must(device->query(event)));
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "a user's launch would find it";
    held.open();
    must(device->synchronize(event));
  }
  EXPECT_TRUE(must(device->query(event)));
  EXPECT_TRUE(is_ok(device->destroy_event(event)));
}

/// INV-9: a stream waits for an event of another stream, which may be a user's.
TEST_F(CudaBackend, OrdersStreamsByEvents) {
  driven_device device{*cuda_, 0};
  cudaStream_t users = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&users, cudaStreamNonBlocking), cudaSuccess);
  constexpr std::size_t size = mib;
  auto* const a = static_cast<std::byte*>(must(device->allocate(size, device.stream())));
  auto* const b = static_cast<std::byte*>(must(device->allocate(size, device.stream())));
  const auto content = random_bytes(size, 13);
  device.write(a, bytes(size, poison_byte));
  device.write(b, bytes(size, poison_byte));
  void* const pinned = must(device->allocate_pinned(size));
  std::memcpy(pinned, content.data(), size);
  const auto written = must(device->create_event());
  const auto copied = must(device->create_event());
  {
    gate held;
    held.hold(*device.operator->(), device.stream());
    must(device->copy(a, pinned, size, copy_direction::host_to_device, device.stream()));
    must(device->record(written, device.stream()));
    must(device->wait(stream_view{users}, written));
    must(device->copy(b, a, size, copy_direction::device_to_device, stream_view{users}));
    must(device->record(copied, stream_view{users}));
    EXPECT_FALSE(must(device->query(copied)));
    held.open();
    must(device->wait(device.stream(), copied));
    EXPECT_EQ(device.read(b, size), content);
  }
  must(device->destroy_event(written));
  must(device->destroy_event(copied));
  must(device->deallocate_pinned(pinned));
  EXPECT_EQ(cudaStreamDestroy(users), cudaSuccess);
}

TEST_F(CudaBackend, CallsHostFunctionsInOrder) {
  driven_device device{*cuda_, 0};
  struct record {
    std::vector<int>* all;
    int number;
  };
  std::vector<int> all;
  std::vector<record> records;
  for (int i = 0; i < 100; ++i)
    records.push_back({&all, i});
  for (auto& x : records)
    must(device->launch_host(
        device.stream(),
        [](void* argument) {
          const auto* const self = static_cast<record*>(argument);
          self->all->push_back(self->number);
        },
        &x));
  device.wait_for_all();
  ASSERT_EQ(all.size(), records.size());
  EXPECT_TRUE(std::is_sorted(all.begin(), all.end()));
  EXPECT_FALSE(device->signals_completion());
}

TEST_F(CudaBackend, GivesPinnedMemoryToAnyThread) {
  driven_device device{*cuda_, 0};
  void* memory = nullptr;
  std::thread([&] { memory = must(device->allocate_pinned(mib)); }).join();
  cudaPointerAttributes attributes{};
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, memory), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  const auto content = random_bytes(mib, 17);
  std::memcpy(memory, content.data(), mib);
  void* const there = must(device->allocate(mib, device.stream()));
  must(device->copy(there, memory, mib, copy_direction::host_to_device, device.stream()));
  EXPECT_EQ(device.read(there, mib), content);
  caf::error freed;
  std::thread([&] { freed = device->deallocate_pinned(memory); }).join();
  EXPECT_TRUE(is_ok(freed));
}

TEST_F(CudaBackend, FreesAllMemoryOfAGeneration) {
  driven_device device{*cuda_, 0};
  EXPECT_TRUE(has_code(device->open_memory(), errc::internal)) << "it is open";
  const auto before = must(device->memory()).free_bytes;
  for (int generation = 0; generation < 20; ++generation) {
    const auto content = random_bytes(mib, 100 + static_cast<std::uint64_t>(generation));
    void* const kept = must(device->allocate(mib, device.stream()));
    void* const large = must(device->allocate(before / 2, device.stream()));
    void* const returned = must(device->allocate(mib, device.stream()));
    device.write(kept, content);
    EXPECT_EQ(device.read(kept, mib), content);
    must(device->deallocate(returned, device.stream()));
    device.wait_for_all();
    ASSERT_TRUE(is_ok(device->close_memory()));
    EXPECT_GE(must(device->memory()).free_bytes, before - 64 * mib) << generation;
    EXPECT_TRUE(has_code(device->deallocate(large, device.stream()), errc::invalid_argument));
    EXPECT_TRUE(has_code(device->allocate(1, device.stream()), errc::unavailable));
    EXPECT_TRUE(is_ok(device->close_memory())) << "closed before";
    ASSERT_TRUE(is_ok(device->open_memory()));
  }
}

TEST_F(CudaBackend, FreesItsMemoryWhenItIsGivenBack) {
  std::size_t before = 0;
  for (int i = 0; i < 3; ++i) {
    auto device = must(cuda_->open(0));
    must(device->bind());
    must(device->open_memory());
    const auto stream = must(device->create_stream());
    const auto free = must(device->memory()).free_bytes;
    if (i == 0)
      before = free;
    EXPECT_GE(free, before - 64 * mib) << i;
    (void)must(device->allocate(before / 2, stream));
    must(device->destroy_stream(stream));
  }
}

TEST_F(CudaBackend, FindsItsDeviceAgainAfterAUserChangedIt) {
  TROUPE_NEEDS_GPUS(2);
  driven_device device{*cuda_, 0};
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  void* const memory = must(device->allocate(mib, device.stream()));
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  must(device->fill(memory, random_bytes(4, 1), mib / 4, device.stream()));
  cudaPointerAttributes attributes{};
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, memory), cudaSuccess);
  EXPECT_EQ(attributes.device, 0);
  device.wait_for_all();

  // Another thread keeps its own current device.
  std::thread([&] {
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    void* const pinned = must(device->allocate_pinned(64));
    int current = -1;
    ASSERT_EQ(cudaGetDevice(&current), cudaSuccess);
    EXPECT_EQ(current, 1);
    must(device->deallocate_pinned(pinned));
  }).join();
}

/// The current context and device of the calling thread.
struct current_state {
  CUcontext context = nullptr;
  int device = -1;
  bool operator==(const current_state&) const = default;
};

current_state what_is_current() {
  current_state x;
  EXPECT_EQ(TROUPE_DRIVER(cuCtxGetCurrent, 4000)(&x.context), CUDA_SUCCESS);
  EXPECT_EQ(cudaGetDevice(&x.device), cudaSuccess);
  return x;
}

TEST_F(CudaBackend, LeavesAThreadWithTheContextThatItHad) {
  TROUPE_NEEDS_GPUS(2);
  driven_device device{*cuda_, 1};
  const auto use_device = [&] {
    const auto before = what_is_current();
    must(device->deallocate_pinned(must(device->allocate_pinned(64))));
    EXPECT_EQ(what_is_current(), before);
  };
  std::thread([&] {
    use_device();
    EXPECT_EQ(what_is_current(), (current_state{nullptr, 0}));
  }).join();
  std::thread([&] {
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    use_device();
  }).join();
  std::thread([&] { // a context that the user has made
    CUcontext own = nullptr;
    auto* const create =
        driver_function<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate", 3020);
    ASSERT_EQ(create(&own, 0, 0), CUDA_SUCCESS);
    use_device();
    EXPECT_EQ(what_is_current(), (current_state{own, 0}));
    EXPECT_EQ(TROUPE_DRIVER(cuCtxDestroy, 4000)(own), CUDA_SUCCESS);
  })
      .join();
}

/// A kernel of device 1 writes to device 0's pool, in two generations of the pool.
TEST_F(CudaBackend, LetsAPeerAccessThePoolOfEveryGeneration) {
  TROUPE_NEEDS_GPUS(2);
  driven_device owner{*cuda_, 0};
  driven_device peer{*cuda_, 1};
  int can = 0;
  ASSERT_EQ(cudaDeviceCanAccessPeer(&can, 1, 0), cudaSuccess);
  EXPECT_EQ(must(peer->can_access_peer(0)), can != 0);
  EXPECT_TRUE(must(owner->can_access_peer(0)));
  if (can == 0) {
    EXPECT_TRUE(has_code(peer->enable_peer(0), errc::not_supported));
    EXPECT_TRUE(has_code(owner->admit_peer(1), errc::not_supported));
    GTEST_SKIP() << "these two devices cannot access each other";
  }
  for (int i = 0; i < 2; ++i) { // the second call changes nothing
    EXPECT_TRUE(is_ok(owner->admit_peer(1)));
    EXPECT_TRUE(is_ok(peer->enable_peer(0)));
  }
  EXPECT_TRUE(is_ok(owner->enable_peer(0)));
  EXPECT_TRUE(is_ok(owner->admit_peer(0)));
  EXPECT_TRUE(has_code(owner->enable_peer(1000), errc::cuda_error));
  EXPECT_TRUE(has_code(owner->admit_peer(1000), errc::cuda_error));
  for (int generation = 0; generation < 2; ++generation) {
    auto* const memory = static_cast<std::byte*>(must(owner->allocate(mib, owner.stream())));
    owner.write(memory, bytes(mib, poison_byte));
    const auto pattern = random_bytes(8, 23 + static_cast<std::uint64_t>(generation));
    must(peer->fill(memory, pattern, mib / 8, peer.stream()));
    peer.wait_for_all();
    bytes want(mib);
    for (std::size_t i = 0; i < mib; ++i)
      want[i] = pattern[i % 8];
    EXPECT_EQ(owner.read(memory, mib), want);

    void* const mine = must(peer->allocate(mib, peer.stream()));
    must(peer->copy(mine, memory, mib, copy_direction::device_to_device, peer.stream()));
    EXPECT_EQ(peer.read(mine, mib), want);
    owner.wait_for_all();
    must(owner->close_memory());
    must(owner->open_memory());
  }
}

/// In both directions, by either device's stream.
TEST_F(CudaBackend, CopiesBetweenDevices) {
  TROUPE_NEEDS_GPUS(2);
  driven_device one{*cuda_, 0};
  driven_device other{*cuda_, 1};
  for (auto [x, peer] : {std::pair{&one, 1}, std::pair{&other, 0}}) {
    if (!must((*x)->can_access_peer(peer)))
      GTEST_SKIP() << "these two devices cannot access each other";
    EXPECT_TRUE(is_ok((*x)->enable_peer(peer)));
    EXPECT_TRUE(is_ok((*x)->admit_peer(peer)));
  }
  constexpr std::size_t size = mib + 3;
  auto* const here = static_cast<std::byte*>(must(one->allocate(size, one.stream())));
  auto* const there = static_cast<std::byte*>(must(other->allocate(size, other.stream())));
  for (auto* by : {&one, &other}) {
    const auto content = random_bytes(size, by == &one ? 31 : 32);
    one.write(here, content);
    other.write(there, bytes(size, poison_byte));
    one.wait_for_all();
    other.wait_for_all();
    EXPECT_TRUE(is_ok((*by)->copy_peer(there, 1, here, 0, size, by->stream())));
    by->wait_for_all();
    EXPECT_EQ(other.read(there, size), content);
    one.write(here, bytes(size, poison_byte));
    one.wait_for_all();
    EXPECT_TRUE(is_ok((*by)->copy_peer(here, 0, there, 1, size, by->stream())));
    by->wait_for_all();
    EXPECT_EQ(one.read(here, size), content);
  }
}

/// More copies than one driver call takes, of any size and in both directions, in pool memory and
/// in plain memory.
TEST_F(CudaBackend, CopiesManyBetweenDevicesInOneCall) {
  TROUPE_NEEDS_GPUS(2);
  driven_device one{*cuda_, 0};
  driven_device other{*cuda_, 1};
  for (auto [x, peer] : {std::pair{&one, 1}, std::pair{&other, 0}}) {
    if (!must((*x)->can_access_peer(peer)))
      GTEST_SKIP() << "these two devices cannot access each other";
    EXPECT_TRUE(is_ok((*x)->enable_peer(peer)));
    EXPECT_TRUE(is_ok((*x)->admit_peer(peer)));
  }
  constexpr std::size_t number = 300;
  constexpr std::size_t stride = 1024;
  constexpr std::size_t size = number * stride;
  const auto plain = [](driven_device& on) {
    EXPECT_TRUE(is_ok(on->bind()));
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, size), cudaSuccess);
    return static_cast<std::byte*>(memory);
  };
  for (const bool of_pool : {true, false}) {
    auto* const here =
        of_pool ? static_cast<std::byte*>(must(one->allocate(size, one.stream()))) : plain(one);
    auto* const there = of_pool
                            ? static_cast<std::byte*>(must(other->allocate(size, other.stream())))
                            : plain(other);
    for (auto* by : {&one, &other}) {
      auto at_home = random_bytes(size, 41);
      auto abroad = random_bytes(size, 42);
      one.write(here, at_home);
      other.write(there, abroad);
      one.wait_for_all();
      other.wait_for_all();
      std::vector<peer_copy> copies;
      for (std::size_t i = 0; i < number; ++i) {
        const auto from = i * stride;
        const auto bytes = 1 + i * 3;
        if (i % 3 != 0) {
          copies.push_back({there + from, 1, here + from, 0, bytes});
          std::copy_n(at_home.begin() + from, bytes, abroad.begin() + from);
        } else {
          copies.push_back({here + from, 0, there + from, 1, bytes});
          std::copy_n(abroad.begin() + from, bytes, at_home.begin() + from);
        }
      }
      EXPECT_TRUE(is_ok((*by)->copy_peers(copies, by->stream())));
      by->wait_for_all();
      EXPECT_EQ(other.read(there, size), abroad);
      EXPECT_EQ(one.read(here, size), at_home);
    }
    if (!of_pool)
      for (auto [on, memory] : {std::pair{&one, here}, std::pair{&other, there}}) {
        EXPECT_TRUE(is_ok((*on)->bind()));
        EXPECT_EQ(cudaFree(memory), cudaSuccess);
      }
  }
}

TEST_F(CudaBackend, KnowsItsLinks) {
  TROUPE_NEEDS_GPUS(2);
  driven_device one{*cuda_, 0};
  const auto there = must(cuda_->link(0, 1));
  const auto back = must(cuda_->link(1, 0));
  EXPECT_EQ(there.kind, back.kind);
  EXPECT_EQ(there.links, back.links);
  EXPECT_EQ(there.kind == link_kind::host, !must(one->can_access_peer(1)));
  EXPECT_TRUE(there.links == 0 || there.kind == link_kind::nvlink);
  EXPECT_GE(there.performance_rank, 0);
  int atomics = -1;
  ASSERT_EQ(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, 0, 1),
            cudaSuccess);
  EXPECT_EQ(there.native_atomics, atomics != 0);
  for (auto [from, to] : {std::pair{0, 0}, std::pair{-1, 0}, std::pair{0, 1000}})
    EXPECT_TRUE(has_code(cuda_->link(from, to), errc::invalid_argument));
}

TEST_F(CudaBackend, OrdersDevicesByEvents) {
  TROUPE_NEEDS_GPUS(2);
  driven_device first{*cuda_, 0};
  driven_device second{*cuda_, 1};
  const auto event = must(first->create_event());
  const auto done = must(second->create_event());
  gate held;
  held.hold(*first.operator->(), first.stream());
  must(first->record(event, first.stream()));
  must(second->wait(second.stream(), event));
  must(second->record(done, second.stream()));
  for (int i = 0; i < 100; ++i)
    ASSERT_FALSE(must(second->query(done)));
  held.open();
  must(second->synchronize(done));
  EXPECT_TRUE(must(first->query(event)));
  must(first->destroy_event(event));
  must(second->destroy_event(done));
}

namespace {

/// Faults the device and ends the process, with status 0 if every later call reports the fault.
[[noreturn]] void fault_and_exit() {
  auto fail = [](const char* what, const caf::error& e) {
    std::fprintf(stderr, "%s: %s\n", what, e ? describe(e).c_str() : "no error");
    std::_Exit(1);
  };
  auto cuda = must(make_cuda_backend());
  auto device = must(cuda->open(0));
  must(device->bind());
  must(device->open_memory());
  const auto stream = must(device->create_stream());
  const auto event = must(device->create_event());
  const std::array pattern{std::byte{1}, std::byte{2}};
  must(device->fill(reinterpret_cast<void*>(std::uintptr_t{4096}), pattern, 64, stream));
  must(device->record(event, stream));
  const auto why = device->synchronize(event);
  const auto x = failure_of(why);
  if (!x || x->code != errc::device_fault || x->native_name != "cudaErrorIllegalAddress")
    fail("synchronize", why);
  for (int i = 0; i < 2; ++i) { // the fault persists
    if (auto memory = device->allocate(64, stream);
        memory || code_of(memory.error()) != errc::device_fault)
      fail("allocate", memory ? caf::error{} : memory.error());
    if (auto done = device->query(event); done || code_of(done.error()) != errc::device_fault)
      fail("query", done ? caf::error{} : done.error());
    if (auto recorded = device->record(event, stream); code_of(recorded) != errc::device_fault)
      fail("record", recorded);
  }
  std::_Exit(0);
}

} // namespace

TEST_F(CudaBackend, SaysOfEveryCallThatTheDeviceHasFaulted) {
  GTEST_FLAG_SET(death_test_style, "threadsafe"); // own process: the fault ends CUDA in it
  EXPECT_EXIT(fault_and_exit(), ::testing::ExitedWithCode(0), "");
}

namespace {

template <class Traits> struct cuda_case {
  using traits = Traits;
  static bool available() { return gpus_present() > 0 && cudaSetDevice(0) == cudaSuccess; }
};

void require(cudaError_t code) {
  if (code != cudaSuccess)
    throw std::runtime_error(cudaGetErrorString(code));
}

struct memory_pool_case : cuda_case<detail::memory_pool_traits> {
  static cudaMemPool_t make() {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    cudaMemPool_t x = nullptr;
    require(cudaMemPoolCreate(&x, &properties));
    return x;
  }
};

struct stream_memory_case : cuda_case<detail::stream_memory_traits> {
  static detail::stream_memory_traits::value_type make() {
    void* x = nullptr;
    require(cudaMallocAsync(&x, 64, cudaStreamPerThread));
    return {x, cudaStreamPerThread};
  }
};

struct communicator_case : cuda_case<detail::communicator_traits> {
  static ncclComm_t make() {
    ncclComm_t x = nullptr;
    const int device = 0;
    if (ncclCommInitAll(&x, 1, &device) != ncclSuccess)
      throw std::runtime_error(ncclGetLastError(nullptr));
    return x;
  }
};

using all_cases = ::testing::Types<memory_pool_case, stream_memory_case, communicator_case>;

} // namespace

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, UniqueHandle, all_cases);

TEST(UniqueHandleTeardown, HasNoErrors) { EXPECT_EQ(detail::teardown_errors(), 0u); }

} // namespace troupe::testing
