/// Random collectives on ranges of buffers. A row of buffers has one buffer on each device.
#pragma once

#include "chaos/content_model.hpp"
#include "support/random.hpp"
#include <troupe/collective.hpp>

#include <cstddef>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

/// A range of a buffer.
struct piece {
  std::size_t row = 0;
  int device = 0;
  std::size_t first = 0;
  std::size_t count = 0;
};

/// The ranges that the ranks send and receive; none for ranks that do not.
struct rank_pieces {
  collective_shape shape;
  int sender = -1; ///< for a message
  std::vector<std::optional<piece>> send;
  std::vector<std::optional<piece>> recv;
  bool in_place = false;

  /// Returns the ranks that send, in order.
  std::vector<std::size_t> senders() const;
};

/// Returns a collective of any kind, in place or from row `from` to row `to`, on buffers of `count`
/// elements. `on`: the devices, by rank.
rank_pieces choose_collective(std::mt19937_64& random, const std::vector<int>& on, dtype type,
                              std::size_t count, std::size_t from, std::size_t to);
/// Returns a message between two ranks, which may be the same.
rank_pieces whole_message(const std::vector<int>& on, dtype type, std::size_t sender, piece from,
                          std::size_t receiver, piece to);

/// Returns the request of all ranks. `ref` returns the handle of a piece.
collective request_of(const rank_pieces& x, const std::function<any_gpu_ref(const piece&)>& ref);

/// Returns a function from the content of the senders to the content of each rank. For a message
/// the result is only the receiver's content.
content_model::function semantics_of(const rank_pieces& x);

} // namespace troupe::testing
