#include "topology_view.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using troupe::link_kind;
using troupe::p2p_graph;
using troupe::p2p_link;
using troupe::peer_access;

std::string format(const char* pattern, double x) {
  char text[64] = {};
  std::snprintf(text, sizeof text, pattern, x);
  return text;
}

std::string name_of(int device) { return "GPU" + std::to_string(device); }

bool is_usable(const p2p_link& x) { return x.access == peer_access::enabled; }

// -- words

/// Returns the short name of the usable connection.
std::string way_of(const p2p_link& x) {
  if (x.access == peer_access::none)
    return "HOST";
  switch (x.kind) {
  case link_kind::nvlink:
    return x.links > 0 ? "NV" + std::to_string(x.links) : "NV";
  case link_kind::pcie:
    return "PCIE";
  case link_kind::memory:
    return "MEM";
  case link_kind::host:
    break;
  }
  return "HOST";
}

std::string word_of(const p2p_link& x) {
  if (x.access == peer_access::failed)
    return way_of(x) + "!";
  if (x.access == peer_access::pending)
    return way_of(x) + "?";
  return way_of(x);
}

std::string meaning_of(const std::string& word) {
  if (word == "NV")
    return "NVLink; how many cannot be known";
  if (word.starts_with("NV"))
    return word.substr(2) + " NVLinks, from one to the other or through a switch";
  if (word == "PCIE")
    return "directly over PCIe";
  if (word == "MEM")
    return "virtual devices: both lie in the host's memory";
  return "no access: through the host's memory";
}

// -- text

/// Rows of cells; each column is as wide as its widest cell.
class text_table {
public:
  explicit text_table(std::vector<std::string> head) : rows_{std::move(head)} {}

  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  std::string text() const {
    std::vector<std::size_t> widths(rows_.front().size());
    for (auto& row : rows_)
      for (std::size_t i = 0; i < row.size(); ++i)
        widths[i] = std::max(widths[i], row[i].size());
    std::string result;
    for (auto& row : rows_) {
      for (std::size_t i = 0; i < row.size(); ++i)
        result += (i == 0 ? "" : "  ") + std::string(widths[i] - row[i].size(), ' ') + row[i];
      result += '\n';
    }
    return result;
  }

private:
  std::vector<std::vector<std::string>> rows_;
};

/// Makes a matrix of devices with `cell(link)` for each pair.
template <class F>
std::vector<std::vector<std::string>> matrix_of(const p2p_graph& graph, const char* self, F cell) {
  std::vector<std::vector<std::string>> rows(1, {""});
  for (auto& x : graph.devices)
    rows.front().push_back(name_of(x.device));
  for (auto& from : graph.devices) {
    std::vector<std::string> row{name_of(from.device)};
    for (auto& to : graph.devices) {
      const auto* link = graph.link(from.device, to.device);
      row.push_back(from.device == to.device ? self : link == nullptr ? "" : cell(*link));
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

template <class F>
std::string figures(const p2p_graph& graph, const char* what, const char* pattern, F value) {
  const auto rows = matrix_of(graph, "X", [&](const p2p_link& x) {
    return value(x) > 0 ? format(pattern, value(x)) : std::string{"-"};
  });
  text_table table{rows.front()};
  std::for_each(rows.begin() + 1, rows.end(), [&](auto& x) { table.add(x); });
  return std::string{what} + '\n' + table.text();
}

// -- the picture

/// Links below this part of the usual bandwidth of their class are slow.
constexpr double slow_part = 0.9;
/// Links whose bandwidths have at least this ratio are alike.
constexpr double alike_part = 0.9;
/// More labels would be unreadable.
constexpr std::size_t most_labels = 8;

struct point {
  double x = 0;
  double y = 0;
};

struct range {
  double least = 0;
  double most = 0;

  void add(double x) {
    if (x <= 0)
      return;
    least = least == 0 ? x : std::min(least, x);
    most = std::max(most, x);
  }
};

std::string text_of(const range& x, const char* pattern, const char* unit) {
  const auto least = format(pattern, x.least);
  const auto most = format(pattern, x.most);
  return (least == most ? least : least + " to " + most) + unit;
}

/// Common properties of links with the same word.
struct link_class {
  std::string color;
  std::string style;
  double width = 1;
  std::string meaning;
  std::size_t links = 0;
  std::vector<double> bandwidths;
  range bandwidth;
  range bandwidth_both;
  range latency;

  double usual_bandwidth() const {
    if (bandwidths.empty())
      return 0;
    auto sorted = bandwidths;
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    return *middle;
  }
};

using link_classes = std::map<std::string, link_class>;

const std::string slow_color = "#e08214";

link_class look_of(const p2p_link& x) {
  link_class result;
  result.style = "solid";
  result.meaning = meaning_of(way_of(x));
  result.width = x.kind == link_kind::nvlink ? 1.5 + std::min(x.links, 18) / 12.0 : 1.5;
  if (x.access == peer_access::failed) {
    result.color = "#d7191c";
    result.style = "dashed";
    result.meaning += "; failed: not used";
  } else if (x.access == peer_access::pending) {
    result.color = "#808080";
    result.style = "dotted";
    result.meaning += "; not ready yet";
  } else {
    result.color = x.kind == link_kind::nvlink ? "#1b7837"
                   : x.kind == link_kind::pcie ? "#2166ac"
                                               : "#5e3c99";
  }
  return result;
}

link_classes classes_of(const p2p_graph& graph) {
  link_classes result;
  for (auto& x : graph.links) {
    if (x.access == peer_access::none)
      continue;
    auto& its = result.try_emplace(word_of(x), look_of(x)).first->second;
    ++its.links;
    if (!is_usable(x))
      continue; // older measurements are of no use
    if (x.bandwidth > 0)
      its.bandwidths.push_back(x.bandwidth);
    its.bandwidth.add(x.bandwidth);
    its.bandwidth_both.add(x.bandwidth_both);
    its.latency.add(x.latency_us);
  }
  return result;
}

/// One line of the picture: a link, or two similar ones.
struct line {
  const p2p_link* link = nullptr;
  bool both = false;
  double bandwidth = 0; ///< the lower one of the two
  bool slow = false;
  bool differs = false; ///< needs a label of its own
};

bool are_alike(const p2p_link& x, const p2p_link& y) {
  return word_of(x) == word_of(y) &&
         std::min(x.bandwidth, y.bandwidth) >= alike_part * std::max(x.bandwidth, y.bandwidth);
}

line line_of(const p2p_link& x, const p2p_link* back, const link_classes& classes) {
  line result{&x, back != nullptr, x.bandwidth};
  if (back != nullptr)
    result.bandwidth = std::min(x.bandwidth, back->bandwidth);
  result.slow = is_usable(x) && result.bandwidth > 0 &&
                result.bandwidth < slow_part * classes.at(word_of(x)).usual_bandwidth();
  result.differs = !result.both || result.slow || !is_usable(x);
  return result;
}

std::vector<line> lines_of(const p2p_graph& graph, const link_classes& classes) {
  std::vector<line> result;
  const auto is_drawn = [](const p2p_link* x) {
    return x != nullptr && x->access != peer_access::none;
  };
  for (auto& x : graph.links) {
    if (x.from > x.to)
      continue;
    const auto* back = graph.link(x.to, x.from);
    if (is_drawn(&x) && is_drawn(back) && are_alike(x, *back)) {
      result.push_back(line_of(x, back, classes));
      continue;
    }
    if (is_drawn(&x))
      result.push_back(line_of(x, nullptr, classes));
    if (is_drawn(back))
      result.push_back(line_of(*back, nullptr, classes));
  }
  return result;
}

/// Places the devices on a circle, so that no line crosses a device. Islands have gaps between
/// them.
/// @units inches
std::map<int, point> places_of(const p2p_graph& graph) {
  auto sorted = graph.devices;
  std::stable_sort(sorted.begin(), sorted.end(), [](auto& x, auto& y) {
    return static_cast<std::uint32_t>(x.island) < static_cast<std::uint32_t>(y.island);
  });
  const auto is_new_island = [&](std::size_t i) {
    return sorted[i].island != sorted[(i + sorted.size() - 1) % sorted.size()].island;
  };
  constexpr double gap = 0.6; // relative to the distance between neighbors
  double ways = 0;
  for (std::size_t i = 0; i < sorted.size(); ++i)
    ways += is_new_island(i) ? 1 + gap : 1;
  std::map<int, point> result;
  if (sorted.size() == 1)
    return {{sorted.front().device, {}}};
  const double radius = 1.2 + 0.25 * ways;
  const double step = 2 * std::numbers::pi / ways;
  double angle = std::numbers::pi / 2 + step / 2;
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (i > 0)
      angle -= is_new_island(i) ? step * (1 + gap) : step;
    result[sorted[i].device] = {radius * std::cos(angle), radius * std::sin(angle)};
  }
  return result;
}

std::string position(point x) {
  return "pos=\"" + format("%.3f", x.x) + ',' + format("%.3f", x.y) + "!\"";
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text)
    switch (c) {
    case '&':
      result += "&amp;";
      break;
    case '<':
      result += "&lt;";
      break;
    case '>':
      result += "&gt;";
      break;
    default:
      result += c;
    }
  return result;
}

std::string device_statement(const troupe::p2p_device& x, point at) {
  static constexpr const char* colors[] = {"#c7e9c0", "#c6dbef", "#fdd0a2", "#dadaeb",
                                           "#fcc5c0", "#d9d9d9", "#ffffb3", "#b3e2cd"};
  auto label = name_of(x.device);
  if (x.phase != troupe::device_phase::ready)
    label += "\\n" + std::string{to_string(x.phase)};
  const auto* fill = x.island < 0 ? "white" : colors[static_cast<std::size_t>(x.island) % 8];
  return "  " + name_of(x.device) + " [label=\"" + label + "\", fillcolor=\"" + fill + "\", " +
         position(at) + "]\n";
}

const std::string& color_of(const line& x, const link_classes& classes) {
  return x.slow ? slow_color : classes.at(word_of(*x.link)).color;
}

std::string line_statement(const line& x, const link_classes& classes) {
  const auto& its = classes.at(word_of(*x.link));
  return "  " + name_of(x.link->from) + " -> " + name_of(x.link->to) +
         " [dir=" + (x.both ? "none" : "forward") + ", color=\"" + color_of(x, classes) +
         "\", style=" + its.style + ", penwidth=" + format("%.1f", its.width) + "]\n";
}

/// Places a label as its own node, nearer to the start of the link: in the middle, lines cross.
std::string label_statement(const line& x, const link_classes& classes,
                            const std::map<int, point>& places, std::size_t number) {
  auto text = word_of(*x.link);
  if (x.bandwidth > 0)
    text += "\\n" + format("%.0f", x.bandwidth) + " GB/s";
  const auto from = places.at(x.link->from);
  const auto to = places.at(x.link->to);
  constexpr double part = 0.34;
  return "  label" + std::to_string(number) + " [shape=plaintext, label=\"" + text +
         "\", fontsize=9, fontcolor=\"" + color_of(x, classes) +
         "\", fillcolor=white, margin=\"0.02,0.01\", width=0, height=0, " +
         position({from.x + part * (to.x - from.x), from.y + part * (to.y - from.y)}) + "]\n";
}

std::string legend_row(const std::string& color, const std::string& text) {
  return "<tr><td width=\"24\" bgcolor=\"" + color + "\"></td><td align=\"left\">" + escaped(text) +
         "</td></tr>";
}

std::string legend_rows(const link_classes& classes, bool any_slow, bool any_without,
                        bool any_islands) {
  std::string rows;
  for (auto& [word, x] : classes) {
    auto text = word + ": " + x.meaning + "; " + std::to_string(x.links) +
                (x.links == 1 ? " link" : " links");
    if (x.bandwidth.most > 0)
      text += "; " + text_of(x.bandwidth, "%.0f", " GB/s");
    if (x.bandwidth_both.most > 0)
      text += ", both directions " + text_of(x.bandwidth_both, "%.0f", " GB/s");
    if (x.latency.most > 0)
      text += ", " + text_of(x.latency, "%.1f", " us");
    rows += legend_row(x.color, text);
  }
  if (any_slow)
    rows += legend_row(slow_color, "slower than the others of its kind");
  if (any_without)
    rows += legend_row("white", "no line: no access, through the host's memory");
  if (any_islands)
    rows += legend_row("white", "devices of one color are an island: they reach each other");
  return rows;
}

std::string bandwidth_table(const p2p_graph& graph) {
  std::string rows;
  for (auto& row : matrix_of(graph, "X", [](const p2p_link& x) {
         return x.bandwidth > 0 ? format("%.0f", x.bandwidth) : std::string{"-"};
       })) {
    rows += "<tr>";
    for (auto& cell : row)
      rows += "<td align=\"right\">" + (cell.empty() ? "GB/s" : cell) + "</td>";
    rows += "</tr>";
  }
  return "<table border=\"0\" cellborder=\"1\" cellspacing=\"0\" cellpadding=\"3\" "
         "color=\"#b0b0b0\">" +
         rows + "</table>";
}

} // namespace

std::string link_matrix(const p2p_graph& graph) {
  auto rows = matrix_of(graph, "X", [](const p2p_link& x) { return word_of(x); });
  rows.front().insert(rows.front().end(), {"island", "phase"});
  for (std::size_t i = 0; i < graph.devices.size(); ++i) {
    auto& x = graph.devices[i];
    rows[i + 1].push_back(x.island < 0 ? "-" : std::to_string(x.island));
    rows[i + 1].push_back(std::string{to_string(x.phase)});
  }
  text_table table{rows.front()};
  std::for_each(rows.begin() + 1, rows.end(), [&](auto& x) { table.add(x); });

  std::map<std::string, std::string> words;
  std::string reasons;
  bool any_pending = false;
  for (auto& x : graph.links) {
    words.emplace(way_of(x), meaning_of(way_of(x)));
    any_pending = any_pending || x.access == peer_access::pending;
    if (x.access == peer_access::failed)
      reasons += "  " + name_of(x.from) + " to " + name_of(x.to) + ": " +
                 troupe::describe(x.reason) + '\n';
  }
  auto result = table.text() + "\nFrom the row's device to the column's:\n  X = itself\n";
  for (auto& [word, meaning] : words)
    result += "  " + word + " = " + meaning + '\n';
  if (any_pending)
    result += "  ? = not ready yet\n";
  if (!reasons.empty())
    result += "  ! = failed, and not used:\n" + reasons;
  return result;
}

std::string measured_matrices(const p2p_graph& graph) {
  return figures(graph, "Bandwidth, one direction, from the row's device to the column's (GB/s)",
                 "%.1f", [](auto& x) { return x.bandwidth; }) +
         '\n' +
         figures(graph, "Bandwidth, both directions at once, together (GB/s)", "%.1f",
                 [](auto& x) { return x.bandwidth_both; }) +
         '\n' +
         figures(graph, "Latency of 8 bytes (us)", "%.2f", [](auto& x) { return x.latency_us; });
}

std::string to_dot(const p2p_graph& graph, const std::string& title) {
  const auto classes = classes_of(graph);
  const auto lines = lines_of(graph, classes);
  const auto places = places_of(graph);
  const auto is_measured = [](const p2p_link& x) { return x.bandwidth > 0; };
  const bool any_slow = std::any_of(lines.begin(), lines.end(), [](auto& x) { return x.slow; });
  const bool any_without = std::any_of(graph.links.begin(), graph.links.end(),
                                       [](auto& x) { return x.access == peer_access::none; });

  auto legend = "<tr><td><b>" + escaped(title) + "</b></td></tr>";
  if (const auto rows = legend_rows(classes, any_slow, any_without, graph.islands().size() > 1);
      !rows.empty())
    legend += "<tr><td align=\"center\"><table border=\"0\" cellborder=\"0\" cellspacing=\"4\">" +
              rows + "</table></td></tr>";
  if (std::any_of(graph.links.begin(), graph.links.end(), is_measured))
    legend += "<tr><td>From the row's device to the column's</td></tr><tr><td align=\"center\">" +
              bandwidth_table(graph) + "</td></tr>";
  std::string result =
      "digraph topology {\n"
      "  graph [layout=neato, outputorder=edgesfirst, splines=line, fontname=\"Helvetica\", "
      "fontsize=11, pad=0.3, labelloc=b, label=<<table border=\"0\" cellspacing=\"2\">" +
      legend +
      "</table>>]\n"
      "  node [shape=ellipse, style=filled, fontname=\"Helvetica\", fontsize=13]\n"
      "  edge [arrowsize=0.8]\n";
  for (auto& x : graph.devices)
    result += device_statement(x, places.at(x.device));
  for (auto& x : lines)
    result += line_statement(x, classes);

  const bool label_all = lines.size() <= most_labels;
  const auto differing =
      std::count_if(lines.begin(), lines.end(), [](auto& x) { return x.differs; });
  std::size_t labels = 0;
  for (auto& x : lines)
    if (label_all || (x.differs && static_cast<std::size_t>(differing) <= most_labels))
      result += label_statement(x, classes, places, labels++);
  return result + "}\n";
}
