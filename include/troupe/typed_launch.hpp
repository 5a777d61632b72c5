/// Registered launches as functions of typed device memory.
#pragma once

#include <troupe/bytes.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/launch.hpp>

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace troupe {

namespace detail {

/// The handles of a launch that its function has not got yet.
struct launch_handles {
  std::span<const any_gpu_ref> reads;
  std::span<const any_gpu_ref> writes;
  caf::error error = {}; ///< the first one

  /// Returns the memory of the next handle, in device memory; empty after an error.
  template <class T> std::span<T> next() {
    constexpr bool reading = std::is_const_v<T>;
    auto& list = reading ? reads : writes;
    if (error)
      return {};
    if (list.empty()) {
      error = make_error(errc::invalid_argument, std::string{"the launch "} +
                                                     (reading ? "reads" : "writes") +
                                                     " more buffers than the request names");
      return {};
    }
    const auto ref = gpu_ref<std::remove_const_t<T>>::from(list.front());
    list = list.subspan(1);
    if (!ref) {
      error = ref.error();
      return {};
    }
    const auto memory = ref->access();
    if (!memory) {
      error = memory.error();
      return {};
    }
    return {*memory, ref->count()};
  }

  void expect_none_left() {
    if (!error && !(reads.empty() && writes.empty()))
      error = make_error(errc::invalid_argument,
                         "the request names more buffers than the launch reads or writes");
  }
};

template <class... Ts, class Call>
caf::error call_with_memory(launch_handles handles, const Call& call) {
  std::tuple<std::span<Ts>...> memory{handles.next<Ts>()...}; // from left to right
  handles.expect_none_left();
  return handles.error ? std::move(handles.error) : std::apply(call, memory);
}

template <class... Ts>
registered_launch
make_typed_launch(std::function<caf::error(launch_context&, std::span<Ts>...)> f) {
  return [f = std::move(f)](launch_context& context, std::span<const any_gpu_ref> reads,
                            std::span<const any_gpu_ref> writes,
                            std::span<const std::byte> arguments) {
    if (!arguments.empty())
      return make_error(errc::invalid_argument, "the launch has no arguments");
    return call_with_memory<Ts...>({reads, writes},
                                   [&](auto... memory) { return f(context, memory...); });
  };
}

template <class Arguments, class... Ts>
registered_launch make_typed_launch(
    std::function<caf::error(launch_context&, const Arguments&, std::span<Ts>...)> f) {
  return [f = std::move(f)](launch_context& context, std::span<const any_gpu_ref> reads,
                            std::span<const any_gpu_ref> writes, std::span<const std::byte> bytes) {
    const auto arguments = troupe::from_bytes<Arguments>(bytes);
    if (!arguments)
      return arguments.error();
    return call_with_memory<Ts...>(
        {reads, writes}, [&](auto... memory) { return f(context, *arguments, memory...); });
  };
}

} // namespace detail

/// Returns a launch for `register_launch` that calls `f` with the device memory of the request's
/// handles. `f` has one span for each of them, of their types, in their order: `std::span<const T>`
/// for what the request reads, `std::span<T>` for what it writes.
///
///     caf::error scale(launch_context&, const float& factor, std::span<const float> from,
///                      std::span<float> to);
///     register_launch("scale", typed_launch(scale));
///     device.launch("scale", to_bytes(2.0f), {from}, {to});
///
/// @shape  `f`: `caf::error(launch_context&, std::span<T>...)`, or with `const Arguments&` before
///         the spans, of a trivially copyable type; not a template
/// @errors of the launch, which does not call `f` then: errc::launch_failed, with the text: other
///         types, another number of handles or arguments of another size; the errors of `access`
template <class F> registered_launch typed_launch(F f) {
  return detail::make_typed_launch(std::function{std::move(f)});
}

} // namespace troupe
