#include "device/device_core.hpp"

#include "device/operations.hpp"
#include "flight/flight_recorder.hpp" // for recorder()
#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include "operation/admission_lock.hpp"
#include "operation/launch_call.hpp"
#include "operation/launch_registry.hpp"
#include "operation/use_of.hpp"
#include "runtime/retried_request.hpp"
#include "sharing/lend_operation.hpp"
#include "sharing/memory_exchange.hpp" // for memory()

#include <type_traits>

namespace troupe::detail {

clock::time_point device_core::deadline_of(const request_options& options) const {
  return from_now(options.deadline.count() != 0 ? options.deadline : deadline_);
}

device_core device_core::into(operation_batch& batch) const {
  auto result = *this;
  result.batch_ = &batch;
  return result;
}

void device_core::submit(const std::shared_ptr<operation>& op,
                         const request_options& options) const {
  if (batch_ != nullptr)
    batch_->push_back(op);
  else
    runtime_->start(op, options);
}

namespace {

template <class Operation>
constexpr bool is_launch = std::is_same_v<Operation, launch_operation> ||
                           std::is_same_v<Operation, registered_launch_operation>;

void set_overlap(operation& launch, const request_options& options) {
  if (options.overlap)
    launch.parts()[0].stream = stream_kind::overlap;
}

} // namespace

template <class Operation, class... X>
auto device_core::start(const char* verb, caf::error why, const request_options& options,
                        X&&... x) const -> answer<decltype(Operation::value)> {
  if (!why)
    why = check_no_retries(verb, options);
  if (why)
    return refused_operation<decltype(Operation::value)>(verb, std::move(why));
  auto op = std::make_shared<Operation>(std::forward<X>(x)...);
  op->deadline = deadline_of(options);
  op->parts()[0].on = worker_.get();
  if constexpr (is_launch<Operation>)
    set_overlap(*op, options);
  submit(op, options);
  return op;
}

namespace {
/// Returns the argument of a further attempt.
template <class X> const X& again(const X& x) { return x; }
std::shared_ptr<host_range> again(const std::shared_ptr<host_range>& x) { return x->again(); }
} // namespace

template <class Operation, class... X>
device_core::answer<nothing> device_core::start_repeatable(const char* verb, caf::error why,
                                                           const request_options& options,
                                                           X&&... x) const {
  if (why || options.max_retries == 0)
    return start<Operation>(verb, std::move(why), options, std::forward<X>(x)...);
  auto make = [worker = worker_, options,
               ... x = std::decay_t<X>(std::forward<X>(x))]() -> answer<nothing> {
    auto op = std::make_shared<Operation>(again(x)...);
    op->parts()[0].on = worker.get();
    if constexpr (is_launch<Operation>)
      set_overlap(*op, options);
    return op;
  };
  auto first = make();
  first->deadline = deadline_of(options);
  return start_retried(runtime_, first, options, std::move(make));
}

caf::error device_core::refuse(const char* verb, errc code, std::string detail) const {
  return refusal(verb, state().ordinal(), code, std::move(detail));
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
    return refuse(verb, errc::stale_ref, "the handle has no memory");
  if (&ref.memory()->home() != &state())
    return refuse(verb, errc::invalid_argument,
                  is_foreign(ref, state())
                      ? foreign_handle
                      : "the buffer lies on device " + std::to_string(ref.device()) +
                            ", not on device " + std::to_string(state().ordinal()));
  return {};
}

caf::error device_core::check(const char* verb, dtype type) const {
  if (auto error = check(verb); error || is_dtype(type))
    return error;
  return refuse(verb, errc::invalid_argument, unknown_dtype(type));
}

device_core::answer<any_gpu_ref> device_core::allocate(std::size_t count, dtype type, bool zeroed,
                                                       const request_options& options) const {
  auto error = check("allocate", type);
  if (!error && count > SIZE_MAX / size_of(type))
    error = refuse("allocate", errc::out_of_memory, size_overflows(count, type));
  return start<allocate_operation>("allocate", std::move(error), options, count, type, zeroed);
}

device_core::answer<host_buffer>
device_core::allocate_pinned(std::size_t size_bytes, const request_options& options) const {
  return start<pinned_operation>("allocate_pinned", check("allocate_pinned"), options, size_bytes);
}

device_core::answer<nothing> device_core::transfer_host(transfer::direction way,
                                                        const any_gpu_ref& ref,
                                                        std::shared_ptr<host_range> host,
                                                        const request_options& options) const {
  const bool uploads = way == transfer::direction::upload;
  const char* verb = uploads ? "upload" : "download";
  auto error = check(verb, ref);
  if (!error && host->size() != ref.size_bytes()) {
    const auto on_host = std::to_string(host->size());
    const auto on_device = std::to_string(ref.size_bytes());
    error =
        refuse(verb, host->size() > ref.size_bytes() ? errc::out_of_range : errc::shape_mismatch,
               uploads ? on_host + " bytes for a buffer of " + on_device
                       : "a buffer of " + on_device + " bytes into " + on_host);
  }
  if (!uploads)
    return start<transfer_operation>(verb, std::move(error), options, way, ref, std::move(host));
  return start_repeatable<transfer_operation>(verb, std::move(error), options, way, ref,
                                              std::move(host));
}

device_core::answer<nothing> device_core::fill(const any_gpu_ref& target, const scalar& element,
                                               const request_options& options) const {
  auto error = check("fill", target);
  if (!error && element.type() != target.type())
    error = refuse("fill", errc::shape_mismatch,
                   (element ? "an element of " + std::string{to_string(element.type())}
                            : std::string{"no element"}) +
                       " for a buffer of " + std::string{to_string(target.type())});
  const auto bytes = element.bytes();
  return start_repeatable<fill_operation>("fill", std::move(error), options, target,
                                          std::vector<std::byte>{bytes.begin(), bytes.end()});
}

device_core::answer<nothing> device_core::copy(const any_gpu_ref& target, const any_gpu_ref& source,
                                               const request_options& options) const {
  auto error = check("copy", target);
  if (!error)
    error = check("copy", source);
  if (!error && target.size_bytes() != source.size_bytes())
    error = refuse("copy", errc::shape_mismatch,
                   "a source of " + std::to_string(source.size_bytes()) +
                       " bytes and a target of " + std::to_string(target.size_bytes()));
  if (!error && overlap(target, source))
    error = refuse("copy", errc::invalid_argument, "source and target overlap");
  return start_repeatable<copy_operation>("copy", std::move(error), options, target, source);
}

device_core::answer<nothing> device_core::accept(const any_gpu_ref& ref,
                                                 const request_options& options) const {
  return start<accept_operation>("accept", check("accept", ref), options, ref);
}

caf::error device_core::check_launch(const char* verb, const std::vector<any_gpu_ref>& reads,
                                     const std::vector<any_gpu_ref>& writes) const {
  auto error = check(verb);
  for (auto* refs : {&reads, &writes})
    for (auto& ref : *refs)
      if (!error)
        error = check(verb, ref);
  return error;
}

/// Returns the error of a library's check, with the verb and the device.
caf::error device_core::in_verb(const char* verb, const caf::error& error) const {
  const auto why = failure_of(error);
  return why ? refuse(verb, why->code, why->detail) : error;
}

device_core::answer<nothing> device_core::launch(launch_function function,
                                                 const std::vector<any_gpu_ref>& reads,
                                                 const std::vector<any_gpu_ref>& writes,
                                                 const request_options& options) const {
  auto error = check_launch("launch", reads, writes);
  if (!error && !function)
    error = refuse("launch", errc::invalid_argument, "the launch has no callable");
  if (!error && worker_->is_remote())
    error = refuse("launch", errc::not_supported,
                   "the device lives in another process: register the launch there");
  return start_repeatable<launch_operation>("launch", std::move(error), options,
                                            std::move(function), reads, writes);
}

device_core::answer<nothing> device_core::launch(const std::string& name,
                                                 std::span<const std::uint8_t> arguments,
                                                 const std::vector<any_gpu_ref>& reads,
                                                 const std::vector<any_gpu_ref>& writes,
                                                 const request_options& options) const {
  auto error = check("launch");
  const auto bytes = std::as_bytes(arguments);
  std::vector<std::byte> own{bytes.begin(), bytes.end()};
  if (auto library = find_library_launch(name); library || (!error && worker_->is_remote())) {
    const auto* verb = library ? library->verb : "launch";
    if (!error)
      error = check_launch(verb, reads, writes);
    auto read = error ? std::vector<launch_memory>{} : memory_of(reads);
    auto written = error ? std::vector<launch_memory>{} : memory_of(writes);
    if (!error && library && library->check)
      error = in_verb(verb, call_library([&] { return library->check(read, written, own); }));
    return start_repeatable<registered_launch_operation>(
        verb, std::move(error), options, std::move(library), name, std::move(own), reads, writes,
        std::move(read), std::move(written));
  }
  auto function = find_launch(name);
  if (!error && !function)
    error = refuse("launch", errc::invalid_argument, "no launch is registered as \"" + name + "\"");
  if (error)
    return refused_operation<nothing>("launch", std::move(error));
  auto call = [function = std::move(function), own = std::move(own), reads,
               writes](launch_context& context) { return function(context, reads, writes, own); };
  return launch(std::move(call), reads, writes, options);
}

caf::expected<any_gpu_ref> device_core::adopt(void* memory, std::size_t count, dtype type,
                                              std::function<void(void*)> deleter) const {
  if (auto error = check("adopt"); error)
    return error;
  if (!deleter)
    return refuse("adopt", errc::invalid_argument, "the deleter is empty");
  return adopt_as(memory, count, type, [&](device_state& home, std::size_t size_bytes) {
    return home.make_buffer(memory, size_bytes, std::move(deleter),
                            !runtime_->backend().shares_adopted_memory());
  });
}

caf::expected<any_gpu_ref> device_core::adopt_read_only(void* memory, std::size_t count, dtype type,
                                                        std::function<void(void*)> deleter) const {
  if (auto error = check("adopt"); error)
    return error;
  return adopt_as(memory, count, type, [&](device_state& home, std::size_t size_bytes) {
    return home.make_buffer(
        {.address = memory,
         .size_bytes = size_bytes,
         .read_only = true,
         .has_no_peers = !runtime_->backend().shares_adopted_memory(),
         .give_back = [memory, deleter = std::move(deleter)](const auto&) { deleter(memory); }});
  });
}

caf::expected<any_gpu_ref> device_core::adopt_as(void* memory, std::size_t count, dtype type,
                                                 const buffer_maker& make) const {
  if (memory == nullptr)
    return refuse("adopt", errc::invalid_argument, "the memory to adopt is null");
  if (auto error = check("adopt", type); error)
    return error;
  if (is_remote())
    return refuse("adopt", errc::not_supported, "the device lives in another process");
  if (count > SIZE_MAX / size_of(type))
    return refuse("adopt", errc::invalid_argument, size_overflows(count, type));
  if (auto phase = state().phase(); phase != device_phase::ready)
    return refuse("adopt", errc::unavailable, device_is(phase));
  const auto size_bytes = count * size_of(type);
  if (auto error = runtime_->backend().admit_memory(state().ordinal(), memory, size_bytes); error) {
    auto why = failure_of(error);
    if (!why)
      return error;
    why->verb = "adopt";
    return make_error(std::move(*why));
  }
  admission_lock lock;
  if (auto phase = state().phase(); phase != device_phase::ready)
    return refuse("adopt", errc::unavailable, device_is(phase));
  return any_gpu_ref{make(*shared_state(), size_bytes), type, 0, count};
}

device_core::answer<nothing> device_core::lend(const any_gpu_ref& ref, access_mode mode,
                                               const request_options& options) const {
  auto error = check("lend", ref);
  if (!error && is_remote())
    error = refuse("lend", errc::not_supported, "the device lives in another process");
  return start<lend_operation>("lend", std::move(error), options, "lend", ref, mode);
}

caf::error device_core::check_user(const char* verb, const any_gpu_ref& ref) const {
  if (auto error = check(verb, ref); error || worker_->runs_cuda())
    return error;
  return refuse(verb, errc::not_supported, "the backend has no streams for users");
}

device_core::answer<nothing> device_core::acquire(const any_gpu_ref& ref, access_mode mode,
                                                  CUstream_st* user,
                                                  const request_options& options) const {
  return start<acquire_operation>("acquire", check_user("acquire", ref), options, ref, mode,
                                  stream_view{user});
}

device_core::answer<nothing> device_core::release(const any_gpu_ref& ref, access_mode mode,
                                                  CUstream_st* user,
                                                  const request_options& options) const {
  auto error = check_user("release", ref);
  user_event event;
  if (!error) {
    // On this thread: the caller may destroy the stream as soon as this function has returned.
    auto marked = worker_->mark_user(stream_view{user});
    if (marked)
      event = std::move(*marked);
    else
      error = std::move(marked.error());
  }
  return start<release_operation>("release", std::move(error), options, ref, mode,
                                  std::move(event));
}

caf::expected<gpu_token> device_core::offer(const any_gpu_ref& ref,
                                            std::chrono::nanoseconds grace) const {
  if (auto error = check("offer", ref); error)
    return error;
  return runtime_->memory().offer(ref, grace);
}

device_core::answer<any_gpu_ref> device_core::claim(const gpu_token& token, access_mode mode,
                                                    const request_options& options) const {
  auto error = check("claim");
  if (!error)
    error = check_no_retries("claim", options);
  if (error)
    return refused_operation<any_gpu_ref>("claim", std::move(error));
  return runtime_->memory().claim(shared_state(), token, mode, deadline_of(options));
}

device_core::answer<device_stats> device_core::stats(const request_options& options) const {
  return start<stats_operation>("stats", check("stats"), options);
}

device_core::answer<std::uint64_t> device_core::reset(const request_options& options) const {
  auto error = check("reset");
  if (!error)
    error = check_no_retries("reset", options);
  if (error)
    return refused_operation<std::uint64_t>("reset", std::move(error));
  return runtime_->reset(state().ordinal(), deadline_of(options));
}

device_core::answer<std::uint64_t> device_core::hand_over(const request_options& options) const {
  if (auto error = check("hand_over"); error)
    return refused_operation<std::uint64_t>("hand_over", std::move(error));
  return runtime_->hand_over(state().ordinal(), deadline_of(options));
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
