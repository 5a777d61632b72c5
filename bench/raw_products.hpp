/// Matrix products by cuBLASLt alone, for comparison.
#pragma once

#include <cstddef>
#include <memory>

namespace bench {

/// The types of a product: those of its factors, and of its result.
enum class product_kind { bfloat16, float8 };

/// Products of n x n matrices that are full of ones, one after the other in a stream.
class raw_products {
public:
  virtual ~raw_products() = default;
  /// Computes `count` products, of which `window` are in flight at a time. The completion of each
  /// is seen.
  virtual void run(std::size_t count, std::size_t window) = 0;
};

/// Ends the process if the first product is wrong.
std::unique_ptr<raw_products> make_raw_products(int device, std::size_t n, product_kind kind,
                                                std::size_t most_in_flight);

} // namespace bench
