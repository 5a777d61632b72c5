#include "backend/cuda/cuda_device.hpp"

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/cuda_handles.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/cuda/direct_communicator.hpp"
#include "backend/cuda/driver_functions.hpp"
#include "backend/cuda/fill.hpp"
#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include <troupe/error.hpp>
#include <troupe/log.hpp>

#include <cuda.h>
#include <driver_types.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <chrono>
#include <string>
#include <thread>

namespace troupe::detail {

namespace {

/// The devices that are open in this process. Never destroyed: devices may outlive static objects.
constinit std::array<std::atomic<bool>, 1024> claimed{};

/// How often CUDA is asked for a fault while a kernel does not tell of its end.
constexpr std::chrono::microseconds between_checks{100};

caf::error failed(errc code, int device, std::string detail) {
  return make_error({.code = code, .detail = std::move(detail), .device = device});
}

} // namespace

caf::expected<std::unique_ptr<backend_device>>
cuda_device::open(int ordinal, int device_count, shared_driver_access driver,
                  std::shared_ptr<pool_trimmer> trimmer, bool beside) noexcept {
  using result = caf::expected<std::unique_ptr<backend_device>>;
  return no_throw([&]() -> result {
    if (auto err = driver->check(ordinal))
      return err;
    const int limit = std::min(device_count, static_cast<int>(claimed.size()));
    if (ordinal < 0 || ordinal >= limit)
      return failed(errc::invalid_argument, ordinal, device_out_of_range(ordinal, limit));
    unique_claim claim;
    if (!beside) {
      auto& taken = claimed[static_cast<std::size_t>(ordinal)];
      if (taken.exchange(true))
        return failed(errc::unavailable, ordinal, "the device is open already");
      claim = unique_claim{&taken, ordinal};
    }
    return std::unique_ptr<backend_device>{
        new cuda_device(std::move(claim), ordinal, std::move(driver), std::move(trimmer))};
  });
}

cuda_device::~cuda_device() {
  if (driver_->ended()) {
    if (pool_)
      pool_->abandon(); // freed when the process ends
    return;
  }
  const device_guard guard{ordinal_};
  for (void* memory : allocated_) {
    const cudaError_t code = cudaFree(memory);
    teardown(code, "cudaFree", ordinal_);
    if (code != cudaSuccess)
      break; // the others would fail as well
  }
  if (pool_)
    teardown(pool_->destroy(), "cudaMemPoolDestroy", ordinal_);
}

caf::error cuda_device::select() const noexcept {
  if (auto err = driver_->check(ordinal_))
    return err;
  return check(select_device(ordinal_), "cudaSetDevice", ordinal_);
}

template <class F> caf::error cuda_device::call(const char* api, F f) const noexcept {
  if (auto err = select())
    return err;
  return check(f(), api, ordinal_);
}

template <class F> caf::error cuda_device::call_aside(const char* api, F f) const noexcept {
  if (auto err = driver_->check(ordinal_))
    return err;
  return call_with(ordinal_, api, f);
}

caf::error cuda_device::bind() noexcept {
  if (auto err = driver_->check(ordinal_))
    return err;
  const char* api = "cudaSetDevice";
  cudaError_t code = cudaSetDevice(ordinal_); // since CUDA 12.0 it makes the context
  if (code == cudaSuccess) {
    api = "cudaLibraryLoadData";
    code = load_fill();
    if (code == cudaSuccess)
      code = load_direct();
  }
  if (code == cudaSuccess)
    return {};
  auto why = cuda_failure(code, api, ordinal_);
  if (classify(code) == errc::device_fault)
    return why;
  return no_throw([&]() -> caf::error {
    auto x = failure_of(why);
    if (!x)
      return why;
    x->code = errc::device_failed;
    return make_error(std::move(*x));
  });
}

caf::expected<device_properties> cuda_device::properties() noexcept {
  return no_throw([&]() -> caf::expected<device_properties> {
    cudaDeviceProp native{};
    if (auto err = call("cudaGetDeviceProperties",
                        [&] { return cudaGetDeviceProperties(&native, ordinal_); }))
      return err;
    char pci[32] = {};
    if (auto err = check(cudaDeviceGetPCIBusId(pci, sizeof pci, ordinal_), "cudaDeviceGetPCIBusId",
                         ordinal_))
      return err;
    device_properties result;
    result.name = native.name;
    result.pci_id = pci;
    for (char& c : result.pci_id)
      c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    result.capability_major = native.major;
    result.capability_minor = native.minor;
    result.total_bytes = native.totalGlobalMem;
    return result;
  });
}

caf::expected<memory_info> cuda_device::memory() noexcept {
  memory_info result;
  if (auto err = call("cudaMemGetInfo",
                      [&] { return cudaMemGetInfo(&result.free_bytes, &result.total_bytes); }))
    return err;
  if (pool_) {
    std::uint64_t reserved = 0;
    std::uint64_t used = 0;
    for (auto [attribute, value] : {std::pair{cudaMemPoolAttrReservedMemCurrent, &reserved},
                                    std::pair{cudaMemPoolAttrUsedMemCurrent, &used}})
      if (auto err = check(cudaMemPoolGetAttribute(pool_->native(), attribute, value),
                           "cudaMemPoolGetAttribute", ordinal_))
        return err;
    result.free_bytes += reserved - std::min(used, reserved);
  }
  return result;
}

caf::error cuda_device::open_memory() noexcept {
  if (pool_)
    return no_throw([&] { return failed(errc::internal, ordinal_, "its memory is open already"); });
  if (auto err = select())
    return err;
  auto pool = device_pool::create(ordinal_, trimmer_);
  if (!pool)
    return pool.error();
  if (auto err = (*pool)->grant(peers_)) {
    teardown((*pool)->destroy(), "cudaMemPoolDestroy", ordinal_);
    return err;
  }
  pool_ = std::move(*pool);
  return {};
}

caf::error cuda_device::close_memory() noexcept {
  if (!pool_)
    return {};
  if (auto err = driver_->check(ordinal_))
    return err;
  auto first = select();
  for (void* memory : allocated_) {
    // `cudaFree` does not synchronize for memory of a pool.
    keep_first(first, check(cudaFree(memory), "cudaFree", ordinal_));
  }
  allocated_.clear();
  keep_first(first,
             check(std::exchange(pool_, nullptr)->destroy(), "cudaMemPoolDestroy", ordinal_));
  return first;
}

template <class F> cudaError_t cuda_device::with_room(int of, F allocate) noexcept {
  auto code = allocate();
  if (code != cudaErrorMemoryAllocation)
    return code;
  (void)cudaGetLastError();
  trimmer_->trim_now(of);
  return allocate();
}

caf::expected<void*> cuda_device::allocate(std::size_t size_bytes, stream_view stream) noexcept {
  if (auto err = check_recorded("an allocation"))
    return err;
  return no_throw([&]() -> caf::expected<void*> {
    if (!pool_)
      return failed(errc::unavailable, ordinal_, "its memory is closed");
    if (auto err = select())
      return err;
    void* memory = nullptr;
    const auto code = with_room(ordinal_, [&] {
      return cudaMallocFromPoolAsync(&memory, size_bytes, pool_->native(), native(stream));
    });
    if (code != cudaSuccess)
      return cuda_failure(code, "cudaMallocFromPoolAsync", ordinal_,
                          std::to_string(size_bytes) + " bytes");
    unique_stream_memory owner{{memory, native(stream)}, ordinal_};
    allocated_.insert(memory);
    (void)owner.release();
    return memory;
  });
}

caf::error cuda_device::deallocate(void* memory, stream_view stream) noexcept {
  const auto i = allocated_.find(memory);
  if (i == allocated_.end())
    return no_throw([&] {
      return failed(errc::invalid_argument, ordinal_, "this memory is not allocated here");
    });
  if (auto err = check_recorded("a deallocation"))
    return err;
  if (auto err = call("cudaFreeAsync", [&] { return cudaFreeAsync(memory, native(stream)); }))
    return err;
  allocated_.erase(i);
  pool_->note_freed(native(stream));
  return {};
}

caf::expected<void*> cuda_device::allocate_pinned(std::size_t size_bytes) noexcept {
  void* memory = nullptr;
  // If host and device share memory, the pool of any device may hold the missing memory.
  if (auto err = call_aside("cudaHostAlloc", [&] {
        return with_room(-1,
                         [&] { return cudaHostAlloc(&memory, size_bytes, cudaHostAllocPortable); });
      }))
    return err;
  return memory;
}

std::function<caf::error(void*)> cuda_device::pinned_deleter() noexcept {
  return [driver = driver_, device = ordinal_](void* memory) -> caf::error {
    if (driver->ended())
      return {}; // freed when the process ends
    return call_with(device, "cudaFreeHost", [=] { return cudaFreeHost(memory); });
  };
}

caf::error cuda_device::register_pinned(void* memory, std::size_t size_bytes) noexcept {
  constexpr auto flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
  return call_aside("cudaHostRegister", [&] {
    return with_room(-1, [&] { return cudaHostRegister(memory, size_bytes, flags); });
  });
}

caf::error cuda_device::unregister_pinned(void* memory) noexcept {
  if (driver_->ended())
    return {}; // unregistered when the process ends
  return call_aside("cudaHostUnregister", [&] { return cudaHostUnregister(memory); });
}

caf::error cuda_device::wait_word(stream_view stream, const std::atomic<std::uint64_t>* word,
                                  std::uint64_t value) noexcept {
  if (auto err = select())
    return err;
  void* address = nullptr;
  if (auto err =
          check(cudaHostGetDevicePointer(&address, const_cast<std::atomic<std::uint64_t>*>(word),
                                         0), // it is only read
                "cudaHostGetDevicePointer", ordinal_))
    return err;
  return check(driver::wait_for_word64(native(stream), reinterpret_cast<CUdeviceptr>(address),
                                       value, CU_STREAM_WAIT_VALUE_GEQ),
               "cuStreamWaitValue64", ordinal_);
}

caf::expected<stream_view> cuda_device::create_stream() noexcept {
  cudaStream_t stream = nullptr;
  if (auto err = call("cudaStreamCreateWithFlags",
                      [&] { return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); }))
    return err;
  return stream_view{stream};
}

caf::error cuda_device::destroy_stream(stream_view stream) noexcept {
  return call("cudaStreamDestroy", [&] {
    if (pool_)
      pool_->forget(native(stream));
    return cudaStreamDestroy(native(stream));
  });
}

caf::expected<event_view> cuda_device::create_event() noexcept {
  return no_throw([&]() -> caf::expected<event_view> {
    auto* const event = events_.emplace_back(std::make_unique<cuda_event>()).get();
    if (auto err = call("cudaEventCreateWithFlags", [&] {
          return cudaEventCreateWithFlags(&event->handle, cudaEventDisableTiming);
        })) {
      events_.pop_back();
      return err;
    }
    return event_view{event};
  });
}

caf::error cuda_device::destroy_event(event_view event) noexcept {
  if (auto err = driver_->check(ordinal_))
    return err;
  const auto i = std::ranges::find(events_, event.native, [](auto& x) -> void* { return x.get(); });
  if (i == events_.end())
    return no_throw(
        [&] { return failed(errc::invalid_argument, ordinal_, "this event is not from here"); });
  const auto taken = std::move(*i);
  events_.erase(i);
  return call("cudaEventDestroy", [&] { return cudaEventDestroy(taken->handle); });
}

caf::error cuda_device::record(event_view event, stream_view stream) noexcept {
  auto& x = as_cuda_event(event);
  x.end = {};
  return call("cudaEventRecord", [&] { return cudaEventRecord(x.handle, native(stream)); });
}

caf::expected<user_event> cuda_device::record_user(stream_view user) noexcept {
  return no_throw([&]() -> caf::expected<user_event> {
    auto made = std::shared_ptr<cuda_event>{new cuda_event, [driver = driver_](cuda_event* x) {
                                              if (x->handle != nullptr && !driver->ended())
                                                teardown(cudaEventDestroy(x->handle),
                                                         "cudaEventDestroy", -1);
                                              delete x;
                                            }};
    const event_view event{made.get()};
    auto captures = cudaStreamCaptureStatusNone;
    if (auto err = call_aside("cudaStreamIsCapturing",
                              [&] { return cudaStreamIsCapturing(native(user), &captures); }))
      return err;
    if (captures != cudaStreamCaptureStatusNone)
      return failed(errc::invalid_argument, ordinal_,
                    "the stream is being captured: its work would never be known to be over");
    if (auto err = call_aside("cudaEventCreateWithFlags", [&] {
          return cudaEventCreateWithFlags(&made->handle, cudaEventDisableTiming);
        }))
      return err;
    if (auto err = call_aside("cudaEventRecord",
                              [&] { return cudaEventRecord(made->handle, native(user)); }))
      return err;
    return user_event{event, std::move(made)};
  });
}

/// CUDA does not see what waits by a word for a kernel. No circle comes of it: lanes wait only for
/// kernels that are launched before, in the order of admission, which is the same on all devices.
caf::error cuda_device::wait(stream_view stream, event_view event) noexcept {
  const auto& x = as_cuda_event(event);
  if (x.end.word == nullptr)
    return call("cudaStreamWaitEvent",
                [&] { return cudaStreamWaitEvent(native(stream), x.handle, 0); });
  if (auto err = select(); err || x.end.is_over())
    return err;
  return check(driver::wait_for_word32(native(stream), reinterpret_cast<CUdeviceptr>(x.end.word),
                                       x.end.value, CU_STREAM_WAIT_VALUE_GEQ),
               "cuStreamWaitValue32", ordinal_);
}

caf::expected<bool> cuda_device::query(event_view event) noexcept {
  auto& x = as_cuda_event(event);
  const bool by_word = x.end.word != nullptr;
  if (by_word) {
    if (auto err = driver_->check(ordinal_))
      return err;
    if (x.end.is_over())
      return true;
    const auto now = std::chrono::steady_clock::now();
    if (now < x.checked + between_checks)
      return false;
    x.checked = now;
  }
  if (auto err = select())
    return err;
  const auto code = by_word ? cudaStreamQuery(x.end.stream) : cudaEventQuery(x.handle);
  if (code == cudaSuccess)
    return !by_word || x.end.is_over();
  if (code != cudaErrorNotReady)
    return cuda_failure(code, by_word ? "cudaStreamQuery" : "cudaEventQuery", ordinal_);
  (void)cudaGetLastError(); // else a user's launch would find it as the last error
  return false;
}

caf::error cuda_device::synchronize(event_view event) noexcept {
  const auto& x = as_cuda_event(event);
  if (x.end.word == nullptr)
    return call("cudaEventSynchronize", [&] { return cudaEventSynchronize(x.handle); });
  for (;; std::this_thread::yield()) {
    auto done = query(event);
    if (!done)
      return done.error();
    if (*done)
      return {};
  }
}

caf::error cuda_device::copy(void* target, const void* source, std::size_t size_bytes,
                             copy_direction direction, stream_view stream) noexcept {
  const auto kind = direction == copy_direction::host_to_device   ? cudaMemcpyHostToDevice
                    : direction == copy_direction::device_to_host ? cudaMemcpyDeviceToHost
                                                                  : cudaMemcpyDeviceToDevice;
  return call("cudaMemcpyAsync",
              [&] { return cudaMemcpyAsync(target, source, size_bytes, kind, native(stream)); });
}

caf::error cuda_device::fill(void* target, std::span<const std::byte> pattern, std::size_t count,
                             stream_view stream) noexcept {
  const std::size_t size = pattern.size();
  if (size > 16 || !std::has_single_bit(size) ||
      reinterpret_cast<std::uintptr_t>(target) % size != 0)
    return no_throw([&] {
      return failed(
          errc::invalid_argument, ordinal_,
          "a fill pattern has 1, 2, 4, 8 or 16 bytes, and the target must be aligned to it");
    });
  if (count == 0)
    return {};
  if (std::all_of(pattern.begin(), pattern.end(), [&](std::byte x) { return x == pattern[0]; }))
    return call("cudaMemsetAsync", [&] {
      return cudaMemsetAsync(target, std::to_integer<int>(pattern[0]), count * size,
                             native(stream));
    });
  return call("cuLaunchKernel",
              [&] { return launch_fill(target, pattern.data(), size, count, native(stream)); });
}

caf::error cuda_device::launch_host(stream_view stream, void (*function)(void*),
                                    void* argument) noexcept {
  if (auto err = check_recorded("a function of the host"))
    return err;
  return call("cudaLaunchHostFunc",
              [&] { return cudaLaunchHostFunc(native(stream), function, argument); });
}

caf::error cuda_device::clear_last_error(std::string_view found, std::string_view call,
                                         std::uint64_t number) noexcept {
  if (auto err = driver_->check(ordinal_))
    return err;
  const auto code = cudaGetLastError();
  if (code == cudaSuccess || code == cudaErrorNotReady) // left by a query
    return {};
  if (classify(code) == errc::device_fault)
    return cuda_failure(code, "cudaGetLastError", ordinal_);
  const auto index = std::min(static_cast<std::size_t>(code), logged_errors_.size() - 1);
  if (logged_errors_.test(index))
    return {};
  logged_errors_.set(index);
  // Without memory for the log line it is dropped: the launch must not fail for it.
  static_cast<void>(no_throw([&]() -> caf::error {
    std::string text =
        "a CUDA error that an earlier call left on the thread of the device was found ";
    text.append(found).append(" ").append(call);
    if (number != 0)
      text.append(" #").append(std::to_string(number));
    text.append(" and cleared; others of its kind will not be logged");
    log(log_level::warning, text, cuda_failure(code, "", ordinal_));
    return {};
  }));
  return {};
}

caf::expected<bool> cuda_device::can_access_peer(int peer) noexcept {
  if (peer == ordinal_)
    return true;
  if (auto err = driver_->check(ordinal_))
    return err;
  return can_access(ordinal_, peer);
}

namespace {

/// The peer access that this process has enabled. It stays enabled; CUDA refuses to enable it
/// again.
class enabled_links {
public:
  bool has(int from, int to) const noexcept { return is_noted(from, to) && (word(from) & bit(to)); }
  void add(int from, int to) noexcept {
    if (is_noted(from, to))
      words_[static_cast<std::size_t>(from)].fetch_or(bit(to));
  }

private:
  static constexpr int most = 64;
  static bool is_noted(int from, int to) noexcept {
    return 0 <= from && from < most && 0 <= to && to < most;
  }
  static std::uint64_t bit(int x) noexcept { return std::uint64_t{1} << x; }
  std::uint64_t word(int from) const noexcept {
    return words_[static_cast<std::size_t>(from)].load();
  }

  std::array<std::atomic<std::uint64_t>, most> words_{};
};

enabled_links links_of_process;

} // namespace

caf::error cuda_device::enable_peer(int peer) noexcept {
  if (peer == ordinal_ || links_of_process.has(ordinal_, peer))
    return {};
  if (auto err = select())
    return err;
  const auto code = cudaDeviceEnablePeerAccess(peer, 0);
  if (code == cudaErrorPeerAccessAlreadyEnabled) // by other code in the process
    (void)cudaGetLastError();
  else if (auto err = check(code, "cudaDeviceEnablePeerAccess", ordinal_))
    return err;
  links_of_process.add(ordinal_, peer);
  return {};
}

caf::error cuda_device::admit_peer(int peer) noexcept {
  if (peer == ordinal_ || std::find(peers_.begin(), peers_.end(), peer) != peers_.end())
    return {};
  int can = 0;
  if (auto err = call("cudaDeviceCanAccessPeer",
                      [&] { return cudaDeviceCanAccessPeer(&can, peer, ordinal_); }))
    return err;
  if (can == 0)
    return no_throw([&] {
      return failed(errc::not_supported, ordinal_,
                    "device " + std::to_string(peer) + " cannot access its memory");
    });
  if (pool_)
    if (auto err = pool_->grant({&peer, 1}))
      return err;
  return no_throw([&]() -> caf::error {
    peers_.push_back(peer);
    return {};
  });
}

caf::error cuda_device::copy_peer(void* target, int target_device, const void* source,
                                  int source_device, std::size_t size_bytes,
                                  stream_view stream) noexcept {
  return call("cudaMemcpyPeerAsync", [&] {
    return cudaMemcpyPeerAsync(target, target_device, source, source_device, size_bytes,
                               native(stream));
  });
}

caf::error cuda_device::copy_peers(std::span<const peer_copy> copies, stream_view stream) noexcept {
  if (auto err = select())
    return err;
  constexpr std::size_t most = 64;
  std::array<void*, most> targets;
  std::array<const void*, most> sources;
  std::array<std::size_t, most> sizes;
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t from = 0; // the attributes apply to all copies from here on
  while (!copies.empty()) {
    const auto some = copies.first(std::min(copies.size(), most));
    for (std::size_t i = 0; i < some.size(); ++i) {
      targets[i] = some[i].target;
      sources[i] = some[i].source;
      sizes[i] = some[i].size_bytes;
    }
    if (auto err = check(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(),
                                              some.size(), &attributes, &from, 1, native(stream)),
                         "cudaMemcpyBatchAsync", ordinal_))
      return err;
    copies = copies.subspan(some.size());
  }
  return {};
}

} // namespace troupe::detail
