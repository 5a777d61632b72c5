#include "backend/cuda/adopted_memory.hpp"
#include "backend/cuda/cuda_device.hpp"
#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/cuda_slabs.hpp"
#include "backend/cuda/device_pool.hpp"
#include "backend/cuda/direct_communicator.hpp"
#include "backend/cuda/direct_memory.hpp"
#include "backend/cuda/driver_access.hpp"
#include "backend/cuda/nccl_communicator.hpp"
#include "backend/cuda/nvlink.hpp"
#include "foundation/file_descriptor.hpp"
#include "foundation/log.hpp"
#include "foundation/option_check.hpp"
#include "foundation/start_thread.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>
#include <troupe/log.hpp>

#include <cuda_runtime_api.h>
#include <driver_types.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <unistd.h>

namespace troupe {

namespace {

/// Flags of the last communicators that were built here or called off: true means called off.
class wanted_list {
public:
  std::shared_ptr<const std::atomic<bool>> unwanted(const communicator_id& id) {
    return find_or_add(id);
  }
  void call_off(const communicator_id& id) { find_or_add(id)->store(true); }

private:
  static constexpr std::size_t most = 256;

  std::shared_ptr<std::atomic<bool>> find_or_add(const communicator_id& id) {
    std::lock_guard lock{mutex_};
    const auto i = std::find_if(last_.begin(), last_.end(),
                                [&](const auto& x) { return x.first.bytes == id.bytes; });
    if (i != last_.end())
      return i->second;
    if (last_.size() == most)
      last_.pop_front();
    return last_.emplace_back(id, std::make_shared<std::atomic<bool>>(false)).second;
  }

  std::mutex mutex_;
  std::deque<std::pair<communicator_id, std::shared_ptr<std::atomic<bool>>>> last_;
};

/// The time that an ordinary exit of the process may take once its CUDA is lost.
constexpr std::chrono::milliseconds patience{500};

/// Handlers run in reverse order of registration. This one runs before the handlers of libraries
/// that were loaded before the fault.
void on_exit_begun(int status, void*) noexcept {
  const int code = detail::try_detached_thread([status] {
    std::this_thread::sleep_for(patience);
    ::_exit(status);
  });
  if (code != 0)
    ::_exit(status); // no thread to watch the exit
}

/// Limits the time that an ordinary exit of the process takes from now on. Exit handlers of CUDA,
/// of NCCL and of code that calls them may wait for good. After `patience`, the process ends
/// without them, with its intended status.
/// @thread any
void watch_exit() noexcept {
  static std::atomic<bool> watched{false};
  if (!watched.exchange(true) && ::on_exit(on_exit_begun, nullptr) != 0)
    detail::log(log_level::warning, "the time that the end of the process takes is not limited");
}

class cuda_backend final : public backend {
public:
  cuda_backend(int devices, const cuda_backend_options& options)
      : devices_(devices),
        trimmer_(std::make_shared<detail::pool_trimmer>(options.keep_freed, driver_)) {}

  std::string_view name() const noexcept override { return "cuda"; }
  int device_count() const noexcept override { return devices_; }

  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_device(ordinal, false);
  }

  caf::expected<std::unique_ptr<backend_device>> open_beside(int ordinal) noexcept override {
    return open_device(ordinal, true);
  }

  caf::expected<peer_link> link(int from, int to) noexcept override {
    if (auto err = driver_->check(from))
      return err;
    return detail::no_throw([&]() -> caf::expected<peer_link> {
      if (from < 0 || from >= devices_ || to < 0 || to >= devices_ || from == to)
        return make_error(errc::invalid_argument, "there is no link from device " +
                                                      std::to_string(from) + " to device " +
                                                      std::to_string(to));
      return link_between(from, to);
    });
  }

  caf::expected<communicator_id> make_communicator_id() noexcept override {
    if (auto err = driver_->check(-1))
      return err;
    if (auto err = detail::fill_standard_streams())
      return err;
    return detail::make_nccl_id();
  }

  caf::error check_build(int size, std::span<const local_rank> ranks) noexcept override {
    return detail::check_build(size, ranks, devices_, driver_, *trimmer_);
  }

  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override {
    if (auto err = detail::fill_standard_streams())
      return err;
    return detail::no_throw([&] {
      return detail::build_communicator(id, size, ranks, devices_, driver_, *trimmer_,
                                        wanted_.unwanted(id));
    });
  }

  caf::error admit_memory(int ordinal, void* memory, std::size_t size_bytes) noexcept override {
    if (auto err = driver_->check(ordinal))
      return err;
    return detail::admit_memory(ordinal, memory, size_bytes);
  }

  std::size_t slab_granularity() const noexcept override {
    return driver_->ended() ? 0 : detail::slab_granularity(devices_);
  }

  caf::expected<int> make_slab(const memory_slab& what) noexcept override {
    if (auto err = driver_->check(what.ordinal))
      return err;
    auto made = detail::make_slab(what);
    if (!made && code_of(made.error()) == errc::out_of_memory) {
      trimmer_->trim_now(what.ordinal);
      made = detail::make_slab(what);
    }
    if (!made)
      return std::move(made.error());
    return made->release();
  }

  caf::error map_slab(const memory_slab& what, int descriptor, int by) noexcept override {
    if (auto err = driver_->check(by))
      return err;
    return detail::map_slab(what, descriptor, by);
  }

  caf::error unmap_slab(const memory_slab& what) noexcept override {
    if (auto err = driver_->check(what.ordinal))
      return err;
    return detail::unmap_slab(what);
  }

  bool can_be_direct(std::span<const int> ordinals) const noexcept override {
    return detail::can_be_direct(ordinals);
  }

  caf::expected<communicator_ranks>
  build_direct(std::span<const local_rank> ranks) noexcept override {
    if (auto err = detail::fill_standard_streams())
      return err;
    return detail::build_direct_communicator(ranks, devices_, direct_memory_, driver_);
  }

  std::size_t direct_bytes() const noexcept override {
    return detail::direct::arena_bytes(detail::direct::most_ranks);
  }

  caf::expected<communicator_id> make_direct_id() noexcept override {
    const auto first = direct_memory_->next_first();
    communicator_id result;
    std::memcpy(result.bytes.data(), &first, sizeof first);
    return result;
  }

  caf::expected<communicator_ranks>
  join_direct(const communicator_id& id, int rank,
              std::span<const direct_member> members) noexcept override {
    if (auto err = detail::fill_standard_streams())
      return err;
    return detail::join_direct_communicator(id, rank, members, devices_, direct_memory_, driver_);
  }

  void call_off(const communicator_id& id) noexcept override { wanted_.call_off(id); }

  caf::error abort(communicator_ranks ranks) noexcept override {
    if (is_direct(ranks))
      return detail::end_direct_communicator(std::move(ranks), *direct_memory_);
    return detail::abort_communicator(std::move(ranks));
  }

  caf::error destroy(communicator_ranks ranks) noexcept override {
    if (is_direct(ranks))
      return detail::end_direct_communicator(std::move(ranks), *direct_memory_);
    return detail::destroy_communicator(std::move(ranks));
  }

  void abandon(const caf::error&) noexcept override {
    if (driver_->end())
      watch_exit();
  }

private:
  caf::expected<std::unique_ptr<backend_device>> open_device(int ordinal, bool beside) noexcept {
    if (auto err = detail::fill_standard_streams())
      return err;
    return detail::cuda_device::open(ordinal, devices_, driver_, trimmer_, beside);
  }

  static bool is_direct(const communicator_ranks& ranks) noexcept {
    return !ranks.empty() &&
           dynamic_cast<const detail::direct_communicator*>(ranks.front().get()) != nullptr;
  }

  static caf::expected<peer_link> link_between(int from, int to) {
    int access = 0;
    int rank = 0;
    int atomics = 0;
    for (auto [what, value] : {std::pair{cudaDevP2PAttrAccessSupported, &access},
                               std::pair{cudaDevP2PAttrPerformanceRank, &rank},
                               std::pair{cudaDevP2PAttrNativeAtomicSupported, &atomics}})
      if (auto err = detail::check(detail::cudaDeviceGetP2PAttribute(value, what, from, to),
                                   "cudaDeviceGetP2PAttribute", from))
        return err;
    peer_link result;
    result.performance_rank = rank;
    result.native_atomics = atomics != 0;
    if (access == 0)
      return result;
    auto from_id = pci_id(from);
    if (!from_id)
      return from_id.error();
    auto to_id = pci_id(to);
    if (!to_id)
      return to_id.error();
    const auto links = detail::nvlinks_between(*from_id, *to_id);
    result.links = links.value_or(0);
    // Native atomics in another GPU's memory need NVLink. They prove it where links cannot be
    // counted.
    const bool nvlink = links ? *links > 0 : result.native_atomics;
    result.kind = nvlink ? link_kind::nvlink : link_kind::pcie;
    return result;
  }

  static caf::expected<std::string> pci_id(int ordinal) {
    char text[32] = {};
    if (auto err = detail::check(detail::cudaDeviceGetPCIBusId(text, sizeof text, ordinal),
                                 "cudaDeviceGetPCIBusId", ordinal))
      return err;
    return std::string{text};
  }

  const int devices_;
  wanted_list wanted_;
  const detail::shared_driver_access driver_ = std::make_shared<detail::driver_access>();
  const std::shared_ptr<detail::pool_trimmer> trimmer_;
  const std::shared_ptr<detail::direct_memory> direct_memory_ =
      std::make_shared<detail::direct_memory>(driver_);
};

/// Returns the reason why no GPU is available.
caf::error no_gpu(cudaError_t code) {
  int driver = 0;
  int runtime = 0;
  (void)detail::cudaDriverGetVersion(&driver); // stays 0 where there is no driver
  (void)detail::cudaRuntimeGetVersion(&runtime);
  auto text = [](int version) {
    return std::to_string(version / 1000) + '.' + std::to_string(version % 1000 / 10);
  };
  const std::string versions =
      "this program has CUDA " + text(runtime) +
      (driver == 0 ? ", and there is no driver" : ", the driver is for up to " + text(driver));
  auto why = detail::cuda_failure(code, "cudaGetDeviceCount", -1, versions);
  auto x = failure_of(why);
  if (!x)
    return why;
  x->code = errc::unavailable;
  return make_error(std::move(*x));
}

} // namespace

caf::expected<std::shared_ptr<backend>> make_cuda_backend(const cuda_backend_options& options) {
  return detail::no_throw([&]() -> caf::expected<std::shared_ptr<backend>> {
    if (auto err = detail::check_options(options))
      return err;
    if (auto err = detail::fill_standard_streams())
      return err;
    if (auto err = detail::load_cudart())
      return err;
    int devices = 0;
    if (const auto code = detail::cudaGetDeviceCount(&devices); code != cudaSuccess)
      return no_gpu(code);
    if (devices == 0)
      return no_gpu(cudaErrorNoDevice);
    if (auto err = detail::load_nccl())
      return err;
    return std::make_shared<cuda_backend>(devices, options);
  });
}

} // namespace troupe
