#include "flight_trace.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <set>
#include <utility>

namespace flight {

namespace {

using nlohmann::json;

/// One row of the viewer.
struct track {
  int process = 0;
  int thread = 0;

  friend bool operator<(const track& a, const track& b) {
    return std::pair{a.process, a.thread} < std::pair{b.process, b.thread};
  }
};

struct slice {
  const part* of = nullptr;
  track where;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Numbers of processes and threads, and their names. A thread number is unique in the file and
/// never 0, since some viewers misread duplicates and 0.
class directory {
public:
  explicit directory(const record& x) : x_(x) {}

  track of(const part& p) {
    auto process = this->process(p);
    auto& streams = streams_[process];
    auto row = p.rank;
    if (p.world == 0)
      row = static_cast<int>(streams.try_emplace(p.stream, streams.size()).first->second);
    track result{process, process * threads_per_process + row + 1};
    if (named_.insert(result).second) {
      name("thread_name", result,
           p.world == 0
               ? p.stream
               : "rank " + std::to_string(p.rank) + ", device " + std::to_string(p.device));
      add("thread_sort_index", result, {{"sort_index", row}});
    }
    return result;
  }

  const std::vector<json>& events() const { return events_; }

private:
  static constexpr int threads_per_process = 10'000;

  int process(const part& p) {
    auto key =
        p.world != 0 ? std::pair{0, p.world} : std::pair{1, static_cast<std::uint64_t>(p.device)};
    auto [i, is_new] = processes_.try_emplace(key, static_cast<int>(processes_.size()) + 1);
    if (is_new) {
      track where{i->second, i->second * threads_per_process + 1};
      auto world = x_.worlds.find(p.world);
      name("process_name", where,
           p.world == 0 ? "device " + std::to_string(p.device)
                        : "world " + std::to_string(p.world) +
                              (world != x_.worlds.end() ? ": " + world->second : ""));
      auto order = static_cast<std::uint64_t>(key.first) * 1'000'000 + key.second;
      add("process_sort_index", where, {{"sort_index", order}});
    }
    return i->second;
  }
  void name(const char* what, const track& where, const std::string& text) {
    add(what, where, {{"name", text}});
  }
  void add(const char* what, const track& where, json args) {
    events_.push_back({{"ph", "M"},
                       {"name", what},
                       {"pid", where.process},
                       {"tid", where.thread},
                       {"ts", 0},
                       {"args", std::move(args)}});
  }

  const record& x_;
  std::map<std::pair<int, std::uint64_t>, int> processes_;
  std::map<int, std::map<std::string, std::size_t>> streams_;
  std::set<track> named_;
  std::vector<json> events_;
};

/// Viewers cut off fractions of a microsecond, some to the nanosecond below. So slices that touch
/// would overlap and be dropped.
constexpr std::int64_t gap = 2;

std::int64_t begin_of(const part& p) {
  return p.started != 0 ? p.started : p.issued != 0 ? p.issued : p.admitted;
}

std::int64_t earliest(const record& x) {
  auto result = x.time;
  for (auto& device : x.devices)
    for (auto& p : device.parts)
      for (auto time : {p.admitted, p.issued, p.started, p.over})
        if (time != 0)
          result = std::min(result, time);
  return result;
}

std::vector<slice> slices_of(const record& x, directory& names) {
  std::vector<slice> result;
  for (auto& device : x.devices)
    for (auto& p : device.parts)
      result.push_back({&p, names.of(p), begin_of(p), p.over != 0 ? p.over : x.time});
  std::stable_sort(result.begin(), result.end(),
                   [](const slice& a, const slice& b) { return a.begin < b.begin; });
  // Waiting and running parts of a stream share a row, which holds one slice at a time.
  std::map<track, std::int64_t> taken_until;
  for (auto& s : result) {
    auto& until =
        taken_until.try_emplace(s.where, std::numeric_limits<std::int64_t>::min()).first->second;
    s.begin = std::max(s.begin, until);
    s.end = std::max(s.end, s.begin);
    until = s.end + gap;
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const slice& a, const slice& b) { return a.begin < b.begin; });
  return result;
}

/// @units ns to us
double microseconds(std::int64_t x) { return static_cast<double>(x) / 1e3; }

json arguments_of(const part& p, std::int64_t zero) {
  json result{{"operation", p.operation}, {"state", to_string(p.at)},   {"count", p.count},
              {"dtype", p.dtype},         {"generation", p.generation}, {"memory", p.memory}};
  if (p.world != 0) {
    result["epoch"] = p.epoch;
    result["device"] = p.device;
  }
  if (!p.way.empty())
    result["way"] = p.way;
  for (auto& [name, time] : {std::pair{"admitted_us", p.admitted},
                             {"issued_us", p.issued},
                             {"started_us", p.started},
                             {"over_us", p.over}})
    if (time != 0)
      result[name] = microseconds(time - zero);
  if (!p.error.empty())
    result["error"] = p.error;
  if (p.native_code != 0)
    result["native_code"] = p.native_code;
  return result;
}

} // namespace

std::string trace(const record& x) {
  directory names{x};
  const auto slices = slices_of(x, names);
  const auto zero = earliest(x);
  // Not as one JSON value, which would take ten times the memory of the text.
  std::string result = R"({"displayTimeUnit":"ns","traceEvents":[)";
  const char* separator = "\n";
  const auto add = [&](const json& event) {
    result += separator + event.dump();
    separator = ",\n";
  };
  for (auto& event : names.events())
    add(event);
  for (auto& s : slices) {
    json event{{"ph", "X"},
               {"name", s.of->verb},
               {"cat", s.of->stream},
               {"pid", s.where.process},
               {"tid", s.where.thread},
               {"ts", microseconds(s.begin - zero)},
               {"dur", microseconds(s.end - s.begin)},
               {"args", arguments_of(*s.of, zero)}};
    if (!s.of->error.empty())
      event["cname"] = "terrible";
    add(event);
  }
  json about{{"host", x.host}, {"process", x.process}, {"unix_time", x.unix_time}};
  if (x.why)
    about["cause"] = x.why->text;
  return result + "],\n\"otherData\":" + about.dump() + "}\n";
}

} // namespace flight
