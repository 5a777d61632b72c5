#include "graphviz.hpp"
#include "topology_view.hpp"
#include <troupe/device_status.hpp>
#include <troupe/error.hpp>
#include <troupe/p2p_graph.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include <unistd.h>

namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using troupe::device_phase;
using troupe::errc;
using troupe::link_kind;
using troupe::p2p_graph;
using troupe::p2p_link;
using troupe::peer_access;

/// Returns a graph in which all pairs of devices have 18 NVLinks.
p2p_graph nvlink_graph(int devices) {
  p2p_graph result;
  for (int i = 0; i < devices; ++i) {
    result.devices.push_back({i, troupe::device_phase::ready, 1, 0});
    for (int k = 0; k < devices; ++k) {
      if (k == i)
        continue;
      p2p_link x;
      x.from = i;
      x.to = k;
      x.kind = link_kind::nvlink;
      x.links = 18;
      x.possible = true;
      x.access = peer_access::enabled;
      result.links.push_back(x);
    }
  }
  return result;
}

p2p_graph measured_graph(int devices) {
  auto result = nvlink_graph(devices);
  for (auto& x : result.links) {
    x.bandwidth = 390 + x.from;
    x.bandwidth_both = 2 * x.bandwidth;
    x.latency_us = 2.5;
  }
  return result;
}

p2p_link& link_of(p2p_graph& graph, int from, int to) {
  return *std::find_if(graph.links.begin(), graph.links.end(),
                       [=](auto& x) { return x.from == from && x.to == to; });
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t result = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++result;
  return result;
}

TEST(LinkMatrix, HasTheFormOfNvidiaSmi) {
  EXPECT_THAT(link_matrix(nvlink_graph(3)), HasSubstr("      GPU0  GPU1  GPU2  island  phase\n"
                                                      "GPU0     X  NV18  NV18       0  ready\n"
                                                      "GPU1  NV18     X  NV18       0  ready\n"
                                                      "GPU2  NV18  NV18     X       0  ready\n"));
}

TEST(LinkMatrix, HasAWordForEveryLink) {
  auto graph = nvlink_graph(4);
  link_of(graph, 0, 1).kind = link_kind::pcie;
  link_of(graph, 1, 0).access = peer_access::none;
  link_of(graph, 0, 2).links = 0;
  link_of(graph, 2, 0).kind = link_kind::memory;
  link_of(graph, 1, 2).access = peer_access::pending;
  link_of(graph, 2, 1).access = peer_access::failed;
  link_of(graph, 2, 1).reason = troupe::make_error(errc::link_failed, "byte 7 is another one");
  graph.devices[3].phase = device_phase::resetting;
  graph.devices[3].island = -1;
  const auto text = link_matrix(graph);
  EXPECT_THAT(text, HasSubstr("GPU0     X   PCIE     NV  NV18       0      ready\n"
                              "GPU1  HOST      X  NV18?  NV18       0      ready\n"
                              "GPU2   MEM  NV18!      X  NV18       0      ready\n"
                              "GPU3  NV18   NV18   NV18     X       -  resetting\n"));
  for (auto* word : {"PCIE = ", "HOST = ", "NV = ", "NV18 = 18 NVLinks", "MEM = ", "? = ", "! = "})
    EXPECT_THAT(text, HasSubstr(word));
  EXPECT_THAT(text, ContainsRegex("GPU2 to GPU1: link_failed.*byte 7 is another one"));
}

TEST(LinkMatrix, HasNoLegendForWhatIsNotThere) {
  const auto text = link_matrix(nvlink_graph(2));
  for (auto* word : {"PCIE", "HOST", "MEM", "?", "!"})
    EXPECT_THAT(text, Not(HasSubstr(word)));
}

TEST(MeasuredMatrices, SayWhatWasMeasuredInEachDirection) {
  auto graph = measured_graph(2);
  link_of(graph, 1, 0).bandwidth = 0;
  const auto text = measured_matrices(graph);
  EXPECT_THAT(text, HasSubstr("GPU0     X  390.0\nGPU1     -      X\n"));
  EXPECT_THAT(text, HasSubstr("GPU0      X  780.0\nGPU1  782.0      X\n"));
  EXPECT_THAT(text, HasSubstr("GPU0     X  2.50\nGPU1  2.50     X\n"));
}

TEST(Dot, DrawsOneLineForTwoLinksThatAreAlike) {
  const auto text = to_dot(measured_graph(8), "8 devices");
  EXPECT_EQ(count(text, " -> "), 28u);
  EXPECT_EQ(count(text, "dir=none"), 28u);
  EXPECT_THAT(text, HasSubstr("NV18: 18 NVLinks, from one to the other or through a switch; 56 "
                              "links; 390 to 397 GB/s, both directions 780 to 794 GB/s, 2.5 us"));
  EXPECT_EQ(count(text, "shape=plaintext"), 0u) << "no label for each of 28 lines";
}

TEST(Dot, DrawsTwoLinesForLinksThatDiffer) {
  auto graph = measured_graph(8);
  link_of(graph, 2, 5).bandwidth = 200;
  const auto text = to_dot(graph, "");
  EXPECT_EQ(count(text, "dir=none"), 27u);
  EXPECT_THAT(text, ContainsRegex("GPU2 -> GPU5 .dir=forward, color=\"#e08214\""));
  EXPECT_THAT(text, ContainsRegex("GPU5 -> GPU2 .dir=forward, color=\"#1b7837\""));
  EXPECT_THAT(text, HasSubstr("label=\"NV18\\n200 GB/s\""));
  EXPECT_THAT(text, HasSubstr("slower than the others"));
}

TEST(Dot, DrawsNoLineWhereThereIsNoAccess) {
  auto graph = nvlink_graph(2);
  link_of(graph, 0, 1).access = peer_access::none;
  const auto text = to_dot(graph, "");
  EXPECT_THAT(text, Not(HasSubstr("GPU0 -> GPU1")));
  EXPECT_THAT(text, HasSubstr("GPU1 -> GPU0 [dir=forward"));
  EXPECT_THAT(text, HasSubstr("no line: no access"));
}

TEST(Dot, MarksLinksThatFailed) {
  auto graph = measured_graph(3);
  for (auto [from, to] : {std::pair{0, 2}, std::pair{2, 0}})
    link_of(graph, from, to).access = peer_access::failed;
  const auto text = to_dot(graph, "");
  EXPECT_THAT(text, ContainsRegex("GPU0 -> GPU2 .dir=none, color=\"#d7191c\", style=dashed"));
  EXPECT_THAT(text, HasSubstr("failed: not used; 2 links</td>"));
}

TEST(Dot, LabelsAllLinesWhereTheyAreFew) {
  const auto text = to_dot(measured_graph(4), "");
  EXPECT_EQ(count(text, "shape=plaintext"), 6u);
  EXPECT_THAT(text, HasSubstr("label=\"NV18\\n390 GB/s\""));
}

TEST(Dot, ColorsIslands) {
  auto graph = nvlink_graph(4);
  graph.devices[1].island = 1;
  graph.devices[3].island = 1;
  const auto text = to_dot(graph, "");
  EXPECT_EQ(count(text, "fillcolor=\"#c7e9c0\""), 2u);
  EXPECT_EQ(count(text, "fillcolor=\"#c6dbef\""), 2u);
  EXPECT_THAT(text, HasSubstr("an island"));
}

TEST(Dot, EscapesTheTitle) {
  EXPECT_THAT(to_dot(nvlink_graph(1), "1 x <GPU> & more"),
              HasSubstr("<b>1 x &lt;GPU&gt; &amp; more</b>"));
}

#if TROUPE_HAS_DOT

class Svg : public ::testing::Test {
protected:
  void SetUp() override { std::filesystem::create_directory(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string file(const char* name) const { return folder_ / name; }

private:
  const std::filesystem::path folder_ = std::filesystem::temp_directory_path() /
                                        ("troupe svg " + std::to_string(getpid())); // with a space
};

TEST_F(Svg, HasEveryDeviceAndEveryLine) {
  const auto name = file("eight.svg");
  ASSERT_FALSE(render_svg(to_dot(measured_graph(8), "8 x <GPU>"), name));
  std::ifstream in{name};
  const std::string text{std::istreambuf_iterator<char>{in}, {}};
  EXPECT_THAT(text, HasSubstr("<svg"));
  EXPECT_EQ(count(text, "class=\"node\""), 8u);
  EXPECT_EQ(count(text, "class=\"edge\""), 28u);
  for (int i = 0; i < 8; ++i)
    EXPECT_THAT(text, HasSubstr("<title>GPU" + std::to_string(i) + "</title>"));
}

TEST_F(Svg, IsThereForEveryGraph) {
  auto broken = measured_graph(4);
  link_of(broken, 0, 1).access = peer_access::failed;
  link_of(broken, 2, 3).bandwidth = 10;
  auto alone = nvlink_graph(3);
  for (auto& x : alone.links)
    x.access = peer_access::none;
  for (auto& graph : {nvlink_graph(0), nvlink_graph(1), broken, alone})
    EXPECT_FALSE(render_svg(to_dot(graph, "title"), file("one.svg")));
}

TEST_F(Svg, SaysWhenDotSaysNo) {
  const auto error = render_svg("this is no graph", file("none.svg"));
  EXPECT_EQ(troupe::code_of(error), errc::invalid_argument);
}

TEST_F(Svg, SaysWhenTheFileCannotBeWritten) {
  const auto error = render_svg(to_dot(nvlink_graph(2), "title"), file("no such folder/x.svg"));
  EXPECT_EQ(troupe::code_of(error), errc::invalid_argument);
}

#endif

} // namespace
