/// Text from other processes, hosts and files, for logs, errors and terminals.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace troupe::detail {

/// Limits of such texts, in bytes: of a sentence, and of the name of a device, a call or a peer.
inline constexpr std::size_t most_peer_text = 1024;
inline constexpr std::size_t most_peer_name = 256;

/// Returns the text as one printable line of at most `most` bytes, at least 3. Control characters,
/// invalid UTF-8, line and paragraph separators, and characters that hide or reorder others become
/// escapes such as \n, \x1b and \u{202e}. A longer text is cut at a character, and ends in "...".
/// A text that has passed already stays as it is: each process on its way applies the function.
std::string peer_text(std::string_view x, std::size_t most = most_peer_text);

/// Returns the number of bytes of the first character of `x`; 0 if it is not valid UTF-8.
/// @source The Unicode Standard, table 3-7
std::size_t character_length(std::string_view x) noexcept;

} // namespace troupe::detail
