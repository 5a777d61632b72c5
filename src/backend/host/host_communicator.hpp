/// One rank of a communicator of the host backend.
#pragma once

#include "host_device.hpp"
#include "host_group.hpp"
#include <troupe/backend.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace troupe::detail {

class host_communicator final : public backend_communicator {
public:
  host_communicator(std::shared_ptr<host_group> group, int rank,
                    std::shared_ptr<host_machine> machine) noexcept;

  /// Ends the group for all ranks.
  ~host_communicator() override;

  caf::error connect(stream_view stream, connect_scope what) noexcept override;
  caf::error enqueue(std::span<const collective_call> calls, stream_view stream) noexcept override;
  caf::error register_window(void* memory, std::size_t size_bytes,
                             stream_view stream) noexcept override;
  caf::error deregister_window(void* memory) noexcept override;
  caf::error asynchronous_error() noexcept override;

  /// Deregisters what is left.
  void close_windows() noexcept;

  const std::shared_ptr<host_group>& group() const noexcept { return group_; }

private:
  /// Why the call cannot be right; null if it can.
  const char* fault_of(const collective_call& x) const noexcept;
  /// The call, with the places of a symmetric one; none if it is not in windows.
  std::optional<host_call> placed(const collective_call& x) const;

  std::shared_ptr<host_group> group_;
  int rank_;
  std::shared_ptr<host_machine> machine_;
  std::vector<const void*> windows_;
  std::uint64_t next_ = 0; ///< sequence number of the next call
};

} // namespace troupe::detail
