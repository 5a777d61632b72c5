// Streams of a device on another host that wait for words of this process.

#include "remote/hosts_support.hpp"
#include "support/backend_fixture.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace troupe::testing {

namespace {

using word = std::atomic<std::uint64_t>;

/// A device of the host alpha. The end of the test ends all waits of its streams.
class HostStreams : public ::testing::Test {
protected:
  HostStreams() : all_(fleet_.open()), device_(*all_, 1) {}
  void TearDown() override {
    static_cast<void>(all_->give_up(1, make_error(errc::unavailable, "the test is over")));
  }

  word& make_word() { return *static_cast<word*>(must(device_->allocate_pinned(sizeof(word)))); }
  ::testing::AssertionResult is_over(event_view x) {
    return eventually([&] { return must(device_->query(x)); }, patience);
  }

  test_fleet fleet_{{.local = 1, .devices = 1}};
  std::shared_ptr<backend> all_;
  opened_device device_;
};

/// As when a worker is lost: its words get their final values, and then its memory is freed.
TEST_F(HostStreams, SeeAWordThatIsWrittenBeforeItsMemoryGoes) {
  constexpr int rounds = 20;
  for (int i = 0; i < rounds; ++i) {
    auto& x = make_word();
    must(device_->wait_word(device_.stream, &x, 1));
    must(device_->record(device_.end, device_.stream));
    x.store(1);
    must(device_->deallocate_pinned(&x));
    ASSERT_TRUE(is_over(device_.end)) << "round " << i;
  }
}

TEST_F(HostStreams, WaitForTheirOwnWordsAlone) {
  const auto other = must(device_->create_stream());
  const auto first = must(device_->create_event());
  auto& never = make_word();
  auto& soon = make_word();
  must(device_->wait_word(device_.stream, &never, 1));
  must(device_->record(first, device_.stream));
  must(device_->wait_word(other, &soon, 1));
  must(device_->record(device_.end, other));
  soon.store(1);
  EXPECT_TRUE(is_over(device_.end));
  EXPECT_FALSE(must(device_->query(first)));
  never.store(1);
  EXPECT_TRUE(is_over(first));
}

/// An upload sees memory as it is after the last word that its stream waits for. This includes a
/// word that it waits for through an event of another stream.
TEST_F(HostStreams, UploadWhatIsThereBehindTheLastOfTheirWords) {
  constexpr std::size_t size = 4096;
  const auto other = must(device_->create_stream());
  const auto event = must(device_->create_event());
  auto& first = make_word();
  auto& second = make_word();
  auto* from = static_cast<std::byte*>(must(device_->allocate_pinned(size)));
  auto* to = static_cast<std::byte*>(must(device_->allocate_pinned(size)));
  auto* memory = must(device_->allocate(size, device_.stream));
  for (std::uint64_t round = 1; round <= 2; ++round) { // each word is the last one once
    must(device_->wait_word(other, &first, round));
    must(device_->record(event, other));
    must(device_->wait_word(device_.stream, &second, round));
    must(device_->wait(device_.stream, event));
    must(device_->copy(memory, from, size, copy_direction::host_to_device, device_.stream));
    must(device_->copy(to, memory, size, copy_direction::device_to_host, device_.stream));
    must(device_->record(device_.end, device_.stream));
    auto& early = round == 1 ? first : second;
    auto& late = round == 1 ? second : first;
    early.store(round);
    std::fill_n(from, size, static_cast<std::byte>(round));
    late.store(round);
    ASSERT_TRUE(is_over(device_.end));
    EXPECT_EQ(std::count(to, to + size, static_cast<std::byte>(round)), size) << round;
  }
  must(device_->deallocate(memory, device_.stream));
  device_.drain();
}

} // namespace

} // namespace troupe::testing
