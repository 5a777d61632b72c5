/// Collectives and messages of one rank over host memory, in chunks through device memory.
#pragma once

#include "device/device_core.hpp"
#include "mesh/mesh_calls.hpp"
#include "world/world_core.hpp"
#include <troupe/detail/completion.hpp>
#include <troupe/host_buffer.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace troupe::detail {

/// The caller's host memory: a span, or an owner. Copies access an owner directly if it is pinned.
struct host_side {
  std::span<std::byte> memory;
  host_buffer owner;

  bool direct() const noexcept { return owner.pinned(); }
};

class mesh_channel;

/// One rank's call.
class mesh_request final : public completion {
public:
  mesh_spec spec;
  host_side send; ///< empty: this rank sends nothing
  host_side recv; ///< empty: this rank receives nothing
  clock::time_point deadline = clock::time_point::max();
  std::uint64_t membership = 0;

  void cancel() noexcept override;
  failure describe(errc code, std::string detail) const;

private:
  friend class mesh_channel;
  std::weak_ptr<mesh_channel> on_;
  std::uint64_t timer_ = 0;
  // under the channel's lock
  caf::error stopped_;                // why it was stopped before its turn
  std::shared_ptr<joint_call> joint_; // from its turn on
};

struct mesh_buffering {
  std::size_t chunk_bytes = 0;
  std::size_t chunks = 0;
};

/// Runs the calls of one rank, one after the other. Has two threads: one copies pageable memory in
/// and requests the work, the other waits for it and copies out. So a chunk is copied in, uploaded,
/// worked on, downloaded and copied out while other chunks are in other steps. A chunk is one
/// operation of the world, which the last rank requests when all have reached the chunk. So it runs
/// for all ranks or for none. Buffers are kept between calls, except after a call that failed here:
/// a device may still use them.
class mesh_channel : public std::enable_shared_from_this<mesh_channel> {
public:
  mesh_channel(const std::shared_ptr<world_core>& world, int rank,
               std::shared_ptr<mesh_calls> calls, mesh_buffering buffering);
  ~mesh_channel();

  /// @thread any
  void post(const std::shared_ptr<mesh_request>& x);
  /// Ends `x` early, in any state, and with it the other ranks' calls.
  void stop(mesh_request& x, const caf::error& why);
  /// Answers all calls and ends the threads.
  void close();

private:
  /// Chunks of a call: each has elements `first` to `first + size` of each block of `count`.
  struct layout {
    std::size_t blocks_in = 1;  ///< number of blocks in `send`
    std::size_t blocks_out = 1; ///< number of blocks in `recv`
    std::size_t element = 1;    ///< bytes of an element
    std::size_t count = 0;      ///< elements of a block
    std::size_t step = 1;       ///< elements of a block in a chunk
    std::size_t chunks = 1;
    std::size_t blocks() const noexcept { return std::max(blocks_in, blocks_out); }
  };

  using work_of_all = std::shared_ptr<operation_of<collective_done>>;

  struct chunk {
    std::size_t number = 0;
    std::size_t first = 0; // elements
    std::size_t size = 0;
    work_of_all work; // none until all ranks have reached the chunk
    std::vector<std::shared_ptr<operation_of<nothing>>> moves;
  };

  struct slot {
    any_gpu_ref memory;
    host_buffer in;
    host_buffer out;
  };

  /// A copy from the device to host memory after a chunk.
  struct download {
    any_gpu_ref source;
    host_buffer target;
  };

  void run_in();
  void run_out();
  void take_turn(const std::shared_ptr<mesh_request>& x);
  void carry_out(const std::shared_ptr<mesh_request>& x);
  caf::error move_chunks(const std::shared_ptr<mesh_request>& x, const layout& how);
  caf::error prepare(mesh_request& x);
  caf::error begin(const std::shared_ptr<mesh_request>& x, const layout& how, chunk& c);
  caf::error begin_for_all(const mesh_spec& spec, const std::vector<chunk_side>& sides);
  void on_begin(mesh_request& x, std::size_t number, const work_of_all& work,
                const std::vector<download>& downloads);
  caf::error end(mesh_request& x, const layout& how, chunk& c);
  void expire(mesh_request& x);
  void abandon(mesh_request& x, const caf::error& why);
  bool begin_copy();
  void end_copy(mesh_request& x);
  bool wait_for_room();

  layout layout_of(const mesh_spec& x) const;
  slot& slot_of(const chunk& c) noexcept { return slots_[c.number % slots_.size()]; }
  any_gpu_ref part_of(const chunk& c, const layout& how, dtype type, std::size_t block,
                      std::size_t blocks);
  request_options options_of(const mesh_request& x) const;

  const std::shared_ptr<world_core> world_;
  const int rank_;
  const std::shared_ptr<mesh_calls> calls_;
  const mesh_buffering buffering_;
  const device_core device_;

  std::mutex mutex_;
  std::condition_variable condition_;
  std::deque<std::shared_ptr<mesh_request>> queue_;
  std::shared_ptr<mesh_request> running_;
  std::vector<std::shared_ptr<mesh_request>> finished_; // on this rank; some wait for other ranks
  bool closed_ = false;
  // of the running call
  caf::error run_error_;
  const layout* run_layout_ = nullptr;
  std::deque<chunk*> handed_; // to the thread that copies out, until it has done so
  int copying_ = 0;           // threads that access the caller's memory

  // used by the first thread
  std::vector<slot> slots_;
  std::vector<chunk> ring_; // under mutex_ where other threads read it

  std::thread in_;
  std::thread out_;
};

} // namespace troupe::detail
