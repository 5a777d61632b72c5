/// Direct collectives: which kernels do the calls of a rank.
#pragma once

#include "backend/cuda/direct_layout.hpp"
#include <troupe/backend.hpp>
#include <troupe/dtype.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace troupe::detail {

/// The same for all ranks of a communicator.
struct direct_limits {
  std::size_t pushed_reduction = std::size_t{1} << 20; ///< larger ones are pulled. @units bytes
  std::size_t pushed_message = std::size_t{256} << 10; ///< larger ones are put. @units bytes
  /// Larger pulled reductions have more blocks. Few leave most multiprocessors to kernels of the
  /// user. @units bytes of a rank's buffer
  std::size_t pulled_by_few = std::size_t{64} << 20;
  // The blocks of all kernels that may run on a device at the same time must fit on it together.
  unsigned push_channels = direct::most_channels;
  unsigned few_pull_channels = 20;
  unsigned pull_channels = direct::most_channels;
  unsigned move_channels = direct::most_channels / 2;
};

/// Returns the arguments of a kernel for at most so many messages.
template <std::size_t Most>
direct::move_arguments<Most> arguments_of(std::span<const direct::message> messages) noexcept {
  direct::move_arguments<Most> result; // what is not used stays as it is: there may be much of it
  result.count = static_cast<std::uint32_t>(messages.size());
  result.log2_threads = 0;
  std::ranges::copy(messages, result.list);
  return result;
}

/// Launches the kernels of one rank, in its stream.
class direct_launcher {
public:
  /// @shape threads: of a block
  [[nodiscard]] virtual caf::error push(dtype type, unsigned channels, unsigned threads,
                                        const direct::reduce_arguments& arguments) = 0;
  /// By blocks of `direct::pulling_threads`.
  [[nodiscard]] virtual caf::error pull(dtype type, unsigned channels,
                                        const direct::reduce_arguments& arguments) = 0;
  /// @shape messages: at most `direct::many_messages`
  [[nodiscard]] virtual caf::error move(unsigned channels, unsigned threads,
                                        std::span<const direct::message> messages) = 0;
  /// @shape messages: `fits_trade`; log2_threads: of the threads for each message
  [[nodiscard]] virtual caf::error trade(unsigned channels, unsigned log2_threads,
                                         std::span<const direct::message> messages) = 0;

protected:
  ~direct_launcher() = default;
};

/// Returns whether `direct::trade` can do the messages of rank `rank`: at most one to each peer and
/// one from it, each pushed, and over each channel at most one slot. Those to itself are as small.
bool fits_trade(std::span<const direct::message> messages, unsigned rank) noexcept;

/// Messages of one kernel while they are collected. They are kept, so that their memory is used
/// again.
struct direct_messages {
  std::vector<direct::message> all;
  std::vector<direct::message> to_itself;
  std::vector<direct::message> from_itself;
};

/// Returns the error of a rank whose call does not match that of a peer.
/// @errors errc::collective_mismatch, always
caf::error mismatch_error(const direct::mismatch& x);

/// Launches what does `calls`, which are valid, as one group. All messages of the group that are
/// `send` or `recv` are in one kernel. The other calls have a kernel each, in their order, which is
/// the same for all ranks.
/// @shape room: its content does not matter
/// @errors errc::not_supported: more messages than `direct::many_messages`; those of `to`
caf::error launch_direct(std::span<const collective_call> calls, unsigned rank, unsigned size,
                         const direct_limits& limits, direct_messages& room, direct_launcher& to);

} // namespace troupe::detail
