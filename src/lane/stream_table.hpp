/// The streams of a lane: which of them are made, and which one each part uses.
#pragma once

#include "operation/operation.hpp"
#include <troupe/backend.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

namespace troupe::detail {

/// The maximum number of streams of a lane for communicators. Work in one of them runs in admission
/// order, which is the same on all devices. So the first operation that is not over gets its turn
/// on each of its devices, if the device has room for as many kernels at once as there are streams.
/// NCCL's kernels take at most 32 of the 132 multiprocessors of a Hopper GPU, and fewer of smaller
/// devices. CUDA has 8 queues for streams (CUDA_DEVICE_MAX_CONNECTIONS); the other streams of every
/// lane take 4.
inline constexpr std::size_t collective_streams = 4;

/// The maximum number of streams of a lane for links; more links share them. Copies of a device to
/// several others share its copy engine. In several streams the engine does a bit of each in turn,
/// and all copies between 4 devices then take a third longer than in one stream
/// (docs/performance.md). So a long copy that has nothing to wait for joins the stream of another
/// link that is at work.
inline constexpr std::size_t peer_streams = 8;

/// The maximum number of streams of a lane for launches that overlap, with the compute stream.
inline constexpr std::size_t overlap_streams = 4;

/// A stream of a lane, and its parts.
struct lane_stream {
  stream_view stream;
  std::deque<part*> in_flight;
  part* continuing = nullptr;         // issued piece by piece; it has the stream for itself
  clock::time_point not_done_since{}; // of a queried event that is not the oldest
  // For a link's stream, since nothing was in flight there:
  std::uint64_t largest_bytes = 0;
  bool waits = false; // a part came that had to wait for others

  /// False for the place of parts in users' streams: they end in any order.
  bool is_ordered() const noexcept { return stream.native != nullptr; }
};

/// The places of a lane's streams, made or not, and that of its parts in users' streams. A
/// communicator, a link and the lends choose theirs when they have nothing in flight.
/// @thread the lane
class stream_table {
public:
  static constexpr auto stand_in = static_cast<std::size_t>(stream_kind::compute);
  static constexpr auto lend_stream = static_cast<std::size_t>(stream_kind::lend);
  static constexpr auto users_streams = static_cast<std::size_t>(stream_kind::user);
  static constexpr auto first_collective = static_cast<std::size_t>(stream_kind::collective);
  static constexpr auto first_peer = first_collective + collective_streams;
  static constexpr auto first_overlap = first_peer + peer_streams; // after the compute stream
  static_assert(lend_stream + 1 == users_streams && users_streams + 2 == first_collective &&
                first_collective + 2 == stream_count);

  stream_table() {
    forget_streams();
    for (std::size_t i = 1; i < overlap_streams; ++i)
      overlaps_[i].stream = first_overlap + i - 1;
    overlaps_[0].stream = stand_in;
  }

  /// Makes a stream if it is not made yet.
  caf::error make_stream(backend_device& device, std::size_t index);
  /// Makes streams for collectives until there are `number`, or as many as there may be.
  caf::error make_collective_streams(backend_device& device, std::size_t number);
  /// Makes a stream that most lanes do not need.
  caf::error make_late(backend_device& device, std::size_t index);
  bool is_made(std::size_t index) const noexcept {
    return streams_[index].stream.native != nullptr;
  }
  /// Forgets all streams: they are gone with the process that had them.
  void forget_streams() noexcept;

  /// Returns the place of the parts in users' streams, and the streams in the order in which they
  /// were made.
  std::span<lane_stream* const> made() const noexcept { return made_; }
  /// Returns how many parts in users' streams are in flight.
  std::size_t users_parts() const noexcept { return streams_[users_streams].in_flight.size(); }
  /// Returns the streams of all places, made or not.
  std::span<lane_stream> all() noexcept { return streams_; }
  std::span<const lane_stream> collective_range() const noexcept {
    return {streams_.data() + first_collective, collective_streams};
  }
  std::span<const lane_stream> peer_range() const noexcept {
    return {streams_.data() + first_peer, peer_streams};
  }

  /// Returns the streams for launches that overlap, made or not, the compute stream first.
  std::span<stream_tenant> overlaps() noexcept { return overlaps_; }
  /// Returns the communicator, link or lends that `p` belongs to, or the stream of a launch that
  /// overlaps; null if its stream is fixed, or not chosen yet.
  const stream_tenant* tenant_of(const part& p) const noexcept {
    return p.stream == stream_kind::peer   ? &links_[link_of(p.peer)]
           : p.stream == stream_kind::lend ? &lends_
                                           : p.tenant;
  }
  stream_tenant* tenant_of(const part& p) noexcept {
    return const_cast<stream_tenant*>(std::as_const(*this).tenant_of(p));
  }
  std::size_t index_of(const part& p) const noexcept {
    if (const auto* who = tenant_of(p))
      return who->stream;
    return p.stream == stream_kind::overlap ? stand_in : static_cast<std::size_t>(p.stream);
  }
  static std::size_t link_of(int peer) noexcept {
    return static_cast<std::size_t>(peer) % peer_streams;
  }
  lane_stream& stream_of(const part& p) noexcept { return streams_[index_of(p)]; }
  const lane_stream& stream_of(const part& p) const noexcept { return streams_[index_of(p)]; }
  const lane_stream& stream_of(const stream_tenant& who) const noexcept {
    return streams_[who.stream];
  }
  /// For kinds with one stream per lane.
  const lane_stream& stream_of(stream_kind kind) const noexcept {
    return streams_[static_cast<std::size_t>(kind)];
  }

  /// Returns the tenant's own stream while it has work there, else a free one. If none is free,
  /// returns one in which nothing is known to stand still.
  std::size_t choose_stream(const stream_tenant& who) const noexcept;
  /// Returns the stream of a link that has nothing in flight: its own, or that of another link at
  /// work if the copy is long, unless it would wait there for a longer one.
  std::size_t choose_peer_stream(const part& p) const noexcept;

private:
  void forget_late() noexcept;

  std::array<lane_stream, first_overlap + overlap_streams - 1> streams_;
  std::array<stream_tenant, peer_streams> links_; // all work in flight of one link is in one stream
  stream_tenant lends_;
  std::array<stream_tenant, overlap_streams> overlaps_;
  std::vector<lane_stream*> made_;   // of `streams_`; the others may be made later
  std::size_t collectives_made_ = 0; // how many streams for collectives are made
};

} // namespace troupe::detail
