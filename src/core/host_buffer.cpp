#include <troupe/host_buffer.hpp>

namespace troupe {

host_buffer::host_buffer(std::size_t size_bytes) : size_(size_bytes) {
  auto owner = std::make_shared<std::vector<std::byte>>(size_bytes);
  memory_ = {owner, owner->data()};
}

} // namespace troupe
