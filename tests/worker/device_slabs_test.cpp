/// The memory of a device whose worker makes slabs. The worker is a function of this process, which
/// answers at once.

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
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
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

#include <sys/mman.h>

namespace troupe::testing {

namespace {

using namespace std::chrono_literals;
using detail::control;
using detail::device_slabs;
using detail::slab_args;
using detail::worker_link;

constexpr std::size_t mib = std::size_t{1} << 20;
constexpr auto forever = cuda_backend_options::forever;

/// Answers requests for slabs as a worker with virtual devices does.
class slab_worker final : public detail::control_sender {
public:
  /// Counts the requests of a worker. It outlives the worker's link.
  struct events {
    std::atomic<int> made{0};
    std::atomic<int> unmapped{0};
    bool sends_descriptors = true;
  };

  slab_worker(std::size_t bytes, events& what, std::weak_ptr<worker_link>& link)
      : executes_(make_host_backend({.devices = 1, .bytes_per_device = bytes})), what_(what),
        link_(link) {}

  caf::error send(std::span<const std::byte> message, std::optional<int>) noexcept override {
    detail::wire_reader reader{message};
    const auto head = reader.get<detail::control_head>();
    const auto x = reader.get<slab_args>();
    const memory_slab which{0, reinterpret_cast<void*>(x.address), x.size_bytes};
    const auto link = link_.lock();
    if (head.kind == control::unmap_slab) {
      ++what_.unmapped;
      link->received(answer_to(head, executes_->unmap_slab(which)).bytes());
      return {};
    }
    auto made = executes_->make_slab(which);
    detail::file_descriptor descriptor{made ? *made : -1};
    what_.made += made ? 1 : 0;
    if (!what_.sends_descriptors)
      descriptor.reset();
    link->received(answer_to(head, made ? caf::error{} : made.error()).bytes(),
                   std::move(descriptor));
    return {};
  }

private:
  const std::shared_ptr<backend> executes_;
  events& what_;
  std::weak_ptr<worker_link>& link_;
};

class DeviceSlabs : public ::testing::Test {
protected:
  std::shared_ptr<worker_link> worker(std::size_t bytes = 4096 * mib) {
    auto area = std::make_shared<detail::link_area>();
    auto result = std::make_shared<worker_link>(
        0, *area, area, std::make_unique<slab_worker>(bytes, events_, link_));
    result->set_slab_granularity(4096);
    link_ = result;
    return result;
  }

  void begin(device_slabs& with, std::size_t bytes = 4096 * mib) {
    worker_ = worker(bytes);
    with.begin(worker_);
    with.set_device_bytes(bytes);
  }

  slab_worker::events events_;
  std::weak_ptr<worker_link> link_;
  std::shared_ptr<worker_link> worker_;
  const std::shared_ptr<detail::shared_slabs> shared_ = std::make_shared<detail::shared_slabs>();
};

TEST_F(DeviceSlabs, HoldWhatIsWrittenToEachAllocation) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  std::mt19937_64 random{1};
  std::map<void*, std::pair<std::size_t, int>> held; // size, and the content of each byte
  for (int step = 0; step < 3000; ++step) {
    if (held.size() < 100 && chance(random, 0.6)) {
      const auto size =
          chance(random, 0.02) ? pick(random, 1, 200 * mib) : pick(random, 1, 100'000);
      void* const memory = must(slabs.allocate(size));
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 256, 0u);
      const int value = static_cast<int>(pick(random, 1, 255));
      // The ends are enough: an overlap covers an end.
      std::memset(memory, value, std::min<std::size_t>(size, 64));
      static_cast<std::byte*>(memory)[size - 1] = static_cast<std::byte>(value);
      ASSERT_TRUE(held.emplace(memory, std::pair{size, value}).second);
    } else if (!held.empty()) {
      const auto x =
          std::next(held.begin(), static_cast<std::ptrdiff_t>(pick(random, 0, held.size() - 1)));
      const auto [size, value] = x->second;
      const auto* bytes = static_cast<const std::byte*>(x->first);
      ASSERT_EQ(bytes[0], static_cast<std::byte>(value));
      ASSERT_EQ(bytes[std::min<std::size_t>(size, 64) - 1], static_cast<std::byte>(value));
      ASSERT_EQ(bytes[size - 1], static_cast<std::byte>(value));
      EXPECT_TRUE(slabs.deallocate(x->first));
      held.erase(x);
    }
  }
}

TEST_F(DeviceSlabs, HaveRoomForManySmallAllocationsInOne) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  for (int i = 0; i < 10'000; ++i)
    must(slabs.allocate(4));
  EXPECT_EQ(events_.made, 1);
}

TEST_F(DeviceSlabs, FillTheDeviceToItsEnd) {
  constexpr std::size_t all = 64 * mib;
  device_slabs slabs{0, shared_, forever};
  begin(slabs, all);
  std::vector<void*> held;
  for (;;) {
    auto memory = slabs.allocate(5 * mib);
    if (!memory) {
      EXPECT_TRUE(has_code(memory.error(), errc::out_of_memory));
      break;
    }
    held.push_back(*memory);
  }
  EXPECT_EQ(held.size(), 12u);
  for (int i = 0; i < 4; ++i) // what is left
    held.push_back(must(slabs.allocate(mib)));
  EXPECT_TRUE(has_code(slabs.allocate(1).error(), errc::out_of_memory));
  for (auto* x : held)
    EXPECT_TRUE(slabs.deallocate(x));
  must(slabs.allocate(all)); // slabs that are not in use make room
}

TEST_F(DeviceSlabs, RefuseWhatNoDeviceHas) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  for (const auto size : {std::size_t{5} << 30, std::size_t{1} << 47, SIZE_MAX, SIZE_MAX - 4095})
    EXPECT_TRUE(has_code(slabs.allocate(size).error(), errc::out_of_memory)) << size;
  must(slabs.allocate(1));
}

TEST_F(DeviceSlabs, FindOtherAddressesWhereTheirsAreInUse) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  void* const before = shared_->addresses().take(64 * mib, 4096);
  shared_->addresses().give_back(before);
  void* const next = static_cast<std::byte*>(before) + 64 * mib; // of the next slab
  void* const used =
      ::mmap(next, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  ASSERT_EQ(used, next);
  auto* const there = static_cast<std::byte*>(must(slabs.allocate(mib))); // in another window
  EXPECT_TRUE(there < used || there >= static_cast<std::byte*>(used) + memory_slab::window / 2);
  EXPECT_EQ(events_.made, 1);
  EXPECT_EQ(::munmap(used, 4096), 0);
}

TEST_F(DeviceSlabs, GoBackSomeTimeAfterTheyAreEmpty) {
  device_slabs slabs{0, shared_, 500ms};
  begin(slabs);
  EXPECT_TRUE(slabs.deallocate(must(slabs.allocate(mib))));
  void* const first = must(slabs.allocate(mib));        // so its slab is not empty any more
  void* const second = must(slabs.allocate(100 * mib)); // in a slab of its own
  EXPECT_EQ(events_.made, 2);
  const auto freed = std::chrono::steady_clock::now();
  EXPECT_TRUE(slabs.deallocate(second));
  EXPECT_TRUE(eventually([&] { return events_.unmapped == 1; }));
  EXPECT_GE(std::chrono::steady_clock::now() - freed, 500ms);
  std::memset(first, 1, mib); // its slab is in use
  EXPECT_TRUE(slabs.deallocate(first));
  EXPECT_TRUE(eventually([&] { return events_.unmapped == 2; }));
  must(slabs.allocate(mib));
  EXPECT_EQ(events_.made, 3);
}

TEST_F(DeviceSlabs, StayWhileTheyAreNeededAgainAndAgain) {
  device_slabs slabs{0, shared_, 5s};
  begin(slabs);
  for (int i = 0; i < 1000; ++i)
    EXPECT_TRUE(slabs.deallocate(must(slabs.allocate(100 * mib))));
  EXPECT_EQ(events_.made, 1);
  EXPECT_EQ(events_.unmapped, 0);
}

TEST_F(DeviceSlabs, GoBackAtOnceWithoutAThread) {
  device_slabs slabs{0, shared_, 1h};
  begin(slabs);
  void* const memory = must(slabs.allocate(mib));
  const no_threads lack;
  EXPECT_TRUE(slabs.deallocate(memory));
  EXPECT_EQ(events_.unmapped, 1);
}

TEST_F(DeviceSlabs, AreGoneWithTheirGeneration) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  void* const memory = must(slabs.allocate(mib));
  must(slabs.allocate(100 * mib));
  must(slabs.clear());
  EXPECT_EQ(events_.unmapped, 2);
  EXPECT_EQ(slabs.free_bytes(), 0u);
  EXPECT_FALSE(slabs.deallocate(memory));
  must(slabs.allocate(mib));
}

TEST_F(DeviceSlabs, BeginAnewWithAnotherWorker) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  void* const memory = must(slabs.allocate(mib));
  const auto former = worker_;
  begin(slabs);
  EXPECT_FALSE(slabs.deallocate(memory));
  EXPECT_EQ(slabs.free_bytes(), 0u);
  EXPECT_NE(must(slabs.allocate(mib)), memory); // which the former worker may still write
}

TEST_F(DeviceSlabs, FailWithTheirWorker) {
  device_slabs slabs{0, shared_, 1ms};
  begin(slabs);
  void* const memory = must(slabs.allocate(mib));
  worker_->lose(make_error(errc::worker_lost, "for a test"));
  EXPECT_TRUE(has_code(slabs.allocate(100 * mib).error(), errc::worker_lost));
  EXPECT_TRUE(slabs.deallocate(memory));
  EXPECT_TRUE(has_code(slabs.clear(), errc::worker_lost));
  EXPECT_EQ(slabs.free_bytes(), 0u);
}

TEST_F(DeviceSlabs, NeedADescriptor) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  events_.sends_descriptors = false;
  EXPECT_TRUE(has_code(slabs.allocate(1).error(), errc::unavailable));
  EXPECT_EQ(events_.made, events_.unmapped);
  events_.sends_descriptors = true;
  must(slabs.allocate(1));
}

TEST_F(DeviceSlabs, AreAsManyAsThereMayBe) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  slabs.set_device_bytes(16 * 4096); // slabs of one page
  std::vector<void*> held;
  for (std::size_t i = 0; i < detail::slab_space::most_slabs; ++i)
    held.push_back(must(slabs.allocate(4096)));
  EXPECT_EQ(events_.made, 256);
  const auto refused = slabs.allocate(1);
  EXPECT_TRUE(has_code(refused.error(), errc::out_of_memory));
  EXPECT_NE(describe(refused.error()).find("256 slabs"), std::string::npos);
  EXPECT_TRUE(slabs.deallocate(held.back()));
  must(slabs.allocate(8192)); // the empty one makes room
}

/// Another worker. It counts its requests.
struct other_worker {
  other_worker() {
    auto area = std::make_shared<detail::link_area>();
    link = std::make_shared<worker_link>(1, *area, area, std::make_unique<control_of>(*this));
    link->set_slab_granularity(4096);
    itself = link;
  }
  void reply(const detail::control_head& to) {
    const auto error = to.kind == control::map_slab && maps_left-- <= 0
                           ? make_error(errc::out_of_memory, "on purpose")
                           : caf::error{};
    itself.lock()->received(answer_to(to, error).bytes());
  }
  void reply_to_all() {
    for (auto& x : std::exchange(waiting, {}))
      reply(x);
  }

  std::map<control, int> counts;
  int maps_left = 1000; ///< more are refused
  bool replies = true;  ///< at once; else by `reply_to_all`
  std::vector<detail::control_head> waiting;
  std::weak_ptr<worker_link> itself;
  std::shared_ptr<worker_link> link;

private:
  class control_of final : public detail::control_sender {
  public:
    explicit control_of(other_worker& of) : of_(of) {}
    caf::error send(std::span<const std::byte> message, std::optional<int>) noexcept override {
      detail::wire_reader reader{message};
      const auto head = reader.get<detail::control_head>();
      ++of_.counts[head.kind];
      if (of_.replies)
        of_.reply(head);
      else
        of_.waiting.push_back(head);
      return {};
    }

  private:
    other_worker& of_;
  };
};

TEST_F(DeviceSlabs, AreMappedByOthersWhenTheyFirstNeedThem) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  auto* const memory = static_cast<std::byte*>(must(slabs.allocate(mib)));
  other_worker first;
  other_worker second;
  for (int i = 0; i < 3; ++i)
    must(shared_->reach(memory, mib, *first.link));
  must(shared_->reach(memory + mib - 1, 1, *first.link));
  EXPECT_EQ(first.counts[control::map_slab], 1);
  must(shared_->reach(memory, mib, *second.link));
  EXPECT_EQ(second.counts[control::map_slab], 1);
  EXPECT_TRUE(has_code(shared_->reach(memory - 1, 1, *first.link).error(), errc::stale_ref));
  EXPECT_TRUE(has_code(shared_->reach(memory, 65 * mib, *first.link).error(), errc::stale_ref));
  EXPECT_TRUE(has_code(shared_->reach(memory, SIZE_MAX, *first.link).error(), errc::stale_ref));
  second.link.reset();
  auto kept = must(shared_->reach(memory, 1, *first.link));
  must(slabs.clear());
  EXPECT_EQ(first.counts[control::drop_slab], 0);
  kept.reset();
  EXPECT_EQ(first.counts[control::drop_slab], 1);
  EXPECT_TRUE(has_code(shared_->reach(memory, 1, *first.link).error(), errc::stale_ref));
}

/// Kernels of other workers may use the memory as soon as it is given out.
TEST_F(DeviceSlabs, AreMappedInAdmittedWorkersBeforeTheyAreUsed) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  must(slabs.allocate(mib));
  other_worker first;
  must(slabs.admit(first.link));
  EXPECT_EQ(first.counts[control::map_slab], 1); // the slab that there was
  must(slabs.admit(first.link));
  EXPECT_EQ(first.counts[control::map_slab], 1);
  EXPECT_TRUE(slabs.admits(*first.link));
  first.replies = false;
  auto growing = std::async(std::launch::async, [&] { return slabs.allocate(100 * mib); });
  EXPECT_TRUE(eventually([&] { return first.counts[control::map_slab] == 2; }));
  EXPECT_EQ(growing.wait_for(20ms), std::future_status::timeout);
  first.reply_to_all();
  must(growing.get());
}

TEST_F(DeviceSlabs, AreNotGivenOutIfAnAdmittedWorkerCannotMapThem) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  other_worker first;
  other_worker second;
  must(slabs.admit(first.link));
  must(slabs.admit(second.link));
  second.maps_left = 1;
  void* const memory = must(slabs.allocate(mib));
  EXPECT_TRUE(has_code(slabs.allocate(100 * mib).error(), errc::out_of_memory));
  EXPECT_EQ(events_.made, events_.unmapped + 1);
  EXPECT_EQ(first.counts[control::drop_slab], first.counts[control::map_slab] - 1);
  EXPECT_TRUE(slabs.deallocate(memory));
  second.link->give_up(make_error(errc::worker_lost, "on purpose"));
  must(slabs.allocate(100 * mib)); // a lost worker is forgotten
  EXPECT_FALSE(slabs.admits(*second.link));
}

TEST_F(DeviceSlabs, AreDroppedByOthersWithTheWorkerThatMadeThem) {
  other_worker other;
  {
    device_slabs slabs{0, shared_, forever};
    begin(slabs);
    must(shared_->reach(must(slabs.allocate(mib)), mib, *other.link));
    begin(slabs);
    EXPECT_EQ(other.counts[control::drop_slab], 1);
    must(shared_->reach(must(slabs.allocate(mib)), mib, *other.link));
  }
  EXPECT_EQ(other.counts[control::map_slab], 2);
  EXPECT_EQ(other.counts[control::drop_slab], 2);
}

TEST_F(DeviceSlabs, AreGivenToTheNextWorker) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  void* const memory = must(slabs.allocate(mib));
  void* const large = must(slabs.allocate(100 * mib));
  other_worker next;
  must(slabs.move_to(next.link));
  slabs.begin(next.link); // changes nothing
  EXPECT_EQ(next.counts[control::map_slab], 2);
  EXPECT_EQ(events_.unmapped, 0);
  EXPECT_TRUE(slabs.deallocate(large));
  must(slabs.give_back_unused());
  EXPECT_EQ(next.counts[control::unmap_slab], 1);
  EXPECT_EQ(next.counts[control::drop_slab], 0);
  other_worker other;
  must(shared_->reach(memory, mib, *other.link));
  EXPECT_NE(must(slabs.allocate(mib)), memory);
}

TEST_F(DeviceSlabs, AreMappedByASpareWhenTheyAppear) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  must(slabs.allocate(mib));
  other_worker spare;
  must(slabs.prepare(spare.link));
  EXPECT_EQ(spare.counts[control::map_slab], 1);
  spare.replies = false; // the allocation does not wait for it
  must(slabs.allocate(100 * mib));
  EXPECT_EQ(spare.counts[control::map_slab], 2);
  spare.replies = true;
  spare.reply_to_all();
  must(slabs.move_to(spare.link));
  EXPECT_EQ(spare.counts[control::map_slab], 2);
  must(slabs.clear());
  EXPECT_EQ(spare.counts[control::unmap_slab], 2);
  EXPECT_EQ(spare.counts[control::drop_slab], 0);
}

/// The order to map them may come late.
TEST_F(DeviceSlabs, AreNotMappedAgainByASpareThatHasThem) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  must(slabs.allocate(mib));
  other_worker spare;
  must(slabs.move_to(spare.link));
  spare.maps_left = 0;
  must(slabs.prepare(spare.link));
  EXPECT_EQ(spare.counts[control::map_slab], 1);
}

TEST_F(DeviceSlabs, AreDroppedByASpareThatDoesNotGetThem) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  must(slabs.allocate(mib));
  other_worker spare;
  must(slabs.prepare(spare.link));
  spare.replies = false;
  must(slabs.allocate(100 * mib));
  slabs.begin(spare.link); // as the device's worker, without the memory
  EXPECT_EQ(spare.counts[control::drop_slab], 1) << "the other one is not mapped yet";
  spare.replies = true;
  spare.reply_to_all();
  EXPECT_EQ(spare.counts[control::drop_slab], 2);
}

TEST_F(DeviceSlabs, AreDroppedByANextWorkerThatCannotMapAll) {
  device_slabs slabs{0, shared_, forever};
  begin(slabs);
  must(slabs.allocate(mib));
  must(slabs.allocate(100 * mib));
  other_worker next;
  next.maps_left = 1;
  EXPECT_TRUE(has_code(slabs.move_to(next.link), errc::out_of_memory));
  slabs.begin(next.link);
  EXPECT_EQ(next.counts[control::drop_slab], 1);
  EXPECT_EQ(slabs.free_bytes(), 0u);
}

TEST(NextSlab, IsLargeEnoughAndGrowsWithTheirNumber) {
  constexpr std::size_t gib = 1024 * mib;
  constexpr std::size_t unit = 2 * mib;
  EXPECT_EQ(detail::next_slab_bytes(1, 0, 80 * gib, unit), 64 * mib);
  EXPECT_EQ(detail::next_slab_bytes(100 * mib + 1, 0, 80 * gib, unit), 102 * mib);
  EXPECT_EQ(detail::next_slab_bytes(1, 0, 64 * mib, unit), 4 * mib);
  EXPECT_EQ(detail::next_slab_bytes(1, 0, mib, unit), unit);
  std::size_t all = 0;
  for (std::size_t n = 0; n < detail::slab_space::most_slabs; ++n) {
    const auto next = detail::next_slab_bytes(1, n, 1024 * gib, unit);
    EXPECT_EQ(next % unit, 0u);
    all += next;
  }
  EXPECT_GT(all, 300 * gib);
}

TEST(SlabAddresses, AreUsedOnceAtATime) {
  detail::slab_addresses addresses;
  constexpr std::size_t unit = 2 * mib;
  constexpr auto window = memory_slab::window;
  const auto windows = detail::slab_addresses::capacity() / window;
  const auto large = window / 4;
  std::mt19937_64 random{1};
  std::map<std::byte*, std::byte*> taken;
  for (int step = 0; step < 5000; ++step) {
    if (chance(random, 0.6)) {
      const auto size = chance(random, 0.1) ? large : pick(random, 1, 100'000) * unit;
      auto* const begin = static_cast<std::byte*>(addresses.take(size, unit));
      if (begin == nullptr) {
        ASSERT_GT(size, unit);
        continue;
      }
      const auto address = reinterpret_cast<std::uintptr_t>(begin);
      ASSERT_EQ(address % unit, 0u);
      ASSERT_EQ(address / window, (address + size - 1) / window);
      const auto next = taken.lower_bound(begin);
      ASSERT_TRUE(next == taken.end() || begin + size <= next->first);
      ASSERT_TRUE(next == taken.begin() || std::prev(next)->second <= begin);
      taken.emplace(begin, begin + size);
    } else if (!taken.empty()) {
      const auto x =
          std::next(taken.begin(), static_cast<std::ptrdiff_t>(pick(random, 0, taken.size() - 1)));
      addresses.give_back(x->first);
      taken.erase(x);
    }
  }
  EXPECT_EQ(addresses.take(window + unit, unit), nullptr);
  for (auto& [begin, end] : taken)
    addresses.give_back(begin);
  for (std::size_t i = 0; i < windows; ++i)
    EXPECT_NE(addresses.take(window, unit), nullptr); // from the start again
  EXPECT_EQ(addresses.take(unit, unit), nullptr);
}

} // namespace

} // namespace troupe::testing
