#include "operation/flight_ring.hpp"

#include "operation/operation.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace troupe::detail {

namespace {

std::atomic<std::uint64_t> last_world{0};

constexpr std::size_t word_of(std::size_t offset) { return offset / sizeof(std::uint64_t); }

constexpr auto started_word = word_of(offsetof(flight_entry, started_at));
constexpr auto over_word = word_of(offsetof(flight_entry, over_at));
constexpr auto progress_word = word_of(offsetof(flight_entry, progress));

flight_progress end_of(const part& p, bool was_issued) noexcept {
  if (was_issued && !p.of->failed())
    return {flight_state::done};
  flight_progress result{was_issued ? flight_state::failed : flight_state::not_issued};
  if (auto cause = failure_of(p.of->cause())) {
    result.error = cause->code;
    result.native_code = cause->native_code;
  }
  if (was_issued)
    result.reached = p.of->record_of(p).progress.reached;
  return result;
}

} // namespace

world_tag make_world_tag(std::string_view name) noexcept {
  world_tag result;
  result.id = last_world.fetch_add(1, std::memory_order_relaxed) + 1;
  std::copy_n(name.begin(), std::min(name.size(), result.name.size() - 1), result.name.begin());
  return result;
}

std::string_view to_string(flight_state x) noexcept {
  switch (x) {
  case flight_state::issuing:
    return "issuing";
  case flight_state::issued:
    return "issued";
  case flight_state::started:
    return "started";
  case flight_state::done:
    return "done";
  case flight_state::failed:
    return "failed";
  case flight_state::not_issued:
    return "not issued";
  case flight_state::not_called:
    return "not called";
  }
  return "unknown";
}

flight_ring::flight_ring(std::size_t capacity)
    : capacity_(capacity), slots_(std::make_unique<slot[]>(capacity)) {}

// Every word is stored with release and loaded with acquire. ThreadSanitizer does not know fences,
// so there are none. A reader that sees a word of a new entry also sees the odd number before it.

std::uint64_t flight_ring::add(const flight_entry& x) noexcept {
  auto entry = added_.load(std::memory_order_relaxed) + 1;
  auto& s = slot_of(entry);
  auto* from = reinterpret_cast<const char*>(&x);
  s.sequence.store(2 * entry - 1, std::memory_order_relaxed);
  for (auto& w : s.word) {
    std::uint64_t value = 0;
    std::memcpy(&value, from, sizeof value);
    from += sizeof value;
    w.store(value, std::memory_order_release);
  }
  s.sequence.store(2 * entry, std::memory_order_release);
  added_.store(entry, std::memory_order_release);
  return entry;
}

void flight_ring::advance(std::uint64_t entry, flight_progress x, std::int64_t now) noexcept {
  auto& s = slot_of(entry);
  if (s.sequence.load(std::memory_order_relaxed) != 2 * entry)
    return;
  auto time = static_cast<std::uint64_t>(now);
  if (x.state == flight_state::started)
    s.word[started_word].store(time, std::memory_order_release);
  else if (x.state >= flight_state::done)
    s.word[over_word].store(time, std::memory_order_release);
  s.word[progress_word].store(std::bit_cast<std::uint64_t>(x),
                              std::memory_order_release); // last: see `read`
}

bool flight_ring::read(std::uint64_t entry, flight_entry& into) const noexcept {
  auto& s = slot_of(entry);
  if (s.sequence.load(std::memory_order_acquire) != 2 * entry)
    return false;
  // Read first the word that is written last: then the times that belong to it are there.
  into.progress =
      std::bit_cast<flight_progress>(s.word[progress_word].load(std::memory_order_acquire));
  auto* to = reinterpret_cast<char*>(&into);
  for (std::size_t i = 0; i < progress_word; ++i) {
    auto value = s.word[i].load(std::memory_order_acquire);
    std::memcpy(to + i * sizeof value, &value, sizeof value);
  }
  if (s.sequence.load(std::memory_order_relaxed) != 2 * entry)
    return false;
  // The part may have advanced meanwhile: drop the times of later states.
  if (into.progress.state < flight_state::started)
    into.started_at = 0;
  if (into.progress.state < flight_state::done)
    into.over_at = 0;
  return true;
}

std::vector<flight_entry> flight_ring::read() const {
  static_assert(progress_word + 1 == words);
  std::vector<flight_entry> result;
  auto last = added();
  auto first = last > capacity_ ? last - capacity_ + 1 : 1;
  result.reserve(static_cast<std::size_t>(last - first + 1));
  flight_entry x;
  for (auto entry = first; entry <= last; ++entry)
    if (read(entry, x))
      result.push_back(x);
  return result;
}

void flight_log::issuing(part& p, std::uint64_t generation, std::int64_t now) noexcept {
  auto x = p.of->record_of(p);
  x.generation = generation;
  x.issued_at = now;
  x.progress = {flight_state::issuing};
  p.record = ring_.add(x);
}

void flight_log::issued(const part& p) noexcept { ring_.advance(p.record, {flight_state::issued}); }

void flight_log::started(const part& p, std::int64_t now) noexcept {
  ring_.advance(p.record, {flight_state::started}, now);
}

void flight_log::over(part& p, bool was_issued, std::uint64_t generation,
                      std::int64_t now) noexcept {
  auto end = end_of(p, was_issued);
  if (p.record != 0)
    return ring_.advance(p.record, end, now);
  auto x = p.of->record_of(p);
  x.generation = generation;
  x.over_at = now;
  if (x.progress.state == flight_state::not_called)
    end.state = flight_state::not_called;
  x.progress = end;
  p.record = ring_.add(x);
}

} // namespace troupe::detail
