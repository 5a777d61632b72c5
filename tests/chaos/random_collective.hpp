/// Random collectives on parts of buffers that lie in rows, one buffer of a row on each device.
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

/// A part of a buffer.
struct piece {
  std::size_t row = 0;
  int device = 0;
  std::size_t first = 0;
  std::size_t count = 0;
};

/// What the ranks send and receive in a collective or a message; nothing where they do not.
struct rank_pieces {
  collective_shape shape;
  int sender = -1; ///< of a message
  std::vector<std::optional<piece>> send;
  std::vector<std::optional<piece>> recv;
  bool in_place = false;

  /// The ranks that send, in order, and what each of them does.
  std::vector<std::size_t> senders() const;
};

/// Of any kind, in place or from row `from` to row `to`, on buffers of `count` elements; `on`: the
/// devices, by rank.
rank_pieces choose_collective(std::mt19937_64& random, const std::vector<int>& on, dtype type,
                              std::size_t count, std::size_t from, std::size_t to);
/// From rank to rank, which may be the same.
rank_pieces whole_message(const std::vector<int>& on, dtype type, std::size_t sender, piece from,
                          std::size_t receiver, piece to);

/// The request of all ranks; `ref`: the handle of a piece.
collective request_of(const rank_pieces& x, const std::function<any_gpu_ref(const piece&)>& ref);

/// What it gives to each rank, of what its senders have; of a message: to its receiver alone.
content_model::function semantics_of(const rank_pieces& x);

} // namespace troupe::testing
