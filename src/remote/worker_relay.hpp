/// The parent's side of one life of a worker on another host.
#pragma once

#include "net/frame_link.hpp"
#include "remote/messages.hpp"
#include "remote/segment_table.hpp"
#include "worker/parent/worker_link.hpp"
#include "worker/protocol/shared_memory.hpp"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace troupe::detail {

/// Takes the place of the worker at an ordinary link. Takes commands out of its ring, as a worker
/// would, and writes into its area what the worker on the other host has done.
///
/// The content of host memory is sent when it is used. The content of an upload is sent before its
/// command. If the upload's stream first waits for the word of another worker, the content is sent
/// when this process has seen that word. The content of a download comes back before the word that
/// reports it done. Host memory is unmapped on the other host when nothing waits for it any more.
class worker_relay : public std::enable_shared_from_this<worker_relay> {
public:
  /// @param ordinal the device's ordinal in this process
  /// @param request_limit how long a request waits for its answer; 0: no limit
  /// @errors errc::out_of_memory; errc::unavailable: no more files can be opened
  static caf::expected<std::shared_ptr<worker_relay>>
  create(int ordinal, std::uint64_t channel, std::string host, std::shared_ptr<frame_link> to,
         std::chrono::nanoseconds request_limit);
  /// Calls `end`.
  ~worker_relay();

  const std::shared_ptr<worker_link>& link() const noexcept { return link_; }
  /// Returns the memory of the area, which workers may map.
  const shared_memory& memory() const noexcept { return *memory_; }

  /// Starts to pass on commands; called once the worker has started.
  /// @errors errc::unavailable: no thread can be started
  caf::error begin() noexcept;
  /// Loses the link, if it is not lost yet. Blocks until all callbacks of the loss have returned.
  /// Not called on the connection's thread.
  void end(const caf::error& why) noexcept;

  /// Handles a frame of the worker. Returns an error if it breaks the protocol. @thread the
  /// connection's
  caf::error received(host_frame kind, std::span<const std::byte> body) noexcept;

private:
  struct unmap_message {
    std::uint64_t segment = 0;
    std::vector<std::byte> bytes;
  };
  class sender;

  /// Memory that an upload reads after its stream has waited for words.
  struct content {
    shared_place from;
    std::uint64_t size_bytes = 0;
    std::size_t watches = 0; ///< that must fire first
  };
  /// A word that a stream of the worker waits for, and the content that is sent then.
  struct watch {
    std::shared_ptr<const shared_memory> keep;
    const std::atomic<std::uint64_t>* word = nullptr;
    word_args what;
    std::vector<std::shared_ptr<content>> contents;
  };
  using watch_numbers = std::vector<std::uint64_t>;

  worker_relay(int ordinal, std::string host, std::shared_ptr<shared_memory> memory,
               link_area& area, std::unique_ptr<sender> other);
  void run() noexcept;
  caf::error forward(const command_head& head, std::span<const std::byte> body);
  caf::error note_copy(const copy_args& x);
  void note_wait(const wait_word_args& x);
  caf::error send_content(const shared_place& from, std::uint64_t size_bytes);
  caf::error fire_watches();
  caf::error send_unmaps();
  bool is_watched(std::uint64_t segment) const noexcept;
  /// Returns the watches before the next command of the stream, without those that have fired.
  watch_numbers& behind(stream_id stream);

  caf::error take_reply(wire_reader& from);
  caf::error take_answer(std::span<const std::byte> message);
  caf::error take_done(wire_reader& from);
  /// Returns an error of the worker with the device's ordinal in this process.
  caf::error as_here(const caf::error& x, const char* before = nullptr) const;

  const int ordinal_;
  const std::string host_;
  const std::shared_ptr<shared_memory> memory_;
  link_area& area_;
  sender& other_; ///< of the link
  const std::shared_ptr<worker_link> link_;
  std::atomic<bool> stop_{false};

  // used by the thread
  std::map<std::uint64_t, watch> watches_; ///< by number
  std::uint64_t last_watch_ = 0;
  std::unordered_map<stream_id, watch_numbers> behind_;
  std::unordered_map<std::uint64_t, watch_numbers> recorded_behind_; ///< by event
  std::vector<unmap_message> unmaps_;                                ///< that wait for watches

  std::thread thread_;
};

} // namespace troupe::detail
