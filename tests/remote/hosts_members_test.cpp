// Members of a fleet that do not do their part: every wait for them has a limit.

#include "remote/hosts_support.hpp"
#include "remote/rogue.hpp"
#include "support/load.hpp"
#include "support/log_lines.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

namespace troupe::testing {

namespace {

using detail::host_frame;
using clock = std::chrono::steady_clock;

constexpr auto start_limit = 300ms;
constexpr auto call_limit = 200ms;
constexpr auto link_limit = 500ms;
/// What the parent adds to the limits of a host.
constexpr auto more = 2 * link_limit;

std::vector<std::byte> ready_with(std::int32_t devices) {
  return frame_of(host_frame::ready, 0, detail::bytes_of(devices));
}

std::vector<std::byte> started(std::uint64_t channel) {
  detail::wire_writer fine;
  fine.put(caf::error{});
  return frame_of(host_frame::started, channel, fine.bytes());
}

/// A parent with devices of its own and those of the hosts named.
worker_backend_options parent_of(test_authority& authority, std::vector<std::string> names) {
  worker_backend_options how;
  how.backend = "host";
  how.host.devices = 2;
  how.workers.start_limit = start_limit;
  how.workers.call_limit = call_limit;
  how.hosts.listen_address = "127.0.0.1";
  how.hosts.identity = authority.issue("parent");
  how.hosts.names = std::move(names);
  how.hosts.link_limit = link_limit;
  how.hosts.rejoin_limit = 2s;
  return how;
}

/// An agent that joins with one device whenever it can, shows signs of life, and does with other
/// frames what `take` does. That returns false to end the connection.
class rogue_agent {
public:
  using answer = std::function<bool(rogue&, const detail::frame_head&)>;

  rogue_agent(test_authority& authority, std::string name, answer take)
      : who_(authority.issue(name)), name_(std::move(name)), take_(std::move(take)) {}
  ~rogue_agent() {
    stop_ = true;
    if (thread_.joinable())
      thread_.join();
  }
  rogue_agent(const rogue_agent&) = delete;
  rogue_agent& operator=(const rogue_agent&) = delete;

  void begin(std::uint16_t port) {
    thread_ = std::thread{[this, port] {
      while (!stop_)
        live(port);
    }};
  }
  int lives() const { return lives_; }

private:
  void live(std::uint16_t port) {
    auto address = must(detail::address_from_string("127.0.0.1"));
    address.port = port;
    auto socket = detail::connect_to(address, clock::now() + patience);
    if (!socket) // the parent has ended
      return;
    rogue x{who_, detail::tls_context::side::agent, std::move(*socket)};
    if (!x.say(hello_of(name_)) || !x.hear() || !x.say(ready_with(1)))
      return;
    ++lives_;
    x.serve(stop_, [&](const detail::frame_head& head, auto) { return take_(x, head); });
  }

  const host_identity who_;
  const std::string name_;
  const answer take_;
  std::atomic<bool> stop_{false};
  std::atomic<int> lives_{0};
  std::thread thread_;
};

TEST(HostMember, ThatNeverAnswersAStartIsGivenUp) {
  test_authority authority{"fleet"};
  rogue_agent silent{authority, "rogue", [](auto&, auto&) { return true; }};
  auto how = parent_of(authority, {"rogue"});
  how.hosts.on_listening = [&](std::uint16_t port) { silent.begin(port); };
  log_lines lines;
  auto all = must(make_worker_backend(how));
  auto victim = must(all->open(2));
  const std::string why = "rogue has not answered a request to start a worker within 1300 ms";
  for (const int lives : {1, 1, 2}) { // the second time in a row ends the connection
    EXPECT_TRUE(eventually([&] { return silent.lives() == lives; }));
    const stopwatch watch;
    const auto error = victim->bind();
    EXPECT_GE(watch.elapsed(), start_limit + more);
    EXPECT_LT(watch.elapsed(), start_limit + more + at_once);
    EXPECT_NE(describe(error).find(why), std::string::npos) << describe(error);
  }
  EXPECT_TRUE(lines.say(why));
}

TEST(HostMember, ThatAnswersNoCommandIsGivenUp) {
  test_authority authority{"fleet"};
  rogue_agent silent{authority, "rogue", [](rogue& x, const detail::frame_head& head) {
                       return head.kind != detail::number(host_frame::start) ||
                              x.say(started(head.channel));
                     }};
  auto how = parent_of(authority, {"rogue"});
  how.hosts.on_listening = [&](std::uint16_t port) { silent.begin(port); };
  auto all = must(make_worker_backend(how));
  auto victim = must(all->open(2));
  const stopwatch watch;
  const auto error = victim->bind();
  EXPECT_NE(describe(error).find("the host rogue starts no worker: worker_lost"), std::string::npos)
      << describe(error);
  EXPECT_LT(watch.elapsed(), 2 * (call_limit + more) + at_once);
}

/// It joins, starts a worker, and then breaks the protocol, each time.
TEST(HostMember, ThatFailsAgainAndAgainEndsOnlyItsDevices) {
  constexpr std::size_t enough = 5;
  std::mutex mutex;
  std::vector<clock::time_point> starts;
  test_fleet fleet;
  std::optional<rogue_agent> broken{
      std::in_place, fleet.authority(), "rogue", [&](rogue& x, const detail::frame_head& head) {
        if (head.kind != detail::number(host_frame::start))
          return true;
        {
          std::lock_guard lock{mutex};
          starts.push_back(clock::now());
        }
        return x.say(started(head.channel)) && x.say(frame_of(host_frame::told, head.channel, {}));
      }};
  auto how = parent_of(fleet.authority(), {"beta", "rogue"});
  how.workers = {};
  how.hosts.on_listening = [&](std::uint16_t port) {
    fleet.use_port(port);
    fleet.start_agent("beta");
    broken->begin(port);
  };
  log_lines lines;
  test_system system{{.devices = 5, .wrap = [&](std::shared_ptr<backend>) {
                        return must(make_worker_backend(how));
                      }}};
  steady_adder sums{system.open_world({.devices = {0, 1, 2, 3}})};
  device_feed feed{system, system.device_actor(4)};
  EXPECT_TRUE(eventually([&] {
    std::lock_guard lock{mutex};
    return starts.size() >= enough;
  }));
  EXPECT_TRUE(lines.say("the host has failed 4 times in a row, and is used again after 1600 ms"));
  broken.reset();
  ASSERT_GE(starts.size(), enough);
  EXPECT_GE(starts[2] - starts[1], 100ms);
  EXPECT_GE(starts[3] - starts[2], 400ms);
  EXPECT_GE(starts[4] - starts[3], 1600ms);

  fleet.start_agent("rogue"); // an honest one
  feed.until(device_phase::ready);
  EXPECT_TRUE(works(must(device::open(system, 4))));
  sums.end();
}

TEST(HostMember, ThatIsNotThereIsWaitedForUntilTheWaitIsEnded) {
  test_authority authority{"fleet"};
  auto how = parent_of(authority, {"alpha"});
  how.hosts.join_limit = patience;
  std::stop_source stop;
  how.hosts.stop = stop.get_token();
  std::thread ends;
  how.hosts.on_listening = [&](std::uint16_t) { ends = std::thread{[&] { stop.request_stop(); }}; };
  const stopwatch watch;
  const auto made = make_worker_backend(how);
  ends.join();
  ASSERT_TRUE(has_code(made, errc::cancelled));
  EXPECT_EQ(describe(made.error()),
            "cancelled: the wait for hosts was ended by remote_hosts::stop");
  EXPECT_LT(watch.elapsed(), at_once);
}

std::stop_source stopped_by_signal;

/// A program whose handler of SIGINT ends its wait for hosts.
TROUPE_CHILD(waits_for_hosts) {
  std::signal(SIGINT, [](int) { stopped_by_signal.request_stop(); });
  test_authority authority{"fleet"};
  auto how = parent_of(authority, {"alpha"});
  how.hosts.join_limit = patience;
  how.hosts.stop = stopped_by_signal.get_token();
  how.hosts.on_listening = [](std::uint16_t) { tell("listens", std::to_string(::getpid())); };
  const auto made = make_worker_backend(how);
  tell("ended", made ? "with all hosts" : describe(made.error()));
  return 0;
}

TEST(HostMember, ThatIsNotThereIsWaitedForUntilASignal) {
  running_child program{"waits_for_hosts"};
  ASSERT_TRUE(program.wait_told("listens", patience));
  ASSERT_EQ(::kill(std::stoi(program.told("listens")), SIGINT), 0);
  const auto end = program.wait(patience);
  EXPECT_EQ(end.status, 0) << to_string(end);
  EXPECT_EQ(end.value("ended"), "cancelled: the wait for hosts was ended by remote_hosts::stop");
}

/// Opens many connections that say who they are, and never which devices they have.
class HalfJoined : public ::testing::Test {
protected:
  static constexpr int many = 300;

  void say_hello(const host_identity& who, const std::string& name) {
    auto& x = half_.emplace_back(who, detail::tls_context::side::agent, connect(port_));
    ASSERT_TRUE(x.say(hello_of(name)));
    const auto answer = x.hear();
    refused_ += !answer || answer->first.kind == detail::number(host_frame::refused);
  }

  test_authority authority_{"fleet"};
  std::uint16_t port_ = 0;
  std::list<rogue> half_;
  int refused_ = 0;
};

TEST_F(HalfJoined, OneOfEachNameIsKept) {
  auto how = parent_of(authority_, {"gamma"});
  how.hosts.join_limit = patience;
  const auto who = authority_.issue("gamma");
  how.hosts.on_listening = [&](std::uint16_t port) {
    port_ = port;
    const auto before = threads_of_this_process();
    for (int i = 0; i < many; ++i)
      say_hello(who, "gamma");
    EXPECT_EQ(refused_, 0);
    const auto last = std::prev(half_.end());
    for (auto i = half_.begin(); i != last; ++i)
      EXPECT_TRUE(i->is_let_go());
    EXPECT_TRUE(eventually([&] { return threads_of_this_process() <= before + 2; }));
    EXPECT_TRUE(last->say(ready_with(1)));
  };
  EXPECT_TRUE(make_worker_backend(how));
}

TEST_F(HalfJoined, AFewAreKeptInAll) {
  auto how = parent_of(authority_, {});
  how.hosts.count = 1;
  how.hosts.join_limit = patience;
  constexpr int kept = 1 + 8;
  how.hosts.on_listening = [&](std::uint16_t port) {
    port_ = port;
    for (int i = 0; i < 2 * kept; ++i) {
      const auto name = "gamma" + std::to_string(i);
      say_hello(authority_.issue(name), name);
    }
    EXPECT_EQ(refused_, kept);
    const stopwatch watch;
    for (auto& x : half_)
      EXPECT_TRUE(x.is_let_go());
    EXPECT_LT(watch.elapsed(), start_limit + more + at_once);
    half_.clear();
    say_hello(authority_.issue("delta"), "delta");
    EXPECT_TRUE(half_.back().say(ready_with(1)));
  };
  log_lines lines;
  EXPECT_TRUE(make_worker_backend(how));
  EXPECT_TRUE(lines.say("too many hosts are joining"));
  EXPECT_TRUE(lines.say("did not join within 1300 ms"));
}

} // namespace

} // namespace troupe::testing
