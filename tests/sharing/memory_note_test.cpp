/// Notes between processes about memory: they arrive unchanged, and invalid notes are rejected.
#include "foundation/process_note.hpp"
#include "foundation/wire.hpp"
#include "sharing/memory_note.hpp"
#include "support/expect.hpp"

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace troupe {

namespace {

using detail::memory_note;
using detail::memory_note_of;
using detail::note_kind;
using detail::to_note;
using detail::unreadable_range;
using detail::wire_writer;
using testing::has_code;
using testing::is_ok;

using kind = memory_note::kind;
using bytes = std::vector<std::byte>;

constexpr auto most = std::numeric_limits<std::uint64_t>::max();
/// A note lists at most this many ranges one by one.
constexpr std::size_t told_singly = 8;
constexpr std::size_t longest_text = 1024;

constexpr kind all_kinds[] = {kind::claim, kind::lent, kind::refused, kind::given_back};

/// Each field has a different value.
failure some_failure() {
  failure x;
  x.code = errc::launch_failed;
  x.detail = "it shall fail";
  x.verb = "launch";
  x.api = "cudaLaunchKernel";
  x.native_name = "cudaErrorLaunchFailure";
  x.native_code = -719;
  x.device = 3;
  x.rank = 5;
  x.operation = 1u << 20;
  x.epoch = most;
  x.generation = 7;
  x.parts = {part_state::not_issued, part_state::issued, part_state::started, part_state::done,
             part_state::uninvolved};
  return x;
}

auto fields_of(const failure& x) {
  return std::tie(x.code, x.detail, x.verb, x.api, x.native_name, x.native_code, x.device, x.rank,
                  x.operation, x.epoch, x.generation, x.parts);
}

auto fields_of(const gpu_token& x) {
  return std::tie(x.node, x.device, x.buffer, x.generation, x.type, x.offset, x.count);
}

::testing::AssertionResult same(const caf::error& x, const caf::error& y) {
  const auto a = failure_of(x);
  const auto b = failure_of(y);
  if (static_cast<bool>(x) == static_cast<bool>(y) && a.has_value() == b.has_value() &&
      (!a || fields_of(*a) == fields_of(*b)))
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << describe(x) << " is not " << describe(y);
}

::testing::AssertionResult same(const memory_note& x, const memory_note& y) {
  if (x.what != y.what || x.number != y.number || x.mode != y.mode || x.address != y.address ||
      x.word != y.word)
    return ::testing::AssertionFailure() << "another kind, number, mode, address or word";
  if (fields_of(x.token) != fields_of(y.token))
    return ::testing::AssertionFailure() << "another token";
  if (x.unreadable.size() != y.unreadable.size())
    return ::testing::AssertionFailure()
           << x.unreadable.size() << " unreadable, not " << y.unreadable.size();
  for (std::size_t i = 0; i < x.unreadable.size(); ++i) {
    if (x.unreadable[i].begin != y.unreadable[i].begin ||
        x.unreadable[i].end != y.unreadable[i].end)
      return ::testing::AssertionFailure() << "unreadable_range " << i << " lies elsewhere";
    if (auto equal = same(x.unreadable[i].cause, y.unreadable[i].cause); !equal)
      return equal << ", of unreadable_range " << i;
  }
  return same(x.why, y.why);
}

std::vector<unreadable_range> some_unreadable() {
  auto other = some_failure();
  other.code = errc::worker_lost;
  other.parts.clear();
  return {{0, 1, make_error(some_failure())},
          {4096, 8192, make_error(std::move(other))},
          {most - 1, most, make_error(errc::internal, "")}};
}

/// Returns a note with a value in each field that this kind has.
memory_note some_note(kind what) {
  memory_note x;
  x.what = what;
  x.number = most - 1;
  switch (what) {
  case kind::claim:
    x.token = {0x0123456789abcdef, 6, 42, 9, dtype::bfloat16, 1u << 12, most};
    x.mode = access_mode::read_write;
    break;
  case kind::lent:
    x.address = 0x7f00deadbeef0000;
    x.word = 256;
    x.unreadable = some_unreadable();
    break;
  case kind::refused:
    x.why = make_error(some_failure());
    break;
  case kind::given_back:
    x.unreadable = some_unreadable();
    break;
  }
  return x;
}

bytes note_of(const wire_writer& content) {
  return detail::make_note(note_kind::memory, content.bytes());
}

/// Returns the first fields of a note of this kind.
wire_writer begun(kind what) {
  wire_writer result;
  result.put(what);
  result.put(std::uint64_t{1});
  return result;
}

/// Offsets of the two bytes that hold the kind.
constexpr std::size_t note_kind_at = 0;
constexpr std::size_t kind_at = 1;

TEST(MemoryNote, ComesOverFieldByField) {
  for (auto what : all_kinds) {
    const auto x = some_note(what);
    const auto got = memory_note_of(to_note(x));
    ASSERT_TRUE(got) << static_cast<int>(what);
    EXPECT_TRUE(same(*got, x)) << static_cast<int>(what);
  }
}

TEST(MemoryNote, ComesOverWithNothingInIt) {
  for (auto what : all_kinds) {
    memory_note x;
    x.what = what;
    const auto got = memory_note_of(to_note(x));
    ASSERT_TRUE(got) << static_cast<int>(what);
    EXPECT_TRUE(same(*got, x)) << static_cast<int>(what);
  }
}

TEST(MemoryNote, SaysOnlyWhatItsKindHas) {
  auto x = some_note(kind::claim);
  x.address = 1;
  x.why = make_error(errc::internal, "not requested");
  x.unreadable = some_unreadable();
  const auto got = memory_note_of(to_note(x));
  ASSERT_TRUE(got);
  EXPECT_TRUE(same(*got, some_note(kind::claim)));
}

TEST(MemoryNote, HasEveryModeAndNoOther) {
  auto x = some_note(kind::claim);
  for (auto mode : {access_mode::read, access_mode::write, access_mode::read_write}) {
    x.mode = mode;
    const auto got = memory_note_of(to_note(x));
    ASSERT_TRUE(got);
    EXPECT_EQ(got->mode, mode);
  }
  for (int mode = static_cast<int>(access_mode::read_write) + 1; mode < 256; ++mode) {
    x.mode = static_cast<access_mode>(mode);
    EXPECT_FALSE(memory_note_of(to_note(x))) << mode;
  }
}

TEST(MemoryNote, OfNoKindThatThereIsIsNone) {
  for (auto what : all_kinds) {
    auto note = to_note(some_note(what));
    ASSERT_EQ(note[kind_at], static_cast<std::byte>(what));
    for (int other = 0; other < 256; ++other) {
      note[kind_at] = static_cast<std::byte>(other);
      const auto got = memory_note_of(note);
      if (other == static_cast<int>(what)) {
        EXPECT_TRUE(got);
      } else if (std::find(std::begin(all_kinds), std::end(all_kinds), static_cast<kind>(other)) ==
                 std::end(all_kinds)) {
        EXPECT_FALSE(got) << other;
      }
    }
  }
}

TEST(MemoryNote, ToSomebodyElseIsNone) {
  for (auto what : all_kinds) {
    auto note = to_note(some_note(what));
    for (int to = 0; to < 256; ++to) {
      note[note_kind_at] = static_cast<std::byte>(to);
      EXPECT_EQ(memory_note_of(note).has_value(), to == static_cast<int>(note_kind::memory)) << to;
    }
  }
}

TEST(MemoryNote, CutAnywhereIsNone) {
  for (auto what : all_kinds) {
    const auto note = to_note(some_note(what));
    for (std::size_t size = 0; size < note.size(); ++size) {
      const bytes cut{note.begin(), note.begin() + static_cast<std::ptrdiff_t>(size)};
      EXPECT_FALSE(memory_note_of(cut)) << size << " of " << note.size();
    }
  }
}

TEST(MemoryNote, WithMoreBehindItIsNone) {
  for (auto what : all_kinds) {
    auto note = to_note(some_note(what));
    for (int i = 0; i < 20; ++i) {
      note.push_back(std::byte{0});
      EXPECT_FALSE(memory_note_of(note)) << static_cast<int>(what) << " and " << i + 1;
    }
  }
}

TEST(MemoryNote, WithMoreWoundsThanItTellsIsNone) {
  for (auto what : {kind::lent, kind::given_back})
    for (const std::uint32_t count :
         {1u, 2u, 1u << 16, std::numeric_limits<std::uint32_t>::max()}) {
      auto x = begun(what);
      if (what == kind::lent) {
        x.put(std::uint64_t{0});
        x.put(std::uint32_t{0});
      }
      x.put(count);
      EXPECT_FALSE(memory_note_of(note_of(x))) << count;
    }
}

TEST(MemoryNote, WhoseTextIsLongerThanTheNoteIsNone) {
  for (const std::uint32_t size : {9u, 1u << 16, std::numeric_limits<std::uint32_t>::max()}) {
    auto x = begun(kind::refused);
    x.put(true);
    x.put(errc::stale_ref);
    x.put(size);
    x.put(std::uint64_t{0}); // no other bytes follow
    EXPECT_FALSE(memory_note_of(note_of(x))) << size;
  }
}

TEST(MemoryNote, WhoseReasonIsNeitherThereNorNotIsNone) {
  for (int there = 0; there < 256; ++there) {
    auto x = begun(kind::refused);
    x.put(static_cast<std::uint8_t>(there));
    EXPECT_EQ(memory_note_of(note_of(x)).has_value(), there == 0) << there;
  }
}

/// The claim is refused nevertheless.
TEST(MemoryNote, WhoseReasonCannotBeIsRefusedWithAnother) {
  auto with = [](errc code, std::vector<part_state> parts, errc cause = errc::cancelled) {
    auto x = begun(kind::refused);
    x.put(true);
    x.put(code);
    for (int i = 0; i < 4; ++i)
      x.put(std::string_view{"text"});
    for (int i = 0; i < 3; ++i)
      x.put(std::int32_t{0});
    for (int i = 0; i < 3; ++i)
      x.put(std::uint64_t{0});
    x.put(parts);
    x.put(cause);
    return memory_note_of(note_of(x));
  };
  for (int code = 0; code < 256; ++code) {
    const auto x = static_cast<errc>(code);
    const bool is_one = x >= errc::invalid_argument && x <= errc::internal;
    const auto got = with(x, {});
    ASSERT_TRUE(got) << code;
    EXPECT_TRUE(has_code(got->why, is_one ? x : errc::internal));
    EXPECT_EQ(failure_of(got->why)->detail == "text", is_one) << code;
    const auto other = with(errc::skipped, {}, x);
    ASSERT_TRUE(other) << code;
    EXPECT_EQ(cause_of(other->why), is_one ? x : errc::internal);
  }
  for (int part = 0; part < 256; ++part) {
    const auto x = static_cast<part_state>(part);
    const auto got = with(errc::stale_ref, {part_state::done, x});
    ASSERT_TRUE(got) << part;
    EXPECT_TRUE(has_code(got->why, x <= part_state::uninvolved ? errc::stale_ref : errc::internal));
  }
}

std::string cut_text(const std::string& x) {
  return x.size() <= longest_text ? x : x.substr(0, longest_text - 3) + "...";
}

TEST(MemoryNote, CutsWhatIsTooLong) {
  auto why = some_failure();
  for (const std::size_t size : {longest_text - 1, longest_text, longest_text + 1, 1ul << 20}) {
    why.detail.assign(size, 'x');
    auto cut = why;
    cut.detail = cut_text(cut.detail);
    memory_note x;
    x.what = kind::refused;
    x.why = make_error(why);
    auto got = memory_note_of(to_note(x));
    ASSERT_TRUE(got);
    EXPECT_TRUE(same(got->why, make_error(cut))) << size;
    x = {};
    x.what = kind::given_back;
    x.unreadable = {{0, 1, make_error(why)}};
    got = memory_note_of(to_note(x));
    ASSERT_TRUE(got);
    EXPECT_TRUE(same(got->unreadable.at(0).cause, make_error(cut))) << size;
  }
}

/// The error arrives as one of the library's.
TEST(MemoryNote, CutsErrorsOfOthers) {
  const std::string text(1u << 20, 'x');
  memory_note x;
  x.what = kind::refused;
  x.why = caf::make_error(caf::sec::runtime_error, text);
  const auto note = to_note(x);
  EXPECT_LT(note.size(), 2 * longest_text);
  const auto got = memory_note_of(note);
  ASSERT_TRUE(got);
  EXPECT_TRUE(has_code(got->why, errc::internal));
  EXPECT_TRUE(failure_of(got->why)->detail == cut_text(describe(x.why)));
}

TEST(MemoryNote, MakesOneWoundOfTooMany) {
  std::mt19937_64 random{1};
  for (std::size_t count = 0; count <= 3 * told_singly; ++count) {
    memory_note x;
    x.what = kind::given_back;
    for (std::size_t i = 0; i < count; ++i) {
      const auto begin = random() % 1'000'000;
      x.unreadable.push_back({begin, begin + 1 + random() % 1'000,
                              make_error(errc::launch_failed, std::to_string(i))});
    }
    const auto got = memory_note_of(to_note(x));
    ASSERT_TRUE(got);
    if (count <= told_singly) {
      EXPECT_TRUE(same(*got, x));
      continue;
    }
    ASSERT_EQ(got->unreadable.size(), 1u);
    auto by_begin = [](auto& a, auto& b) { return a.begin < b.begin; };
    auto by_end = [](auto& a, auto& b) { return a.end < b.end; };
    EXPECT_EQ(got->unreadable[0].begin,
              std::min_element(x.unreadable.begin(), x.unreadable.end(), by_begin)->begin);
    EXPECT_EQ(got->unreadable[0].end,
              std::max_element(x.unreadable.begin(), x.unreadable.end(), by_end)->end);
    EXPECT_TRUE(same(got->unreadable[0].cause, x.unreadable[0].cause));
  }
}

/// For arbitrary bytes: a note that is accepted has the same meaning when it is encoded again.
TEST(MemoryNote, OfAnyBytesIsNoneOrMeansSomething) {
  std::mt19937_64 random{2};
  int understood = 0;
  for (int i = 0; i < 50'000; ++i) {
    bytes note;
    if (i % 4 == 0) {
      note.resize(random() % 200);
      for (auto& x : note)
        x = static_cast<std::byte>(random());
      if (note.size() > kind_at) {
        note[note_kind_at] = static_cast<std::byte>(note_kind::memory);
        note[kind_at] = static_cast<std::byte>(1 + random() % 4);
      }
    } else {
      note = to_note(some_note(all_kinds[random() % 4]));
      for (auto n = 1 + random() % 3; n > 0; --n)
        note[random() % note.size()] = static_cast<std::byte>(random());
    }
    const auto got = memory_note_of(note);
    if (!got)
      continue;
    ++understood;
    const auto again = memory_note_of(to_note(*got));
    ASSERT_TRUE(again) << "seed " << i;
    if (got->unreadable.size() <= told_singly) {
      ASSERT_TRUE(same(*again, *got)) << "seed " << i;
    }
  }
  EXPECT_GT(understood, 5'000);
}

} // namespace

} // namespace troupe
