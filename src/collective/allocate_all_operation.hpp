/// The operation that allocates memory on every rank of a world.
#pragma once

#include "foundation/rank_set.hpp"
#include "operation/operation.hpp"
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>
#include <troupe/nccl_world.hpp>

#include <cstddef>
#include <memory>
#include <vector>

namespace troupe::detail {

/// Allocates memory on every rank of a world.
class allocate_all_operation final : public operation_of<world_buffers> {
public:
  /// For all ranks not in `absent`.
  allocate_all_operation(const std::vector<std::shared_ptr<lane>>& lanes, rank_set absent,
                         dtype type, std::size_t count, bool zeroed);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

private:
  const dtype type_;
  const std::size_t count_;
  const bool zeroed_;
};

} // namespace troupe::detail
