/// The parent's end of one life of a worker on another host.
#pragma once

#include "hosts/frame_link.hpp"
#include "hosts/messages.hpp"
#include "hosts/segment_table.hpp"
#include "worker/shared_memory.hpp"
#include "worker/worker_link.hpp"

#include <atomic>
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

/// Stands in for the worker at an ordinary link: takes the commands out of its ring, as a worker
/// would, and writes into its area what the worker on the other host has done.
///
/// The content of host memory goes with what uses it: that of an upload before its command, or, if
/// its stream waits for the word of another worker before, when this process has seen that word;
/// that of a download comes back before the word that says that it is done. Host memory is unmapped
/// there when nothing waits for it any more.
class worker_relay : public std::enable_shared_from_this<worker_relay> {
public:
  /// @param ordinal of the device in this process
  /// @errors errc::out_of_memory; errc::unavailable: no more files can be opened
  static caf::expected<std::shared_ptr<worker_relay>>
  create(int ordinal, std::uint64_t channel, std::string host, std::shared_ptr<frame_link> to);
  /// After `end`.
  ~worker_relay();

  const std::shared_ptr<worker_link>& link() const noexcept { return link_; }
  /// The area, which workers may map.
  const shared_memory& memory() const noexcept { return *memory_; }

  /// The worker is there: passes on what comes from now on.
  /// @errors errc::unavailable: there is no thread
  caf::error begin() noexcept;
  /// The link is lost, if it is not yet; returns when nobody is told of it any more. Not on the
  /// connection's thread.
  void end(const caf::error& why) noexcept;

  /// What the worker sends. An error: the peer is out of order. @thread the connection's
  caf::error received(host_frame kind, std::span<const std::byte> body) noexcept;

private:
  struct remote_end;
  struct unmap_message {
    std::uint64_t segment = 0;
    std::vector<std::byte> bytes;
  };
  class sender;

  /// What an upload reads behind words that its stream waits for.
  struct content {
    shared_place from;
    std::uint64_t size_bytes = 0;
    std::size_t watches = 0; ///< that have to fire before
  };
  /// A word that a stream of the worker waits for, and what is used behind it.
  struct watch {
    std::shared_ptr<const shared_memory> keep;
    const std::atomic<std::uint64_t>* word = nullptr;
    word_args what;
    std::vector<std::shared_ptr<content>> contents;
  };
  using watch_numbers = std::vector<std::uint64_t>;

  worker_relay(int ordinal, std::string host, std::shared_ptr<shared_memory> memory,
               std::shared_ptr<remote_end> other);
  void run() noexcept;
  caf::error forward(const command_head& head, std::span<const std::byte> body);
  caf::error note_copy(const copy_args& x);
  void note_wait(const wait_word_args& x);
  caf::error send_content(const shared_place& from, std::uint64_t size_bytes);
  caf::error fire_watches();
  caf::error fire(const watch& x);
  caf::error send_unmaps();
  bool is_watched(std::uint64_t segment) const noexcept;
  /// The watches before what comes next in the stream; those that have fired are none.
  watch_numbers& behind(stream_id stream);

  caf::error take_reply(wire_reader& from);
  caf::error take_answer(std::span<const std::byte> message);
  caf::error take_done(wire_reader& from);
  /// What the worker says of its device, is said of it as this process knows it.
  caf::error as_here(const caf::error& x, const char* before = nullptr) const;

  const int ordinal_;
  const std::string host_;
  const std::shared_ptr<shared_memory> memory_;
  link_area& area_;
  const std::shared_ptr<remote_end> other_;
  std::shared_ptr<worker_link> link_;
  std::atomic<bool> stop_{false};

  // of the thread
  std::map<std::uint64_t, watch> watches_; ///< by number
  std::uint64_t last_watch_ = 0;
  std::unordered_map<stream_id, watch_numbers> behind_;
  std::unordered_map<std::uint64_t, watch_numbers> recorded_behind_; ///< by event
  std::vector<unmap_message> unmaps_;                                ///< which wait for watches

  std::thread thread_;
};

} // namespace troupe::detail
