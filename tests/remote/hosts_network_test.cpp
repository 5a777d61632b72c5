// Hosts with their own networks: namespaces of this machine, a bridge between them, and connections
// that are cut.

#include "remote/hosts_support.hpp"
#include "support/load.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <net/if.h>
#include <sched.h>

namespace troupe::testing {

namespace {

constexpr auto link_limit = 1500ms;

void run(const std::string& command) {
  if (std::system((command + " > /dev/null 2>&1").c_str()) != 0)
    throw std::runtime_error("failed: " + command);
}

/// Gives this process and its later threads and children a network of their own.
/// @return the reason if this is not possible
std::string leave_network() {
  if (::unshare(CLONE_NEWNET) != 0)
    return "unshare: " + std::generic_category().message(errno);
  return std::system("ip link set lo up > /dev/null 2>&1") == 0 ? "" : "there is no command ip";
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

/// An agent without a network until the parent moves a device named wire into its namespace.
TROUPE_CHILD(host_agent_in_namespace) {
  if (auto why = leave_network(); !why.empty())
    throw std::runtime_error(why);
  tell("alone", std::to_string(::getpid()));
  while (::if_nametoindex("wire") == 0)
    std::this_thread::sleep_for(5ms); // there is no notification
  run("ip addr add " + variable("TROUPE_AGENT_ADDRESS") + "/24 dev wire");
  run("ip link set wire up");
  return run_agent_of_environment();
}

/// The parent's end of a bridge, with hosts at the other ends.
class network {
public:
  network() {
    run("ip link add bridge type bridge");
    run("ip addr add 10.77.0.1/24 dev bridge");
    run("ip link set bridge up");
  }

  void add(const std::string& name, int number, std::uint16_t port) {
    auto environment = agent_environment(name, authority_.issue(name, address(number)),
                                         "10.77.0.1:" + std::to_string(port), 2);
    environment.push_back("TROUPE_AGENT_ADDRESS=" + address(number));
    auto& x = hosts_[name];
    x.number = number;
    x.agent = std::make_unique<running_child>("host_agent_in_namespace", environment);
    if (!x.agent->wait_told("alone", patience))
      throw std::runtime_error("an agent has no network: " + to_string(x.agent->wait(1s)));
    x.process = x.agent->told("alone");
    run("ip link add to-" + name + " type veth peer name wire netns " + x.process);
    run("ip link set to-" + name + " master bridge up");
  }

  /// Blocks all traffic in both directions.
  void unplug(const std::string& name) { run("ip link set to-" + name + " down"); }
  void plug_in(const std::string& name) { run("ip link set to-" + name + " up"); }
  /// Blocks traffic from the parent to the host.
  void deafen(const std::string& name, bool on) {
    run(blackhole(on) + address(hosts_.at(name).number) + "/32");
  }
  /// Blocks traffic from the host to the parent.
  void silence(const std::string& name, bool on) {
    run("nsenter -t " + hosts_.at(name).process + " -n " + blackhole(on) + "10.77.0.1/32");
  }

  remote_hosts hosts() {
    remote_hosts result;
    result.listen_address = "10.77.0.1";
    result.identity = authority_.issue("parent", "10.77.0.1");
    result.names = {"alpha", "beta"};
    result.link_limit = link_limit;
    result.on_listening = [this](std::uint16_t port) {
      add("alpha", 2, port);
      add("beta", 3, port);
    };
    return result;
  }

private:
  struct host {
    int number = 0;
    std::unique_ptr<running_child> agent;
    std::string process;
  };

  static std::string address(int number) { return "10.77.0." + std::to_string(number); }
  static std::string blackhole(bool on) {
    return std::string{"ip route "} + (on ? "add" : "del") + " blackhole ";
  }

  test_authority authority_{"fleet"};
  std::map<std::string, host> hosts_;
};

system_options over(network& all) {
  return {.devices = 6, .wrap = [&](std::shared_ptr<backend>) {
            return must(make_worker_backend(
                {.backend = "host", .host = {.devices = 2}, .hosts = all.hosts()}));
          }};
}

/// Returns false, and reports the reason, if there is no network namespace.
bool has_own_network() {
  const auto why = leave_network();
  if (!why.empty())
    tell("skipped", why);
  return why.empty();
}

/// The scenarios below run in a child, which has a network of its own.
TROUPE_CHILD(hosts_over_a_network) {
  if (!has_own_network())
    return 0;
  network net;
  test_system system{over(net)};
  auto w = system.open_world();
  for (std::uint64_t seed = 1; seed <= 3; ++seed)
    EXPECT_TRUE(works(w, seed));
  EXPECT_TRUE(moves(must(device::open(system, 5)), std::size_t{10} << 20));
  tell("moved");
  return 0;
}

/// Cuts and mends one host's connection to the parent, while no requests are pending. Returns 0.
template <class Cut, class Mend> int lose_one_twice(Cut cut, Mend mend) {
  if (!has_own_network())
    return 0;
  network net;
  test_system system{over(net)};
  auto w = system.open_world();
  EXPECT_TRUE(works(w));
  device_feed feed{system, system.device_actor(3)};
  device_feed others{system, system.device_actor(4)};
  auto generation = feed.until(device_phase::ready).generation;
  for (int i = 0; i < 2; ++i) {
    const auto x = lose_and_rejoin(
        system, 3, feed, generation, link_limit, [&] { cut(net); }, [&] { mend(net); });
    generation = x.generation;
    tell("lost", std::to_string(x.lost_after / 1ms));
    tell("rejoined", std::to_string(x.back_after / 1ms));
    EXPECT_TRUE(works(w));
  }
  others.until(device_phase::ready); // the other host was not affected
  EXPECT_EQ(others.seen().size(), 1U);
  return 0;
}

TROUPE_CHILD(hosts_whose_wire_is_cut) {
  return lose_one_twice([](network& net) { net.unplug("alpha"); },
                        [](network& net) { net.plug_in("alpha"); });
}

TROUPE_CHILD(hosts_that_do_not_hear) {
  return lose_one_twice([](network& net) { net.deafen("alpha", true); },
                        [](network& net) { net.deafen("alpha", false); });
}

TROUPE_CHILD(hosts_that_are_not_heard) {
  return lose_one_twice([](network& net) { net.silence("alpha", true); },
                        [](network& net) { net.silence("alpha", false); });
}

class HostNetwork : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, HostNetwork,
                         ::testing::Values("hosts_over_a_network", "hosts_whose_wire_is_cut",
                                           "hosts_that_do_not_hear", "hosts_that_are_not_heard"),
                         [](const auto& x) {
                           std::string result; // without underscores
                           for (bool first = true; char c : std::string{x.param}) {
                             if (c != '_')
                               result += first ? static_cast<char>(std::toupper(c)) : c;
                             first = c == '_';
                           }
                           return result;
                         });

TEST_P(HostNetwork, IsTheirs) {
  const auto end = run_child(GetParam(), 100s);
  if (end.was_told("skipped"))
    GTEST_SKIP() << "no network of its own: " << end.value("skipped");
  EXPECT_EQ(end.status, 0) << to_string(end);
}

} // namespace

} // namespace troupe::testing
