/// Matrix products on the host.
#pragma once

#include "compute/blas/arguments.hpp"

#include <functional>

namespace troupe::blas {

/// Returns a function that computes the product of memory that the host can read and write.
std::function<void()> host_product(const product& x, const product_memory& memory);

} // namespace troupe::blas
