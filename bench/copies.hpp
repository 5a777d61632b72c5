/// Copies between devices as contestants.
#pragma once

#include "contestant.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace bench {

/// From one device to another one, by their ordinals.
struct route {
  int from = 0;
  int to = 0;
  friend bool operator==(const route&, const route&) = default;
};

/// All ordered pairs of `devices`, so that those that follow each other end at different devices.
std::vector<route> routes_between(const std::vector<int>& devices);

/// Device memory at both ends of a route.
struct route_memory {
  route way;
  std::shared_ptr<void> source;
  std::shared_ptr<void> target;
};

/// One way to copy over some routes at once. An operation is a copy over each of them; the k-th of
/// those that are in flight has a part of its own of each buffer.
class copying_contestant : public contestant {
public:
  virtual std::size_t routes() const = 0;

  /// Host memory into the source of a route, and its target into host memory. Both block.
  /// @units offset: bytes
  /// @thread any; one for each route at the same time
  virtual void write(std::size_t route, std::size_t offset, std::span<const std::byte> bytes) = 0;
  virtual void read(std::size_t route, std::size_t offset, std::span<std::byte> bytes) = 0;

  /// Compares every byte of every route. The contents are other ones each time.
  void verify(std::size_t size_bytes, std::size_t window) final;
};

} // namespace bench
