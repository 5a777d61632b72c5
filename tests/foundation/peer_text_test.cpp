// Text from peers in logs, errors and terminals.

#include "foundation/log.hpp"
#include "foundation/peer_text.hpp"
#include "foundation/wire.hpp"
#include "support/child_process.hpp"
#include "support/expect.hpp"
#include "support/hostile_text.hpp"
#include "support/random.hpp"
#include <troupe/log.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

namespace troupe::testing {
namespace {

using detail::peer_text;

TEST(PeerText, LeavesPrintableTextAsItIs) {
  for (auto* text : {"", "device 3: none left", "C:\\n is a path", "gr\xc3\xbc\xc3\x9f",
                     "\xe6\x97\xa5\xe6\x9c\xac", "\xf0\x9f\x99\x82"})
    EXPECT_EQ(peer_text(text), text);
}

TEST(PeerText, EscapesWhatIsNotPrintable) {
  for (auto& [text, expected] : {
           std::pair{"a\n[error] troupe: forged", "a\\n[error] troupe: forged"},
           std::pair{"\r\t\x7f", "\\x0d\\t\\x7f"},
           std::pair{"\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"},
           std::pair{"\x9b"
                     "2J",
                     "\\x9b2J"}, // invalid UTF-8
           std::pair{"\xc2\x9b"
                     "2J",
                     "\\u{009b}2J"}, // the same character, valid
           std::pair{"\xc0\xaf \xed\xa0\x80",
                     "\\xc0\\xaf \\xed\\xa0\\x80"}, // too long; a surrogate
           std::pair{"\xe2\x80\xa8|\xe2\x80\xa9", "\\u{2028}|\\u{2029}"},
           std::pair{"\xe2\x80\xae"
                     "exe.txt",
                     "\\u{202e}exe.txt"},
           std::pair{"\xf3\xa0\x81\x81", "\\u{e0041}"},
           std::pair{"cut \xe2\x80", "cut \\xe2\\x80"},
       })
    EXPECT_EQ(peer_text(text), expected);
  EXPECT_EQ(peer_text(std::string{"a\0b", 3}), "a\\x00b");
}

TEST(PeerText, CutsLongTextAtACharacter) {
  EXPECT_EQ(peer_text(std::string(200'000, 'x')), std::string(1021, 'x') + "...");
  EXPECT_EQ(peer_text("123456", 6), "123456");
  EXPECT_EQ(peer_text("1234567", 6), "123...");
  EXPECT_EQ(peer_text("12\n4567", 6), "12..."); // no half of an escape
  EXPECT_EQ(peer_text("12\xc3\xbc"
                      "4567",
                      6),
            "12...");
  EXPECT_EQ(peer_text("1\xc3\xbc"
                      "4567",
                      6),
            "1\xc3\xbc...");
}

TEST(PeerText, IsOneLineAndStaysAsItIs) {
  std::mt19937_64 random{1};
  for (int i = 0; i < 10'000; ++i) {
    std::string text(pick(random, 0, 100), '\0');
    for (auto& x : text)
      x = static_cast<char>(pick(random, 0, 255));
    const auto most = pick(random, 3, 200);
    const auto once = peer_text(text, most);
    ASSERT_TRUE(is_one_line(once, most)) << once;
    ASSERT_EQ(peer_text(once, most), once);
  }
}

// -- where it is applied

failure all_hostile() {
  return {.code = errc::stalled,
          .detail = hostile_text(),
          .verb = hostile_text(),
          .api = hostile_text(),
          .native_name = hostile_text(),
          .native_code = 7};
}

caf::error sent(const caf::error& x) {
  detail::wire_writer to;
  to.put(x);
  return detail::wire_reader{to.bytes()}.get<caf::error>();
}

TEST(PeerText, IsInEveryErrorOfAPeer) {
  const auto got = failure_of(sent(make_error(all_hostile())));
  ASSERT_TRUE(got);
  EXPECT_EQ(got->code, errc::stalled);
  EXPECT_EQ(got->native_code, 7);
  for (auto* text : {&got->detail, &got->verb, &got->api, &got->native_name}) {
    EXPECT_TRUE(text->starts_with(hostile_begin)) << *text;
    EXPECT_TRUE(is_one_line(*text, 1024)) << *text;
  }
  const auto harmless = make_error(errc::out_of_memory, "none left");
  EXPECT_EQ(describe(sent(harmless)), describe(harmless));
}

TEST(PeerText, OfAnErrorNamesNoMoreRanksThanAWorldCanHave) {
  failure many{.code = errc::stalled};
  many.parts.assign(4096, part_state::done);
  EXPECT_TRUE(has_code(sent(make_error(many)), errc::stalled));
  many.parts.push_back(part_state::done);
  EXPECT_TRUE(has_code(sent(make_error(many)), errc::internal));
}

TROUPE_CHILD(log_of_hostile_text) {
  detail::log(log_level::warning, hostile_text(), make_error(all_hostile()));
  set_log_sink([](const log_line&) { throw std::runtime_error(hostile_text()); });
  detail::log(log_level::warning, "the sink throws");
  return 0;
}

TEST(PeerText, IsOneLineOfTheLog) {
  const auto end = run_child("log_of_hostile_text", std::chrono::seconds{30});
  ASSERT_EQ(end.status, 0) << to_string(end);
  for (auto* stream : {&end.out, &end.err}) {
    constexpr std::size_t beside_the_text = 200;
    ASSERT_FALSE(stream->empty());
    EXPECT_EQ(stream->back(), '\n');
    EXPECT_TRUE(is_one_line(stream->substr(0, stream->size() - 1), (16 << 10) + beside_the_text))
        << *stream;
    EXPECT_NE(stream->find(hostile_begin), std::string::npos);
  }
}

} // namespace
} // namespace troupe::testing
