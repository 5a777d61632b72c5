/// worker_service: host memory that the parent shares.
#include "foundation/log.hpp"
#include "worker/child/service_errors.hpp"
#include "worker/child/worker_service.hpp"
#include "worker/protocol/protocol.hpp"
#include "worker/protocol/shared_memory.hpp"
#include <troupe/error.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace troupe::detail {

std::byte* worker_service::host_address(const shared_place& x, std::size_t size_bytes) {
  std::lock_guard lock{mutex_};
  auto i = segments_.find(x.segment);
  if (i == segments_.end())
    return nullptr;
  auto bytes = i->second.bytes();
  return x.offset <= bytes.size() && size_bytes <= bytes.size() - x.offset ? bytes.data() + x.offset
                                                                           : nullptr;
}

caf::error worker_service::map(const map_args& what, std::optional<file_descriptor> descriptor) {
  if (!descriptor)
    return make_error(
        errc::unavailable,
        "no file descriptor arrived with the memory; the worker may have reached its limit");
  {
    std::lock_guard lock{mutex_};
    if (segments_.contains(what.segment))
      return make_error(errc::invalid_argument, "the memory is mapped already");
  }
  auto memory = shared_memory::attach(std::move(*descriptor), what.size_bytes);
  if (!memory)
    return memory.error();
  memory->close_descriptor(); // descriptors are scarce
  if (auto error = device_->register_pinned(memory->bytes().data(), memory->bytes().size()))
    return error;
  std::lock_guard lock{mutex_};
  segments_.emplace(what.segment, std::move(*memory)); // no conflict: messages come one at a time
  return {};
}

caf::error worker_service::unmap(std::uint64_t segment) {
  std::shared_ptr<shared_memory> gone;
  {
    std::lock_guard lock{mutex_};
    auto i = segments_.find(segment);
    if (i == segments_.end())
      return no_such("host memory");
    gone = std::make_shared<shared_memory>(std::move(i->second));
    segments_.erase(i);
  }
  // Does not wait: it may take as long as the work in the streams.
  post_to_device([this, gone] {
    if (auto error = retire(gone))
      fault(error);
  });
  return {};
}

caf::error worker_service::retire(std::shared_ptr<shared_memory> memory) {
  auto& x = retired_.emplace_back(retired_segment{std::move(memory), {}});
  for (auto& [id, stream] : streams_) {
    auto event = device_->create_event();
    if (!event)
      return event.error();
    x.passed.push_back(*event);
    if (auto error = device_->record(*event, stream.native))
      return error;
  }
  free_retired();
  return {};
}

void worker_service::free_retired() noexcept {
  while (!retired_.empty()) {
    auto& x = retired_.front();
    for (auto& event : x.passed) {
      auto done = device_->query(event);
      if (!done)
        return fault(done.error());
      if (!*done)
        return;
    }
    for (auto& event : x.passed)
      if (auto error = device_->destroy_event(event))
        return fault(error);
    auto unregister = [this, memory = x.memory] {
      if (auto error = device_->unregister_pinned(memory->bytes().data()))
        log(log_level::warning, "host memory could not be unregistered", error);
    };
    if (run_job(unregister)) // on a job's thread: it may wait for the device
      unregister();
    retired_.pop_front();
  }
}

} // namespace troupe::detail
