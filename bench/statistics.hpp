/// Order statistics.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace bench {

/// Returns the element of `xs` below which a part `q` of it lies; 0 if it is empty.
inline double quantile(std::vector<double> xs, double q) {
  if (xs.empty())
    return 0;
  const auto n = xs.size();
  const auto i = std::min(n - 1, static_cast<std::size_t>(q * static_cast<double>(n)));
  const auto at = xs.begin() + static_cast<std::ptrdiff_t>(i);
  std::nth_element(xs.begin(), at, xs.end());
  return *at;
}

inline double median(const std::vector<double>& xs) { return quantile(xs, 0.5); }

} // namespace bench
