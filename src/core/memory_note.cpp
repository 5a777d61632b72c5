#include "core/memory_note.hpp"

#include "core/process_note.hpp"
#include "core/wire.hpp"

#include <utility>

namespace troupe::detail {

namespace {

bool is_mode(access_mode x) noexcept { return x <= access_mode::read_write; }

} // namespace

std::vector<std::byte> to_note(const memory_note& x) {
  wire_writer to;
  to.put(x.what);
  to.put(x.number);
  switch (x.what) {
  case memory_note::kind::claim:
    to.put(x.token.node);
    to.put(x.token.device);
    to.put(x.token.buffer);
    to.put(x.token.generation);
    to.put(x.token.type);
    to.put(x.token.offset);
    to.put(x.token.count);
    to.put(x.mode);
    break;
  case memory_note::kind::lent:
    to.put(x.address);
    break;
  case memory_note::kind::refused:
  case memory_note::kind::ended:
    put(to, x.why);
    break;
  case memory_note::kind::given_back:
    to.put(static_cast<std::uint32_t>(x.wounds.size()));
    for (auto& w : x.wounds) {
      to.put(std::uint64_t{w.begin});
      to.put(std::uint64_t{w.end});
      put(to, w.cause);
    }
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
    x.token.node = from.get<std::uint64_t>();
    x.token.device = from.get<std::int32_t>();
    x.token.buffer = from.get<std::uint64_t>();
    x.token.generation = from.get<std::uint64_t>();
    x.token.type = from.get<dtype>();
    x.token.offset = from.get<std::uint64_t>();
    x.token.count = from.get<std::uint64_t>();
    x.mode = from.get<access_mode>();
    if (!is_mode(x.mode))
      from.fail();
    break;
  case memory_note::kind::lent:
    x.address = from.get<std::uint64_t>();
    break;
  case memory_note::kind::refused:
  case memory_note::kind::ended:
    x.why = get_error(from);
    break;
  case memory_note::kind::given_back:
    for (auto n = from.get<std::uint32_t>(); n > 0 && from.ok(); --n) {
      wound w;
      w.begin = from.get<std::uint64_t>();
      w.end = from.get<std::uint64_t>();
      w.cause = get_error(from);
      x.wounds.push_back(std::move(w));
    }
    break;
  default:
    from.fail();
  }
  if (!is_note(note_kind::memory, note) || !from.ok() || !from.at_end())
    return std::nullopt;
  return x;
}

} // namespace troupe::detail
