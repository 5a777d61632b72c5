#include <troupe/host_buffer.hpp>

#include <algorithm>
#include <string>
#include <utility>

namespace troupe {

host_buffer::host_buffer(std::size_t size_bytes) : size_(size_bytes) {
  auto owner = std::make_shared<std::vector<std::byte>>(size_bytes);
  memory_ = {owner, owner->data()};
}

caf::expected<host_buffer> host_buffer::slice(std::size_t offset, std::size_t size_bytes) const {
  if (offset > size_ || size_bytes > size_ - offset)
    return make_error(errc::out_of_range, std::to_string(size_bytes) + " bytes from byte " +
                                              std::to_string(offset) + " on; there are " +
                                              std::to_string(size_));
  std::shared_ptr<std::byte> part{memory_, memory_.get() + offset};
  return host_buffer{std::move(part), size_bytes, pinned_};
}

caf::expected<std::vector<host_buffer>> host_buffer::split(std::size_t parts) const {
  if (parts == 0 || size_ % parts != 0)
    return make_error(errc::shape_mismatch, std::to_string(size_) + " bytes cannot be split into " +
                                                std::to_string(parts) + " equal parts");
  std::vector<host_buffer> result;
  for (std::size_t k = 0; k < parts; ++k)
    result.push_back(*slice(k * (size_ / parts), size_ / parts));
  return result;
}

host_buffer concatenate(std::span<const host_buffer> parts) {
  std::size_t size = 0;
  for (auto& x : parts)
    size += x.size_bytes();
  host_buffer result{size};
  auto to = result.writable().begin();
  for (auto& x : parts)
    to = std::ranges::copy(x.bytes(), to).out;
  return result;
}

} // namespace troupe
