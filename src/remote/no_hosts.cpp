#include "remote/host_pool.hpp"

namespace troupe {

namespace {

caf::error without_openssl() {
  return make_error(errc::not_supported,
                    "troupe was built without OpenSSL, which other hosts need");
}

} // namespace

namespace detail {

caf::expected<std::shared_ptr<worker_pool>> make_host_pool(worker_backend_options) {
  return without_openssl();
}

} // namespace detail

caf::error run_host_agent(host_agent_options) { return without_openssl(); }

} // namespace troupe
