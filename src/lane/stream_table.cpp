#include "lane/stream_table.hpp"

#include "lane/lane.hpp"

#include <algorithm>

namespace troupe::detail {

namespace {

/// From this size on, copies to several devices go one behind the other. Smaller ones gain nothing.
constexpr std::uint64_t long_copy_bytes = 1 << 20;

} // namespace

caf::error stream_table::make_stream(backend_device& device, std::size_t index) {
  auto& s = streams_[index];
  if (s.stream.native != nullptr)
    return {};
  auto stream = device.create_stream();
  if (!stream)
    return stream.error();
  s.stream = *stream;
  made_.push_back(&s);
  return {};
}

caf::error stream_table::make_collective_streams(backend_device& device, std::size_t number) {
  for (; collectives_made_ < std::min(number, collective_streams); ++collectives_made_)
    if (auto error = make_stream(device, first_collective + collectives_made_); error)
      return error;
  return {};
}

caf::error stream_table::make_late(backend_device& device, std::size_t index) {
  // CUDA assigns its queues to streams in turn: make the streams of kernels first.
  if (auto error = make_collective_streams(device, collective_streams); error)
    return error;
  return make_stream(device, index);
}

void stream_table::forget_streams() noexcept {
  for (auto* s : made_) {
    s->stream = {};
    s->not_done_since = {};
  }
  made_.assign({&streams_[users_streams]});
  collectives_made_ = 0;
  forget_late();
}

/// Sets the stand-in stream for parts that are lost or cancelled before their stream is made. It
/// always exists, and is not the stream of allocations, which wait for nothing.
void stream_table::forget_late() noexcept {
  lends_.stream = stand_in;
  for (auto& x : links_)
    x.stream = stand_in;
}

std::size_t stream_table::choose_stream(const stream_tenant& who) const noexcept {
  auto is_free = [](const lane_stream& s) {
    return s.stream.native != nullptr && s.in_flight.empty() && !s.continuing;
  };
  if (who.in_flight != 0 || is_free(streams_[who.stream]))
    return who.stream;
  auto best = // its own may be of an earlier generation
      streams_[who.stream].stream.native != nullptr ? who.stream : first_collective;
  std::size_t least = SIZE_MAX;
  for (auto i = first_collective; i < first_collective + collectives_made_; ++i) {
    auto& s = streams_[i];
    if (is_free(s))
      return i;
    if (!s.continuing && !s.in_flight.back()->of->failed() && s.in_flight.size() < least) {
      best = i;
      least = s.in_flight.size();
    }
  }
  return best;
}

std::size_t stream_table::choose_peer_stream(const part& p) const noexcept {
  const auto index = first_peer + link_of(p.peer);
  const auto size = p.of->size_bytes();
  if (size < long_copy_bytes || !streams_[index].in_flight.empty() || !lane::nothing_before(p))
    return index;
  auto all = peer_range();
  auto at_work = std::find_if(all.begin(), all.end(), [&](const lane_stream& s) {
    return !s.in_flight.empty() && s.continuing == nullptr && !s.waits && s.largest_bytes <= size &&
           s.largest_bytes >= long_copy_bytes;
  });
  return at_work == all.end() ? index
                              : first_peer + static_cast<std::size_t>(at_work - all.begin());
}

} // namespace troupe::detail
