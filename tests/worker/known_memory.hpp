/// Device memory whose content is known, whatever happens to the worker that writes it.
#pragma once

#include "support/world_fixture.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace troupe::testing {

/// Whether writes to a buffer may have failed with a lost worker.
enum class lost_writes : std::uint8_t { none, any };

/// A buffer all of whose elements have the same value, and the writes to it that are pending.
class known_memory {
public:
  /// Allocates it, and writes `value` to all elements.
  known_memory(device on, std::size_t length, std::uint32_t value)
      : on_(std::move(on)), memory_(must(on_.allocate<std::uint32_t>(length))), value_(value) {
    must(answer_of(on_.fill(memory_, value)));
  }

  const device& where() const noexcept { return on_; }
  const gpu_ref<std::uint32_t>& memory() const noexcept { return memory_; }
  /// Returns the value of all elements after all writes so far, if none fails.
  std::uint32_t expected() const noexcept {
    return writes_.empty() ? value_ : writes_.back().value;
  }

  /// Notes that `request` writes `value` to all elements.
  template <class T> void note_write(std::uint32_t value, pending<T> request) {
    writes_.push_back({value, [request = std::move(request)] {
                         return error_of(answer_of(request, 2 * patience));
                       }});
  }

  /// Waits for all writes, and checks the content against their results. Memory with a mark is
  /// written anew.
  void check(lost_writes lost) {
    std::vector<std::uint32_t> unsure; // written by the requests that failed, after the others
    for (auto& x : std::exchange(writes_, {})) {
      const auto why = x.result();
      if (!why) {
        value_ = x.value;
        unsure.clear();
        continue;
      }
      EXPECT_TRUE(lost == lost_writes::any && cause_of(why) == errc::worker_lost) << describe(why);
      unsure.push_back(x.value);
    }
    ASSERT_FALSE(memory_.stale());
    const auto got = on_.download(memory_);
    if (got) { // that the last write was done may become known later than its result
      if (!unsure.empty())
        value_ = unsure.back();
      EXPECT_TRUE(consists_of_one(*got, {value_}));
      return;
    }
    const auto why = got.error();
    ASSERT_TRUE(!unsure.empty() && cause_of(why) == errc::worker_lost) << describe(why);
    if (code_of(why) == errc::skipped) {
      unsure.back() = value_; // the last write did not begin
      check_accepted(unsure);
    } else {
      EXPECT_EQ(code_of(why), errc::indeterminate) << describe(why);
    }
    must(answer_of(on_.fill(memory_, value_)));
    EXPECT_TRUE(consists_of_one(must(on_.download(memory_)), {value_}));
  }

  /// For EXPECT_TRUE: all elements have the expected value. There are no pending writes.
  ::testing::AssertionResult is_right() const {
    const auto got = on_.download(memory_);
    return got ? consists_of_one(*got, {value_})
               : ::testing::AssertionFailure() << describe(got.error());
  }

private:
  struct write {
    std::uint32_t value = 0;
    std::function<caf::error()> result;
  };

  /// Skipped memory is as before, unless a write before that had begun.
  void check_accepted(const std::vector<std::uint32_t>& values) const {
    if (const auto accepted = answer_of(on_.accept(memory_)))
      EXPECT_TRUE(consists_of_one(must(on_.download(memory_)), values));
    else
      EXPECT_EQ(cause_of(accepted.error()), errc::worker_lost) << describe(accepted.error());
  }

  static ::testing::AssertionResult consists_of_one(const std::vector<std::uint32_t>& got,
                                                    const std::vector<std::uint32_t>& values) {
    for (std::size_t i = 0; i < got.size(); ++i)
      if (got[i] != got[0])
        return ::testing::AssertionFailure()
               << "element " << i << " is " << got[i] << ", and element 0 is " << got[0];
    for (auto x : values)
      if (got.at(0) == x)
        return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "the content is " << got[0] << ", not " << values[0];
  }

  device on_;
  gpu_ref<std::uint32_t> memory_;
  std::uint32_t value_ = 0;
  std::vector<write> writes_;
};

} // namespace troupe::testing
