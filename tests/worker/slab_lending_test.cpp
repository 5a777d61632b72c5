/// Memory that a parent lends to the programs in a worker. The worker is a function of this
/// process, which answers at once.

#include "foundation/wire.hpp"
#include "support/eventually.hpp"
#include "support/expect.hpp"
#include "support/no_threads.hpp"
#include "support/random.hpp"
#include "worker/parent/device_slabs.hpp"
#include "worker/parent/shared_slabs.hpp"
#include "worker/parent/worker_link.hpp"
#include "worker/protocol/protocol.hpp"
#include "worker/protocol/worker_page.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using namespace std::chrono_literals;
using detail::control;
using detail::control_head;
using detail::device_slabs;
using detail::lent_range;
using detail::worker_link;

constexpr std::size_t mib = std::size_t{1} << 20;
constexpr auto forever = cuda_backend_options::forever;

using reply = caf::expected<lent_range>;

/// A worker with virtual devices, and its programs' requests.
class borrower {
public:
  /// `executes`: of all workers of the device, which are in one process here
  explicit borrower(std::shared_ptr<backend> executes) : executes_(std::move(executes)) {
    auto area = std::make_shared<detail::link_area>();
    link = std::make_shared<worker_link>(0, *area, area, std::make_unique<sender>(*this));
    link->set_slab_granularity(4096);
  }

  void send(control what, std::uint64_t number, const lent_range& x) {
    detail::wire_writer message;
    message(control_head{number, what}, x);
    link->received(message.bytes());
  }
  /// Sends a request, and waits for its reply or for the loss.
  reply ask(control what, const lent_range& x) {
    send(what, ++last_, x);
    return wait();
  }
  reply wait() {
    std::unique_lock lock{mutex_};
    EXPECT_TRUE(changed_.wait_for(lock, 20s, [&] { return !replies_.empty() || lost_; }));
    if (replies_.empty())
      return make_error(errc::worker_lost, "the worker is lost");
    auto [number, result] = std::move(replies_.front());
    replies_.pop_front();
    EXPECT_EQ(number, last_);
    return result;
  }
  reply borrow(std::size_t size_bytes) { return ask(control::lend, {0, size_bytes}); }
  bool give_back(const lent_range& x) { return static_cast<bool>(ask(control::take_back, x)); }
  bool has_reply() {
    const std::lock_guard lock{mutex_};
    return !replies_.empty();
  }

  std::shared_ptr<worker_link> link;
  std::vector<lent_range> unused; ///< to be given back when the parent asks
  std::atomic<int> trims{0};
  std::function<void()> on_make; ///< called before a slab is made
  std::function<void()> on_map;  ///< called before a slab is mapped

private:
  class sender final : public detail::control_sender {
  public:
    explicit sender(borrower& of) : of_(of) {}
    caf::error send(std::span<const std::byte> message, std::optional<int>) noexcept override {
      of_.serve(message);
      return {};
    }
    void kill() noexcept override {
      const std::lock_guard lock{of_.mutex_};
      of_.lost_ = true;
      of_.changed_.notify_all();
    }

  private:
    borrower& of_;
  };

  void serve(std::span<const std::byte> message) {
    detail::wire_reader reader{message};
    const auto head = reader.get<control_head>();
    if (head.kind == control::demand_reply) {
      const auto number = reader.get<std::uint64_t>();
      const auto error = reader.get<caf::error>();
      const auto range = reader.get<lent_range>();
      link->received(answer_to(head, {}).bytes());
      const std::lock_guard lock{mutex_};
      replies_.emplace_back(number, error ? reply{error} : reply{range});
      changed_.notify_all();
      return;
    }
    if (head.kind == control::trim) {
      ++trims;
      detail::wire_writer ranges;
      ranges.put(std::exchange(unused, {}));
      return link->received(answer_to(head, {}, ranges.bytes()).bytes());
    }
    const auto x = reader.get<detail::slab_args>();
    const memory_slab which{0, reinterpret_cast<void*>(x.address), x.size_bytes};
    if (head.kind == control::map_slab && on_map)
      on_map();
    if (head.kind == control::make_slab) {
      if (on_make)
        on_make();
      auto made = executes_->make_slab(which);
      detail::file_descriptor descriptor{made ? *made : -1};
      return link->received(answer_to(head, made ? caf::error{} : made.error()).bytes(),
                            std::move(descriptor));
    }
    // All workers are in this process, so that a slab is mapped once.
    link->received(answer_to(head, head.kind == control::unmap_slab ? executes_->unmap_slab(which)
                                                                    : caf::error{})
                       .bytes());
  }

  const std::shared_ptr<backend> executes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<std::uint64_t, reply>> replies_;
  std::uint64_t last_ = 0;
  bool lost_ = false;
};

class SlabLending : public ::testing::Test {
protected:
  void begin(std::size_t bytes = 4096 * mib, std::chrono::milliseconds keep = forever) {
    device_ = make_host_backend({.devices = 1, .bytes_per_device = bytes});
    slabs_ = std::make_shared<device_slabs>(0, std::make_shared<detail::shared_slabs>(), keep);
    slabs_->begin(worker_.emplace(device_).link);
    slabs_->set_device_bytes(bytes);
  }
  ::testing::AssertionResult is_lost_for_nonsense() {
    if (!worker_->link->lost())
      return ::testing::AssertionFailure() << "it is not lost";
    const auto text = describe(worker_->link->loss());
    return text.find("malformed") != std::string::npos ? ::testing::AssertionSuccess()
                                                       : ::testing::AssertionFailure() << text;
  }

  std::shared_ptr<backend> device_;
  std::optional<borrower> worker_;
  std::shared_ptr<device_slabs> slabs_;
};

TEST_F(SlabLending, GivesARangeInWhichMuchFits) {
  begin();
  const auto range = must(worker_->borrow(1000));
  EXPECT_EQ(range.size_bytes, 64 * mib);
  EXPECT_EQ(slabs_->free_bytes(), 0u);
}

TEST_F(SlabLending, OverlapsNothingThatTheParentHas) {
  begin();
  std::mt19937_64 random{1};
  std::map<std::uintptr_t, std::size_t> held; // begin to size
  std::vector<void*> of_parent;
  std::vector<lent_range> of_programs;
  for (int step = 0; step < 400; ++step) {
    const auto size = pick(random, 1, 20 * mib);
    if (chance(random, 0.4)) {
      of_parent.push_back(must(slabs_->allocate(size)));
      held.emplace(reinterpret_cast<std::uintptr_t>(of_parent.back()), size);
    } else if (chance(random, 0.2) && !of_parent.empty()) {
      held.erase(reinterpret_cast<std::uintptr_t>(of_parent.back()));
      EXPECT_TRUE(slabs_->deallocate(of_parent.back()));
      of_parent.pop_back();
    } else if (chance(random, 0.5) && of_programs.size() < 20) {
      of_programs.push_back(must(worker_->borrow(size)));
      EXPECT_GE(of_programs.back().size_bytes, size);
      held.emplace(of_programs.back().address, of_programs.back().size_bytes);
    } else if (!of_programs.empty()) {
      held.erase(of_programs.back().address);
      EXPECT_TRUE(worker_->give_back(of_programs.back()));
      of_programs.pop_back();
    }
    for (auto i = held.begin(); i != held.end() && std::next(i) != held.end(); ++i)
      ASSERT_LE(i->first + i->second, std::next(i)->first);
  }
}

TEST_F(SlabLending, GivesWhatIsLeftWhereALargeRangeDoesNotFit) {
  begin(16 * mib);
  void* const most = must(slabs_->allocate(12 * mib));
  EXPECT_EQ(must(worker_->borrow(4 * mib)).size_bytes, 4 * mib);
  EXPECT_TRUE(has_code(worker_->borrow(1), errc::out_of_memory));
  EXPECT_TRUE(slabs_->deallocate(most));
  EXPECT_TRUE(worker_->borrow(12 * mib));
}

/// Else each small allocation of the programs would need a request.
TEST_F(SlabLending, GivesAPieceForManyAllocationsWhereLittleIsLeft) {
  begin(256 * mib);
  static_cast<void>(must(slabs_->allocate(240 * mib)));
  static_cast<void>(must(slabs_->allocate(8 * mib))); // half of a slab
  EXPECT_EQ(must(worker_->borrow(1000)).size_bytes, mib);
  EXPECT_EQ(must(worker_->borrow(2 * mib)).size_bytes, 2 * mib);
}

TEST_F(SlabLending, GivesANewSlabBackIfOtherMemoryWasFreeMeanwhile) {
  begin(256 * mib);
  void* const first = must(slabs_->allocate(16 * mib));
  borrower spare{device_};
  must(slabs_->prepare(spare.link));
  spare.on_map = [&] { EXPECT_TRUE(slabs_->deallocate(first)); }; // while the next slab is made
  const auto range = must(worker_->borrow(16 * mib));
  EXPECT_EQ(reinterpret_cast<void*>(range.address), first);
  EXPECT_TRUE(worker_->give_back(range));
  must(slabs_->give_back_unused());
  EXPECT_EQ(slabs_->free_bytes(), 0u);
}

TEST_F(SlabLending, AsksForUnusedRangesWhenTheParentHasNoMemory) {
  begin(16 * mib);
  const auto range = must(worker_->borrow(16 * mib));
  EXPECT_TRUE(has_code(slabs_->allocate(1), errc::out_of_memory));
  EXPECT_GE(worker_->trims, 1);
  worker_->unused = {range};
  EXPECT_TRUE(slabs_->allocate(16 * mib));
}

TEST_F(SlabLending, GivesReturnedMemoryBackToTheDevice) {
  begin(16 * mib, 1ms);
  EXPECT_TRUE(worker_->give_back(must(worker_->borrow(16 * mib))));
  EXPECT_TRUE(eventually([&] { return slabs_->free_bytes() == 0; })); // no slab is left
  EXPECT_TRUE(slabs_->allocate(16 * mib));
}

TEST_F(SlabLending, KeepsWhatIsLentWhenTheParentFreesAll) {
  begin(16 * mib);
  must(slabs_->allocate(mib));
  const auto range = must(worker_->borrow(mib));
  auto* const byte = reinterpret_cast<std::byte*>(range.address);
  *byte = std::byte{7};
  must(slabs_->clear());
  EXPECT_EQ(*byte, std::byte{7}); // it is mapped
  EXPECT_TRUE(worker_->give_back(range));
}

// -- lost workers

TEST_F(SlabLending, TakesMemoryBackWhenTheLostWorkersWorkIsOver) {
  begin(16 * mib);
  static_cast<void>(must(worker_->borrow(16 * mib)));
  borrower next{device_};
  worker_->link->lose(make_error(errc::worker_lost, "the test wants it"));
  must(slabs_->move_to(next.link));
  EXPECT_TRUE(has_code(slabs_->allocate(1), errc::out_of_memory)); // it may still write
  worker_->link->program_ranks().begin();
  worker_->link->reaped();
  EXPECT_TRUE(has_code(slabs_->allocate(1), errc::out_of_memory)); // its peers may
  worker_->link->program_ranks().end();
  EXPECT_TRUE(slabs_->allocate(16 * mib));
}

TEST_F(SlabLending, LetsTheNextProgramWaitForTheMemoryOfTheLostOne) {
  begin(16 * mib);
  static_cast<void>(must(worker_->borrow(16 * mib)));
  borrower next{device_};
  worker_->link->lose(make_error(errc::worker_lost, "the test wants it"));
  must(slabs_->move_to(next.link));
  next.send(control::lend, 0, {0, 16 * mib});
  EXPECT_FALSE(eventually([&] { return next.has_reply(); }, 100ms));
  worker_->link->reaped();
  EXPECT_EQ(must(next.wait()).size_bytes, 16 * mib);
}

TEST_F(SlabLending, DoesNotWaitForMemoryThatTheParentHasClaimed) {
  begin(16 * mib);
  const auto claimed = must(worker_->borrow(8 * mib));
  static_cast<void>(must(worker_->borrow(8 * mib)));
  const auto claim =
      slabs_->keep_lent(*worker_->link, reinterpret_cast<const void*>(claimed.address), 8 * mib);
  borrower next{device_};
  worker_->link->lose(make_error(errc::worker_lost, "the test wants it"));
  must(slabs_->move_to(next.link));
  next.send(control::lend, 0, {0, 8 * mib});
  EXPECT_FALSE(eventually([&] { return next.has_reply(); }, 100ms));
  worker_->link->reaped();
  EXPECT_EQ(must(next.wait()).size_bytes, 8 * mib);
}

/// The memory is found wherever it comes back during the search for room.
TEST_F(SlabLending, GivesWhatComesBackDuringTheSearchForRoom) {
  for (int at = 1; at <= 8; ++at) {
    begin(16 * mib);
    static_cast<void>(must(worker_->borrow(16 * mib)));
    borrower next{device_};
    worker_->link->lose(make_error(errc::worker_lost, "the test wants it"));
    must(slabs_->move_to(next.link));
    next.on_make = [&, left = at]() mutable {
      if (--left == 0)
        worker_->link->reaped();
    };
    next.send(control::lend, 0, {0, 8 * mib});
    if (eventually([&] { return next.has_reply(); }, 100ms)) {
      EXPECT_TRUE(next.wait()) << at;
      continue;
    }
    worker_->link->reaped(); // the search was over earlier
    EXPECT_TRUE(next.wait()) << at;
  }
}

/// It may be gone already: nothing would give the memory back.
TEST_F(SlabLending, LendsNothingToAWorkerThatIsGone) {
  begin(16 * mib);
  EXPECT_TRUE(slabs_->deallocate(must(slabs_->allocate(16 * mib))));
  borrower spare{device_};
  must(slabs_->prepare(spare.link));
  spare.send(control::lend, 0, {0, 16 * mib});
  spare.link->lose(make_error(errc::worker_lost, "the test wants it"));
  spare.link->reaped();
  must(slabs_->move_to(spare.link));
  EXPECT_FALSE(eventually([&] { return slabs_->free_bytes() == 0; }, 100ms));
}

/// The supervisor of a process knows its link only while something keeps that.
TEST_F(SlabLending, KeepsALostWorkerUntilItsProcessIsGone) {
  begin(16 * mib);
  static_cast<void>(must(worker_->borrow(16 * mib)));
  borrower next{device_};
  worker_->link->lose(make_error(errc::worker_lost, "the test wants it"));
  must(slabs_->move_to(next.link));
  const std::weak_ptr<worker_link> lost = worker_->link;
  worker_.reset();
  if (const auto link = lost.lock())
    link->reaped();
  EXPECT_TRUE(slabs_->allocate(16 * mib));
  EXPECT_TRUE(eventually([&] { return lost.expired(); })); // also the thread that lent has ended
}

TEST_F(SlabLending, ServesASpareWhenItHasTheDevice) {
  begin(16 * mib);
  borrower spare{device_};
  spare.send(control::lend, 0, {0, mib});
  EXPECT_FALSE(spare.has_reply());
  worker_->link->lose(make_error(errc::worker_lost, "the test wants it"));
  must(slabs_->move_to(spare.link));
  EXPECT_TRUE(spare.wait());
}

TEST_F(SlabLending, LendsNothingToAFormerWorker) {
  begin(16 * mib);
  const auto range = must(worker_->borrow(mib));
  borrower next{device_};
  must(slabs_->move_to(next.link));
  EXPECT_TRUE(has_code(worker_->borrow(mib), errc::device_reset));
  EXPECT_TRUE(worker_->give_back(range));
}

TEST_F(SlabLending, ForgetsWhatALostWorkerHadWithItsGeneration) {
  begin(16 * mib);
  static_cast<void>(must(worker_->borrow(16 * mib)));
  borrower next{make_host_backend({.devices = 1, .bytes_per_device = 16 * mib})};
  worker_->link->lose(make_error(errc::worker_lost, "the test wants it"));
  slabs_->begin(next.link);
  void* const all = must(slabs_->allocate(16 * mib));
  worker_->link->reaped(); // must not give back what is in use now
  EXPECT_TRUE(has_code(slabs_->allocate(1), errc::out_of_memory));
  EXPECT_TRUE(slabs_->deallocate(all));
}

/// A device that has moved to its spare may be lost while the former worker still ends.
TEST_F(SlabLending, LeavesAFormerWorkerAloneThatKnowsNothingOfTheNewGeneration) {
  begin(16 * mib);
  const auto range = must(worker_->borrow(mib));
  borrower next{device_};
  must(slabs_->move_to(next.link));
  borrower last{device_};
  next.link->lose(make_error(errc::worker_lost, "the test wants it"));
  slabs_->begin(last.link);
  EXPECT_TRUE(worker_->give_back(range));
  EXPECT_FALSE(worker_->link->lost());
}

// -- memory that the parent has claimed

TEST_F(SlabLending, KeepsClaimedMemoryUntilTheClaimEnds) {
  begin(16 * mib);
  const auto range = must(worker_->borrow(16 * mib));
  auto* const memory = reinterpret_cast<std::byte*>(range.address);
  auto claim = slabs_->keep_lent(*worker_->link, memory + mib, 15 * mib);
  auto other = slabs_->keep_lent(*worker_->link, memory, mib);
  ASSERT_TRUE(claim && other);
  borrower next{device_};
  worker_->link->lose(make_error(errc::worker_lost, "the test wants it"));
  must(slabs_->move_to(next.link));
  worker_->link->reaped();
  other.reset();
  EXPECT_TRUE(has_code(slabs_->allocate(1), errc::out_of_memory));
  claim.reset();
  EXPECT_TRUE(slabs_->allocate(16 * mib));
}

TEST_F(SlabLending, OthersReachOnlyWhatIsLent) {
  begin();
  auto* const own = static_cast<std::byte*>(must(slabs_->allocate(mib)));
  const auto range = must(worker_->borrow(mib));
  auto* const memory = reinterpret_cast<std::byte*>(range.address);
  borrower other{device_};
  EXPECT_TRUE(slabs_->keep_lent(*worker_->link, memory, range.size_bytes));
  EXPECT_FALSE(slabs_->keep_lent(*worker_->link, memory, range.size_bytes + 1));
  EXPECT_FALSE(slabs_->keep_lent(*worker_->link, memory + range.size_bytes, 1));
  EXPECT_FALSE(slabs_->keep_lent(*worker_->link, memory - 1, 1));
  EXPECT_FALSE(slabs_->keep_lent(*worker_->link, own, 1));
  EXPECT_FALSE(slabs_->keep_lent(*worker_->link, nullptr, 0));
  EXPECT_FALSE(slabs_->keep_lent(*other.link, memory, 1));
}

// -- nothing that a worker sends does harm

TEST_F(SlabLending, LosesAWorkerThatAsksForMoreThanTheDeviceHas) {
  for (const auto size : {std::size_t{0}, 16 * mib + 1, std::size_t{1} << 60, SIZE_MAX}) {
    begin(16 * mib);
    EXPECT_FALSE(worker_->borrow(size));
    EXPECT_TRUE(is_lost_for_nonsense()) << size;
  }
}

TEST_F(SlabLending, LosesAWorkerThatCanMakeNoSlabs) {
  begin(16 * mib);
  borrower other{device_};
  other.link->set_slab_granularity(0);
  slabs_->begin(other.link);
  EXPECT_FALSE(other.borrow(mib));
  EXPECT_TRUE(other.link->lost());
}

TEST_F(SlabLending, LosesAWorkerThatGivesBackWhatItDoesNotHave) {
  const std::vector<std::function<lent_range(const lent_range&)>> forged{
      [](auto& x) { return lent_range{x.address + 512, 512}; },
      [](auto& x) { return lent_range{x.address, x.size_bytes - 512}; },
      [](auto&) { return lent_range{}; }, [](auto&) { return lent_range{SIZE_MAX, SIZE_MAX}; },
      [this](auto&) {
        return lent_range{reinterpret_cast<std::uintptr_t>(must(slabs_->allocate(512))), 512};
      }};
  for (auto& forge : forged) {
    begin(16 * mib);
    EXPECT_FALSE(worker_->give_back(forge(must(worker_->borrow(512)))));
    EXPECT_TRUE(is_lost_for_nonsense());
  }
}

TEST_F(SlabLending, LosesAWorkerThatGivesMemoryBackTwice) {
  begin(16 * mib);
  const auto range = must(worker_->borrow(512));
  EXPECT_TRUE(worker_->give_back(range));
  EXPECT_FALSE(worker_->give_back(range));
  EXPECT_TRUE(is_lost_for_nonsense());
  begin(16 * mib);
  worker_->unused = {must(worker_->borrow(16 * mib)), {}};
  EXPECT_FALSE(slabs_->allocate(1));
  EXPECT_TRUE(is_lost_for_nonsense());
}

TEST_F(SlabLending, LosesAWorkerThatDoesNotWaitForAnAnswer) {
  begin(16 * mib);
  borrower spare{device_}; // its requests wait
  spare.send(control::lend, 0, {0, mib});
  EXPECT_FALSE(spare.link->lost());
  spare.send(control::take_back, 1, {0, mib});
  EXPECT_TRUE(spare.link->lost());
  EXPECT_FALSE(worker_->link->lost());
}

TEST_F(SlabLending, LosesAWorkerWhoseRequestCannotBeRead) {
  begin(16 * mib);
  detail::wire_writer message;
  message(control_head{1, control::lend}, std::uint32_t{1});
  worker_->link->received(message.bytes());
  EXPECT_TRUE(is_lost_for_nonsense());
}

TEST_F(SlabLending, NeedsNoThreadToTakeMemoryBack) {
  begin(16 * mib);
  const auto range = must(worker_->borrow(16 * mib));
  {
    const no_threads lack;
    EXPECT_TRUE(worker_->give_back(range));
  }
  EXPECT_TRUE(slabs_->allocate(16 * mib));
}

TEST_F(SlabLending, SaysThatThereIsNoThread) {
  begin(16 * mib);
  {
    const no_threads lack;
    worker_->send(control::lend, 0, {0, mib});
    ASSERT_TRUE(worker_->has_reply());
  }
  EXPECT_TRUE(has_code(worker_->wait(), errc::unavailable));
  EXPECT_TRUE(worker_->borrow(mib));
}

} // namespace

} // namespace troupe::testing
