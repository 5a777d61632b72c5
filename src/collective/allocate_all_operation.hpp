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

class buffer;
class symmetric_memory;

/// Allocates memory on every rank of a world.
class allocate_all_operation final : public operation_of<world_buffers> {
public:
  /// For all ranks not in `absent`. `symmetric`: the allocation that gets the pieces; null: plain
  /// memory.
  allocate_all_operation(const std::vector<std::shared_ptr<lane>>& lanes, rank_set absent,
                         dtype type, std::size_t count, bool zeroed,
                         std::shared_ptr<symmetric_memory> symmetric);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

private:
  caf::expected<std::shared_ptr<buffer>> allocate(const part& p, lane& on, std::size_t bytes);

  const dtype type_;
  const std::size_t count_;
  const bool zeroed_;
  const std::shared_ptr<symmetric_memory> symmetric_;
};

} // namespace troupe::detail
