/// Memory of the programs in a worker. The parent is a function of this process.

#include "support/eventually.hpp"
#include "support/expect.hpp"
#include "support/random.hpp"
#include "worker/child/guest_memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using namespace std::chrono_literals;
using detail::control;
using detail::guest_memory;
using detail::lent_range;

constexpr std::size_t mib = std::size_t{1} << 20;
constexpr auto forever = cuda_backend_options::forever;
constexpr std::size_t device_bytes = 256 * mib;

/// Lends host memory.
class lender {
public:
  /// Pieces have `least` bytes or more.
  explicit lender(std::size_t least = mib) : least_(least) {}

  std::unique_ptr<guest_memory> borrower(std::chrono::milliseconds keep = forever) {
    auto result = std::make_unique<guest_memory>(guest_memory::options{
        0, keep, [this](control what, std::uint64_t number, const lent_range& x) {
          ++requests;
          if (what == control::take_back)
            to_->answered(number, take_back(x));
          else if (lends_at_once)
            to_->answered(number, lend(x.size_bytes));
          else
            waiting_ = {number, x.size_bytes};
          return caf::error{};
        }});
    to_ = result.get();
    return result;
  }

  /// Answers the request that waits.
  void answer() { to_->answered(waiting_.first, lend(waiting_.second)); }

  std::size_t lent() {
    const std::lock_guard lock{mutex_};
    return lent_.size();
  }
  /// Takes a piece that the programs have trimmed.
  caf::expected<lent_range> take_back(const lent_range& x) {
    const std::lock_guard lock{mutex_};
    const auto found = lent_.find(x.address);
    EXPECT_TRUE(found != lent_.end() && found->second.second == x.size_bytes);
    if (found != lent_.end())
      lent_.erase(found);
    return x;
  }

  int lends = 0;
  std::atomic<int> requests{0};
  bool lends_at_once = true;

private:
  caf::expected<lent_range> lend(std::size_t size_bytes) {
    const std::lock_guard lock{mutex_};
    ++lends;
    const auto size = (std::max(size_bytes, least_) + 511) / 512 * 512; // as the parent does
    std::size_t used = 0;
    for (auto& [address, x] : lent_)
      used += x.second;
    if (used + size > device_bytes)
      return make_error(errc::out_of_memory, "the test's device is full");
    std::unique_ptr<std::byte[]> memory{new std::byte[size]};
    const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
    lent_.emplace(address, std::pair{std::move(memory), size});
    return lent_range{address, size};
  }

  const std::size_t least_;
  guest_memory* to_ = nullptr;
  std::pair<std::uint64_t, std::size_t> waiting_; ///< number, and size
  std::mutex mutex_;
  std::map<std::uint64_t, std::pair<std::unique_ptr<std::byte[]>, std::size_t>> lent_;
};

TEST(GuestMemory, HoldsWhatIsWrittenToEachAllocation) {
  lender parent;
  const auto memory = parent.borrower();
  std::mt19937_64 random{1};
  std::map<void*, std::pair<std::size_t, int>> held; // size, and the content of each byte
  for (int step = 0; step < 20'000; ++step) {
    if (held.size() < 200 && chance(random, 0.6)) {
      const auto size = chance(random, 0.02) ? pick(random, 1, 3 * mib) : pick(random, 1, 20'000);
      void* const x = must(memory->allocate(size, device_bytes));
      const int value = static_cast<int>(pick(random, 1, 255));
      std::memset(x, value, size);
      ASSERT_TRUE(held.emplace(x, std::pair{size, value}).second);
    } else if (!held.empty()) {
      const auto x =
          std::next(held.begin(), static_cast<std::ptrdiff_t>(pick(random, 0, held.size() - 1)));
      const auto [size, value] = x->second;
      const auto* bytes = static_cast<const std::byte*>(x->first);
      ASSERT_TRUE(std::all_of(bytes, bytes + size,
                              [v = static_cast<std::byte>(value)](auto b) { return b == v; }));
      EXPECT_TRUE(memory->deallocate(x->first));
      held.erase(x);
    }
  }
}

TEST(GuestMemory, NeedsTheParentOnceForManySmallAllocations) {
  lender parent;
  const auto memory = parent.borrower();
  for (int i = 0; i < 2000; ++i)
    must(memory->allocate(4, device_bytes));
  EXPECT_EQ(parent.lends, 1);
}

TEST(GuestMemory, GoesBackSomeTimeAfterItIsEmpty) {
  lender parent;
  const auto memory = parent.borrower(300ms);
  void* const small = must(memory->allocate(4, device_bytes));
  void* const large = must(memory->allocate(2 * mib, device_bytes)); // in a range of its own
  EXPECT_EQ(parent.lent(), 2u);
  const auto freed = std::chrono::steady_clock::now();
  EXPECT_TRUE(memory->deallocate(large));
  EXPECT_TRUE(eventually([&] { return parent.lent() == 1; }));
  EXPECT_GE(std::chrono::steady_clock::now() - freed, 300ms);
  std::memset(small, 1, 4);
  EXPECT_TRUE(memory->deallocate(small));
  EXPECT_TRUE(eventually([&] { return parent.lent() == 0; }));
  EXPECT_EQ(memory->free_bytes(), 0u);
}

TEST(GuestMemory, GoesBackWhenTheParentAsks) {
  lender parent;
  const auto memory = parent.borrower();
  void* const used = must(memory->allocate(4, device_bytes));
  EXPECT_TRUE(memory->deallocate(must(memory->allocate(2 * mib, device_bytes))));
  const auto trimmed = memory->trim();
  ASSERT_EQ(trimmed.size(), 1u);
  EXPECT_EQ(trimmed.front().size_bytes, 2 * mib);
  must(parent.take_back(trimmed.front()));
  EXPECT_TRUE(memory->trim().empty());
  must(memory->allocate(2 * mib, device_bytes)); // not in the range that is gone
  EXPECT_EQ(parent.lends, 3);
  EXPECT_TRUE(memory->deallocate(used));
}

TEST(GuestMemory, IsUsedAgainAfterTheDeviceWasFull) {
  lender parent;
  const auto memory = parent.borrower();
  void* const most = must(memory->allocate(device_bytes, device_bytes));
  EXPECT_TRUE(has_code(memory->allocate(1, device_bytes), errc::out_of_memory));
  EXPECT_TRUE(memory->deallocate(most));
  must(memory->allocate(1, device_bytes));
}

/// The parent would end the worker.
TEST(GuestMemory, AsksForNoMoreThanTheDeviceHas) {
  lender parent;
  const auto memory = parent.borrower();
  for (const auto size : {device_bytes + 1, std::size_t{1} << 60, SIZE_MAX})
    EXPECT_TRUE(has_code(memory->allocate(size, device_bytes), errc::out_of_memory));
  EXPECT_EQ(parent.lends, 0);
}

TEST(GuestMemory, ReturnsWhatItCannotManage) {
  lender parent{4096};
  const auto memory = parent.borrower();
  for (std::size_t i = 0; i < detail::slab_space::most_slabs; ++i)
    must(memory->allocate(4096, device_bytes));
  EXPECT_TRUE(has_code(memory->allocate(4096, device_bytes), errc::out_of_memory));
  EXPECT_EQ(parent.lent(), detail::slab_space::most_slabs);
}

TEST(GuestMemory, MakesRoomInItsListOfRanges) {
  lender parent{4096};
  const auto memory = parent.borrower();
  void* first = nullptr;
  for (std::size_t i = 0; i < detail::slab_space::most_slabs; ++i)
    first = must(memory->allocate(4096, device_bytes));
  EXPECT_TRUE(memory->deallocate(first)); // its range is too small for the next allocation
  must(memory->allocate(8192, device_bytes));
  EXPECT_EQ(parent.lent(), detail::slab_space::most_slabs);
}

/// A range that one thread has got from the parent is not used up by another one before.
TEST(GuestMemory, ServesManyThreads) {
  lender parent;
  const auto memory = parent.borrower();
  std::vector<std::jthread> all;
  for (int value = 1; value <= 4; ++value)
    all.emplace_back([&, value] {
      for (int i = 0; i < 300; ++i) {
        const auto x = memory->allocate(mib, device_bytes);
        ASSERT_TRUE(x) << describe(x.error());
        std::memset(*x, value, 1000);
        ASSERT_EQ(static_cast<const std::byte*>(*x)[999], static_cast<std::byte>(value));
        ASSERT_TRUE(memory->deallocate(*x));
        for (auto& range : memory->trim())
          must(parent.take_back(range));
      }
    });
}

/// While a request waits, the parent may look for memory, and ask for it.
TEST(GuestMemory, KeepsEmptyRangesForTheParentWhileARequestWaits) {
  lender parent;
  const auto memory = parent.borrower(1ms);
  void* const first = must(memory->allocate(mib, device_bytes));
  parent.lends_at_once = false;
  auto waits = std::async(std::launch::async, [&] { return memory->allocate(mib, device_bytes); });
  EXPECT_TRUE(eventually([&] { return parent.requests == 2; }));
  EXPECT_TRUE(memory->deallocate(first));
  EXPECT_FALSE(eventually([&] { return memory->free_bytes() == 0; }, 100ms));
  const auto trimmed = memory->trim();
  EXPECT_EQ(trimmed.size(), 1u);
  for (auto& x : trimmed)
    must(parent.take_back(x));
  parent.answer();
  EXPECT_TRUE(waits.get());
}

/// The parent ends a worker that does not wait for its replies.
TEST(GuestMemory, AsksForNothingAfterTheEnd) {
  lender parent;
  const auto memory = parent.borrower();
  memory->end();
  EXPECT_TRUE(has_code(memory->allocate(1, device_bytes), errc::unavailable));
  EXPECT_EQ(parent.requests, 0);
}

TEST(GuestMemory, EndsAWaitForTheParent) {
  lender parent;
  parent.lends_at_once = false;
  const auto memory = parent.borrower();
  auto waits = std::async(std::launch::async, [&] { return memory->allocate(1, device_bytes); });
  memory->end();
  EXPECT_TRUE(has_code(waits.get(), errc::unavailable));
}

} // namespace

} // namespace troupe::testing
