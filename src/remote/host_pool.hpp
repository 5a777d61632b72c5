/// Workers of this host and of others (troupe/worker.hpp).
#pragma once

#include "worker/parent/worker_pool.hpp"
#include <troupe/worker.hpp>

#include <memory>

namespace troupe::detail {

/// Listens, and blocks until all hosts have joined.
/// @errors see `make_worker_backend`
caf::expected<std::shared_ptr<worker_pool>> make_host_pool(worker_backend_options options);

} // namespace troupe::detail
