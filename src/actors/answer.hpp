/// The `pending` that facades return for an operation.
#pragma once

#include "operation/operation.hpp"
#include <troupe/pending.hpp>

#include <memory>
#include <utility>

namespace troupe::detail {

template <class T> pending<T> answer(std::shared_ptr<operation_of<T>> op) {
  std::shared_ptr<T> value{op, &op->value};
  return {std::move(op), std::move(value)};
}

inline pending<void> answer(std::shared_ptr<operation_of<nothing>> op) {
  return {std::move(op), nullptr};
}

} // namespace troupe::detail
