/// A world as a class: every call is admitted on the caller's thread.
#pragma once

#include <troupe/nccl_world.hpp>
#include <troupe/pending.hpp>

#include <caf/actor.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace troupe {

namespace detail {
class world_core;
struct world_access;
} // namespace detail

class world_rank;

/// One rank per device, and collectives over all ranks. Copies refer to the same world. Destroying
/// the last copy ends the world and completes its pending requests. A moved-from object must not be
/// used. The actor system must outlive the object.
/// @thread any, several at once; a copy must not be assigned to while another thread uses that copy
class world {
public:
  /// Spawns a world and blocks until it is ready.
  /// @errors those of `spawn_nccl_world`, and the reason why the world could not be built;
  ///         errc::would_block in an actor of CAF's pool: use `spawn_nccl_world` there
  static caf::expected<world> open(caf::actor_system& sys, world_config config);
  /// The same over devices that the application has opened; ignores `config.devices`.
  static caf::expected<world> open(const std::vector<device>& devices, world_config config = {});

  /// Opens worlds over groups of the ranks, as the message `split` (troupe/nccl_world.hpp). Blocks
  /// until all of them are ready. `limits`: of the new worlds; by default those of this world.
  /// @shape  colors: one per rank, negative: in no group; keys: one per rank, or empty: all equal
  /// @errors those of the message, and the reason why a world could not be built; errc::would_block
  ///         in an actor of CAF's pool: send the message there. After an error no world is kept
  caf::expected<std::vector<world>> split(std::string name, std::vector<std::int32_t> colors,
                                          std::vector<std::int32_t> keys = {},
                                          const std::optional<world_limits>& limits = {}) const;

  /// Returns the number of ranks.
  std::size_t size() const noexcept;
  world_status status() const;

  /// Returns the world's actor, for messages.
  const caf::actor& actor() const noexcept;
  /// Returns the device of a rank. A rank out of range or in another process: `world_rank::where`.
  device device_of(std::size_t rank) const;

  /// Allocates `count` elements on every rank, and blocks until it is done. Returns in rank order.
  /// @errors those of `allocate_all`; errc::would_block in an actor of CAF's pool: send the message
  template <element T>
  caf::expected<std::vector<gpu_ref<T>>> allocate(std::size_t count, bool zeroed = false,
                                                  request_options options = {}) const {
    return allocate<T>(count, allocation_options{.zeroed = zeroed}, options);
  }
  caf::expected<std::vector<any_gpu_ref>>
  allocate(dtype type, std::size_t count, bool zeroed = false, request_options options = {}) const {
    return allocate(type, count, allocation_options{.zeroed = zeroed}, options);
  }
  /// The same with the options of the message `allocate_all` (troupe/nccl_world.hpp).
  template <element T>
  caf::expected<std::vector<gpu_ref<T>>> allocate(std::size_t count, allocation_options what,
                                                  request_options options = {}) const {
    auto refs = allocate(dtype_v<T>, count, what, options);
    if (!refs)
      return refs.error();
    std::vector<gpu_ref<T>> result;
    result.reserve(refs->size());
    for (auto& ref : *refs)
      result.push_back(ref ? *gpu_ref<T>::from(std::move(ref)) : gpu_ref<T>{});
    return result;
  }
  caf::expected<std::vector<any_gpu_ref>> allocate(dtype type, std::size_t count,
                                                   allocation_options what,
                                                   request_options options = {}) const;

  // The verbs. The messages of the same names (troupe/collective.hpp) document effects, shapes and
  // errors. Handles are `gpu_ref`s of one type or `any_gpu_ref`s.

  /// Runs in place.
  template <class Refs>
  pending<collective_done> all_reduce(const Refs& buffers, reduce_op op = reduce_op::sum,
                                      request_options options = {}) const {
    return all_reduce_in_place(any(buffers), op, options);
  }
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

  template <class Refs>
  pending<collective_done> reduce(const Refs& send, const any_gpu_ref& recv, int root,
                                  reduce_op op = reduce_op::sum,
                                  request_options options = {}) const {
    return run(troupe::reduce{any(send), recv, root, op, {}, {}}, options);
  }

  template <class Refs>
  pending<collective_done> broadcast(const any_gpu_ref& send, const Refs& recv, int root,
                                     request_options options = {}) const {
    return run(troupe::broadcast{send, any(recv), root, {}}, options);
  }

  template <class Refs>
  pending<collective_done> all_gather(const Refs& send, const Refs& recv,
                                      request_options options = {}) const {
    return out_of_place(troupe::all_gather{any(send), any(recv), {}}, options);
  }
  /// Runs in place.
  template <class Refs>
  pending<collective_done> all_gather(const Refs& recv, request_options options = {}) const {
    return run(troupe::all_gather{{}, any(recv), {}}, options);
  }

  template <class Refs>
  pending<collective_done> reduce_scatter(const Refs& send, const Refs& recv,
                                          reduce_op op = reduce_op::sum,
                                          request_options options = {}) const {
    return out_of_place(troupe::reduce_scatter{any(send), any(recv), op, {}, {}}, options);
  }
  /// Runs in place.
  template <class Refs>
  pending<collective_done> reduce_scatter(const Refs& send, reduce_op op = reduce_op::sum,
                                          request_options options = {}) const {
    return run(troupe::reduce_scatter{any(send), {}, op, {}, {}}, options);
  }

  template <class Refs>
  pending<collective_done> all_to_all(const Refs& send, const Refs& recv,
                                      request_options options = {}) const {
    return run(troupe::all_to_all{any(send), any(recv), {}}, options);
  }

  template <class Refs>
  pending<collective_done> all_to_all_v(const Refs& send, const Refs& recv,
                                        std::vector<std::vector<std::uint64_t>> counts,
                                        request_options options = {}) const {
    return run(troupe::all_to_all_v{any(send), any(recv), std::move(counts), {}}, options);
  }

  template <class Refs>
  pending<collective_done> gather(const Refs& send, const any_gpu_ref& recv, int root,
                                  request_options options = {}) const {
    return run(troupe::gather{any(send), recv, root, {}}, options);
  }

  template <class Refs>
  pending<collective_done> scatter(const any_gpu_ref& send, const Refs& recv, int root,
                                   request_options options = {}) const {
    return run(troupe::scatter{send, any(recv), root, {}}, options);
  }

  /// Sends from rank `from` to rank `to`.
  pending<collective_done> send_recv(int from, const any_gpu_ref& send, int to,
                                     const any_gpu_ref& recv, request_options options = {}) const {
    return run(troupe::send_recv{from, to, send, recv, {}}, options);
  }

  pending<collective_done> barrier(request_options options = {}) const {
    return run(troupe::barrier{}, options);
  }

  /// Runs any of the above; also with factors, for reduce_op::premul_sum.
  pending<collective_done> run(const collective& what, request_options options = {}) const;
  pending<collective_done> run(const group& what) const;

  /// Returns the object for calls of one rank (troupe/world_rank.hpp). If `index` is out of range,
  /// all of them fail with errc::invalid_argument.
  world_rank rank(std::size_t index) const;

private:
  friend class world_rank;
  friend struct detail::world_access;
  pending<collective_done> all_reduce_in_place(const std::vector<any_gpu_ref>& buffers,
                                               reduce_op op, request_options options) const;
  /// Refuses an empty `send` or `recv`, which only the in-place overloads allow.
  pending<collective_done> out_of_place(const collective& what, request_options options) const;

  struct owner;
  explicit world(std::shared_ptr<const owner> x) : owner_(std::move(x)) {}

  std::shared_ptr<const owner> owner_;
};

} // namespace troupe
