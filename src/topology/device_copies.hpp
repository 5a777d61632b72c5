/// Copies between buffers on the devices of a topology: over their links, or through pinned host
/// memory.
#pragma once

#include "topology/peer_operations.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

namespace troupe::detail {

class topology_core;

/// An ordered pair of devices of a topology, by their indices in it.
struct link_ends {
  std::size_t from;
  std::size_t to;
  friend auto operator<=>(const link_ends&, const link_ends&) = default;
};

/// The generations of two devices.
struct link_generations {
  std::uint64_t from = 0;
  std::uint64_t to = 0;
  friend bool operator==(const link_generations&, const link_generations&) = default;
};

/// The route of a copy.
enum class copy_route : std::uint8_t {
  pending, ///< not known yet
  push,    ///< the source's device writes
  pull,    ///< the target's device reads
  staged   ///< through pinned host memory
};

/// Returns the link that a copy uses.
inline link_ends link_of(const link_ends& ends, copy_route route) noexcept {
  return route == copy_route::pull ? link_ends{ends.to, ends.from} : ends;
}

/// One copy over a link.
class link_copy_operation final : public peer_copy_operation {
public:
  /// `by`: the lane of the device that issues the copy.
  link_copy_operation(std::shared_ptr<topology_core> topology, const link_ends& ends,
                      const link_generations& in, copy_route route, const any_gpu_ref& target,
                      const any_gpu_ref& source, lane& by);

  caf::error on_check(locked) const override;
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

protected:
  void on_success() noexcept override;
  void on_link_failed(const caf::error& why) noexcept override;

private:
  const std::shared_ptr<topology_core> topology_;
  const link_ends ends_;
  const link_generations in_;
  const copy_route route_;
};

/// Any number of copies between buffers on any devices of a topology.
class device_copies_operation final : public operation_of<nothing> {
public:
  struct piece {
    std::byte* target;
    const std::byte* source;
    std::size_t size;
  };
  /// All copies from one device to another, or within one device.
  struct peer_batch {
    link_ends ends;
    link_generations in;
    copy_route route;
    std::vector<any_gpu_ref> sources;
    std::vector<any_gpu_ref> targets; ///< one for each source

    bool local() const noexcept { return ends.from == ends.to; }
    /// Returns whether there is a part on the lane of each of the two devices.
    bool on_both() const noexcept {
      return !local() && (route == copy_route::pending || route == copy_route::staged);
    }
  };

  device_copies_operation(const char* verb, std::shared_ptr<topology_core> topology,
                          std::vector<peer_batch> batches);
  ~device_copies_operation() override;

  caf::error on_check(locked) const override;
  const void* waits_for(locked) const override;
  bool borrows_from(int device) const noexcept override;
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  caf::expected<issue_outcome> proceed(part& p, lane& on) override;
  void on_lost_part(part& p, const caf::error& why) noexcept override;
  void on_part_done(part& p) noexcept override;
  void on_part_over(part& p) noexcept override;
  caf::error on_failed_work(part& p, caf::error why) noexcept override;

protected:
  void on_submit(locked) override;
  void on_success() noexcept override;

private:
  struct batch_progress;

  batch_progress& progress_of(const part& p) const noexcept;
  void add_parts(batch_progress& x, std::size_t first);
  caf::expected<issue_outcome> copy_pieces(batch_progress& x, part& p, lane& on);
  caf::error copy_group(const batch_progress& x, std::span<const piece> group, lane& on,
                        stream_view stream) const;
  bool may_go_on(std::uint64_t life, const lane& on) const noexcept;
  caf::expected<issue_outcome> send(batch_progress& x, lane& on);
  caf::expected<issue_outcome> write_there(batch_progress& x, part& p, lane& on);
  caf::expected<issue_outcome> receive(batch_progress& x, part& p, lane& on);
  caf::expected<issue_outcome> read_there(batch_progress& x, part& p, lane& on, bool last);
  caf::expected<issue_outcome> keep_memory(batch_progress& x, part& p, lane& on);
  caf::error download_chunks(batch_progress& x, lane& on);
  caf::error upload_chunks(batch_progress& x, lane& on);
  caf::error count_uploaded(batch_progress& x, lane& on);

  const std::shared_ptr<topology_core> topology_;
  std::vector<std::unique_ptr<batch_progress>> progress_;
  std::vector<std::pair<batch_progress*, bool>> progress_of_parts_;
  std::vector<std::shared_ptr<device_state>> devices_; // the devices whose memory is used
};

} // namespace troupe::detail
