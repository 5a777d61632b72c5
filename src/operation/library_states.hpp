/// The states of libraries for one device, and the context of launches on it.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/launch.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace troupe::detail {

/// The states of the registered libraries for one device, and the workspaces of its streams.
/// @thread the one that issues the work of the device
class library_states {
public:
  /// Opens the device's memory and makes what the libraries keep. Work that they enqueue in
  /// `stream` is over when this returns. If it fails, the memory is closed and nothing is kept.
  /// @errors those of the device and of the libraries. After errc::device_fault the memory stays as
  ///         it is.
  caf::error open_memory(backend_device& on, int ordinal, stream_view stream);
  /// Drops what the libraries keep and closes the device's memory. No work is in flight.
  caf::error close_memory(backend_device& on) noexcept;
  /// Forgets all of it without a call to a driver.
  void abandon() noexcept;

  library_state* find(std::string_view name) const noexcept;
  /// As `launch_context::workspace`.
  caf::expected<void*> workspace(backend_device& on, stream_view stream, std::size_t size_bytes);
  /// Returns how often a workspace has got another address, or all of them have gone.
  std::uint64_t workspace_changes() const noexcept { return workspace_changes_; }

private:
  struct area {
    void* address = nullptr;
    std::size_t size_bytes = 0;
  };

  caf::error make(backend_device& on, int ordinal, stream_view stream);

  std::vector<std::pair<std::string, std::unique_ptr<library_state>>> states_;
  std::unordered_map<void*, area> workspaces_; ///< by stream
  std::uint64_t workspace_changes_ = 0;
};

/// The context of a launch on a device of this process. Derived classes run functions on the host.
class device_context : public launch_context {
public:
  /// @param verdict may be null
  device_context(backend_device& on, int ordinal, stream_view stream, library_states& libraries,
                 std::int32_t* verdict)
      : on_(on), ordinal_(ordinal), stream_(stream), libraries_(libraries), verdict_(verdict) {}

  int device() const noexcept override { return ordinal_; }
  CUstream_st* cuda_stream() const noexcept override {
    return on_.runs_cuda() ? static_cast<CUstream_st*>(stream_.native) : nullptr;
  }
  library_state* library(std::string_view name) const noexcept override {
    return libraries_.find(name);
  }
  caf::expected<void*> workspace(std::size_t size_bytes) override {
    return libraries_.workspace(on_, stream_, size_bytes);
  }
  std::int32_t* verdict() noexcept override { return verdict_; }

protected:
  backend_device& on() const noexcept { return on_; }
  stream_view stream() const noexcept { return stream_; }

private:
  backend_device& on_;
  const int ordinal_;
  const stream_view stream_;
  library_states& libraries_;
  std::int32_t* const verdict_;
};

/// The context in which a library makes what it keeps or prepares a launch.
class making_context : public device_context {
public:
  making_context(backend_device& on, int ordinal, stream_view stream, library_states& libraries)
      : device_context(on, ordinal, stream, libraries, nullptr) {}

  /// @errors errc::not_supported: no operation would wait until the function has run
  caf::error run_on_host(std::function<void()>) override;
};

/// The context of a launch that is recorded for its code to be loaded, and never runs.
class loading_context final : public making_context {
public:
  using making_context::making_context;

  /// Returns an address that is not used.
  caf::expected<void*> workspace(std::size_t) override;
};

} // namespace troupe::detail
