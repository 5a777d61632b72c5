// Workers that hang: they are lost alone, and no request waits for them for ever.

#include "support/child_process.hpp"
#include "support/eventually.hpp"
#include "support/process_watch.hpp"
#include "support/worker_losses.hpp"
#include "worker/ledger.hpp"
#include "worker/parent/process_pool.hpp"
#include "worker/parent/remote_device.hpp"
#include "worker/protocol/worker_parent.hpp"
#include <troupe/launch.hpp>
#include <troupe/worker.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

namespace troupe::testing {

namespace {

/// Workers run the same binary, so the launches are registered there too.
const bool launches_registered = [] {
  const auto error = register_launch("hang", [](launch_context&, auto, auto, auto) -> caf::error {
    while (true)
      ::pause();
  });
  return !error;
}();

/// Describes itself and then accepts no command.
TROUPE_CHILD(DeafWorker) {
  auto parent = must(detail::worker_parent::attach(main_arguments()));
  std::vector<std::byte> message(detail::control_bytes);
  static_cast<void>(must(parent.socket().receive(message)));
  detail::wire_reader reader{message};
  detail::wire_writer answer;
  answer.put(reader.get<detail::control_head>());
  answer.put(caf::error{});
  detail::wire_writer about;
  about.put(detail::worker_description{.devices = 1});
  answer.put_bytes(about.bytes());
  must(parent.socket().send(answer.bytes()));
  stay();
}

system_options in_workers_of(const worker_backend_options& options) {
  return {.devices = options.host.devices,
          .wrap = [=](std::shared_ptr<backend>) { return must(make_worker_backend(options)); }};
}

void send_signal(pid_t to, int what) { ASSERT_EQ(::kill(to, what), 0); }

bool says(const caf::error& error, const std::string& text) {
  return describe(error).find(text) != std::string::npos;
}

/// Two workers, of which a test hangs one, and their communicator.
struct building_pair {
  explicit building_pair(std::chrono::milliseconds build_limit) {
    auto options = book.options(2);
    options.workers.stuck_limit = 0s;
    options.workers.build_limit = build_limit;
    all = must(make_worker_backend(options));
    for (int i = 0; i < 2; ++i)
      devices.push_back(must(all->open(i)));
    bind();
    ids = book.wait(2);
  }

  void bind() {
    for (auto& x : devices)
      must(x->bind());
  }
  caf::expected<communicator_ranks> build() { return all->build({}, 2, ranks); }
  /// Rebuilds after the lost worker has been replaced.
  void build_again() {
    bind();
    must(all->destroy(must(build())));
  }

  ledger book;
  std::shared_ptr<backend> all;
  std::vector<std::unique_ptr<backend_device>> devices;
  std::vector<pid_t> ids;
  const std::vector<local_rank> ranks{{0, 0}, {1, 1}};
};

/// Blocks until the process is stopped. Until then it might still read.
void stop_process(pid_t id) {
  send_signal(id, SIGSTOP);
  siginfo_t info{};
  int code = 0;
  do
    code = ::waitid(P_PID, static_cast<id_t>(id), &info, WSTOPPED);
  while (code != 0 && errno == EINTR);
  EXPECT_EQ(code, 0) << std::generic_category().message(errno);
}

/// A worker that is stopped.
struct deaf_worker {
  explicit deaf_worker(std::chrono::milliseconds call_limit) {
    auto options = book.options(1);
    options.workers.stuck_limit = 0s;
    options.workers.call_limit = call_limit;
    pool = must(detail::process_pool::create(options));
    link = must(pool->provide(0));
    gone = watch_of(book.wait(1).front());
    stop_process(book.wait(1).front());
  }

  /// Sends a message large enough to fill the socket soon.
  template <class F> void send_message(F then) {
    static const std::vector<std::byte> body(32 << 10);
    link->request(detail::control::unmap, body, std::nullopt, std::move(then));
  }

  ledger book;
  std::shared_ptr<detail::process_pool> pool;
  std::shared_ptr<detail::worker_link> link;
  detail::file_descriptor gone;
};

TEST(HungWorker, InACollectiveIsLostAlone) {
  TROUPE_NEEDS_DEVICES(2);
  ledger book;
  auto options = book.options(3);
  options.workers.stuck_limit = 0s; // its signs of life stop too
  test_system system{in_workers_of(options)};
  world_config config;
  config.limits.stall_limit = 200ms;
  auto w = system.open_world(config);
  device_feed feed{system, system.device_actor(0)};
  const other_memory kept{w.device_of(1)};
  const auto before = feed.until(device_phase::ready).incarnation;
  auto data = must(w.allocate<float>(1000));
  send_signal(book.wait(3).front(), SIGSTOP); // the first worker of the pool is that of device 0
  EXPECT_FALSE(answer_of(w.all_reduce(data, reduce_op::sum)));
  EXPECT_EQ(feed.until(device_phase::ready, before + 1).incarnation, before + 1);
  const auto& seen = feed.seen();
  EXPECT_TRUE(std::any_of(seen.begin(), seen.end(), [](const device_changed& x) {
    return has_code(x.reason, errc::worker_lost) && says(x.reason, "lane_stuck");
  }));
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(kept.is_there());
}

TEST(HungWorker, InsideACallIsKilledThoughItBeats) {
  ASSERT_TRUE(launches_registered);
  ledger book;
  auto options = book.options(1);
  options.workers.call_limit = 300ms;
  test_system system{in_workers_of(options)};
  auto d = system.open();
  device_feed feed{system, system.device_actor()};
  const auto before = feed.until(device_phase::ready).incarnation;
  const stopwatch watch;
  const auto error = error_of(answer_of(d.launch("hang", {}, {}, {})));
  EXPECT_GE(watch.elapsed(), 300ms);
  EXPECT_LT(watch.elapsed(), at_once);
  EXPECT_TRUE(has_code(error, errc::worker_lost));
  EXPECT_TRUE(says(error, "\"launch\"") && says(error, "300 ms")) << describe(error);
  feed.until(device_phase::ready, before + 1);
  EXPECT_TRUE(works(d));
}

TEST(HungWorker, OneThatHasNothingToDoIsNotTakenForIt) {
  ledger book;
  auto options = book.options(1);
  options.workers.call_limit = 300ms;
  test_system system{in_workers_of(options)};
  auto d = system.open();
  std::this_thread::sleep_for(900ms); // the test is about this time
  EXPECT_TRUE(works(d));
  EXPECT_EQ(book.wait(1).size(), 1u);
}

TEST(HungWorker, ThatNeverAnswersTheFirstMessageEndsTheStart) {
  ledger book;
  book.hush();
  auto options = book.options(1);
  options.workers.start_limit = 2s;
  const stopwatch watch;
  const auto made = make_worker_backend(options);
  ASSERT_FALSE(made);
  EXPECT_LT(watch.elapsed(), at_once);
  EXPECT_TRUE(says(made.error(), "set_up")) << describe(made.error());
  EXPECT_TRUE(::kill(book.wait(1).front(), 0) != 0 && errno == ESRCH) << "it is left alone";
}

TEST(HungWorker, ThatTakesNoCommandsIsNoSpareAndNoDevice) {
  ledger book;
  auto options = book.options(1, "DeafWorker");
  options.workers.start_limit = 2s;
  options.workers.call_limit = 200ms;
  auto all = must(make_worker_backend(options));
  const stopwatch watch;
  const auto spare = all->provide_spare(0);
  EXPECT_TRUE(has_code(spare, errc::worker_lost) && says(spare, "warm")) << describe(spare);
  auto device = must(all->open(0));
  const auto bound = device->bind();
  EXPECT_TRUE(has_code(bound, errc::worker_lost) && says(bound, "bind")) << describe(bound);
  EXPECT_LT(watch.elapsed(), at_once);
}

TEST(HungWorker, InABuildEndsIt) {
  building_pair pair{500ms};
  stop_process(pair.ids.at(1));
  const stopwatch watch;
  const auto built = pair.build();
  ASSERT_FALSE(built);
  EXPECT_GE(watch.elapsed(), 500ms);
  EXPECT_LT(watch.elapsed(), at_once);
  EXPECT_TRUE(has_code(built, errc::worker_lost));
  EXPECT_TRUE(says(built.error(), "to build its rank")) << describe(built.error());
  pair.build_again();
}

/// One rank's worker fails, while the other rank's worker waits for it in the build.
TEST(HungWorker, ThatWaitsForARankThatHasFailedIsCalledOff) {
  building_pair pair{1s};
  const auto other = watch_of(pair.ids.at(0));
  const std::array<local_rank, 2> wrong{{{0, 0}, {2, 1}}}; // there is no such rank
  EXPECT_FALSE(pair.all->build({}, 2, wrong));
  pair.build_again();
  EXPECT_FALSE(is_ready(other, 2s)) << "it was well, and had nothing to wait for any more";
}

TEST(HungWorker, IsForgottenByCommunicatorsThatHaveEnded) {
  building_pair pair{patience};
  auto told = std::make_shared<int>(0);
  auto ranks = must(pair.build());
  for (auto& x : ranks)
    x->on_loss([told] { ++*told; });
  EXPECT_EQ(told.use_count(), 3);
  must(pair.all->destroy(std::move(ranks)));
  EXPECT_EQ(told.use_count(), 1) << "a worker keeps what it would tell of its loss";
}

TEST(HungWorker, ThatStartsKeepsNobodyFromTheEnd) {
  ledger book;
  auto options = book.options(2);
  stopwatch watch;
  {
    test_system system{in_workers_of(options)};
    auto d0 = system.open(0);
    auto d1 = system.open(1);
    book.wait(2);
    book.hush();
    world_config config;
    config.limits.standby = standby_policy::full;
    auto w = system.open_world(config);
    book.wait(3); // a spare
    EXPECT_TRUE(works(w));
    watch = {};
  }
  EXPECT_LT(watch.elapsed(), 2s);
}

// Meanwhile the device has lost its worker and waits for the spare.
TEST(HungWorker, ThatStartsAsASpareKeepsNoLostDeviceFromTheEnd) {
  ledger book;
  auto options = book.options(2);
  stopwatch watch;
  {
    test_system system{in_workers_of(options)};
    const int last = system.devices() - 1;
    auto first = system.open(0);
    auto d = system.open(last);
    const auto workers = book.wait(static_cast<std::size_t>(last) + 1);
    book.hush();
    world_config config;
    config.limits.standby = standby_policy::full;
    auto w = system.open_world(config);
    book.wait(workers.size() + 1); // a spare
    device_feed lives{system, system.device_actor(last)};
    for (auto pid : workers)
      send_signal(pid, SIGKILL);
    lives.until([](const device_changed& x) { return x.phase != device_phase::ready; });
    watch = {};
  }
  EXPECT_LT(watch.elapsed(), 2s);
}

TEST(HungWorker, ThatReadsNoMessagesIsGivenUp) {
  deaf_worker worker{300ms};
  const auto& link = worker.link;
  std::atomic<int> failed{0};
  std::atomic<int> sent{0};
  const stopwatch watch;
  std::vector<std::thread> senders;
  for (int i = 0; i < 3; ++i)
    senders.emplace_back([&] {
      while (!link->lost() && watch.elapsed() < patience) {
        ++sent;
        worker.send_message(
            [&](const auto& x) { failed += has_code(x, errc::worker_lost) ? 1 : 0; });
      }
    });
  for (auto& x : senders)
    x.join();
  EXPECT_TRUE(link->lost());
  EXPECT_LT(watch.elapsed(), at_once);
  EXPECT_TRUE(eventually([&] { return failed == sent; })) << failed << " of " << sent;
  EXPECT_TRUE(is_ready(worker.gone, 10s)) << "it was not killed";
  EXPECT_TRUE(has_code(link->loss(), errc::worker_lost));
}

/// Blocks until the senders are blocked because the socket is full.
void wait_until_full(const std::atomic<int>& sent) {
  for (int last = -1; last != sent || last == 0; std::this_thread::sleep_for(50ms))
    last = sent;
}

/// A thread that ends the worker does not wait for threads that send to it.
TEST(HungWorker, ThatReadsNoMessagesEndsWhenItIsKilled) {
  deaf_worker worker{20s};
  const auto& link = worker.link;
  std::atomic<int> sent{0};
  std::thread sender{[&] {
    while (!link->lost()) {
      ++sent;
      worker.send_message([](const auto&) {});
    }
  }};
  wait_until_full(sent);
  const stopwatch watch;
  link->give_up(make_error(errc::worker_lost, "the test wants it"));
  sender.join();
  worker.pool->release(0);
  EXPECT_LT(watch.elapsed(), 5s);
  EXPECT_TRUE(says(link->loss(), "the test wants it"));
}

/// A sender may see the end of the socket before the end of the process has been noticed.
TEST(HungWorker, ThatDiesGivesOneReasonToAllWhoSend) {
  for (int round = 0; round < 10; ++round) {
    deaf_worker worker{20s};
    const auto& link = worker.link;
    std::atomic<int> told{0};
    std::atomic<int> sent{0};
    std::vector<std::thread> senders;
    for (int i = 0; i < 3; ++i)
      senders.emplace_back([&] {
        while (!link->lost()) {
          ++sent;
          worker.send_message(
              [&](const auto& x) { told += !x && x.error() == link->loss() ? 1 : 0; });
        }
      });
    wait_until_full(sent);
    send_signal(worker.book.wait(1).front(), SIGKILL);
    for (auto& x : senders)
      x.join();
    EXPECT_TRUE(eventually([&] { return told == sent; })) << told << " of " << sent;
    EXPECT_TRUE(has_code(link->loss(), errc::worker_lost));
  }
}

TEST(PinnedMemory, OutlivesItsWorker) {
  ledger book;
  host_buffer buffer;
  detail::file_descriptor gone;
  {
    test_system system{in_workers_of(book.options(1))};
    auto d = system.open();
    buffer = must(d.allocate_pinned(1 << 20));
    std::fill(buffer.writable().begin(), buffer.writable().end(), std::byte{7});
    auto ref = must(d.allocate<std::uint8_t>(1 << 20));
    ASSERT_TRUE(answer_of(d.upload(ref.any(), buffer))); // the worker maps the buffer
    gone = watch_of(book.wait(1).front());
  }
  EXPECT_TRUE(is_ready(gone, 5s)) << "the buffer keeps its worker";
  for (auto x : buffer.bytes())
    ASSERT_EQ(x, std::byte{7});
}

} // namespace

} // namespace troupe::testing
