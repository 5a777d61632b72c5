/// Copies between devices as contestants.
#pragma once

#include "contestant.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace bench {

/// A pair of device ordinals.
struct route {
  int from = 0;
  int to = 0;
  friend bool operator==(const route&, const route&) = default;
};

/// Returns all ordered pairs of `devices`. Neighbors in the result have different targets.
std::vector<route> routes_between(const std::vector<int>& devices);

/// Device memory at both ends of a route.
struct route_memory {
  route way;
  std::shared_ptr<void> source;
  std::shared_ptr<void> target;
};

/// One way to copy over several routes at once.
/// An operation is a copy over each route. The k-th operation in flight uses its own part of each
/// buffer.
class copying_contestant : public contestant {
public:
  virtual std::size_t routes() const = 0;

  /// Copies host memory to the source of a route (`write`), or its target to host memory (`read`).
  /// Blocks.
  /// @units offset: bytes
  /// @thread any; one per route at the same time
  virtual void write(std::size_t route, std::size_t offset, std::span<const std::byte> bytes) = 0;
  virtual void read(std::size_t route, std::size_t offset, std::span<std::byte> bytes) = 0;

  /// Compares every byte of every route. Each call uses new contents.
  void verify(std::size_t size_bytes, std::size_t window) final;
};

} // namespace bench
