// A spare can do at once what its device's worker did: while a driver ends a process, its calls for
// memory take long.

#include "support/eventually.hpp"
#include "support/worker_losses.hpp"
#include "worker/handover_fixture.hpp"
#include "worker/ledger.hpp"
#include "worker/parent/process_pool.hpp"
#include <troupe/host_buffer.hpp>
#include <troupe/worker.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <future>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

#if !defined(__SANITIZE_THREAD__) // slabs are between other addresses there
/// Returns the inodes of the host memory that a process shares with this one. Its slabs are at
/// addresses that are chosen for them.
std::set<std::uint64_t> shared_with(std::int64_t process) {
  std::set<std::uint64_t> result;
  std::ifstream all{"/proc/" + std::to_string(process) + "/maps"};
  for (std::string line; std::getline(all, line);) {
    if (line.find("memfd:troupe") == std::string::npos)
      continue;
    std::istringstream text{line};
    std::string skipped;
    std::uintptr_t begin = 0;
    std::uint64_t inode = 0;
    text >> std::hex >> begin >> skipped >> skipped >> skipped >> skipped >> std::dec >> inode;
    if (begin < 0x2000'0000'0000 || begin >= 0x3000'0000'0000)
      result.insert(inode);
  }
  return result;
}

TEST(ReadySpare, CopiesWithoutAnyNewMapping) {
  test_system system{in_worker_processes(1)};
  world_config config;
  config.limits.standby = standby_policy::full;
  auto w = system.open_world(config);
  const auto d = w.device_of(0);
  std::vector<std::uint32_t> content(100'000);
  std::iota(content.begin(), content.end(), 1u);
  auto memory = must(d.allocate<std::uint32_t>(content.size()));
  const auto pinned = must(d.allocate_pinned(content.size() * sizeof(std::uint32_t)));
  for (int round = 0; round < 3; ++round) {
    // By pageable memory and by pinned memory, each way.
    must(answer_of(d.upload(memory, host_buffer{content})));
    EXPECT_TRUE(holds(d, memory, content));
    must(answer_of(d.download(memory, pinned)));
    must(answer_of(d.upload(memory, pinned)));
    std::map<std::int64_t, std::set<std::uint64_t>> before;
    EXPECT_TRUE(eventually([&] {
      before.clear();
      for (const auto child : children())
        before.emplace(child, shared_with(child));
      // The spare maps what its worker maps soon after it. Each has its own words.
      return w.status().standby_ready && before.size() == 2 &&
             before.begin()->second.size() == before.rbegin()->second.size();
    }));
    EXPECT_EQ(code_of(kill_worker(d)), errc::worker_lost);
    EXPECT_TRUE(holds(d, memory, content));
    must(answer_of(d.upload(memory, host_buffer{content})));
    must(answer_of(d.download(memory, pinned)));
    must(answer_of(d.upload(memory, pinned)));
    const auto worker = must(answer_of(d.stats())).worker_pid;
    ASSERT_TRUE(before.contains(worker)) << "no spare has taken over";
    EXPECT_EQ(before.at(worker).size(), 4u); // its words, pinned memory, and some for each way
    EXPECT_EQ(shared_with(worker), before.at(worker));
  }
}
#endif

/// Else the next standby, for which workers make memory, would hold up others.
TEST(ReadySpare, IsThereWhenNoLostWorkerIsEnding) {
  TROUPE_HOST_ONLY("its workers are of the host backend");
  ledger book;
  const auto pool = must(detail::process_pool::create(book.options(2)));
  const auto lost = must(pool->provide(0));
  must(pool->provide(1));
  must(pool->provide_spare(1));
  lost->lose(make_error(errc::worker_lost, "by the test"));
  auto next = std::async(std::launch::async, [&] { return pool->provide(0); }); // ends the lost one
  must(pool->provide_spare(1)); // it is there already
  EXPECT_TRUE(lost->is_reaped());
  must(next.get());
  for (int device : {0, 1})
    pool->release(device);
}

} // namespace

} // namespace troupe::testing
