// Pinned memory of a lane, to which a lost process may still write.

#include "lane/pinned_words.hpp"
#include "lane/staging.hpp"
#include "support/expect.hpp"
#include "support/forwarding_backend.hpp"
#include "support/random.hpp"
#include <troupe/backend.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

namespace troupe::testing {
namespace {

using detail::pinned_words;
using detail::staging_ring;

/// A device in a process that can be lost.
class losable_device final : public forwarding_device {
public:
  using forwarding_device::forwarding_device;
  caf::error loss() const noexcept override {
    return is_lost ? make_error(errc::worker_lost, "by the test") : caf::error{};
  }

  bool is_lost = false;
};

class LeftRing : public ::testing::Test {
protected:
  static constexpr std::size_t size = 1024;

  std::byte* taken(std::size_t bytes) { return must(ring_.take(bytes)); }
  std::function<bool()> when_over() {
    return [this] { return is_over_; };
  }

  const std::shared_ptr<backend> backend_ =
      make_host_backend({.devices = 1, .bytes_per_device = 1 << 20});
  losable_device device_{must(backend_->open(0))};
  staging_ring ring_{device_, size};
  bool is_over_ = false;
};

TEST_F(LeftRing, GivesNothingOutThatALostProcessMayWriteTo) {
  auto* const left = taken(256);
  device_.is_lost = true;
  ring_.give_back(left); // by a transfer that sees the loss
  EXPECT_TRUE(ring_.leave(when_over()));
  device_.is_lost = false;
  auto* const first = taken(256);
  auto* const second = taken(256);
  auto* const third = taken(256);
  EXPECT_EQ((std::set{left, first, second, third}.size()), 4u);
  EXPECT_EQ(taken(256), nullptr);
  ring_.give_back(first);
  EXPECT_EQ(taken(200), first); // it does not wait for what is left
  for (auto* x : {second, third, first})
    ring_.give_back(x);
  is_over_ = true;
  EXPECT_EQ(taken(256), left);
  must(ring_.close());
}

TEST_F(LeftRing, IsNotToBeUsedIfLittleIsLeftOfIt) {
  taken(256);
  taken(256);
  EXPECT_TRUE(ring_.leave(when_over()));
  taken(1);
  EXPECT_FALSE(ring_.leave(when_over()));
  must(ring_.close());
}

TEST_F(LeftRing, IsWholeIfNothingWasInUse) {
  ring_.give_back(taken(256));
  EXPECT_TRUE(ring_.leave([]() -> bool { throw std::runtime_error("there is nothing to ask"); }));
  for (int i = 0; i < 4; ++i)
    EXPECT_NE(taken(256), nullptr);
  must(ring_.close());
}

/// Random pieces with losses between them: none overlaps one that is in use or left.
TEST_F(LeftRing, KeepsPiecesApartOverManyLosses) {
  std::mt19937_64 random{7};
  std::vector<std::byte> owner(size); // 1: a piece has the byte
  struct piece {
    std::byte* memory;
    std::size_t bytes;
  };
  struct loss {
    std::shared_ptr<bool> is_over;
    std::vector<piece> pieces;
  };
  std::deque<piece> in_use;
  std::vector<loss> losses;
  std::byte* const begin = taken(1);
  ring_.give_back(begin);
  const auto mark = [&](const piece& x, bool is_taken) {
    for (std::size_t i = 0; i < x.bytes; ++i) {
      auto& byte = owner[static_cast<std::size_t>(x.memory - begin) + i];
      ASSERT_EQ(byte == std::byte{0}, is_taken);
      byte = is_taken ? std::byte{1} : std::byte{0};
    }
  };
  int taken_pieces = 0;
  for (int step = 0; step < 20'000; ++step) {
    const auto what = pick(random, 0, 99);
    if (what < 50) {
      const auto bytes = pick(random, 1, ring_.piece_limit());
      if (auto* const memory = taken(bytes)) {
        ++taken_pieces;
        in_use.push_back({memory, bytes});
        mark(in_use.back(), true);
      }
    } else if (what < 95) {
      if (!in_use.empty()) {
        mark(in_use.front(), false);
        ring_.give_back(in_use.front().memory);
        in_use.pop_front();
      }
    } else if (what < 97) {
      if (!losses.empty()) {
        *losses.back().is_over = true;
        for (auto& x : losses.back().pieces)
          mark(x, false);
        losses.pop_back();
      }
    } else {
      losses.push_back({std::make_shared<bool>(false), {in_use.begin(), in_use.end()}});
      in_use.clear();
      if (!ring_.leave(
              [over = losses.back().is_over] { return *over; })) { // the lane takes another
        for (auto& x : losses)
          *x.is_over = true;
        losses.clear();
        std::ranges::fill(owner, std::byte{0});
      }
    }
  }
  EXPECT_GT(taken_pieces, 5000);
  must(ring_.close());
}

class LeftWords : public ::testing::Test {
protected:
  /// Returns all words that are given out now. They are given back.
  std::set<std::int32_t*> given_out() const {
    std::vector<std::shared_ptr<std::int32_t>> all;
    while (auto word = pinned_words::take(words_))
      all.push_back(std::move(word));
    std::set<std::int32_t*> result;
    for (auto& x : all)
      result.insert(x.get());
    return result;
  }

  static constexpr std::size_t count = pinned_words::size_bytes / sizeof(std::int32_t);
  alignas(std::int32_t) std::byte memory_[pinned_words::size_bytes];
  const std::shared_ptr<pinned_words> words_ =
      std::make_shared<pinned_words>(memory_, [](void*) { return caf::error{}; });
};

TEST_F(LeftWords, AreNotGivenOutWhileALostProcessMayWriteToThem) {
  auto left = pinned_words::take(words_);
  auto* const place = left.get();
  bool is_over = false;
  words_->leave([&] { return is_over; });
  left.reset();
  EXPECT_EQ(given_out().size(), count - 1);
  EXPECT_FALSE(given_out().contains(place));
  is_over = true;
  EXPECT_EQ(given_out().size(), count);
}

TEST_F(LeftWords, OfTwoLostProcessesWaitForBoth) {
  auto left = pinned_words::take(words_);
  std::array<bool, 2> is_over{};
  for (auto& x : is_over)
    words_->leave([&x] { return x; });
  left.reset();
  is_over[1] = true;
  EXPECT_EQ(given_out().size(), count - 1);
  is_over[0] = true;
  EXPECT_EQ(given_out().size(), count);
}

} // namespace
} // namespace troupe::testing
