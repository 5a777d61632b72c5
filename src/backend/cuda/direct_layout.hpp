/// Direct collectives: what the kernels of direct.cu and the code that launches them share.
///
/// The ranks of a communicator exchange data through channels. A channel leads one way, from one
/// rank to another one, and one block of threads at either end uses it. Its messages are numbered.
/// Its slots lie in the receiver's memory. The sender writes message `n` into slot `n % slots` once
/// the receiver has read message `n - slots`: it has acknowledged it, or has sent a message that it
/// only sends after that. Each 16 bytes in a slot are a packet: 8 bytes of data, and a mark made of
/// the number beside each half. So a packet tells by itself whether it has arrived, and no barrier
/// is needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace troupe::detail::direct {

inline constexpr unsigned most_ranks = 8;
inline constexpr unsigned most_channels = 64; ///< from one rank to another one
inline constexpr unsigned slots = 2;          ///< of a channel
inline constexpr unsigned slot_packets = 512;
inline constexpr unsigned packet_bytes = 8;    ///< of data
inline constexpr unsigned packets_at_once = 4; ///< of a traded message, by one thread
inline constexpr unsigned vector_bytes = 16;   ///< read or written at once
inline constexpr unsigned block_threads = 512;
inline constexpr unsigned pulling_threads = 1024; ///< of a block that pulls
// Blocks of each kind of kernel that fit on a multiprocessor, by their registers.
inline constexpr unsigned pushing_blocks = 2;
inline constexpr unsigned pulling_blocks = 1;
inline constexpr unsigned moving_blocks = 2;
/// A message of this number and of each multiple clears its slot, so that no mark of a former
/// message is left there when the numbers begin again.
inline constexpr std::uint32_t clearing_period = std::uint32_t{1} << 20;

/// Returns `plane::first` for the `n`th communicator. Those of different ones, and the marks made
/// of their numbers, are far from each other. The numbers do not come to 0 before the first message
/// that clears its slot: until that one is acknowledged, 0 may be in place of an acknowledged
/// number.
constexpr std::uint32_t first_number(std::uint32_t n) noexcept {
  const std::uint32_t x = n * 0x9e37'79b1; // odd, so that none recurs
  return x <= 0u - 2 * clearing_period ? x : x - 4 * clearing_period;
}

struct alignas(16) packet {
  std::uint32_t low = 0;
  std::uint32_t low_mark = 0;
  std::uint32_t high = 0;
  std::uint32_t high_mark = 0;
};

/// The numbers of the last messages of one rank's channels to a peer and from it, less
/// `plane::first`, but for the acknowledged one.
struct alignas(16) channel_numbers {
  std::uint32_t sent = 0;
  std::uint32_t acknowledged = 0; ///< written by the peer: of the messages that were sent
  std::uint32_t received = 0;
  std::uint32_t read = 0; ///< of those that were sent: what the peer sent shows that it has read it
};

/// Two ranks' calls that do not match.
struct mismatch {
  std::uint32_t is_there = 0; ///< 1: the rest is written
  std::uint32_t rank = 0;     ///< the one that found it
  std::uint32_t peer = 0;
  std::uint32_t own[2] = {};    ///< its signature, low half first
  std::uint32_t theirs[2] = {}; ///< the peer's
};

/// The memory of one rank, to which its peers have access. All zeros at the start.
struct arena {
  channel_numbers numbers[most_ranks][most_channels]; // by peer
  /// Where a peer wants the next messages of the channel to it, if they are written there directly:
  /// its packet for message `n` is in place `n % slots`.
  packet wanted_at[most_ranks][most_channels][slots];
  /// Signatures of the calls to which messages belong: beside each slot by its sender, and beside
  /// `wanted_at` by the receiver.
  packet signed_by_sender[most_ranks][most_channels][slots];
  packet signed_by_receiver[most_ranks][most_channels][slots];
  /// 1: a kernel of some rank was aborted, so the numbers are not right. Set on all ranks.
  std::uint32_t stop = 0;
  std::uint32_t blocks_over = 0; ///< of the kernel that runs
  std::uint32_t writing = 0;     ///< 1: it may write to memory of peers' users
  /// By rank; 1: a kernel of that rank was aborted, and all its blocks are over.
  std::uint32_t stopped[most_ranks] = {};
  std::uint32_t mismatches = 0;     ///< that threads of this rank have found
  mismatch mismatch_of[most_ranks]; ///< by the rank that found it
  /// By sender; only of the ranks that there are.
  alignas(128) packet slot[most_ranks][most_channels][slots][slot_packets];
};

/// Returns the number of bytes of an arena for `size` ranks.
constexpr std::size_t arena_bytes(unsigned size) noexcept {
  return sizeof(arena) - (most_ranks - size) * sizeof(arena{}.slot[0]);
}

/// How long an aborted kernel stays at most, in case that a device of a peer stands still.
/// Otherwise the peer's kernel ends sooner: it looks at `arena::stop` after so much.
/// @units ns; vectors or elements that a thread combines; bytes that a block puts
inline constexpr std::uint64_t longest_stay = 20'000'000;
inline constexpr unsigned pulled_between_looks = 64;
inline constexpr std::size_t put_between_looks = std::size_t{4} << 20;

/// One rank's view of its communicator; the first argument of each kernel.
struct plane {
  arena* at[most_ranks]; ///< by rank
  /// In pinned memory: set to `number` as the kernel ends. Null in a captured kernel, which does
  /// not count.
  std::uint32_t* ended;
  /// In pinned memory: set to `place` when the kernel is about to end. May be null.
  std::uint32_t* reached;
  const std::uint32_t* aborted; ///< in pinned memory: not 0 once the kernels are to end at once
  /// In pinned memory, for the host: calls that do not match. Null: the ranks' calls are known to
  /// match, so nothing is signed.
  mismatch* found;
  std::uint32_t number; ///< of the kernel
  std::uint32_t place;  ///< of the kernel in a step
  /// The number that 0 stands for in `arena::numbers`, far from those of communicators that had the
  /// arenas before: what their kernels wrote to peers may arrive after they have ended.
  std::uint32_t first;
  unsigned rank;
  unsigned size;
};

/// Returns how much of `all` each of `number` channels or ranks has, in order, in multiples of
/// `unit`. The last ones have less, or nothing.
constexpr std::size_t share_of(std::size_t all, unsigned number, std::size_t unit = 1) noexcept {
  return ((all + number - 1) / number + unit - 1) / unit * unit;
}

/// Returns the packets of a message; an empty one has one.
constexpr std::size_t packets_of(std::size_t bytes) noexcept {
  return bytes == 0 ? 1 : (bytes + packet_bytes - 1) / packet_bytes;
}

enum class reduction : std::uint32_t { add, multiply, lesser, greater };

/// A reduction: an all_reduce, a reduce or a reduce_scatter.
/// @shape all_reduce, reduce: `count` elements of `in`, and of `out` if the rank is in `targets`;
///        reduce_scatter: `size * count` elements of `in` and `count` of `out`
/// @units elements
struct reduce_arguments {
  const void* in;
  void* out;
  std::size_t count;
  std::size_t share;        ///< pushed: packets of each channel; pulled: elements of each rank
  std::uint64_t factor;     ///< its first bytes are the element by which `in` is multiplied
  std::uint32_t has_factor; ///< 1: it is
  std::uint32_t targets;    ///< one bit for each rank that gets the result
  std::uint32_t scatters;   ///< 1: each rank gets its own block of the result
  std::uint32_t averages;   ///< 1: the sum is divided by the number of ranks
  reduction op;
  std::uint64_t signature;
};

enum class route : std::uint8_t {
  push, ///< through the slots
  put,  ///< written to where the receiver wants it; its memory is accessible to the sender
};

/// A channel puts a multiple of this, except for the end of a message. @units bytes
inline constexpr std::size_t put_unit = 128;

/// One message to a peer or from it, or of the rank to itself, which is put.
struct message {
  void* memory;
  std::size_t bytes;   ///< 0: it has only one empty packet
  std::uint32_t share; ///< of each channel: packets if it is pushed, else units of `put_unit`
  std::uint8_t peer;
  bool is_sent; ///< or else received
  route way;
  std::uint8_t tag; ///< of its call, as in `signature_of`
};

inline constexpr unsigned signature_bytes_shift = 20;

/// Returns the signature of a call: what has to be the same on two ranks that exchange data.
/// @shape bytes: from one to the other; tag: 8 bits; rest: 12 bits, 0 for messages
constexpr std::uint64_t signature_of(std::uint64_t bytes, unsigned tag,
                                     unsigned rest = 0) noexcept {
  return bytes << signature_bytes_shift | rest << 8 | tag;
}

/// Returns a message of some channels.
constexpr message message_of(void* memory, std::size_t bytes, unsigned channels, unsigned peer,
                             bool is_sent, route way, std::uint8_t tag = 0) noexcept {
  const auto all = way == route::push ? packets_of(bytes) : (bytes + put_unit - 1) / put_unit;
  return {memory,
          bytes,
          static_cast<std::uint32_t>(share_of(all, channels)),
          static_cast<std::uint8_t>(peer),
          is_sent,
          way,
          tag};
}

/// The messages of one rank, in the order of each pair of ranks. A message to itself is directly
/// before the one that it becomes.
template <std::size_t Most> struct move_arguments {
  std::uint32_t count;
  std::uint32_t log2_threads; ///< traded: of the threads that do each message
  message list[Most];
};

// Fewer take less time to launch.
inline constexpr std::size_t messages_of_pair = 4; ///< of two ranks, each also with itself
inline constexpr std::size_t few_messages = 2 * most_ranks;
inline constexpr std::size_t many_messages = 1024;

} // namespace troupe::detail::direct
