/// Helpers for tests of NCCL's communicators: devices with memory, and one thread for each rank.
#pragma once

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/nccl_communicator.hpp"
#include "backend/cuda/nccl_group.hpp"
#include "support/expect.hpp"
#include "support/gpus.hpp"
#include "support/reference.hpp"
#include <troupe/backend.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

namespace troupe::testing {

inline constexpr std::size_t mib = std::size_t{1} << 20;

/// Calls `f(i)` on a separate thread for each i below n. Rethrows the first exception.
inline void on_threads(int n, const std::function<void(int)>& f) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i)
    threads.emplace_back([&, i] {
      try {
        f(i);
      } catch (...) {
        const std::lock_guard lock{mutex};
        if (!first)
          first = std::current_exception();
      }
    });
  for (auto& x : threads)
    x.join();
  if (first)
    std::rethrow_exception(first);
}

/// A device with two buffers, and pinned memory of the same size.
struct nccl_member {
  static constexpr std::size_t buffer_bytes = 66 * mib;

  std::unique_ptr<backend_device> device;
  stream_view stream;
  event_view event;
  void* send = nullptr;
  void* recv = nullptr;
  std::byte* pinned = nullptr;

  void open(backend& cuda, int ordinal, bool beside = false) {
    device = must(beside ? cuda.open_beside(ordinal) : cuda.open(ordinal));
    must(device->bind());
    must(device->open_memory());
    stream = must(device->create_stream());
    event = must(device->create_event());
    send = must(device->allocate(buffer_bytes, stream));
    recv = must(device->allocate(buffer_bytes, stream));
    pinned = static_cast<std::byte*>(must(device->allocate_pinned(buffer_bytes)));
    finish();
  }

  void close() {
    EXPECT_TRUE(is_ok(device->deallocate_pinned(pinned)));
    EXPECT_TRUE(is_ok(device->destroy_event(event)));
    EXPECT_TRUE(is_ok(device->destroy_stream(stream)));
    EXPECT_TRUE(is_ok(device->close_memory()));
  }

  /// Waits for the stream.
  void finish() {
    must(device->record(event, stream));
    wait_for(event);
  }

  /// Waits with a limit: a failed rank may leave the others blocked.
  void wait_for(event_view what) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds{20};
    while (!must(device->query(what))) {
      if (std::chrono::steady_clock::now() > limit)
        throw std::runtime_error("the stream stands still");
      std::this_thread::yield();
    }
  }

  void write(void* target, std::span<const std::byte> source) {
    if (source.empty())
      return;
    std::memcpy(pinned, source.data(), source.size());
    must(device->copy(target, pinned, source.size(), copy_direction::host_to_device, stream));
    finish();
  }

  std::vector<std::byte> read(const void* source, std::size_t size) {
    if (size > 0) {
      std::memset(pinned, 0x5a, size);
      must(device->copy(pinned, source, size, copy_direction::device_to_host, stream));
    }
    finish();
    return {pinned, pinned + size};
  }
};

/// Runs one rank's call of a collective. Checks every element that it receives, some elements
/// behind them, and that its input stays as it is.
/// @shape shared: in place where possible; send_off, recv_off: offsets in the member's buffers
/// @units bytes
inline check_result run_checked(nccl_member& self, backend_communicator& communicator,
                                const collective_spec& x, int rank,
                                const std::vector<std::vector<std::byte>>& sends, bool shared,
                                std::size_t send_off = 0, std::size_t recv_off = 0) {
  constexpr std::size_t behind = 4;
  must(self.device->bind());
  const auto placed = shared ? in_place(x, rank) : std::nullopt;
  const auto unit = size_of(x.type);
  const auto& input = sends[static_cast<std::size_t>(rank)];
  const auto received = recv_count(x, rank) * unit;
  auto* send = input.empty() ? nullptr : static_cast<std::byte*>(self.send) + send_off;
  auto* recv = static_cast<std::byte*>(self.recv) + recv_off;
  if (placed) {
    send = recv + placed->send_at * unit;
    recv = recv + placed->recv_at * unit;
  }
  std::vector<std::byte> before(received + behind * unit);
  poison(before);
  self.write(recv, before);
  self.write(send, input);
  if (placed)
    before = self.read(recv, before.size());
  auto mine = x;
  const auto call = call_of(mine, rank, send, received == 0 ? nullptr : recv);
  must(communicator.enqueue({&call, 1}, self.stream));
  poison(mine.factors); // not read after the call
  mine.plans.assign(mine.plans.size(), {});
  const auto after = self.read(recv, before.size());
  if (!placed && !input.empty() && self.read(send, input.size()) != input)
    throw std::runtime_error("the input has changed");
  return check_collective(x, rank, sends, before, after);
}

/// All GPUs, at most 8, with one member on each.
class NcclFixture : public ::testing::Test {
protected:
  void SetUp() override {
    TROUPE_NEEDS_GPUS(1);
    before_ = detail::teardown_errors();
    cuda_ = must(make_cuda_backend());
    size_ = std::min(cuda_->device_count(), 8);
    members_.resize(static_cast<std::size_t>(size_));
    on_threads(size_, [this](int i) { at(i).open(*cuda_, i); });
    float8_ = must(at(0).device->properties()).capability_major >= 9;
  }

  void TearDown() override {
    if (!cuda_)
      return;
    for (auto& x : members_)
      if (x.device)
        x.close();
    EXPECT_EQ(detail::teardown_errors(), before_);
    EXPECT_EQ(detail::group_count::open(), 0u);
  }

  /// Returns the member of a device.
  nccl_member& at(int device) { return members_[static_cast<std::size_t>(device)]; }

  std::shared_ptr<backend> cuda_;
  std::vector<nccl_member> members_;
  int size_ = 0;
  bool float8_ = false;
  std::uint64_t before_ = 0;
};

} // namespace troupe::testing
