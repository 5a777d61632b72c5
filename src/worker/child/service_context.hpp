/// The context of a registered launch in a worker.
#pragma once

#include "operation/launch_call.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>
#include <troupe/launch.hpp>

#include <functional>
#include <memory>
#include <utility>

namespace troupe::detail {

/// Lets a launch use the device and its stream. `on_fault` is called if a function that the launch
/// runs on the host throws.
class service_context final : public launch_context {
public:
  service_context(backend_device& on, int ordinal, stream_view stream,
                  const std::function<void(const caf::error&)>& on_fault)
      : on_(on), ordinal_(ordinal), stream_(stream), on_fault_(on_fault) {}

  int device() const noexcept override { return ordinal_; }
  CUstream_st* cuda_stream() const noexcept override {
    return on_.runs_cuda() ? static_cast<CUstream_st*>(stream_.native) : nullptr;
  }
  caf::error run_on_host(std::function<void()> f) override {
    auto kept = std::make_unique<host_call>(std::move(f), on_fault_);
    auto error = on_.launch_host(
        stream_,
        [](void* x) {
          const std::unique_ptr<host_call> mine{static_cast<host_call*>(x)};
          // The launch was already answered. A fault keeps readers from the incomplete result.
          if (auto thrown = call_launch([&] { return mine->function(), caf::error{}; }))
            mine->on_fault(thrown);
        },
        kept.get());
    if (!error)
      // The stream owns it. After a fault it ends with the process.
      static_cast<void>(kept.release());
    return error;
  }

private:
  struct host_call {
    host_call(std::function<void()> f, const std::function<void(const caf::error&)>& fault)
        : function(std::move(f)), on_fault(fault) {}
    std::function<void()> function;
    std::function<void(const caf::error&)> on_fault;
  };

  backend_device& on_;
  int ordinal_;
  stream_view stream_;
  const std::function<void(const caf::error&)>& on_fault_;
};

} // namespace troupe::detail
