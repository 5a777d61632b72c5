/// Helpers for tests of a backend: devices that are ready, and gates in streams.
#pragma once

#include "support/expect.hpp"
#include <troupe/backend.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <latch>
#include <memory>
#include <vector>

namespace troupe::testing {

/// A device with its memory open and one stream.
struct opened_device {
  opened_device(backend& from, int ordinal) : device(must(from.open(ordinal))) {
    EXPECT_TRUE(is_ok(device->bind()));
    EXPECT_TRUE(is_ok(device->open_memory()));
    stream = must(device->create_stream());
    end = must(device->create_event());
  }

  /// Blocks until all work in the stream is done.
  void drain() {
    EXPECT_TRUE(is_ok(device->record(end, stream)));
    EXPECT_TRUE(is_ok(device->synchronize(end)));
  }

  backend_device* operator->() const { return device.get(); }

  std::unique_ptr<backend_device> device;
  stream_view stream;
  event_view end;
};

inline std::vector<opened_device> open_all(backend& from) {
  std::vector<opened_device> result;
  for (int i = 0; i < from.device_count(); ++i)
    result.emplace_back(from, i);
  return result;
}

/// Blocks a stream until open() is called.
class stream_gate {
public:
  void enqueue(opened_device& x) { enqueue(*x.device, x.stream); }
  void enqueue(backend_device& device, stream_view stream) {
    EXPECT_TRUE(is_ok(device.launch_host(
        stream,
        [](void* self) {
          auto& gate = *static_cast<stream_gate*>(self);
          gate.reached_.count_down();
          gate.open_.wait();
        },
        this)));
  }
  void wait_reached() { reached_.wait(); }
  void open() { open_.count_down(); }

private:
  std::latch reached_{1};
  std::latch open_{1};
};

/// Builds a communicator with ranks 0 to `size` - 1, where rank i is on device i.
inline communicator_ranks build_all(backend& from, int size) {
  std::vector<local_rank> ranks;
  for (int i = 0; i < size; ++i)
    ranks.push_back({i, i});
  const auto id = must(from.make_communicator_id());
  return must(from.build(id, size, ranks));
}

/// Enqueues one rank's part of an all-reduce.
inline caf::error all_reduce(backend_communicator& rank, const void* send, void* recv,
                             std::size_t count, dtype type, reduce_op op, stream_view stream) {
  const collective_call call{.send = send, .recv = recv, .count = count, .type = type, .op = op};
  return rank.enqueue({&call, 1}, stream);
}

} // namespace troupe::testing
