#include "backend/cuda/direct_memory.hpp"

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/cuda/device_pool.hpp"
#include "backend/cuda/driver_functions.hpp"

#include <algorithm>
#include <new>
#include <utility>

namespace troupe::detail {

namespace {

/// @units bytes of pinned memory allocated at once
constexpr std::size_t page_bytes = 4096;

caf::error select(int device) noexcept {
  return check(select_device(device), "cudaSetDevice", device);
}

} // namespace

direct_memory::~direct_memory() {
  if (driver_->ended()) { // all of it is freed when the process ends
    for (auto& x : devices_)
      (void)x.second.pool.release();
    return;
  }
  for (auto& [device, on] : devices_) {
    if (on.stream == nullptr)
      continue;
    (void)select_device(device); // if this fails, the next call fails, too, and says more
    for (auto& x : on.free)
      teardown(cudaFreeAsync(x.memory, on.stream), "cudaFreeAsync", device);
    teardown(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize", device);
    teardown(cudaStreamDestroy(on.stream), "cudaStreamDestroy", device);
  }
  for (void* x : pages_)
    teardown(cudaFreeHost(x), "cudaFreeHost", -1);
}

caf::expected<direct_memory::device_memory*> direct_memory::open(int device) noexcept {
  auto& result = devices_[device];
  if (auto err = select(device))
    return err;
  if (result.stream != nullptr)
    return &result;
  auto pool = make_memory_pool(device);
  if (!pool)
    return pool.error();
  const auto peers = peers_of(device);
  if (!peers)
    return peers.error();
  if (auto err = grant_access(pool->get(), device, *peers))
    return err;
  if (auto err = check(cudaStreamCreateWithFlags(&result.stream, cudaStreamNonBlocking),
                       "cudaStreamCreateWithFlags", device))
    return err;
  result.pool = std::move(*pool);
  return &result;
}

caf::expected<direct_words*> direct_memory::take_words() noexcept {
  if (free_words_.empty()) {
    void* page = nullptr;
    if (auto err =
            check(cudaHostAlloc(&page, page_bytes, cudaHostAllocPortable), "cudaHostAlloc", -1))
      return err;
    pages_.push_back(page);
    auto* words = static_cast<direct_words*>(page);
    for (std::size_t i = 0; i < page_bytes / sizeof(direct_words); ++i)
      free_words_.push_back(new (words + i) direct_words);
  }
  auto* result = free_words_.back();
  free_words_.pop_back();
  return result;
}

caf::error direct_memory::clear(const device_memory& on, const direct_arena& x) noexcept {
  if (auto err = check(cudaMemsetAsync(x.memory, 0, direct::arena_bytes(x.ranks), on.stream),
                       "cudaMemsetAsync", x.device))
    return err;
  if (auto err = check(cudaStreamSynchronize(on.stream), "cudaStreamSynchronize", x.device))
    return err;
  x.words->begin_again();
  return {};
}

/// Finds out whether streams can wait for the words of `x`.
caf::error direct_memory::check_waits(const device_memory& on, direct_arena& x) noexcept {
  const auto code = driver::wait_for_word32(
      on.stream, reinterpret_cast<CUdeviceptr>(&x.words->aborted), 0, CU_STREAM_WAIT_VALUE_GEQ);
  x.streams_wait_for_words = code == cudaSuccess;
  if (code == cudaErrorNotSupported || code == cudaErrorCallRequiresNewerDriver)
    return {};
  return check(code, "cuStreamWaitValue32", x.device);
}

caf::error direct_memory::begin(const device_memory& on, direct_arena& x) noexcept {
  auto words = take_words();
  if (!words)
    return words.error();
  x.words = *words;
  auto err = check_waits(on, x);
  if (!err)
    err = clear(on, x);
  if (err)
    free_words_.push_back(x.words);
  return err;
}

caf::expected<direct_arena> direct_memory::make(device_memory& on, int device,
                                                unsigned ranks) noexcept {
  direct_arena result{.device = device, .ranks = ranks};
  void* memory = nullptr;
  if (auto err = check(
          cudaMallocFromPoolAsync(&memory, direct::arena_bytes(ranks), on.pool.get(), on.stream),
          "cudaMallocFromPoolAsync", device))
    return err;
  result.memory = static_cast<direct::arena*>(memory);
  if (auto err = begin(on, result)) {
    teardown(cudaFreeAsync(memory, on.stream), "cudaFreeAsync", device);
    return err;
  }
  return result;
}

caf::expected<direct_arena> direct_memory::make_in(void* memory, int device,
                                                   unsigned ranks) noexcept {
  if (auto err = driver_->check(device))
    return err;
  return no_throw([&]() -> caf::expected<direct_arena> {
    const std::lock_guard lock{mutex_};
    auto on = open(device);
    if (!on)
      return on.error();
    direct_arena result{
        .device = device, .ranks = ranks, .memory = static_cast<direct::arena*>(memory)};
    if (auto err = begin(**on, result))
      return err;
    in_other_memory_.insert(result.memory);
    return result;
  });
}

caf::expected<direct_arena> direct_memory::take(int device, unsigned ranks) noexcept {
  if (auto err = driver_->check(device))
    return err;
  return no_throw([&]() -> caf::expected<direct_arena> {
    const std::lock_guard lock{mutex_};
    auto on = open(device);
    if (!on)
      return on.error();
    auto& free = (*on)->free;
    const auto i = std::ranges::find_if(free, [=](auto& x) { return x.ranks == ranks; });
    if (i == free.end())
      return make(**on, device, ranks);
    auto result = *i;
    free.erase(i);
    return result;
  });
}

caf::error direct_memory::give_back(const direct_arena& x) noexcept {
  if (auto err = driver_->check(x.device))
    return err;
  return no_throw([&]() -> caf::error {
    const std::lock_guard lock{mutex_};
    if (in_other_memory_.erase(x.memory) != 0) {
      x.words->begin_again();
      free_words_.push_back(x.words);
      return {};
    }
    auto on = open(x.device);
    if (!on)
      return on.error();
    if (auto err = clear(**on, x))
      return err;
    (*on)->free.push_back(x);
    return {};
  });
}

caf::error direct_memory::fault_of(int device) noexcept {
  if (auto err = driver_->check(device))
    return err;
  return no_throw([&]() -> caf::error {
    const std::lock_guard lock{mutex_};
    auto on = open(device);
    if (!on)
      return on.error();
    const auto code = cudaStreamQuery((*on)->stream);
    if (code == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return {};
    }
    return check(code, "cudaStreamQuery", device);
  });
}

} // namespace troupe::detail
