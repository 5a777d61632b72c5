/// The agent's side of one life of a worker: drives the worker as the parent's lane would.
#pragma once

#include "net/frame_link.hpp"
#include "remote/messages.hpp"
#include "remote/segment_table.hpp"
#include "remote/serial_thread.hpp"
#include "worker/parent/worker_link.hpp"
#include "worker/protocol/shared_memory.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace troupe::detail {

/// Takes the items for which `is_done` is true out of `all`, in the order of their start, while
/// more are finished. Asks from the last to the first: if items finish in order, no item stays that
/// was done before a taken one.
template <class T, class F> std::vector<T> take_done(std::vector<T>& all, F is_done) {
  std::vector<bool> done(all.size());
  for (auto i = all.size(); i-- > 0;)
    done[i] = is_done(all[i]);
  std::vector<T> result;
  if (std::find(done.begin(), done.end(), true) == done.end())
    return result;
  std::vector<T> open;
  for (std::size_t i = 0; i < all.size(); ++i)
    (done[i] ? result : open).push_back(std::move(all[i]));
  all.swap(open);
  return result;
}

class agent_worker {
public:
  /// No other object may write commands to `link`.
  agent_worker(std::uint64_t channel, int device, std::shared_ptr<worker_link> link,
               std::shared_ptr<frame_link> to);
  /// Gives up a worker that is in the middle of a command, without waiting for it. Not called on
  /// the connection's thread.
  ~agent_worker();
  agent_worker(const agent_worker&) = delete;
  agent_worker& operator=(const agent_worker&) = delete;

  int device() const noexcept { return device_; }
  const std::shared_ptr<worker_link>& link() const noexcept { return link_; }

  /// Starts to report the worker's loss to the parent.
  void begin();
  /// Handles a frame of the parent. Returns an error if it breaks the protocol. @thread the
  /// connection's
  caf::error received(host_frame kind, std::span<const std::byte> body);

private:
  /// Bytes in a segment that a copy to the host has written, once the copy is done.
  struct download {
    std::shared_ptr<const shared_memory> keep;
    shared_place from;
    std::uint64_t size_bytes = 0;
  };
  struct outstanding {
    done_event what;
    std::vector<download> downloads;
  };

  using job = void (agent_worker::*)(const std::vector<std::byte>& message);

  /// Queues a job: `to` calls `what` with the message.
  caf::error post(serial_thread& to, job what, std::span<const std::byte> body);
  void execute(const std::vector<std::byte>& frame);
  void record(const record_args& x);
  void ask(const command_head& head, std::span<const std::byte> body);
  void note_copy(const copy_args& x);
  void serve(const std::vector<std::byte>& message);
  /// Returns a function that sends the reply to a request. It may outlive this object.
  worker_link::reply_handler answerer_of(const control_head& head) const;
  worker_reply map(const map_args& what);
  caf::error take_word(const word_args& x);
  void watch(const std::stop_token& stop);
  /// Reports done events to the parent. Returns false if the connection is over.
  bool tell_done(std::vector<outstanding>& done);

  const std::uint64_t channel_;
  const int device_;
  const std::shared_ptr<worker_link> link_;
  const std::shared_ptr<frame_link> to_;

  segment_table segments_;

  // used by the thread that writes commands
  std::unordered_map<stream_id, std::vector<download>> downloads_; ///< not followed by a record yet

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<outstanding> outstanding_;

  std::atomic<std::size_t> queued_bytes_{0};
  serial_thread requests_;
  serial_thread commands_;
  std::jthread watcher_; // last: it uses the other members
};

} // namespace troupe::detail
