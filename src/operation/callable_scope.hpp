/// The operation whose callable runs on a thread.
#pragma once

#include "operation/operation.hpp"

#include <cstddef>

namespace troupe::detail {

/// Marks that a user's callable runs on this thread for the operation `of`. The callable may access
/// the ranges that `of` uses, even if a later operation that uses them failed.
class callable_scope {
public:
  explicit callable_scope(const operation& of) noexcept;
  ~callable_scope();
  callable_scope(const callable_scope&) = delete;
  callable_scope& operator=(const callable_scope&) = delete;

  /// Returns whether the operation of this thread's callable uses all of [begin, end).
  static bool covers(const buffer& memory, std::size_t begin, std::size_t end) noexcept;
};

} // namespace troupe::detail
