/// `world_core`: memory on all ranks.
#include "collective/allocate_all_operation.hpp"
#include "foundation/error_text.hpp"
#include "runtime/retried_request.hpp"
#include "world/world_core.hpp"

#include <utility>

namespace troupe::detail {

namespace {

/// Checks the size of an allocation of `count` elements of `type`.
/// @errors errc::invalid_argument: the type is unknown; errc::out_of_memory: the size overflows
caf::error check_size(const char* verb, dtype type, std::size_t count) {
  if (!is_dtype(type))
    return refusal(verb, errc::invalid_argument, unknown_dtype(type));
  if (count > SIZE_MAX / size_of(type))
    return refusal(verb, errc::out_of_memory, size_overflows(count, type));
  return {};
}

} // namespace

std::shared_ptr<operation_of<world_buffers>> world_core::allocate(dtype type, std::size_t count,
                                                                  allocation_options what,
                                                                  const request_options& options) {
  constexpr auto verb = "allocate";
  if (auto error = check_whole(verb); error)
    return refused_operation<world_buffers>(verb, std::move(error));
  if (auto error = check_no_retries(verb, options); error)
    return refused_operation<world_buffers>(verb, std::move(error));
  const auto without = absent();
  if (options.membership != 0) // else only the devices matter
    if (auto error = check_view(verb, options.membership); error)
      return refused_operation<world_buffers>(verb, std::move(error));
  if (auto error = check_size(verb, type, count); error)
    return refused_operation<world_buffers>(verb, std::move(error));
  auto result = std::make_shared<allocate_all_operation>(
      lanes_, options.allow_shrunk ? without : rank_set{}, type, count, what.zeroed);
  result->deadline = from_now(options.deadline.count() != 0 ? options.deadline : limits_.deadline);
  runtime_->start(result);
  return result;
}

} // namespace troupe::detail
