/// Requests to the devices of all ranks of a world.
#include "actors/answer.hpp"
#include "actors/supervised.hpp"
#include "foundation/error_text.hpp"
#include <troupe/device.hpp>
#include <troupe/when.hpp>
#include <troupe/world.hpp>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace troupe {

namespace {

pending<void> refused(const char* verb, caf::error why) {
  return detail::answer(detail::refused_operation<detail::nothing>(verb, std::move(why)));
}

/// Returns an error unless there is one of `things` for each rank.
caf::error check_number(const world& of, const char* verb, std::size_t number, const char* things) {
  if (!detail::world_access::core_of(of))
    return detail::why_empty_world();
  if (number == of.size())
    return {};
  return detail::refusal(verb, errc::invalid_argument,
                         std::to_string(number) + ' ' + things + " for " +
                             std::to_string(of.size()) + " ranks");
}

/// Makes a request to the device of each rank for which `takes_part(rank)`, with
/// `request(device, rank)`.
template <class TakesPart, class Request>
pending<void> on_ranks(const world& of, TakesPart takes_part, Request request) {
  std::vector<pending<void>> all;
  for (std::size_t rank = 0; rank < of.size(); ++rank)
    if (takes_part(rank))
      all.push_back(request(of.device_of(rank), rank));
  return when_all(std::move(all));
}

/// The same for the ranks that have a handle, or for all ranks unless some may be absent.
template <class Request>
pending<void> on_ranks_of(const world& of, const std::vector<any_gpu_ref>& refs,
                          const request_options& options, Request request) {
  return on_ranks(
      of, [&](std::size_t rank) { return !options.allow_shrunk || static_cast<bool>(refs[rank]); },
      std::move(request));
}

/// Makes a request for each handle and one of as many parts of host memory.
template <class Request>
pending<void> transfer(const world& of, const char* verb, const std::vector<any_gpu_ref>& refs,
                       std::size_t parts, const request_options& options, Request request) {
  auto error = check_number(of, verb, refs.size(), "handles");
  if (!error)
    error = check_number(of, verb, parts, "parts of host memory");
  if (error)
    return refused(verb, std::move(error));
  return on_ranks_of(of, refs, options, std::move(request));
}

using ref_lists = std::vector<std::vector<any_gpu_ref>>;

std::vector<any_gpu_ref> refs_of(const ref_lists& lists, std::size_t rank) {
  std::vector<any_gpu_ref> result;
  for (auto& x : lists)
    result.push_back(x[rank]);
  return result;
}

/// Launches on all ranks; `one(device, rank, reads, writes)` launches on one.
template <class One>
pending<void> launch_on_all(const world& of, const ref_lists& reads, const ref_lists& writes,
                            const request_options& options, One one) {
  if (auto error = check_number(of, "launch", of.size(), "handles"))
    return refused("launch", std::move(error));
  for (auto* lists : {&reads, &writes})
    for (auto& x : *lists)
      if (auto error = check_number(of, "launch", x.size(), "handles"))
        return refused("launch", std::move(error));
  const auto has_none = [](const auto& refs) {
    return !refs.empty() && std::ranges::none_of(refs, [](auto& x) { return bool{x}; });
  };
  return on_ranks(
      of,
      [&](std::size_t rank) {
        auto all = refs_of(reads, rank);
        const auto more = refs_of(writes, rank);
        all.insert(all.end(), more.begin(), more.end());
        return !options.allow_shrunk || !has_none(all);
      },
      [&](const device& on, std::size_t rank) {
        return one(on, rank, refs_of(reads, rank), refs_of(writes, rank));
      });
}

} // namespace

pending<void> world::fill(const std::vector<any_gpu_ref>& targets, scalar element,
                          request_options options) const {
  if (auto error = check_number(*this, "fill", targets.size(), "handles"))
    return refused("fill", std::move(error));
  return on_ranks_of(*this, targets, options, [&](const device& on, std::size_t rank) {
    return on.fill(targets[rank], element, options);
  });
}

pending<void> world::upload_bytes(const std::vector<any_gpu_ref>& targets,
                                  const std::vector<std::span<const std::byte>>& sources,
                                  request_options options) const {
  return transfer(*this, "upload", targets, sources.size(), options,
                  [&](const device& on, std::size_t rank) {
                    return on.upload(targets[rank], sources[rank], options);
                  });
}

pending<void> world::upload_buffers(const std::vector<any_gpu_ref>& targets,
                                    std::vector<host_buffer> sources,
                                    request_options options) const {
  return transfer(*this, "upload", targets, sources.size(), options,
                  [&](const device& on, std::size_t rank) {
                    return on.upload(targets[rank], std::move(sources[rank]), options);
                  });
}

pending<void> world::download_bytes(const std::vector<any_gpu_ref>& sources,
                                    const std::vector<std::span<std::byte>>& targets,
                                    request_options options) const {
  return transfer(*this, "download", sources, targets.size(), options,
                  [&](const device& on, std::size_t rank) {
                    return on.download(sources[rank], targets[rank], options);
                  });
}

pending<void> world::launch(rank_launch_function function, const ref_lists& reads,
                            const ref_lists& writes, request_options options) const {
  return launch_on_all(*this, reads, writes, options,
                       [&](const device& on, std::size_t rank, auto inputs, auto outputs) {
                         launch_function one;
                         if (function) // else the device refuses it
                           one = [function, rank](launch_context& x) { return function(x, rank); };
                         return on.launch(std::move(one), std::move(inputs), std::move(outputs),
                                          options);
                       });
}

pending<void> world::launch(const std::string& name, const std::vector<std::uint8_t>& arguments,
                            const ref_lists& reads, const ref_lists& writes,
                            request_options options) const {
  return launch_on_all(
      *this, reads, writes, options, [&](const device& on, std::size_t, auto inputs, auto outputs) {
        return on.launch(name, arguments, std::move(inputs), std::move(outputs), options);
      });
}

} // namespace troupe
