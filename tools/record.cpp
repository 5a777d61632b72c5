#include "record.hpp"

#include "foundation/peer_text.hpp"

#include <nlohmann/json.hpp>

#include <array>
#include <cerrno>
#include <cstddef>
#include <fstream>
#include <limits>
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
constexpr int most_rank = 4095;
constexpr int most_device = 1023;
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

/// Returns a whole number. One out of range would become another one unnoticed.
template <class T>
T number(const json& x, const char* name, T least = std::numeric_limits<T>::min(),
         T most = std::numeric_limits<T>::max()) {
  const auto& value = x.at(name);
  const auto fits = [=](auto v) {
    return std::in_range<T>(v) && static_cast<T>(v) >= least && static_cast<T>(v) <= most;
  };
  if (value.is_number_unsigned() ? fits(value.get<std::uint64_t>())
                                 : value.is_number_integer() && fits(value.get<std::int64_t>()))
    return value.get<T>();
  throw bad_record("\"" + std::string{name} + "\" is " +
                   peer_text(value.dump(-1, ' ', false, json::error_handler_t::replace)) +
                   ", and not a whole number from " + std::to_string(least) + " to " +
                   std::to_string(most));
}

/// @units ns
std::int64_t time_of(const json& x, const char* name) {
  constexpr std::int64_t most = std::int64_t{1} << 62; // so that differences do not overflow
  return number<std::int64_t>(x, name, 0, most);
}

std::string memory_of(const json& refs) {
  std::string result;
  for (auto& x : refs)
    result += (result.empty() ? "" : ", ") + text_of(x.at("access")) + " buffer " +
              std::to_string(number<std::uint64_t>(x, "buffer")) + " [" +
              std::to_string(number<std::uint64_t>(x, "begin")) + ", " +
              std::to_string(number<std::uint64_t>(x, "end")) + ")";
  return result;
}

part part_of(const json& x, int device) {
  part result;
  result.device = device;
  result.operation = number<std::uint64_t>(x, "operation");
  result.verb = text_of(x.at("verb"));
  result.rank = number(x, "rank", -1, most_rank);
  result.world = number<std::uint64_t>(x, "world");
  result.epoch = number<std::uint64_t>(x, "epoch");
  result.generation = number<std::uint64_t>(x, "generation");
  result.count = number<std::uint64_t>(x, "count");
  result.dtype = text_or_none(x.at("dtype"));
  result.memory = memory_of(x.at("refs"));
  result.stream = text_of(x.at("stream"));
  result.admitted = time_of(x, "admitted");
  result.issued = time_of(x, "issued");
  result.started = time_of(x, "started");
  result.over = time_of(x, "over");
  result.at = state_of(text_of(x.at("state")));
  result.way = member_or_none(x, "way");
  result.error = member_or_none(x, "error");
  if (x.contains("native_code"))
    result.native_code = number<int>(x, "native_code");
  return result;
}

device device_of(const json& x) {
  device result;
  result.ordinal = number(x, "device", 0, most_device);
  result.generation = number<std::uint64_t>(x, "generation");
  result.phase = text_of(x.at("phase"));
  result.reason = text_or_none(x.at("reason"), most_peer_text);
  result.next_waits_for = number<std::uint64_t>(x, "next_waits_for");
  for (auto& one : x.at("operations"))
    result.parts.push_back(part_of(one, result.ordinal));
  return result;
}

std::optional<cause> cause_of(const json& x) {
  if (x.is_null())
    return std::nullopt;
  cause result{text_of(x.at("text"), most_cause),
               text_of(x.at("code")),
               time_of(x, "time"),
               number<std::uint64_t>(x, "operation"),
               {}};
  for (auto& part : x.at("parts"))
    result.parts.push_back(text_of(part));
  return result;
}

record record_of(const json& x) {
  record result;
  result.host = text_of(x.at("host"));
  result.process = number<std::int64_t>(x, "process", 0);
  result.time = time_of(x, "time");
  result.unix_time = time_of(x, "unix_time");
  result.why = cause_of(x.at("cause"));
  for (auto& world : x.at("worlds"))
    result.worlds.emplace(number<std::uint64_t>(world, "id"), text_of(world.at("name")));
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
