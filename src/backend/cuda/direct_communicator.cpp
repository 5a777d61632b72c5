#include "backend/cuda/direct_communicator.hpp"

#include "backend/cuda/communicator_failure.hpp"
#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/cuda/device_pool.hpp"
#include "backend/cuda/direct_kernels.hpp"
#include "backend/cuda/driver_functions.hpp"
#include "backend/cuda/kernel_image.hpp"
#include "backend/cuda/nccl_arguments.hpp"
#include <troupe/dtype.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

/// The code of direct.cu, compiled by nvcc.
extern "C" const unsigned char troupe_direct_image[];

namespace troupe::detail {

namespace {

#define TROUPE_PUSH_NAME(name, type) {"push_" #name},
#define TROUPE_PULL_NAME(name, type) {"pull_" #name},
#define TROUPE_MOVE_NAME(name, most) {"move_" #name},
#define TROUPE_TRADE_NAME(name, most) {"trade_" #name},
constexpr std::size_t types = std::size(real_dtypes);
constinit kernel kernels[] = {
    TROUPE_DIRECT_TYPES(TROUPE_PUSH_NAME) TROUPE_DIRECT_TYPES(TROUPE_PULL_NAME)
        TROUPE_DIRECT_MOVES(TROUPE_MOVE_NAME) TROUPE_DIRECT_TRADES(TROUPE_TRADE_NAME)};
static_assert(std::size(kernels) == 2 * types + 4);
constinit kernel_image image{troupe_direct_image, kernels};

const kernel& push_kernel(dtype type) noexcept { return kernels[static_cast<std::size_t>(type)]; }
const kernel& pull_kernel(dtype type) noexcept {
  return kernels[types + static_cast<std::size_t>(type)];
}
const kernel& move_few = kernels[2 * types];
const kernel& move_many = kernels[2 * types + 1];
const kernel& trade_pair = kernels[2 * types + 2];
const kernel& trade_few = kernels[2 * types + 3];

/// How many kernels that wait for peers may run on a device at the same time: one in each of a
/// lane's streams for collectives.
constexpr unsigned kernels_at_once = 4;

/// The interval between two looks at whether kernels have ended.
constexpr std::chrono::microseconds between_looks{20};
/// How often a device is asked for a fault meanwhile.
constexpr int looks_before_check = 500;

caf::error check_ranks(std::span<const local_rank> ranks, int device_count) {
  if (ranks.empty() || ranks.size() > direct::most_ranks)
    return communicator_failure(ranks.empty() ? errc::invalid_argument : errc::not_supported,
                                "a direct communicator of " + std::to_string(ranks.size()) +
                                    " ranks: 1 to " + std::to_string(direct::most_ranks) +
                                    " are possible");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto& x = ranks[i];
    if (x.rank != static_cast<int>(i))
      return communicator_failure(errc::invalid_argument, "the ranks are not in order", &x);
    if (x.device < 0 || x.device >= device_count)
      return communicator_failure(errc::invalid_argument, "a device does not exist", &x);
  }
  return {};
}

/// Returns an error if some device cannot access the memory of another one.
caf::error check_access(std::span<const local_rank> ranks) {
  for (const auto& x : ranks)
    for (const auto& y : ranks) {
      const auto can = can_access(x.device, y.device);
      if (!can)
        return can.error();
      if (!*can)
        return communicator_failure(
            errc::not_supported,
            "it has no access to the memory of device " + std::to_string(y.device), &x);
    }
  return {};
}

/// Returns whether the kernels wait for the former work of their stream on all devices, as
/// `launch_early` demands.
caf::expected<bool> can_start_early(std::span<const local_rank> ranks) {
  constexpr int since = 90;
  for (const auto& x : ranks) {
    int architecture = 0;
    if (auto err = check(compiled_for(architecture, trade_few, x.device), "cuKernelGetAttribute",
                         x.device))
      return err;
    if (architecture < since)
      return false;
  }
  return true;
}

/// Returns limits with which all kernels that may run at the same time fit on each device.
caf::expected<direct_limits> limits_for(std::span<const local_rank> ranks) {
  direct_limits result;
  if (ranks.size() > 2) // each rank pushes to all others
    result.pushed_reduction /= 2;
  for (const auto& x : ranks) {
    int processors = 0;
    int threads = 0; // of a multiprocessor
    for (auto [what, value] : {std::pair{cudaDevAttrMultiProcessorCount, &processors},
                               std::pair{cudaDevAttrMaxThreadsPerMultiProcessor, &threads}})
      if (auto err = check(cudaDeviceGetAttribute(value, what, x.device), "cudaDeviceGetAttribute",
                           x.device))
        return err;
    const auto sharing =
        std::ranges::count_if(ranks, [&](auto& y) { return y.device == x.device; });
    const auto at_most = [&](unsigned& limit, unsigned blocks, unsigned block_threads,
                             unsigned roles) {
      const auto fit = static_cast<unsigned>(threads) / block_threads;
      const auto all = static_cast<unsigned>(processors) * std::min(blocks, fit);
      limit =
          std::clamp(all / (kernels_at_once * static_cast<unsigned>(sharing) * roles), 1u, limit);
    };
    const auto peers = static_cast<unsigned>(std::max<std::size_t>(ranks.size() - 1, 1));
    at_most(result.few_pull_channels, direct::pulling_blocks, direct::pulling_threads, 1);
    at_most(result.pull_channels, direct::pulling_blocks, direct::pulling_threads, 1);
    at_most(result.push_channels, direct::pushing_blocks, direct::block_threads, 1);
    // A role is a direction of a peer.
    at_most(result.move_channels, direct::moving_blocks, direct::block_threads, 2 * peers);
  }
  return result;
}

/// Returns `direct::plane::first` for an id of `backend::make_direct_id`.
std::uint32_t first_of(const communicator_id& id) noexcept {
  std::uint32_t result = 0;
  std::memcpy(&result, id.bytes.data(), sizeof result);
  return result;
}

/// Returns the rank that has the arena. `view` has everything but the words of the arena.
std::unique_ptr<direct_communicator> rank_on(const direct_arena& arena, direct::plane view,
                                             const direct_limits& limits, bool starts_early,
                                             const shared_driver_access& driver) {
  view.ended = reinterpret_cast<std::uint32_t*>(&arena.words->ended);
  view.aborted = reinterpret_cast<const std::uint32_t*>(&arena.words->aborted);
  return std::make_unique<direct_communicator>(view, arena, limits, starts_early, driver);
}

direct_communicator& as_direct(const std::unique_ptr<backend_communicator>& rank) noexcept {
  return static_cast<direct_communicator&>(*rank);
}

} // namespace

cudaError_t load_direct() noexcept { return image.load(); }

bool can_be_direct(std::span<const int> ordinals) noexcept {
  return ordinals.size() <= direct::most_ranks && std::ranges::all_of(ordinals, [=](int x) {
           return std::ranges::all_of(ordinals, [=](int y) {
             const auto can = can_access(x, y);
             return can && *can;
           });
         });
}

/// Launches kernels on the current device, in one stream.
class direct_communicator::launcher final : public direct_launcher {
public:
  launcher(direct_communicator& of, cudaStream_t stream, step_position where,
           bool captures) noexcept
      : of_(of), stream_(stream), where_(where), captures_(captures) {}

  caf::error push(dtype type, unsigned channels, unsigned threads,
                  const direct::reduce_arguments& arguments) override {
    return launch_kernel(push_kernel(type), {channels}, threads, &arguments);
  }

  caf::error pull(dtype type, unsigned channels,
                  const direct::reduce_arguments& arguments) override {
    return launch_kernel(pull_kernel(type), {channels}, direct::pulling_threads, &arguments);
  }

  caf::error move(unsigned channels, unsigned threads,
                  std::span<const direct::message> messages) override {
    const dim3 grid{channels, 2 * of_.view_.size};
    if (messages.size() <= direct::few_messages)
      return move_with<direct::few_messages>(move_few, grid, threads, messages);
    return move_with<direct::many_messages>(move_many, grid, threads, messages);
  }

  caf::error trade(unsigned channels, unsigned log2_threads,
                   std::span<const direct::message> messages) override {
    if (messages.size() <= direct::messages_of_pair)
      return trade_with<direct::messages_of_pair>(trade_pair, channels, log2_threads, messages);
    return trade_with<direct::few_messages>(trade_few, channels, log2_threads, messages);
  }

private:
  template <std::size_t Most>
  caf::error move_with(const kernel& which, dim3 grid, unsigned threads,
                       std::span<const direct::message> messages) {
    const auto arguments = arguments_of<Most>(messages);
    return launch_kernel(which, grid, threads, &arguments);
  }

  template <std::size_t Most>
  caf::error trade_with(const kernel& which, unsigned channels, unsigned log2_threads,
                        std::span<const direct::message> messages) {
    auto arguments = arguments_of<Most>(messages);
    arguments.log2_threads = log2_threads;
    const auto threads = static_cast<unsigned>(messages.size()) << log2_threads;
    return launch_kernel(which, {channels}, threads, &arguments);
  }

  caf::error launch_kernel(const kernel& which, dim3 grid, unsigned threads,
                           const void* arguments) noexcept {
    auto view = of_.view_;
    if (captures_)
      view.ended = nullptr;
    view.number = of_.launched_.load() + 1;
    view.place = where_.place;
    view.reached = where_.reached;
    if (of_.compares_.load())
      view.found = &of_.own_.words->found;
    void* all[] = {&view, const_cast<void*>(arguments)};
    const auto how = captures_ || !of_.starts_early_ ? &launch : &launch_early;
    const auto code = how(which, grid, threads, all, stream_);
    if (code == cudaSuccess && !captures_)
      of_.launched_.fetch_add(1);
    return check(code, "cuLaunchKernel", of_.own_.device);
  }

  direct_communicator& of_;
  const cudaStream_t stream_;
  const step_position where_;
  const bool captures_;
};

caf::error direct_communicator::enqueue(std::span<const collective_call> calls, stream_view stream,
                                        step_position where) noexcept {
  last_ = {};
  return no_throw([&]() -> caf::error {
    const local_rank self{static_cast<int>(view_.rank), own_.device};
    if (auto err = call_validator{self, static_cast<int>(view_.size), true}.validate(calls, stream))
      return err;
    if (std::ranges::all_of(calls, is_empty))
      return {};
    if (auto err = asynchronous_error())
      return err;
    if (auto err = check(select_device(own_.device), "cudaSetDevice", own_.device))
      return err;
    auto* const on = static_cast<cudaStream_t>(stream.native);
    auto captures = CU_STREAM_CAPTURE_STATUS_NONE;
    if (auto err = check(driver::is_capturing(on, &captures), "cuStreamIsCapturing", own_.device))
      return err;
    launcher to{*this, on, where, captures != CU_STREAM_CAPTURE_STATUS_NONE};
    const auto before = launched_.load();
    auto err = launch_direct(calls, view_.rank, view_.size, limits_, messages_, to);
    if (!err && launched_.load() != before)
      last_ = {&own_.words->ended, launched_.load(), on};
    return err;
  });
}

caf::error direct_communicator::replay(graph_view graph, stream_view stream, backend_device& device,
                                       std::uint32_t* reached) noexcept {
  last_ = {};
  if (auto err = asynchronous_error())
    return err;
  auto* const on = static_cast<cudaStream_t>(stream.native);
  const auto write = [&](const void* word, std::uint32_t value) {
    return check(driver::write_word32(on, reinterpret_cast<CUdeviceptr>(word), value,
                                      CU_STREAM_WRITE_VALUE_DEFAULT),
                 "cuStreamWriteValue32", own_.device);
  };
  // First, so that nothing runs if the device cannot do it.
  if (reached != nullptr)
    if (auto err = write(reached, 0))
      return err;
  if (auto err = device.launch_graph(graph, stream))
    return err;
  const auto number = launched_.fetch_add(1) + 1;
  if (auto err = write(&own_.words->ended, number))
    return err;
  last_ = {&own_.words->ended, number, on};
  return {};
}

caf::error direct_communicator::asynchronous_error() noexcept {
  if (auto err = driver_->check(own_.device))
    return err;
  const auto& found = own_.words->found;
  if (std::atomic_ref{found.is_there}.load(std::memory_order_acquire) == 0)
    return {};
  return no_throw([&] { return mismatch_error(found); });
}

caf::error direct_communicator::mark_end(event_view event, stream_view stream,
                                         backend_device& device) noexcept {
  if (last_.word == nullptr || last_.stream != stream.native || !own_.streams_wait_for_words)
    return device.record(event, stream);
  auto& x = as_cuda_event(event);
  x.end = last_;
  x.checked = std::chrono::steady_clock::now();
  return {};
}

caf::expected<communicator_ranks>
build_direct_communicator(std::span<const local_rank> ranks, int device_count,
                          const std::shared_ptr<direct_memory>& memory,
                          const shared_driver_access& driver) noexcept {
  return no_throw([&]() -> caf::expected<communicator_ranks> {
    if (auto err = check_ranks(ranks, device_count))
      return err;
    if (auto err = driver->check(ranks.front().device))
      return err;
    if (auto err = check_access(ranks))
      return err;
    const auto limits = limits_for(ranks);
    if (!limits)
      return limits.error();
    const auto early = can_start_early(ranks);
    if (!early)
      return early.error();
    const auto size = static_cast<unsigned>(ranks.size());
    std::vector<direct_arena> arenas;
    for (const auto& x : ranks) {
      auto arena = memory->take(x.device, size);
      if (!arena) {
        for (auto& y : arenas)
          if (auto err = memory->give_back(y))
            return err;
        return arena.error();
      }
      arenas.push_back(*arena);
    }
    direct::plane view{};
    view.size = size;
    view.first = memory->next_first();
    for (unsigned rank = 0; rank < size; ++rank)
      view.at[rank] = arenas[rank].memory;
    communicator_ranks result;
    for (unsigned rank = 0; rank < size; ++rank) {
      view.rank = rank;
      result.push_back(rank_on(arenas[rank], view, *limits, *early, driver));
    }
    return result;
  });
}

caf::expected<communicator_ranks> join_direct_communicator(
    const communicator_id& id, int rank, std::span<const direct_member> members, int device_count,
    const std::shared_ptr<direct_memory>& memory, const shared_driver_access& driver) noexcept {
  return no_throw([&]() -> caf::expected<communicator_ranks> {
    std::vector<local_rank> ranks;
    for (const auto& x : members)
      ranks.push_back({static_cast<int>(ranks.size()), x.device});
    if (auto err = check_ranks(ranks, device_count))
      return err;
    if (rank < 0 || rank >= static_cast<int>(ranks.size()))
      return communicator_failure(errc::invalid_argument,
                                  "rank " + std::to_string(rank) + " is out of range");
    const auto& own = ranks[static_cast<std::size_t>(rank)];
    if (auto err = driver->check(own.device))
      return err;
    if (auto err = check_access(ranks))
      return err;
    const auto limits = limits_for(ranks); // the same ones on all ranks
    if (!limits)
      return limits.error();
    const auto early = can_start_early({&own, 1});
    if (!early)
      return early.error();
    const auto size = static_cast<unsigned>(ranks.size());
    direct::plane view{};
    view.size = size;
    view.rank = static_cast<unsigned>(rank);
    view.first = first_of(id);
    for (unsigned i = 0; i < size; ++i)
      view.at[i] = static_cast<direct::arena*>(members[i].memory);
    const auto arena = memory->make_in(view.at[rank], own.device, size);
    if (!arena)
      return arena.error();
    communicator_ranks result;
    result.push_back(rank_on(*arena, view, *limits, *early, driver));
    return result;
  });
}

caf::error end_direct_communicator(communicator_ranks ranks, direct_memory& memory) noexcept {
  for (auto& x : ranks)
    x->on_closed();
  caf::error first;
  for (auto& x : ranks) {
    const auto& rank = as_direct(x);
    for (int looks = 1; !first && !rank.is_idle(); ++looks) {
      std::this_thread::sleep_for(between_looks);
      if (looks % looks_before_check == 0)
        first = memory.fault_of(rank.arena().device);
    }
  }
  // After an error the arenas are kept for good: kernels may still use them.
  for (auto& x : ranks)
    if (!first)
      first = memory.give_back(as_direct(x).arena());
  return first;
}

} // namespace troupe::detail
