#include "record.hpp"

#include "foundation/peer_text.hpp"

#include <nlohmann/json.hpp>

#include <array>
#include <cerrno>
#include <cstddef>
#include <fstream>
#include <system_error>
#include <utility>

namespace flight {

namespace {

using nlohmann::json;
using troupe::detail::most_peer_name;
using troupe::detail::most_peer_text;
using troupe::detail::peer_text;

constexpr const char* format_name = "troupe flight record";
constexpr int format_version = 1;
/// The largest text of a cause, which lists all ranks. @units bytes
constexpr std::size_t most_cause = 64 << 10;

constexpr std::array<std::pair<const char*, state>, 7> states{{{"not called", state::not_called},
                                                               {"not issued", state::not_issued},
                                                               {"issuing", state::issuing},
                                                               {"issued", state::issued},
                                                               {"started", state::started},
                                                               {"done", state::done},
                                                               {"failed", state::failed}}};

state state_of(const std::string& name) {
  for (auto& [text, x] : states)
    if (name == text)
      return x;
  throw bad_record("\"" + name + "\" is no state of an operation");
}

std::string text_of(const json& x, std::size_t most = most_peer_name) {
  return peer_text(x.get_ref<const std::string&>(), most);
}

std::string text_or_none(const json& x, std::size_t most = most_peer_name) {
  return x.is_null() ? "" : text_of(x, most);
}

std::string member_or_none(const json& x, const char* name) {
  const auto i = x.find(name);
  return i == x.end() ? "" : text_of(*i);
}

std::string memory_of(const json& refs) {
  std::string result;
  for (auto& x : refs)
    result += (result.empty() ? "" : ", ") + text_of(x.at("access")) + " buffer " +
              std::to_string(x.at("buffer").get<std::uint64_t>()) + " [" +
              std::to_string(x.at("begin").get<std::uint64_t>()) + ", " +
              std::to_string(x.at("end").get<std::uint64_t>()) + ")";
  return result;
}

part part_of(const json& x, int device) {
  part result;
  result.device = device;
  x.at("operation").get_to(result.operation);
  result.verb = text_of(x.at("verb"));
  x.at("rank").get_to(result.rank);
  x.at("world").get_to(result.world);
  x.at("epoch").get_to(result.epoch);
  x.at("generation").get_to(result.generation);
  x.at("count").get_to(result.count);
  result.dtype = text_or_none(x.at("dtype"));
  result.memory = memory_of(x.at("refs"));
  result.stream = text_of(x.at("stream"));
  x.at("admitted").get_to(result.admitted);
  x.at("issued").get_to(result.issued);
  x.at("started").get_to(result.started);
  x.at("over").get_to(result.over);
  result.at = state_of(text_of(x.at("state")));
  result.way = member_or_none(x, "way");
  result.error = member_or_none(x, "error");
  result.native_code = x.value("native_code", 0);
  return result;
}

device device_of(const json& x) {
  device result;
  x.at("device").get_to(result.ordinal);
  x.at("generation").get_to(result.generation);
  result.phase = text_of(x.at("phase"));
  result.reason = text_or_none(x.at("reason"), most_peer_text);
  x.at("next_waits_for").get_to(result.next_waits_for);
  for (auto& one : x.at("operations"))
    result.parts.push_back(part_of(one, result.ordinal));
  return result;
}

std::optional<cause> cause_of(const json& x) {
  if (x.is_null())
    return std::nullopt;
  cause result{text_of(x.at("text"), most_cause),
               text_of(x.at("code")),
               x.at("time"),
               x.at("operation"),
               {}};
  for (auto& part : x.at("parts"))
    result.parts.push_back(text_of(part));
  return result;
}

record record_of(const json& x) {
  record result;
  result.host = text_of(x.at("host"));
  x.at("process").get_to(result.process);
  x.at("time").get_to(result.time);
  x.at("unix_time").get_to(result.unix_time);
  result.why = cause_of(x.at("cause"));
  for (auto& world : x.at("worlds"))
    result.worlds.emplace(world.at("id"), text_of(world.at("name")));
  for (auto& one : x.at("devices"))
    result.devices.push_back(device_of(one));
  return result;
}

json parse(const std::string& path) {
  std::ifstream in{path};
  if (!in)
    throw bad_record("cannot read " + path + ": " + std::generic_category().message(errno));
  try {
    return json::parse(in);
  } catch (const json::exception& e) {
    throw bad_record(path + " is not JSON: " + e.what());
  }
}

} // namespace

const char* to_string(state x) { return states[static_cast<std::size_t>(x)].first; }

record read_record(const std::string& path) {
  auto x = parse(path);
  if (!x.is_object() || !x.contains("format") || x["format"] != format_name)
    throw bad_record(path + " is JSON, but no flight record of troupe");
  if (!x.contains("version") || x["version"] != format_version)
    throw bad_record(path + " has version " +
                     (x.contains("version") ? x["version"].dump() : "none") +
                     " of the form; this program reads version " + std::to_string(format_version));
  try {
    return record_of(x);
  } catch (const json::exception& e) {
    throw bad_record(path + " is no whole flight record: " + e.what());
  } catch (const bad_record& e) {
    throw bad_record(path + " is no right flight record: " + e.what());
  }
}

} // namespace flight
