/// A world as functions: every call is admitted on the caller's thread.
#pragma once

#include <troupe/detail/caf_compat.hpp>
#include <troupe/nccl_world.hpp>
#include <troupe/pending.hpp>

#include <caf/actor.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace troupe {

namespace detail {
class world_core;
} // namespace detail

/// One rank per device, and collectives over all of them. Movable; the last of its copies ends the
/// world and answers what is pending. Its actor system must outlive it.
class world {
public:
  /// Blocks until the world is ready.
  /// @errors as `spawn_nccl_world`, and why it could not be built; errc::would_block in an actor of
  ///         CAF's pool: spawn the actor there
  static caf::expected<world> open(caf::actor_system& sys, world_config config);
  /// Over devices that the application has.
  static caf::expected<world> open(const std::vector<device>& devices, world_config config = {});

  /// Number of ranks.
  std::size_t size() const noexcept;
  world_status status() const;

  /// The world's actor, for messages.
  const caf::actor& actor() const noexcept;
  /// The device of a rank; `rank` < `size()`.
  device device_of(std::size_t rank) const;

  /// `count` elements on every rank, in rank order. Blocks until they are there.
  /// @errors as `device::allocate`: nothing is kept
  template <element T>
  caf::expected<std::vector<gpu_ref<T>>> allocate(std::size_t count, bool zeroed = false,
                                                  request_options options = {}) const {
    auto refs = allocate(dtype_v<T>, count, zeroed, options);
    if (!refs)
      return refs.error();
    std::vector<gpu_ref<T>> result;
    result.reserve(refs->size());
    for (auto& ref : *refs)
      result.push_back(*gpu_ref<T>::from(std::move(ref)));
    return result;
  }
  caf::expected<std::vector<any_gpu_ref>>
  allocate(dtype type, std::size_t count, bool zeroed = false, request_options options = {}) const;

  /// In place: buffers[r][i] = op over all ranks q of buffers[q][i]. As the message `all_reduce`.
  template <element T>
  pending<collective_done> all_reduce(const std::vector<gpu_ref<T>>& buffers,
                                      reduce_op op = reduce_op::sum,
                                      request_options options = {}) const {
    return all_reduce(any(buffers), op, options);
  }
  pending<collective_done> all_reduce(const std::vector<any_gpu_ref>& buffers,
                                      reduce_op op = reduce_op::sum,
                                      request_options options = {}) const;

  /// Out of place: recv[r][i] = op over all ranks q of send[q][i].
  template <element T>
  pending<collective_done>
  all_reduce(const std::vector<gpu_ref<T>>& send, const std::vector<gpu_ref<T>>& recv,
             reduce_op op = reduce_op::sum, request_options options = {}) const {
    return all_reduce(any(send), any(recv), op, options);
  }
  pending<collective_done> all_reduce(const std::vector<any_gpu_ref>& send,
                                      const std::vector<any_gpu_ref>& recv,
                                      reduce_op op = reduce_op::sum,
                                      request_options options = {}) const;

private:
  struct owner;
  explicit world(std::shared_ptr<const owner> x) : owner_(std::move(x)) {}

  std::shared_ptr<const owner> owner_;
};

/// Sends `what` to a world or device as an actor's request with a deadline: the library's answer
/// comes in time, so CAF's own time-out is set far behind it and never races it.
template <class Self, class Request>
auto request(Self* self, const caf::actor& to, Request what, std::chrono::nanoseconds deadline) {
  what.options.deadline = deadline;
  constexpr std::chrono::nanoseconds longest = std::chrono::hours{24 * 365};
  return detail::request(self, to, 2 * std::min(deadline, longest) + std::chrono::seconds{10},
                         std::move(what));
}

template <class Self, class Request>
auto request(Self* self, const world& to, Request what, std::chrono::nanoseconds deadline) {
  return request(self, to.actor(), std::move(what), deadline);
}

} // namespace troupe
