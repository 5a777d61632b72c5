#include "backend/cuda/device_pool.hpp"

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/cuda/driver_functions.hpp"
#include "foundation/log.hpp"
#include "foundation/start_thread.hpp"
#include <troupe/backend.hpp>
#include <troupe/log.hpp>

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

namespace troupe::detail {

namespace {

/// @units bytes that CUDA unmaps in one call, about 0.4 ms, while other threads' driver calls wait
constexpr std::uint64_t trim_step = std::uint64_t{1} << 28;

/// The pause after each step. The driver's lock is not fair: without a pause, other calls wait for
/// many steps.
constexpr std::chrono::microseconds trim_pause{100};

/// The longest wait of `trim_all` for streams.
constexpr std::chrono::milliseconds trim_patience{50};

/// The shortest pause before a trim, also if freed memory is not kept.
constexpr std::chrono::milliseconds shortest_period{5};

/// Trims CUDA's default pool, where NCCL and the library allocate small buffers. CUDA itself
/// returns that memory at the next synchronization.
void trim_default_pool(int ordinal) noexcept {
  const device_guard guard{ordinal};
  cudaMemPool_t pool = nullptr;
  auto err = check(guard.error(), "cuCtxPushCurrent", ordinal);
  if (!err)
    err =
        check(cudaDeviceGetDefaultMemPool(&pool, ordinal), "cudaDeviceGetDefaultMemPool", ordinal);
  if (!err)
    err = check(cudaMemPoolTrimTo(pool, 0), "cudaMemPoolTrimTo", ordinal);
  if (err)
    log(log_level::warning, "cannot return freed device memory to the driver", err);
}

} // namespace

device_pool::device_pool(cudaMemPool_t native, int ordinal,
                         std::shared_ptr<pool_trimmer> trimmer) noexcept
    : pool_(native, ordinal), trimmer_(std::move(trimmer)) {}

caf::expected<unique_memory_pool> make_memory_pool(int ordinal) noexcept {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.handleTypes = cudaMemHandleTypeNone;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = ordinal;
  cudaMemPool_t native = nullptr;
  if (auto err = check(cudaMemPoolCreate(&native, &properties), "cudaMemPoolCreate", ordinal))
    return err;
  unique_memory_pool result{native, ordinal};
  std::uint64_t threshold = std::numeric_limits<std::uint64_t>::max();
  if (auto err = check(cudaMemPoolSetAttribute(native, cudaMemPoolAttrReleaseThreshold, &threshold),
                       "cudaMemPoolSetAttribute", ordinal))
    return err;
  return result;
}

caf::expected<bool> can_access(int from, int to) noexcept {
  int can = 1;
  if (from != to)
    if (auto err = check(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer", from))
      return err;
  return can != 0;
}

caf::expected<std::vector<int>> peers_of(int device) {
  int devices = 0;
  if (auto err = check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount", device))
    return err;
  std::vector<int> result;
  for (int peer = 0; peer < devices; ++peer) {
    const auto can = can_access(peer, device);
    if (!can)
      return can.error();
    if (peer != device && *can)
      result.push_back(peer);
  }
  return result;
}

caf::error grant_access(cudaMemPool_t pool, int ordinal, std::span<const int> peers) noexcept {
  for (const int peer : peers) {
    cudaMemAccessDesc access{};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = peer;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    if (auto err = check(cudaMemPoolSetAccess(pool, &access, 1), "cudaMemPoolSetAccess", ordinal))
      return err;
  }
  return {};
}

caf::expected<std::shared_ptr<device_pool>>
device_pool::create(int ordinal, std::shared_ptr<pool_trimmer> trimmer) noexcept {
  auto owner = make_memory_pool(ordinal); // the trimmer returns its memory when it is unused
  if (!owner)
    return owner.error();
  return no_throw([&]() -> caf::expected<std::shared_ptr<device_pool>> {
    auto made = std::make_shared<device_pool>(owner->get(), ordinal, std::move(trimmer));
    (void)owner->release();
    made->trimmer_->add(made);
    return made;
  });
}

caf::error device_pool::grant(std::span<const int> peers) noexcept {
  return grant_access(native(), ordinal(), peers);
}

void device_pool::note_freed(cudaStream_t stream) noexcept {
  {
    const std::lock_guard lock{freed_mutex_};
    freed_ = true;
    if (std::ranges::find(freed_in_, stream) == freed_in_.end())
      static_cast<void>(no_throw([&]() -> caf::error { // on failure, a later free adds it
        freed_in_.push_back(stream);
        return {};
      }));
  }
  trimmer_->wake();
}

void device_pool::forget(cudaStream_t stream) noexcept {
  const std::lock_guard lock{freed_mutex_};
  std::erase(freed_in_, stream);
}

bool device_pool::record_behind_frees() noexcept {
  const std::lock_guard lock{freed_mutex_};
  const auto err = no_throw([&]() -> caf::error {
    for (auto i = freed_in_.size(); i-- != 0;) {
      auto captures = CU_STREAM_CAPTURE_STATUS_NONE;
      if (driver::is_capturing(freed_in_[i], &captures) == cudaSuccess &&
          captures != CU_STREAM_CAPTURE_STATUS_NONE)
        continue; // the event would be part of the graph
      cudaEvent_t event = nullptr;
      if (auto error = check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                             "cudaEventCreateWithFlags", ordinal()))
        return error;
      unique_event owner{event, ordinal()};
      if (cudaEventRecord(event, freed_in_[i]) == cudaSuccess)
        behind_frees_.push_back(std::move(owner));
      else
        (void)cudaGetLastError(); // the lane finds the error with its own events
      freed_in_.erase(freed_in_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return {};
  });
  return !err && freed_in_.empty();
}

bool device_pool::has_unfinished_frees() noexcept {
  const bool recorded = record_behind_frees();
  std::erase_if(behind_frees_, [](unique_event& x) {
    auto code = cudaEventQuery(x.get());
    if (code == cudaSuccess)
      code = cudaEventSynchronize(x.get()); // returns at once
    if (code == cudaSuccess)
      return true;
    (void)cudaGetLastError();
    if (code == cudaErrorNotReady)
      return false;
    (void)x.release(); // after a fault CUDA destroys nothing; the lane finds the fault itself
    return true;
  });
  return !recorded || !behind_frees_.empty();
}

caf::expected<std::uint64_t> device_pool::attribute(cudaMemPoolAttr which) const noexcept {
  std::uint64_t value = 0;
  if (auto err = check(cudaMemPoolGetAttribute(native(), which, &value), "cudaMemPoolGetAttribute",
                       ordinal()))
    return err;
  return value;
}

caf::error device_pool::trim_to(std::uint64_t bytes) noexcept {
  const auto reserved = attribute(cudaMemPoolAttrReservedMemCurrent);
  if (!reserved)
    return reserved.error();
  for (auto keep = *reserved; keep > bytes;) {
    keep -= std::min(trim_step, keep - bytes);
    if (auto err = check(cudaMemPoolTrimTo(native(), static_cast<std::size_t>(keep)),
                         "cudaMemPoolTrimTo", ordinal()))
      return err;
    std::this_thread::sleep_for(trim_pause);
  }
  return {};
}

/// Needs `mutex_`.
caf::expected<bool> device_pool::trim_to_need(bool all) noexcept {
  const auto used = attribute(cudaMemPoolAttrUsedMemCurrent);
  if (!used)
    return used.error();
  auto need = *used;
  if (!all) {
    const auto high = attribute(cudaMemPoolAttrUsedMemHigh);
    if (!high)
      return high.error();
    need = std::max(need, *high);
    std::uint64_t none = 0; // restarts the high-water mark
    if (auto err = check(cudaMemPoolSetAttribute(native(), cudaMemPoolAttrUsedMemHigh, &none),
                         "cudaMemPoolSetAttribute", ordinal()))
      return err;
  }
  if (auto err = trim_to(need))
    return err;
  return need > *used;
}

bool device_pool::trim_idle(bool all) noexcept {
  if (auto err = check(select_device(ordinal()), "cudaSetDevice", ordinal())) {
    log(log_level::warning, "cannot return freed device memory to the driver", err);
    return false;
  }
  bool freed = false;
  {
    const std::lock_guard lock{freed_mutex_};
    freed = std::exchange(freed_, false);
  }
  const std::lock_guard lock{mutex_};
  if (!pool_)
    return false; // closed meanwhile
  const bool unfinished = has_unfinished_frees();
  const auto more = trim_to_need(all);
  if (!more) {
    log(log_level::warning, "cannot return freed device memory to the driver", more.error());
    return false;
  }
  return *more || unfinished || (freed && !all);
}

caf::error device_pool::trim_all() noexcept {
  const device_guard guard{ordinal()};
  const auto limit = std::chrono::steady_clock::now() + trim_patience;
  const auto waits = [&] {
    const std::lock_guard lock{mutex_};
    return pool_ && has_unfinished_frees();
  };
  while (waits() && std::chrono::steady_clock::now() < limit)
    std::this_thread::yield();
  const std::lock_guard lock{mutex_};
  return pool_ ? trim_to(0) : caf::error{};
}

cudaError_t device_pool::destroy() noexcept {
  trimmer_->remove(*this);
  {
    const std::lock_guard lock{freed_mutex_};
    freed_in_.clear(); // its streams may be destroyed from now on
  }
  const std::lock_guard lock{mutex_};
  behind_frees_.clear();
  return cudaMemPoolDestroy(pool_.release());
}

void device_pool::abandon() noexcept {
  abandoned_.store(true);
  trimmer_->remove(
      *this); // does not wait for a trim of the pool, since a trim may never return from the driver
}

device_pool::~device_pool() {
  if (!abandoned_.load())
    return;
  (void)pool_.release();
  for (auto& x : behind_frees_)
    (void)x.release();
}

struct pool_trimmer::state {
  std::mutex mutex;
  std::condition_variable condition;
  std::vector<std::shared_ptr<device_pool>> pools;
  std::atomic<bool> awake{false}; ///< the thread is about to trim, or waits for its time
  bool running = false;
  bool stopped = false;
  const std::chrono::milliseconds keep;
  const shared_driver_access driver;

  state(std::chrono::milliseconds keep_, shared_driver_access driver_)
      : keep(keep_), driver(std::move(driver_)) {}

  bool gives_back() const noexcept { return keep != cuda_backend_options::forever; }

  std::vector<std::shared_ptr<device_pool>> pools_of(int ordinal) {
    const std::lock_guard lock{mutex};
    std::vector<std::shared_ptr<device_pool>> result;
    for (const auto& x : pools)
      if (ordinal < 0 || x->ordinal() == ordinal)
        result.push_back(x);
    return result;
  }

  /// Waits until memory was freed, then for the time that it is kept. Returns false if the thread
  /// must end.
  bool wait_for_time() {
    std::unique_lock lock{mutex};
    condition.wait(lock, [this] { return stopped || awake.load(); });
    condition.wait_for(lock, std::max(keep, shortest_period), [this] { return stopped; });
    return !stopped && !driver->ended();
  }

  void run() {
    while (wait_for_time()) {
      awake.store(false);
      bool more = false;
      const auto err = no_throw([&]() -> caf::error {
        for (const auto& x : pools_of(-1))
          more = (!driver->ended() && x->trim_idle(keep.count() == 0)) || more;
        return {};
      });
      if (more || err) // out of host memory: tries again
        awake.store(true);
    }
  }
};

pool_trimmer::pool_trimmer(std::chrono::milliseconds keep, shared_driver_access driver)
    : state_(std::make_shared<state>(keep, std::move(driver))) {}

/// No pool is left, so the thread makes no CUDA call any more.
pool_trimmer::~pool_trimmer() {
  const std::lock_guard lock{state_->mutex};
  state_->stopped = true;
  state_->condition.notify_all();
}

void pool_trimmer::add(const std::shared_ptr<device_pool>& pool) {
  const std::lock_guard lock{state_->mutex};
  state_->pools.push_back(pool);
  if (state_->running || !state_->gives_back())
    return;
  if (auto err = start_detached_thread([state = state_] { state->run(); },
                                       "to return device memory to the driver"))
    log(log_level::warning, "freed device memory is kept until memory runs out", err);
  else
    state_->running = true;
}

void pool_trimmer::remove(const device_pool& pool) noexcept {
  const std::lock_guard lock{state_->mutex};
  std::erase_if(state_->pools, [&](const auto& x) { return x.get() == &pool; });
}

void pool_trimmer::wake() noexcept {
  if (!state_->gives_back() || state_->awake.load(std::memory_order_relaxed) ||
      state_->awake.exchange(true))
    return;
  const std::lock_guard lock{state_->mutex}; // else the thread could miss the notification
  state_->condition.notify_all();
}

void pool_trimmer::trim_now(int ordinal) noexcept {
  static_cast<void>(no_throw([&]() -> caf::error {
    for (const auto& x : state_->pools_of(ordinal)) {
      if (auto err = x->trim_all())
        log(log_level::warning, "cannot return freed device memory to the driver", err);
      trim_default_pool(x->ordinal());
    }
    return {};
  }));
}

} // namespace troupe::detail
