#include "foundation/error_text.hpp"
#include <troupe/scalar.hpp>

#include <string>

namespace troupe {

caf::expected<scalar> scalar::from_bytes(dtype type, std::span<const std::byte> bytes) {
  if (!is_dtype(type))
    return make_error(errc::invalid_argument, detail::unknown_dtype(type));
  if (bytes.size() != size_of(type))
    return make_error(errc::shape_mismatch, std::to_string(bytes.size()) +
                                                " bytes are not one element of " +
                                                std::string{to_string(type)});
  scalar result;
  result.type_ = type;
  std::memcpy(&result.content_, bytes.data(), bytes.size());
  return result;
}

} // namespace troupe
