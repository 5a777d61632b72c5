/// The ranks of a direct communicator on host threads.
#pragma once

#include "backend/cuda/direct_kernels.hpp"
#include "backend/cuda/direct_plan.hpp"
#include "support/emulated_gpu.hpp"
#include <troupe/dtype.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace troupe::testing {

/// Calls `f<T>` for the type of the device.
template <class F> void with_type(dtype type, F f) {
  switch (type) {
#define TROUPE_CASE(name, cpp_type)                                                                \
  case dtype::name:                                                                                \
    return f(cpp_type{});
    TROUPE_DIRECT_TYPES(TROUPE_CASE)
#undef TROUPE_CASE
  case dtype::complex64:
  case dtype::complex128:
    break; // no kernel has them
  }
}

/// The memory of the ranks of one communicator.
class emulated_ranks {
public:
  /// `compares`: the ranks compare their calls.
  explicit emulated_ranks(unsigned size, std::uint32_t first_number = 0, bool compares = false)
      : ended_(size), found_(size), compares_(compares), first_(first_number) {
    for (unsigned rank = 0; rank < size; ++rank) {
      arenas_.emplace_back(static_cast<detail::direct::arena*>(
          ::operator new(sizeof(detail::direct::arena), align)));
      std::memset(static_cast<void*>(arenas_.back().get()), 0, sizeof(detail::direct::arena));
    }
  }

  /// Sets the numbers of the last messages, and keeps the slots.
  void begin_again(std::uint32_t number) {
    for (auto& a : arenas_)
      for (auto& of_peer : a->numbers)
        for (auto& x : of_peer)
          x = {number - first_, number, number - first_, number - first_};
  }

  /// Sets the numbers that the peers have acknowledged, and nothing else.
  void acknowledge(std::uint32_t number) {
    for (auto& a : arenas_)
      for (auto& of_peer : a->numbers)
        for (auto& x : of_peer)
          x.acknowledged = number;
  }

  unsigned size() const { return static_cast<unsigned>(arenas_.size()); }

  detail::direct::plane at(unsigned rank) {
    detail::direct::plane result{};
    for (unsigned i = 0; i < size(); ++i)
      result.at[i] = arenas_[i].get();
    result.ended = &ended_[rank];
    result.aborted = &aborted_;
    result.found = compares_ ? &found_[rank] : nullptr;
    result.first = first_;
    result.rank = rank;
    result.size = size();
    return result;
  }

  /// Runs a kernel of one rank, behind its former ones.
  template <class Kernel> void run(unsigned rank, const emulated_grid& grid, Kernel kernel) {
    auto p = at(rank);
    p.number = ended(rank) + 1;
    if (records_) {
      p.reached = std::exchange(p.ended, nullptr);
      p.place = p.number;
    }
    run_emulated(grid, [&](void* shared) { kernel(p, shared); });
    if (!records_ || !stopped(rank)) {
      EXPECT_EQ(ended(rank), p.number);
    }
  }

  /// Runs later kernels as those that are recorded in a graph.
  void record() { records_ = true; }

  /// Returns the number of the last kernel that has ended.
  std::uint32_t ended(unsigned rank) const { return detail::direct::gpu::load(&ended_[rank]); }
  /// Returns whether a kernel of the rank was aborted.
  bool stopped(unsigned rank) const {
    return detail::direct::gpu::load(&arenas_[rank]->stopped[rank]) != 0;
  }

  /// Returns what the rank was told of calls that do not match.
  const detail::direct::mismatch& found(unsigned rank) const { return found_[rank]; }

  void abort() { detail::direct::gpu::store(&aborted_, 1); }

private:
  static constexpr std::align_val_t align{alignof(detail::direct::arena)};
  struct freed {
    void operator()(detail::direct::arena* x) const { ::operator delete(x, align); }
  };

  std::vector<std::unique_ptr<detail::direct::arena, freed>> arenas_;
  std::vector<std::uint32_t> ended_;
  bool records_ = false;
  std::vector<detail::direct::mismatch> found_;
  const bool compares_;
  const std::uint32_t first_;
  std::uint32_t aborted_ = 0;
};

/// Runs the launches of one rank on host threads, one after the other, each with few threads.
class emulated_launcher final : public detail::direct_launcher {
public:
  emulated_launcher(emulated_ranks& all, unsigned rank) : all_(all), rank_(rank) {}

  caf::error push(dtype type, unsigned channels, unsigned,
                  const detail::direct::reduce_arguments& a) override {
    all_.run(rank_, {channels, 1, reducing_threads}, [&](const auto& p, void* shared) {
      with_type(type, [&]<class T>(T) {
        detail::direct::push_reduce<T>(p, a, *static_cast<detail::direct::shared_numbers*>(shared));
      });
    });
    return {};
  }

  caf::error pull(dtype type, unsigned channels,
                  const detail::direct::reduce_arguments& a) override {
    all_.run(rank_, {channels, 1, reducing_threads}, [&](const auto& p, void* shared) {
      with_type(type, [&]<class T>(T) {
        detail::direct::pull_reduce<T, 2>(p, a,
                                          *static_cast<detail::direct::shared_facts<T>*>(shared));
      });
    });
    return {};
  }

  caf::error move(unsigned channels, unsigned,
                  std::span<const detail::direct::message> messages) override {
    const auto a = detail::arguments_of<detail::direct::many_messages>(messages);
    all_.run(rank_, {channels, 2 * all_.size(), moving_threads}, [&](const auto& p, void* shared) {
      detail::direct::move(p, a, *static_cast<std::uint64_t*>(shared));
    });
    return {};
  }

  caf::error trade(unsigned channels, unsigned,
                   std::span<const detail::direct::message> messages) override {
    const auto a = detail::arguments_of<detail::direct::few_messages>(messages);
    const auto threads = std::max(reducing_threads, static_cast<unsigned>(messages.size()));
    all_.run(rank_, {channels, 1, threads}, [&](const auto& p, void* shared) {
      detail::direct::trade(p, a, *static_cast<detail::direct::shared_numbers*>(shared));
    });
    return {};
  }

private:
  static constexpr unsigned reducing_threads = detail::direct::most_ranks; // one for each peer
  static constexpr unsigned moving_threads = 2;

  emulated_ranks& all_;
  const unsigned rank_;
};

} // namespace troupe::testing
