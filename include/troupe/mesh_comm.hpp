/// Collectives over host memory, one handle per rank.
#pragma once

#include <troupe/dtype.hpp>
#include <troupe/host_buffer.hpp>
#include <troupe/pending.hpp>
#include <troupe/world.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace troupe {

/// Host memory that a call reads: the caller's, or a `host_buffer`, which the call keeps alive and,
/// if it is pinned, gives to the device as it is.
class host_source {
public:
  host_source(std::span<const std::byte> memory) : memory_(memory) {}
  host_source(std::span<std::byte> memory) : memory_(memory) {}
  host_source(host_buffer owner) : memory_(owner.bytes()), owner_(std::move(owner)) {}

  std::span<const std::byte> bytes() const noexcept { return memory_; }
  const host_buffer& owner() const noexcept { return owner_; }

private:
  std::span<const std::byte> memory_;
  host_buffer owner_;
};

/// Host memory that a call writes, or reads and writes.
class host_target {
public:
  host_target(std::span<std::byte> memory) : memory_(memory) {}
  host_target(host_buffer owner) : memory_(owner.writable()), owner_(std::move(owner)) {}

  std::span<std::byte> bytes() const noexcept { return memory_; }
  const host_buffer& owner() const noexcept { return owner_; }

private:
  std::span<std::byte> memory_;
  host_buffer owner_;
};

/// What a mesh is made of.
struct mesh_config {
  /// Worlds over some or all of the ranks (`world::split`), which calls name. "tensor/0" is named
  /// so or, by a rank that is in it and in no other "tensor/...", as "tensor".
  std::vector<world> groups = {};
  /// Memory moves in chunks of so many bytes of each rank's larger buffer: while one is worked on,
  /// the next is on its way up and the one before on its way down.
  std::size_t chunk_bytes = std::size_t{4} << 20;
  /// Chunks on their way at a time: 1 to 1,024. Each rank keeps, for the collectives of each group
  /// that it uses and, in each group, for each rank that it sends to and for each that it receives
  /// from, so many chunks of device memory, and of pinned memory for each direction in which
  /// pageable memory went.
  std::size_t chunks = 4;
};

/// What every call may say.
struct mesh_options {
  /// Of a group; empty: all ranks.
  std::string group = {};
  /// From now on; 0: the default of the group's world.
  std::chrono::nanoseconds deadline{0};
  /// The membership of the group's world that the call means; 0: any.
  std::uint64_t membership = 0;
};

/// Collectives and messages of one rank over host memory, as programs with a thread or a process
/// per rank make them, staged through device memory and moved by the devices' links. Copies mean
/// the same rank; the last one answers what is pending, and waits for its own threads.
///
/// The k-th collective calls of all ranks of a group belong together, and the k-th `send` from one
/// rank to another and the k-th `recv` there. They must agree in verb, type, count, operation and
/// root. A rank's collectives in a group are done one after the other, in the order of its calls;
/// those of other groups, and messages with each rank, go on beside them, and so does whatever else
/// the groups' worlds are asked for.
///
/// A call has one end for all its ranks: it is done on each of them, or it fails on all, for one
/// cause. Only a rank whose deadline or `cancel` came before its turn has that as its own.
///
/// Memory that a call was given belongs to it until its answer. Then a span is not touched any
/// more, whatever the answer is; a pinned `host_buffer` that was to be written may still be, after
/// an error, until the device is done with it. After an error what was to be written has any
/// content.
///
/// Ranks are those of the group that a call names, and so are roots.
/// @errors errc::invalid_argument (at once): sizes that do not fit, no such group or rank, memory
///         that overlaps, reduce_op::premul_sum, a message of a rank to itself.
///         errc::collective_mismatch: the ranks' calls differ. errc::unavailable, too: the handle
///         of another rank is gone. errc::membership_changed, too: the group's world is without
///         some of its ranks. And as the message of the same name (troupe/collective.hpp), but
///         never errc::stale_ref: what made a chunk's memory stale is the cause.
/// @thread any; the order of the calls is the caller's
class mesh_comm {
public:
  /// One handle per rank of `all`, in rank order. All ranks are in this process.
  /// @errors errc::invalid_argument: a group with a device that is not in `all`, two groups of one
  ///         name with a rank in common, chunks that hold no element of each rank, or too
  ///         many of them
  static caf::expected<std::vector<mesh_comm>> open(const world& all, mesh_config config = {});

  /// In the world of all ranks.
  int rank() const noexcept;
  std::size_t size() const noexcept;
  /// In a group.
  /// @errors errc::invalid_argument: this rank is in no such group
  caf::expected<int> rank(std::string_view group) const;
  caf::expected<std::size_t> size(std::string_view group) const;
  /// For pinned memory (`device::allocate_pinned`).
  device where() const;

  /// In place.
  [[nodiscard]] pending<void> all_reduce(host_target buffer, dtype type,
                                         reduce_op op = reduce_op::sum,
                                         mesh_options options = {}) const;
  /// @shape  as many bytes; the same memory or no overlap
  [[nodiscard]] pending<void> all_reduce(host_source send, host_target recv, dtype type,
                                         reduce_op op = reduce_op::sum,
                                         mesh_options options = {}) const;
  /// From the root's `buffer` to the others'.
  [[nodiscard]] pending<void> broadcast(host_target buffer, dtype type, int root,
                                        mesh_options options = {}) const;
  /// @shape  recv: n times as many bytes as `send`, which may be this rank's part of it
  [[nodiscard]] pending<void> all_gather(host_source send, host_target recv, dtype type,
                                         mesh_options options = {}) const;
  /// @shape  send: n times as many bytes as `recv`, which may be this rank's part of it
  [[nodiscard]] pending<void> reduce_scatter(host_source send, host_target recv, dtype type,
                                             reduce_op op = reduce_op::sum,
                                             mesh_options options = {}) const;
  /// Done when the other rank has it.
  pending<void> send(host_source buffer, dtype type, int to, mesh_options options = {}) const;
  [[nodiscard]] pending<void> recv(host_target buffer, dtype type, int from,
                                   mesh_options options = {}) const;
  pending<void> barrier(mesh_options options = {}) const;

private:
  struct state;
  explicit mesh_comm(std::shared_ptr<state> x) : state_(std::move(x)) {}

  std::shared_ptr<state> state_;
};

} // namespace troupe
