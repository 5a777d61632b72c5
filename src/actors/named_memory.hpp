/// The named buffers of programs, in the parent (`program_place::keep`).
#pragma once

#include "actors/program_note.hpp"
#include "operation/operation.hpp"
#include "world/world_core.hpp"
#include <troupe/gpu_ref.hpp>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace troupe::detail {

/// The named buffers of one world's ranks. Each lives until the world ends, or its device's memory.
/// @thread any
class named_memory : public std::enable_shared_from_this<named_memory> {
public:
  /// `send`: sends a reply to a rank's process.
  explicit named_memory(std::function<void(const program_note&)> send) : send_(std::move(send)) {}

  /// Handles a request (`program_note::kind::keep`) of a rank's process. Blocks.
  void keep(const std::shared_ptr<world_core>& core, program_note request);
  /// Gives all names up. Requests have no reply from now on.
  void end();

private:
  struct entry {
    any_gpu_ref memory;   ///< null: it is being allocated
    program_note request; ///< the last one, to be answered when it is allocated
  };
  using names = std::map<std::string, entry>;

  void allocate(const std::shared_ptr<world_core>& core, const program_note& request);
  void allocated(const std::shared_ptr<world_core>& core, const program_note& request,
                 const operation_of<any_gpu_ref>& how);

  const std::function<void(const program_note&)> send_;
  std::mutex mutex_;
  bool ended_ = false;
  std::map<std::size_t, names> all_; ///< by rank
};

} // namespace troupe::detail
