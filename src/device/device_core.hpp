/// The requests to a device: each checks its arguments and starts an operation. For the facade and
/// the device actor.
#pragma once

#include "lane/staging.hpp"
#include "operation/operation.hpp"
#include "runtime/runtime.hpp"
#include <troupe/collective.hpp>
#include <troupe/device_status.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/host_buffer.hpp>
#include <troupe/launch.hpp>
#include <troupe/scalar.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::detail {

class device_core {
public:
  device_core(std::shared_ptr<runtime> runtime, std::shared_ptr<lane> worker,
              std::chrono::nanoseconds deadline)
      : runtime_(std::move(runtime)), worker_(std::move(worker)), deadline_(deadline) {}
  /// For a device that does not exist: every request is refused with `why`.
  explicit device_core(caf::error why) : deadline_(0), why_none_(std::move(why)) {}

  /// Returns null if there is no device.
  runtime* owner() const noexcept { return runtime_.get(); }
  /// Returns why there is no device; no error if there is one.
  const caf::error& why_none() const noexcept { return why_none_; }
  /// Returns the state of the device, which must exist.
  device_state& state() const noexcept { return worker_->state(); }
  const std::shared_ptr<device_state>& shared_state() const noexcept {
    return worker_->shared_state();
  }
  /// Returns whether the device, which must exist, is in another process.
  bool is_remote() const noexcept { return worker_->is_remote(); }
  /// Returns whether the streams of the device, which must exist, are CUDA's in this process. False
  /// for a GPU in another process.
  bool runs_cuda() const noexcept { return worker_->runs_cuda(); }

  template <class T> using answer = std::shared_ptr<operation_of<T>>;

  /// Returns the same device for requests that are added to `batch`, which the caller admits. A
  /// request that is refused is answered, and is not added. `batch` outlives the result.
  device_core into(operation_batch& batch) const;

  answer<any_gpu_ref> allocate(std::size_t count, dtype type, bool zeroed,
                               const request_options& options) const;
  answer<host_buffer> allocate_pinned(std::size_t size_bytes, const request_options& options) const;
  /// `host` has as many bytes as `target`.
  answer<nothing> upload(const any_gpu_ref& target, std::shared_ptr<host_range> host,
                         const request_options& options) const {
    return transfer_host(transfer::direction::upload, target, std::move(host), options);
  }
  answer<nothing> download(const any_gpu_ref& source, std::shared_ptr<host_range> host,
                           const request_options& options) const {
    return transfer_host(transfer::direction::download, source, std::move(host), options);
  }
  answer<nothing> fill(const any_gpu_ref& target, const scalar& element,
                       const request_options& options) const;
  answer<nothing> copy(const any_gpu_ref& target, const any_gpu_ref& source,
                       const request_options& options) const;
  answer<nothing> accept(const any_gpu_ref& ref, const request_options& options) const;
  answer<nothing> launch(launch_function function, const std::vector<any_gpu_ref>& reads,
                         const std::vector<any_gpu_ref>& writes,
                         const request_options& options) const;
  answer<nothing> launch(const std::string& name, std::span<const std::uint8_t> arguments,
                         const std::vector<any_gpu_ref>& reads,
                         const std::vector<any_gpu_ref>& writes,
                         const request_options& options) const;
  /// @errors errc::unavailable: the device is not ready
  caf::expected<any_gpu_ref> adopt(void* memory, std::size_t count, dtype type,
                                   std::function<void(void*)> deleter) const;
  /// The same for memory that may only be read.
  caf::expected<any_gpu_ref> adopt_read_only(void* memory, std::size_t count, dtype type,
                                             std::function<void(void*)> deleter) const;
  /// Completes when no earlier work uses the buffer, which the caller then holds.
  /// @errors errc::not_supported: the device is in another process
  answer<nothing> lend(const any_gpu_ref& ref, access_mode mode,
                       const request_options& options) const;
  answer<nothing> acquire(const any_gpu_ref& ref, access_mode mode, CUstream_st* user,
                          const request_options& options) const;
  answer<nothing> release(const any_gpu_ref& ref, access_mode mode, CUstream_st* user,
                          const request_options& options) const;
  caf::expected<gpu_token> offer(const any_gpu_ref& ref, std::chrono::nanoseconds grace) const;
  answer<any_gpu_ref> claim(const gpu_token& token, access_mode mode,
                            const request_options& options) const;
  answer<device_stats> stats(const request_options& options) const;
  answer<std::uint64_t> reset(const request_options& options) const;
  answer<std::uint64_t> hand_over(const request_options& options) const;
  answer<nothing> record_flight(const std::string& path, const request_options& options) const;
  void shut_down(const caf::error& why) const;

private:
  /// Returns an error if there is no device.
  caf::error check(const char* verb) const;
  caf::error check(const char* verb, const any_gpu_ref& ref) const;
  caf::error check(const char* verb, dtype type) const;
  caf::error check_launch(const char* verb, const std::vector<any_gpu_ref>& reads,
                          const std::vector<any_gpu_ref>& writes) const;
  caf::error in_verb(const char* verb, const caf::error& error) const;
  caf::error check_user(const char* verb, const any_gpu_ref& ref) const;
  /// Makes the buffer for adopted memory.
  using buffer_maker = std::function<std::shared_ptr<buffer>(device_state& home, std::size_t size)>;
  caf::expected<any_gpu_ref> adopt_as(void* memory, std::size_t count, dtype type,
                                      const buffer_maker& make) const;
  /// Returns the error that refuses a request to the device, which must exist.
  caf::error refuse(const char* verb, errc code, std::string detail) const;
  clock::time_point deadline_of(const request_options& options) const;
  void submit(const std::shared_ptr<operation>& op, const request_options& options) const;
  answer<nothing> transfer_host(transfer::direction way, const any_gpu_ref& ref,
                                std::shared_ptr<host_range> host,
                                const request_options& options) const;
  /// Starts an operation that is made of `x`, or refuses the request with `why`.
  template <class Operation, class... X>
  auto start(const char* verb, caf::error why, const request_options& options, X&&... x) const
      -> answer<decltype(Operation::value)>;
  /// The same for a request that may be made again after a loss.
  template <class Operation, class... X>
  answer<nothing> start_repeatable(const char* verb, caf::error why, const request_options& options,
                                   X&&... x) const;

  const std::shared_ptr<runtime> runtime_; // this and the lane are null if there is no device
  const std::shared_ptr<lane> worker_;
  const std::chrono::nanoseconds deadline_;
  const caf::error why_none_;
  operation_batch* batch_ = nullptr; // requests are added to it, and not started
};

} // namespace troupe::detail
