// Names in certificates of hosts, and certificates that are renewed or revoked.

#include "remote/hosts_support.hpp"
#include "remote/rogue.hpp"
#include "support/log_lines.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include <poll.h>

namespace troupe::testing {

namespace {

using detail::tls_context;

/// An agent, and the port that it connects to, where the test takes the place of a parent.
class AgentIdentity : public ::testing::Test {
protected:
  AgentIdentity() : address_(must(detail::address_from_string("127.0.0.1"))) {
    listener_ = must(detail::listen_at(address_));
  }

  void start(const host_identity& who, const std::string& name, const std::string& parent_name) {
    auto environment =
        agent_environment(name, who, "127.0.0.1:" + std::to_string(address_.port), 1);
    environment.push_back("TROUPE_AGENT_PARENT_NAME=" + parent_name);
    agent_ = std::make_unique<running_child>("host_agent_child", environment);
  }
  /// Waits for the agent's next connection.
  rogue parent(const host_identity& who) {
    EXPECT_TRUE(wait_for(listener_.get(), POLLIN, patience));
    return {who, tls_context::side::parent, detail::accept_from(listener_)};
  }
  /// Returns the name with which the agent greets a parent.
  std::string name_at(rogue& x) {
    const auto hello = x.hear();
    EXPECT_TRUE(hello) << describe(x.error());
    return hello ? must(detail::read_host_hello(hello->second)) : std::string{};
  }

  test_authority authority_{"fleet"};
  detail::socket_address address_;
  detail::file_descriptor listener_;
  std::unique_ptr<running_child> agent_;
};

TEST_F(AgentIdentity, BelievesOnlyTheParentThatItConnectsTo) {
  start(authority_.issue("alpha"), "alpha", "");
  for (const char* names : {"DNS:parent", "DNS:127.0.0.1", "IP:127.0.0.2"}) {
    auto x = parent(authority_.issue_for("parent", names, "serverAuth"));
    EXPECT_FALSE(x.hear()) << names;
  }
  auto right = parent(authority_.issue_for("parent", "IP:127.0.0.1", "serverAuth"));
  EXPECT_EQ(name_at(right), "alpha");
  agent_->kill();
  const auto end = agent_->wait(patience);
  EXPECT_NE(end.out.find("IP address mismatch: it is not for 127.0.0.1"), std::string::npos)
      << to_string(end);
}

TEST_F(AgentIdentity, BelievesTheParentThatItWasTold) {
  start(authority_.issue("alpha"), "alpha", "parent");
  auto wrong = parent(authority_.issue_for("parents", "DNS:parents,IP:127.0.0.1", "serverAuth"));
  EXPECT_FALSE(wrong.hear());
  auto right = parent(authority_.issue_for("parent", "DNS:parent", "serverAuth"));
  EXPECT_EQ(name_at(right), "alpha");
}

TEST_F(AgentIdentity, HasTheNameInItsCertificate) {
  start(authority_.issue_for("common", "DNS:first,DNS:second", "clientAuth"), "", "");
  auto x = parent(authority_.issue("parent"));
  EXPECT_EQ(name_at(x), "first");
}

TEST_F(AgentIdentity, MayHaveAnyNameInItsCertificate) {
  start(authority_.issue_for("common", "DNS:first,DNS:second", "clientAuth"), "second", "");
  auto x = parent(authority_.issue("parent"));
  EXPECT_EQ(name_at(x), "second");
}

TEST_F(AgentIdentity, HasNoOtherName) {
  host_agent_options what{.parent = "127.0.0.1:1", .identity = authority_.issue("alpha")};
  what.name = "ALPHA";
  const auto why = run_host_agent(what);
  EXPECT_EQ(describe(why), "invalid_argument: the certificate of this host is not for ALPHA: its "
                           "first name is alpha");
}

/// A list of revoked certificates that changes while the parent runs.
TEST(HostIdentity, IsRefusedWhileItIsRevoked) {
  test_fleet fleet;
  temporary_folder folder;
  const auto list = folder.path("revoked.pem");
  const auto put = [&](const std::string& from) {
    std::filesystem::copy_file(from, list + ".part");
    std::filesystem::rename(list + ".part", list);
  };
  put(fleet.authority().revoke({}));
  worker_backend_options how;
  how.backend = "host";
  how.host.devices = 1;
  how.hosts = fleet.hosts();
  how.hosts.identity.revoked = list;
  const auto alpha = fleet.authority().issue("alpha");
  how.hosts.on_listening = [&](std::uint16_t port) {
    fleet.use_port(port);
    fleet.start_agent("alpha", alpha);
  };
  const log_window unlimited{1ns};
  log_lines lines;
  const auto all = must(make_worker_backend(how));
  const auto joined = [&] { return lines.count_of("the host alpha has joined"); };
  const auto refused = [&] { return lines.count_of("certificate revoked") != 0; };

  put(fleet.authority().revoke({alpha}));
  while (!refused()) { // the list is read anew within a second
    const auto before = joined();
    fleet.start_agent("alpha", alpha); // in place of the one before
    ASSERT_TRUE(eventually([&] { return refused() || joined() > before; }));
  }
  const auto before = joined();
  put(fleet.authority().revoke({}));
  EXPECT_TRUE(eventually([&] { return joined() > before; }));
}

} // namespace

} // namespace troupe::testing
