// Frames between hosts with valid certificates, and the rejection of other connections.

#include "net/frame_link.hpp"
#include "net/socket.hpp"
#include "remote/certificates.hpp"
#include "remote/rogue.hpp"
#include "remote/test_wire.hpp"
#include "support/expect.hpp"
#include "support/world_fixture.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace troupe::testing {

namespace {

using namespace std::chrono_literals;
using detail::file_descriptor;
using detail::frame_head;
using detail::frame_link;
using detail::tls_context;
using clock = std::chrono::steady_clock;

constexpr std::size_t most_bytes = std::size_t{256} << 10;

struct frame {
  std::uint32_t kind = 0;
  std::uint64_t channel = 0;
  std::vector<std::byte> body;
  friend bool operator==(const frame&, const frame&) = default;
};

/// One side of a connection, and the frames that it received.
class party {
public:
  party(const host_identity& who, tls_context::side side, file_descriptor socket,
        frame_link::options how = {}, const std::string& peer_name = {}) {
    how.most_bytes = most_bytes;
    must(frame_link::start(
        link_,
        must(detail::tls_stream::create(must(tls_context::create(who, side)), std::move(socket),
                                        "the peer", peer_name)),
        how,
        {[this](const frame_head& head, std::span<const std::byte> body) {
           std::lock_guard lock{mutex_};
           came_.push_back({head.kind, head.channel, {body.begin(), body.end()}});
           changed_.notify_all();
           return caf::error{};
         },
         [this](const caf::error& why) {
           std::lock_guard lock{mutex_};
           why_ = why;
           changed_.notify_all();
         }}));
  }
  ~party() { link_->stop(); }

  frame_link& link() { return *link_; }
  caf::error send(const frame& x) {
    return link_->send(x.kind, x.channel, {x.body}, frame_link::patience::room);
  }
  std::vector<frame> wait_for(std::size_t count) {
    std::unique_lock lock{mutex_};
    changed_.wait_for(lock, patience, [&] { return came_.size() >= count || why_; });
    return came_;
  }
  /// Returns the reason of the end, or an empty text if the link is still open.
  std::string wait_end(std::chrono::nanoseconds limit = patience) {
    std::unique_lock lock{mutex_};
    changed_.wait_for(lock, limit, [&] { return why_.has_value(); });
    return why_ ? describe(*why_) : std::string{};
  }

private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<frame> came_;
  std::optional<caf::error> why_;
  std::shared_ptr<frame_link> link_;
};

std::pair<file_descriptor, file_descriptor> connected() {
  auto address = must(detail::address_from_string("127.0.0.1"));
  auto listener = must(detail::listen_at(address));
  auto first = must(detail::connect_to(address, clock::now() + patience));
  auto second = detail::accept_from(listener);
  EXPECT_TRUE(second);
  return {std::move(first), std::move(second)};
}

constexpr auto parent = tls_context::side::parent;
constexpr auto agent = tls_context::side::agent;

TEST(FrameLink, BringsFramesInOrder) {
  test_authority fleet{"fleet"};
  auto [first, second] = connected();
  party a{fleet.issue("a"), agent, std::move(first)};
  party b{fleet.issue("b"), parent, std::move(second)};
  std::vector<frame> there;
  for (std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{17}, std::size_t{16384},
                           std::size_t{100'000}, most_bytes})
    there.push_back({static_cast<std::uint32_t>(size % 7 + 1), size, random_bytes(size, size)});
  for (int i = 0; i < 2000; ++i) // more than any buffer holds
    there.push_back({9, static_cast<std::uint64_t>(i), random_bytes(20'000, 7)});
  for (auto* x : {&a, &b})
    x->link().admit(patience);
  std::thread back{[&] {
    for (auto& x : there)
      EXPECT_FALSE(b.send(x));
  }};
  for (auto& x : there)
    ASSERT_FALSE(a.send(x));
  back.join();
  EXPECT_TRUE(a.wait_for(there.size()) == there);
  EXPECT_TRUE(b.wait_for(there.size()) == there);
  EXPECT_EQ(code_of(a.send({1, 1, std::vector<std::byte>(most_bytes + 1)})), errc::out_of_range);
}

TEST(FrameLink, LetsNoStrangerIn) {
  test_authority fleet{"fleet"};
  test_authority others{"others"};
  auto strange = others.issue("stranger");
  strange.authority = fleet.file(); // it would trust the parent
  for (auto& [who, why] : {std::pair{strange, "unable to get local issuer certificate"},
                           std::pair{fleet.issue_expired("old"), "certificate has expired"}}) {
    auto [first, second] = connected();
    party here{fleet.issue("here"), parent, std::move(second)};
    party there{who, agent, std::move(first)};
    static_cast<void>(there.send({1, 0, {}})); // the link may have ended already
    EXPECT_NE(here.wait_end().find(why), std::string::npos) << here.wait_end();
    EXPECT_NE(there.wait_end().find("alert"), std::string::npos) << there.wait_end();
    EXPECT_TRUE(here.wait_for(0).empty());
  }
}

TEST(FrameLink, AnAgentBelievesNoStranger) {
  test_authority fleet{"fleet"};
  test_authority others{"others"};
  auto strange = others.issue("stranger");
  strange.authority = fleet.file();
  auto [first, second] = connected();
  party here{strange, parent, std::move(second)};
  party there{fleet.issue("there"), agent, std::move(first)};
  EXPECT_NE(there.wait_end().find("unable to get local issuer certificate"), std::string::npos)
      << there.wait_end();
  EXPECT_NE(here.wait_end().find("alert"), std::string::npos) << here.wait_end();
}

TEST(FrameLink, AnAgentMayAskForAName) {
  test_authority fleet{"fleet"};
  for (auto& [wanted, right] : {std::pair{"the-parent", true}, std::pair{"127.0.0.1", true},
                                std::pair{"another", false}, std::pair{"127.0.0.2", false}}) {
    auto [first, second] = connected();
    party here{fleet.issue("the-parent"), parent, std::move(second)};
    party there{fleet.issue("there"), agent, std::move(first), {}, wanted};
    const auto unsent = there.send({1, 0, {}});
    if (right)
      EXPECT_EQ(here.wait_for(1).size(), 1U) << wanted << describe(unsent);
    else // the link may have ended before
      EXPECT_NE(there.wait_end().find("mismatch"), std::string::npos) << there.wait_end();
  }
}

/// Expects that the agent or the parent refuses the other one, and that the reason has this text.
void expect_refused(const host_identity& as_parent, const host_identity& as_agent,
                    const std::string& text) {
  auto [first, second] = connected();
  party here{as_parent, parent, std::move(second)};
  party there{as_agent, agent, std::move(first)};
  static_cast<void>(there.send({1, 0, {}})); // the link may have ended before
  const auto why = here.wait_end() + there.wait_end();
  EXPECT_NE(why.find(text), std::string::npos) << why;
}

TEST(FrameLink, ACertificateIsForOneSide) {
  test_authority fleet{"fleet"};
  const auto for_parents = fleet.issue_for("p", "DNS:p", "serverAuth");
  const auto for_agents = fleet.issue_for("a", "DNS:a", "clientAuth");
  expect_refused(for_agents, for_agents, "unsuitable certificate purpose");
  expect_refused(for_parents, for_parents, "unsuitable certificate purpose");
  auto [first, second] = connected();
  party here{for_parents, parent, std::move(second)};
  party there{for_agents, agent, std::move(first)};
  ASSERT_FALSE(there.send({1, 0, {}}));
  EXPECT_EQ(here.wait_for(1).size(), 1U);
}

TEST(FrameLink, RevokedCertificatesAreRefused) {
  test_authority fleet{"fleet"};
  const auto good = fleet.issue("good");
  const auto bad = fleet.issue("bad");
  auto wary = fleet.issue("wary");
  wary.revoked = fleet.revoke({bad});
  expect_refused(wary, bad, "certificate revoked");
  expect_refused(bad, wary, "certificate revoked");
  auto [first, second] = connected();
  party here{wary, parent, std::move(second)};
  party there{good, agent, std::move(first)};
  ASSERT_FALSE(there.send({1, 0, {}}));
  EXPECT_EQ(here.wait_for(1).size(), 1U);
  wary.revoked = fleet.revoke({}, 1);
  expect_refused(wary, good, "CRL has expired");
}

TEST(FrameLink, StrangersHaveLittleTime) {
  test_authority fleet{"fleet"};
  for (bool speaks_tls : {false, true}) {
    auto [first, second] = connected();
    const auto begin = clock::now();
    const auto limit = speaks_tls ? 1000ms : 300ms; // a handshake takes time
    party here{fleet.issue("here"), parent, std::move(second), {.admission_limit = limit}};
    std::optional<party> there;
    if (speaks_tls)
      there.emplace(fleet.issue("there"), agent, std::move(first));
    const auto what = std::string{"did not "} + (speaks_tls ? "join" : "authenticate");
    EXPECT_NE(here.wait_end().find(what + " within " + std::to_string(limit / 1ms) + " ms"),
              std::string::npos)
        << here.wait_end();
    EXPECT_GE(clock::now() - begin, limit);
  }
}

TEST(FrameLink, SilenceIsALossOnBothSides) {
  test_authority fleet{"fleet"};
  auto address = must(detail::address_from_string("127.0.0.1"));
  auto listener = must(detail::listen_at(address));
  test_wire wire{address.port};
  address.port = wire.port();
  auto first = must(detail::connect_to(address, clock::now() + patience));
  file_descriptor second;
  while (!second) // the wire connects on its own thread
    second = detail::accept_from(listener);
  party here{fleet.issue("here"), parent, std::move(second)};
  party there{fleet.issue("there"), agent, std::move(first)};
  for (auto* x : {&here, &there})
    x->link().admit(500ms);
  ASSERT_FALSE(there.send({1, 0, {}}));
  EXPECT_EQ(here.wait_for(1).size(), 1U);
  EXPECT_EQ(here.wait_end(1200ms), ""); // signs of life keep the link open
  wire.cut();
  const auto begin = clock::now();
  for (auto* x : {&here, &there})
    EXPECT_NE(x->wait_end().find("nothing arrived from the peer for"), std::string::npos)
        << x->wait_end();
  EXPECT_GE(clock::now() - begin, 250ms); // a sign of life came shortly before the cut
  EXPECT_LT(clock::now() - begin, at_once);
}

/// It shows signs of life, but its system's buffers are full.
TEST(FrameLink, APeerThatReadsNothingIsLost) {
  test_authority fleet{"fleet"};
  auto [first, second] = connected();
  party here{fleet.issue("here"), parent, std::move(second)};
  rogue there{fleet.issue("there"), agent, std::move(first)};
  ASSERT_TRUE(there.say(frame_of(1, 0, {})));
  ASSERT_EQ(here.wait_for(1).size(), 1U);
  here.link().admit(500ms);
  std::atomic<bool> over{false};
  std::thread sender{[&] {
    const frame large{2, 0, std::vector<std::byte>(most_bytes)};
    for (int i = 0; i < 400 && !here.send(large); ++i) // more than waits in the link at a time
      ;
    over = true;
  }};
  const auto begin = clock::now();
  while (!over && clock::now() < begin + patience && there.say(frame_of(0, 0, {})))
    std::this_thread::sleep_for(20ms); // the interval of its signs of life
  EXPECT_NE(here.wait_end().find("the peer has read nothing for"), std::string::npos)
      << here.wait_end();
  sender.join();
}

TEST(FrameLink, WrongFilesAreTold) {
  test_authority fleet{"fleet"};
  test_authority others{"others"};
  temporary_folder folder;
  const auto good = fleet.issue("good");
  auto with = [&](auto change) {
    auto x = good;
    change(x);
    auto made = tls_context::create(x, parent);
    return made ? std::string{} : describe(made.error());
  };
  EXPECT_EQ(with([](auto&) {}), "");
  for (auto file : {&host_identity::certificate, &host_identity::key, &host_identity::authority})
    EXPECT_EQ(with([&](auto& x) { (x.*file).clear(); }),
              "invalid_argument: set troupe.hosts.certificate, .key and .authority");
  EXPECT_NE(with([](auto& x) { x.certificate = "/nowhere"; }).find("'/nowhere' cannot be used"),
            std::string::npos);
  EXPECT_NE(with([&](auto& x) { x.key = fleet.issue("other").key; }).find("mismatch"),
            std::string::npos);
  EXPECT_NE(with([&](auto& x) {
              x.revoked = folder.write("no-list.pem", "nothing");
            }).find("the list of revoked certificates"),
            std::string::npos);
  EXPECT_NE(
      with([&](auto& x) { x.authority = folder.write("no.pem", "nothing"); }).find("the authority"),
      std::string::npos);
}

} // namespace

} // namespace troupe::testing
