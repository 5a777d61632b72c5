/// One rank of a communicator of the host backend.
#pragma once

#include "backend/host/host_transport.hpp"
#include <troupe/backend.hpp>

#include <cstdint>
#include <memory>

namespace troupe::detail {

class host_communicator final : public backend_communicator {
public:
  host_communicator(std::shared_ptr<host_transport> transport, int rank) noexcept;

  /// Ends the communicator for all ranks, unless this one has left it in good order.
  ~host_communicator() override;

  caf::error connect(stream_view stream, connect_scope what) noexcept override;
  caf::error enqueue(std::span<const collective_call> calls, stream_view stream,
                     step_position) noexcept override;
  caf::error asynchronous_error() noexcept override;

  int rank() const noexcept { return rank_; }
  host_transport& transport() const noexcept { return *transport_; }

private:
  /// Returns why a call is invalid; null if it is valid.
  const char* fault_of(const collective_call& x) const noexcept;

  std::shared_ptr<host_transport> transport_;
  int rank_;
  std::uint64_t next_ = 0; ///< sequence number of the next call
};

} // namespace troupe::detail
