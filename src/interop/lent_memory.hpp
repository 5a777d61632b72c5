/// Memory of a device that foreign code of this process uses: tensors and memory resources.
#pragma once

#include <troupe/device.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/launch.hpp>

#include <cstddef>
#include <memory>
#include <optional>

struct CUstream_st;

namespace troupe::detail {

/// A stream of CUDA that foreign code uses; none: the host waits instead.
using foreign_stream = std::optional<CUstream_st*>;

/// Returns an error if work of a lane cannot be ordered with `stream`.
/// @errors errc::not_supported: it is the default stream of each thread, which is another stream on
///         the lane's thread
caf::error check_stream(const foreign_stream& stream);

/// A hold on a buffer: conflicting requests, and resets of the device, are refused
/// (errc::buffer_acquired) until this object is destroyed. It keeps the memory, the device and the
/// actor system alive.
class lent_memory {
public:
  /// Blocks until all earlier work on the memory is over. The memory is given back behind the work
  /// that is then in `stream`.
  /// @errors those of `device::acquire`; errc::would_block
  static caf::expected<std::shared_ptr<lent_memory>> lend(const device& on, const any_gpu_ref& ref,
                                                          access_mode mode, foreign_stream stream,
                                                          request_options options);
  /// Holds memory that no request uses.
  static std::shared_ptr<lent_memory> take(const device& on, const any_gpu_ref& ref);

  lent_memory(device on, any_gpu_ref ref, access_mode mode, foreign_stream stream)
      : on_(std::move(on)), ref_(std::move(ref)), mode_(mode), stream_(stream) {}
  ~lent_memory();
  lent_memory(const lent_memory&) = delete;
  lent_memory& operator=(const lent_memory&) = delete;

  const any_gpu_ref& ref() const noexcept { return ref_; }
  /// Returns the address of the memory, whatever it contains.
  std::byte* address() const noexcept;

  /// Gives the memory back, once: later requests wait for the work that is in `stream` now.
  /// @errors errc::unavailable and others: the device has ended; errc::cuda_error: no event could
  ///         be recorded in `stream`, and the memory remains held
  caf::error give_back(foreign_stream stream) noexcept;

private:
  void note_granted() const noexcept;
  void give_back_now() const noexcept;

  const device on_; // destroyed last: it keeps the actor system
  const any_gpu_ref ref_;
  const access_mode mode_;
  const foreign_stream stream_;
  bool held_ = true;
};

} // namespace troupe::detail
