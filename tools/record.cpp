#include "record.hpp"

#include <nlohmann/json.hpp>

#include <array>
#include <cerrno>
#include <fstream>
#include <system_error>
#include <utility>

namespace flight {

namespace {

using nlohmann::json;

constexpr const char* format_name = "troupe flight record";
constexpr int format_version = 1;

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

std::string text_or_none(const json& x) { return x.is_null() ? "" : x.get<std::string>(); }

std::string memory_of(const json& refs) {
  std::string result;
  for (auto& x : refs)
    result += (result.empty() ? "" : ", ") + x.at("access").get<std::string>() + " buffer " +
              std::to_string(x.at("buffer").get<std::uint64_t>()) + " [" +
              std::to_string(x.at("begin").get<std::uint64_t>()) + ", " +
              std::to_string(x.at("end").get<std::uint64_t>()) + ")";
  return result;
}

part part_of(const json& x, int device) {
  part result;
  result.device = device;
  x.at("operation").get_to(result.operation);
  x.at("verb").get_to(result.verb);
  x.at("rank").get_to(result.rank);
  x.at("world").get_to(result.world);
  x.at("epoch").get_to(result.epoch);
  x.at("generation").get_to(result.generation);
  x.at("count").get_to(result.count);
  result.dtype = text_or_none(x.at("dtype"));
  result.memory = memory_of(x.at("refs"));
  x.at("stream").get_to(result.stream);
  x.at("admitted").get_to(result.admitted);
  x.at("issued").get_to(result.issued);
  x.at("started").get_to(result.started);
  x.at("over").get_to(result.over);
  result.at = state_of(x.at("state").get<std::string>());
  result.way = x.value("way", "");
  result.error = x.value("error", "");
  result.native_code = x.value("native_code", 0);
  return result;
}

device device_of(const json& x) {
  device result;
  x.at("device").get_to(result.ordinal);
  x.at("generation").get_to(result.generation);
  x.at("phase").get_to(result.phase);
  result.reason = text_or_none(x.at("reason"));
  x.at("next_waits_for").get_to(result.next_waits_for);
  for (auto& one : x.at("operations"))
    result.parts.push_back(part_of(one, result.ordinal));
  return result;
}

std::optional<cause> cause_of(const json& x) {
  if (x.is_null())
    return std::nullopt;
  return cause{x.at("text"), x.at("code"), x.at("time"), x.at("operation"), x.at("parts")};
}

record record_of(const json& x) {
  record result;
  x.at("host").get_to(result.host);
  x.at("process").get_to(result.process);
  x.at("time").get_to(result.time);
  x.at("unix_time").get_to(result.unix_time);
  result.why = cause_of(x.at("cause"));
  for (auto& world : x.at("worlds"))
    result.worlds.emplace(world.at("id"), world.at("name"));
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
