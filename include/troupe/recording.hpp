/// A list of requests over named buffers, from which a world makes a step.
#pragma once

#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/scalar.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace troupe {

/// The name of a step's buffers, one for each rank, or a part of them: `"x"` or `{"x", 100, 50}`.
struct buffer_name {
  /// A count: all elements from `first` on.
  static constexpr std::size_t rest = SIZE_MAX;

  /// No buffers: in a collective, the form in place.
  buffer_name() = default;
  /// @units  from, number: elements
  buffer_name(std::string x, std::size_t from = 0, std::size_t number = rest)
      : name(std::move(x)), first(from), count(number) {}
  buffer_name(const char* x, std::size_t from = 0, std::size_t number = rest)
      : name(x), first(from), count(number) {}

  friend bool operator==(const buffer_name&, const buffer_name&) = default;

  std::string name = {};
  std::size_t first = 0;
  std::size_t count = rest;
};

/// A `collective` over names in place of handles: for forms that `recording` has no function for,
/// such as reduce_op::premul_sum.
struct named_collective {
  collective_kind kind = collective_kind::all_reduce;
  buffer_name send = {};
  buffer_name recv = {};
  reduce_op op = reduce_op::sum;
  std::vector<double> factors = {}; ///< one per rank, for reduce_op::premul_sum
  std::int32_t rank = -1;           ///< the rank that sends a message
  std::int32_t peer = -1;           ///< the root, or the rank that receives a message
  std::vector<std::vector<std::uint64_t>> counts = {}; ///< of all_to_all_v
};

/// The buffers that a step uses under a name, one for each rank, in rank order. A handle may be
/// empty where its rank does not use it.
struct named_buffers {
  template <ref_range Refs>
  named_buffers(std::string x, const Refs& refs) : name(std::move(x)), handles(any(refs)) {}

  std::string name;
  std::vector<any_gpu_ref> handles;
};

namespace detail {

struct recorded_fill {
  buffer_name target;
  scalar element;
};

struct recorded_copy {
  buffer_name target;
  buffer_name source;
};

struct recorded_launch {
  std::string name;
  std::vector<std::uint8_t> arguments;
  std::vector<buffer_name> reads;
  std::vector<buffer_name> writes;
};

struct recorded_group {
  std::vector<named_collective> calls;
  std::size_t others = 0; ///< requests that are no collectives, which a group cannot have
};

struct recorded_request {
  std::optional<int> rank = {}; ///< of a request to the device of one rank
  std::variant<recorded_fill, recorded_copy, recorded_launch, named_collective, recorded_group>
      what;
};

} // namespace detail

class rank_recording;

/// Requests over named buffers, in the order of the calls. `world::record` checks them and makes a
/// step. The functions have the names and the effects of those of `world`, and of `device` for the
/// device of each rank. Where a buffer is named, each rank uses its own.
/// @thread one at a time
class recording {
public:
  /// Returns an object that records requests to the device of one rank. It refers to this object.
  rank_recording on(int rank);

  /// Writes one element to every place of the buffers of all ranks.
  recording& fill(buffer_name target, scalar element);
  /// Copies within the device of each rank.
  recording& copy(buffer_name target, buffer_name source);
  /// Runs a registered launch, or one of a library, on the device of each rank.
  recording& launch(std::string name, std::vector<std::uint8_t> arguments,
                    std::vector<buffer_name> reads, std::vector<buffer_name> writes);

  /// Runs in place.
  recording& all_reduce(buffer_name buffers, reduce_op op = reduce_op::sum);
  recording& all_reduce(buffer_name send, buffer_name recv, reduce_op op = reduce_op::sum);
  /// Runs in place: the root's buffer gets the result.
  recording& reduce(buffer_name buffers, int root, reduce_op op = reduce_op::sum);
  recording& reduce(buffer_name send, buffer_name recv, int root, reduce_op op = reduce_op::sum);
  /// Runs in place: copies the root's buffer to those of the other ranks.
  recording& broadcast(buffer_name buffers, int root);
  recording& broadcast(buffer_name send, buffer_name recv, int root);
  /// Runs in place.
  recording& all_gather(buffer_name recv);
  recording& all_gather(buffer_name send, buffer_name recv);
  /// Runs in place.
  recording& reduce_scatter(buffer_name send, reduce_op op = reduce_op::sum);
  recording& reduce_scatter(buffer_name send, buffer_name recv, reduce_op op = reduce_op::sum);
  recording& all_to_all(buffer_name send, buffer_name recv);
  /// `counts[q][r]`: elements from rank q to rank r.
  recording& all_to_all_v(buffer_name send, buffer_name recv,
                          std::vector<std::vector<std::uint64_t>> counts);
  recording& gather(buffer_name send, buffer_name recv, int root);
  recording& scatter(buffer_name send, buffer_name recv, int root);
  /// Sends from rank `from` to rank `to`.
  recording& send_recv(int from, buffer_name send, int to, buffer_name recv);
  recording& barrier();
  /// Records any of the above collectives.
  recording& run(named_collective what);
  /// Records the collectives of `calls` as one request (`troupe::group`). They progress together.
  /// @shape  calls: collectives only, else `world::record` gives errc::invalid_argument
  recording& group(const recording& calls);

  /// Returns the number of requests.
  std::size_t size() const noexcept { return requests_.size(); }

  /// Internal.
  const std::vector<detail::recorded_request>& requests() const noexcept { return requests_; }

private:
  friend class rank_recording;

  std::vector<detail::recorded_request> requests_;
};

/// Records requests to the device of one rank. The `recording` must outlive it.
/// @errors of `world::record`: errc::invalid_argument: the rank is out of range
class rank_recording {
public:
  const rank_recording& fill(buffer_name target, scalar element) const;
  const rank_recording& copy(buffer_name target, buffer_name source) const;
  const rank_recording& launch(std::string name, std::vector<std::uint8_t> arguments,
                               std::vector<buffer_name> reads,
                               std::vector<buffer_name> writes) const;

private:
  friend class recording;
  rank_recording(recording& to, int rank) : to_(&to), rank_(rank) {}

  recording* to_;
  int rank_;
};

} // namespace troupe
