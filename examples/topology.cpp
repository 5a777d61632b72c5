// Shows the links between the devices of this machine and their speed, as text and as a picture.
// Also takes options of the library and of CAF, such as --troupe.devices=4.

#include "graphviz.hpp"
#include "topology_view.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

using namespace std::chrono_literals;

namespace {

struct settings {
  std::vector<int> devices;
  bool verify = false;
  bool measure = false;
  std::string dot_file;
  std::string svg_file;
};

/// Returns a title such as "8 x NVIDIA H200, backend cuda".
caf::expected<std::string> title_of(caf::actor_system& sys, const troupe::p2p_graph& graph,
                                    const std::string& backend) {
  std::vector<std::string> names;
  for (auto& x : graph.devices) {
    auto device = troupe::device::open(sys, x.device);
    if (!device)
      return device.error();
    auto stats = device->stats().wait();
    if (!stats)
      return stats.error();
    names.push_back(stats->name);
  }
  if (names.empty())
    return troupe::make_error(troupe::errc::unavailable, "the devices ended");
  const auto all_same =
      std::all_of(names.begin(), names.end(), [&](auto& name) { return name == names.front(); });
  return std::to_string(names.size()) + (all_same ? " x " + names.front() : " devices") +
         ", backend " + backend;
}

caf::error write_file(const std::string& name, const std::string& text) {
  std::ofstream out{name};
  out << text;
  if (!out.flush())
    return troupe::make_error(troupe::errc::invalid_argument, "cannot write " + name);
  return {};
}

caf::error draw(const settings& s, const troupe::p2p_graph& graph, const std::string& title) {
  const auto picture = to_dot(graph, title);
  if (!s.dot_file.empty())
    if (auto error = write_file(s.dot_file, picture))
      return error;
  if (!s.svg_file.empty())
    return render_svg(picture, s.svg_file);
  return {};
}

/// Returns true if no link was found wrong.
caf::expected<bool> run(const settings& s, caf::actor_system& sys) {
  auto list = troupe::list_devices(sys);
  if (!list)
    return list.error();
  troupe::topology_config config;
  config.devices = s.devices;
  if (list->backend == "host")
    config.limits.measured_bytes = std::size_t{1} << 20;
  auto topology = troupe::topology::open(sys, config);
  if (!topology)
    return topology.error();
  auto graph = topology->graph();
  std::size_t wrong = 0;
  if (s.verify) { // before the measurements: wrong links are taken out
    auto verified = topology->verify_links({}, {.deadline = 5min}).wait();
    if (!verified)
      return verified.error();
    graph = std::move(*verified);
    const auto count = [&](troupe::link_check what) {
      return static_cast<std::size_t>(std::count_if(graph.links.begin(), graph.links.end(),
                                                    [=](auto& x) { return x.checked == what; }));
    };
    wrong = count(troupe::link_check::wrong);
    std::printf("verified: %zu links right, %zu wrong\n", count(troupe::link_check::right), wrong);
  }
  if (s.measure) {
    auto measured = topology->measure_links({}, {.deadline = 5min}).wait();
    if (!measured)
      return measured.error();
    graph = std::move(*measured);
  }
  const auto title = title_of(sys, graph, list->backend);
  if (!title)
    return title.error();
  std::printf("%s%s\n\n%s", title->c_str(),
              list->reason.empty() ? "" : (" (" + list->reason + ")").c_str(),
              link_matrix(graph).c_str());
  if (s.measure)
    std::printf("\n%s", measured_matrices(graph).c_str());
  if (auto error = draw(s, graph, *title))
    return error;
  return wrong == 0;
}

int report(const caf::error& why) {
  std::fprintf(stderr, "%s\n", troupe::describe(why).c_str());
  return 1;
}

} // namespace

int main(int argc, char** argv) {
  settings s;
  std::string backend = "auto";
  CLI::App app{"Which devices of this machine reach which, over what, and how fast"};
  app.add_option("--backend", backend, "auto, cuda or host (virtual devices)")
      ->capture_default_str();
  app.add_option("--devices", s.devices, "ordinals, such as 0,1,2; all by default")->delimiter(',');
  app.add_flag("--verify", s.verify, "send patterns over every link; fail if one is wrong");
  app.add_flag("--measure", s.measure, "bandwidth and latency of every link");
  app.add_option("--dot", s.dot_file, "file to write a picture to, in graphviz's language");
  app.add_option("--svg", s.svg_file, "the same as SVG; needs graphviz");
  app.allow_extras();
  CLI11_PARSE(app, argc, argv);

  troupe::config cfg;
  auto more = app.remaining();
  more.push_back("--troupe.backend=" + backend);
  if (auto error = cfg.parse(more))
    return report(error);
  if (cfg.help_printed())
    return 0;
  caf::actor_system sys{cfg};
  auto right = run(s, sys);
  if (!right)
    return report(right.error());
  return *right ? 0 : 1;
}
