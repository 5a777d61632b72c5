#include "sharing/memory_note.hpp"

#include "foundation/process_note.hpp"
#include "foundation/wire.hpp"

#include <algorithm>
#include <utility>

namespace troupe::detail {

namespace {

/// If there are more ranges than this, they are merged into one.
constexpr std::size_t most_unreadable = 8;

bool is_mode(access_mode x) noexcept { return x <= access_mode::read_write; }

std::vector<unreadable_range> few(std::vector<unreadable_range> unreadable) {
  if (unreadable.size() <= most_unreadable)
    return unreadable;
  auto all = unreadable.front();
  for (auto& x : unreadable) {
    all.begin = std::min(all.begin, x.begin);
    all.end = std::max(all.end, x.end);
    if (x.half_written())
      all.skipped_by = 0;
  }
  return {all};
}

void put(wire_writer& to, const std::vector<unreadable_range>& unreadable) {
  const auto told = few(unreadable);
  to.put(static_cast<std::uint32_t>(told.size()));
  for (auto& x : told) {
    to.put(std::uint64_t{x.begin});
    to.put(std::uint64_t{x.end});
    to.put(x.half_written());
    put(to, brief(x.cause));
  }
}

std::vector<unreadable_range> get_unreadable(wire_reader& from) {
  std::vector<unreadable_range> result;
  for (auto n = from.get<std::uint32_t>(); n > 0 && from.ok(); --n) {
    unreadable_range x{};
    x.begin = from.get<std::uint64_t>();
    x.end = from.get<std::uint64_t>();
    x.skipped_by =
        from.get<bool>() ? 0 : unreadable_range::several; // request numbers are local to a process
    x.cause = get_error(from);
    result.push_back(std::move(x));
  }
  return result;
}

} // namespace

std::vector<std::byte> to_note(const memory_note& x) {
  wire_writer to;
  to.put(x.what);
  to.put(x.number);
  switch (x.what) {
  case memory_note::kind::claim:
    to.put(x.token);
    to.put(x.mode);
    break;
  case memory_note::kind::lent:
    to.put(x.address);
    put(to, x.unreadable);
    break;
  case memory_note::kind::refused:
    put(to, brief(x.why));
    break;
  case memory_note::kind::given_back:
    put(to, x.unreadable);
    break;
  }
  return make_note(note_kind::memory, to.bytes());
}

std::optional<memory_note> memory_note_of(std::span<const std::byte> note) {
  wire_reader from{content_of(note)};
  memory_note x;
  x.what = from.get<memory_note::kind>();
  x.number = from.get<std::uint64_t>();
  switch (x.what) {
  case memory_note::kind::claim:
    x.token = from.get<gpu_token>();
    x.mode = from.get<access_mode>();
    if (!is_mode(x.mode))
      from.fail();
    break;
  case memory_note::kind::lent:
    x.address = from.get<std::uint64_t>();
    x.unreadable = get_unreadable(from);
    break;
  case memory_note::kind::refused:
    x.why = get_error(from);
    break;
  case memory_note::kind::given_back:
    x.unreadable = get_unreadable(from);
    break;
  default:
    from.fail();
  }
  if (!is_note(note_kind::memory, note) || !from.ok() || !from.at_end())
    return std::nullopt;
  return x;
}

} // namespace troupe::detail
