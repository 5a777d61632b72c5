// Host memory that workers map. The workers are functions of this process.

#include "foundation/wire.hpp"
#include "support/expect.hpp"
#include "worker/parent/shared_segments.hpp"
#include "worker/parent/worker_link.hpp"
#include "worker/protocol/protocol.hpp"
#include "worker/protocol/shared_memory.hpp"
#include "worker/protocol/worker_page.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {
namespace {

using detail::control;
using detail::control_head;
using detail::link_area;
using detail::shared_memory;
using detail::shared_segments;
using detail::worker_link;

/// What a worker has been asked to do, by segment.
class map_requests {
public:
  void add(control what, std::uint64_t segment) {
    const std::lock_guard lock{mutex_};
    ++all_[{what, segment}];
    changed_.notify_all();
  }
  int count(control what, std::uint64_t segment) const {
    const std::lock_guard lock{mutex_};
    const auto found = all_.find({what, segment});
    return found != all_.end() ? found->second : 0;
  }
  int count_all(control what) const {
    const std::lock_guard lock{mutex_};
    int result = 0;
    for (auto& [key, count] : all_)
      result += key.first == what ? count : 0;
    return result;
  }
  void wait_for(control what, std::uint64_t segment) const {
    std::unique_lock lock{mutex_};
    changed_.wait(lock, [&] { return all_.contains({what, segment}); });
  }

private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::map<std::pair<control, std::uint64_t>, int> all_;
};

/// A worker that maps what it is asked to.
class mapping_worker {
public:
  explicit mapping_worker(shared_segments& in) {
    auto* const area = new (memory_->bytes().data()) link_area;
    link_ = std::make_shared<worker_link>(0, *area, memory_, std::make_unique<sender>(*this));
    in.add(memory_->bytes(), memory_->descriptor(), memory_);
  }

  worker_link& link() noexcept { return *link_; }
  const map_requests& asked() const noexcept { return asked_; }
  /// Returns how often it has mapped a segment, less how often it has unmapped it.
  int has_mapped(std::uint64_t segment) const {
    return asked_.count(control::map, segment) - asked_.count(control::unmap, segment);
  }
  /// Keeps the answers from now on.
  void hold() {
    const std::lock_guard lock{mutex_};
    holds_ = true;
  }
  /// Sends the answers that were kept.
  void release() {
    std::deque<control_head> kept;
    {
      const std::lock_guard lock{mutex_};
      holds_ = false;
      kept.swap(kept_);
    }
    for (auto& head : kept)
      answer(head);
  }
  /// Refuses to map anything from now on.
  void refuse() { refuses_.store(true); }
  void accept() { refuses_.store(false); }
  void lose() { link_->lose(make_error(errc::worker_lost, "by the test")); }

private:
  class sender final : public detail::control_sender {
  public:
    explicit sender(mapping_worker& to) : to_(to) {}
    caf::error send(std::span<const std::byte> message,
                    std::optional<int> descriptor) noexcept override {
      detail::wire_reader reader{message};
      const auto head = reader.get<control_head>();
      const auto segment = reader.get<std::uint64_t>(); // `map_args` begins with it
      EXPECT_TRUE(reader.ok());
      EXPECT_EQ(descriptor.has_value(), head.kind == control::map);
      if (!to_.keeps(head))
        to_.answer(head);
      to_.asked_.add(head.kind, segment); // the last thing: a test may end with it
      return {};
    }

  private:
    mapping_worker& to_;
  };

  bool keeps(const control_head& head) {
    const std::lock_guard lock{mutex_};
    if (holds_)
      kept_.push_back(head);
    return holds_;
  }
  void answer(const control_head& head) {
    const bool fails = head.kind == control::map && refuses_.load();
    link_->received(
        answer_to(head, fails ? make_error(errc::unavailable, "by the test") : caf::error{})
            .bytes());
  }

  const std::shared_ptr<shared_memory> memory_ =
      std::make_shared<shared_memory>(must(shared_memory::create(sizeof(link_area))));
  map_requests asked_;
  std::mutex mutex_;
  bool holds_ = false;
  std::deque<control_head> kept_;
  std::atomic<bool> refuses_{false};
  std::shared_ptr<worker_link> link_; // last: it uses all of these
};

class SharedSegments : public ::testing::Test {
protected:
  /// Maps fresh memory in a worker, and returns its segment.
  std::uint64_t mapped_in(mapping_worker& x) {
    auto* const memory = must(segments_.create(4096));
    return must(segments_.place_of(memory, 1, x.link())).segment;
  }
  /// Maps the words of `of` in a worker.
  std::uint64_t words_mapped_in(mapping_worker& x, mapping_worker& of) {
    const auto& word = of.link().done_word(0);
    return must(segments_.place_of(&word, sizeof word, x.link())).segment;
  }

  shared_segments segments_;
};

TEST_F(SharedSegments, AreMappedInASpareInAdvance) {
  mapping_worker worker{segments_};
  mapping_worker spare{segments_};
  mapping_worker other{segments_};
  const auto before = mapped_in(worker);
  const auto of_other = mapped_in(other);
  must(segments_.prepare(worker.link(), spare.link()));
  EXPECT_EQ(spare.has_mapped(before), 1);
  EXPECT_EQ(spare.has_mapped(of_other), 0);
  const auto later = mapped_in(worker);
  spare.asked().wait_for(control::map, later);
  EXPECT_EQ(mapped_in(spare), later + 1); // it has no spare itself
  EXPECT_EQ(worker.has_mapped(later + 1), 0);
  EXPECT_EQ(spare.asked().count_all(control::map), 3);
}

TEST_F(SharedSegments, GoOnToTheNextSpare) {
  mapping_worker first{segments_};
  mapping_worker second{segments_};
  mapping_worker third{segments_};
  const auto segment = mapped_in(first);
  must(segments_.prepare(first.link(), second.link()));
  first.lose();
  must(segments_.prepare(second.link(), third.link()));
  EXPECT_EQ(third.has_mapped(segment), 1);
  third.asked().wait_for(control::map, mapped_in(second));
}

/// Streams of other devices wait for the words.
TEST_F(SharedSegments, WithTheWordsOfAWorkerAreFollowedByThoseOfItsSpare) {
  mapping_worker worker{segments_};
  mapping_worker spare{segments_};
  mapping_worker early{segments_};
  mapping_worker late{segments_};
  mapping_worker spare_of_late{segments_};
  const auto words = words_mapped_in(early, worker);
  early.hold(); // `prepare` does not wait for it
  must(segments_.prepare(worker.link(), spare.link()));
  must(segments_.prepare(late.link(), spare_of_late.link()));
  const auto fresh = words_mapped_in(spare, spare); // to learn the number
  early.asked().wait_for(control::map, fresh);
  early.release();
  EXPECT_EQ(late.has_mapped(fresh), 0);
  EXPECT_EQ(words_mapped_in(late, worker), words);
  for (auto* x : {&late, &spare_of_late}) {
    x->asked().wait_for(control::map, words);
    x->asked().wait_for(control::map, fresh);
    EXPECT_EQ(x->asked().count_all(control::map), 2);
  }
}

TEST_F(SharedSegments, AreMappedOnceWhileTheReplyIsAwaited) {
  mapping_worker worker{segments_};
  mapping_worker spare{segments_};
  spare.link().set_request_limit(std::chrono::milliseconds{100});
  must(segments_.prepare(worker.link(), spare.link()));
  auto* const memory = must(segments_.create(4096));
  spare.hold();
  const auto segment = must(segments_.place_of(memory, 1, worker.link())).segment;
  spare.asked().wait_for(control::map, segment);
  const auto place = segments_.place_of(memory, 1, spare.link());
  ASSERT_FALSE(place);
  EXPECT_TRUE(has_code(place.error(), errc::worker_lost)) << describe(place.error());
  EXPECT_NE(describe(place.error()).find("to map memory"), std::string::npos);
  EXPECT_EQ(spare.asked().count(control::map, segment), 1);
}

TEST_F(SharedSegments, AreUnmappedWhereverTheyAreMapped) {
  mapping_worker worker{segments_};
  mapping_worker spare{segments_};
  must(segments_.prepare(worker.link(), spare.link()));
  auto* const memory = must(segments_.create(4096));
  spare.hold();
  const auto segment = must(segments_.place_of(memory, 1, worker.link())).segment;
  spare.asked().wait_for(control::map, segment);
  must(segments_.remove(memory));
  EXPECT_EQ(worker.has_mapped(segment), 0);
  EXPECT_EQ(spare.has_mapped(segment), 1);
  spare.release(); // it unmaps after it has mapped
  spare.asked().wait_for(control::unmap, segment);
}

TEST_F(SharedSegments, ThatASpareCannotMapAreMappedWhenTheyAreNeeded) {
  mapping_worker worker{segments_};
  mapping_worker spare{segments_};
  auto* const memory = must(segments_.create(4096));
  const auto segment = must(segments_.place_of(memory, 1, worker.link())).segment;
  spare.refuse();
  EXPECT_TRUE(has_code(segments_.prepare(worker.link(), spare.link()), errc::unavailable));
  EXPECT_TRUE(has_code(segments_.place_of(memory, 1, spare.link()), errc::unavailable));
  spare.accept();
  EXPECT_EQ(must(segments_.place_of(memory, 1, spare.link())).segment, segment);
  spare.asked().wait_for(control::map, mapped_in(worker));
}

TEST_F(SharedSegments, OfALostSpareAreNotWaitedFor) {
  mapping_worker worker{segments_};
  mapping_worker spare{segments_};
  const auto segment = mapped_in(worker);
  spare.hold();
  auto prepared = std::async(std::launch::async,
                             [&] { return segments_.prepare(worker.link(), spare.link()); });
  spare.asked().wait_for(control::map, segment);
  spare.lose();
  EXPECT_TRUE(is_ok(prepared.get()));
}

} // namespace
} // namespace troupe::testing
