#include <troupe/host_buffer.hpp>

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

} // namespace troupe
