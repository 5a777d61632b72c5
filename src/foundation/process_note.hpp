/// Notes that processes send each other unasked (`backend::tell`), and their kinds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace troupe::detail {

/// The first byte of a note.
enum class note_kind : std::uint8_t {
  program = 1, ///< `program_note`
  memory,      ///< `memory_note`
};

inline std::vector<std::byte> make_note(note_kind kind, std::span<const std::byte> content) {
  std::vector<std::byte> result(1 + content.size());
  result.front() = static_cast<std::byte>(kind);
  std::copy(content.begin(), content.end(), result.begin() + 1);
  return result;
}

inline bool is_note(note_kind kind, std::span<const std::byte> note) noexcept {
  return !note.empty() && note.front() == static_cast<std::byte>(kind);
}

inline std::span<const std::byte> content_of(std::span<const std::byte> note) noexcept {
  return note.empty() ? note : note.subspan(1);
}

} // namespace troupe::detail
