// Strangers, and members that send invalid data, cannot harm a parent or its agents.

#include "net/frame_link.hpp"
#include "net/socket.hpp"
#include "remote/hosts_support.hpp"
#include "remote/messages.hpp"
#include "remote/rogue.hpp"
#include "support/hostile_text.hpp"
#include "support/load.hpp"
#include "support/log_lines.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

namespace troupe::testing {

namespace {

using detail::file_descriptor;
using detail::host_frame;
using detail::tls_context;
using clock = std::chrono::steady_clock;

/// A parent with its hosts, and a port for other connections.
class HostGate : public ::testing::Test {
protected:
  HostGate() : system_(fleet_.system()), world_(system_.open_world()) {}

  /// The world still works.
  void TearDown() override { EXPECT_TRUE(works(world_)); }

  test_fleet fleet_;
  log_lines lines_;
  test_system system_;
  world world_;
};

TEST_F(HostGate, SaysWhyAVersionIsWrong) {
  auto hello = must(detail::make_host_hello("gamma"));
  std::strcpy(hello.version.data(), "9.8.7");
  rogue x{fleet_.authority().issue("gamma"), tls_context::side::agent, connect(fleet_.port())};
  ASSERT_TRUE(x.say(frame_of(host_frame::hello, 0, detail::bytes_of(hello))));
  const auto answer = x.hear();
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->first.kind, static_cast<std::uint32_t>(host_frame::refused));
  const auto sentence = detail::wire_reader{answer->second}.get<std::string>();
  EXPECT_EQ(sentence, "it has version 9.8.7 (protocol 3) of troupe, this is 0.1.0 (protocol 3)");
  EXPECT_TRUE(lines_.say(sentence));
  EXPECT_TRUE(lines_.say("CN = gamma"));
}

TEST_F(HostGate, CutsALongSubject) {
  constexpr std::size_t longest_line = 512;
  rogue x{fleet_.authority().issue_with_units("gamma", 100), tls_context::side::agent,
          connect(fleet_.port())};
  ASSERT_TRUE(x.say(hello_of("gamma")));
  EXPECT_TRUE(x.hear());
  EXPECT_TRUE(lines_.say("CN = gamma"));
  for (auto& line : lines_.all())
    EXPECT_TRUE(is_one_line(line, longest_line)) << line;
}

TEST_F(HostGate, LetsInOnlyWhoIsWaitedFor) {
  for (auto& [name, why] : {std::pair{"gamma", "no host named gamma is expected"},
                            std::pair{"alpha", "a host named alpha has already joined"}}) {
    rogue x{fleet_.authority().issue(name), tls_context::side::agent, connect(fleet_.port())};
    ASSERT_TRUE(x.say(hello_of(name)));
    const auto answer = x.hear();
    ASSERT_TRUE(answer);
    EXPECT_EQ(detail::wire_reader{answer->second}.get<std::string>(), why);
    EXPECT_TRUE(x.is_let_go());
    EXPECT_TRUE(lines_.say(why));
  }
}

TEST_F(HostGate, LetsNoMemberUseAnothersName) {
  rogue x{fleet_.authority().issue("beta"), tls_context::side::agent, connect(fleet_.port())};
  ASSERT_TRUE(x.say(hello_of("gamma")));
  const auto answer = x.hear();
  ASSERT_TRUE(answer);
  const std::string why = "its certificate is for beta, not for gamma";
  EXPECT_EQ(detail::wire_reader{answer->second}.get<std::string>(), why);
  EXPECT_TRUE(x.is_let_go());
  EXPECT_TRUE(lines_.say(why));
}

TEST_F(HostGate, KnowsAWrongCertificate) {
  test_authority others{"others"};
  auto who = others.issue("alpha");
  who.authority = fleet_.authority().file();
  rogue x{who, tls_context::side::agent, connect(fleet_.port())};
  static_cast<void>(x.say(hello_of("alpha"))); // the connection may be closed already
  EXPECT_FALSE(x.hear());
  EXPECT_NE(describe(x.error()).find("alert"), std::string::npos) << describe(x.error());
  EXPECT_TRUE(lines_.say("unable to get local issuer certificate"));
}

TEST_F(HostGate, WantsACertificate) {
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context{SSL_CTX_new(TLS_client_method()),
                                                                  SSL_CTX_free};
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    SSL_CTX_set_max_proto_version(context.get(), version);
    const std::unique_ptr<SSL, decltype(&SSL_free)> ssl{SSL_new(context.get()), SSL_free};
    auto socket = connect(fleet_.port());
    ASSERT_EQ(SSL_set_fd(ssl.get(), socket.get()), 1);
    std::byte byte{};
    EXPECT_TRUE(SSL_connect(ssl.get()) != 1 || SSL_read(ssl.get(), &byte, 1) <= 0);
  }
  EXPECT_TRUE(lines_.say("peer did not return a certificate"));
  EXPECT_TRUE(lines_.say("unsupported protocol"));
}

TEST_F(HostGate, StrangersThatSayNothingKeepNobodyOut) {
  constexpr int many = 100; // more than the parent keeps at a time
  std::vector<file_descriptor> silent;
  for (int i = 0; i < many; ++i)
    silent.push_back(connect(fleet_.port()));
  rogue x{fleet_.authority().issue("gamma"), tls_context::side::agent, connect(fleet_.port())};
  ASSERT_TRUE(x.say(hello_of("gamma")));
  const auto answer = x.hear();
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->first.kind, static_cast<std::uint32_t>(host_frame::refused));
  EXPECT_TRUE(wait_for(silent.front().get(), POLLIN)); // it was closed to make room
  EXPECT_TRUE(lines_.say("too many connections have not joined yet"));
}

/// No more of its first message can come.
TEST_F(HostGate, HalfAMessageAndItsEndAreClosedAtOnce) {
  constexpr std::array<std::byte, 7> half{std::byte{0x16}, std::byte{3}, std::byte{1},
                                          std::byte{1}};
  const auto socket = connect(fleet_.port());
  const std::array<std::span<const std::byte>, 1> all{half};
  ASSERT_EQ(detail::send_all(socket.get(), all), 0);
  detail::shut_down_sending(socket.get());
  EXPECT_TRUE(wait_for(socket.get(), POLLIN, 2s)); // not after the limit of 5 s
}

TEST_F(HostGate, RandomBytesOfStrangersCostLittle) {
  constexpr int cases = 300;
  std::mt19937_64 random{1};
  static_cast<void>(works(world_));
  const auto before = resident_memory();
  std::vector<file_descriptor> open;
  for (int i = 0; i < cases; ++i) {
    auto bytes = random_bytes(random() % 3 == 0 ? random() % 200'000 : random() % 600, random());
    if (i % 2 == 0 && bytes.size() > 5) { // like TLS: a record of up to 64 KiB
      bytes[0] = std::byte{0x16};
      bytes[1] = std::byte{0x03};
      bytes[2] = std::byte{0x01};
      if (i % 4 == 0 && bytes.size() > 9) { // containing a first message of up to 16 MiB
        bytes[5] = std::byte{0x01};
        bytes[6] = std::byte{0xff};
      }
    }
    auto socket = connect(fleet_.port());
    // The parent need not accept the data.
    static_cast<void>(
        ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
    if (i % 10 == 0) {
      open.push_back(std::move(socket)); // sends nothing more
      if (open.size() > 5)
        open.erase(open.begin());
    } else if (i % 3 != 0) {
      static_cast<void>(wait_for(socket.get(), POLLIN, 20ms));
    }
  }
  open.clear();
  // A member can still connect after them.
  rogue x{fleet_.authority().issue("gamma"), tls_context::side::agent, connect(fleet_.port())};
  ASSERT_TRUE(x.say(hello_of("gamma")));
  EXPECT_TRUE(x.hear());
  EXPECT_LT(resident_memory(), before + memory_slack);
}

TEST_F(HostGate, WrongFramesOfMembersCostLittle) {
  constexpr int cases = 150;
  std::mt19937_64 random{2};
  const auto who = fleet_.authority().issue("gamma");
  static_cast<void>(works(world_));
  const auto before = resident_memory();
  for (int i = 0; i < cases; ++i) {
    rogue x{who, tls_context::side::agent, connect(fleet_.port())};
    std::vector<std::byte> bytes;
    switch (i % 4) {
    case 0: // no hello
      bytes = frame_of(1 + static_cast<std::uint32_t>(random() % 20), random(),
                       random_bytes(random() % 5000, random()));
      break;
    case 1: // larger than any frame
      bytes = frame_of(host_frame::hello, 0, {});
      bytes[3] = static_cast<std::byte>(1 + random() % 255);
      break;
    case 2: // truncated
      bytes = hello_of("gamma");
      bytes.resize(random() % bytes.size());
      break;
    default: // random bytes
      bytes = random_bytes(random() % 100'000, random());
    }
    static_cast<void>(x.say(bytes)); // the connection may be closed before all is accepted
    if (i % 4 == 1) {
      EXPECT_FALSE(x.hear());
    }
  }
  EXPECT_TRUE(lines_.say("bytes: the limit is"));
  EXPECT_LT(resident_memory(), before + memory_slack);
}

/// The agent joins correctly and then sends invalid data about its workers.
TEST(HostFuzz, AnAgentThatIsOutOfOrderHarmsNobody) {
  constexpr int cases = 150;
  test_authority authority{"fleet"};
  std::atomic<bool> stop = false;
  std::atomic<std::uint16_t> port = 0;
  std::atomic<int> lives = 0;
  const auto who = authority.issue("rogue");
  std::thread agent{[&] {
    std::mt19937_64 random{3};
    for (int i = 0; !stop; ++i) {
      while (port == 0 && !stop)
        std::this_thread::yield();
      auto address = must(detail::address_from_string("127.0.0.1"));
      address.port = port;
      auto socket = detail::connect_to(address, clock::now() + patience);
      if (!socket) // the parent has ended
        continue;
      rogue x{who, tls_context::side::agent, std::move(*socket)};
      if (!x.say(hello_of("rogue")) || !x.hear())
        continue;
      const std::int32_t devices = 1;
      if (!x.say(frame_of(host_frame::ready, 0, detail::bytes_of(devices))))
        continue;
      auto order = x.hear(); // the order to start a worker
      if (!order)
        continue;
      detail::wire_writer fine;
      fine.put(caf::error{});
      const auto channel = order->first.channel;
      if (!x.say(frame_of(host_frame::started, channel, fine.bytes())))
        continue;
      ++lives;
      for (int j = 0; j < 50 && !stop; ++j) {
        const auto kind = static_cast<std::uint32_t>(random() % 18);
        auto body = random_bytes(random() % 4 == 0 ? random() % 100'000 : random() % 64, random());
        if (body.size() >= 24 && random() % 2 == 0) { // plausible numbers
          const std::array<std::uint64_t, 3> words{random() % 4, random() % 70'000, random() % 4};
          std::memcpy(body.data(), words.data(), sizeof words);
        }
        if (!x.say(frame_of(kind, random() % 4 == 0 ? random() : channel, body)))
          break;
      }
    }
  }};
  worker_backend_options how;
  how.backend = "host";
  how.host.devices = 2;
  how.hosts.listen_address = "127.0.0.1";
  how.hosts.identity = authority.issue("parent");
  how.hosts.names = {"rogue"};
  how.hosts.rejoin_limit = 20ms; // also the longest pause after a failure
  how.hosts.on_listening = [&](std::uint16_t x) { port = x; };
  log_lines lines;
  auto all = must(make_worker_backend(how));
  auto victim = must(all->open(2));
  const auto before = resident_memory();
  int came_up = 0;
  while (lives < cases) {
    const auto error = victim->bind();
    came_up += error ? 0 : 1;
    ASSERT_NE(code_of(error), std::nullopt) << describe(error);
  }
  EXPECT_EQ(came_up, 0);
  EXPECT_LT(resident_memory(), before + memory_slack);
  EXPECT_TRUE(lines.say("the host rogue is lost"));
  victim.reset();
  {
    test_system system{{.devices = 2, .wrap = [&](std::shared_ptr<backend>) { return all; }}};
    auto w = system.open_world({.devices = {0, 1}});
    EXPECT_TRUE(works(w));
    stop = true;
  }
  all.reset();
  agent.join();
}

std::vector<std::byte> hostile_refusal() {
  return frame_of(host_frame::refused, 0, detail::packed(std::string_view{hostile_text()}).bytes());
}

TEST(HostFuzz, TheRefusalOfAMemberIsOneLineOfTheLog) {
  test_authority authority{"fleet"};
  log_lines lines;
  worker_backend_options how;
  how.backend = "host";
  how.hosts.listen_address = "127.0.0.1";
  how.hosts.identity = authority.issue("parent");
  how.hosts.names = {"rogue"};
  how.hosts.join_limit = 500ms;
  how.hosts.on_listening = [&](std::uint16_t port) {
    rogue x{authority.issue("rogue"), tls_context::side::agent, connect(port)};
    EXPECT_TRUE(x.say(hello_of("rogue")));
    EXPECT_TRUE(x.hear()); // the welcome
    EXPECT_TRUE(x.say(hostile_refusal()));
    EXPECT_TRUE(x.is_let_go());
  };
  EXPECT_FALSE(make_worker_backend(how));
  EXPECT_TRUE(lines.say(std::string{"rogue cannot join: "} + hostile_begin));
  for (auto& line : lines.all())
    EXPECT_TRUE(is_one_line(line)) << line.substr(0, 3000);
}

TEST(HostFuzz, TheRefusalOfAParentIsOneLineOfTheLog) {
  test_fleet fleet;
  auto address = must(detail::address_from_string("127.0.0.1"));
  const auto listener = must(detail::listen_at(address));
  fleet.use_port(address.port);
  fleet.start_agent("alpha");
  const auto who = fleet.authority().issue("parent");
  for (int i = 0; i < 2;
       ++i) { // before the second attempt, the agent logs why the first one failed
    ASSERT_TRUE(wait_for(listener.get(), POLLIN, patience));
    auto socket = detail::accept_from(listener);
    ASSERT_TRUE(socket);
    rogue x{who, tls_context::side::parent, std::move(socket)};
    ASSERT_TRUE(x.hear()) << describe(x.error());
    EXPECT_TRUE(x.say(hostile_refusal()));
    EXPECT_TRUE(x.is_let_go());
  }
  fleet.agent("alpha").kill();
  const auto end = fleet.agent("alpha").wait(patience);
  EXPECT_NE(end.out.find(std::string{" refuses this host: "} + hostile_begin), std::string::npos)
      << end.out.substr(0, 3000);
  std::istringstream out{end.out};
  for (std::string line; std::getline(out, line);)
    EXPECT_TRUE(is_one_line(line)) << line.substr(0, 3000);
}

std::size_t memory_of(const std::string& process) {
  std::ifstream statm{"/proc/" + process + "/statm"};
  std::size_t total = 0;
  std::size_t resident = 0;
  statm >> total >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

/// An agent whose parent sends invalid data keeps trying until the parent is valid.
TEST(HostFuzz, AParentThatIsOutOfOrderHarmsNoAgent) {
  constexpr int cases = 60;
  test_fleet fleet;
  auto address = must(detail::address_from_string("127.0.0.1"));
  auto listener = must(detail::listen_at(address));
  fleet.use_port(address.port);
  fleet.start_agent("alpha");
  const auto who = fleet.authority().issue("parent");
  std::mt19937_64 random{4};
  std::size_t most = 0;
  int served = 0;
  ASSERT_TRUE(fleet.agent("alpha").wait_told("process", patience));
  const auto process = fleet.agent("alpha").told("process");
  for (int i = 0; i < cases; ++i) {
    ASSERT_TRUE(wait_for(listener.get(), POLLIN, patience)) << "it does not try any more";
    auto socket = detail::accept_from(listener);
    ASSERT_TRUE(socket);
    if (i % 5 == 0) { // not even TLS
      const auto bytes = random_bytes(random() % 50'000, random());
      static_cast<void>(
          ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
      continue;
    }
    rogue x{who, tls_context::side::parent, std::move(socket)};
    ASSERT_TRUE(x.hear()) << describe(x.error());
    detail::wire_writer welcome;
    welcome.put(
        detail::host_welcome{i % 5 == 1 ? "nonsense" : "host", 2, 1 << 20, 0, 1'000'000'000});
    auto bytes = frame_of(host_frame::welcome, 0, welcome.bytes());
    if (i % 5 == 2)
      bytes[20 + random() % 8] ^= std::byte{0x55};
    if (!x.say(bytes) || !x.hear())
      continue;
    ++served;
    for (int j = 0; j < 40; ++j) {
      // Possibly the start of a worker, then frames that are not commands, requests or content.
      const auto kind = j % 8 == 0 ? static_cast<std::uint32_t>(host_frame::start)
                                   : static_cast<std::uint32_t>(random() % 20);
      auto body = random_bytes(random() % 4 == 0 ? random() % 100'000 : random() % 64, random());
      if (body.size() >= 24 && random() % 4 != 0) {
        const std::array<std::uint64_t, 3> words{random() % 25, random() % 9, random() % 25};
        std::memcpy(body.data(), words.data(), sizeof words);
      }
      if (j % 8 == 0) {
        const detail::start_args start{static_cast<std::int32_t>(random() % 2), 0};
        body.assign(detail::bytes_of(start).begin(), detail::bytes_of(start).end());
      }
      if (!x.say(frame_of(kind, random() % 3, body)))
        break;
    }
    most = std::max(most, memory_of(process));
  }
  EXPECT_GT(served, cases / 4);
  EXPECT_LT(most, (std::size_t{200} << 20) + kept_by_sanitizer);
  EXPECT_GT(most, 0U);
  listener.reset();
  test_system system{fleet.system()};
  auto w = system.open_world();
  EXPECT_TRUE(works(w));
}

} // namespace

} // namespace troupe::testing
