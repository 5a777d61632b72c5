#include "foundation/peer_text.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

namespace troupe::detail {

namespace {

struct range {
  char32_t first;
  char32_t last;
};

/// Control characters, and characters that break a line, or hide or reorder the text beside them.
constexpr std::array<range, 9> unprintable{{{0x00, 0x1f},
                                            {0x7f, 0x9f},
                                            {0x061c, 0x061c},
                                            {0x200b, 0x200f},
                                            {0x2028, 0x202e},
                                            {0x2060, 0x206f},
                                            {0xfeff, 0xfeff},
                                            {0xfff9, 0xfffb},
                                            {0xe0000, 0xe007f}}};

/// Returns the code point of a valid character.
char32_t code_point(std::string_view character) noexcept {
  const char32_t lead = static_cast<unsigned char>(character.front());
  if (character.size() == 1)
    return lead;
  auto result = lead & (0x7fU >> character.size());
  for (const char c : character.substr(1))
    result = result << 6 | (static_cast<unsigned char>(c) & 0x3fU);
  return result;
}

/// Returns `format` with a number; of ASCII alone.
std::string escape(const char* format, unsigned number) {
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), format, number);
  return text.data();
}

/// Returns a character, or an invalid byte, in its printable form.
std::string printable(std::string_view character, bool is_valid) {
  if (!is_valid)
    return escape("\\x%02x", static_cast<unsigned char>(character.front()));
  if (character == "\n")
    return "\\n";
  if (character == "\t")
    return "\\t";
  const auto point = code_point(character);
  if (std::none_of(unprintable.begin(), unprintable.end(),
                   [&](const range& x) { return point >= x.first && point <= x.last; }))
    return std::string{character};
  return escape(point < 0x80 ? "\\x%02x" : "\\u{%04x}", static_cast<unsigned>(point));
}

} // namespace

std::size_t character_length(std::string_view x) noexcept {
  auto at = [&](std::size_t i) -> unsigned {
    return i < x.size() ? static_cast<unsigned char>(x[i]) : 0;
  };
  auto continues = [&](std::size_t i) { return (at(i) & 0xc0) == 0x80; };
  auto first = at(0);
  if (first < 0x80)
    return 1;
  if (first >= 0xc2 && first <= 0xdf && continues(1))
    return 2;
  if ((first & 0xf0) == 0xe0 && continues(1) && continues(2)) {
    bool good = first == 0xe0 ? at(1) >= 0xa0 : first != 0xed || at(1) < 0xa0;
    return good ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4 && continues(1) && continues(2) && continues(3)) {
    bool good = first == 0xf0 ? at(1) >= 0x90 : first != 0xf4 || at(1) < 0x90;
    return good ? 4 : 0;
  }
  return 0;
}

std::string peer_text(std::string_view x, std::size_t most) {
  constexpr std::string_view cut = "...";
  std::string result;
  std::size_t before_cut = 0; // the end of the last character that leaves room for `cut`
  while (!x.empty()) {
    const auto length = character_length(x);
    const auto character = x.substr(0, std::max<std::size_t>(length, 1));
    const auto next = printable(character, length != 0);
    if (result.size() + next.size() > most) {
      result.resize(before_cut);
      return result += cut;
    }
    result += next;
    if (result.size() + cut.size() <= most)
      before_cut = result.size();
    x.remove_prefix(character.size());
  }
  return result;
}

} // namespace troupe::detail
