#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <memory>

namespace troupe {

caf::expected<std::shared_ptr<backend>> make_cuda_backend(const cuda_backend_options&) {
  return make_error(errc::not_supported, "troupe was built without CUDA");
}

} // namespace troupe
