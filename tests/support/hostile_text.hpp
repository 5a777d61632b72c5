/// A text of a peer that tries to harm the reader of a log or a terminal.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <string>

namespace troupe::testing {

/// Returns a line break with a forged line of the log, escape sequences, a character that reorders
/// its neighbours, invalid UTF-8, and 200 KB of text.
inline std::string hostile_text() {
  return "no\n[2026-01-01] [error] troupe: forged\r\x1b[2J\xc2\x9b\xe2\x80\xae\xff\x7f" +
         std::string(200'000, 'x');
}

/// The first characters of `hostile_text` in their printable form.
inline constexpr const char* hostile_begin = "no\\n[2026-01-01] [error] troupe: forged\\x0d\\x1b";

/// For EXPECT_TRUE: `x` has at most `most` bytes, and none that moves the cursor.
inline ::testing::AssertionResult is_one_line(const std::string& x, std::size_t most = 2048) {
  if (x.size() > most)
    return ::testing::AssertionFailure() << x.size() << " bytes";
  for (const char c : x)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      return ::testing::AssertionFailure() << "byte " << static_cast<int>(c);
  return ::testing::AssertionSuccess();
}

} // namespace troupe::testing
