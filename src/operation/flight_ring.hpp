/// The last operations of a lane, for a later diagnosis.
#pragma once

#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>
#include <vector>

namespace troupe::detail {

struct part;

/// Names a world in a record. Worlds with the same name differ in `id`; 0 is no world.
struct world_tag {
  std::uint64_t id = 0;
  std::array<char, 32> name{}; ///< truncated if longer; ends in 0
};

/// Returns a tag with an id that no other world of the process has.
world_tag make_world_tag(std::string_view name) noexcept;

enum class flight_state : std::uint8_t {
  issuing, ///< the lane is in the call
  issued,
  started, ///< all work before it in its stream is done
  done,
  failed,     ///< issued and over
  not_issued, ///< not yet, or never
  not_called, ///< not issued: its rank did not call, although others did
};

std::string_view to_string(flight_state x) noexcept;

/// The progress of a part.
struct flight_progress {
  flight_state state = flight_state::issuing;
  errc error{}; ///< why it failed or was not issued; 0: neither
  /// Of a step that runs as a graph: the last of its requests, counted from 1, that is known to be
  /// over. Only collectives tell that. 0: none is.
  std::uint16_t reached = 0;
  std::int32_t native_code = 0;
};

/// A range of bytes of a buffer.
struct flight_ref {
  std::uint64_t buffer = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// The work of one lane for an operation. Times: nanoseconds of `clock`; 0: not yet, or not
/// observed.
struct flight_entry {
  static constexpr std::size_t max_refs = 4;
  static constexpr std::uint8_t no_type = 0xff;
  static constexpr std::uint8_t no_way = 0xff;

  std::uint64_t operation = 0;
  std::uint64_t step = 0; ///< number of the run of a step that it belongs to; 0: of none
  const char* verb = "";  ///< lives forever
  world_tag world;
  std::uint64_t epoch = 0;
  std::uint64_t generation = 0;
  std::uint64_t count = 0; ///< elements; 0 where there is no type
  std::int32_t rank = -1;
  std::uint32_t part = 0; ///< index in the operation
  std::uint8_t stream = 0;
  std::uint8_t type = no_type;
  std::uint8_t refs = 0;     ///< number of entries in `ref`
  std::uint8_t ref_uses = 0; ///< two bits for each entry: reads, writes
  std::uint16_t refs_left_out = 0;
  std::uint8_t way = no_way; ///< of a collective: its `collective_way`
  std::uint8_t unused = 0;
  std::array<flight_ref, max_refs> ref;
  std::int64_t admitted_at = 0;
  std::int64_t issued_at = 0; ///< when the issuing call began
  std::int64_t started_at = 0;
  std::int64_t over_at = 0;
  flight_progress progress; ///< the last word of the entry

  void add_ref(const flight_ref& x, bool reads, bool writes) noexcept {
    if (refs == max_refs) {
      refs_left_out += refs_left_out != UINT16_MAX;
      return;
    }
    auto bits = static_cast<unsigned>(reads) | static_cast<unsigned>(writes) << 1;
    ref_uses = static_cast<std::uint8_t>(ref_uses | bits << (2 * refs));
    ref[refs++] = x;
  }
  bool ref_reads(std::size_t i) const noexcept { return (ref_uses >> (2 * i) & 1) != 0; }
  bool ref_writes(std::size_t i) const noexcept { return (ref_uses >> (2 * i) & 2) != 0; }
};

/// A ring of entries of a fixed size: the newest overwrites the oldest. One thread writes and never
/// waits; other threads read without stopping it.
/// @thread `add` and `advance`: the writer; the rest: any
class flight_ring {
public:
  static constexpr std::size_t default_capacity = 4096;

  explicit flight_ring(std::size_t capacity = default_capacity);

  /// Adds an entry. Returns its number for `advance`, which is never 0.
  std::uint64_t add(const flight_entry& x) noexcept;
  /// Updates an entry if it is still in the ring. `now` is used from `started` on.
  void advance(std::uint64_t entry, flight_progress x, std::int64_t now = 0) noexcept;

  /// Returns how many entries were ever added.
  std::uint64_t added() const noexcept { return added_.load(std::memory_order_acquire); }
  /// Returns the entries, oldest first, without those that are overwritten meanwhile.
  std::vector<flight_entry> read() const;

private:
  static constexpr std::size_t words = sizeof(flight_entry) / sizeof(std::uint64_t);
  static_assert(sizeof(flight_entry) % sizeof(std::uint64_t) == 0);
  static_assert(std::is_trivially_copyable_v<flight_entry>);

  struct alignas(64) slot {
    std::atomic<std::uint64_t> sequence{0}; // twice the entry's number; odd while it is written
    std::array<std::atomic<std::uint64_t>, words> word{};
  };

  bool read(std::uint64_t entry, flight_entry& into) const noexcept;
  slot& slot_of(std::uint64_t entry) const noexcept { return slots_[(entry - 1) % capacity_]; }

  const std::size_t capacity_;
  const std::unique_ptr<slot[]> slots_;
  std::atomic<std::uint64_t> added_{0};
};

/// Records the progress of a lane's parts. Takes no lock and allocates no memory.
/// @thread the lane; `read` and `holder`: any
class flight_log {
public:
  /// Notes that the call that issues `p` began at `now`.
  void issuing(part& p, std::uint64_t generation, std::int64_t now) noexcept;
  void issued(const part& p) noexcept;
  void started(const part& p, std::int64_t now) noexcept;
  /// Notes that `p` is over. `was_issued`: some of its work may have been issued.
  void over(part& p, bool was_issued, std::uint64_t generation, std::int64_t now) noexcept;
  /// Notes that the next part in order waits for operation `number`; 0: for none.
  void held_by(std::uint64_t number) noexcept { holder_.store(number, std::memory_order_relaxed); }

  std::vector<flight_entry> read() const { return ring_.read(); }
  std::uint64_t holder() const noexcept { return holder_.load(std::memory_order_relaxed); }

private:
  flight_ring ring_;
  std::atomic<std::uint64_t> holder_{0};
};

} // namespace troupe::detail
