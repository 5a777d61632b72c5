#include "remote/segment_table.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace troupe::detail {

std::shared_ptr<const shared_memory> segment_table::add(std::uint64_t number,
                                                        shared_memory memory) {
  auto result = std::make_shared<const shared_memory>(std::move(memory));
  std::lock_guard lock{mutex_};
  all_.insert_or_assign(number, result);
  return result;
}

void segment_table::remove(std::uint64_t number) {
  std::lock_guard lock{mutex_};
  all_.erase(number);
}

std::shared_ptr<const shared_memory> segment_table::find(std::uint64_t number) const {
  std::lock_guard lock{mutex_};
  auto i = all_.find(number);
  return i != all_.end() ? i->second : nullptr;
}

bool segment_table::take_content(std::span<const std::byte> body) const {
  wire_reader reader{body};
  const auto place = reader.get<shared_place>();
  if (!reader.ok())
    return false;
  const auto segment = find(place.segment);
  if (!segment)
    return true;
  const auto bytes = reader.rest();
  const auto to = part_of(*segment, place, bytes.size());
  if (to.size() != bytes.size())
    return false;
  if (!bytes.empty())
    std::memcpy(to.data(), bytes.data(), bytes.size());
  return true;
}

std::span<std::byte> part_of(const shared_memory& segment, const shared_place& x,
                             std::size_t size_bytes) noexcept {
  const auto bytes = segment.bytes();
  if (x.offset > bytes.size() || size_bytes > bytes.size() - x.offset)
    return {};
  return bytes.subspan(x.offset, size_bytes);
}

caf::error send_content(frame_link& to, std::uint64_t channel, const shared_memory& segment,
                        shared_place from, std::size_t size_bytes) {
  for (auto bytes = part_of(segment, from, size_bytes); !bytes.empty();) {
    const auto piece = bytes.first(std::min(bytes.size(), content_bytes));
    if (auto error = to.send(number(host_frame::content), channel, {bytes_of(from), piece},
                             frame_link::patience::room))
      return error;
    from.offset += piece.size();
    bytes = bytes.subspan(piece.size());
  }
  return {};
}

} // namespace troupe::detail
