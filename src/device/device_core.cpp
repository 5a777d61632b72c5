#include "device/device_core.hpp"

#include "device/operations.hpp"
#include "flight/flight_recorder.hpp" // for recorder()
#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include "operation/admission_lock.hpp"
#include "operation/foreign_handle.hpp"
#include "operation/use_of.hpp"
#include "sharing/memory_exchange.hpp" // for memory()

#include <string>
#include <utility>

namespace troupe::detail {

namespace {

caf::error check_type(const char* verb, int device, dtype type) {
  return is_dtype(type) ? caf::error{}
                        : refusal(verb, device, errc::invalid_argument, unknown_dtype(type));
}

} // namespace

clock::time_point device_core::deadline_of(const request_options& options) const {
  return from_now(options.deadline.count() != 0 ? options.deadline : deadline_);
}

template <class Operation>
std::shared_ptr<Operation> device_core::start(std::shared_ptr<Operation> op,
                                              const request_options& options) const {
  op->deadline = deadline_of(options);
  op->parts()[0].on = worker_.get();
  runtime_->start(op, options);
  return op;
}

caf::error device_core::check(const char* verb) const {
  if (!why_none_)
    return {};
  auto why = failure_of(why_none_).value_or(failure{});
  why.verb = verb;
  return make_error(std::move(why));
}

caf::error device_core::check(const char* verb, const any_gpu_ref& ref) const {
  if (auto error = check(verb); error)
    return error;
  if (!ref)
    return refusal(verb, state().ordinal(), errc::stale_ref, "the handle has no memory");
  if (&ref.memory()->home() != &state())
    return refusal(verb, state().ordinal(), errc::invalid_argument,
                   is_foreign(ref, state())
                       ? foreign_handle
                       : "the buffer lies on device " + std::to_string(ref.device()) +
                             ", not on device " + std::to_string(state().ordinal()));
  return {};
}

caf::error device_core::check(const char* verb, const std::vector<any_gpu_ref>& refs) const {
  if (auto error = check(verb); error)
    return error;
  for (auto& ref : refs)
    if (auto error = check(verb, ref); error)
      return error;
  return {};
}

device_core::answer<any_gpu_ref> device_core::allocate(std::size_t count, dtype type, bool zeroed,
                                                       const request_options& options) const {
  if (auto error = check("allocate"); error)
    return refused_operation<any_gpu_ref>("allocate", std::move(error));
  if (auto error = check_type("allocate", state().ordinal(), type); error)
    return refused_operation<any_gpu_ref>("allocate", std::move(error));
  if (count > SIZE_MAX / size_of(type))
    return refused_operation<any_gpu_ref>(
        "allocate",
        refusal("allocate", state().ordinal(), errc::out_of_memory, size_overflows(count, type)));
  return start(std::make_shared<allocate_operation>(count, type, zeroed), options);
}

device_core::answer<host_buffer>
device_core::allocate_pinned(std::size_t size_bytes, const request_options& options) const {
  if (auto error = check("allocate_pinned"); error)
    return refused_operation<host_buffer>("allocate_pinned", std::move(error));
  return start(std::make_shared<pinned_operation>(size_bytes), options);
}

device_core::answer<nothing> device_core::upload(const any_gpu_ref& target,
                                                 std::shared_ptr<host_range> host,
                                                 const request_options& options) const {
  if (auto error = check("upload", target); error)
    return refused_operation<nothing>("upload", std::move(error));
  if (host->size() != target.size_bytes())
    return refused_operation<nothing>(
        "upload",
        refusal("upload", state().ordinal(),
                host->size() > target.size_bytes() ? errc::out_of_range : errc::shape_mismatch,
                std::to_string(host->size()) + " bytes for a buffer of " +
                    std::to_string(target.size_bytes())));
  return start(
      std::make_shared<transfer_operation>(transfer::direction::upload, target, std::move(host)),
      options);
}

device_core::answer<nothing> device_core::download(const any_gpu_ref& source,
                                                   std::shared_ptr<host_range> host,
                                                   const request_options& options) const {
  if (auto error = check("download", source); error)
    return refused_operation<nothing>("download", std::move(error));
  if (host->size() != source.size_bytes())
    return refused_operation<nothing>(
        "download",
        refusal("download", state().ordinal(),
                host->size() > source.size_bytes() ? errc::out_of_range : errc::shape_mismatch,
                "a buffer of " + std::to_string(source.size_bytes()) + " bytes into " +
                    std::to_string(host->size())));
  return start(
      std::make_shared<transfer_operation>(transfer::direction::download, source, std::move(host)),
      options);
}

device_core::answer<nothing> device_core::fill(const any_gpu_ref& target,
                                               std::vector<std::byte> element,
                                               const request_options& options) const {
  if (auto error = check("fill", target); error)
    return refused_operation<nothing>("fill", std::move(error));
  if (element.size() != size_of(target.type()))
    return refused_operation<nothing>(
        "fill", refusal("fill", state().ordinal(), errc::shape_mismatch,
                        std::to_string(element.size()) + " bytes are not one element of " +
                            std::string{to_string(target.type())}));
  return start(std::make_shared<fill_operation>(target, std::move(element)), options);
}

device_core::answer<nothing> device_core::copy(const any_gpu_ref& target, const any_gpu_ref& source,
                                               const request_options& options) const {
  for (auto* ref : {&target, &source})
    if (auto error = check("copy", *ref); error)
      return refused_operation<nothing>("copy", std::move(error));
  auto refuse = [&](errc code, std::string detail) {
    return refused_operation<nothing>("copy",
                                      refusal("copy", state().ordinal(), code, std::move(detail)));
  };
  if (target.size_bytes() != source.size_bytes())
    return refuse(errc::shape_mismatch, "a source of " + std::to_string(source.size_bytes()) +
                                            " bytes and a target of " +
                                            std::to_string(target.size_bytes()));
  if (overlap(target, source))
    return refuse(errc::invalid_argument, "source and target overlap");
  return start(std::make_shared<copy_operation>(target, source), options);
}

device_core::answer<nothing> device_core::accept(const any_gpu_ref& ref,
                                                 const request_options& options) const {
  if (auto error = check("accept", ref); error)
    return refused_operation<nothing>("accept", std::move(error));
  return start(std::make_shared<accept_operation>(ref), options);
}

device_core::answer<nothing> device_core::launch(launch_function function,
                                                 const std::vector<any_gpu_ref>& reads,
                                                 const std::vector<any_gpu_ref>& writes,
                                                 const request_options& options) const {
  for (auto* refs : {&reads, &writes})
    if (auto error = check("launch", *refs); error)
      return refused_operation<nothing>("launch", std::move(error));
  if (!function)
    return refused_operation<nothing>(
        "launch",
        refusal("launch", state().ordinal(), errc::invalid_argument, "the launch has no callable"));
  if (worker_->is_remote())
    return refused_operation<nothing>(
        "launch", refusal("launch", state().ordinal(), errc::not_supported,
                          "the device lives in another process: register the launch there"));
  return start(std::make_shared<launch_operation>(std::move(function), reads, writes), options);
}

device_core::answer<nothing> device_core::launch(const std::string& name,
                                                 std::vector<std::byte> arguments,
                                                 const std::vector<any_gpu_ref>& reads,
                                                 const std::vector<any_gpu_ref>& writes,
                                                 const request_options& options) const {
  if (auto error = check("launch"); error)
    return refused_operation<nothing>("launch", std::move(error));
  if (worker_->is_remote()) {
    for (auto* refs : {&reads, &writes})
      if (auto error = check("launch", *refs); error)
        return refused_operation<nothing>("launch", std::move(error));
    return start(
        std::make_shared<remote_launch_operation>(name, std::move(arguments), reads, writes),
        options);
  }
  auto function = find_launch(name);
  if (!function)
    return refused_operation<nothing>("launch",
                                      refusal("launch", state().ordinal(), errc::invalid_argument,
                                              "no launch is registered as \"" + name + "\""));
  auto call = [function = std::move(function), arguments = std::move(arguments), reads, writes](
                  launch_context& context) { return function(context, reads, writes, arguments); };
  return launch(std::move(call), reads, writes, options);
}

caf::expected<any_gpu_ref> device_core::adopt(void* memory, std::size_t count, dtype type,
                                              std::function<void(void*)> deleter) const {
  if (auto error = check("adopt"); error)
    return error;
  if (memory == nullptr || !deleter)
    return refusal("adopt", state().ordinal(), errc::invalid_argument,
                   memory == nullptr ? "the memory to adopt is null" : "the deleter is empty");
  if (auto error = check_type("adopt", state().ordinal(), type); error)
    return error;
  if (worker_->is_remote())
    return refusal("adopt", state().ordinal(), errc::not_supported,
                   "the device lives in another process");
  if (count > SIZE_MAX / size_of(type))
    return refusal("adopt", state().ordinal(), errc::invalid_argument, size_overflows(count, type));
  admission_lock lock;
  if (state().phase() != device_phase::ready)
    return refusal("adopt", state().ordinal(), errc::unavailable, device_is(state().phase()));
  return any_gpu_ref{
      worker_->shared_state()->make_buffer(memory, count * size_of(type), std::move(deleter)), type,
      0, count};
}

device_core::answer<nothing> device_core::acquire(const any_gpu_ref& ref, access_mode mode,
                                                  CUstream_st* user,
                                                  const request_options& options) const {
  if (auto error = check("acquire", ref); error)
    return refused_operation<nothing>("acquire", std::move(error));
  if (!worker_->runs_cuda())
    return refused_operation<nothing>("acquire",
                                      refusal("acquire", state().ordinal(), errc::not_supported,
                                              "the backend has no streams for users"));
  return start(std::make_shared<acquire_operation>(ref, mode, stream_view{user}), options);
}

device_core::answer<nothing> device_core::release(const any_gpu_ref& ref, access_mode mode,
                                                  CUstream_st* user,
                                                  const request_options& options) const {
  if (auto error = check("release", ref); error)
    return refused_operation<nothing>("release", std::move(error));
  if (!worker_->runs_cuda())
    return refused_operation<nothing>("release",
                                      refusal("release", state().ordinal(), errc::not_supported,
                                              "the backend has no streams for users"));
  return start(std::make_shared<release_operation>(ref, mode, stream_view{user}), options);
}

caf::expected<gpu_token> device_core::offer(const any_gpu_ref& ref,
                                            std::chrono::nanoseconds grace) const {
  if (auto error = check("offer", ref); error)
    return error;
  return runtime_->memory().offer(ref, grace);
}

device_core::answer<any_gpu_ref> device_core::claim(const gpu_token& token, access_mode mode,
                                                    const request_options& options) const {
  if (auto error = check("claim"); error)
    return refused_operation<any_gpu_ref>("claim", std::move(error));
  return runtime_->memory().claim(shared_state(), token, mode, deadline_of(options));
}

device_core::answer<device_stats> device_core::stats(const request_options& options) const {
  if (auto error = check("stats"); error)
    return refused_operation<device_stats>("stats", std::move(error));
  return start(std::make_shared<stats_operation>(), options);
}

device_core::answer<std::uint64_t> device_core::reset(const request_options& options) const {
  if (auto error = check("reset"); error)
    return refused_operation<std::uint64_t>("reset", std::move(error));
  return runtime_->reset(state().ordinal(), deadline_of(options));
}

void device_core::shut_down(const caf::error& why) const {
  if (auto error = check("shutdown"); error)
    return log(log_level::warning, "no device was shut down", error);
  if (runtime_->backend().allows_reset())
    return runtime_->shut_down(state().ordinal(), why);
  log(log_level::warning,
      "a worker's program cannot shut its device down: only the parent process can");
}

device_core::answer<nothing> device_core::record_flight(const std::string& path,
                                                        const request_options& options) const {
  return runtime_->recorder().write(path, deadline_of(options));
}

} // namespace troupe::detail
