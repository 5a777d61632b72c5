/// One rank of a communicator of the host backend.
#pragma once

#include "host_group.hpp"
#include <troupe/backend.hpp>

#include <cstdint>
#include <memory>

namespace troupe::detail {

class host_communicator final : public backend_communicator {
public:
  host_communicator(std::shared_ptr<host_group> group, int rank) noexcept;

  /// Ends the group for all ranks.
  ~host_communicator() override;

  caf::error connect(stream_view stream, connect_scope what) noexcept override;
  caf::error enqueue(std::span<const collective_call> calls, stream_view stream) noexcept override;
  caf::error asynchronous_error() noexcept override;

  const std::shared_ptr<host_group>& group() const noexcept { return group_; }

private:
  /// Why the call cannot be right; null if it can.
  const char* fault_of(const collective_call& x) const noexcept;

  std::shared_ptr<host_group> group_;
  int rank_;
  std::uint64_t next_ = 0; ///< sequence number of the next call
};

} // namespace troupe::detail
