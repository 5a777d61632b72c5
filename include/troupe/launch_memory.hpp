/// Memory that a registered launch uses, as its address.
#pragma once

#include <troupe/dtype.hpp>

#include <cstddef>
#include <span>
#include <string_view>

namespace troupe {

/// Memory that a registered launch uses.
struct launch_memory {
  void* address = nullptr;
  std::size_t count = 0; ///< @units elements
  dtype type = dtype::uint8;

  std::size_t size_bytes() const noexcept { return count * size_of(type); }
  bool operator==(const launch_memory&) const = default;
};

/// A registered launch with its arguments. Valid only during the call that gets it.
struct registered_call {
  std::string_view name;
  std::span<const launch_memory> reads;
  std::span<const launch_memory> writes;
  std::span<const std::byte> arguments;
  void* verdict = nullptr; ///< as `launch_context::verdict`
};

} // namespace troupe
