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

/// Host memory that a call reads: either the caller's memory or a `host_buffer`. The call keeps a
/// `host_buffer` alive; if it is pinned, the device reads it directly.
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

/// The configuration of a mesh.
struct mesh_config {
  /// Worlds over some or all of the ranks (`world::split`), which calls refer to by name. A rank
  /// can shorten the name "tensor/0" to "tensor" if it is in no other group "tensor/...".
  std::vector<world> groups = {};
  /// Data moves in chunks of at most this many bytes of each rank's larger buffer. While one chunk
  /// is processed, the next one is uploaded and the previous one is downloaded.
  std::size_t chunk_bytes = std::size_t{4} << 20;
  /// Number of chunks in flight: 1 to 1,024. A rank keeps this many chunks of device memory, and
  /// this many chunks of pinned memory for each direction in which pageable memory went. It keeps a
  /// separate set in each group: for collectives, for each rank to which it sends, and for each
  /// rank from which it receives.
  std::size_t chunks = 4;
};

/// Options of a call.
struct mesh_options {
  /// Name of a group; empty: all ranks.
  std::string group = {};
  /// Time limit, from the call on; 0: the default of the group's world.
  std::chrono::nanoseconds deadline{0};
  /// The membership of the group's world that the call requires; 0: any.
  std::uint64_t membership = 0;
};

/// Collectives and messages of one rank over host memory, for programs with a thread or a process
/// per rank. Data is staged through device memory and moves over the devices' links. Copies refer
/// to the same rank. Destroying the last copy completes its calls and waits for its threads.
///
/// The k-th collective calls of all ranks of a group match each other, as do the k-th `send` from
/// one rank to another and the k-th `recv` there. Matching calls must agree in verb, type, count,
/// operation and root. A rank's collectives in a group run one after the other, in the order of its
/// calls. Collectives of other groups, messages with each rank, and other requests to the groups'
/// worlds run concurrently.
///
/// A call ends in the same way for all its ranks: it succeeds on each of them, or it fails on all,
/// for one cause. The only exception is a rank whose deadline or `cancel` comes before its turn: it
/// gets that as its own error.
///
/// Memory that is passed to a call belongs to it until the call completes. After that, the library
/// does not touch a span, whatever the result is. After an error, a device may still write to a
/// pinned `host_buffer` that is a target, until it is done with it. After an error, the content of
/// targets is unspecified.
///
/// Ranks and roots are those of the group that a call names.
/// @errors errc::invalid_argument (at once): sizes that do not fit, no such group or rank, memory
///         that overlaps, reduce_op::premul_sum, a message of a rank to itself.
///         errc::collective_mismatch: the ranks' calls differ. errc::unavailable, too: the handle
///         of another rank is gone. errc::membership_changed, too: the group's world is without
///         some of its ranks. All others are those of the message of the same name
///         (troupe/collective.hpp), except errc::stale_ref: if a chunk's memory becomes stale, the
///         call gets the cause of that.
/// @thread any; the caller determines the order of the calls
class mesh_comm {
public:
  /// Returns one handle per rank of `all`, in rank order. All ranks are in this process.
  /// @errors errc::invalid_argument: a group has a device that is not in `all`; two groups of one
  ///         name have a rank in common; a chunk cannot hold an element of each rank; too many
  ///         chunks. errc::not_supported: a rank is in another process
  static caf::expected<std::vector<mesh_comm>> open(const world& all, mesh_config config = {});

  /// Returns the rank in the world of all ranks.
  int rank() const noexcept;
  std::size_t size() const noexcept;
  /// Returns the rank in a group.
  /// @errors errc::invalid_argument: this rank is in no such group
  caf::expected<int> rank(std::string_view group) const;
  caf::expected<std::size_t> size(std::string_view group) const;
  /// Returns the rank's device, for example to allocate pinned memory (`device::allocate_pinned`).
  device where() const;

  /// Runs in place.
  [[nodiscard]] pending<void> all_reduce(host_target buffer, dtype type,
                                         reduce_op op = reduce_op::sum,
                                         mesh_options options = {}) const;
  /// @shape  send, recv: the same number of bytes; the same memory or no overlap
  [[nodiscard]] pending<void> all_reduce(host_source send, host_target recv, dtype type,
                                         reduce_op op = reduce_op::sum,
                                         mesh_options options = {}) const;
  /// Copies the root's `buffer` to those of the other ranks.
  [[nodiscard]] pending<void> broadcast(host_target buffer, dtype type, int root,
                                        mesh_options options = {}) const;
  /// @shape  recv: n times as many bytes as `send`, which may be this rank's part of `recv`
  [[nodiscard]] pending<void> all_gather(host_source send, host_target recv, dtype type,
                                         mesh_options options = {}) const;
  /// @shape  send: n times as many bytes as `recv`, which may be this rank's part of `send`
  [[nodiscard]] pending<void> reduce_scatter(host_source send, host_target recv, dtype type,
                                             reduce_op op = reduce_op::sum,
                                             mesh_options options = {}) const;
  /// Completes when the other rank has received the data.
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
