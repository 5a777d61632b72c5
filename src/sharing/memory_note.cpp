#include "sharing/memory_note.hpp"

#include "foundation/error_text.hpp"
#include "foundation/process_note.hpp"
#include "foundation/wire.hpp"

#include <algorithm>
#include <utility>

namespace troupe::detail {

namespace {

/// If there are more ranges than this, they are merged into one.
constexpr std::size_t most_unreadable = 8;

/// Returns the ranges for another process: few, with short texts, and without the numbers of this
/// process's requests.
std::vector<unreadable_range> for_note(std::vector<unreadable_range> unreadable) {
  if (unreadable.size() > most_unreadable) {
    auto all = unreadable.front();
    for (auto& x : unreadable) {
      all.begin = std::min(all.begin, x.begin);
      all.end = std::max(all.end, x.end);
      if (x.half_written())
        all.skipped_by = 0;
    }
    unreadable = {std::move(all)};
  }
  for (auto& x : unreadable) {
    x.cause = brief(x.cause);
    if (!x.half_written())
      x.skipped_by = unreadable_range::several;
  }
  return unreadable;
}

} // namespace

void wire_fields(auto& wire, message_of<unreadable_range> auto& x) {
  wire(x.begin, x.end, x.skipped_by, x.cause);
  wire.require(x.half_written() || x.skipped_by == unreadable_range::several);
}

void wire_fields(auto& wire, message_of<memory_note> auto& x) {
  wire(x.what, x.number);
  switch (x.what) {
  case memory_note::kind::claim:
    wire(x.token, x.mode);
    return wire.require(x.mode <= access_mode::read_write);
  case memory_note::kind::lent:
    return wire(x.address, x.word, x.unreadable);
  case memory_note::kind::refused:
    return wire(x.why);
  case memory_note::kind::given_back:
    return wire(x.unreadable);
  }
  wire.require(false);
}

std::vector<std::byte> to_note(memory_note x) {
  x.why = brief(x.why);
  x.unreadable = for_note(std::move(x.unreadable));
  wire_writer to;
  to.put(x);
  return make_note(note_kind::memory, to.bytes());
}

std::optional<memory_note> memory_note_of(std::span<const std::byte> note) {
  if (!is_note(note_kind::memory, note))
    return std::nullopt;
  return read_message<memory_note>(content_of(note));
}

} // namespace troupe::detail
