/// A world as a class: every call is admitted on the caller's thread.
#pragma once

#include <troupe/device.hpp>
#include <troupe/nccl_world.hpp>
#include <troupe/pending.hpp>
#include <troupe/recording.hpp>

#include <caf/actor.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace troupe {

namespace detail {
class world_core;
struct world_access;

/// `Range` has elements that convert to spans of `T`.
template <class T, class Range>
concept spans_of = requires(Range& all) {
  requires std::is_convertible_v<decltype(*std::begin(all)), std::span<T>>;
};
} // namespace detail

class step;
class world_rank;
struct step_done;

/// A `launch_function` for each rank of a world.
using rank_launch_function = std::function<caf::error(launch_context&, std::size_t rank)>;

/// One rank per device, and collectives over all ranks. Copies refer to the same world. Destroying
/// the last copy ends the world and completes its pending requests. The actor system must outlive
/// the object. An empty object, made by the default constructor or moved from, has no ranks and no
/// actor, and refuses every request (errc::invalid_argument).
/// @thread any, several at once; a copy must not be assigned to while another thread uses that copy
class world {
public:
  /// Makes an empty object.
  world() noexcept = default;

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

  // Requests to the devices of all ranks, as those of `device`: the r-th handle is one on the
  // device of rank r. They begin together, and the result completes when all of them have.
  // - shape: one handle per rank. With `allow_shrunk`, ranks whose handles are empty, as those of
  //   absent ranks are, are left out.
  // - errors: the first one in the order of ranks; errc::invalid_argument: not one handle per rank

  /// Writes one element to every place of all buffers.
  template <element T>
  pending<void> fill(const std::vector<gpu_ref<T>>& targets, std::type_identity_t<T> value,
                     request_options options = {}) const {
    return fill(any(targets), scalar{value}, options);
  }
  pending<void> fill(const std::vector<any_gpu_ref>& targets, scalar element,
                     request_options options = {}) const;

  /// Uploads `source` to each rank. It must live, and not change, until the result completes.
  template <element T>
  pending<void> upload(const std::vector<gpu_ref<T>>& targets,
                       std::type_identity_t<std::span<const T>> source,
                       request_options options = {}) const {
    const std::vector<std::span<const std::byte>> sources(targets.size(), std::as_bytes(source));
    return upload_bytes(any(targets), sources, options);
  }
  /// Keeps `source` alive: a temporary would be gone before it is read.
  template <element T>
  pending<void> upload(const std::vector<gpu_ref<T>>& targets, std::vector<T>&& source,
                       request_options options = {}) const {
    return upload_buffers(any(targets), {targets.size(), host_buffer{std::move(source)}}, options);
  }
  template <element T, std::size_t n>
  pending<void> upload(const std::vector<gpu_ref<T>>& targets, std::array<T, n>&& source,
                       request_options options = {}) const {
    return upload(targets, std::vector<T>(source.begin(), source.end()), options);
  }
  /// Uploads `sources[r]` to rank r. They must live, and not change, until the result completes.
  /// @shape  sources: a vector, array or span with a span, vector or array for each rank
  template <element T, class Sources>
    requires detail::spans_of<const T, Sources>
  pending<void> upload(const std::vector<gpu_ref<T>>& targets, Sources& sources,
                       request_options options = {}) const {
    std::vector<std::span<const std::byte>> parts;
    for (auto& x : sources)
      parts.push_back(std::as_bytes(std::span<const T>{x}));
    return upload_bytes(any(targets), parts, options);
  }
  template <element T>
  pending<void> upload(const std::vector<gpu_ref<T>>& targets,
                       const std::vector<std::span<const T>>& sources,
                       request_options options = {}) const {
    return upload<T, const std::vector<std::span<const T>>>(targets, sources, options);
  }
  /// Keeps `sources` alive.
  template <element T>
  pending<void> upload(const std::vector<gpu_ref<T>>& targets,
                       std::vector<std::vector<T>>&& sources, request_options options = {}) const {
    return upload_buffers(
        any(targets),
        {std::make_move_iterator(sources.begin()), std::make_move_iterator(sources.end())},
        options);
  }

  /// Downloads `sources[r]` into `targets[r]`. They must live until the result completes.
  /// @shape  targets: as the sources of `upload`
  template <element T, class Targets>
    requires detail::spans_of<T, Targets>
  [[nodiscard]] pending<void> download(const std::vector<gpu_ref<T>>& sources, Targets& targets,
                                       request_options options = {}) const {
    std::vector<std::span<std::byte>> parts;
    for (auto& x : targets)
      parts.push_back(std::as_writable_bytes(std::span<T>{x}));
    return download_bytes(any(sources), parts, options);
  }
  template <element T>
  [[nodiscard]] pending<void> download(const std::vector<gpu_ref<T>>& sources,
                                       const std::vector<std::span<T>>& targets,
                                       request_options options = {}) const {
    return download<T, const std::vector<std::span<T>>>(sources, targets, options);
  }
  /// Downloads into a new vector for each rank; blocks until it is done.
  /// @errors those of `device::download`, too
  template <element T>
  caf::expected<std::vector<std::vector<T>>> download(const std::vector<gpu_ref<T>>& sources,
                                                      request_options options = {}) const {
    if (auto refused = detail::check_may_block(); refused)
      return refused;
    std::vector<std::vector<T>> targets;
    for (auto& x : sources)
      targets.emplace_back(x.count());
    if (auto done = download(sources, targets, options).wait(); !done)
      return done.error();
    return targets;
  }

  /// Launches `function(context, rank)` on each rank's device.
  /// @shape  reads, writes: any number of lists, each with one handle per rank. The launch of rank
  /// r
  ///         uses the r-th handle of each list. Without lists it runs on all ranks
  pending<void> launch(rank_launch_function function,
                       const std::vector<std::vector<any_gpu_ref>>& reads,
                       const std::vector<std::vector<any_gpu_ref>>& writes,
                       request_options options = {}) const;
  /// The same with a registered launch; `arguments` are the same for all ranks.
  pending<void> launch(const std::string& name, const std::vector<std::uint8_t>& arguments,
                       const std::vector<std::vector<any_gpu_ref>>& reads,
                       const std::vector<std::vector<any_gpu_ref>>& writes,
                       request_options options = {}) const;

  // The collectives. The messages of the same names (troupe/collective.hpp) document effects,
  // shapes and errors. Handles are `gpu_ref`s of one type or `any_gpu_ref`s, in a vector, array or
  // span.

  /// Runs in place.
  template <ref_range Refs>
  pending<collective_done> all_reduce(const Refs& buffers, reduce_op op = reduce_op::sum,
                                      request_options options = {}) const {
    return all_reduce_in_place(any(buffers), op, options);
  }
  template <ref_range Refs>
  pending<collective_done> all_reduce(const Refs& buffers, request_options options) const {
    return all_reduce(buffers, reduce_op::sum, options);
  }
  template <ref_range Send, ref_range_like<Send> Recv>
  pending<collective_done> all_reduce(const Send& send, const Recv& recv,
                                      reduce_op op = reduce_op::sum,
                                      request_options options = {}) const {
    return all_reduce(any(send), any(recv), op, options);
  }
  template <ref_range Send, ref_range_like<Send> Recv>
  pending<collective_done> all_reduce(const Send& send, const Recv& recv,
                                      request_options options) const {
    return all_reduce(any(send), any(recv), reduce_op::sum, options);
  }
  pending<collective_done> all_reduce(const std::vector<any_gpu_ref>& send,
                                      const std::vector<any_gpu_ref>& recv,
                                      reduce_op op = reduce_op::sum,
                                      request_options options = {}) const;

  template <ref_range Refs>
  pending<collective_done> reduce(const Refs& send, const any_gpu_ref& recv, int root,
                                  reduce_op op = reduce_op::sum,
                                  request_options options = {}) const {
    return run(troupe::reduce{any(send), recv, root, op, {}, {}}, options);
  }
  template <ref_range Refs>
  pending<collective_done> reduce(const Refs& send, const any_gpu_ref& recv, int root,
                                  request_options options) const {
    return reduce(send, recv, root, reduce_op::sum, options);
  }
  /// Runs in place: the root's buffer gets the result.
  template <ref_range Refs>
  pending<collective_done> reduce(const Refs& buffers, int root, reduce_op op = reduce_op::sum,
                                  request_options options = {}) const {
    return reduce(buffers, ref_at(buffers, root), root, op, options);
  }
  template <ref_range Refs>
  pending<collective_done> reduce(const Refs& buffers, int root, request_options options) const {
    return reduce(buffers, root, reduce_op::sum, options);
  }

  template <ref_range Refs>
  pending<collective_done> broadcast(const any_gpu_ref& send, const Refs& recv, int root,
                                     request_options options = {}) const {
    return run(troupe::broadcast{send, any(recv), root, {}}, options);
  }
  /// Runs in place: copies the root's buffer to those of the other ranks.
  template <ref_range Refs>
  pending<collective_done> broadcast(const Refs& buffers, int root,
                                     request_options options = {}) const {
    return broadcast(ref_at(buffers, root), buffers, root, options);
  }

  template <ref_range Send, ref_range_like<Send> Recv>
  pending<collective_done> all_gather(const Send& send, const Recv& recv,
                                      request_options options = {}) const {
    return out_of_place(troupe::all_gather{any(send), any(recv), {}}, options);
  }
  /// Runs in place.
  template <ref_range Refs>
  pending<collective_done> all_gather(const Refs& recv, request_options options = {}) const {
    return run(troupe::all_gather{{}, any(recv), {}}, options);
  }

  template <ref_range Send, ref_range_like<Send> Recv>
  pending<collective_done> reduce_scatter(const Send& send, const Recv& recv,
                                          reduce_op op = reduce_op::sum,
                                          request_options options = {}) const {
    return out_of_place(troupe::reduce_scatter{any(send), any(recv), op, {}, {}}, options);
  }
  template <ref_range Send, ref_range_like<Send> Recv>
  pending<collective_done> reduce_scatter(const Send& send, const Recv& recv,
                                          request_options options) const {
    return reduce_scatter(send, recv, reduce_op::sum, options);
  }
  /// Runs in place.
  template <ref_range Refs>
  pending<collective_done> reduce_scatter(const Refs& send, reduce_op op = reduce_op::sum,
                                          request_options options = {}) const {
    return run(troupe::reduce_scatter{any(send), {}, op, {}, {}}, options);
  }
  template <ref_range Refs>
  pending<collective_done> reduce_scatter(const Refs& send, request_options options) const {
    return reduce_scatter(send, reduce_op::sum, options);
  }

  template <ref_range Send, ref_range_like<Send> Recv>
  pending<collective_done> all_to_all(const Send& send, const Recv& recv,
                                      request_options options = {}) const {
    return run(troupe::all_to_all{any(send), any(recv), {}}, options);
  }

  template <ref_range Send, ref_range_like<Send> Recv>
  pending<collective_done> all_to_all_v(const Send& send, const Recv& recv,
                                        std::vector<std::vector<std::uint64_t>> counts,
                                        request_options options = {}) const {
    return run(troupe::all_to_all_v{any(send), any(recv), std::move(counts), {}}, options);
  }

  template <ref_range Refs>
  pending<collective_done> gather(const Refs& send, const any_gpu_ref& recv, int root,
                                  request_options options = {}) const {
    return run(troupe::gather{any(send), recv, root, {}}, options);
  }

  template <ref_range Refs>
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

  /// Makes a step (troupe/step.hpp): the recorded requests over these buffers, to run together.
  /// Checks what does not depend on the time of a run, for the ranks that are present.
  /// @shape  buffers: one handle per rank for each name
  /// @errors those of the requests; errc::invalid_argument: a name without buffers, or with two
  ///         lists of them, not one handle per rank, or a rank that is out of range;
  ///         errc::out_of_range: a part that is not in its buffer; errc::not_supported: the ranks
  ///         are driven by programs
  caf::expected<step> record(const recording& requests, std::vector<named_buffers> buffers) const;
  /// Same as `step::run`.
  /// @errors errc::invalid_argument, too: the step was recorded in another world
  pending<step_done> run(const step& what, request_options options = {}) const;

  /// Returns the object for calls of one rank (troupe/world_rank.hpp). If `index` is out of range,
  /// all of them fail with errc::invalid_argument.
  world_rank rank(std::size_t index) const;

private:
  friend class world_rank;
  friend struct detail::world_access;
  pending<collective_done> all_reduce_in_place(const std::vector<any_gpu_ref>& buffers,
                                               reduce_op op, request_options options) const;
  pending<void> upload_bytes(const std::vector<any_gpu_ref>& targets,
                             const std::vector<std::span<const std::byte>>& sources,
                             request_options options) const;
  pending<void> upload_buffers(const std::vector<any_gpu_ref>& targets,
                               std::vector<host_buffer> sources, request_options options) const;
  pending<void> download_bytes(const std::vector<any_gpu_ref>& sources,
                               const std::vector<std::span<std::byte>>& targets,
                               request_options options) const;
  /// Returns the handle of a rank; an empty one if the rank is out of range.
  template <class Refs> static any_gpu_ref ref_at(const Refs& refs, int rank) {
    return rank >= 0 && static_cast<std::size_t>(rank) < std::size(refs) ? std::data(refs)[rank]
                                                                         : any_gpu_ref{};
  }
  /// Refuses an empty `send` or `recv`, which only the in-place overloads allow.
  pending<collective_done> out_of_place(const collective& what, request_options options) const;

  struct owner;
  explicit world(std::shared_ptr<const owner> x) : owner_(std::move(x)) {}

  std::shared_ptr<const owner> owner_;
};

} // namespace troupe
