/// A hook of `worker_main` for tests.
#pragma once

#include <troupe/backend.hpp>

#include <functional>
#include <memory>

namespace troupe::detail {

/// Lets `worker_main` use `f(backend)` in place of its backend.
void wrap_backend_of_worker(std::function<std::shared_ptr<backend>(std::shared_ptr<backend>)> f);

} // namespace troupe::detail
