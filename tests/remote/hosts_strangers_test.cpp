// Floods of strangers at a parent's port keep no member out, and hold up no work.

#include "remote/delayed_wire.hpp"
#include "remote/hosts_support.hpp"
#include "remote/rogue.hpp"
#include "support/blocked_sink.hpp"
#include "support/control_timer.hpp"
#include "support/load.hpp"
#include "support/log_lines.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

namespace troupe::testing {

namespace {

using clock = std::chrono::steady_clock;

constexpr auto round_trip = 50ms;
constexpr int rate = 5000;              ///< connections per second
constexpr auto least_rate = 0.8 * rate; ///< slower than that, the machine is not up to the test
constexpr auto time_to_get_in = 2s;
constexpr auto longest_pause = 100ms;

/// Raises the limit of descriptors, and returns it.
std::size_t allow_many_files() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0)
    throw std::runtime_error("getrlimit");
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 16'384);
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0)
    throw std::runtime_error("setrlimit");
  return limit.rlim_cur;
}

sockaddr_in loopback(std::uint32_t last, std::uint16_t port) {
  sockaddr_in result{};
  result.sin_family = AF_INET;
  result.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + last);
  result.sin_port = htons(port);
  return result;
}

/// Connects from 127.0.0.`last` without waiting.
detail::file_descriptor begin_to_connect(std::uint32_t last, std::uint16_t port) {
  detail::file_descriptor result{::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
  const int on = 1;
  const auto from = loopback(last, 0);
  const auto to = loopback(1, port);
  if (!result || ::setsockopt(result.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on) ||
      ::bind(result.get(), reinterpret_cast<const sockaddr*>(&from), sizeof from) != 0 ||
      (::connect(result.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0 &&
       errno != EINPROGRESS))
    return {};
  return result;
}

/// The first message of TLS, as far as it can be told by its size.
std::string hello_of_tls() {
  return std::string("\x16\x03\x01\x01\x00", 5) + std::string(256, '\x01');
}

/// Connects from the parent's address or from eight others, holds the connections open, and sends
/// so many bytes of the first message of TLS on each. Tells how many connections it has made in a
/// second.
TROUPE_CHILD(flood_of_strangers) {
  const auto port = static_cast<std::uint16_t>(std::stoi(std::getenv("TROUPE_FLOOD_PORT")));
  const auto says = hello_of_tls().substr(0, std::stoul(std::getenv("TROUPE_FLOOD_BYTES")));
  const auto most = allow_many_files() - 100;
  const bool is_near = std::getenv("TROUPE_FLOOD_NEAR") != nullptr;
  std::deque<detail::file_descriptor> open;
  const auto begun = clock::now();
  for (std::uint64_t made = 0;;) {
    if (auto socket = begin_to_connect(is_near ? 1 : 2 + made % 8, port)) {
      if (!says.empty()) // on this machine it is connected at once
        static_cast<void>(
            ::send(socket.get(), says.data(), says.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
      open.push_back(std::move(socket));
    }
    if (open.size() > most)
      open.pop_front();
    if (++made % rate == 0) {
      const std::chrono::duration<double> passed = clock::now() - begun;
      tell("rate", std::to_string(static_cast<double>(made) / passed.count()));
    }
    const auto due = begun + std::chrono::nanoseconds{1s} / rate * made;
    if (clock::now() < due)
      std::this_thread::sleep_until(due);
  }
}

struct flood {
  const char* name;
  int bytes;    ///< that each stranger sends
  bool is_near; ///< the strangers have the address of the members
};

class FloodedGate : public ::testing::TestWithParam<flood> {};
INSTANTIATE_TEST_SUITE_P(All, FloodedGate,
                         ::testing::Values(flood{"OfSilence", 0, false},
                                           flood{"OfSilenceFromTheirAddress", 0, true},
                                           flood{"OfSingleBytes", 1, false},
                                           flood{"OfHalfMessages", 100, false},
                                           flood{"OfMessages", 261, false}),
                         [](const auto& x) { return std::string{x.param.name}; });

TEST_P(FloodedGate, LetsMembersIn) {
  std::optional<delayed_wire> far;
  test_fleet fleet{{.way = [&](std::uint16_t port) {
    far.emplace(port, round_trip);
    return far->port();
  }}};
  const log_window brief{1s};
  log_lines lines;
  const stopwatch logged_for;
  test_system system{fleet.system()};
  steady_adder sums{system.open_world({.devices = {0, 1}})};
  control_timer control;
  std::vector<std::string> environment{"TROUPE_FLOOD_PORT=" + std::to_string(fleet.listens_at()),
                                       "TROUPE_FLOOD_BYTES=" + std::to_string(GetParam().bytes)};
  if (GetParam().is_near)
    environment.push_back("TROUPE_FLOOD_NEAR=1");
  running_child flood{"flood_of_strangers", environment};
  ASSERT_TRUE(flood.wait_told("rate", patience));

  // A member whose name is not expected gets the answer to its hello.
  const auto who = fleet.authority().issue("gamma");
  clock::duration longest{};
  for (int i = 0; i < 20; ++i) {
    const stopwatch watch;
    for (bool heard = false; !heard && watch.elapsed() < patience;) { // as an agent tries again
      rogue x{who, detail::tls_context::side::agent, connect(far->port())};
      heard = x.say(hello_of("gamma")) && x.hear();
    }
    longest = std::max<clock::duration>(longest, watch.elapsed());
  }
  // An agent that was killed is back.
  fleet.agent("alpha").kill();
  ASSERT_TRUE(lines.say("the host alpha is lost"));
  const auto before = lines.count_of("the host alpha has joined");
  fleet.start_agent("alpha");
  ASSERT_TRUE(fleet.agent("alpha").wait_told("process", patience));
  const stopwatch watch;
  EXPECT_TRUE(eventually([&] { return lines.count_of("the host alpha has joined") > before; }));
  const auto back = watch.elapsed();

  const auto pause = sums.end();
  const auto late = control.worst();
  flood.kill();
  const auto rates = flood.wait(patience).values("rate");
  const auto made = std::stod(rates.back());
  for (auto& [name, value] : {std::pair{"longest hello", longest},
                              {"agent back after", back},
                              {"longest pause of the sums", pause},
                              {"timer late", late}})
    RecordProperty(name, std::to_string(value / 1us) + " us");
  // Lines about strangers are limited, and their number is logged.
  EXPECT_TRUE(lines.say(" lines about strangers were left out: "));
  const auto refused = lines.count_of("too many connections have not joined yet");
  EXPECT_LE(refused, detail::log_limit::most_lines *
                         static_cast<std::size_t>(logged_for.elapsed() / 1s + 2));
  if (made < least_rate)
    GTEST_SKIP() << "this machine makes only " << made << " connections per second";
  EXPECT_LT(longest, time_to_get_in + 4 * late);
  EXPECT_LT(back, time_to_get_in + 4 * late);
  EXPECT_LT(pause, longest_pause + 4 * late);
}

/// Makes connections that are refused, each of which is a line of the log.
void connect_strangers(std::uint16_t port, int number) {
  for (int i = 0; i < number; ++i) {
    const auto socket = connect(port);
    static_cast<void>(::send(socket.get(), "no TLS", 6, MSG_NOSIGNAL));
    EXPECT_TRUE(wait_for(socket.get(), POLLIN));
  }
}

TEST(HostGateLog, SaysWhatIsWrongWithACertificateAmongStrangers) {
  const log_window endless{1h};
  log_lines lines;
  test_fleet fleet;
  test_system system{fleet.system()};
  const auto w = system.open_world();
  connect_strangers(fleet.port(), 50);
  EXPECT_EQ(lines.count_of("a connection was refused"), detail::log_limit::most_lines);
  test_authority others{"others"};
  auto who = others.issue("alpha");
  who.authority = fleet.authority().file();
  rogue wrong{who, detail::tls_context::side::agent, connect(fleet.port())};
  static_cast<void>(wrong.say(hello_of("alpha"))); // the connection may be closed already
  EXPECT_FALSE(wrong.hear());
  EXPECT_TRUE(lines.say("unable to get local issuer certificate"));
  rogue unexpected{fleet.authority().issue("gamma"), detail::tls_context::side::agent,
                   connect(fleet.port())};
  ASSERT_TRUE(unexpected.say(hello_of("gamma")));
  EXPECT_TRUE(unexpected.hear());
  EXPECT_TRUE(lines.say("no host named gamma is expected"));
}

TEST(HostGateLog, ThatBlocksStopsNoHost) {
  const log_window endless{1h};
  blocked_sink sink;
  test_fleet fleet;
  test_system system{fleet.system()};
  auto w = system.open_world();
  connect_strangers(fleet.port(), 50);
  rogue x{fleet.authority().issue("gamma"), detail::tls_context::side::agent,
          connect(fleet.port())};
  ASSERT_TRUE(x.say(hello_of("gamma")));
  EXPECT_TRUE(x.hear());
  EXPECT_TRUE(works(w));
  const auto all = sink.end();
  const auto has = [&](const std::string& what) {
    return std::ranges::any_of(all,
                               [&](auto& line) { return line.find(what) != std::string::npos; });
  };
  EXPECT_TRUE(has("the host alpha has joined"));
  EXPECT_TRUE(has(" lines about strangers were left out: at most 20 are logged in "));
}

} // namespace

} // namespace troupe::testing
